"""The start-up banner: what is about to happen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from gymnasium.vector import VectorEnv

from sheeplike.agents.agent import Agent
from sheeplike.config.schema import Config
from sheeplike.host import cpu_cores


def describe_run(
    config: Config,
    run_dir: Path,
    envs: VectorEnv,
    agent: Agent,
    *,
    start: int,
    step_seconds: float,
    files: Sequence[str],
) -> dict[str, str]:
    """Return the lines of the banner, name to text; ``start`` counts the policy steps made before."""
    updates = config.agent.updates(start, config.total_steps, config.env.num_envs)
    updating = "" if updates is None else f", {updates:,} gradient steps"
    continued = f"continued from policy step {start:,}: " if start else ""
    lines = {
        "task": f"{config.env.task}: {envs.num_envs} worlds, episodes of {envs.episode_length} steps",
        "randomized": ", ".join(config.randomization),
        "device": describe_device(config, envs.device),
        **agent.describe(),
        "configs": ", ".join(files),
        "run": f"{continued}{config.total_steps - start:,} policy steps{updating}, in {run_dir}",
        "simulation": f"{envs.num_envs / step_seconds:,.0f} policy steps/s alone",
    }
    return {name: text for name, text in lines.items() if text}


def describe_device(config: Config, device: torch.device) -> str:
    """Return device, precision and profile of a run as text."""
    plural = "s" if cpu_cores() > 1 else ""
    cores = f"simulation on {cpu_cores()} core{plural}, learning on {torch.get_num_threads()}, in turns"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU: {cores}"
    exact = "; deterministic" if config.fabric.deterministic else ""
    return f"{name}; {config.fabric.precision}{exact}; profile {config.profile}"
