"""Private parts of MuJoCo's MJX, and of MJX-Warp within it, that are replaced here; read from version 3.17.0.

On a new version of MuJoCo, compare each of these with the original that it names.
:mod:`sheeplike.envs.mjx.randomization.fields` reads one more private name, ``mujoco.mjx.warp.types._BATCH_DIM``.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import jax
import mujoco
import torch
import warp as wp
from mujoco import mjx
from mujoco.mjx.warp import ffi, forward

Step = Callable[[mjx.Model, mjx.Data], mjx.Data]
mjx_forward = mjx.forward  # MJX's own function, also inside `replace_engine`


@functools.cache
def repeat_step(number: int) -> Step:
    """Return ``mjx.step`` repeated ``number`` times in a single call from XLA to Warp.

    Each call reads the addresses of some 560 arrays in Python, and on a GPU looks up the CUDA graph that was captured
    with them: a scan would do so for each step. Replaces ``mujoco.mjx.warp.forward._step_shim``.
    """
    once = forward._step_shim

    @functools.wraps(once)  # Warp reads the arguments from the signature
    def repeated(*arguments: Any) -> None:
        # Each step starts from the results of the one before: Warp changes its arrays in place.
        for _ in range(number):
            once(*arguments)

    # The decorators are those of MJX's own step.
    @jax.custom_batching.custom_vmap
    @ffi.marshal_jax_warp_callable
    def step(model: mjx.Model, data: mjx.Data) -> mjx.Data:
        with mock.patch.object(forward, "_step_shim", repeated):
            return forward._step_jax_impl(model, data)

    @step.def_vmap
    @ffi.marshal_custom_vmap
    def step_all(_: int, batched: list[Any], model: mjx.Model, data: mjx.Data) -> tuple[mjx.Data, Any]:
        return step(model, data), batched[1]

    return step


def replace_engine(step: Step, forward: Step) -> AbstractContextManager:
    """Call these in place of ``mjx.step`` and ``mjx.forward`` in code of other libraries that is traced inside."""
    return mock.patch.multiple(mjx, step=step, forward=forward)


@contextmanager
def hide_side_effects() -> Iterator[None]:
    """Hide the side effects of refit and render from XLA.

    JAX dispatches a computation with side effects in Python, leaf by leaf: 3 to 5 ms for each step of the worlds. XLA
    need not know of them: the token in the data orders these calls, and the delivered frames keep XLA from dropping
    them. Replaces ``mujoco.mjx.warp.ffi.jax_callable_variadic_tuple``.
    """
    declared = ffi.jax_callable_variadic_tuple

    def undeclared(*args: Any, has_side_effect: bool = False, **options: Any) -> Any:
        return declared(*args, **options)

    with mock.patch.object(ffi, "jax_callable_variadic_tuple", undeclared):
        yield


def drop_warnings() -> None:
    """Drop MuJoCo's warnings, such as that of a world that diverges, in the whole process.

    Otherwise MuJoCo writes them to a file in the working directory.
    """
    mujoco.set_mju_user_warning(lambda _: None)


def start_warp() -> None:
    """Start Warp, reporting only problems; its complaint about a missing GPU is dropped where torch finds none."""
    wp.config.log_level = max(wp.config.log_level, wp.LOG_WARNING)
    with nullcontext() if torch.cuda.is_available() or sys.stderr is None else _discard_stderr():
        wp.init()


@contextmanager
def _discard_stderr() -> Iterator[None]:
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
