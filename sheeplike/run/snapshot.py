"""Conversion of a whole run into a checkpoint, and back: everything that an exact continuation needs."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv

from sheeplike import checkpoint
from sheeplike.agents.agent import Agent, Step
from sheeplike.config.errors import as_command_errors
from sheeplike.config.saved import changes, describe_changes, may_change
from sheeplike.config.schema import Config
from sheeplike.envs.spaces import Spaces
from sheeplike.loop import LoopState, first_step
from sheeplike.monitor.progress import phase
from sheeplike.nn.compilation import is_out_of_memory
from sheeplike.options import CommandError
from sheeplike.run.build import numerics_device
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE
from sheeplike.run.recorder import Recorder
from sheeplike.terminal import first_sentence, info, warn

STEP = ("obs", "reward", "is_first", "is_last", "is_terminal")  # saved fields of the current step
# Exceptions raised when a checkpoint does not fit the agent or the environments.
MISMATCH_ERRORS = (LookupError, TypeError, AttributeError, RuntimeError, OverflowError, ValueError, checkpoint.Corrupt)


class Saved(NamedTuple):
    """A checkpoint to resume from."""

    step: int
    parts: dict[str, Any]
    changed: Collection[str]  # keys whose values have changed since it was made
    compiled: str | None  # compilation mode of the updates before it

    def is_finished(self, config: Config) -> bool:
        """Return True if all of ``total_steps``, and the updates due after them, are made."""
        with suppress(LookupError, TypeError):  # a forged checkpoint is refused when it is restored
            # Updates left due count only if this step reached total_steps, not if total_steps was lowered below it.
            due = self.parts["loop"]["counters"]["due"] and self.step - config.env.num_envs < config.total_steps
            return self.step >= config.total_steps and not due
        return False


def read(run_dir: Path, config: Config) -> Saved:
    """Read the newest whole checkpoint; prints what has changed and why the resume may not be exact."""
    with as_command_errors(ValueError, TypeError, checkpoint.Corrupt, FileNotFoundError):
        with phase("reading the checkpoint"):
            meta, parts = _read_newest(run_dir, config)
        changed = changes(meta["config"], config)
        if forbidden := forbidden_changes(changed):
            raise CommandError(f"{run_dir}: {forbidden}; expected the values that the run has had; nearest: a new run")
        if changed:
            info(f"changed: {describe_changes(changed)}")
        if "memory" not in parts:
            warn(
                "this resume is approximate: with checkpoint.replay=false, now or when the checkpoint was made, the "
                "agent begins again with an empty memory"
            )
        here = checkpoint.versions() | {"device": numerics_device(config)}
        before = meta["versions"] | {"device": meta["device"]}
        if different := [f"{name} {was} -> {here.get(name)}" for name, was in before.items() if here.get(name) != was]:
            warn(f"this resume may differ in the last bits: {', '.join(different)}")
        return Saved(meta["step"], parts, changed, meta["compile"])


def _read_newest(run_dir: Path, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = None if config.checkpoint.replay else ("agent", "envs", "loop", "monitor", "rng")
    try:
        return checkpoint.load_latest(run_dir / CHECKPOINTS, only=parts)
    except checkpoint.UnknownFormat:
        raise
    except checkpoint.Corrupt as error:
        hint = "; checkpoint.replay=false goes on with an empty replay, if that alone is damaged"
        hint = hint if config.checkpoint.replay else ""
        raise CommandError(f"{error}; expected another run_dir{hint}") from error


def forbidden_changes(changed: Mapping[str, tuple[Any, Any]]) -> str | None:
    """Return a clause about changes that only an edit of ``config.yaml`` can have made; None if there are none."""
    refused = {key: values for key, values in changed.items() if not may_change(key)}
    return f"{CONFIG_FILE} was edited since this checkpoint: {describe_changes(refused)}" if refused else None


@contextmanager
def checkpoint_mismatch(run_dir: Path) -> Iterator[None]:
    """Turn errors of loading a checkpoint that does not fit the agent or the environments into one line."""
    try:
        yield
    except CommandError:
        raise
    except MISMATCH_ERRORS as error:
        if is_out_of_memory(error):
            raise
        what = "the checkpoint is not of the agent and the environments in its config.yaml"
        raise CommandError(f"{run_dir}: {what}: {type(error).__name__}: {first_sentence(error)}") from error


def take(
    agent: Agent, envs: VectorEnv, recorder: Recorder, config: Config, state: LoopState
) -> tuple[dict[str, Any], dict[str, Any], checkpoint.History | None]:
    """Return a checkpoint: its parts by file name, its metadata, and the replay or None."""
    recorder.flush()  # a resumed run does not write these rows again
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
        # The memory is a separate part, which an evaluation need not read.
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
    """Load the checkpoint of policy step ``start`` into objects that were built for its run.

    Every tensor is copied into one that the run has made, so a wrong shape or type raises one of ``MISMATCH_ERRORS``.
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
    if not envs.exact_resume:
        # These worlds cannot be restored: this step is the last of their episodes.
        step.is_last = torch.ones_like(step.is_last)
    set_random_state(parts["rng"])
    recorder.trained = float(counters["seconds"])
    recorder.pauses |= {name: float(counters.get("pauses", {}).get(name, 0.0)) for name in recorder.pauses}
    due = counters["due"] if "memory" in parts else 0  # an empty memory has nothing to learn from
    return LoopState(player, step, counters["policy_steps"], counters["gradient_steps"], due)


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002, plugins may use it
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """Return the states of the global generators of torch, CUDA, NumPy and Python."""
    kind, words, *rest = np.random.get_state()  # noqa: NPY002
    state = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(words.astype(np.int64)), *rest],
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


def _step(saved: Mapping[str, Any], envs: VectorEnv) -> Step:
    """Return the current step, whose action is chosen next."""
    obs = {}
    for key, space in envs.single_observation_space.spaces.items():
        dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype
        obs[key] = torch.empty(envs.num_envs, *space.shape, dtype=dtype, device=envs.device).copy_(saved["obs"][key])
    step = first_step(obs, envs.num_envs)
    for name in STEP[1:]:  # the tensors of a first step share memory; these must not
        setattr(step, name, torch.empty_like(getattr(step, name)).copy_(saved[name]))
    return step
