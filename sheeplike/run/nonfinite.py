"""Halting a run whose losses, gradients or parameters stay NaN or infinite."""

from __future__ import annotations

import shlex

from sheeplike.agents.agent import Agent
from sheeplike.config.schema import Config
from sheeplike.options import CommandError
from sheeplike.run.recorder import Recorder
from sheeplike.run.signals import FAILED
from sheeplike.run.storage import Storage


class Halted(CommandError):
    """Numbers that are not finite, with which training can neither go on nor be saved."""

    status = FAILED


class NonFiniteGuard:
    """Halts the run after too many skipped updates in a row, or when its agent cannot be saved (``problem``)."""

    def __init__(self, config: Config, agent: Agent, recorder: Recorder, storage: Storage) -> None:
        self.config, self.agent, self.recorder, self.storage = config, agent, recorder, storage
        self.problem = ""

    @property
    def skipped_in_a_row(self) -> int:
        """Updates skipped since the last finite one; reads the device."""
        return int(self.agent.skipped_in_a_row)

    def suspects(self) -> bool:
        """Return True if the agent cannot be saved, or the last row counts too many skipped updates."""
        return bool(self.problem) or self.recorder.skipped >= self.config.max_skipped

    def halt_if_confirmed(self, policy_steps: int) -> None:
        """Raise :class:`Halted` if updates are still skipped, and save the batch of the last one."""
        skipped = self.skipped_in_a_row
        if not self.problem and skipped < self.config.max_skipped:
            self.recorder.skipped = float(skipped)
            return
        reason = self.problem or f"{skipped} updates in a row were not finite"
        try:
            batch = f"is in {self.storage.save_batch(self.agent.last_batch())}"
        except Exception as error:  # neither a full disk nor a failed device may hide why the run halts
            batch = f"cannot be saved: {error}"
        step = self.storage.newest_step()
        hint = "there is no checkpoint to go on from"
        if step is not None:  # the same seed would fail again
            mirror = [f"checkpoint.mirror={url}"] if (url := self.config.checkpoint.mirror) else []
            again = shlex.join([f"resume={self.config.run_dir}", f"seed={self.config.seed + 1}", *mirror])
            hint = f"go on from policy step {step:,} with other random numbers: python -m sheeplike {again}"
        raise Halted(f"{reason}, at policy step {policy_steps:,}; the batch of the last update {batch}; {hint}")
