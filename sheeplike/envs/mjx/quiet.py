"""What libraries would write: MuJoCo its warnings into the working directory, and Warp that there is no GPU."""

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
    """Drops them, of the whole process: environments may step at the same time, and the last to leave restores what
    was there before."""
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
    """Start Warp, which tells of nothing but problems; that there is no GPU is none on a machine without one."""
    warp.config.log_level = max(warp.config.log_level, warp.LOG_WARNING)
    with nullcontext() if torch.cuda.is_available() else _stderr_is_lost():
        warp.init()


@contextmanager
def _stderr_is_lost() -> Iterator[None]:
    """What is written to the descriptor of stderr, by whatever language, is lost."""
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
