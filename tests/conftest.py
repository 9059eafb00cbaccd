"""What all tests share: one thread (their tensors are too small for two), and an empty place to work in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and an environment with a secret and nothing of ours."""
    place = tmp_path / "workplace"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("SECRET", "do-not-tell")
    for name in ("SHEEPLIKE_SEARCH_PATH", "SHEEPLIKE_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return place
