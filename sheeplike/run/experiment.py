"""A training run as an object: what the command line drives to its end, and what a program can drive in its own way.

::

    import sheeplike

    with sheeplike.init("exp=ppo", "env=cartpole_balance", "total_steps=200_000", "resume=auto") as run:
        while not run.over:
            metrics = run.iterate(20_000)
            print(run.policy_steps, metrics.get("rollout/return_mean"), run.evaluate()["eval/return_mean"])
"""

from __future__ import annotations

import io
import json
import math
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from numbers import Integral
from types import TracebackType

import torch

from sheeplike import checkpoint
from sheeplike.agents.spaces import ObservationKeys
from sheeplike.config.compose import start_of
from sheeplike.config.errors import as_command_errors
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import headlines
from sheeplike.config.sources import Sources
from sheeplike.files import write_atomically
from sheeplike.loop import Every, LoopState, train
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.progress import Progress, banner
from sheeplike.nn.compilation import CannotCompile
from sheeplike.options import CommandError
from sheeplike.run import provenance, snapshot
from sheeplike.run.build import RunComponents, build, describe_device, explain_oom, make_writer, of_this_agent
from sheeplike.run.evaluation import Evaluator
from sheeplike.run.layout import LAST_BATCH, checkpoint_steps
from sheeplike.run.recorder import Recorder
from sheeplike.run.run_dir import Claim, Plan, plan, update
from sheeplike.run.signals import FAILED, UNSAVED, StopRequest, stoppable, stops_at_once
from sheeplike.run.watchdog import Watchdog
from sheeplike.terminal import info, warn

COLLECT_FIRST = 60  # seconds of acting, at most, before the update is compiled
RUN_AHEAD = 4  # updates, or iterations without one, that may be queued on a GPU: a stop has to wait for them


class Halted(CommandError):
    """Training cannot go on, or not be saved: numbers are not finite."""

    status = FAILED


class Unsaved(CommandError):
    """The run ended, and its last checkpoint could not be written."""

    status = UNSAVED


def init(*overrides: str, config_dirs: Sequence[str] = ()) -> Experiment:
    """Begin a run, or go on with one, as ``python -m sheeplike <overrides>`` does; nothing is learnt yet.

    Args:
        overrides: such as ``"exp=ppo"``, ``"env=franka_pick"``, ``"total_steps=200_000"``; ``"resume=<run_dir>"`` goes
            on with that run, and ``"resume=auto"`` with what is in ``run_dir``, if anything is.
        config_dirs: where to look for configs beside those of the package.

    Raises:
        CommandError: the request cannot be met; nothing was created.
    """
    start, rest = start_of(overrides)
    if start.seeds is not None or start.show:
        raise CommandError("seeds= and show=: expected on the command line only")
    return Experiment(plan(start, rest, Sources(config_dirs)))


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

    Signals that ask to stop (see :mod:`~sheeplike.run.signals`) end :meth:`iterate` after the step or update that is
    going on; ``over`` is true from then on.

    Args:
        planned: what to train; the directory of a new run is created once everything could be built.
        building: a context in which environments and agent are built, before there is anything to save.

    Attributes:
        config, run_dir, envs, agent: what the run consists of.
        state: where it stands.
        stop: whether it was asked to stop, and how.

    Raises:
        CommandError: what the configuration describes cannot be built, or there is nothing to resume.
    """

    def __init__(self, planned: Plan, *, building: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self.config, self.run_dir = planned.config, planned.run_dir
        self._place = self.run_dir.absolute()  # an environment may go to another working directory
        if planned.again:
            info(f"{self.run_dir} has no checkpoint: it begins again")
        self.kept = planned.resume  # whether there is anything worth keeping in the directory
        self._compiled = self._touched = self._halted = False
        self._queued: deque[torch.cuda.Event] = deque()
        self._nonfinite: str | None = None  # what cannot be saved, since it is not finite
        begun = time.monotonic()
        with ExitStack() as stack:  # what has begun is ended, should a later part fail
            with building():
                built = build(self.config, self._place, stack, resume=planned.resume)
            self.envs, self.agent, self._step_seconds = built.envs, built.agent, built.step_seconds
            self.evaluator = Evaluator(self.config, self.agent, built.device)
            stack.callback(self.evaluator.close)
            # From here on nothing ends this process without leaving the run in order.
            self.stop: StopRequest = stack.enter_context(stoppable())
            if not planned.resume:
                claim = stack.enter_context(Claim(self._place, self.config, again=planned.again))
                stack.callback(lambda: self.kept or claim.discard())
            self.writer = built.writer or make_writer(self.config, self._place, stack)
            self._begin(built, planned, stack)
            self.recorder.pauses["start"] += time.monotonic() - begun
            self._ending = stack.pop_all()

    # --- what a program drives --------------------------------------------------------------------------------------

    @property
    def policy_steps(self) -> int:
        """Policy steps made so far, over all environments."""
        return self.state.policy_steps

    @property
    def over(self) -> bool:
        """Whether ``total_steps`` are made, or the run was asked to stop."""
        return self.finished or self.stop()

    @property
    def finished(self) -> bool:
        """Whether ``total_steps`` are made, and all updates that are due after them."""
        return self.policy_steps >= self.config.total_steps and not self.state.due

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
            Halted: ``max_skipped`` updates in a row were not finite.
            CommandError: ``every`` is no positive integer, or there is not enough memory.
        """
        if every is not None and not (isinstance(every, Integral) and every > 0):
            raise CommandError(f"iterate(every={every!r}): expected a whole number of policy steps above 0, or None")
        total = self.config.total_steps
        target = total if every is None else min((self.policy_steps // every + 1) * every, total)
        self._busy = True
        try:
            with (
                as_command_errors(CannotCompile),
                explain_oom(self.config),
                Watchdog(self.config.watchdog) as self.watchdog,
                self.recorder.training(self.state),
            ):
                self._go_to(target)
        except CommandError as error:
            if self.kept and error.status == CommandError.status:
                error.status = FAILED  # 2 would mean that nothing was created
            raise
        self.recorder.flush()
        self._busy = False
        self._touched = not self.finished  # the caller may change the environments now: the end saves again
        return dict(self.recorder.latest)

    def evaluate(self) -> dict[str, float]:
        """Evaluate the agent as the configuration says, in environments of its own; the metrics are written too."""
        self._touched = True
        with self.recorder.pause("evaluation"):
            return self.recorder.evaluated(self.evaluator(), self.state)

    def save(self, *, wait: bool = True) -> None:
        """Write a checkpoint of everything.

        Args:
            wait: until it is on the disk. Otherwise it is written while the run goes on, and a disk that is full is
                only warned about.

        Raises:
            OSError: it cannot be written, with ``wait``.
        """
        with self.recorder.pause("checkpoint"):
            parts, meta, history = snapshot.take(self.agent, self.envs, self.recorder, self.config, self.state)
            finite = ("agent",) if history else ("agent", "memory")  # all of a rollout is learnt from again
            self.writer.extra["compile"] = self._compilation
            self.writer.save(self.policy_steps, parts, meta, history, finite=finite, wait=wait)
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
                info(f"saved; go on with: python -m sheeplike {shlex.quote(f'resume={self.run_dir}')}")
        finally:
            if self.stop() and not self._halted:  # it would only halt again
                self.stop.tell_others()

    # --- how it begins ----------------------------------------------------------------------------------------------

    def _begin(self, built: RunComponents, planned: Plan, stack: ExitStack) -> None:
        """The state, new or restored, and what records it."""
        config, parts = self.config, built.parts
        start, behind, remembers = built.start, False, bool(parts and "memory" in parts)
        self._resumed_from, self._was_compiled = start, built.compiled
        self.progress = Progress(config.total_steps, initial_steps=start or 0)
        stack.callback(self.progress.close)
        self.recorder = Recorder(self.agent, self.envs, self.progress)
        snapshot.seed_everything(config.seed)
        if parts is None:
            self.state = LoopState.begin(self.agent, self.envs, config.seed)
        else:
            with of_this_agent(self._place):
                self.state = snapshot.restore(parts, start, config, self.agent, self.envs, self.recorder)
                behind = parts["loop"]["counters"]["due"] > 0
            parts.clear()  # or part of it would be in memory twice
            if "seed" in built.changed:
                snapshot.seed_everything(config.seed)
                self.agent.generator.manual_seed(config.seed)
            update(self._place, config)
        # Only now: what an earlier attempt wrote after its last checkpoint is dropped. A stop between two updates came
        # before the hooks of its step, which wrote what else there is of that step.
        purge = None if start is None else start - behind
        self.recorder.logger = logger = RunLogger(
            self._place, tensorboard=config.logger.tensorboard, purge_step=-1 if planned.again else purge
        )
        stack.callback(logger.close)
        stack.callback(self._last_row)
        soon = self.policy_steps + math.ceil(COLLECT_FIRST / self._step_seconds) * self.envs.num_envs
        first = config.agent.first_update(config.env.num_envs) // config.env.num_envs * config.env.num_envs
        self._compile_at = min(first, soon)
        self._busy = False
        banner("sheeplike", self._describe(planned.files))
        logger.log_text("config", f"```yaml\n{to_yaml(config)}```", self.policy_steps)
        origin = json.dumps(provenance.record(self._place), indent=1)
        logger.log_text("start", f"```json\n{origin}\n```", self.policy_steps)
        logger.log_hyperparameters(*headlines(config))
        if parts is None or not remembers or self.policy_steps < first:
            self.progress.stage(config.agent.collecting)
        # Hooks of the loop, counted from here.
        hooks = [
            (config.log_every, self.recorder.log),
            (self.envs.num_envs, self._iterated),
            (config.video_every, self._patiently(self.recorder.report)),
            (config.eval.every, self._patiently(lambda state: self.evaluate())),
            (config.checkpoint.every, self._patiently(lambda state: self._save_if_sound())),
        ]
        done = self.policy_steps - behind * self.envs.num_envs
        self._hooks = [Every(n, hook, done // n) for n, hook in hooks if n is not None]

    def _describe(self, files: Sequence[str]) -> dict[str, str]:
        """What is about to happen, name to text."""
        config, agent, start = self.config, self.agent, self.policy_steps
        left, updates = config.total_steps - start, self._updates_left()
        updating = "" if updates is None else f", {updates:,} gradient steps"
        continued = f"continued from policy step {start:,}: " if start else ""
        keys, targets = getattr(agent, "keys", None), getattr(agent, "targets", ())
        predicted, probes = getattr(agent, "predicted", keys), getattr(agent, "probes", None)
        return {
            "task": f"{config.env.task}: {self.envs.num_envs} worlds, episodes of {self.envs.episode_length} steps",
            **({"randomized": ", ".join(config.randomization)} if config.randomization else {}),
            "device": describe_device(config, self.envs.device),
            **({"sees": self._describe_sight(keys)} if keys else {}),
            **(
                {"predicts": f"{_describe_observations(predicted, targets)}, not seen by the policy"} if targets else {}
            ),
            **({"probes": _describe_observations(agent.stored, probes.names)} if probes else {}),
            **agent.describe(),
            **({"configs": ", ".join(files)} if files else {}),
            "run": f"{continued}{left:,} policy steps{updating}, in {self.run_dir}",
            "simulation": f"{self.envs.num_envs / self._step_seconds:,.0f} policy steps/s alone",
        }

    def _describe_sight(self, keys: ObservationKeys) -> str:
        unseen = ", ".join(sorted(self.envs.single_observation_space.spaces.keys() - keys.spaces.keys()))
        return _describe_observations(keys, keys.spaces) + f" (not seen: {unseen})" * bool(unseen)

    def _updates_left(self) -> int | None:
        config = self.config
        return config.agent.updates(self.policy_steps, config.total_steps, config.env.num_envs)

    # --- how it goes on ---------------------------------------------------------------------------------------------

    def _go_to(self, target: int) -> None:
        while (self.policy_steps < target or self.state.due) and not self.stop():
            if not self._compiled:
                # Act first, so that the environments run at once; but compile after a minute at most, so that an
                # update that does not fit into memory fails early.
                if self.policy_steps < self._compile_at:
                    self._train(min(self._compile_at, target))
                if self.policy_steps >= self._compile_at and not self.over:
                    self._patiently(self._compile_update)(self.state)
                    self._compiled = self.kept = True  # the directory is kept from here on, even without a checkpoint
                    self.recorder.logger.log_text("compile", str(self._compilation), self.policy_steps)
                    if self._was_compiled not in (None, self._compilation):
                        change = f"compiled as {self._was_compiled!r} before, and as {self._compilation!r} here"
                        warn(f"this resume may differ in the last bits: {change}")
                if self.policy_steps < self._compile_at:
                    continue
            self._train(target)
            if self._must_halt():
                self._halt_if_still_nonfinite()

    def _train(self, total_steps: int) -> None:
        train(
            self.agent,
            self.envs,
            self.state,
            total_steps=total_steps,
            observer=self.recorder,
            hooks=self._hooks,
            stop=self._must_stop,
        )

    def _iterated(self, state: LoopState) -> None:
        if state.policy_steps >= self.config.total_steps:
            self.recorder.flush()  # the last line shows the newest row
        self.progress.update(state.policy_steps)
        self.watchdog.beat()

    def _must_stop(self) -> bool:
        """Asked before every update and every iteration."""
        if self.envs.device.type == "cuda":
            self._stay_close()
        return self.stop() or self._must_halt()

    def _stay_close(self) -> None:
        """Wait until the GPU is at most ``RUN_AHEAD`` such calls behind."""
        self._queued.append(torch.cuda.Event())
        self._queued[-1].record()
        if len(self._queued) > RUN_AHEAD:
            self._queued.popleft().synchronize()

    def _patiently(self, hook: Callable[[LoopState], None]) -> Callable[[LoopState], None]:
        """``hook``, which may take long: the watchdog is patient."""

        def call(state: LoopState) -> None:
            with self.watchdog.patient():
                hook(state)

        return call

    def _compile_update(self, state: LoopState) -> None:
        try:
            with self.recorder.pause("compile", "first run of the update" if self.config.compile == "off" else None):
                self.agent.warm_up()
        except Exception:
            if self.stop():  # Ctrl-C reaches the compilers too: they are processes of their own
                return
            raise

    @property
    def _compilation(self) -> str | None:
        """How updates are compiled, on which their last bits depend; until they are, as they were."""
        compilation = getattr(self.agent, "compiled", None)
        return self._was_compiled if compilation is None or not self._compiled else compilation.mode

    # --- numbers that are not finite --------------------------------------------------------------------------------

    def _must_halt(self) -> bool:
        return bool(self._nonfinite) or self.recorder.skipped >= self.config.max_skipped

    def _halt_if_still_nonfinite(self) -> None:
        """Stop, with what the last update saw in a file; the newest checkpoint was written while numbers were finite.

        Not if updates have been good since: the record is an interval late.

        Raises:
            Halted: otherwise.
        """
        skipped = int(self.agent.skipped_in_a_row)
        if not self._nonfinite and skipped < self.config.max_skipped:
            self.recorder.skipped = float(skipped)
            return
        reason = self._nonfinite or f"{skipped} updates in a row were not finite"
        with suppress(OSError):
            self.writer.wait()
        step = self.writer.last.step if self.writer.last else self._resumed_from
        hint = "there is no checkpoint to go on from"
        if step is not None:  # with the same seed it would come to the same place
            again = shlex.join([f"resume={self.run_dir}", f"seed={self.config.seed + 1}"])
            hint = f"go on from policy step {step:,} with other random numbers: python -m sheeplike {again}"
        self._halted = True
        raise Halted(f"{reason}, at policy step {self.policy_steps:,}; {self._dump_last_batch()}; {hint}")

    def _dump_last_batch(self) -> str:
        """Save what the last update saw; returns what came of it."""
        path = self._place / LAST_BATCH
        try:
            batch = {name: value.cpu() for name, value in self.agent.last_batch().items()}
            content = io.BytesIO()
            torch.save(batch, content)
            write_atomically(path, content.getvalue())
        except Exception as error:  # the disk is full, or the device: neither may hide why the run halts
            return f"what the last one saw cannot be saved: {error}"
        return f"what the last one saw is in {path}"

    def _save_if_sound(self) -> None:
        """A periodic checkpoint, unless updates are being skipped: what follows from this state is not sound."""
        skipped = int(self.agent.skipped_in_a_row)
        problem = f"updates are being skipped ({skipped} in a row); its end is saved all the same" * (skipped > 0)
        if not problem:
            try:
                self.save(wait=False)
                return
            except checkpoint.NonFinite as error:
                problem = str(error)
                if problem.startswith("agent"):  # what it has seen is gone with the next rollout
                    self._nonfinite = problem
        self.progress.note(f"no checkpoint at policy step {self.policy_steps:,}: {problem}")

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _save_at_the_end(self) -> None:
        steps = checkpoint_steps(self._place)
        newest = f"its newest checkpoint is of policy step {steps[-1]:,}" if steps else "it has no checkpoint"
        if steps:
            self._halt_if_still_nonfinite()
        try:
            with Watchdog(self.config.watchdog):
                if self._touched or not self.writer.holds(self.policy_steps):
                    self.save()
        except (OSError, checkpoint.NonFinite) as error:
            kind = Halted if isinstance(error, checkpoint.NonFinite) else Unsaved
            raise kind(f"{self.run_dir} could not be saved, {newest}: {error}") from error

    def _last_row(self) -> None:
        with suppress(RuntimeError):  # a device that has failed keeps it
            self.recorder.flush()


def _describe_observations(keys: ObservationKeys, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, keys.spaces[name].shape))}" for name in names)
