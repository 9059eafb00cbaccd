"""Turns what the loop produces into curves, videos, a progress line and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
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
from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer
from sheeplike.monitor.progress import Progress
from sheeplike.monitor.video import open_loop_video


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
            self.progress.restart_speed()
            self.progress.note(f"first gradient step {process_seconds():.0f} s after the start")

    # --- hooks ------------------------------------------------------------------------------------------------------

    def begin(self, state: LoopState) -> None:
        """Start measuring speed from here."""
        self.steps, self.gradients, self.mark = state.policy_steps, state.gradient_steps, time.monotonic()

    def log(self, state: LoopState) -> None:
        """Write the means since the last call. The first read of device values is here."""
        metrics = {**self.episodes.flush(), **self.metrics.flush()}
        seconds = max(time.monotonic() - self.mark, 1e-9)
        metrics["time/env_sps"] = (state.policy_steps - self.steps) / seconds
        metrics["time/grad_sps"] = (state.gradient_steps - self.gradients) / seconds
        metrics |= self.agent.counters(state.policy_steps, state.gradient_steps)
        self._write(metrics, state)
        self.begin(state)

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

    def _write(self, metrics: dict[str, float], state: LoopState) -> None:
        if metrics:
            self.latest |= metrics
            self.logger.log(metrics, step=state.policy_steps, gradient_steps=state.gradient_steps, seconds=self.seconds)
            self.progress.update(state.policy_steps, self.latest)


def process_seconds() -> float:
    """Wall-clock seconds since the command was started, imports included."""
    return time.monotonic() - STARTED


def save(root: Path, agent: Agent, envs: Any, recorder: Recorder, config: Config, state: LoopState) -> Path:
    """Write a checkpoint of the whole run; returns its directory."""
    step = {f.name: getattr(state.step, f.name) for f in fields(Step)}
    counters = {"policy_steps": state.policy_steps, "gradient_steps": state.gradient_steps, "seconds": recorder.seconds}
    rng = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng["cuda"] = torch.cuda.get_rng_state()
    learned = agent.state_dict(replay=config.checkpoint.replay)
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
    return checkpoint.save(root, state.policy_steps, parts, meta, config.checkpoint.keep)


def restore(parts: dict[str, Any], agent: Agent, envs: Any, recorder: Recorder) -> LoopState:
    """Put a checkpoint back into freshly built objects; returns where the run stood."""
    device = envs.device
    agent.load_state_dict(parts["agent"] | parts.get("memory", {}))
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
