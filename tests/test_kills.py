"""A run that is killed a hundred times, at moments of no choosing, has a valid checkpoint every time."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from sheeplike import checkpoint

KILLS = int(os.environ.get("KILLS", "50"))
EVERY = 100  # policy steps between two checkpoints
LOGGED = 4  # policy steps between two rows, the record of how far the run had come
MAIN = """
import sys
from sheeplike import checkpoint
from sheeplike.__main__ import main

checkpoint.CHUNK_BYTES = 500_000  # so that a short run fills some
main(sys.argv[1:])
"""
ARGUMENTS = [
    "env=cartpole_balance",
    "dry_run=true",
    "env.num_envs=4",
    "total_steps=1_000_000",
    f"checkpoint.every={EVERY}",
    f"log_every={LOGGED}",
    "eval.every=null",
    "video_every=null",
    "logger=[]",
    "resume=auto",
]


def reached(run_dir: Path) -> int:
    """Policy steps of the last row: rows come one interval late, and the last one may be cut short."""
    rows = (run_dir / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    whole = [row for row in rows if row.endswith(b"\n")]
    return json.loads(whole[-1])["step"] if whole else 0


def lives_and_dies(command: list[str], run_dir: Path, chance: random.Random) -> int:
    """Start the run, kill it a while after it has gone on, and return the step that it had gone on from."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began, newest = time.monotonic(), checkpoint.list_checkpoints(run_dir / "checkpoints")
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith("  simulation "):  # the end of the banner: the loop begins
            break
    else:
        raise AssertionError(f"the run ended by itself: {''.join(output)}")
    while not newest and not checkpoint.list_checkpoints(run_dir / "checkpoints"):
        time.sleep(0.1)  # there is nothing to lose before the first one
    time.sleep(chance.uniform(0.0, 5.0))
    process.send_signal(signal.SIGKILL)
    process.stdout.read()
    process.wait()
    assert process.returncode == -signal.SIGKILL, "".join(output)
    (told,) = [line for line in output if "policy steps, " in line and line.startswith("  run ")]
    print(f"{time.monotonic() - began:.1f} s, {len(newest)} checkpoints before; {told.strip()}", flush=True)
    return int(told.split("policy step ")[1].split(":")[0].replace(",", "")) if "continued" in told else 0


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
def test_every_kill_leaves_a_valid_checkpoint(agent: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-c", MAIN, f"exp={agent}", *ARGUMENTS, f"run_dir={run_dir}"]
    chance = random.Random(agent)
    before = valid = lost_most = torn = 0
    for kill in range(KILLS):
        begun = lives_and_dies(command, run_dir, chance)
        assert begun == before, f"kill {kill}: it went on from {begun}, the newest valid checkpoint was {before}"
        root = run_dir / "checkpoints"
        torn += any(path.name.startswith(".tmp-") for path in run_dir.glob("*/*"))
        with warnings.catch_warnings(action="error"):  # one that is damaged would be passed over with a warning
            before = checkpoint.load_latest(root)[0]["step"]
        valid += 1
        chunks = list(run_dir.glob("replay/*.pt"))
        assert before >= begun, "the run went back"
        lost_most = max(lost_most, reached(run_dir) - before)
    print(f"{agent}: {valid} of {KILLS} valid, {torn} killed while writing, {lost_most} policy steps lost at most")
    assert valid == KILLS
    assert torn > 0 or KILLS < 50, "no kill hit a checkpoint that was being written: the test is too kind"
    assert bool(chunks) == (agent == "dreamer_v3")
    # While a checkpoint is on its way to the disk the run goes on: what it does meanwhile is lost as well.
    assert lost_most <= 2 * EVERY
