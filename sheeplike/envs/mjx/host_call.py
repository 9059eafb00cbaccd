"""A Python function called inside a compiled step, on a CPU, with NumPy views of XLA's own buffers.

``jax.pure_callback`` hands over JAX arrays, and reading one may wait for the very thread that makes the call. Here
nothing is copied and nothing waits: Warp's foreign function interface passes the buffers themselves.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import warp as wp


def call_for_all(
    method: Callable[..., None],
    argument: object,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct | jax.Array],
    *,
    num_envs: int,
) -> tuple[jax.Array, ...]:
    """Return the outputs of one world; traced inside a ``vmap`` over all worlds, for which ``method`` is called once.

    ``method(argument, *inputs, *outputs)`` gets arrays (N, ...) and fills the outputs. Its object is held weakly, since
    JAX keeps for ever what is registered. ``inputs`` are not empty: float32, int32, uint32 or bool.
    """

    def call_once(size: int, batched: list[bool], *inputs: jax.Array) -> tuple[tuple[jax.Array, ...], Any]:
        own = [
            value if each else jnp.broadcast_to(value, (size, *value.shape))
            for value, each in zip(inputs, batched, strict=True)
        ]
        shapes = {f"output{i}": (num_envs, *output.shape) for i, output in enumerate(outputs)}
        ranks = {f"input{i}": value.ndim for i, value in enumerate(own)} | {name: len(shapes[name]) for name in shapes}
        types = {
            name: wp.array(dtype=wp.dtype_from_jax(array.dtype), ndim=ranks[name])
            for name, array in zip(ranks, (*own, *outputs), strict=True)
        }
        function = _with_signature(method, argument, types)
        mode = wp.JaxCallableGraphMode.NONE
        made = wp.jax_callable(function, num_outputs=len(outputs), graph_mode=mode, output_dims=shapes)
        return tuple(made(*own)), (True,) * len(outputs)

    @jax.custom_batching.custom_vmap
    def call(*inputs: jax.Array) -> tuple[jax.Array, ...]:
        # Nothing differs between worlds, as when an episode begins without a draw: each has the result of all.
        results, _ = call_once(num_envs, [False] * len(inputs), *inputs)
        return tuple(result[0] for result in results)

    call.def_vmap(call_once)
    return call(*inputs)


def _with_signature(method: Callable[..., None], argument: object, types: dict[str, wp.array]) -> Callable[..., None]:
    """Return the function that Warp registers, with a signature from which Warp reads the arguments."""
    weak, name = weakref.WeakMethod(method), method.__name__

    def call(*arrays: wp.array) -> None:
        function = weak()
        if function is None:
            raise RuntimeError(f"{name}() of an environment that is gone")
        function(argument, *(array.numpy() for array in arrays))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind, annotation=t) for name, t in types.items()])
    call.__annotations__ = types
    return call
