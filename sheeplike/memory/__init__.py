"""What an agent remembers: sequences to replay."""

from sheeplike.memory.replay import SequenceReplay

__all__ = ["SequenceReplay"]
