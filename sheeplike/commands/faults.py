"""What ends a run against its will, and what it leaves: a batch to look into, or advice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sheeplike.agents.agent import Agent
from sheeplike.commands.errors import CommandError
from sheeplike.commands.memory import is_out_of_memory, memory_advice
from sheeplike.commands.schema import Config
from sheeplike.commands.snapshot import random_state
from sheeplike.loop import LoopState

FAULTS = "faults"


class Halted(CommandError):
    """Training cannot go on: updates stay non-finite."""

    status = 70  # EX_SOFTWARE of sysexits.h


class Unsaved(CommandError):
    """The run ended, and its last checkpoint could not be written."""

    status = 74  # EX_IOERR of sysexits.h


@contextmanager
def explained(config: Config, spaces: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Where memory is short inside, say what the run takes and what would help.

    Args:
        spaces: gives ``space`` and ``actions`` of one world, or nothing as long as there is none.

    Raises:
        CommandError: instead of whatever said that memory is short.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise CommandError(f"{reason}; {memory_advice(config, error, **spaces())}") from error


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
