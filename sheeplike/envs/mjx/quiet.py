"""Silence libraries: MuJoCo's log file in the working directory, Warp's "no GPU" notice."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import mujoco
import torch
import warp

_lock = threading.Lock()
_inside = 0
_before: Callable[[str], None] | None = None


@contextmanager
def quiet() -> Iterator[None]:
    """Drop MuJoCo's warnings in the whole process; the last of the threads inside restores the handler from before."""
    global _inside, _before
    with _lock:
        if not _inside:
            _before = mujoco.get_mju_user_warning()
            mujoco.set_mju_user_warning(lambda _: None)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                mujoco.set_mju_user_warning(_before)


def start_warp() -> None:
    """Start Warp, silent about anything but problems; on a machine without a GPU its absence is none."""
    warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
    with nullcontext() if torch.cuda.is_available() else _stderr_is_lost():
        warp.init()


@contextmanager
def _stderr_is_lost() -> Iterator[None]:
    """Discard all writes to the descriptor of stderr."""
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
