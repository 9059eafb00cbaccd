"""A Python function called inside a compiled step, on a CPU, with NumPy views of XLA's own buffers.

``jax.pure_callback`` hands over JAX arrays, and to read one may wait for the very thread that makes the call. Here
nothing is copied and nothing waits: Warp's foreign function interface passes the buffers themselves.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import warp as wp

_DTYPES = {
    np.dtype(np.float32): wp.float32,
    np.dtype(np.int32): wp.int32,
    np.dtype(np.uint32): wp.uint32,
    np.dtype(bool): wp.bool,
}


class HostCall:
    """Calls ``method(*inputs, *outputs)``, which fills the outputs, each time that the compiled computation gets there.

    Args:
        method: bound, of an object that lives as long as what calls it: JAX keeps what is registered for ever, so this
            holds its object weakly.
        inputs: float32, int32, uint32 or bool; their shapes and dtypes are those of every call.
        outputs: what comes back.
    """

    def __init__(
        self,
        method: Callable[..., None],
        inputs: Sequence[jax.ShapeDtypeStruct | jax.Array],
        outputs: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        weak, name = weakref.WeakMethod(method), method.__name__

        def call(*arrays: wp.array) -> None:
            function = weak()
            if function is None:
                raise RuntimeError(f"{name}() of an environment that is gone")
            function(*(array.numpy() for array in arrays))

        names = [f"in{i}" for i in range(len(inputs))] + [f"out{i}" for i in range(len(outputs))]
        types = [wp.array(dtype=_DTYPES[np.dtype(leaf.dtype)], ndim=len(leaf.shape)) for leaf in (*inputs, *outputs)]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        pairs = list(zip(names, types, strict=True))
        call.__signature__ = inspect.Signature([inspect.Parameter(name, kind, annotation=t) for name, t in pairs])
        call.__annotations__ = dict(pairs)
        self._call: Any = wp.jax_callable(
            call,
            num_outputs=len(outputs),
            graph_mode=wp.JaxCallableGraphMode.NONE,
            output_dims={f"out{i}": leaf.shape for i, leaf in enumerate(outputs)},
        )

    def __call__(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        """The outputs, as new arrays."""
        return tuple(self._call(*inputs))
