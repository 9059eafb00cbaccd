"""A training run as an object: what the command line drives to its end, and what a program can drive in its own way.

::

    import sheeplike

    with sheeplike.init("exp=ppo", "env=cartpole_balance", "total_steps=200_000", "resume=auto") as run:
        while not run.over:
            metrics = run.iterate(20_000)
            print(run.policy_steps, metrics.get("rollout/return_mean"), run.evaluate()["eval/return_mean"])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from sheeplike import checkpoint
from sheeplike.commands.advice import explained
from sheeplike.commands.agents import describe_run, learning_begins, name_collecting, time_left
from sheeplike.commands.building import build, describe_device, make_writer
from sheeplike.commands.config import to_yaml
from sheeplike.commands.errors import as_command_errors
from sheeplike.commands.faults import Halted, Unsaved, dump, last_sound
from sheeplike.commands.machine import check_accelerator
from sheeplike.commands.preemption import StopRequest, stoppable, stops_at_once
from sheeplike.commands.recorder import Recorder
from sheeplike.commands.run_directory import (
    CHECKPOINTS,
    Plan,
    checkpoint_steps,
    create,
    describe_changes,
    discard,
    plan,
    update,
)
from sheeplike.commands.sources import Sources
from sheeplike.commands.watchdog import Watchdog
from sheeplike.loop import Every, LoopState, train
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.progress import Progress, banner, format_seconds, phase, say
from sheeplike.run import snapshot

COLLECT_FIRST = 60  # seconds of acting, at most, before the update is compiled


def init(*overrides: str, config_dirs: Sequence[str] = ()) -> Experiment:
    """Begin a run, or go on with one, as ``python -m sheeplike <overrides>`` does; nothing is learnt yet.

    Args:
        overrides: such as ``"exp=ppo"``, ``"env=franka_pick"``, ``"total_steps=200_000"``; ``"resume=<run_dir>"`` goes
            on with that run, and ``"resume=auto"`` with what is in ``run_dir``, if anything is.
        config_dirs: where to look for configs beside those of the package.

    Raises:
        CommandError: the request cannot be met; nothing was created.
    """
    planned = plan(overrides, Sources(config_dirs))
    check_accelerator(planned.config)
    return Experiment(planned)


def run(planned: Plan) -> int:
    """Train until ``total_steps`` or until asked to stop, and leave a checkpoint.

    Returns:
        The exit status: 0 if the run is finished.
    """
    with Experiment(planned, building=stops_at_once) as experiment:
        experiment.iterate()
    return experiment.status


class Experiment:
    """A run that is under way; a context manager, at whose end it is saved and closed.

    Signals that ask to stop (see :mod:`~sheeplike.commands.preemption`) end :meth:`iterate` after the iteration that is
    going on; ``over`` is true from then on.

    Args:
        planned: what to train; the directory of a new run is created once everything could be built.
        building: a context in which worlds and agent are built, before there is anything to save.

    Attributes:
        config, run_dir, worlds, agent: what the run consists of.
        state: where it stands.
        stop: whether it was asked to stop, and how.

    Raises:
        CommandError: what the configuration describes cannot be built, or there is nothing to resume.
    """

    def __init__(self, planned: Plan, *, building: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.config, self.run_dir = planned.config, planned.run_dir
        if planned.changed:
            say(f"changed: {describe_changes(planned.changed)}")
        self.resumed = self.kept = planned.resume
        self._compiled = self._touched = False
        self._fault: str | None = None  # why the run cannot go on from where it is
        self._rollbacks = self._seeds = 0  # since it was last beyond where it had gone back to; ever
        self._rolled_back_to = -1
        with ExitStack() as stack:  # what has begun is ended, should a later part fail
            with building():
                built = build(self.config, self.run_dir, stack, resume=planned.resume)
            self.worlds, self.agent, self.evaluator = built.worlds, built.agent, built.evaluator
            self._step_seconds = built.step_seconds
            # From here on nothing ends this process without leaving the run in order.
            self.stop: StopRequest = stack.enter_context(stoppable())
            if not planned.resume:
                stack.enter_context(create(self.run_dir, self.config, replace=planned.replace))
            self.writer = built.writer or make_writer(self.config, self.run_dir, stack)
            stack.callback(self._discard_if_nothing_is_kept)
            self._begin(built.parts, stack)
            self._ending = stack.pop_all()

    # --- what a program drives --------------------------------------------------------------------------------------

    @property
    def policy_steps(self) -> int:
        """Policy steps made so far, over all worlds."""
        return self.state.policy_steps

    @property
    def over(self) -> bool:
        """Whether ``total_steps`` are made, or the run was asked to stop."""
        return self.finished or self.stop()

    @property
    def finished(self) -> bool:
        """Whether ``total_steps`` are made."""
        return self.policy_steps >= self.config.total_steps

    @property
    def status(self) -> int:
        """The exit status for a program that ends with the run: 0, or that of the signal that stopped it."""
        return self.stop.status if self.stop() and not self.finished else 0

    def iterate(self, every: int | None = None) -> dict[str, float]:
        """Interact and learn up to the next multiple of ``every`` policy steps, or to the end of the run.

        A run that was stopped on the way comes to the same places when it goes on.

        Returns:
            The newest value of every metric; there are new ones every ``log_every`` policy steps.

        Raises:
            Halted: updates go on being non-finite (see ``faults`` in the configuration).
            CommandError: there is not enough memory.
        """
        total = self.config.total_steps
        target = total if every is None else min((self.policy_steps // every + 1) * every, total)
        self.recorder.begin(self.state)
        self._busy = True
        with explained(self.config, self.worlds), Watchdog(self.config.watchdog) as self.watchdog:
            self._go_to(target)
        self.recorder.flush()
        self._busy, self._touched = False, not self.finished  # whoever gets this may change the worlds
        return dict(self.recorder.latest)

    def _go_to(self, target: int) -> None:
        while self.policy_steps < target and not self.stop():
            if not self._compiled:
                # The worlds do not wait for the update to be compiled, nor for long to learn that it cannot be.
                self._train(min(self._compile_at, target))
                if self.policy_steps >= self._compile_at and not self.over:
                    self._paused(self._compile_update)(self.state)
                    self._compiled = self.kept = True
                if self.policy_steps < self._compile_at:
                    continue
            self._train(target)
            if self._broken():
                self._roll_back()

    def evaluate(self) -> dict[str, float]:
        """Evaluate the agent as the configuration says, in worlds of its own; the metrics are written too."""
        self._touched = True
        return self.recorder.evaluated(self.evaluator(), self.state)

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of everything.

        Args:
            wait: until it is on the disk. Otherwise it is written while the run goes on, and a disk that is full is
                only warned about.

        Raises:
            OSError: it cannot be written, with ``wait``.
        """
        parts, meta, history = snapshot.take(self.agent, self.worlds, self.recorder, self.config, self.state)
        self.writer.save(self.policy_steps, parts, meta, history, finite=("agent",), wait=wait)
        self.kept, self._touched = True, False

    def close(self) -> None:
        """Let go of everything, without saving. Calling it again does nothing."""
        self._busy = True  # so that the end of a with block saves nothing either
        self._ending.close()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # What is in the middle of an iteration cannot be saved; after an error anywhere else it is worth it.
        try:
            with self._ending:
                self.progress.close()
                if not self._busy:
                    self._save_at_the_end()
                    self.stop.settled = True
            if self.stop.settled and self.status:
                say(f"saved; go on with: python -m sheeplike resume={self.run_dir}")
        finally:
            if self.stop() and not isinstance(error, Halted):  # which would only halt again
                self.stop.tell_others()

    # --- how it begins ----------------------------------------------------------------------------------------------

    def _begin(self, parts: dict[str, Any] | None, stack: ExitStack) -> None:
        """The state, new or restored, and what records it."""
        config = self.config
        begun = None if parts is None else parts["loop"]["counters"]["policy_steps"]
        self.progress = Progress(config.total_steps, initial_steps=begun or 0)
        stack.callback(self.progress.close)
        self.recorder = Recorder(self.agent, self.worlds, self.progress)
        snapshot.seed_everything(config.seed)
        if parts is None:
            self.state = LoopState.begin(self.agent, self.worlds, config.seed)
        else:
            with as_command_errors(ValueError, KeyError, checkpoint.Corrupt):
                self.state = snapshot.restore(parts, self.agent, self.worlds, self.recorder)
            parts.clear()  # or part of it would be held twice
            update(self.run_dir, config)
        # Only now: what an earlier attempt wrote after its last checkpoint is dropped.
        self._open_logger(begun)
        stack.callback(lambda: self.logger.close())  # of that moment: going back opens another
        stack.callback(self._last_row)
        soon = self.policy_steps + math.ceil(COLLECT_FIRST / self._step_seconds) * self.worlds.num_envs
        self._compile_at = min(learning_begins(config), soon)
        self._busy = False
        told = describe_run(
            config,
            self.agent,
            self.worlds,
            device=describe_device(config, self.worlds.device),
            begun=self.policy_steps,
            step_seconds=self._step_seconds,
        )
        banner({"sheeplike": told})
        self.logger.log_text("config", f"```yaml\n{to_yaml(config)}```", self.policy_steps)
        self.logger.log_hyperparameters(asdict(config))
        self.progress.stage(name_collecting(config))
        self._arm()

    def _open_logger(self, purge_step: int | None) -> None:
        tensorboard = self.config.logger.tensorboard
        self.recorder.logger = self.logger = RunLogger(self.run_dir, tensorboard=tensorboard, purge_step=purge_step)

    def _arm(self) -> None:
        """Hooks of the loop, counted from here."""
        recorder, config = self.recorder, self.config
        intervals = [
            (self.worlds.num_envs, self._iterated),
            (config.log_every, recorder.log),
            (config.video_every, self._paused(recorder.report)),
            (config.eval.every, self._paused(lambda state: self.evaluate())),
            (config.checkpoint.every, self._paused(lambda state: self._save_if_sound())),
        ]
        self._hooks = [Every(n, hook, self.policy_steps // n) for n, hook in intervals if n is not None]

    # --- how it goes on ---------------------------------------------------------------------------------------------

    def _train(self, total_steps: int) -> None:
        train(
            self.agent,
            self.worlds,
            self.state,
            total_steps=total_steps,
            observer=self.recorder,
            hooks=self._hooks,
            stop=lambda: self.stop() or self._broken(),
        )

    def _iterated(self, state: LoopState) -> None:
        self.progress.update(state.policy_steps)
        self.watchdog.beat()

    def _paused(self, hook: Callable[[LoopState], None]) -> Callable[[LoopState], None]:
        """``hook``, which may take long: rates of acting and learning leave it out, and the watchdog is patient."""

        def timed(state: LoopState) -> None:
            with self.watchdog.patient():
                self.recorder.paused(hook)(state)

        return timed

    def _compile_update(self, state: LoopState) -> None:
        try:
            with phase("compiling the update"):
                update_seconds = self.agent.warm_up()
        except Exception:
            if self.stop():  # Ctrl-C reaches the compilers too: they are processes of their own
                return
            raise
        left = time_left(self.config, state.policy_steps, self._step_seconds, update_seconds)
        self.progress.update(state.policy_steps)
        self.progress.expect(left)
        pace = f", at {update_seconds:.2g} s per gradient step" if update_seconds else ""
        self.progress.note(f"about {format_seconds(left)} to go{pace}; evaluation and videos come on top")

    def _save_if_sound(self) -> None:
        """A periodic checkpoint, unless updates are being skipped: what follows from this state is not sound."""
        if skipped := int(self.agent.skipped_in_a_row):
            self.progress.note(f"no checkpoint at policy step {self.policy_steps:,}: {skipped} updates were skipped")
            return
        try:
            self.save(wait=False)
        except checkpoint.NonFinite as error:
            self.progress.note(f"no checkpoint at policy step {self.policy_steps:,}: {error}")
            self._fault = str(error)

    def _save_at_the_end(self) -> None:
        steps = checkpoint_steps(self.run_dir)
        newest = f"its newest checkpoint is of policy step {steps[-1]:,}" if steps else "it has no checkpoint"
        if steps and int(self.agent.skipped_in_a_row) >= self.config.faults.max_skipped:
            raise Halted(f"{self.run_dir} was not saved, since its last updates were not finite; {newest}")
        try:
            with phase("saving"), Watchdog(self.config.watchdog):
                if self._touched or not self.writer.holds(self.policy_steps):
                    self.save()
        except (OSError, checkpoint.NonFinite) as error:
            raise Unsaved(f"{self.run_dir} could not be saved, {newest}: {error}") from error

    # --- what happens when numbers are no longer finite -------------------------------------------------------------

    def _broken(self) -> bool:
        return bool(self._fault) or self.recorder.skipped >= self.config.faults.max_skipped

    def _roll_back(self) -> None:
        """Continue from the last sound checkpoint, with other random numbers; or halt, if that has been tried.

        Not if an update has been good since: the record is an interval late.

        Raises:
            Halted: ``faults.max_rollbacks`` are used up, or there is no checkpoint.
        """
        if not self._fault and not int(self.agent.skipped_in_a_row):
            self.recorder.skipped = 0.0
            return
        reason = self._fault or f"{self.config.faults.max_skipped} updates in a row were not finite"
        told = f"{reason}, at policy step {self.policy_steps:,}"
        try:
            if place := dump(self.run_dir, self.agent, self.state):
                told += f"; what the first one saw is in {place}"
        except OSError as error:
            told += f"; what the first one saw cannot be saved: {error}"
        with suppress(OSError):
            self.writer.wait()
        last = self.writer.last
        if last is not None and last.step > self._rolled_back_to:
            self._rollbacks = 0  # it had got beyond where it was then
        if self._rollbacks >= self.config.faults.max_rollbacks:
            raise Halted(f"{told}; halted after {self._rollbacks} rollbacks")
        found = last_sound(self.run_dir / CHECKPOINTS)
        if found is None:
            raise Halted(f"{told}; halted: there is no sound checkpoint to go back to")
        meta, parts = found
        self.progress.note(f"{told}; going back to policy step {meta['step']:,}")
        if "memory" not in parts:
            self.progress.note("what had been seen is forgotten: the checkpoint does not hold it")
        self.state = snapshot.restore(parts, self.agent, self.worlds, self.recorder)
        self.writer.went_back_to(meta["step"])
        self._fault, self._rolled_back_to = None, meta["step"]
        self._rollbacks, self._seeds = self._rollbacks + 1, self._seeds + 1
        # The same random numbers would lead to the same place.
        seed = self.config.seed + 7919 * self._seeds
        snapshot.seed_everything(seed)
        self.agent.generator.manual_seed(seed)
        self.recorder.pending = None
        self.logger.close()
        try:
            self._open_logger(meta["step"])
        except OSError as error:
            raise Halted(f"{told}; halted: the record cannot be opened again: {error}") from error
        self.recorder.begin(self.state)
        self._arm()

    def _last_row(self) -> None:
        with suppress(RuntimeError):  # a device that has failed keeps it
            self.recorder.flush()

    def _discard_if_nothing_is_kept(self) -> None:
        if not (self.kept or checkpoint_steps(self.run_dir)):
            discard(self.run_dir)
