"""Images as numbers from 0 to 1, whatever they show."""

from __future__ import annotations

import torch
from torch import Tensor


def to_unit(image: Tensor) -> Tensor:
    """Any image as float32 in [0, 1], of the same shape.

    Colours, uint8, are divided by 255. Depth ``d`` in metres, float32, becomes ``d / (1 + d)``: fine where it is near,
    a hundredth of the range from 99 m to infinity. 0 m, where a renderer hit nothing, is 0; below is 0 too.
    """
    if image.dtype == torch.uint8:
        return image.float() / 255
    # The same as d / (1 + d), also where d is infinite.
    return 1 - 1 / (1 + image.float().clamp_min(0))
