"""A whole run as a checkpoint, and back: everything that an exact continuation needs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from sheeplike import checkpoint
from sheeplike.agents.agent import Agent, Step
from sheeplike.config.schema import Config
from sheeplike.envs.spaces import Spaces
from sheeplike.loop import LoopState, first_step
from sheeplike.run.recorder import Recorder

STEP = ("obs", "reward", "is_first", "is_last", "is_terminal")  # of the current step; the next one has another action


def take(
    agent: Agent, envs: VectorEnv, recorder: Recorder, config: Config, state: LoopState
) -> tuple[dict[str, Any], dict[str, Any], checkpoint.History | None]:
    """Collect a checkpoint: its parts by file name, its metadata, and the replay, or None.

    All rows up to here are written first: nobody would write them after a resume.
    """
    recorder.flush()
    step = {name: getattr(state.step, name) for name in STEP}
    counters = {name: getattr(state, name) for name in ("policy_steps", "gradient_steps", "due")}
    counters |= {"seconds": recorder.seconds, "pauses": dict(recorder.pauses)}
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
    spaces = Spaces.of(envs.single_observation_space, envs.single_action_space)
    meta = {"env": config.env.name, "agent": config.agent.name, "spaces": spaces and spaces.model_dump(mode="json")}
    if "eval/return_mean" in recorder.latest:
        meta["score"] = recorder.latest["eval/return_mean"]  # decides which checkpoint is the best
    return parts, meta, agent.history if config.checkpoint.replay else None


def restore(
    parts: Mapping[str, Any], start: int, config: Config, agent: Agent, envs: VectorEnv, recorder: Recorder
) -> LoopState:
    """Put a checkpoint back into objects that were built for it; returns where the run stood.

    Every tensor is copied into one of the shape and type that the run makes itself: what is wrong shows here.

    Args:
        start: policy steps of the checkpoint.

    Raises:
        ValueError, KeyError, …: it is of another agent or of other environments.
        Corrupt: a file of the replay has been removed or altered since it was verified.
    """
    monitor, loop = parts["monitor"], parts["loop"]
    counters = loop["counters"]
    most = config.agent.updates(0, start + envs.num_envs, envs.num_envs)
    largest = 2**62 if most is None else most + 1
    for name, low, high in (("policy_steps", start, start), ("gradient_steps", 0, 2**62), ("due", 0, largest)):
        if type(counters[name]) is not int or not low <= counters[name] <= high:
            raise ValueError(f"{name} is {counters[name]!r}")
    agent.load_state_dict(parts["agent"] | parts.get("memory", {}))
    checkpoint.check_finite("agent", agent.state_dict(replay=False))
    if checkpoint.HISTORY in parts:
        parts[checkpoint.HISTORY].copy_to(agent.history)
    envs.load_state_dict(parts["envs"])
    recorder.episodes.load_state_dict(monitor["episodes"])
    recorder.metrics.load_state_dict(monitor["metrics"])
    recorder.latest = {str(name): float(value) for name, value in monitor["latest"].items()}
    recorder.skipped = 0.0
    player = agent.player(envs.num_envs)
    player.load_state_dict(loop["player"])
    step = _step(loop["step"], envs)
    if not getattr(envs, "exact_resume", True):
        # They begin new episodes at their next step: those under way were cut after this one.
        step.is_last = torch.ones_like(step.is_last)
    set_random_state(parts["rng"])
    recorder.trained = float(counters["seconds"])
    recorder.pauses |= {name: float(counters.get("pauses", {}).get(name, 0.0)) for name in recorder.pauses}
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


def _step(saved: Mapping[str, Any], envs: VectorEnv) -> Step:
    """The step that is acted upon next."""
    obs = {}
    for key, space in envs.single_observation_space.spaces.items():
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        obs[key] = torch.empty(envs.num_envs, *space.shape, dtype=dtype, device=envs.device).copy_(saved["obs"][key])
    step = first_step(obs, envs.num_envs)
    for name in STEP[1:]:  # each in memory of its own, which those of a first step share
        setattr(step, name, torch.empty_like(getattr(step, name)).copy_(saved[name]))
    return step
