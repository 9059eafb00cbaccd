"""Processor time of a start: ``python tests/benchmarks/startup.py``, for ``--help``, a mistake and a comparison."""

from __future__ import annotations

import os
import subprocess
import sys

COMMANDS = {
    "help": ["--help"],
    "help of train": ["train", "--help"],
    "mistake in a key": ["exp=ppo", "env=franka_pick", "agent.epochs=0"],
    "help of compare": ["compare", "--help"],
}


def seconds(arguments: list[str]) -> float:
    """Measure one process, the start of Python included."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "sheeplike", *arguments], capture_output=True, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    for name, arguments in COMMANDS.items():
        print(f"{name:<20} {min(seconds(arguments) for _ in range(5)):.2f} s")
