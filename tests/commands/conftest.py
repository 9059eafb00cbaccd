import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from sheeplike.__main__ import main
from sheeplike.commands import machine
from sheeplike.commands.run_directory import Plan


class Result(NamedTuple):
    status: int
    output: str
    error: str
    runs: list[Plan]


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, nobody's search path, and a machine without a GPU."""
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    for name in ("SHEEPLIKE_SEARCH_PATH", "SHEEPLIKE_DEBUG", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "gpu_count", lambda: 0)
    monkeypatch.setattr(machine, "gpu_problem", lambda: "this machine shows no NVIDIA GPU")


@pytest.fixture
def aged() -> Callable[[dict], dict]:
    """Takes from a saved configuration all keys that there were not always."""
    young = ["compile", "watchdog", "randomization", "faults", "fabric.deterministic", "eval.nominal", "agent.targets"]
    young += [f"env.{key}" for key in ("action_repeat", "id", "renderer", "segmentation", "shadows", "textures")]

    def take(config: dict) -> dict:
        for path in young:
            *sections, name = path.split(".")
            section = config
            for part in sections:
                section = section[part]
            del section[name]
        return config

    return take


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(machine, "gpu_problem", lambda: None)


@pytest.fixture
def sheeplike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Result]:
    """Runs a command line in this process, with the training itself left out: ``runs`` has what it would have got."""

    def call(*arguments: str) -> Result:
        runs: list[Plan] = []

        monkeypatch.setitem(sys.modules, "sheeplike.commands.experiment", SimpleNamespace(run=runs.append))
        capsys.readouterr()
        status = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        return Result(status, *capsys.readouterr(), runs)

    return call


@pytest.fixture
def refused(sheeplike: Callable[..., Result], tmp_path: Path) -> Callable[..., str]:
    """Runs a command line that must be refused, with one line and without leaving anything behind; returns the line."""

    def call(*arguments: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        result = sheeplike(*arguments)
        assert result.status == 2
        assert not result.runs
        assert result.output == ""
        assert result.error.count("\n") == 1
        assert result.error.startswith("sheeplike: ")
        assert sorted(tmp_path.rglob("*")) == before
        return result.error

    return call
