"""Running mean and deviation against numpy over all the data at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sheeplike.nn.normalizers import RunningNorm


def batches(sizes: list[int], width: int = 4, seed: int = 0) -> list[np.ndarray]:
    """Float32 batches ``(B, D)`` whose dimensions differ in place and spread, and which drift."""
    rng = np.random.default_rng(seed)
    centre, spread = np.array([0.0, 50.0, -3.0, 1e3])[:width], np.array([1.0, 0.02, 300.0, 1.0])[:width]
    return [
        (centre + spread * (rng.standard_normal((size, width)) + 0.5 * i)).astype(np.float32)
        for i, size in enumerate(sizes)
    ]


def taught(data: list[np.ndarray], limit: float = 10.0) -> RunningNorm:
    norm = RunningNorm(data[0].shape[1], limit)
    for batch in data:
        norm.update(torch.tensor(batch))
    return norm


@pytest.mark.parametrize("sizes", [[100], [30, 70, 1, 512], [1, 1, 1, 1], [640] * 20], ids=str)
def test_merged_batches_equal_numpy_over_all_of_them(sizes: list[int]) -> None:
    data = batches(sizes)
    norm, whole = taught(data), np.concatenate(data).astype(np.float64)
    assert norm.count == len(whole)
    np.testing.assert_allclose(norm.mean, whole.mean(0), rtol=1e-10)
    np.testing.assert_allclose(norm.square / norm.count, whole.var(0), rtol=1e-7)
    x = batches([50], seed=1)[0]
    expected = np.clip((x - whole.mean(0)) / whole.std(0), -10, 10)
    found = norm(torch.tensor(x))
    assert found.dtype == torch.float32
    # Beside the rounding of a float32 of 1000, relative to the spread.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-4)


def test_order_and_division_into_batches_do_not_matter() -> None:
    data = batches([5, 300, 40, 1])
    reference = taught(data)
    for other in (data[::-1], [np.concatenate(data)], np.array_split(np.concatenate(data), 17)):
        norm = taught(list(other))
        np.testing.assert_allclose(norm.mean, reference.mean, rtol=1e-10)
        np.testing.assert_allclose(norm.square, reference.square, rtol=1e-7)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_are_left_out(value: float) -> None:
    """Whole vectors, wherever in them the number is; a batch of nothing else says nothing, the first one included."""
    data = batches([40, 30])
    bad = [np.full((5, 4), value, np.float32), *(batch.copy() for batch in data), data[0][:1].copy()]
    bad[1][7, 2], bad[1][20, 0], bad[2][0], bad[3][0, 3] = value, value, value, value
    norm, kept = taught(bad[:1]), [np.delete(data[0], [7, 20], 0), data[1][1:]]
    assert norm.count == 0
    assert not norm.mean.any()
    x = torch.tensor(data[0])
    assert torch.equal(norm(x), x.clamp(-10, 10))
    norm, expected = taught(bad), taught(kept)
    assert norm.count == expected.count == 67
    np.testing.assert_allclose(norm.mean, expected.mean, rtol=1e-12)
    np.testing.assert_allclose(norm.square, expected.square, rtol=1e-9)


def test_millions_of_steps_are_still_counted() -> None:
    """A count in float32 would stop at 2^24 and the variance of values around 1000 would be lost."""
    norm = taught([np.array([[999.9], [1000.1]], np.float32)])
    norm.count += 2**25
    norm.square += 0.01 * 2**25
    before = norm.count.item()
    norm.update(torch.full((1, 1), 1000.0))
    assert norm.count.item() == before + 1
    assert norm(torch.tensor([[1000.5]])).item() == pytest.approx(5.0, rel=1e-3)


def test_before_the_first_update_vectors_pass_and_are_only_clipped() -> None:
    x = torch.tensor([[0.0, -3.25, 9.5, 1e-8], [11.0, -400.0, 10.0, -10.0]])
    found = RunningNorm(4)(x)
    assert found.tolist() == [x[0].tolist(), [10.0, -10.0, 10.0, -10.0]]


@pytest.mark.parametrize("limit", [10.0, 2.0])
def test_outliers_are_clipped(limit: float) -> None:
    norm = taught([np.array([[-1.0], [1.0]], np.float32)], limit)
    found = norm(torch.tensor([[0.5], [limit + 1], [-1e6], [float("inf")]]))
    assert found.flatten().tolist() == [0.5, limit, -limit, limit]


@pytest.mark.parametrize("value", [0.0, 0.1, -12345.678])
@pytest.mark.parametrize("sizes", [[1], [7, 13, 64], [333] * 5], ids=str)
def test_constant_input_becomes_zero_with_a_finite_gradient(value: float, sizes: list[int]) -> None:
    norm = taught([np.full((size, 2), value, np.float32) for size in sizes])
    x = torch.full((3, 2), value, requires_grad=True)
    found = norm(x)
    assert found.tolist() == [[0.0, 0.0]] * 3
    found.sum().backward()
    assert bool(x.grad.isfinite().all())


def test_state_is_saved_and_updated_in_place() -> None:
    data = batches([20, 30])
    norm = taught(data[:1])
    addresses = [b.data_ptr() for b in norm.buffers()]
    norm.update(torch.tensor(data[1]).requires_grad_())
    assert [b.data_ptr() for b in norm.buffers()] == addresses
    assert not any(b.requires_grad for b in norm.buffers())
    other = RunningNorm(4)
    other.load_state_dict(norm.state_dict())
    x = torch.tensor(data[0])
    assert torch.equal(other(x), norm(x))
    other.update(x)
    norm.update(x)
    assert torch.equal(other(x), norm(x))
    assert not list(norm.parameters())


def test_single_precision_within_autocast() -> None:
    norm = taught(batches([50]))
    x = torch.tensor(batches([20], seed=1)[0])
    with torch.autocast("cpu", torch.bfloat16):
        mixed = norm(x)
    assert torch.equal(mixed, norm(x))


def test_a_variance_that_cannot_be_makes_no_nan() -> None:
    norm = RunningNorm(2)
    norm.count.fill_(3)
    norm.square.fill_(-1)
    assert norm(torch.ones(1, 2)).isfinite().all()
