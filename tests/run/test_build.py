"""Environments of other people that fail while a command builds them: one line, whichever command it is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from lightning.fabric import Fabric
from sheeplike.commands.agents import make_agent

from sheeplike import checkpoint
from sheeplike.__main__ import main
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources
from sheeplike.run.build import make_envs
from sheeplike.run.run_dir import create

JOB = ["exp=ppo", "env=gym", "env.id=Moody-v0", "env.options.frames=none", "agent.observations=[state]"]
JOB += ["profile=cpu", "dry_run=true"]


class Moody(gymnasium.Env):
    """Raises what it is told to, where it is told to."""

    metadata = {"render_modes": []}  # noqa: RUF012, as Gymnasium has it
    trouble: dict[str, Exception] = {}  # noqa: RUF012
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        if "init" in self.trouble:
            warnings.warn("its maps are old", UserWarning, stacklevel=2)
            raise self.trouble["init"]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        if "reset" in self.trouble:
            raise self.trouble["reset"]
        return np.zeros(2, np.float32), {}


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> dict[str, Exception]:
    """What environments raise from then on."""
    found: dict[str, Exception] = {}
    monkeypatch.setattr(Moody, "trouble", found)
    spec = gymnasium.envs.registration.EnvSpec("Moody-v0", entry_point=Moody, max_episode_steps=9)
    monkeypatch.setitem(gymnasium.registry, "Moody-v0", spec)
    return found


@pytest.fixture
def run_dir(trouble: dict[str, Exception], tmp_path: Path) -> Path:
    """A run with a checkpoint, from when all was well."""
    run_dir = tmp_path / "run"
    config = load([*JOB, f"run_dir={run_dir}"], Sources())
    worlds = make_envs(config, config.env.num_envs, torch.device("cpu"))
    agent = make_agent(config, worlds, Fabric(accelerator="cpu", devices=1))
    create(run_dir, config).close()
    checkpoint.save(run_dir / "checkpoints", 64, {"agent": agent.state_dict(replay=False)}, {}, keep_last=1)
    return run_dir


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr of a command that is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", ["train", "eval", "export"])
def test_what_it_raises_when_it_is_made(
    command: str, run_dir: Path, trouble: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"train": [*JOB, "run_dir=other"]}.get(command, [command, f"run={run_dir}"])
    trouble["init"] = RuntimeError("the licence server is away\ncall somebody")
    expected = ["sheeplike: its maps are old", "sheeplike: the licence server is away"]
    assert told(arguments, capsys) == expected
    assert not Path("other").exists()


def test_what_it_lacks_when_it_is_played(
    run_dir: Path, trouble: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    trouble["reset"] = DependencyNotInstalled("pygame is not installed")
    assert told(["eval", f"run={run_dir}"], capsys) == ["sheeplike: pygame is not installed"]


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(12, "no room")])
def test_what_helps_where_memory_is_short(
    error: Exception, trouble: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    trouble["init"] = error
    assert "; out of memory: expected are" in told([*JOB, "run_dir=other"], capsys)[-1]
