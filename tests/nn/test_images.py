"""Colours and depth as numbers from 0 to 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sheeplike.nn.images import to_unit


def test_colours_are_divided_by_255() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1)
    assert to_unit(values).dtype == torch.float32
    np.testing.assert_allclose(to_unit(values).flatten(), np.arange(256) / 255, rtol=1e-6)


@pytest.mark.parametrize(
    ("metres", "expected"),
    [(0.0, 0.0), (0.001, 0.000999), (0.25, 0.2), (1.0, 0.5), (3.0, 0.75), (99.0, 0.99), (float("inf"), 1.0), (-2.0, 0)],
)
def test_depth_is_squashed_and_nothing_hit_stays_nothing(metres: float, expected: float) -> None:
    assert to_unit(torch.tensor(metres)).item() == pytest.approx(expected, abs=1e-6)


def test_depth_that_is_no_number_stays_none() -> None:
    """An update that sees it is skipped, instead of learning from a made-up image."""
    assert bool(to_unit(torch.tensor(float("nan"))).isnan())
