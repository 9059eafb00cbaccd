"""Guards of a run: against numbers that stay non-finite, against hanging, and against running ahead of a GPU."""

from __future__ import annotations

import faulthandler
import shlex
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sheeplike.agents.agent import Agent
from sheeplike.config.schema import Config
from sheeplike.options import CommandError
from sheeplike.run.recorder import Recorder
from sheeplike.run.signals import FAILED
from sheeplike.run.storage import Storage

PATIENCE = 6  # times the limit of the watchdog, for compiling and the like
RUN_AHEAD = 4  # calls by which the GPU may lag; a stop waits for them


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


class Watchdog:
    """Prints the stacks of all threads to stderr whenever :meth:`beat` was not called for ``seconds``; None: never.

    faulthandler's thread needs no interpreter lock, so it works while a library holds that lock. A process has one such
    thread, so only one watchdog can be active.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds or 0.0
        # Arming starts a thread, so beats within `interval` do nothing; the limit grows by it.
        self.interval = min(1.0, self.seconds / 4)
        self.file = sys.__stderr__ if seconds is not None else None  # None too if the process has none
        self._arm()

    def beat(self) -> None:
        """Restart the time limit."""
        if time.monotonic() - self.armed >= self.interval:
            self._arm()

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Allow :data:`PATIENCE` times as long, for compiling and the like."""
        self._arm(PATIENCE)
        try:
            yield
        finally:
            self._arm()

    def close(self) -> None:
        """Stop watching."""
        if self.file is not None:
            faulthandler.cancel_dump_traceback_later()
            self.file = None

    def _arm(self, times: int = 1) -> None:
        self.armed = time.monotonic()
        if self.file is not None:
            faulthandler.dump_traceback_later(times * self.seconds + self.interval, repeat=True, file=self.file)


class RunAheadLimit:
    """Bounds the updates and iterations that are queued on a GPU; does nothing on another device."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu, self._queued = device.type == "cuda", deque()

    def wait(self) -> None:
        """Wait until the GPU is at most ``RUN_AHEAD`` calls of this method behind."""
        if self._on_gpu:
            self._queued.append(torch.cuda.Event())
            self._queued[-1].record()
            if len(self._queued) > RUN_AHEAD:
                self._queued.popleft().synchronize()
