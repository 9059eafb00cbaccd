"""A run that was stopped and went on in another process is bit for bit the run that would have been."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sheeplike import checkpoint

STEPS = 96
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
JOBS = {
    "dreamer_v3": [
        "agent.replay_ratio=0.5",  # two updates in every iteration
        "agent.size={deter:64,hidden:16,classes:4,depth:2,units:16}",
        "agent.imagination_length=5",
    ],
    "ppo": [
        "agent.rollout_length=8",
        "agent.frame_stack=2",
        "agent.augment=true",
        "agent.kl_control=adaptive_lr",
        "agent.observations=['*']",
    ],
}
COMMON = [
    "env=cartpole_balance",
    "dry_run=true",
    f"total_steps={STEPS}",
    "env.num_envs=4",
    "env.image_size=48",
    "log_every=20",
    "video_every=48",
    "eval.every=48",
    "checkpoint.every=32",
    "checkpoint.keep_last=9",
    "logger=[]",
    "fabric.deterministic=true",
]
MAIN = """
import sys
from sheeplike import checkpoint
from sheeplike.__main__ import main

checkpoint.CHUNK_BYTES = 200_000  # some seven time steps
"""
STOP_IN_A_BURST = """
import os, signal
from sheeplike.agents.{module} import {agent} as Agent

update, done = Agent.update, 0

def counted(self):
    global done
    done += 1
    if done == {stop_at}:
        os.kill(os.getpid(), signal.SIGTERM)
    return update(self)

Agent.update = counted
"""


class Run(NamedTuple):
    directory: Path
    status: int
    output: str

    def rows(self) -> list[dict[str, float]]:
        found = [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "seconds" and not k.startswith("time/")} for row in found]

    def steps(self) -> list[int]:
        return [
            int(path.name.removeprefix("step_")) for path in checkpoint.list_checkpoints(self.directory / "checkpoints")
        ]


class Process:
    """A command line in a process of its own, under way."""

    def __init__(self, directory: Path, *arguments: str, code: str = "") -> None:
        self.directory = directory
        command = [sys.executable, "-c", f"{MAIN}{code}\nmain(sys.argv[1:])"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen([*command, *arguments], env=ENVIRONMENT, **pipes)

    def end(self) -> Run:
        output, _ = self.process.communicate(timeout=400)
        return Run(self.directory, self.process.returncode, output)


def begin(agent: str, directory: Path, *, code: str = "", extra: tuple[str, ...] = ()) -> Process:
    """Side by side with other processes: most of the time is spent on their start."""
    return Process(directory, f"exp={agent}", *COMMON, *JOBS[agent], f"run_dir={directory}", *extra, code=code)


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """Every number, bit for bit; times apart."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        bits = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other) if tensor.numel()]
        assert not bits or torch.equal(*bits), where
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            if key not in ("seconds", "pauses") and not str(key).startswith("time/"):
                assert_same(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{where}/{index}")
    else:
        assert one == other or (one != one and other != other), where  # a metric may have had no sample


def assert_same_run(one: Run, other: Run) -> None:
    """Every tensor of the last checkpoint (the next observation is one of them), every step seen and every row."""
    (meta, parts), (other_meta, other_parts) = (
        checkpoint.load_latest(run.directory / "checkpoints") for run in (one, other)
    )
    assert meta["step"] == other_meta["step"] == STEPS
    seen = [steps_in(found.pop("history", None)) for found in (parts, other_parts)]
    assert parts.keys() == other_parts.keys() == {"agent", "memory", "envs", "loop", "monitor", "rng"}
    assert_same(parts, other_parts)
    assert_same(*seen)
    assert one.rows() == other.rows()
    assert one.rows()[-1]["step"] > STEPS - 20


class Steps:
    def __init__(self) -> None:
        self.pieces: list[tuple[int, Mapping[str, torch.Tensor]]] = []

    def write_steps(self, start: int, steps: Mapping[str, torch.Tensor]) -> None:
        self.pieces.append((start, steps))


def steps_in(stored: checkpoint.Stored | None) -> dict[str, torch.Tensor]:
    if stored is None:
        return {}
    found = Steps()
    stored.copy_to(found)
    assert len(found.pieces) > 2, "in chunks"
    assert found.pieces[0][0] == 0
    held = {key: torch.cat([steps[key] for _, steps in found.pieces]) for key in found.pieces[0][1]}
    assert {len(value) for value in held.values()} == {STEPS // 4}
    return held


@pytest.mark.parametrize(
    ("agent", "name", "stop_at"),
    [("dreamer_v3", "DreamerV3", 9), ("ppo", "PPO", 6)],
    ids=JOBS,
)
@pytest.mark.slow
def test_stopped_by_a_signal_in_the_middle_of_a_burst_and_resumed(
    agent: str, name: str, stop_at: int, tmp_path: Path
) -> None:
    # The process that is stopped makes the other run before: most of its time is spent on the start.
    code = f"main([*sys.argv[1:], 'run_dir={tmp_path / 'straight'}'])\n"
    code += STOP_IN_A_BURST.format(module=agent, agent=name, stop_at=stop_at)
    stopped = begin(agent, tmp_path / "stopped", code=code).end()
    assert stopped.status == 75, stopped.output
    last = stopped.steps()[-1]
    resumed = Process(stopped.directory, f"resume={stopped.directory}").end()
    assert resumed.status == 0, resumed.output
    assert "SIGTERM" in stopped.output
    assert f"resume={resumed.directory}" in stopped.output
    assert last < STEPS
    assert last % 32 != 0, "saved because of the signal"
    assert_same_run(Run(tmp_path / "straight", 0, ""), resumed)


@pytest.mark.slow
@pytest.mark.parametrize("agent", JOBS)
@pytest.mark.parametrize("mode", ["off", "auto"])
def test_continued_from_a_checkpoint_on_the_way(agent: str, mode: str, tmp_path: Path) -> None:
    straight = begin(agent, tmp_path / "straight", extra=(f"compile={mode}",)).end()
    assert straight.status == 0, straight.output
    killed = tmp_path / "killed"
    shutil.copytree(straight.directory, killed)
    for path in checkpoint.list_checkpoints(killed / "checkpoints"):
        if int(path.name.removeprefix("step_")) > 64:
            shutil.rmtree(path)
    resumed = Process(killed, f"resume={killed}").end()
    assert resumed.status == 0, resumed.output
    assert_same_run(straight, resumed)
