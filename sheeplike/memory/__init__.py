"""Memory of an agent: sequences to replay, or the steps since the last update."""

from sheeplike.memory.replay import SequenceReplay
from sheeplike.memory.rollout import Rollout

__all__ = ["Rollout", "SequenceReplay"]
