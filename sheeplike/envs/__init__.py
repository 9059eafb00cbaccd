"""Environments by name.

``make("franka_pick", num_envs=16)`` builds one; ``list_envs()`` names them all. Importing this package imports neither
JAX nor torch: a task is imported when it is made. Installed packages add environments as entry points of
``sheeplike.envs``, which are imported when they are chosen.
"""

from sheeplike.envs.contract import Unusable
from sheeplike.envs.registry import check, list_envs, make, origins, simulated, task_options
from sheeplike.options import InvalidOption

__all__ = ["InvalidOption", "Unusable", "check", "list_envs", "make", "origins", "simulated", "task_options"]
