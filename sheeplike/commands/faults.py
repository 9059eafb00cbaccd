"""What is left of a run whose numbers are no longer finite: enough to find out where it began."""

from __future__ import annotations

from pathlib import Path

import torch

from sheeplike.agents.agent import Agent
from sheeplike.commands.errors import CommandError
from sheeplike.commands.snapshot import random_state
from sheeplike.loop import LoopState

FAULTS = "faults"


class Halted(CommandError):
    """Training cannot go on: updates stay non-finite."""

    status = 70  # EX_SOFTWARE of sysexits.h


class Unsaved(CommandError):
    """The run ended, and its last checkpoint could not be written."""

    status = 74  # EX_IOERR of sysexits.h


def dump(run_dir: Path, agent: Agent, state: LoopState) -> Path:
    """Save what the first of the skipped updates saw, with the parameters that it met, which it did not change.

    Returns:
        ``<run_dir>/faults/step_<policy steps>.pt``: ``batch`` (see ``Agent.offending_batch``), ``agent``, ``rng`` and
        the counters of the run; to be read with ``torch.load(path, weights_only=True)``.

    Raises:
        OSError: it cannot be written.
    """
    path = run_dir / FAULTS / f"step_{state.policy_steps:012d}.pt"
    content = {
        "batch": agent.offending_batch(),
        "agent": agent.state_dict(replay=False),
        "rng": random_state(),
        "policy_steps": state.policy_steps,
        "gradient_steps": state.gradient_steps,
    }
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    return path
