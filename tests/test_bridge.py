"""The same memory both ways, devices, the debug mode, and CUDA; the hazards of sharing have a file of their own."""

import os
import subprocess
import sys
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sheeplike.bridge import to_jax, to_torch

CPU = jax.devices("cpu")[0]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DTYPES = ("bool", "uint8", "uint16", "uint32", "int8", "int16", "int32", "float16", "bfloat16", "float32")
SHAPES = ((), (1,), (7,), (8, 1), (1, 8), (1, 1), (4, 1, 3), (1, 4, 3), (4, 3, 1), (2, 8, 8, 1), (2, 8, 8, 3))


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def native(shape=(), dtype="float32", fill=1) -> jax.Array:
    """An array in memory of JAX's own, committed to the CPU."""
    return jax.device_put(jnp.full(shape, fill, dtype), CPU)


# Same memory


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_torch_shares_memory(dtype):
    array = native((3, 5), dtype)
    tensor = to_torch(array)
    assert tensor.data_ptr() == address(array)
    assert (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, dtype), (3, 5))
    np.testing.assert_array_equal(tensor.float().numpy(), np.asarray(array, np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_jax_shares_memory(dtype):
    tensor = torch.ones(3, 5, dtype=getattr(torch, dtype))
    array = to_jax(tensor)
    assert address(array) == tensor.data_ptr()
    assert (str(array.dtype), array.shape) == (dtype, (3, 5))
    np.testing.assert_array_equal(np.asarray(array, np.float32), tensor.float().numpy())


@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_shares_memory_there_and_back(shape):
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    array = to_jax(tensor)
    back = to_torch(array)
    assert address(array) == back.data_ptr() == tensor.data_ptr()
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_empty_arrays_cross(shape):
    array = to_jax(torch.zeros(shape))
    assert array.shape == shape
    assert float(jax.jit(jnp.sum)(array)) == 0
    assert tuple(to_torch(native(shape)).shape) == shape


# Debug mode, devices, preallocation


@pytest.mark.parametrize(("setting", "waits"), [("1", True), ("0", False), ("", False), (None, False)])
def test_sheeplike_sync_waits_for_the_array(monkeypatch, setting, waits):
    if setting is None:
        monkeypatch.delenv("SHEEPLIKE_SYNC", raising=False)
    else:
        monkeypatch.setenv("SHEEPLIKE_SYNC", setting)
    real, waited = jax.block_until_ready, []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or real(x))
    array = native((3,))
    to_torch(array)
    assert [x is array for x in waited] == ([True] if waits else [])


@pytest.mark.parametrize(("platform", "warned"), [("gpu", True), ("cpu", False)])
def test_preallocation_that_came_first_is_warned_of(platform, warned):
    code = f"import jax; jax.devices('cpu'); jax.default_backend = lambda: {platform!r}; import sheeplike.bridge"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert ("import sheeplike first" in done.stderr) is warned


# CUDA


@GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_shares_memory_both_ways(dtype):
    tensor = torch.ones(3, 5, dtype=getattr(torch, dtype), device="cuda")
    array = to_jax(tensor)
    assert address(array) == tensor.data_ptr()
    assert array.devices() == {jax.devices("cuda")[tensor.device.index]}
    back = to_torch(array)
    assert (back.data_ptr(), back.device, back.dtype) == (tensor.data_ptr(), tensor.device, tensor.dtype)


@GPU
@pytest.mark.gpu
def test_cuda_stress_of_writes_after_reads():
    """Hundreds of steps with fresh actions, outputs copied at once and the last two of each held: no step is wrong."""
    device = jax.devices("cuda")[0]
    mixing = jax.device_put(jnp.full((512, 512), 1 / 512), device)
    step = jax.jit(lambda state, action: ((state @ mixing) * 0.5 + action,) * 2, donate_argnums=0)
    state = jax.device_put(jnp.zeros((512, 512)), device)
    expected = torch.zeros(512, 512, device="cuda")
    torch_mixing, recorded = torch.full((512, 512), 1 / 512, device="cuda"), torch.empty(300, 512, 512, device="cuda")
    held, wanted = deque(maxlen=2), []
    source = torch.empty(512, 512, device="cuda")
    for i in range(300):
        action = source.fill_(float(i % 7)).clamp(-3, 3)
        state, out = step(state, to_jax(action))
        source.fill_(-1e6)
        held.append((action, out))
        recorded[i].copy_(to_torch(out))
        expected = expected @ torch_mixing * 0.5 + action
        wanted.append(expected.mean())
    torch.testing.assert_close(recorded.mean((1, 2)), torch.stack(wanted), rtol=1e-2, atol=1e-2)


@GPU
@pytest.mark.gpu
def test_cuda_a_hand_over_on_a_side_stream_waits_for_it():
    side = torch.cuda.Stream()
    big = torch.randn(4096, 4096, device="cuda")
    for i in range(20):
        with torch.cuda.stream(side):
            for _ in range(5):
                big @ big
            tensor = torch.full((4096,), float(i), device="cuda")
            doubled = jax.jit(lambda x: 2 * x)(to_jax(tensor))
            back = to_torch(doubled) + 1
        side.synchronize()
        assert torch.equal(back, torch.full_like(back, 2 * i + 1))


@GPU
@pytest.mark.gpu
def test_cuda_sheeplike_sync_waits_for_the_device(monkeypatch):
    monkeypatch.setenv("SHEEPLIKE_SYNC", "1")
    real, waited = torch.cuda.synchronize, []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device) or real(device))
    tensor = torch.zeros(4, device="cuda")
    to_jax(tensor)
    assert waited == [tensor.device]


@GPU
@pytest.mark.gpu
def test_cuda_pinned_memory_is_refused():
    with pytest.raises(AssertionError):
        to_jax(torch.zeros(4, pin_memory=True))
