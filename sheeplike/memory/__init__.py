"""Memory of an agent: sequences to replay, or the steps since the last update."""

from sheeplike.memory.replay import MixedReplay, SequenceReplay
from sheeplike.memory.rollout import Rollout

__all__ = ["MixedReplay", "Rollout", "SequenceReplay"]
