"""How often Warp captures a CUDA graph: at every new set of buffer addresses, which a simulation must run out of soon.

On a GPU Warp captures what a call launches as a graph and replays it as long as the call comes with the same addresses;
with others it captures anew, which costs more than the launches did. The state is donated to keep them, but it is XLA
that chooses them, so this has to be counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import warp


@dataclass
class Captures:
    """What :func:`count_captures` has seen."""

    count: int = 0
    """Graphs captured so far."""


@contextmanager
def count_captures() -> Iterator[Captures]:
    """Counts Warp's captures in this process, in all its threads, while the context is open.

    Wait for the device before the context is left: a capture is counted when the call is made, not when it is
    dispatched. Captures that JAX has begun, to make Warp's launches a part of its own, are not counted.
    """
    captures, begin = Captures(), warp.capture_begin

    def counted(*args: Any, external: bool = False, **options: Any) -> Any:
        captures.count += not external
        return begin(*args, external=external, **options)

    warp.capture_begin = counted  # through which every capture goes, looked up at each call
    try:
        yield captures
    finally:
        warp.capture_begin = begin
