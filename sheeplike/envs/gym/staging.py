"""From arrays on the host to tensors on the device, in one transfer."""

from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT = 64  # bytes: every tensor begins at an address that suits its dtype, and the device's reads


class Staging:
    """Sends the same named arrays again and again.

    On a GPU, each call packs all of them into one pinned buffer, from which one copy is queued that nobody waits for.
    The buffer is a new one while the last is still being read: torch's allocator of pinned memory hands out none whose
    copies have not finished. On a CPU, each array is copied once, out of the memory that its owner writes again.

    Args:
        arrays: name to shape and dtype.
        device: where the tensors appear.
    """

    def __init__(self, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype]], device: torch.device) -> None:
        self.device = device
        self._places: dict[str, tuple[slice, tuple[int, ...], np.dtype, torch.dtype]] = {}
        size = 0
        for name, (shape, dtype) in arrays.items():
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            kind = torch.from_numpy(np.empty(0, dtype)).dtype
            self._places[name] = slice(size, size + count), shape, np.dtype(dtype), kind
            size += -(-count // ALIGNMENT) * ALIGNMENT
        self._size = size

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Tensors of the arrays as they are now; they share nothing with them."""
        if self.device.type == "cpu":
            return {
                name: torch.from_numpy(np.array(arrays[name], dtype).reshape(shape))
                for name, (_, shape, dtype, _) in self._places.items()
            }
        packed = torch.empty(self._size, dtype=torch.uint8, pin_memory=True)
        host = packed.numpy()
        for name, (place, shape, dtype, _) in self._places.items():
            host[place].view(dtype).reshape(shape)[...] = arrays[name]
        there = packed.to(self.device, non_blocking=True)
        return {name: there[place].view(kind).view(shape) for name, (place, shape, _, kind) in self._places.items()}
