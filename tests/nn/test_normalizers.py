"""The scale of returns: an exponential average of percentiles, from zero, with a floor of 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sheeplike.nn.normalizers import PercentileScale


def test_average_starts_at_zero_is_not_debiased_and_follows_numpy_percentiles() -> None:
    rng = np.random.default_rng(0)
    scale = PercentileScale()
    low = high = 0.0
    for _ in range(60):
        batch = (rng.standard_normal((30, 15)) * 40 + 7).astype(np.float32)
        low = 0.99 * low + 0.01 * np.percentile(batch.astype(np.float64), 5)
        high = 0.99 * high + 0.01 * np.percentile(batch.astype(np.float64), 95)
        got = scale.update(torch.tensor(batch))
        assert float(got) == pytest.approx(max(1.0, high - low), rel=1e-4)
    assert high - low > 20, "the floor must not be what was tested"


def test_first_batch_counts_one_percent_and_the_floor_is_one() -> None:
    scale = PercentileScale()
    assert float(scale.update(torch.linspace(0, 50, 101))) == 1.0  # 0.01 * (47.5 - 2.5) = 0.45
    assert float(scale.range[1] - scale.range[0]) == pytest.approx(0.45, rel=1e-5)
    assert float(scale.update(torch.linspace(0, 500, 101))) == pytest.approx(0.99 * 0.45 + 4.5, rel=1e-5)


def test_bfloat16_is_taken_in_as_float32() -> None:
    scale = PercentileScale(rate=1.0)
    assert float(scale.update(torch.linspace(-10, 10, 101).bfloat16())) == pytest.approx(18.0, rel=0.01)
    assert scale.range.dtype == torch.float32


def test_state_is_saved_and_updated_in_place_without_gradient() -> None:
    scale = PercentileScale()
    memory = scale.range.data_ptr()
    got = scale.update(torch.linspace(0, 900, 10, requires_grad=True))
    assert not got.requires_grad
    assert scale.range.data_ptr() == memory
    other = PercentileScale()
    other.load_state_dict(scale.state_dict())
    assert torch.equal(other.range, scale.range)
    assert set(scale.state_dict()) == {"range"}
