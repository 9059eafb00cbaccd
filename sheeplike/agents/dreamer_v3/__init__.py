"""DreamerV3 as its authors' code stands today: block-diagonal GRU, LaProp, replay critic, stored latents."""

from sheeplike.agents.dreamer_v3.agent import DreamerV3
from sheeplike.agents.dreamer_v3.sizes import SIZES, Size

__all__ = ["SIZES", "DreamerV3", "Size"]
