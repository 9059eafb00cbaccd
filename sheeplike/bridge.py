"""The same memory seen by JAX and by torch, through DLPack. Nothing is copied; what cannot be shared is refused.

Rules for callers that hold both ends (the vector env is the model):

- **JAX to torch hands the array over.** A tensor from :func:`to_torch` writes straight into the JAX array, which JAX
  believes to be immutable. Pass arrays that JAX never reads again, such as the fresh outputs of a step.
- **torch to JAX forbids writing until JAX is done.** JAX computes asynchronously, on the CPU too. Pass a tensor made
  for this one call, never a buffer that is written again.
- **An array that torch holds must not be donated.** XLA would silently keep the old buffer: memory grows, addresses
  move, and CUDA graphs keyed by address are captured anew.
- **Whole tensors, not slices.** XLA wants 64-byte alignment on the CPU. A misaligned view is refused, not copied.
- **Arrays made here are committed** to their device, and ``jax.jit`` compiles a function once more for committed
  arguments: ``jax.device_put`` the seed key on the device first.
- **CUDA streams.** Both functions order the consumer's stream after the producer's *current* stream, without a host
  synchronisation. Nothing orders a write after a read: hold on to the last two actions and outputs.

``SHEEPLIKE_SYNC=1`` makes both functions wait for the device. A result that changes with it is a stream hazard.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import torch

import sheeplike

SHARED = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "bfloat16", "float32")
_JAX_DTYPES = frozenset(jnp.dtype(name) for name in SHARED)
_TORCH_DTYPES = frozenset(getattr(torch, name) for name in SHARED)


if sheeplike.xla_started_before_import and jax.default_backend() == "gpu":
    warnings.warn(
        "jax started its GPU backend before sheeplike was imported and has reserved 75 % of the GPU's memory: "
        "import sheeplike first, or set XLA_PYTHON_CLIENT_PREALLOCATE=false",
        RuntimeWarning,
        stacklevel=2,
    )


def _sync() -> bool:
    return os.environ.get("SHEEPLIKE_SYNC", "0") not in ("", "0")


def to_torch(array: jax.Array) -> torch.Tensor:
    """Return the memory of a concrete, row-major array on one device as a torch tensor, which keeps it alive."""
    assert isinstance(array, jax.Array), f"to_torch: {type(array)}: capsules can be read only once"
    assert not isinstance(array, jax.core.Tracer), "to_torch: a tracer inside of jit or vmap"
    assert array.dtype in _JAX_DTYPES, f"to_torch: {array.dtype}; of a PRNG key pass jax.random.key_data(key)"
    assert not array.is_deleted(), f"to_torch: {array.aval.str_short()} was donated or deleted: pass fresh outputs"
    assert len(array.devices()) == 1, f"to_torch: array on {len(array.devices())} devices"
    if _sync():
        jax.block_until_ready(array)
    tensor = torch.from_dlpack(array)
    assert tensor.is_contiguous(), f"to_torch: strides {tensor.stride()}, expected a row-major layout"
    return tensor


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return the memory of ``tensor`` as a JAX array of the same shape, dtype and device, which it keeps alive.

    The tensor must not be written until JAX has done all work on the array: pass one made for this call.
    """
    assert isinstance(tensor, torch.Tensor), f"to_jax: {type(tensor)}: capsules can be read only once"
    what = f"to_jax: {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}"
    assert tensor.dtype in _TORCH_DTYPES, f"{what}: expected {', '.join(SHARED)}"
    assert not tensor.requires_grad, f"{what} requires grad, and gradients do not cross to JAX: pass tensor.detach()"
    assert tensor.layout == torch.strided, f"{what} has layout {tensor.layout}"
    assert tensor.device.type in ("cpu", "cuda"), what
    assert not tensor.is_neg(), f"{what} is a lazy negation: pass tensor.resolve_neg()"
    assert tensor.is_contiguous(), f"{what} has strides {tensor.stride()}"
    if tensor.device.type == "cuda":
        # DLPack orders streams of torch's current device only.
        assert tensor.device.index == torch.cuda.current_device(), f"{what}: set_device first"
        if _sync():
            torch.cuda.synchronize(tensor.device)
    else:
        assert not tensor.is_pinned(), f"{what} is in pinned memory, which JAX takes for the GPU's"
        assert tensor.data_ptr() % 64 == 0, f"{what} starts at an address that XLA cannot use: pass tensor.clone()"
    # copy=True does not copy an aligned tensor, and copy=None copies a misaligned one without a word.
    return jax.dlpack.from_dlpack(tensor, copy=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree of arrays (N,), float32, int32 and bool, as two arrays.

    Passing an array to torch takes the host some 15 µs, viewing a part of a tensor about 2 µs.
    """

    words: jax.Array  # int32 (K, N), the bits of the numbers; as floats, NaNs might lose their payload on the way
    flags: jax.Array  # bool (L, N)
    structure: jax.tree_util.PyTreeDef = dataclasses.field(metadata={"static": True})
    places: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})  # dtype and row of each leaf

    def unpack(self) -> Any:
        """Return the tree with torch tensors for leaves, all of them views of this memory."""
        words, flags = to_torch(self.words), to_torch(self.flags)
        rows = {"float32": words.view(torch.float32).unbind(), "int32": words.unbind(), "bool": flags.unbind()}
        return self.structure.unflatten([rows[dtype][row] for dtype, row in self.places])


def pack(tree: Any) -> Packed:
    """Pack a tree of arrays (N,), at least one of them bool and one float32 or int32; traced inside a compiled step."""
    leaves, structure = jax.tree.flatten(tree)
    words: list[jax.Array] = []
    flags: list[jax.Array] = []
    places = []
    for leaf in leaves:
        is_flag = leaf.dtype == bool
        rows = flags if is_flag else words
        places.append((str(leaf.dtype), len(rows)))
        rows.append(leaf if is_flag else jax.lax.bitcast_convert_type(leaf, jnp.int32))
    return Packed(jnp.stack(words), jnp.stack(flags), structure, tuple(places))
