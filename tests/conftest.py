"""What all tests share: one thread (their tensors are too small for two), an empty place to work in, and packages that
are installed outside the repository.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores, and the tests' tensors are small

import pytest
import torch

from sheeplike import entry_points, host
from sheeplike.__main__ import main
from sheeplike.run.run_dir import Plan
from sheeplike.run.signals import SIGNALS

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws does not depend on the tests before it, which differ from run to run."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _takes_interrupts() -> None:
    """Also behind ``&``, where a shell has them ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _signals_as_before(_takes_interrupts: None) -> Iterator[None]:
    """A run that was stopped leaves its signal ignored: its process is about to end. Later tests send some too."""
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


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


class Site:
    """A directory of installed packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)

    def announce(self, name: str, announced: str, code: str = "", version: str = "0.1") -> None:
        """A package as an installer leaves it: its metadata, and a module of its name if there is code."""
        module = name.replace("-", "_")
        info = self.path / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(announced)
        if code:
            (self.path / f"{module}.py").write_text(code)
        entry_points._plugins.cache_clear()  # a process looks once for each path

    def install(self, page: str) -> None:
        """The first program of a how-to page and its ``pyproject.toml``, built as a wheel and unpacked."""
        text = (ROOT / "howto" / page).read_text(encoding="utf-8")
        folder = self.path.parent / f"{page}.project"
        folder.mkdir()
        for language in ("python", "toml"):
            block = re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
            (folder / block.splitlines()[0].removeprefix("# ")).write_text(block, encoding="utf-8")
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
        subprocess.run(build, cwd=folder, check=True, capture_output=True)
        (wheel,) = folder.glob("dist/*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.path)
        entry_points._plugins.cache_clear()

    def run(self, *arguments: str, place: Path) -> subprocess.CompletedProcess[str]:
        """A command line in a process of its own that has these packages."""
        environment = {**os.environ, "PYTHONPATH": f"{self.path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "sheeplike", *arguments]
        return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Packages that are installed for this test, in this process too."""
    made = Site(tmp_path / "site")
    monkeypatch.syspath_prepend(made.path)
    modules = set(sys.modules)
    yield made
    for name in sys.modules.keys() - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(made.path)):
            del sys.modules[name]


class Result(NamedTuple):
    status: int
    output: str
    error: str
    runs: list[Plan]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, nobody's search path, and a machine without a GPU."""
    workplace = tmp_path / "workplace"
    workplace.mkdir()
    monkeypatch.chdir(workplace)
    for name in ("SHEEPLIKE_SEARCH_PATH", "SHEEPLIKE_DEBUG", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(host, "gpu_count", lambda: 0)
    monkeypatch.setattr(host, "gpu_problem", lambda: "this machine shows no NVIDIA GPU")


@pytest.fixture
def has_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gpu_count", lambda: 1)
    monkeypatch.setattr(host, "gpu_problem", lambda: None)


@pytest.fixture
def sheeplike(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., Result]:
    """Runs a command line in this process, with the training itself left out: ``runs`` has what it would have got."""

    def call(*arguments: str) -> Result:
        runs: list[Plan] = []

        monkeypatch.setitem(sys.modules, "sheeplike.run.experiment", SimpleNamespace(run=runs.append))
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


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command line that must be refused, be it late, in one line; returns that, and what it warns of before."""

    def call(*arguments: str) -> str:
        capfd.readouterr()
        with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(SystemExit) as stop:
            main([word for argument in arguments for word in argument.split()])
        assert stop.value.code == 2
        output, error = capfd.readouterr()
        assert sum(line.startswith("sheeplike: ") for line in error.splitlines()) == 1, error
        assert "do-not-tell" not in output + error
        return "\n".join([error.rstrip(), *(str(warning.message) for warning in caught)])

    return call
