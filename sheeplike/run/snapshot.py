"""A whole run as a checkpoint, and back: everything that an exact continuation needs."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from sheeplike import checkpoint
from sheeplike.agents.agent import Agent, Step
from sheeplike.config.schema import Config
from sheeplike.loop import LoopState
from sheeplike.run.recorder import Recorder


def take(
    agent: Agent, envs: VectorEnv, recorder: Recorder, config: Config, state: LoopState
) -> tuple[dict[str, Any], dict[str, Any], checkpoint.History | None]:
    """Collect a checkpoint: its parts by file name, its metadata, and the replay, or None.

    All rows up to here are written first: nobody would write them after a resume.
    """
    recorder.flush()
    step = {f.name: getattr(state.step, f.name) for f in fields(Step)}
    counters = {name: getattr(state, name) for name in ("policy_steps", "gradient_steps", "due")}
    counters["seconds"] = recorder.seconds
    learner = agent.state_dict(replay=False)
    parts = {
        "agent": learner,
        "envs": envs.state_dict(),
        "loop": {"counters": counters, "step": step, "player": state.player.state_dict()},
        "monitor": {
            "episodes": recorder.episodes.state_dict(),
            "metrics": recorder.metrics.state_dict(),
            "latest": dict(recorder.latest),
        },
        "rng": random_state(),
    }
    if config.checkpoint.replay:
        # What the agent has seen is a part of its own, which an evaluation need not read.
        whole = agent.state_dict(history=False)
        parts["memory"] = {name: value for name, value in whole.items() if name not in learner}
    meta = {"env": config.env.name, "agent": config.agent.name, "due": state.due}
    if "eval/return_mean" in recorder.latest:
        meta["score"] = recorder.latest["eval/return_mean"]  # decides which checkpoint is the best
    return parts, meta, agent.history if config.checkpoint.replay else None


def restore(parts: Mapping[str, Any], agent: Agent, envs: VectorEnv, recorder: Recorder) -> LoopState:
    """Put a checkpoint back into objects that were built for it; returns where the run stood.

    Raises:
        ValueError, KeyError: it is of another agent or of other environments.
        Corrupt: a file of the replay has been removed or altered since it was verified.
    """
    device = envs.device
    agent.load_state_dict(parts["agent"] | parts.get("memory", {}))
    if checkpoint.HISTORY in parts:
        parts[checkpoint.HISTORY].copy_to(agent.history)
    envs.load_state_dict(parts["envs"])
    monitor, loop = parts["monitor"], parts["loop"]
    recorder.episodes.load_state_dict(monitor["episodes"])
    recorder.metrics.load_state_dict(monitor["metrics"])
    recorder.latest = {str(name): float(value) for name, value in monitor["latest"].items()}
    recorder.skipped = 0.0
    player = agent.player(envs.num_envs)
    player.load_state_dict(loop["player"])
    step = Step(**{k: _to(v, device) for k, v in loop["step"].items()})
    if not getattr(envs, "exact_resume", True):
        # They begin new episodes at their next step: those under way were cut after this one.
        step.is_last = torch.ones_like(step.is_last)
    counters = loop["counters"]
    for name in ("policy_steps", "gradient_steps", "due"):
        if type(counters[name]) is not int or not 0 <= counters[name] < 2**62:
            raise ValueError(f"{name} is {counters[name]!r}")
    for key, space in envs.single_observation_space.spaces.items():
        expected = (envs.num_envs, *space.shape), torch.from_numpy(np.empty(0, space.dtype)).dtype
        if (tuple(step.obs[key].shape), step.obs[key].dtype) != expected:
            raise ValueError(f"observation {key} is {step.obs[key].dtype} {tuple(step.obs[key].shape)}")
    set_random_state(parts["rng"])
    recorder.started = time.monotonic() - counters["seconds"]
    due = counters["due"] if "memory" in parts else 0  # there is nothing to learn from
    return LoopState(player, step, counters["policy_steps"], counters["gradient_steps"], due)


def seed_everything(seed: int) -> None:
    """Seed the global generators: Python's, NumPy's and torch's."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002, plugins may use it
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The states of the global generators: torch's, CUDA's, NumPy's and Python's."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(words.astype(np.int64)), *map(_plain, rest)],
        "python": random.getstate(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(state: dict[str, Any]) -> None:
    """Restore :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    kind, words, *rest = state["numpy"]
    if not 0 <= rest[0] <= len(words):
        raise ValueError(f"NumPy's generator is at place {rest[0]} of {len(words)}")
    np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def _plain(number: Any) -> float | int:
    return number.item() if isinstance(number, np.generic) else number


def _to(value: Any, device: torch.device) -> Any:
    return {k: _to(v, device) for k, v in value.items()} if isinstance(value, dict) else value.to(device)
