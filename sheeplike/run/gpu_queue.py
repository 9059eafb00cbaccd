"""A limit on how far the host runs ahead of a GPU."""

from collections import deque

import torch

RUN_AHEAD = 4  # updates, or iterations without one, that may be queued: a stop has to wait for them


class GpuQueue:
    """Bounds the work that is queued on a GPU; does nothing on another device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._queued = device.type == "cuda", deque()

    def limit(self) -> None:
        """Wait until the GPU is at most ``RUN_AHEAD`` calls of this method behind."""
        if self._on_gpu:
            self._queued.append(torch.cuda.Event())
            self._queued[-1].record()
            if len(self._queued) > RUN_AHEAD:
                self._queued.popleft().synchronize()
