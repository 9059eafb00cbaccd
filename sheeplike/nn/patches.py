"""Patches of torch's private parts, read from torch 2.11 to 2.13; on another version of torch check these first."""

from __future__ import annotations

import functools
import os
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor


def keep_headers() -> None:
    """Have Inductor keep its precompiled headers, 140 MB, beside its kernels.

    torch puts them into the system's directory for temporary files, under a name that another user can guess and take
    first; and the content of a header becomes part of the code that runs.
    """
    from torch._inductor import codecache
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    place = os.path.join(cache_dir(), "precompiled_headers")
    codecache._HEADER_DIR, codecache._HEADER_LOCK_DIR = place, os.path.join(place, "locks")


@functools.cache
def optimize_less() -> None:
    """Have Inductor call the C++ compiler with ``-O2``: that takes a third less time, and the code is as fast."""
    from torch._inductor import cpp_builder

    flags = cpp_builder._get_optimization_cflags

    def with_o2(*args: Any, **kwargs: Any) -> tuple[list[str], list[str]]:
        compiler, linker = flags(*args, **kwargs)
        return ["O2" if flag == "O3" else flag for flag in compiler], linker

    cpp_builder._get_optimization_cflags = with_o2


def without_line_tables() -> dict[str, bool]:
    """Return the option of Inductor that leaves out tables for debuggers, a third of its C++ compiler's time."""
    from torch._inductor import list_options

    name = "aot_inductor.enable_line_tables"
    return {name: False} if name in list_options() else {}


def end_capture(device: torch.device, random: Tensor, pool: Any) -> None:
    """Make torch usable again after a failed capture, which leaves its allocator and generator capturing.

    ``random`` is the generator's state before the capture. The allocator of pinned memory stays in the capture, which
    costs a lock per allocation. RuntimeError if the context of the device is lost.
    """
    torch.cuda.synchronize(device)
    index = torch.cuda._utils._get_device_index(device, optional=True)
    # If the capture ended well, although Python raised in it, the graph frees the pool: a second release would abort.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
    generator = torch.cuda.default_generators[index]
    generator.graphsafe_set_state(generator.clone_state())
    generator.set_state(random)


def silence_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Silence the warning of a capturable optimizer that is not captured."""
    optimizer._warned_capturable_if_run_uncaptured = True
