"""Halting a run whose losses, gradients or parameters stay NaN or infinite."""

from __future__ import annotations

import io
import shlex
from contextlib import suppress
from pathlib import Path

import torch

from sheeplike.agents.agent import Agent
from sheeplike.checkpoint import Writer
from sheeplike.config.schema import Config
from sheeplike.files import write_atomically
from sheeplike.options import CommandError
from sheeplike.run.layout import LAST_BATCH
from sheeplike.run.recorder import Recorder
from sheeplike.run.signals import FAILED


class Halted(CommandError):
    """Training cannot go on, or not be saved: numbers are not finite."""

    status = FAILED


class NonFiniteGuard:
    """Halts the run when too many updates in a row were skipped, or its agent cannot be saved (``problem``)."""

    def __init__(
        self, config: Config, run_dir: Path, agent: Agent, recorder: Recorder, writer: Writer, resumed_from: int | None
    ) -> None:
        self.config, self.run_dir = config, run_dir
        self.agent, self.recorder, self.writer = agent, recorder, writer
        self.problem: str | None = None
        self._resumed_from = resumed_from

    @property
    def skipped_in_a_row(self) -> int:
        """Updates skipped since the last finite one; reads the device."""
        return int(self.agent.skipped_in_a_row)

    def suspects(self) -> bool:
        """Return True if the newest row of metrics, an interval old, says that the run must halt."""
        return bool(self.problem) or self.recorder.skipped >= self.config.max_skipped

    def halt_if_confirmed(self, policy_steps: int) -> None:
        """Raise :class:`Halted` if updates are still skipped, and save the batch of the last one."""
        skipped = self.skipped_in_a_row
        if not self.problem and skipped < self.config.max_skipped:
            self.recorder.skipped = float(skipped)
            return
        reason = self.problem or f"{skipped} updates in a row were not finite"
        with suppress(OSError):
            self.writer.wait()
        step = self.writer.last.step if self.writer.last else self._resumed_from
        hint = "there is no checkpoint to go on from"
        if step is not None:  # the same seed would come to the same place
            again = shlex.join([f"resume={self.config.run_dir}", f"seed={self.config.seed + 1}"])
            hint = f"go on from policy step {step:,} with other random numbers: python -m sheeplike {again}"
        raise Halted(f"{reason}, at policy step {policy_steps:,}; {self._dump_last_batch()}; {hint}")

    def _dump_last_batch(self) -> str:
        """Save what the last update saw; returns a clause about it."""
        path = self.run_dir / LAST_BATCH
        try:
            batch = {name: value.cpu() for name, value in self.agent.last_batch().items()}
            content = io.BytesIO()
            torch.save(batch, content)
            write_atomically(path, content.getvalue())
        except Exception as error:  # neither a full disk nor a failed device may hide why the run halts
            return f"what the last one saw cannot be saved: {error}"
        return f"what the last one saw is in {path}"
