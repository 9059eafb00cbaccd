"""Failures of building, or for want of memory: one line, in each command that builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import warp
from gymnasium import spaces
from gymnasium.error import DependencyNotInstalled
from lightning.fabric import Fabric

from sheeplike import checkpoint
from sheeplike.__main__ import main
from sheeplike.config.compose import load
from sheeplike.config.errors import as_command_errors
from sheeplike.config.schema import Fabric as FabricOptions
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.envs.contract import GaveUp
from sheeplike.memory import SequenceReplay
from sheeplike.nn.compilation import is_out_of_memory
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run import snapshot
from sheeplike.run.build import (
    _make_deterministic,
    explain_oom,
    launch,
    launch_ranks,
    make_agent,
    make_envs,
    numerics_device,
)
from sheeplike.run.run_dir import claim

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
    found: dict[str, Exception] = {}
    monkeypatch.setattr(Moody, "trouble", found)
    spec = gymnasium.envs.registration.EnvSpec("Moody-v0", entry_point=Moody, max_episode_steps=9)
    monkeypatch.setitem(gymnasium.registry, "Moody-v0", spec)
    return found


@pytest.fixture
def run_dir(trouble: dict[str, Exception], tmp_path: Path) -> Path:
    """A run with a checkpoint, from when all was well."""
    run_dir = tmp_path / "run"
    config = load([*JOB, f"run_dir={run_dir}"], Sources()).config
    envs = make_envs(config, config.env.num_envs, torch.device("cpu"))
    agent = make_agent(config, envs, Fabric(accelerator="cpu", devices=1))
    with claim(run_dir, config):
        pass
    parts = {"agent": agent.state_dict(replay=False)}
    with checkpoint.Writer(run_dir / "checkpoints", keep_last=1, config=to_data(config)) as writer:
        writer.save(64, parts, {}, finite=(), wait=True)
    return run_dir


def error_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr of a command that is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("command", ["train", "eval"])
def test_what_it_raises_when_it_is_made(
    command: str, run_dir: Path, trouble: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"train": [*JOB, "run_dir=other"]}.get(command, [command, f"run={run_dir}"])
    trouble["init"] = RuntimeError("the licence server is away\ncall support")
    expected = ["its maps are old", "sheeplike: Moody-v0: RuntimeError: the licence server is away"]
    assert error_lines(arguments, capsys) == expected
    assert not Path("other").exists()


def test_what_it_lacks_when_it_is_played(
    run_dir: Path, trouble: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    trouble["reset"] = DependencyNotInstalled("pygame is not installed")
    assert error_lines(["eval", f"run={run_dir}"], capsys) == ["sheeplike: pygame is not installed"]


# Memory


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(12, "no room")])
def test_what_helps_where_memory_is_short(
    error: Exception, trouble: dict[str, Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    trouble["init"] = error
    line = error_lines([*JOB, "run_dir=other"], capsys)[-1]
    assert "env.num_envs=1, agent." in line


def test_an_environment_that_gave_up_for_want_of_memory_has_given_up() -> None:
    config = load(["exp=ppo", "env=cartpole_balance"], Sources()).config
    with pytest.raises(GaveUp, match="big"), explain_oom(config):
        raise GaveUp("MemoryError: big; the environment failed 2 times in a row") from MemoryError("big")


def test_a_replay_that_is_too_large_has_one_remedy() -> None:
    config = load(["exp=dreamer_v3", "env=cartpole_balance", "profile=cpu"], Sources()).config
    with pytest.raises(CommandError) as caught, explain_oom(config):
        SequenceReplay({"is_first": ((), torch.bool), "is_last": ((), torch.bool)}, num_envs=4, size=10**15, sequence=9)
    assert re.search(r"^agent.replay_size: .* \d+", str(caught.value))


@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
def test_the_settings_that_would_help_are_valid(agent: str) -> None:
    job = [f"exp={agent}", "env=franka_pick", "profile=gpu", "fabric.accelerator=cpu"]
    with pytest.raises(CommandError) as caught, explain_oom(load(job, Sources()).config):
        torch.empty(2**50, dtype=torch.uint8)
    _, _, helps = str(caught.value).partition("; what helps: ")
    settings = helps.removesuffix(", or smaller images").split(", ")
    assert len(settings) >= 2
    for setting in settings:
        load([*job, setting], Sources())
    with pytest.raises(ZeroDivisionError), explain_oom(load(job, Sources()).config):
        1 / 0  # noqa: B018


def of_the_replay() -> None:
    spec = {"is_first": ((), torch.bool), "is_last": ((), torch.bool), "pixels": ((2**30,), torch.uint8)}
    SequenceReplay(spec, num_envs=1, size=2**20, sequence=4)


def behind_another() -> None:
    with as_command_errors(RuntimeError):
        torch.empty(2**50, dtype=torch.uint8)


def without_a_cause() -> None:
    try:
        torch.empty(2**50, dtype=torch.uint8)
    except RuntimeError:
        raise KeyError("while cleaning up")  # noqa: B904


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**50),
        lambda: np.empty(2**50),
        lambda: jnp.zeros(2**46, jnp.uint8).block_until_ready(),
        of_the_replay,
        behind_another,
        without_a_cause,
    ],
    ids=["torch", "numpy", "jax", "replay", "CommandError", "context"],
)
def test_what_says_that_memory_is_short(allocate: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        allocate()
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "says_so"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("Failed to allocate 1073741824 bytes on device 'cuda:0'"), True),
        (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("OSError: [Errno 12] Cannot allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (OSError(28, ""), False),
        (None, False),
    ],
)
def test_what_other_devices_say(error: Exception | None, says_so: bool) -> None:
    assert is_out_of_memory(error) == says_so


@pytest.mark.usefixtures("trouble")
def test_a_run_that_goes_on_with_other_threads_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = load(JOB, Sources()).config
    meta = {"versions": checkpoint.versions(), "device": numerics_device(config)}
    meta |= {"config": to_data(config), "step": 0}

    def warned(**other: Any) -> str:
        monkeypatch.setattr(snapshot, "_read_newest", lambda *_: (meta | other, {"memory": {}}))
        snapshot.read(tmp_path, config)
        return capsys.readouterr().err

    assert warned() == ""
    assert warned(device="9 threads of torch").endswith(f": device 9 threads of torch -> {numerics_device(config)}\n")
    assert warned(versions=meta["versions"] | {"another": "1.0"}).endswith(": another 1.0 -> None\n")


def test_a_world_that_changes_torchs_modes_does_not_change_learning(
    trouble: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changing(self: Moody, **kwargs: Any) -> None:
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)

    monkeypatch.setattr(Moody, "__init__", changing)
    config = load(JOB, Sources()).config
    make_envs(config, config.env.num_envs, torch.device("cpu")).close()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.usefixtures("trouble")
def test_a_launcher_of_more_processes_than_the_configuration_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(CommandError, match="WORLD_SIZE=2"):
        launch_ranks(load([*JOB, "fabric.accelerator=cpu"], Sources()).config, resume=False)


@pytest.mark.usefixtures("trouble")
def test_a_cluster_that_starts_several_tasks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("SLURM_JOB_NAME", "mine")
    fabric = launch(load([*JOB, "fabric.accelerator=cpu"], Sources()).config)
    assert (fabric.world_size, fabric.device.type) == (1, "cpu")


@pytest.mark.usefixtures("trouble")
def test_a_run_does_not_learn_as_the_one_before_it_in_the_program() -> None:
    config = load([*JOB, "fabric.accelerator=cpu"], Sources()).config
    launch(config.replace(fabric=FabricOptions(accelerator="cpu", precision="bf16-mixed", deterministic=True)))
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == ("high", True)
    launch(config)
    assert (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()) == ("highest", False)


@pytest.mark.parametrize(
    ("accelerator", "key", "expected"),
    [
        ("cuda", "deterministic", "NOT_GUARANTEED"),
        ("cuda", "deterministic_physics", "RUN_TO_RUN"),
        ("cpu", "deterministic_physics", "NOT_GUARANTEED"),
    ],
)
def test_warp_is_asked_for_the_same_bits_by_a_key_of_its_own(
    accelerator: str, key: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = warp.config.DeterministicMode
    monkeypatch.setattr(warp.config, "deterministic", modes.NOT_GUARANTEED)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    _make_deterministic(FabricOptions(accelerator=accelerator, **{key: True}))
    assert warp.config.deterministic == modes[expected]


def test_a_gpu_without_bf16_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(["exp=ppo", "env=cartpole_balance", "profile=cpu"], Sources()).config
    config = config.replace(fabric=FabricOptions(accelerator="cuda", precision="bf16-mixed"))
    for name, value in {"is_available": True, "get_device_name": "Tesla T4", "is_bf16_supported": False}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value, **_: value)
    with pytest.raises(InvalidOption) as refused:
        launch(config)
    assert (refused.value.key, refused.value.nearest) == ("fabric.precision", "32-true")
    assert "Tesla T4" in str(refused.value)


BROKEN_CUDA = """
import jax
from jax._src import xla_bridge

def broken():
    raise RuntimeError("the driver is too old for this client")

xla_bridge.register_backend_factory("broken", broken, priority=500, fail_quietly=False)
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources
from sheeplike.commands import train
from sheeplike.envs.mjx import vector_env
from sheeplike.run import experiment
from sheeplike.run.build import launch

launch(load(["exp=ppo", "env=cartpole_balance", "profile=cpu"], Sources()).config)
print(jax.devices())
"""
MAKE = (
    BROKEN_CUDA.partition("from sheeplike.config")[0]
    + """
import sheeplike.envs
from sheeplike import host

host.driver_problem = lambda: "it is too old"
print(sheeplike.envs.make("cartpole_balance", num_envs=2, image_size=16).device)
"""
)


@pytest.mark.parametrize("program", [BROKEN_CUDA, MAKE], ids=["run", "make"])
def test_a_cpu_does_not_start_the_gpu_client_of_jax(program: str) -> None:
    without = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "cpu" in ended.stdout.lower()
