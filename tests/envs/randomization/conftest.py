"""Warp's engine, which a CPU runs one kernel after the other, is slow here: what varies is the same for both."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", params=["native", pytest.param("warp", marks=pytest.mark.slow)])
def physics(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other."""
    return request.param
