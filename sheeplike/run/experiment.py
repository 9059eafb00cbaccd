"""A training run as an object: the command line drives it to its end, and a program can drive it in its own way.

::

    with sheeplike.init("exp=ppo", "env=cartpole_balance", "total_steps=200_000", "resume=auto") as run:
        while not run.over:
            print(run.iterate(20_000).get("rollout/return_mean"), run.evaluate()["eval/return_mean"])
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from numbers import Integral
from types import TracebackType

import torch

from sheeplike import checkpoint, terminal
from sheeplike.config.compose import start_of
from sheeplike.config.errors import as_command_errors, expand
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import LOGGERS, to_data
from sheeplike.host import choose_gpu
from sheeplike.loop import Every, LoopState, train
from sheeplike.monitor.logger import NoLogger, RunLogger, Sink
from sheeplike.monitor.progress import Progress, banner
from sheeplike.nn.compilation import CannotCompile
from sheeplike.options import CommandError
from sheeplike.run import data, snapshot
from sheeplike.run.build import build_envs, describe, end_ranks, explain_oom, launch_ranks, make_agent, warm_up
from sheeplike.run.evaluation import Evaluator
from sheeplike.run.guards import Halted, NonFiniteGuard, RunAheadLimit, Watchdog
from sheeplike.run.layout import config_file
from sheeplike.run.mirror import FINISHING, STOPPING
from sheeplike.run.recorder import Recorder
from sheeplike.run.run_dir import Plan, plan
from sheeplike.run.signals import FAILED, UNSAVED, StopRequest, stoppable
from sheeplike.run.storage import Storage
from sheeplike.terminal import info, reason_of, warn


class Finished(CommandError):
    """A run that has nothing left to do was resumed."""


class Unsaved(CommandError):
    """The run ended, and its last checkpoint could not be written."""

    status = UNSAVED


def init(*overrides: str, config_dirs: Sequence[str] = ()) -> Experiment:
    """Begin or resume a run as ``python -m sheeplike <overrides>`` does; nothing is learnt yet.

    Args:
        overrides: such as ``"exp=ppo"``, ``"total_steps=200_000"``, ``"resume=<run_dir>"``, ``"resume=auto"``.
        config_dirs: further directories of configs.

    Raises:
        CommandError: the request cannot be met; nothing was created.
        TypeError: an override is no text.
    """
    for override in overrides:
        if not isinstance(override, str):
            raise TypeError(f"init({override!r}): expected texts, such as 'exp=ppo'")
    choose_gpu()
    start, _ = start_of(overrides)
    if start.seeds is not None or start.show:
        raise CommandError("seeds= and show=: expected on the command line only")
    return Experiment(plan(overrides, config_dirs), in_program=True)


class Experiment:
    """A run that is under way; a context manager, at whose end it is saved and closed.

    It has ``config``, ``run_dir``, ``envs``, ``agent`` and ``state``. Signals that ask to stop (see
    :mod:`~sheeplike.run.signals`) end :meth:`iterate` after the current step or update; ``over`` is true from then on.

    Args:
        in_program: build a finished run instead of raising :class:`Finished`; a signal during the start only sets
            ``over``.

    Raises:
        CommandError: what the configuration describes cannot be built, or there is nothing to resume.
    """

    def __init__(self, planned: Plan, *, in_program: bool = False) -> None:
        if planned.config.data.path is not None and not planned.resume:
            data.check(planned.config.data)
        self._asked, self.run_dir, self._in_program = planned.config, planned.run_dir, in_program
        self.config = config = self._asked.whole()  # numbers of all ranks together
        earlier = None if planned.resume else getattr(config.agent, "from_", None)
        if earlier is not None:
            config_file(expand(earlier), "agent.from")  # raises if there is no such run
        begun = time.monotonic()
        with as_command_errors(ValueError):
            sinks = [LOGGERS.load(name, Sink) for name in dict.fromkeys(config.logger)]
        with ExitStack() as stack:  # closes what was opened, should a later part fail
            self.stop_requested: StopRequest = stack.enter_context(stoppable(ready=in_program))
            stack.callback(torch.set_num_threads, torch.get_num_threads())  # the program's next run has its own
            with explain_oom(config):
                # Device, threads and the other ranks.
                fabric, self.ranks = launch_ranks(config, resume=planned.resume)
                stack.push(partial(end_ranks, fabric.strategy))
                terminal.rank = self.ranks.rank
                own = config.share()  # of this rank
                torch.manual_seed(self.ranks.seed(config.seed))

                # The lock and the newest checkpoint of a run that goes on.
                self.storage = stack.enter_context(closing(Storage(planned, self.ranks)))
                saved = self.storage.resume(self._asked) if planned.resume else None
                if saved and saved.is_finished(config) and not in_program:
                    if self.storage.mirror:  # a kill may have stopped the last copy
                        self.storage.mirror.catch_up()
                    raise Finished(
                        f"resume={self.run_dir}: its {saved.step:,} {config.unit} have reached "
                        f"{config.last_step}; expected a larger {'data.updates' if config.offline else 'total_steps'}="
                    )

                # Worlds and agent, and their first steps.
                places = {"stagger": config.env.stagger, "rank": self.ranks.rank}
                self.envs = build_envs(own, own.env.num_envs, fabric.device, **places)
                stack.callback(self.envs.close)
                self.agent = make_agent(own, self.envs, fabric, self.ranks)
                self.ranks.copy_first(self.agent.networks.state_dict().values())
                if earlier is not None:
                    snapshot.begin_with(expand(earlier), self.agent, config)
                data.load(config, self.agent, self.envs, resumed=saved is not None)
                step_seconds = warm_up(own, self.envs, self.agent)
                self.evaluator = Evaluator(own, self.agent, fabric.device, self.ranks)
                stack.callback(self.evaluator.close)

            # The directory of a new run, now that everything could be built.
            self.stop_requested.ready = True
            if saved is None:
                self.storage.create(self._asked)

            # The state: reset worlds, or those of the checkpoint.
            self.progress = Progress(config.last_step, initial_steps=saved.step if saved else 0, unit=config.unit)
            stack.callback(self.progress.close)
            self.recorder = Recorder(self.agent, self.envs, self.progress, ranks=self.ranks)
            self._nonfinite = NonFiniteGuard(config, self.agent, self.recorder, self.storage)
            snapshot.seed_everything(self.ranks.seed(config.seed))
            # Worlds that have numbers differ with the same seed.
            seed = config.seed if self.envs.first_env is not None else self.ranks.seed(config.seed)
            self.state = self._restore(saved) if saved else LoopState.begin(self.agent, self.envs, seed)
            self.ranks.check_equal(self.agent.networks.state_dict().items())

            # Logs and banner. A stop between two updates left the hooks of its step uncalled: its rows are dropped, and
            # its hooks are still to come.
            purge_step = saved.step - (self.state.due > 0) if saved else None
            logger = NoLogger()
            if self.ranks.first:
                run_ids = saved.run_ids if saved else {}
                logger = RunLogger(self.storage.path, sinks, purge_step=purge_step, run_ids=run_ids)
            self.recorder.logger = logger
            stack.callback(logger.close)
            stack.callback(self.recorder.flush_quietly)
            self._introduce(planned.files, step_seconds)
            self._hooks = self._make_hooks(self._done)
            self.recorder.pauses["start"] += time.monotonic() - begun
            self._ending = stack.pop_all()
        self._compiled = self._unsavable = self._stopping = self._suspected = self._waiting = False
        self._saved_at = self._counters if saved else None
        self._run_ahead = RunAheadLimit(self.envs.device)

    def _restore(self, saved: snapshot.Saved) -> LoopState:
        if not self.envs.exact_resume:
            warn("this resume is approximate: these environments cannot be saved; new episodes begin")
        with snapshot.checkpoint_mismatch(self.run_dir):
            run = self.config, self.agent, self.envs, self.recorder, self.ranks
            state = snapshot.restore(saved.parts, saved.step, *run)
        if "memory" not in saved.parts:
            self.progress.stage(self.config.agent.collecting)
        saved.parts.clear()  # frees the second copy of the state
        if "seed" in saved.changed:
            snapshot.seed_everything(self.ranks.seed(self.config.seed))
            self.agent.generator.manual_seed(self.ranks.seed(self.config.seed))
        if self.ranks.first:
            self.storage.update(self._asked)
        return state

    def _introduce(self, files: Sequence[str], step_seconds: float) -> None:
        """Print the banner, and log configuration and provenance."""
        if not self.ranks.first:
            return
        config, step, logger = self.config, self.policy_steps, self.recorder.logger
        banner("sheeplike", describe(config, self.envs, self.agent, step, self.run_dir, files, step_seconds))
        start = json.dumps(self.storage.record_start(), indent=1)
        logger.each(lambda sink: sink.add_config(to_data(config)))
        logger.each(lambda sink: sink.add_text("config", f"```yaml\n{to_yaml(config)}```", step))
        logger.each(lambda sink: sink.add_text("start", f"```json\n{start}\n```", step))
        if step < self._first_update:
            self.progress.stage(config.agent.collecting)

    def _make_hooks(self, done: int) -> list[Every]:
        """Return the functions that the loop calls at intervals, counted from ``done`` policy steps."""
        config = self.config
        hooks = [
            (config.log_every, self.recorder.log),
            (config.env.num_envs, self._iterated),
            (config.video_every if self.ranks.first else None, self._patiently(self.recorder.report)),
            (config.eval.every, self._patiently(lambda state: self.evaluate())),
            (config.checkpoint.every, self._patiently(self._save_or_wait)),
        ]
        return [Every(n, hook, done // n) for n, hook in hooks if n is not None]

    # --- the interface of a program ---------------------------------------------------------------------------------

    @property
    def policy_steps(self) -> int:
        """Policy steps made so far, over all environments; with ``data.updates`` gradient steps."""
        return self.state.policy_steps

    @property
    def _done(self) -> int:
        """Policy steps without those whose updates are still to be made."""
        last = 1 if self.config.offline else self.config.env.num_envs
        return self.policy_steps - last * (self.state.due > 0)

    @property
    def over(self) -> bool:
        """True if ``total_steps`` are made, or the run was asked to stop."""
        return self.finished or self._stopping or (self.ranks.size == 1 and self.stop_requested())

    @property
    def interrupted(self) -> bool:
        """True if a signal ended :meth:`iterate` early; the first call after the resume makes the rest."""
        return self._stopping and (self.policy_steps < self._target or self.state.due > 0)

    @property
    def finished(self) -> bool:
        """True if ``total_steps`` are made, and all updates that are due after them."""
        return self.policy_steps >= self.config.last_step and not self.state.due

    @property
    def status(self) -> int:
        """The exit status for a program that ends with the run: 0, or that of the signal that stopped it."""
        return self.stop_requested.status if self.stop_requested() and not self.finished else 0

    def iterate(self, every: int | None = None) -> dict[str, float]:
        """Interact and learn up to the next multiple of ``every`` policy steps, or to the end of the run.

        A checkpoint that is due at its end is written when the next call begins, with what the program has changed.

        Returns:
            The newest value of every metric; there are new ones every ``log_every`` policy steps.

        Raises:
            Halted: ``max_skipped`` updates in a row were not finite.
            CommandError: ``every`` is no positive integer, or there is not enough memory.
            SystemExit: the run was stopped before.
        """
        if every is not None and not (isinstance(every, Integral) and every > 0):
            raise CommandError(f"iterate(every={every!r}): expected a whole number of policy steps above 0, or None")
        if self._stopping and not self.finished:  # a loop that does not ask would go on for ever
            raise SystemExit(self.status)
        total = self.config.last_step
        self._target = total if every is None else min((self._done // every + 1) * every, total)
        self._unsavable = True
        try:
            with (
                as_command_errors(CannotCompile),
                explain_oom(self.config),
                closing(Watchdog(self.config.watchdog)) as self.watchdog,
                self.recorder.training(self.state),
            ):
                if self._waiting:
                    self._waiting = False
                    with self.watchdog.patient():
                        self._save_if_finite()
                self._train_to(self._target)
        except CommandError as error:
            if error.status == CommandError.status:
                error.status = FAILED  # 2 would mean that nothing was created
            raise
        self.recorder.flush()
        self._unsavable = False
        return dict(self.recorder.latest)

    @property
    def _first_update(self) -> int:
        """Policy steps before the iteration in which the first update can come."""
        if self.config.offline:
            return 0
        num_envs = self.config.env.num_envs
        return self.config.agent.first_update(num_envs) // num_envs * num_envs

    def _train_to(self, target: int) -> None:
        """Train up to ``target`` policy steps or a stop; the update is compiled on the way."""
        while self.policy_steps < target or self.state.due:
            self._halt_if_suspected()
            if self._stopping:
                return
            if self._compiled or self.policy_steps < self._first_update:
                train(
                    self.agent,
                    self.envs,
                    self.state,
                    # Act before compiling: an environment that fails shows before minutes of compiling.
                    total_steps=target if self._compiled else min(self._first_update, target),
                    observer=self.recorder,
                    hooks=self._hooks,
                    stop=self._must_stop,
                    ranks=self.ranks.size,
                    interact=not self.config.offline,
                )
            else:
                with self.watchdog.patient():
                    self._compile_update()
        self._halt_if_suspected()

    def _halt_if_suspected(self) -> None:
        """Raise :class:`Halted` if updates stay non-finite; called by all ranks."""
        self._must_stop()
        if self._suspected:
            self._nonfinite.halt_if_confirmed(self.policy_steps)

    def _must_stop(self) -> bool:
        """Return True if the loop must end; called before every update and every iteration, by all ranks."""
        self._run_ahead.wait()
        signals = self.stop_requested.signals
        suspected = int(self._nonfinite.suspects())
        signum, suspected = self.ranks.most(signals[0] if signals else 0, suspected)
        if signum:
            self.stop_requested.adopt(signum)
        self._stopping, self._suspected = bool(signum), bool(suspected)
        return self._stopping or self._suspected

    def evaluate(self) -> dict[str, float]:
        """Evaluate the agent as the configuration says, in environments of its own; the metrics are written too."""
        with self.recorder.pause("evaluation"):
            held_out = {name: float(value) for name, value in self.agent.validate().items()}
            return self.recorder.evaluated(self.evaluator(), self.state, held_out)

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint; without ``wait`` in the background, where a full disk is only warned about."""
        with self.recorder.pause("checkpoint"):
            self.ranks.check_equal(self.agent.networks.state_dict().items())
            run = self.agent, self.envs, self.recorder, self.config, self.state, self.ranks
            parts, meta, history = snapshot.take(*run)
            finite = ("agent",) if history else ("agent", "memory")  # all of a rollout is learnt from again
            if self.storage.save(self.policy_steps, parts, meta, history, finite=finite, wait=wait):
                self._saved_at = self._counters

    @property
    def _counters(self) -> tuple[int, int, int]:
        return self.state.policy_steps, self.state.gradient_steps, self.state.due

    def close(self) -> None:
        """Close everything without saving. Calling it again does nothing."""
        self._unsavable = True
        self._ending.close()

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # The state in the middle of a failed iteration cannot be saved; that after an error of the caller can.
        saved, halted = False, isinstance(error, Halted)
        try:
            with self._ending:
                self.progress.close()
                if error is not None and self.ranks.size > 1:
                    raise error  # the other ranks do not know of it: there is no saving together
                if not self._unsavable:
                    self._save_at_the_end()
                    if self.storage.mirror:
                        # Schedulers kill a run soon after their signal; a second signal ends this wait.
                        self.storage.mirror.wait(STOPPING if self.stop_requested() else FINISHING)
                    saved = self.stop_requested.settled = True
            if saved and self.status:
                mirror = [f"checkpoint.mirror={url}"] if (url := self.config.checkpoint.mirror) else []
                again = f"python -m sheeplike {shlex.join([f'resume={self.run_dir}', *mirror])}"
                info(f"saved; go on with: {'the same program and resume=auto' if self._in_program else again}")
        except Halted:
            halted = True
            raise
        finally:
            if self.stop_requested() and not halted:  # a job that halted would only halt again
                self.stop_requested.call_previous_handlers()

    def _save_at_the_end(self) -> None:
        step = self.storage.newest_step()
        newest = "" if step is None else f", its newest checkpoint is of step {step:,}"
        if step is not None:
            self._nonfinite.halt_if_confirmed(self.policy_steps)
        try:
            with closing(Watchdog(self.config.watchdog)):
                # A program may have changed the worlds; but no rank replaces its share of a whole checkpoint.
                if self.ranks.size == 1 or self._counters != self._saved_at:
                    self.save()
        except (OSError, checkpoint.NonFinite) as error:
            kind = Halted if isinstance(error, checkpoint.NonFinite) else Unsaved
            raise kind(f"{self.run_dir} could not be saved{newest}: {reason_of(error)}") from error

    # --- training ---------------------------------------------------------------------------------------------------

    def _compile_update(self) -> None:
        try:
            with self.recorder.pause("compile", "first run of the update" if self.config.compile == "off" else None):
                self.agent.warm_up()
        except Exception:
            if self.stop_requested():  # Ctrl-C reaches the compilers too: they are processes of their own
                return
            raise
        self._compiled = True
        mode = self.agent.networks.compiled.mode
        self.recorder.logger.each(lambda sink: sink.add_text("compile", mode, self.policy_steps))

    def _iterated(self, state: LoopState) -> None:
        if state.policy_steps >= self.config.last_step:
            self.recorder.flush()  # the last progress line shows the newest row
        self.progress.update(state.policy_steps, state.gradient_steps)
        self.watchdog.beat()

    def _patiently(self, hook: Callable[[LoopState], None]) -> Callable[[LoopState], None]:
        """Return ``hook`` with a watchdog that allows it more time."""

        def call(state: LoopState) -> None:
            with self.watchdog.patient():
                hook(state)

        return call

    # --- saving -----------------------------------------------------------------------------------------------------

    def _save_or_wait(self, state: LoopState) -> None:
        """Write a periodic checkpoint; the one at the end of a piece waits for what the program decides there."""
        self._waiting = state.policy_steps >= self._target
        if not self._waiting:
            self._save_if_finite()

    def _save_if_finite(self) -> None:
        """Write a periodic checkpoint, unless updates are being skipped: it would replace a good one."""
        skipped = self._nonfinite.skipped_in_a_row
        problem = f"updates are being skipped ({skipped} in a row); the final state is saved anyway" if skipped else ""
        if not problem:
            try:
                self.save(wait=False)
                return
            except checkpoint.NonFinite as error:
                problem = str(error)
                if problem.startswith("agent"):  # a non-finite rollout is gone with the next one
                    self._nonfinite.problem = problem
        self.progress.note(f"no checkpoint at policy step {self.policy_steps:,}: {problem}")
