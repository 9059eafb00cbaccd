"""Turns what the loop produces into curves, videos, a progress line and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike import checkpoint
from sheeplike.agents.agent import Agent, Step
from sheeplike.commands import STARTED
from sheeplike.commands.evaluation import films, summarize
from sheeplike.commands.schema import Config
from sheeplike.loop import Evaluation, LoopState
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer, Taken
from sheeplike.monitor.progress import Progress
from sheeplike.monitor.video import open_loop_video


@dataclass
class Row:
    """One row of the record, whose numbers the device may still have to compute.

    Attributes:
        step, gradient_steps, seconds: where the run stood at the log point.
        known: what the host knew there.
        taken: what the device has summed up to there.
    """

    step: int
    gradient_steps: int
    seconds: float
    known: dict[str, float]
    taken: tuple[Taken, ...] = ()


class Recorder:
    """The observer of :func:`sheeplike.loop.train` and the functions that its hooks call.

    Args:
        agent: what learns.
        envs: the training worlds.
        logger: where curves and videos go.
        progress: the line in the terminal.
    """

    def __init__(self, agent: Agent, envs: VectorEnv, logger: RunLogger, progress: Progress) -> None:
        self.agent, self.envs, self.logger, self.progress = agent, envs, logger, progress
        self.episodes = EpisodeStatistics(envs.num_envs, envs.device)
        self.metrics = MetricBuffer()
        self.fps = envs.metadata["render_fps"]
        self.started = time.monotonic()
        self.latest: dict[str, float] = {}
        self.pending: Row | None = None
        # Policy steps, gradient steps and time at the last log point.
        self.steps, self.gradients, self.mark = 0, 0, time.monotonic()
        self.updated = False

    # --- observer ---------------------------------------------------------------------------------------------------

    def stepped(self, step: Step, info: dict[str, Any]) -> None:
        self.episodes.add(step.reward, step.is_terminal, step.is_last & ~step.is_terminal, info)

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.metrics.add(metrics)
        if not self.updated:
            self.updated = True
            self.logger.log_layout(metrics)
            self.progress.stage("")
            self.progress.note(f"first gradient step {process_seconds():.0f} s after the start")

    # --- hooks ------------------------------------------------------------------------------------------------------

    def begin(self, state: LoopState) -> None:
        """Start measuring speed from here."""
        self.steps, self.gradients, self.mark = state.policy_steps, state.gradient_steps, time.monotonic()

    def log(self, state: LoopState) -> None:
        """Take the means since the last call, and write those of the last call.

        One interval late, because reading a number waits for the device to come to it: by then it is far behind.
        """
        seconds = max(time.monotonic() - self.mark, 1e-9)
        rates = {
            "time/env_sps": (state.policy_steps - self.steps) / seconds,
            "time/grad_sps": (state.gradient_steps - self.gradients) / seconds,
        }
        known = rates | self.agent.counters(state.policy_steps, state.gradient_steps)
        row = self._row(state, known, self.episodes.take(), self.metrics.take())
        self.flush()
        self.pending = row
        self.begin(state)

    def flush(self) -> None:
        """Write the row that is still waiting, for which this may wait for the device."""
        row, self.pending = self.pending, None
        if row is not None:
            self._put(row)

    def evaluated(self, result: Evaluation, state: LoopState) -> None:
        """Write the outcome of an evaluation, and its video where it was filmed."""
        self._write(summarize(result), state)
        for camera, video in films(result).items():
            self.logger.log_video(f"eval/{camera}", video, step=state.policy_steps, fps=self.fps)

    def report(self, state: LoopState) -> None:
        """Write the agent's own predictions: metrics and videos."""
        metrics, predictions = self.agent.report()
        self._write({name: float(value) for name, value in metrics.items()}, state)
        for camera, (truth, model, context) in predictions.items():
            video = open_loop_video(truth, model, context)
            # At half speed: these films are short.
            self.logger.log_video(f"open_loop/{camera}", video, step=state.policy_steps, fps=self.fps / 2)

    def paused(self, hook: Callable[[LoopState], None]) -> Callable[[LoopState], None]:
        """``hook`` as it is, with the time that it takes left out of the rates of acting and learning."""

        def timed(state: LoopState) -> None:
            start = time.monotonic()
            hook(state)
            self.mark += time.monotonic() - start

        return timed

    @property
    def seconds(self) -> float:
        """Wall-clock time of the run, earlier parts of it included."""
        return time.monotonic() - self.started

    def _row(self, state: LoopState, known: dict[str, float], *taken: Taken) -> Row:
        return Row(state.policy_steps, state.gradient_steps, self.seconds, known, taken)

    def _write(self, metrics: dict[str, float], state: LoopState) -> None:
        """Write what is known now, behind what has been waiting."""
        self.flush()
        if metrics:
            self._put(self._row(state, metrics))

    def _put(self, row: Row) -> None:
        metrics = {name: value for taken in row.taken for name, value in taken.read().items()} | row.known
        self.latest |= metrics
        self.logger.log(metrics, step=row.step, gradient_steps=row.gradient_steps, seconds=row.seconds)
        self.progress.show(self.latest)


def process_seconds() -> float:
    """Wall-clock seconds since the command was started, imports included."""
    return time.monotonic() - STARTED


def save(
    writer: checkpoint.Writer,
    agent: Agent,
    envs: Any,
    recorder: Recorder,
    config: Config,
    state: LoopState,
    *,
    wait: bool = False,
) -> None:
    """Save the whole run in the background, and all rows up to here, which nobody would write after a resume.

    Args:
        wait: until it is on the disk.

    Raises:
        OSError: the disk, if asked to wait.
        checkpoint.NonFinite: the agent is not worth saving.
    """
    recorder.flush()
    step = {f.name: getattr(state.step, f.name) for f in fields(Step)}
    counters = {"policy_steps": state.policy_steps, "gradient_steps": state.gradient_steps, "seconds": recorder.seconds}
    rng = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    learned = agent.state_dict(replay=config.checkpoint.replay, history=False)
    acting = agent.state_dict(replay=False).keys()
    parts = {
        "agent": {name: learned[name] for name in acting},
        # What the agent has seen is a file of its own, which an evaluation need not read.
        "memory": {name: value for name, value in learned.items() if name not in acting},
        "envs": envs.state_dict(),
        "loop": {"counters": counters, "step": step, "player": state.player.state_dict()},
        "monitor": {"episodes": recorder.episodes.state_dict(), "metrics": recorder.metrics.state_dict()},
        "rng": rng,
    }
    meta = {"env": config.env.name, "agent": config.agent.name}
    if "eval/return_mean" in recorder.latest:
        meta["score"] = recorder.latest["eval/return_mean"]  # decides which checkpoint is the best
    journals = {"memory": agent.journals} if config.checkpoint.replay else {}
    writer.save(state.policy_steps, parts, meta, journals, finite=("agent",), wait=wait)


def restore(parts: dict[str, Any], agent: Agent, envs: Any, recorder: Recorder) -> LoopState:
    """Put a checkpoint back into freshly built objects; returns where the run stood."""
    device = envs.device
    agent.load_state_dict(parts["agent"] | parts.get("memory", {}))
    for name, stored in parts.get("journals", {}).get("memory", {}).items():
        stored.copy_to(agent.journals[name])
    envs.load_state_dict(parts["envs"])
    recorder.episodes.load_state_dict(parts["monitor"]["episodes"])
    recorder.metrics.load_state_dict(parts["monitor"]["metrics"])
    loop = parts["loop"]
    player = agent.player(envs.num_envs)
    player.load_state_dict(loop["player"])
    step = Step(**{k: _to(v, device) for k, v in loop["step"].items()})
    counters = loop["counters"]
    torch.set_rng_state(parts["rng"]["torch"])
    if "cuda" in parts["rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(parts["rng"]["cuda"])
    recorder.started = time.monotonic() - counters["seconds"]
    return LoopState(player, step, counters["policy_steps"], counters["gradient_steps"])


def _to(value: Any, device: torch.device) -> Any:
    return {k: _to(v, device) for k, v in value.items()} if isinstance(value, dict) else value.to(device)
