"""Curves, videos and the progress line of a run, from the output of the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.agent import Agent, Step
from sheeplike.loop import Evaluation, LoopState
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer, PendingMetrics
from sheeplike.monitor.progress import Progress, phase
from sheeplike.monitor.video import dream_video, enlarge, label_rows, open_loop_video
from sheeplike.ranks import ALONE, Ranks
from sheeplike.run import STARTED
from sheeplike.run.evaluation import summarize, videos

PAUSES = {
    "compile": "compiling the update",
    "evaluation": "evaluating",
    "video": "filming what the model expects",
    "checkpoint": "saving",
}
"""Pauses of training, with the text shown meanwhile."""
SKIPPED, SKIPPED_TOTAL = "health/skipped_in_a_row", "health/skipped_updates_total"


class Recorder:
    """Observer of :func:`sheeplike.loop.train`, and the functions that its hooks call.

    ``logger`` must be set before anything is written.

    Attributes:
        latest: the newest value of every metric that was written.
        skipped: updates in a row that were skipped for non-finite numbers, as of the last row.
        trained: seconds of training up to the last pause.
        pauses: total seconds by kind of pause; ``start`` is the start of the program.
    """

    def __init__(
        self, agent: Agent, envs: VectorEnv, progress: Progress, logger: RunLogger | None = None, ranks: Ranks = ALONE
    ) -> None:
        self.ranks = ranks
        self.agent, self.envs, self.progress, self.logger = agent, envs, progress, logger
        self.episodes = EpisodeStatistics(envs.num_envs, envs.device)
        self.metrics = MetricBuffer()
        self.fps = envs.metadata["render_fps"]
        self.latest: dict[str, float] = {}
        self.skipped = 0.0
        self.pending: tuple[Any, ...] = ()  # arguments of `_put` for the waiting row
        self.trained = 0.0
        self.pauses = dict.fromkeys(("start", *PAUSES), 0.0)
        self._running: float | None = None  # time at which the clock was started, or None
        # Policy steps, gradient steps and seconds of training at the last log point
        self.steps, self.gradients, self.mark = 0, 0, 0.0
        self.updated = self._warned = False

    # --- observer ---------------------------------------------------------------------------------------------------

    def stepped(self, step: Step, info: dict[str, Any]) -> None:
        self.episodes.add(step.reward, step.is_terminal, step.is_last & ~step.is_terminal, info)

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.metrics.add(metrics)
        if not self.updated:
            self.updated = True
            self.progress.stage("")
            self.progress.note(f"first gradient step {time.monotonic() - STARTED:.0f} s after the start")

    # --- hooks ------------------------------------------------------------------------------------------------------

    def begin(self, state: LoopState) -> None:
        """Start measuring speed from here."""
        self.steps, self.gradients, self.mark = state.policy_steps, state.gradient_steps, self.seconds

    def log(self, state: LoopState) -> None:
        """Take the means since the last call, and write those of the last call.

        Rows are one interval late, because reading a number waits for the device to compute it.
        """
        seconds = max(self.seconds - self.mark, 1e-9)
        rates = {
            "time/env_sps": (state.policy_steps - self.steps) / seconds,
            "time/grad_sps": (state.gradient_steps - self.gradients) / seconds,
        }
        known = rates | {f"time/{name}_seconds": value for name, value in self.pauses.items()}
        known |= self.agent.counters(state.policy_steps, state.gradient_steps)
        known |= dict(self.envs.counters) | gpu_memory(self.envs)
        counters = torch.stack([self.agent.skipped_in_a_row, self.agent.skipped_total])
        skipped = PendingMetrics(counters, lambda values: dict(zip((SKIPPED, SKIPPED_TOTAL), values, strict=True)))
        episodes = self.episodes.take(self.ranks.sum)
        row = self._axes(state), known, episodes, self.metrics.take(), skipped, *self._variation()
        self.flush()
        self.pending = row
        self.begin(state)

    def flush(self) -> None:
        """Write the waiting row; may wait for the device."""
        row, self.pending = self.pending, ()
        if row:
            self._put(*row)

    def flush_quietly(self) -> None:
        """Write the waiting row, unless the device that computes it has failed."""
        with suppress(RuntimeError):
            self.flush()

    def evaluated(self, result: Evaluation, state: LoopState, held_out: dict[str, float]) -> dict[str, float]:
        """Write the outcome of an evaluation, metrics on held-out episodes and a video; returns the metrics."""
        metrics = summarize(result) | held_out
        self._write(metrics, state)
        outcome = "return {return_mean:.4g} ({return_lo:.4g} to {return_hi:.4g})"
        if "eval/success_rate" in metrics:
            outcome += ", success {success_rate:.0%} ({success_lo:.0%} to {success_hi:.0%})"
        named = {name.removeprefix("eval/"): value for name, value in metrics.items()}
        episodes = f"{len(result.returns)} episodes"
        self.progress.note(f"evaluation at {state.policy_steps:,}: {outcome.format(**named)}, {episodes}")
        for camera, video in videos(result).items():
            self.logger.log_video(f"eval/{camera}", video, step=state.policy_steps, fps=self.fps)
        return metrics

    def report(self, state: LoopState) -> None:
        """Write metrics and videos of the agent's predictions and dreams."""
        with self.pause("video"):
            metrics, predictions = self.agent.report()
            self._write({name: float(value) for name, value in metrics.items()}, state)
            found = {}
            for camera, (truth, model, context) in predictions.items():
                video = open_loop_video(enlarge(truth), enlarge(model), context)
                found[f"open_loop/{camera}"] = label_rows(video, ("truth", "model", "error"))
            for camera, (seen, model, traces) in self.agent.dream().items():
                found[f"dream/{camera}"] = dream_video(seen, model, traces)
            for name, video in found.items():  # they are short, so they play at half speed
                self.logger.log_video(name, video, step=state.policy_steps, fps=self.fps / 2)

    # --- training time ----------------------------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds of acting and learning in the whole run, without pauses."""
        return self.trained + (0.0 if self._running is None else time.monotonic() - self._running)

    @contextmanager
    def training(self, state: LoopState) -> Iterator[None]:
        """Run the clock."""
        self.begin(state)
        self._running = time.monotonic()
        try:
            yield
        finally:
            self._stand_still()

    @contextmanager
    def pause(self, name: str, label: str | None = None) -> Iterator[None]:
        """Stop the clock for one of :data:`PAUSES`; a long pause is shown as ``label`` or as the text of its kind."""
        runs, start = self._running is not None, time.monotonic()
        self._stand_still()
        try:
            with phase(label or PAUSES[name]):
                yield
        finally:
            self.pauses[name] += time.monotonic() - start
            self.progress.skip(time.monotonic() - start)
            self._running = time.monotonic() if runs else None

    def _stand_still(self) -> None:
        self.trained, self._running = self.seconds, None

    def _variation(self) -> list[PendingMetrics]:
        """Return mean and standard deviation over the worlds of each randomized quantity."""
        drawn = self.envs.variation
        if not drawn:
            return []
        values = [value.flatten() for value in drawn.values()]
        moments = torch.stack([part for value in values for part in (value.mean(), value.std(correction=0))])
        names = [f"variation/{name}_{moment}" for name in drawn for moment in ("mean", "std")]
        return [PendingMetrics(moments, lambda numbers: dict(zip(names, numbers, strict=True)))]

    def _axes(self, state: LoopState) -> dict[str, float]:
        return {"step": state.policy_steps, "gradient_steps": state.gradient_steps, "seconds": self.seconds}

    def _write(self, metrics: dict[str, float], state: LoopState) -> None:
        """Write metrics now, after the waiting row."""
        self.flush()
        if metrics:
            self._put(self._axes(state), metrics)

    def _put(self, axes: dict[str, float], known: dict[str, float], *pending: PendingMetrics) -> None:
        """Write a row: metrics that the host knows, and those that the device may still have to compute."""
        metrics = {name: value for taken in pending for name, value in taken.read().items()} | known
        if metrics.get("health/nonfinite_worlds") and not self._warned:
            self._warned = True
            self.progress.note("a reward or an observation was not finite; its world is reset: health/nonfinite_worlds")
        self.latest |= metrics
        self.skipped = metrics.get(SKIPPED, self.skipped)
        self.logger.log(metrics, **axes)
        self.progress.show(self.latest)


def gpu_memory(envs: VectorEnv) -> dict[str, float]:
    """Return MiB of GPU memory in use (``all``, CUDA graphs too), and held by torch, JAX and Warp; empty on a CPU."""
    if torch.device(envs.device).type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(envs.device)
    held = {"all": total - free, "torch": torch.cuda.memory_reserved(envs.device)}
    if envs.simulator is not None:
        import warp

        stats = envs.simulator.device.memory_stats() or {}  # None for allocators without statistics
        held["jax"] = stats.get("pool_bytes", stats.get("bytes_in_use", 0))
        if warp.get_device(str(envs.device)).is_mempool_supported:
            held["warp"] = warp.get_mempool_used_mem_current(str(envs.device))
    return {f"gpu_mib/{name}": size / 2**20 for name, size in held.items()}
