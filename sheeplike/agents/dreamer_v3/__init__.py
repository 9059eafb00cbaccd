"""DreamerV3 as its authors' code stands today: block-diagonal GRU, LaProp, replay critic, stored latents."""

from typing import Any

from sheeplike.agents.dreamer_v3.config import SIZES, DreamerV3Config, LossScales, Size

__all__ = ["SIZES", "DreamerV3", "DreamerV3Config", "LossScales", "Size"]


def __getattr__(name: str) -> Any:
    """``DreamerV3``, loaded when it is asked for: its options need no torch."""
    if name == "DreamerV3":
        from sheeplike.agents.dreamer_v3.agent import DreamerV3

        return DreamerV3
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
