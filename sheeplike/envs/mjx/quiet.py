"""MuJoCo's warnings, which it writes to a file in the working directory."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mujoco

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
