"""World models that learn from camera pixels, in a simulation that never leaves the accelerator.

``sheeplike.init("exp=ppo", "env=cartpole_balance")`` begins a run in a program, ``sheeplike.load("demo:franka_pick")``
loads a trained world model.

The import loads nothing heavy. It tells JAX not to reserve the GPU, and compilers where to keep their output.
"""

import importlib
import os
import sys
from typing import Any

from sheeplike import caches

__version__ = "0.1.0"

# torch's threads spin while they wait for each other; with the default, an update takes five times as long where
# another process wants a core. GNU's OpenMP reads this when torch is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_MEMORY_SETTINGS = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


def _share_gpu_memory() -> bool:
    """Keep XLA from reserving 75 % of the GPU's memory, unless the user has set that; True if XLA runs already."""
    if any(name in os.environ for name in _MEMORY_SETTINGS):
        return False
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    xla_bridge = sys.modules.get("jax._src.xla_bridge")
    return xla_bridge is not None and xla_bridge.backends_are_initialized()


_LATER = {
    "init": "sheeplike.run.experiment",  # begins a run
    "load": "sheeplike.inspection.model",  # a trained world model
}

__all__ = ["__version__", "init", "load"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Load ``init`` and ``load`` when they are first used, since torch and JAX take seconds."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


xla_started_before_import = _share_gpu_memory()
caches.persist()
