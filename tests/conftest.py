"""Fixtures of all tests: one thread (their tensors are too small for two), an empty place to work in, and packages that
are installed outside the repository; and small agents, with experience to feed them.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes share the cores, and the tests' tensors are small

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike import entry_points, host
from sheeplike.__main__ import main
from sheeplike.agents.agent import Agent, Player, Step
from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config, Size
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.config import compose
from sheeplike.config.sources import CONFIGS, Sources
from sheeplike.run.run_dir import Plan
from sheeplike.run.signals import SIGNALS

ROOT = Path(__file__).parents[1]
if not torch.cuda.is_available():
    # Most of the tests' time is XLA's, which compiles for each environment anew what then runs for a moment.
    os.environ.setdefault(
        "XLA_FLAGS",
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_cpu_use_fusion_emitters=false",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("dm_control") is None:
        for item in items:
            if "dmc" in repr(getattr(item, "callspec", SimpleNamespace(params={})).params):
                item.add_marker(pytest.mark.skip(reason="needs dm_control"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
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


@pytest.fixture(scope="session", autouse=True)
def _files_of_choices_once() -> Iterator[None]:
    """Hydra lists the files of the same choices once in a process: thousands of lines that are composed share them."""
    real = compose._list_files
    known: dict[tuple[str, ...], tuple] = {}

    @functools.wraps(real)
    def list_files(line: list[str], sources: Sources) -> tuple:
        if sources.directories != [CONFIGS]:  # others change from test to test
            return real(line, sources)
        if tuple(line) not in known:
            known[tuple(line)] = real(line, sources)
        return copy.deepcopy(known[tuple(line)])

    compose._list_files = list_files
    yield
    compose._list_files = real


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
        """The files on a how-to page, whose first lines are their names, built as a wheel and unpacked."""
        text = (ROOT / "howto" / page).read_text(encoding="utf-8")
        folder = self.path.parent / f"{page}.project"
        folder.mkdir()
        files = re.findall(r"^```\w+\n(# ([\w.]+\.(?:py|toml))\n.*?)^```$", text, re.MULTILINE | re.DOTALL)
        for block, name in files:
            (folder / name).write_text(block, encoding="utf-8")
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


class Refusal(str):
    """The one line of a refusal, of which tests ask the names and values in it and not the sentence."""

    def names(self, *facts: str) -> bool:
        """Check that every key, value, path or nearest choice in ``facts`` is named."""
        return all(fact in self for fact in facts)


class Result(NamedTuple):
    status: int
    output: str
    error: str
    runs: list[Plan]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working directory, no search path, and a machine without a GPU."""
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

        monkeypatch.setattr("sheeplike.commands.train.run", runs.append)
        capsys.readouterr()
        status = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        return Result(status, *capsys.readouterr(), runs)

    return call


@pytest.fixture
def refused(sheeplike: Callable[..., Result], tmp_path: Path) -> Callable[..., Refusal]:
    """Runs a command line that must be refused, with one line and without leaving anything behind; returns the line."""

    def call(*arguments: str) -> Refusal:
        before = sorted(tmp_path.rglob("*"))
        result = sheeplike(*arguments)
        assert result.status == 2
        assert not result.runs
        assert result.output == ""
        assert result.error.count("\n") == 1
        assert result.error.startswith("sheeplike: ")
        assert sorted(tmp_path.rglob("*")) == before
        return Refusal(result.error)

    return call


@pytest.fixture
def refusal(capfd: pytest.CaptureFixture[str]) -> Callable[..., Refusal]:
    """Runs a command line that must be refused, be it late, in one line; returns that, and what it warns of before."""

    def call(*arguments: str) -> Refusal:
        capfd.readouterr()
        with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(SystemExit) as stop:
            main([word for argument in arguments for word in argument.split()])
        assert stop.value.code == 2
        output, error = capfd.readouterr()
        assert sum(line.startswith("sheeplike: ") for line in error.splitlines()) == 1, error
        assert "do-not-tell" not in output + error
        return Refusal("\n".join([error.rstrip(), *(str(warning.message) for warning in caught)]))

    return call


# --- small agents ----------------------------------------------------------------------------------------------------

IMAGE = 48
TINY = Size(deter=64, hidden=16, classes=4, depth=2, units=16)
# Arguments of an agent's constructor; the rest is options.
RUN = {"num_envs", "device", "compile", "autocast", "seed", "directory"}


def observation_space(cameras: Collection[str] | dict[str, tuple[int, ...]], vectors: dict[str, int]) -> spaces.Dict:
    """Cameras by name, or name to shape; vectors, name to width."""
    shapes = cameras if isinstance(cameras, dict) else dict.fromkeys(cameras, (IMAGE, IMAGE, 3))
    return spaces.Dict(
        {f"pixels/{name}": spaces.Box(0, 255, shape, np.uint8) for name, shape in shapes.items()}
        | {name: spaces.Box(-np.inf, np.inf, (width,), np.float32) for name, width in vectors.items()}
    )


@pytest.fixture(scope="session")
def make_space() -> Callable[..., spaces.Dict]:
    """Builds an observation space: :func:`observation_space`."""
    return observation_space


@pytest.fixture(scope="session")
def make_agent() -> Callable[..., DreamerV3]:
    """Builds an agent of a few thousand parameters; keywords override."""

    def make(
        *,
        cameras: Collection[str] = (),
        vectors: dict[str, int] | None = None,
        actions: gymnasium.spaces.Space | int = 2,
        agent: type[DreamerV3] = DreamerV3,
        config: type[DreamerV3Config] = DreamerV3Config,
        **options: Any,
    ) -> DreamerV3:
        space = observation_space(cameras, {"state": 5} if vectors is None else vectors)
        actions = spaces.Box(-1, 1, (actions,), np.float32) if isinstance(actions, int) else actions
        run = {"num_envs": 3} | {name: options.pop(name) for name in RUN & options.keys()}
        defaults = {"size": TINY, "observations": ("*",), "batch_size": 4, "batch_length": 6, "learning_starts": 0}
        defaults |= {"replay_size": 3 * 60, "imagination_length": 3, "warmup": 0}
        return agent(space, actions, config(**(defaults | options)), **run)

    return make


@pytest.fixture(scope="session")
def play() -> Callable[..., list[Step]]:
    """Lets an agent act on random observations and store the steps; returns them.

    ``last`` and ``terminal`` hold (step, world) pairs; the step after an ending begins an episode. ``begin`` ``(N,)``
    says where the first step does, to go on from an earlier call; None: everywhere.
    """

    def run(
        agent: Agent,
        steps: int,
        *,
        last: Collection[tuple[int, int]] = (),
        terminal: Collection[tuple[int, int]] = (),
        seed: int = 0,
        player: Player | None = None,
        begin: Tensor | None = None,
    ) -> list[Step]:
        generator = torch.Generator().manual_seed(seed)
        worlds = range(agent.num_envs)
        player = player or agent.player(agent.num_envs)
        ended = torch.ones(agent.num_envs, dtype=torch.bool, device=agent.device) if begin is None else begin
        played = []
        for t in range(steps):
            obs = {}
            for key, space in (agent.stored if isinstance(agent, DreamerV3) else agent.keys).spaces.items():
                shape = (agent.num_envs, *space.shape)
                image = space.dtype == np.uint8
                obs[key] = (
                    torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
                    if image
                    else torch.randn(shape, generator=generator)
                )
            device = agent.device
            obs = {key: value.to(device) for key, value in obs.items()}
            is_terminal = torch.tensor([(t, n) in terminal for n in worlds], device=device)
            is_last = torch.tensor([(t, n) in last for n in worlds], device=device) | is_terminal
            reward = torch.randn(agent.num_envs, generator=generator).round().to(device) * ~ended
            action = player.act(obs, ended)
            step = Step(obs, action, reward, ended, is_last, is_terminal, dict(player.extras))
            agent.add(step)
            played.append(step)
            ended = is_last
        return played

    return run


@pytest.fixture(scope="session")
def make_ppo(make_space: Callable[..., spaces.Dict]) -> Callable[..., PPO]:
    """Builds an agent of a few thousand parameters that sees everything; keywords override."""

    def make(
        *,
        cameras: Collection[str] = (),
        vectors: dict[str, int] | None = None,
        actions: gymnasium.spaces.Space | int = 2,
        **options: Any,
    ) -> PPO:
        space = make_space(cameras, {"state": 5} if vectors is None else vectors)
        actions = spaces.Box(-1, 1, (actions,), np.float32) if isinstance(actions, int) else actions
        run = {"num_envs": 3} | {name: options.pop(name) for name in RUN & options.keys()}
        defaults = {"observations": ("*",), "rollout_length": 8, "minibatches": 4, "epochs": 2}
        defaults |= {"policy_layers": (16,), "value_layers": (16,)}
        return PPO(space, actions, PPOConfig(**(defaults | options)), **run)

    return make


@pytest.fixture
def randomised() -> Callable[[torch.nn.Module], None]:
    """Gives every parameter noise, so that zero-initialised outputs pass gradients and biases count."""

    def randomise(module: torch.nn.Module, spread: float = 0.1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(spread * torch.randn(p.shape, generator=generator))

    return randomise
