"""Memory of an agent: sequences to replay, or the steps since the last update."""

from sheeplike.memory.mixed import MixedReplay
from sheeplike.memory.replay import SequenceReplay
from sheeplike.memory.rollout import Rollout

__all__ = ["MixedReplay", "Rollout", "SequenceReplay"]
