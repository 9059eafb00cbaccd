"""What a run consists of, built from its configuration: device, worlds, evaluation; and what warms them up."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import warp
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from lightning.fabric import Fabric
from torch import Tensor

from sheeplike import checkpoint, envs
from sheeplike.agents.agent import Agent
from sheeplike.commands.advice import disk_advice, explained, spaces_of
from sheeplike.commands.agents import make_agent, plan_memory
from sheeplike.commands.config import to_yaml
from sheeplike.commands.errors import CommandError, as_command_errors
from sheeplike.commands.evaluation import play
from sheeplike.commands.run_directory import CHECKPOINTS, lock
from sheeplike.commands.schema import Config
from sheeplike.loop import Evaluation, first_step
from sheeplike.monitor.progress import phase, say
from sheeplike.nn.compilation import EAGER_CALLS

INEXACT = (
    "this resume is approximate: other people's environments cannot be saved, and new episodes begin in all worlds"
)


class Built(NamedTuple):
    """What a run consists of, before it has a state.

    Attributes:
        step_seconds: that one step of all worlds takes.
        parts: of the checkpoint to go on from, or None.
        writer: of the next checkpoints, of a run that goes on.
    """

    worlds: VectorEnv
    agent: Agent
    evaluator: Evaluator
    step_seconds: float
    parts: dict[str, Any] | None
    writer: checkpoint.Writer | None


def build(config: Config, run_dir: Path, stack: ExitStack, *, resume: bool) -> Built:
    """Build everything that a run needs, and read its checkpoint if it goes on.

    Args:
        stack: closes what has been built, and unlocks the directory of a run that goes on.

    Raises:
        CommandError: what the configuration describes cannot be built, or there is nothing to resume.
    """
    parts = worlds = writer = None
    with explained(config):
        fabric = launch(config)
        torch.manual_seed(config.seed)
        with as_command_errors(ValueError, TypeError, checkpoint.Corrupt, FileNotFoundError):
            if resume:
                stack.enter_context(lock(run_dir))
                writer = make_writer(config, run_dir, stack)  # puts things in order first: a kill may have left some
                with phase("reading the checkpoint"):
                    meta, parts = _read(run_dir)
                writer.went_back_to(meta["step"])
                for difference in differences(meta, parts):
                    say(f"sheeplike: {difference}", file=sys.stderr)
            worlds = build_worlds(config, config.env.num_envs, fabric.device)
            if resume and not getattr(worlds, "exact_resume", True):
                say(f"sheeplike: {INEXACT}", file=sys.stderr)
    stack.callback(worlds.close)
    with explained(config, worlds):
        with as_command_errors(ValueError, TypeError):
            if planned := plan_memory(config, worlds):
                say(planned)
            if not resume and (advice := disk_advice(config, **spaces_of(worlds))):
                say(f"sheeplike: {advice}", file=sys.stderr)
            agent = make_agent(config, worlds, fabric)
        sees = getattr(agent, "keys", None)
        if sees and not sees.images and config.env.renderer != "none" and envs.simulated(config.env.name):
            say("sheeplike: the agent sees no images: env.renderer=none saves rendering them, and films with them")
        # What other people's environments raise at their first steps says that they cannot be used as configured.
        refused = envs.Unusable if envs.simulated(config.env.name) else Exception
        with phase("building simulation and rendering kernels"), as_command_errors(refused):
            step_seconds = time_worlds(worlds)
        with phase("compiling the policy"):
            compile_policy(agent, worlds)
    evaluator = Evaluator(config, agent, fabric.device)
    stack.callback(evaluator.close)
    return Built(worlds, agent, evaluator, step_seconds, parts, writer)


def _read(run_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint that is whole; damaged ones are told in a line each."""
    with _warnings_said(""):
        try:
            return checkpoint.load_latest(run_dir / CHECKPOINTS)
        except checkpoint.UnknownFormat:
            raise
        except checkpoint.Corrupt as error:
            raise CommandError(f"{error}; expected another run_dir, or move {run_dir} away to begin again") from error


@contextmanager
def _warnings_said(prefix: str = "sheeplike: ") -> Iterator[None]:
    """Warnings are told in a line each, without the place in the code that they come from."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: say(f"{prefix}{message}", file=sys.stderr)
        yield


def make_writer(config: Config, run_dir: Path, stack: ExitStack) -> checkpoint.Writer:
    """What writes the checkpoints of a run; ``stack`` closes it.

    Raises:
        CommandError: the directory cannot be written.
    """
    with as_command_errors(OSError):
        writer = checkpoint.Writer(
            run_dir / CHECKPOINTS,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            config=to_yaml(config),
            device="cuda" if config.fabric.accelerator == "cuda" else "cpu",
            report=lambda text: say(f"sheeplike: {text}", file=sys.stderr),
        )
    stack.callback(writer.close)
    return writer


def differences(meta: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    """Why a run that goes on from this checkpoint is not bit for bit the one that would have been; usually nothing."""
    if "memory" not in parts:
        yield (
            "this resume is approximate: the checkpoint does not hold what the agent has seen "
            "(checkpoint.replay=false), and it begins again with an empty memory"
        )
    here = checkpoint.versions()
    changed = [f"{name} {was} -> {here[name]}" for name, was in meta["versions"].items() if here.get(name) != was]
    if changed:
        yield f"this resume may differ in the last bits: {', '.join(changed)}"


def launch(config: Config) -> Fabric:
    """Device, precision and threads that the configuration asks for.

    Raises:
        CommandError: torch cannot use the GPU.
    """
    if config.fabric.accelerator == "cuda" and not torch.cuda.is_available():
        raise CommandError("fabric.accelerator=cuda: torch cannot use the GPU (is its driver too old?); nearest: cpu")
    if config.fabric.deterministic:
        _make_deterministic(config.fabric.accelerator == "cuda")
    if config.fabric.precision == "bf16-mixed":
        torch.set_float32_matmul_precision("high")
    fabric = Fabric(accelerator=config.fabric.accelerator, devices=1, precision=config.fabric.precision)
    fabric.launch()
    if fabric.device.type == "cpu":
        # torch's threads spin while they wait for each other: one too many and an update takes ten times as long.
        torch.set_num_threads(config.fabric.threads or min(torch.get_num_threads(), max(os.cpu_count() - 1, 1)))
    return fabric


def _make_deterministic(gpu: bool) -> None:
    """Two runs of the same numbers give the same bits, on a GPU too, where that costs speed.

    The libraries read this when their devices are first used.
    """
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    if gpu:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
        warp.config.deterministic = warp.config.DeterministicMode.RUN_TO_RUN


def build_worlds(config: Config, num_envs: int, device: torch.device, *, nominal: bool = False) -> VectorEnv:
    """:func:`make_envs` as a command begins: it is said, warnings are a line each, and so is what others raise.

    Raises:
        CommandError: of an environment that we do not simulate, which may raise anything when it is made.
    """
    foreign = (envs.InvalidOption,) if envs.simulated(config.env.name) else (Exception,)
    with phase("building worlds"), _warnings_said(), as_command_errors(*foreign):
        return make_envs(config, num_envs, device, nominal=nominal)


def make_envs(config: Config, num_envs: int, device: torch.device, *, nominal: bool = False) -> VectorEnv:
    """The worlds that the configuration describes.

    Args:
        nominal: as the scene was compiled, whatever the configuration says of randomization.
    """
    env = config.env
    return envs.make(
        env.name,
        num_envs=num_envs,
        device=device,
        image_size=env.image_size,
        cameras=env.cameras,
        renderer=env.renderer,
        depth=env.depth,
        segmentation=env.segmentation,
        shadows=env.shadows,
        textures=env.textures,
        action_repeat=env.action_repeat,
        seed=config.seed,
        randomization=config.randomization,
        nominal=nominal,
        **({} if env.id is None else {"id": env.id}),
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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # said when the training worlds were built
                self.worlds = make_envs(self.config, settings.num_envs, self.device, nominal=settings.nominal)
        return play(self.agent, self.worlds, episodes=settings.episodes, sample=settings.sample, video=settings.video)

    def close(self) -> None:
        if self.worlds is not None:
            self.worlds.close()


def time_worlds(worlds: VectorEnv, steps: int = 4) -> float:
    """Build the simulation's kernels; returns the seconds that one step of all worlds takes."""
    worlds.reset(seed=0)
    action = _some_action(worlds)
    worlds.step(action)[1].sum().item()  # waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        _, reward, *_ = worlds.step(action)
    reward.sum().item()
    return (time.perf_counter() - start) / steps


def _some_action(worlds: VectorEnv) -> Tensor:
    """An action that every world takes: zeros, or the first choice of each that there is."""
    single = worlds.single_action_space
    if isinstance(single, spaces.Discrete | spaces.MultiDiscrete):
        first = torch.as_tensor(single.start, dtype=torch.int64, device=worlds.device)
        return first.expand(worlds.num_envs, *single.shape).contiguous()
    return torch.zeros(worlds.num_envs, *single.shape, device=worlds.device)


def compile_policy(agent: Agent, worlds: VectorEnv) -> None:
    """Act until that is compiled, and captured where it is, with a player that nobody uses afterwards."""
    step, player = first_step(worlds.reset(seed=0)[0], worlds.num_envs), agent.player(worlds.num_envs)
    for _ in range(EAGER_CALLS + 1):
        player.act(step.obs, step.is_first)


def describe_device(config: Config, device: torch.device) -> str:
    """Where a run takes place, for people to read."""
    threads = f"{torch.get_num_threads()} of {os.cpu_count()} cores"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, torch on {threads}"
    exact = "; deterministic" if config.fabric.deterministic else ""
    return f"{name}; {config.fabric.precision}{exact}; profile {config.profile}"
