"""The same memory seen by JAX and by torch, through DLPack. Nothing is copied; what cannot be shared is refused.

Rules for those who hold both ends (the vector env is the model):

- **JAX to torch hands the array over.** A tensor from :func:`to_torch` writes straight into the JAX array, which JAX
  believes to be immutable. Pass arrays that JAX never reads again, such as the fresh outputs of a step, and drop the
  handle; for an array that JAX goes on using, pass ``writable=False``, or clone before writing.
- **torch to JAX forbids writing until JAX is done.** JAX computes asynchronously, on the CPU too. Pass a tensor made
  for this one call (``actions.clamp(low, high)`` is such a one), never a buffer that is written again.
- **What torch holds must not be donated.** XLA then silently keeps the old buffer: memory grows, addresses move, and
  CUDA graphs keyed by address are captured anew. Keep observations outside of a donated state.
- **Whole tensors, not slices.** XLA wants 64-byte alignment on the CPU. A misaligned view is refused, not copied.
- **Arrays made here are committed** to their device, and ``jax.jit`` compiles a function once more for committed
  arguments. ``jax.device_put`` the seed key on the device first: then every state is committed, and it compiles once.
- **CUDA streams.** Both functions order the consumer's stream after the producer's *current* stream, without a host
  synchronisation, so call them while the stream that made the data is torch's current one. Nothing orders a write
  after a read: hold on to the last two actions and outputs, and copy observations into a buffer at once.

``SHEEPLIKE_SYNC=1`` makes both functions wait for the device. A result that changes with it is a stream hazard.
"""

from __future__ import annotations

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
_EXPECTED = f"expected {', '.join(SHARED)}"
_NARROWER = {torch.int64: "int32", torch.float64: "float32", torch.uint64: "uint32"}


def _warn_if_preallocated(started_first: bool, platform: str) -> None:
    if started_first and platform in ("gpu", "cuda", "rocm"):
        warnings.warn(
            "jax started its GPU backend before sheeplike was imported and has reserved 75 % of the GPU's memory: "
            "import sheeplike first, or set XLA_PYTHON_CLIENT_PREALLOCATE=false",
            RuntimeWarning,
            stacklevel=3,
        )


if sheeplike.xla_started_before_import:
    _warn_if_preallocated(True, jax.default_backend())


def _sync() -> bool:
    return os.environ.get("SHEEPLIKE_SYNC", "0") not in ("", "0")


def to_torch(array: jax.Array, *, writable: bool = True) -> torch.Tensor:
    """The memory of ``array`` as a torch tensor of the same shape, dtype and device, which it keeps alive.

    Args:
        array: a concrete, row-major array on one device.
        writable: ``True`` hands the array over: a write in place changes it, and DLPack has no flag against that.
            ``False`` returns an inference tensor, on which torch raises ``RuntimeError`` at the line that writes in
            place (the bytes are changed by then: it finds the bug, it does not undo it), and which autograd refuses
            to save for backward.

    Raises:
        TypeError: not a ``jax.Array``, a tracer, or a dtype that both sides do not share.
        ValueError: donated or deleted, on more than one device, not row-major.
    """
    if not isinstance(array, jax.Array):
        raise TypeError(f"to_torch: got {_kind(array)}, expected a jax.Array (capsules can be read only once)")
    if isinstance(array, jax.core.Tracer):
        raise TypeError("to_torch: got a tracer inside of jit or vmap, expected a concrete array; call it outside")
    if array.dtype not in _JAX_DTYPES:
        is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
        hint = "; take the key's uint32 with jax.random.key_data" if is_key else ""
        raise TypeError(f"to_torch: array of dtype {array.dtype}: {_EXPECTED}{hint}")
    if array.is_deleted():
        raise ValueError(f"to_torch: {array.aval.str_short()} was donated or deleted: hand over fresh outputs only")
    if len(array.devices()) != 1:
        raise ValueError(f"to_torch: array on {len(array.devices())} devices, expected one; take a shard of it")
    if _sync():
        jax.block_until_ready(array)
    if writable:
        tensor = torch.from_dlpack(array)
    else:
        with torch.inference_mode():
            tensor = torch.from_dlpack(array)
    if not tensor.is_contiguous():
        raise ValueError(f"to_torch: array has strides {tensor.stride()}, expected a row-major layout")
    return tensor


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The memory of ``tensor`` as a JAX array of the same shape, dtype and device, which it keeps alive.

    The tensor must not be written until JAX has done all work on the array: pass one made for this call.

    Raises:
        TypeError: not a tensor, or a dtype that JAX would narrow or that both sides do not share.
        ValueError: ``requires_grad``, not strided, not contiguous, a lazy negation, misaligned, pinned, on a device
            that JAX does not have or that is not torch's current one.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"to_jax: got {_kind(tensor)}, expected a torch.Tensor (capsules can be read only once)")
    if tensor.dtype not in _TORCH_DTYPES:
        hint = f"; convert it with .to(torch.{_NARROWER[tensor.dtype]})" if tensor.dtype in _NARROWER else ""
        raise TypeError(f"to_jax: tensor of dtype {tensor.dtype}: {_EXPECTED}{hint}")
    what = f"to_jax: {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
    if tensor.requires_grad:
        raise ValueError(f"{what} requires grad, and gradients do not cross to JAX: pass tensor.detach()")
    if tensor.layout != torch.strided:
        raise ValueError(f"{what} has layout {tensor.layout}, expected torch.strided: pass tensor.to_dense()")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} is on device {tensor.device}, expected cpu or cuda")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{what} is a lazy negation: pass tensor.resolve_neg()")
    if not tensor.is_contiguous():
        raise ValueError(f"{what} has strides {tensor.stride()}: pass tensor.contiguous()")
    if tensor.device.type == "cuda":
        _check_current(tensor.device, torch.cuda.current_device(), what)
        if _sync():
            torch.cuda.synchronize(tensor.device)
    elif tensor.is_pinned():
        raise ValueError(f"{what} is in pinned memory, which JAX takes for the GPU's: pass an unpinned tensor")
    try:
        # copy=True does not copy an aligned tensor, and copy=None copies a misaligned one without a word.
        return jax.dlpack.from_dlpack(tensor, copy=False)
    except ValueError as error:
        if "aligned" not in str(error):
            raise
        raise ValueError(f"{what} starts at an address that XLA cannot use: pass tensor.clone(), not a slice") from None
    except RuntimeError as error:
        if "backend" not in str(error).lower():
            raise
        raise ValueError(f"{what} is on {tensor.device}, which jax cannot use: {str(error).splitlines()[0]}") from None


def _check_current(device: torch.device, current: int, what: str) -> None:
    """DLPack orders streams of torch's current device only."""
    if device.index != current:
        raise ValueError(f"{what} is on {device}, expected the current device cuda:{current}: set_device first")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
