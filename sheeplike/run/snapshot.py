"""Conversion of a whole run into a checkpoint, and back: everything that an exact continuation needs."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

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
from sheeplike.ranks import ALONE, Ranks
from sheeplike.run.build import numerics_device
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE, checkpoint_steps, place_of
from sheeplike.run.recorder import Recorder
from sheeplike.terminal import first_sentence, info, warn

STEP = ("obs", "reward", "is_first", "is_last", "is_terminal")  # saved fields of the current step
# Keys in which a run and the one that it begins with may not differ: what is stored and predicted depends on them.
ALIKE = (
    *("env.name", "env.id", "env.action_repeat"),
    *("agent.observations", "agent.targets", "agent.reward_scaling", "agent.horizon"),
)
# Exceptions raised when a checkpoint does not fit the agent or the environments.
MISMATCH_ERRORS = (LookupError, TypeError, AttributeError, RuntimeError, OverflowError, ValueError, checkpoint.Corrupt)


class Saved(NamedTuple):
    """A checkpoint to resume from."""

    step: int
    parts: dict[str, Any]
    changed: Collection[str]  # keys whose values have changed since it was made
    run_ids: dict[str, str]  # of the run in its loggers

    def is_finished(self, config: Config) -> bool:
        """Return True if all of ``total_steps``, and the updates due after them, are made."""
        with suppress(LookupError, TypeError):  # a forged checkpoint is refused when it is restored
            # Updates left due count only if this step reached total_steps, not if total_steps was lowered below it.
            due = self.parts["loop"]["counters"]["due"] and self.step - config.env.num_envs < config.last_step
            return self.step >= config.last_step and not due
        return False


def read(run_dir: Path, config: Config, ranks: Ranks = ALONE) -> Saved:
    """Read the newest whole checkpoint; prints what has changed and why the resume may not be exact."""
    with as_command_errors(ValueError, TypeError, checkpoint.Corrupt, FileNotFoundError):
        with phase("reading the checkpoint"):
            meta, parts = _read_newest(run_dir, config) if ranks.size == 1 else (None, {})
            if meta is None or meta.get("ranks", 1) > 1:
                meta, parts = _read_shares(run_dir, config, ranks)
        if (before := meta.get("ranks", 1)) != ranks.size:
            if config.scale == "weak":
                expected = f"{before} ranks, as with scale=weak the run has had all along"
                raise CommandError(f"{run_dir}: {ranks.size} ranks: expected {expected}")
            info(f"this resume is approximate: {ranks.size} ranks in place of {before}, other random numbers")
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
        there = meta["versions"] | {"device": meta["device"]}
        if different := [f"{name} {was} -> {here.get(name)}" for name, was in there.items() if here.get(name) != was]:
            warn(f"this resume may differ in the last bits: {', '.join(different)}")
        run_ids = {str(name): str(run_id) for name, run_id in dict(meta.get("loggers", {})).items()}
        return Saved(meta["step"], parts, changed, run_ids)


def _read_newest(run_dir: Path, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        return checkpoint.load_latest(run_dir / CHECKPOINTS, only=_parts(config))
    except checkpoint.UnknownFormat:
        raise
    except checkpoint.Corrupt as error:
        hint = "; checkpoint.replay=false goes on with an empty replay, if that alone is damaged"
        hint = hint if config.checkpoint.replay else ""
        raise CommandError(f"{error}; expected another run_dir{hint}") from error


def _parts(config: Config) -> tuple[str, ...] | None:
    """Return the parts of a checkpoint to read; None: all."""
    return None if config.checkpoint.replay else ("agent", "envs", "loop", "monitor", "rng")


def _read_shares(run_dir: Path, config: Config, ranks: Ranks) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read the newest checkpoint of which every share is whole; with another number of ranks, ``shares`` holds all."""
    for step in reversed(ranks.collect(checkpoint_steps(run_dir))[0]):
        name, meta, shares, problem = f"step_{step:012d}", {}, [], ""
        try:
            meta, _ = checkpoint.load(run_dir / CHECKPOINTS / name, only=())
            own = meta["ranks"] == ranks.size
            for rank in (ranks.rank,) if own else range(meta["ranks"]):
                other, share = checkpoint.load(place_of(run_dir, rank) / CHECKPOINTS / name, only=_parts(config))
                if other["save"] != meta["save"]:
                    raise checkpoint.Corrupt(f"{run_dir}: the share of rank {rank} is of another save")
                shares.append(share)
            if own and not ranks.first:
                _, first = checkpoint.load(run_dir / CHECKPOINTS / name, only=("agent",))
                shares[0]["agent"] = first["agent"] | shares[0]["agent"]
        except checkpoint.UnknownFormat:
            raise
        except (checkpoint.Corrupt, LookupError, TypeError) as error:  # or forged metadata
            problem = str(error)
        found = ranks.collect("" if problem else meta["save"])
        if "" not in found and len(set(found)) == 1:
            return meta, shares[0] if own else shares[0] | {"shares": shares}
        if problem:
            warn(f"passing over a damaged checkpoint: {problem}")
    raise checkpoint.Corrupt(f"{run_dir}: no checkpoint has all shares; expected another run_dir")


def begin_with(run_dir: Path, agent: Agent, config: Config) -> None:
    """Let a new agent begin with networks and replay of another run, from its newest whole checkpoint."""
    with phase("reading the run to begin with"), as_command_errors(checkpoint.Corrupt, FileNotFoundError):
        meta, parts = checkpoint.load_latest(run_dir / CHECKPOINTS)
    if meta.get("ranks", 1) > 1 or "replay" not in parts.get("memory", ()):
        raise CommandError(f"agent.from={run_dir}: expected a run of DreamerV3, of one rank, saved with its replay")
    for key, (there, here) in changes(meta["config"], config).items():
        if key in ALIKE or key.startswith("env.options."):
            raise CommandError(f"agent.from={run_dir}: {key}={there} there; expected {here}")
    try:
        agent.begin_with(parts["agent"] | parts["memory"])
        if checkpoint.HISTORY in parts:
            parts[checkpoint.HISTORY].copy_to(agent.history)
    except MISMATCH_ERRORS as error:
        if is_out_of_memory(error):
            raise
        expected = "expected a run with the same worlds, observations, model and agent.replay_size"
        raise CommandError(f"agent.from={run_dir}: {first_sentence(error)}; {expected}") from error
    agent.history.chunks = []  # those files are the other run's
    data = meta["config"]["data"]
    lacks = config.data.path is None and (data["fraction"] or data["updates"])
    apart = "; for its recorded episodes set data.path" if lacks else ""
    info(f"begins with the networks of {run_dir} at step {meta['step']:,}, and its replay{apart}")


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
    agent: Agent, envs: VectorEnv, recorder: Recorder, config: Config, state: LoopState, ranks: Ranks = ALONE
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
    if not ranks.first:
        parts["agent"] = {name: value for name, value in learner.items() if name not in agent.shared_state}
    if config.checkpoint.replay:
        # The memory is a separate part, which an evaluation need not read.
        whole = agent.state_dict(history=False)
        parts["memory"] = {name: value for name, value in whole.items() if name not in learner}
    spaces = Spaces.of(envs.single_observation_space, envs.single_action_space)
    meta = {"env": config.env.name, "agent": config.agent.name, "spaces": spaces and spaces.model_dump(mode="json")}
    meta |= {"ranks": ranks.size, "save": "alone", "loggers": dict(recorder.logger.run_ids)}
    if "eval/return_mean" in recorder.latest:
        meta["score"] = recorder.latest["eval/return_mean"]  # decides which checkpoint is the best
    return parts, meta, agent.history if config.checkpoint.replay else None


def restore(
    parts: Mapping[str, Any],
    start: int,
    config: Config,
    agent: Agent,
    envs: VectorEnv,
    recorder: Recorder,
    ranks: Ranks = ALONE,
) -> LoopState:
    """Load the checkpoint of policy step ``start`` into objects that were built for its run.

    Every tensor is copied into one that the run has made, so a wrong shape or type raises one of ``MISMATCH_ERRORS``.
    """
    dealt = "shares" in parts
    if dealt:
        parts = deal(parts["shares"], agent, envs, ranks)
    whole = not dealt or envs.first_env is not None  # only worlds with numbers can be dealt
    monitor, loop = parts["monitor"], parts["loop"]
    counters = loop["counters"]
    most = config.agent.updates(0, start + config.env.num_envs, config.env.num_envs)
    largest = 2**62 if most is None else most + 1
    for name, low, high in (("policy_steps", start, start), ("gradient_steps", 0, 2**62), ("due", 0, largest)):
        if type(counters[name]) is not int or not low <= counters[name] <= high:
            raise ValueError(f"{name} is {counters[name]!r}")
    agent.load_state_dict(parts["agent"] | parts.get("memory", {}))
    checkpoint.check_finite("agent", agent.state_dict(replay=False))
    for stored, own, place in parts.get("histories", ()):
        agent.history.expected, agent.history.columns = agent.history.oldest, place
        stored.copy_to(agent.history, own)
        agent.history.columns = slice(None)
    if checkpoint.HISTORY in parts:
        parts[checkpoint.HISTORY].copy_to(agent.history)
    if whole:
        envs.load_state_dict(parts["envs"])
    else:
        envs.reset(seed=ranks.seed(config.seed + start) % 2**31)  # these first frames are not learnt from
    recorder.episodes.load_state_dict(monitor["episodes"])
    recorder.metrics.load_state_dict(monitor["metrics"])
    recorder.latest = {str(name): float(value) for name, value in monitor["latest"].items()}
    recorder.skipped = 0.0
    player = agent.player(envs.num_envs, explore=True)
    player.load_state_dict(loop["player"])
    step = _step(loop["step"], envs)
    if not (whole and envs.exact_resume):
        # These worlds are not restored: this step is the last of their episodes.
        step.is_last = torch.ones_like(step.is_last)
    if not dealt:
        set_random_state(parts["rng"])
    recorder.trained = float(counters["seconds"])
    recorder.pauses |= {name: float(counters.get("pauses", {}).get(name, 0.0)) for name in recorder.pauses}
    due = counters["due"] if "memory" in parts else 0  # an empty memory has nothing to learn from
    return LoopState(player, step, counters["policy_steps"], counters["gradient_steps"], due)


def deal(shares: Sequence[Mapping[str, Any]], agent: Agent, envs: VectorEnv, ranks: Ranks) -> dict[str, Any]:
    """Return the parts of one rank from the shares of another number of ranks: its worlds, and their replay.

    A memory that is no :attr:`Agent.history`, such as a rollout, begins again empty.
    """
    each = envs.num_envs * ranks.size // len(shares)  # worlds of one share
    first = envs.num_envs * ranks.rank
    pieces = []  # (share, its worlds, their places here)
    for number, share in enumerate(shares):
        begin, end = max(first, number * each), min(first + envs.num_envs, (number + 1) * each)
        if begin < end:
            own = slice(begin - number * each, end - number * each)
            pieces.append((share, own, slice(begin - first, end - first)))

    def join(path: Sequence[str], axis: int = 0) -> Any:
        values = [functools.reduce(operator.getitem, path, share) for share, _, _ in pieces]
        if isinstance(values[0], Mapping):
            return {key: join((*path, key), axis) for key in values[0]}
        if not isinstance(values[0], Tensor) or not values[0].ndim:
            return values[0]
        cut = [value[own] if axis == 0 else value[:, own] for value, (_, own, _) in zip(values, pieces, strict=True)]
        return torch.cat(cut, axis)

    parts = {name: shares[0][name] for name in ("agent", "monitor")}
    if not ranks.first and (sums := parts["monitor"]["episodes"]["sums"]) is not None:  # they would be counted again
        zeros = parts["monitor"]["episodes"] | {"sums": torch.zeros_like(sums)}
        parts["monitor"] = parts["monitor"] | {"episodes": zeros}
    parts["agent"] |= {name: join(("agent", name)) for name in agent.world_state}
    if "generator" in parts["agent"]:
        parts["agent"]["generator"] = agent.generator.get_state()
    if envs.first_env is not None:
        # Buffers that all worlds share, as some of Warp's, follow from the rest at the next step.
        own, saved = envs.state_dict(), shares[0]["envs"]
        of_worlds = {name for name, x in saved.items() if np.shape(x)[:1] in ((), (each,))}
        parts["envs"] = {name: x if name in of_worlds else own[name] for name, x in join(("envs",)).items()}
    parts["loop"] = {"counters": shares[0]["loop"]["counters"], "step": join(("loop", "step"))}
    parts["loop"]["player"] = join(("loop", "player"))
    if agent.history is not None and "memory" in shares[0]:
        (name,) = shares[0]["memory"]
        replays = [share["memory"][name] for share, _, _ in pieces]
        fresh = [
            [world - own.start + place.start, start]
            for replay, (_, own, place) in zip(replays, pieces, strict=True)
            for world, start in replay["fresh"]
            if own.start <= world < own.stop
        ]
        joined = {"storage": join(("memory", name, "storage"), 1), "added": replays[0]["added"]}
        joined |= {"fresh": sorted(fresh, key=lambda item: (item[1], item[0]))}
        parts["memory"] = {name: joined | {"generator": agent.generator.get_state()}}
        if joined["added"]:
            parts["histories"] = [(share[checkpoint.HISTORY], own, place) for share, own, place in pieces]
    return parts


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
