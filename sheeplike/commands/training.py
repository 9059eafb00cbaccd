"""The training run that a checked configuration describes."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from gymnasium.vector import VectorEnv
from lightning.fabric import Fabric

from sheeplike import checkpoint, envs
from sheeplike.agents.agent import Agent
from sheeplike.commands.agents import (
    describe_agent,
    gradient_steps,
    learning_begins,
    make_agent,
    name_collecting,
    plan_memory,
)
from sheeplike.commands.config import to_yaml
from sheeplike.commands.errors import CommandError, as_command_errors
from sheeplike.commands.evaluation import play
from sheeplike.commands.recorder import Recorder, restore, save
from sheeplike.commands.run_directory import CHECKPOINTS, checkpoint_steps, create, discard, lock, update
from sheeplike.commands.schema import Config
from sheeplike.commands.train import stops_at_once
from sheeplike.loop import Evaluation, Every, LoopState, first_step, train
from sheeplike.monitor.logger import RunLogger
from sheeplike.monitor.progress import Progress, banner, format_seconds, phase
from sheeplike.nn.compilation import EAGER_CALLS

COLLECT_FIRST = 60  # seconds of acting, at most, before the update is compiled


def run(config: Config, run_dir: Path, *, resume: bool = False) -> bool:
    """Train until ``total_steps`` or Ctrl-C, and leave a checkpoint; returns whether the run was finished.

    Args:
        config: checked.
        run_dir: of a new run, created here once everything could be built; or of a resumed one.
        resume: continue from the newest valid checkpoint in ``run_dir``.

    Raises:
        CommandError: what the configuration describes cannot be built, or there is nothing to resume.
    """
    parts, begun, held = None, 0, None
    with stops_at_once():
        fabric = launch(config)
        torch.manual_seed(config.seed)
        with as_command_errors(ValueError, TypeError, MemoryError, checkpoint.Corrupt, FileNotFoundError):
            if resume:
                held = lock(run_dir)
                with phase("reading the checkpoint"):
                    _, parts = checkpoint.load_latest(run_dir / CHECKPOINTS)
                begun = parts["loop"]["counters"]["policy_steps"]
                if begun >= config.total_steps:
                    raise CommandError(
                        f"resume={run_dir}: finished at {begun} policy steps; expected a larger total_steps="
                    )
            with phase("building worlds"):
                worlds = make_envs(config, config.env.num_envs, fabric.device)
            print(plan_memory(config, worlds))
            agent = make_agent(config, worlds, fabric)
        with as_command_errors(torch.OutOfMemoryError):
            with phase("building simulation and rendering kernels"):
                step_seconds = time_worlds(worlds)
            with phase("compiling the policy"):
                compile_policy(agent, worlds)

    held = held or create(run_dir, config)
    logger = RunLogger(run_dir, tensorboard=config.logger.tensorboard, purge_step=begun if resume else None)
    progress = Progress(config.total_steps, initial_steps=begun)
    recorder = Recorder(agent, worlds, logger, progress)
    torch.manual_seed(config.seed)
    if parts is None:
        state = LoopState.begin(agent, worlds, config.seed)
    else:
        with as_command_errors(ValueError, KeyError, checkpoint.Corrupt):
            state = restore(parts, agent, worlds, recorder)
        update(run_dir, config)
        del parts  # or the replay would be held twice
    banner({"sheeplike": describe(config, agent, worlds, run_dir, state, step_seconds)})
    logger.log_text("config", f"```yaml\n{to_yaml(config)}```", state.policy_steps)
    logger.log_hyperparameters(asdict(config))

    evaluator = Evaluator(config, agent, fabric.device)
    with as_command_errors(OSError, checkpoint.InUse):
        writer = checkpoint.Writer(
            run_dir / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            config=to_yaml(config),
            device=fabric.device.type,
            report=progress.note,
        )
    save_checkpoint = partial(save, writer, agent, worlds, recorder, config)
    intervals = [
        (worlds.num_envs, lambda state: progress.update(state.policy_steps)),
        (config.log_every, recorder.log),
        (config.video_every, recorder.paused(recorder.report)),
        (config.eval.every, recorder.paused(lambda state: recorder.evaluated(evaluator(), state))),
        (config.checkpoint.every, recorder.paused(save_checkpoint)),
    ]
    hooks = [Every(n, function, state.policy_steps // n) for n, function in intervals if n is not None]
    worth_keeping = resume
    try:
        with interruptible() as stopped, as_command_errors(checkpoint.NonFinite):
            recorder.begin(state)
            proceed = partial(train, agent, worlds, state, observer=recorder, hooks=hooks, stop=stopped)
            # The worlds do not wait for the update to be compiled, nor for long to learn that it cannot be.
            soon = state.policy_steps + math.ceil(COLLECT_FIRST / step_seconds) * worlds.num_envs
            progress.stage(name_collecting(config))
            proceed(total_steps=min(learning_begins(config), soon, config.total_steps))
            if not stopped() and state.policy_steps < config.total_steps:
                recorder.paused(partial(compile_update, config, agent, progress, step_seconds, stopped))(state)
            worth_keeping = True
            proceed(total_steps=config.total_steps)
        finished = state.policy_steps >= config.total_steps
        recorder.flush()
        progress.close()
        with phase("saving"), as_command_errors(OSError):
            if not writer.holds(state.policy_steps):
                save_checkpoint(state, wait=True)
    finally:
        progress.close()
        with suppress(RuntimeError):  # a device that has failed keeps the last row
            recorder.flush()
        logger.close()
        worlds.close()
        evaluator.close()
        writer.close()
        if not (worth_keeping or checkpoint_steps(run_dir)):
            discard(run_dir)
        held.close()
    return finished


def compile_policy(agent: Agent, worlds: VectorEnv) -> None:
    """Act until that is compiled, and captured where it is, with a player that nobody uses afterwards."""
    step, player = first_step(worlds.reset(seed=0)[0], worlds.num_envs), agent.player(worlds.num_envs)
    for _ in range(EAGER_CALLS + 1):
        player.act(step.obs, step.is_first)


def compile_update(
    config: Config,
    agent: Agent,
    progress: Progress,
    step_seconds: float,
    stopped: Callable[[], bool],
    state: LoopState,
) -> None:
    """Have the agent compile its update, and say how long the rest of the run will take.

    Raises:
        CommandError: there is not enough memory for it.
    """
    try:
        with as_command_errors(torch.OutOfMemoryError), phase("compiling the update"):
            update_seconds = agent.warm_up()
    except Exception:
        if stopped():  # Ctrl-C reaches the compilers too: they are processes of their own
            return
        raise
    iterations = (config.total_steps - state.policy_steps) / config.env.num_envs
    seconds = iterations * step_seconds + gradient_steps(config, state.policy_steps) * update_seconds
    progress.note(
        f"about {format_seconds(seconds)} to go, at {update_seconds:.2g} s per gradient step; evaluation and videos "
        "come on top"
    )


def launch(config: Config) -> Fabric:
    """Device, precision and threads that the configuration asks for.

    Raises:
        CommandError: torch cannot use the GPU.
    """
    if config.fabric.accelerator == "cuda" and not torch.cuda.is_available():
        raise CommandError("fabric.accelerator=cuda: torch cannot use the GPU (is its driver too old?); nearest: cpu")
    if config.fabric.precision == "bf16-mixed":
        torch.set_float32_matmul_precision("high")
    fabric = Fabric(accelerator=config.fabric.accelerator, devices=1, precision=config.fabric.precision)
    fabric.launch()
    if fabric.device.type == "cpu":
        # torch's threads spin while they wait for each other: one too many and an update takes ten times as long.
        torch.set_num_threads(config.fabric.threads or min(torch.get_num_threads(), max(os.cpu_count() - 1, 1)))
    return fabric


def make_envs(config: Config, num_envs: int, device: torch.device) -> VectorEnv:
    """The worlds that the configuration describes."""
    env = config.env
    return envs.make(
        env.name,
        num_envs=num_envs,
        device=device,
        image_size=env.image_size,
        cameras=env.cameras,
        depth=env.depth,
        action_repeat=env.action_repeat,
        seed=config.seed,
        **env.options,
    )


@dataclass
class Evaluator:
    """Evaluates the agent in worlds of its own, which are built when they are first needed."""

    config: Config
    agent: Agent
    device: torch.device
    worlds: VectorEnv | None = None

    def __call__(self) -> Evaluation:
        """Run the evaluation that the configuration asks for."""
        settings = self.config.eval
        if self.worlds is None:
            self.worlds = make_envs(self.config, settings.num_envs, self.device)
        return play(self.agent, self.worlds, episodes=settings.episodes, sample=settings.sample, video=settings.video)

    def close(self) -> None:
        if self.worlds is not None:
            self.worlds.close()


def time_worlds(worlds: VectorEnv, steps: int = 4) -> float:
    """Build the simulation's kernels; returns the seconds that one step of all worlds takes."""
    worlds.reset(seed=0)
    action = torch.zeros(worlds.action_space.shape, device=worlds.device)
    worlds.step(action)[1].sum().item()  # waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        _, reward, *_ = worlds.step(action)
    reward.sum().item()
    return (time.perf_counter() - start) / steps


def describe(
    config: Config,
    agent: Agent,
    worlds: VectorEnv,
    run_dir: Path,
    state: LoopState,
    step_seconds: float,
) -> dict[str, str]:
    """What is about to happen, name to text."""
    left = config.total_steps - state.policy_steps
    updates = gradient_steps(config, state.policy_steps)
    begun = f"continued from policy step {state.policy_steps:,}: " if state.policy_steps else ""
    acting = format_seconds(left / worlds.num_envs * step_seconds)
    cuda = worlds.device.type == "cuda"
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    device = torch.cuda.get_device_name(worlds.device) if cuda else f"CPU, torch on {threads}"
    return {
        "task": f"{config.env.name}: {worlds.num_envs} worlds, episodes of {worlds.episode_length} steps",
        "device": f"{device}; {config.fabric.precision}; profile {config.profile}",
        **describe_agent(config, agent),
        "run": f"{begun}{left:,} policy steps, {updates:,} gradient steps, in {run_dir}",
        "time": f"{acting} for acting, at {worlds.num_envs / step_seconds:,.0f} policy steps/s simulated; learning is "
        "timed when it is compiled",
    }


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks the loop to finish its iteration and save; a second one stops at once."""
    asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\nstopping after this iteration; press Ctrl-C again to stop at once without saving", flush=True)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
