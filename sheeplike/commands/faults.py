"""What ends a run against its will, and what it leaves to look into."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sheeplike import checkpoint
from sheeplike.agents.agent import Agent
from sheeplike.checkpoint import write_part
from sheeplike.commands.agents import make_agent_as_trained
from sheeplike.commands.building import launch, make_envs
from sheeplike.commands.config import load_saved
from sheeplike.commands.errors import CommandError
from sheeplike.commands.eval import acting
from sheeplike.commands.run_directory import config_file
from sheeplike.loop import LoopState
from sheeplike.run.snapshot import random_state

FAULTS = "faults"


class Halted(CommandError):
    """Training cannot go on: updates stay non-finite."""

    status = 70  # EX_SOFTWARE of sysexits.h


class Unsaved(CommandError):
    """The run ended, and its last checkpoint could not be written."""

    status = 74  # EX_IOERR of sysexits.h


def dump(run_dir: Path, agent: Agent, state: LoopState) -> Path | None:
    """Save what the first of the skipped updates saw, with the parameters that it met, which it did not change.

    Returns:
        ``<run_dir>/faults/step_<policy steps>.pt``: ``batch`` (see ``Agent.offending_batch``), ``agent``, ``rng`` and
        the counters of the run; to be read with ``torch.load(path, weights_only=True)``. None if none was skipped.

    Raises:
        OSError: it cannot be written.
    """
    batch = agent.offending_batch()
    if not batch:
        return None
    path = run_dir / FAULTS / f"step_{state.policy_steps:012d}.pt"
    content = {
        "batch": batch,
        "agent": agent.state_dict(replay=False),
        "rng": random_state(),
        "policy_steps": state.policy_steps,
        "gradient_steps": state.gradient_steps,
    }
    path.parent.mkdir(exist_ok=True)
    fresh = path.with_suffix(".tmp")
    write_part(fresh, content)
    fresh.replace(path)
    return path


def last_sound(root: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The newest checkpoint that is whole and was not made while updates were being skipped, as read."""
    for path in reversed(checkpoint.list_checkpoints(root)):
        with suppress(checkpoint.Corrupt):
            meta, parts = checkpoint.load(path)
            if not int(parts["agent"].get("skipped_in_a_row", 0)):
                return meta, parts
    return None


def examine(path: Path | str) -> dict[str, float]:
    """Losses and gradient norms on the batch of a :func:`dump`, with the agent that met it.

    Args:
        path: ``<run_dir>/faults/step_….pt``; the run's configuration is read too.

    Returns:
        What ``Agent.examine`` returns: ``nonfinite/<key>`` of the data, ``loss/<name>``, ``grad_norm/<parameter>``.

    Raises:
        CommandError: the run's configuration is not there, or not valid.
    """
    path = Path(path)
    found = torch.load(path, map_location="cpu", weights_only=True)
    config = load_saved(config_file(path.parents[1], "run"), [])
    config = replace(acting(config), fabric=replace(config.fabric, accelerator="cpu", precision="32-true"))
    worlds = make_envs(config, 1, torch.device("cpu"))
    agent = make_agent_as_trained(config, worlds, launch(config))
    worlds.close()
    agent.load_state_dict(found["agent"])
    return {name: float(value) for name, value in agent.examine(found["batch"]).items()}
