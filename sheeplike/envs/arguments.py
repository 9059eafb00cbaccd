"""What every vector environment is told: its device, its seed, the size of its images."""

from collections.abc import Sequence

import torch

ImageSize = int | Sequence[int]
"""Pixels a side, or ``(height, width)``."""


def resolve_image_size(image_size: ImageSize) -> tuple[int, int]:
    """``64`` or ``(48, 64)`` to ``(height, width)``.

    Raises:
        ValueError: not one or two positive whole numbers.
    """
    one = isinstance(image_size, int)
    pair = (image_size, image_size) if one else tuple(image_size) if isinstance(image_size, Sequence) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ValueError(f"image_size={image_size!r}: expected a positive int or (height, width), such as (48, 64)")
    return pair


def check_seed(seed: int) -> int:
    """Returns the seed.

    Raises:
        ValueError: not an int in [0, 2**32).
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: expected an int in [0, 2**32), such as 0")
    return seed


def resolve_device(device: torch.device | str) -> torch.device:
    """The torch device, its index filled in.

    Raises:
        ValueError: a device that torch does not have here.
    """
    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: expected 'cpu', 'cuda' or 'cuda:<index>'")
    if resolved.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: torch finds no CUDA device here; expected 'cpu'")
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)
