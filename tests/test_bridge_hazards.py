"""Each hazard of sharing memory between JAX and torch, by its letter:

a write into an array, b write after dispatch, c copy=True, d alignment, e dtype, f gradients and strides, g layout and
commitment, h donation, i NHWC, j capsules, k array dropped, l tensor dropped, m casts.
"""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from sheeplike.bridge import to_jax, to_torch

CPU = jax.devices("cpu")[0]
SHAPES = ((), (1,), (7,), (8, 1), (1, 8), (1, 1), (4, 1, 3), (1, 4, 3), (4, 3, 1), (2, 8, 8, 1), (2, 8, 8, 3))


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def native(shape=(), dtype="float32", fill=1) -> jax.Array:
    """An array in memory of JAX's own, committed to the CPU."""
    return jax.device_put(jnp.full(shape, fill, dtype), CPU)


@jax.jit
def slow(x):
    """About 30 ms of work that ends in ``2 * x``: long enough for a write to overtake it."""
    matrix = jnp.full((400, 400), 1 / 400)
    matrix = jax.lax.fori_loop(0, 40, lambda i, m: (m @ m).clip(0, 1), matrix)  # rounding must not make it grow
    return 2 * x + (matrix.sum() - matrix.sum())


def slow_input() -> torch.Tensor:
    return torch.arange(4096, dtype=torch.float32)


# a: in-place writes on a tensor that shares an array's memory


def test_a_a_write_changes_the_array_as_documented():
    array = native((16,), fill=0)
    to_torch(array)[3] = 7
    assert float(array[3]) == 7


def test_a_writes_to_fresh_outputs_do_not_reach_the_simulation():
    def step(state, action):
        state = 0.9 * state + action
        return state, state + 0.0

    simulate = jax.jit(step, donate_argnums=0)

    def rollout(meddle: bool) -> list[torch.Tensor]:
        state, seen = native((64,), fill=0), []
        for i in range(5):
            state, out = simulate(state, to_jax(torch.full((64,), float(i))))
            obs = to_torch(out)
            seen.append(obs.clone())
            if meddle:
                obs.fill_(1e6)
        return seen

    assert all(torch.equal(x, y) for x, y in zip(rollout(True), rollout(False), strict=True))


# b: writing to a tensor while JAX computes with it


def test_b_jax_reads_the_tensor_itself_so_later_writes_show():
    tensor = torch.zeros(256)
    array = to_jax(tensor)
    tensor.fill_(7)
    assert float(array[0]) == 7


def test_b_a_tensor_made_for_the_call_is_safe_from_writes_to_its_source():
    source = slow_input()
    for _ in range(8):
        result = slow(to_jax(source.clamp(-1e9, 1e9)))
        source.fill_(-1)
        np.testing.assert_array_equal(np.asarray(result), 2 * slow_input().numpy())
        source.copy_(slow_input())


# c: copy=True does not copy


def test_c_a_copy_is_never_asked_of_jax(monkeypatch):
    real, asked = jax.dlpack.from_dlpack, []

    def spy(tensor, **options):
        asked.append(options)
        return real(tensor, **options)

    monkeypatch.setattr(jax.dlpack, "from_dlpack", spy)
    to_jax(torch.zeros(4))
    assert asked == [{"copy": False}]


# d: alignment


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_d_a_misaligned_view_is_refused_not_copied(offset):
    with pytest.raises(AssertionError):
        to_jax(torch.zeros(64)[offset : offset + 8])


def test_d_an_aligned_view_shares_memory():
    view = torch.zeros(64)[16:32]
    assert address(to_jax(view)) == view.data_ptr()


# e: dtypes


@pytest.mark.parametrize("dtype", ["int64", "float64", "uint64"])
@pytest.mark.parametrize("wide", [False, True])
def test_e_a_dtype_that_jax_narrows_is_refused(dtype, wide):
    with jax.enable_x64(wide), pytest.raises(AssertionError):
        to_jax(torch.zeros(4, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_e_a_dtype_that_is_not_shared_is_refused_by_to_jax(dtype):
    with pytest.raises(AssertionError):
        to_jax(torch.zeros(4).to(dtype))


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "int4"])
def test_e_a_dtype_that_is_not_shared_is_refused_by_to_torch(dtype):
    with pytest.raises(AssertionError):
        to_torch(jnp.zeros(4, dtype))


def test_e_a_wide_array_is_refused():
    with jax.enable_x64(True), pytest.raises(AssertionError):
        to_torch(jnp.zeros(4, "float64"))


def test_e_a_typed_key_is_refused_and_its_data_crosses():
    key = jax.random.key(3)
    with pytest.raises(AssertionError):
        to_torch(key)
    assert to_torch(jax.random.key_data(key)).tolist() == [0, 3]


# f: gradients, strides, and other tensors that are more than their memory


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, requires_grad=True),
        torch.zeros(4, requires_grad=True) * 2,
        torch.nn.Parameter(torch.zeros(4)),
        torch.zeros(4, 4)[:, ::2],
        torch.zeros(3, 4).t(),
        torch.zeros(2, 8, 8, 3).permute(0, 3, 1, 2),
        torch.zeros(1).expand(4),
        torch._neg_view(torch.ones(4)),
        torch.eye(4).to_sparse(),
        torch.zeros(4, device="meta"),
    ],
    ids=["leaf", "graph", "parameter", "strided", "transposed", "nchw", "expanded", "negated", "sparse", "meta"],
)
def test_f_what_is_more_than_its_memory_is_refused(tensor):
    with pytest.raises(AssertionError):
        to_jax(tensor)


def test_f_a_transposed_layout_is_refused_by_to_torch():
    array = to_jax_unchecked(torch.zeros(3, 4).t())
    with pytest.raises(AssertionError):
        to_torch(array)


def to_jax_unchecked(tensor: torch.Tensor) -> jax.Array:
    return jax.dlpack.from_dlpack(tensor)


# g: layouts and commitment, which jit tells apart


@pytest.mark.parametrize("shape", SHAPES)
def test_g_layout_and_compilation_are_those_of_a_committed_native_array(shape):
    function = jax.jit(lambda x: x + 1)
    function(native(shape))
    for _ in range(3):
        array = to_jax(torch.zeros(shape))
        function(array)
        assert array.format.layout == native(shape).format.layout
    assert function._cache_size() == 1


def test_g_a_simulation_started_from_a_committed_key_compiles_once():
    start = jax.jit(lambda key: jax.random.normal(key, (8, 1)))
    step = jax.jit(lambda state, action: 0.9 * state + action, donate_argnums=0)
    state = start(jax.device_put(jax.random.key(0), CPU))
    for _ in range(4):
        state = step(state, to_jax(torch.ones(8, 1)))
    assert step._cache_size() == 1


# h: donation


def test_h_what_torch_views_survives_a_donation_and_memory_is_reused_without_a_view():
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    array = native((1024,))
    view, before = to_torch(array), address(array)
    moved = donate(array)
    assert address(moved) != before
    assert torch.equal(view, torch.ones(1024))

    before = address(moved)
    assert address(donate(moved)) == before


def test_h_a_donated_array_is_refused():
    array = native((1024,))
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with pytest.raises(AssertionError):
        to_torch(array)


def test_h_donating_a_tensors_memory_leaves_the_tensor_alone():
    tensor = torch.zeros(1024)
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(to_jax(tensor))
    assert address(result) != tensor.data_ptr()
    assert torch.equal(tensor, torch.zeros(1024))


def test_h_outputs_beside_a_donated_state_keep_its_addresses():
    step = jax.jit(lambda state: (state + 1, state * 2), donate_argnums=0)
    state, _ = step(native((1024,)))
    addresses, held = set(), []
    for _ in range(6):
        state, out = step(state)
        held.append(to_torch(out))
        addresses.add(address(state))
    assert len(addresses) == 1
    assert [float(t[0]) for t in held] == [4, 6, 8, 10, 12, 14]


# i: images


def test_i_nhwc_becomes_channels_last_without_a_copy():
    frames = native((2, 8, 8, 3), "uint8")
    images = to_torch(frames).permute(0, 3, 1, 2)
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert images.data_ptr() == address(frames)


# j: anything that is not an array


@pytest.mark.parametrize(
    "value",
    [np.zeros(3, np.float32), torch.zeros(3), torch.zeros(3).__dlpack__(), [1.0], None],
    ids=["numpy", "tensor", "capsule", "list", "None"],
)
def test_j_to_torch_takes_jax_arrays_only(value):
    with pytest.raises(AssertionError):
        to_torch(value)


@pytest.mark.parametrize(
    "value",
    [np.zeros(3, np.float32), native((3,)), torch.zeros(3).__dlpack__(), [1.0], None],
    ids=["numpy", "array", "capsule", "list", "None"],
)
def test_j_to_jax_takes_tensors_only(value):
    with pytest.raises(AssertionError):
        to_jax(value)


def test_j_a_tracer_is_refused():
    with pytest.raises(AssertionError):
        jax.jit(lambda x: to_torch(x))(native((3,)))


# k and l: lifetimes


def test_k_a_tensor_keeps_the_memory_of_an_array_that_is_gone():
    tensors = [to_torch(native((1024,), fill=3)) for _ in range(10)]
    gc.collect()  # takes long where much is loaded
    others = [native((1024,), fill=9) for _ in range(20)]
    assert all(torch.equal(tensor, torch.full((1024,), 3.0)) for tensor in tensors)
    assert len(others) == 20


def test_k_the_memory_is_freed_with_the_last_view():
    array = native((1024,))
    tensor = to_torch(array)
    view = tensor[:4]
    del tensor
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert address(donate(array)) != view.data_ptr()  # the slice alone still holds it
    array = native((1024,))
    before = address(array)
    tensor = to_torch(array)
    del tensor
    assert address(donate(array)) == before


def test_l_jax_keeps_the_memory_of_a_tensor_that_is_gone():
    for _ in range(10):
        tensor = slow_input()
        result = slow(to_jax(tensor))
        del tensor
        others = [torch.full((4096,), -1.0) for _ in range(20)]
        np.testing.assert_array_equal(np.asarray(result), 2 * slow_input().numpy())
        assert len(others) == 20


# m: casts


def test_m_a_batch_of_frames_stays_uint8():
    frames = native((4, 64, 64, 3), "uint8", fill=200)
    tensor = to_torch(frames)
    assert tensor.dtype == torch.uint8
    assert tensor.nbytes == frames.nbytes == 4 * 64 * 64 * 3
