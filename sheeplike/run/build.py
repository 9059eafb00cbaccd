"""What a run consists of, built from its configuration: device, environments, agent; and what warms them up."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch
import warp
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor

from sheeplike import checkpoint, envs
from sheeplike.agents import registry
from sheeplike.agents.agent import Agent
from sheeplike.config.errors import as_command_errors
from sheeplike.config.saved import changes, describe_changes, may_change
from sheeplike.config.schema import Config, to_data, validate
from sheeplike.config.schema import Fabric as FabricOptions
from sheeplike.envs.contract import GaveUp
from sheeplike.host import cpu_cores
from sheeplike.loop import first_step
from sheeplike.memory.replay import TooLarge
from sheeplike.monitor.progress import phase
from sheeplike.nn.compilation import EAGER_CALLS, CannotCompile, is_out_of_memory
from sheeplike.options import CommandError
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE
from sheeplike.run.run_dir import lock, parts_to_read
from sheeplike.terminal import first_sentence, info, text_of, warn

INEXACT = (
    "this resume is approximate: other people's environments cannot be saved, and new episodes begin in all worlds"
)
# What loading a state raises that is of something else.
_OF_ANOTHER = (LookupError, TypeError, AttributeError, RuntimeError, OverflowError, ValueError, checkpoint.Corrupt)


class RunComponents(NamedTuple):
    """What a run consists of, before it has a state.

    Attributes:
        step_seconds: that one step of all environments takes.
        parts: of the checkpoint to go on from, or None.
        start: policy steps of that checkpoint, or None.
        changed: keys whose values differ from those that the checkpoint was made with.
        compiled: how the updates before that checkpoint were compiled, or None.
        writer: of the next checkpoints, of a run that goes on.
    """

    envs: VectorEnv
    agent: Agent
    device: torch.device
    step_seconds: float
    parts: dict[str, Any] | None = None
    start: int | None = None
    changed: Collection[str] = ()
    compiled: str | None = None
    writer: checkpoint.Writer | None = None


def build(config: Config, run_dir: Path, stack: ExitStack, *, resume: bool) -> RunComponents:
    """Build everything that a run needs, and read its checkpoint if it goes on.

    Args:
        stack: closes what has been built, and unlocks the directory of a run that goes on.

    Raises:
        CommandError: what the configuration describes cannot be built, or there is nothing to resume.
    """
    resumed: dict[str, Any] = {}
    with explain_oom(config):
        fabric = launch(config)
        torch.manual_seed(config.seed)
        if resume:
            with as_command_errors(ValueError, TypeError, checkpoint.Corrupt, FileNotFoundError):
                stack.enter_context(lock(run_dir))
                writer = make_writer(config, run_dir, stack)  # puts things in order first: a kill may have left some
                with phase("reading the checkpoint"):
                    meta, parts = _read(run_dir, config)
                changed = changes_since(meta, config)
                if edited := edits(changed):
                    raise CommandError(
                        f"{run_dir}: {edited}; expected the values that the run has had; nearest: a new run"
                    )
                if changed:
                    info(f"changed: {describe_changes(changed)}")
                writer.resumed_from(meta["step"])
                for difference in differences(meta, parts, config):
                    warn(difference)
                resumed = {"parts": parts, "start": meta["step"], "changed": changed, "writer": writer}
                resumed["compiled"] = meta["compile"]
        train_envs = build_envs(config, config.env.num_envs, fabric.device, stagger=config.env.stagger)
        stack.callback(train_envs.close)
        if resume and not getattr(train_envs, "exact_resume", True):
            warn(INEXACT)
        with as_command_errors(ValueError, TypeError):
            agent = make_agent(config, train_envs, fabric)
        sees = getattr(agent, "keys", None)
        if sees and not sees.images and config.env.renderer != "none" and envs.simulated(config.env.name):
            warn("the agent sees no images: env.renderer=none saves rendering them, and videos with them")
        # What other people's environments raise at their first steps says that they cannot be used as configured.
        simulated = envs.simulated(config.env.name)
        refused = envs.Unusable if simulated else Exception
        label = "building simulation and rendering kernels" if simulated else "first steps of the environment"
        with phase(label), as_command_errors(refused):
            step_seconds = time_envs(train_envs)
        label = "first run of the policy" if config.compile == "off" else "compiling the policy"
        with phase(label), as_command_errors(CannotCompile):
            compile_policy(agent, train_envs)
    return RunComponents(train_envs, agent, fabric.device, step_seconds, **resumed)


def make_agent(config: Config, envs: VectorEnv, fabric: Fabric) -> Agent:
    """The agent that the configuration describes, for these environments.

    Built for as many of them as it is trained in: what it saves may be shaped by their number. It may act in any other.
    """
    return registry.find(config.agent.name).build(
        envs.single_observation_space,
        envs.single_action_space,
        config.agent,
        num_envs=config.env.num_envs,
        device=fabric.device,
        compile=config.compile,
        autocast=fabric.autocast,
        seed=config.seed,
    )


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
            config=to_data(config),
            device=learner(config),
            report=warn,
        )
    stack.callback(writer.close)
    return writer


def changes_since(meta: Mapping[str, Any], config: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between the configuration that a checkpoint was made with and another one.

    Raises:
        CommandError: the checkpoint's own is not valid.
    """
    try:
        return changes(validate(meta["config"]), config)
    except CommandError as error:
        raise CommandError(f"{error} (in the checkpoint of policy step {meta['step']:,})") from None


def edits(changed: Mapping[str, tuple[Any, Any]]) -> str | None:
    """Changes that make another run of it: somebody has edited ``config.yaml``; None where there are none."""
    refused = {key: values for key, values in changed.items() if not may_change(key)}
    return f"{CONFIG_FILE} was edited since this checkpoint: {describe_changes(refused)}" if refused else None


def learner(config: Config) -> str:
    """What the numbers of an update depend on beside versions: a GPU, or the threads that share its sums."""
    return "cuda" if config.fabric.accelerator == "cuda" else f"{torch.get_num_threads()} threads of torch"


def differences(meta: Mapping[str, Any], parts: Mapping[str, Any], config: Config) -> Iterator[str]:
    """Yield a warning for each reason why the resumed run will not be bit-identical."""
    if "memory" not in parts:
        yield (
            "this resume is approximate: the checkpoint does not hold what the agent has seen "
            "(checkpoint.replay=false), and it begins again with an empty memory"
        )
    here = checkpoint.versions()
    changed = [f"{name} {was} -> {here.get(name)}" for name, was in meta["versions"].items() if here.get(name) != was]
    if meta["device"] != (now := learner(config)):
        changed.append(f"{meta['device']} -> {now}")
    if changed:
        yield f"this resume may differ in the last bits: {', '.join(changed)}"


def launch(config: Config) -> Fabric:
    """Device, precision and threads that the configuration asks for.

    Raises:
        CommandError: torch cannot use the GPU.
    """
    if config.fabric.accelerator == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            "fabric.accelerator=cuda: torch cannot use the GPU; python -m sheeplike doctor says why; nearest: cpu"
        )
    if config.fabric.accelerator == "cuda":
        jax.config.update("jax_cuda_visible_devices", "0")  # or JAX takes memory of all the others too
    _make_deterministic(config.fabric)
    if config.fabric.precision == "bf16-mixed":
        torch.set_float32_matmul_precision("high")
    fabric = Fabric(
        accelerator=config.fabric.accelerator,
        devices=1,
        precision=config.fabric.precision,
        plugins=LightningEnvironment(),  # one process, whatever a cluster's variables say
    )
    fabric.launch()
    if fabric.device.type == "cpu":
        # Simulation and learning take turns, so that each may have all cores; more would spin, waiting for each other.
        torch.set_num_threads(config.fabric.threads or min(torch.get_num_threads(), cpu_cores()))
    return fabric


def build_envs(config: Config, num_envs: int, device: torch.device, **options: bool) -> VectorEnv:
    """:func:`make_envs` as a command begins: it is shown, and what others raise is a line.

    Raises:
        CommandError: of an environment that we do not simulate, which may raise anything when it is made.
    """
    refused = (ValueError, TypeError) if envs.simulated(config.env.name) else (Exception,)
    with phase("building worlds"), as_command_errors(*refused):
        return make_envs(config, num_envs, device, **options)


def make_envs(
    config: Config, num_envs: int, device: torch.device, *, randomize: bool = True, stagger: bool = False
) -> VectorEnv:
    """The environments that the configuration describes.

    Args:
        randomize: False: in the scene as it was compiled, whatever the configuration says of randomization.
        stagger: end first episodes at random times.
    """
    env = config.env
    return envs.make(
        env.name,
        num_envs=num_envs,
        device=device,
        image_size=env.image_size,
        action_repeat=env.action_repeat,
        seed=config.seed,
        randomization=config.randomization,
        randomize=randomize,
        stagger=stagger,
        simulation=env,
        **({} if env.id is None else {"id": env.id}),
        **env.options,
    )


def time_envs(envs: VectorEnv, steps: int = 4) -> float:
    """Build the simulation's kernels; returns the seconds that one step of all environments takes."""
    envs.reset(seed=0)
    action = _some_action(envs)
    for _ in range(10 if envs.device.type == "cuda" else 1):  # there Warp's first steps capture graphs
        envs.step(action)[1].sum().item()  # waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        _, reward, *_ = envs.step(action)
    reward.sum().item()
    return (time.perf_counter() - start) / steps


def compile_policy(agent: Agent, envs: VectorEnv) -> None:
    """Act until that is compiled, and captured where it is, with a player that nobody uses afterwards."""
    step, player = first_step(envs.reset(seed=0)[0], envs.num_envs), agent.player(envs.num_envs)
    for _ in range(EAGER_CALLS + 1):
        player.act(step.obs, step.is_first)


@contextmanager
def explain_oom(config: Config) -> Iterator[None]:
    """Where memory is short inside, name the settings that would help.

    Raises:
        CommandError: instead of whatever said that memory is short.
    """
    try:
        yield
    except GaveUp:  # whatever an environment failed for, its status is its own
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(text_of(error).splitlines()), "")
        if isinstance(error, TooLarge):  # it has said what would fit
            raise CommandError(f"agent.replay_size: out of memory: {reason}") from error
        agent = config.agent
        smaller = {"env.num_envs": config.env.num_envs}
        if config.eval.every is not None and config.eval.num_envs > config.env.num_envs:
            smaller = {"eval.num_envs": config.eval.num_envs} | smaller
        smaller |= {f"agent.{name}": getattr(agent, name) for name in agent.memory_options}
        settings = ", ".join(f"{key}={value // 2}" for key, value in smaller.items() if value > 1)
        raise CommandError(f"out of memory: {reason}; what helps: {settings}, or smaller images") from error


def describe_device(config: Config, device: torch.device) -> str:
    """Where a run takes place, for people to read."""
    plural = "s" * (cpu_cores() > 1)
    cores = f"simulation on {cpu_cores()} core{plural}, learning on {torch.get_num_threads()}, in turns"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU: {cores}"
    exact = "; deterministic" if config.fabric.deterministic else ""
    return f"{name}; {config.fabric.precision}{exact}; profile {config.profile}"


def _read(run_dir: Path, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint that is whole, with or without what the agent has seen; each damaged one is a warning."""
    try:
        return checkpoint.load_latest(run_dir / CHECKPOINTS, only=parts_to_read(config))
    except checkpoint.UnknownFormat:
        raise
    except checkpoint.Corrupt as error:
        hint = "; checkpoint.replay=false goes on with an empty replay, if that alone is damaged"
        raise CommandError(f"{error}; expected another run_dir{hint * config.checkpoint.replay}") from error


@contextmanager
def of_this_agent(run_dir: Path) -> Iterator[None]:
    """Say in one line that a checkpoint cannot be loaded into the agent or the environments of its configuration."""
    try:
        yield
    except CommandError:
        raise
    except _OF_ANOTHER as error:
        if is_out_of_memory(error):
            raise
        what = "the checkpoint is not of the agent and the environments in its config.yaml"
        raise CommandError(f"{run_dir}: {what}: {type(error).__name__}: {first_sentence(error)}") from error


def _make_deterministic(asked: FabricOptions) -> None:
    """Two runs of the same numbers give the same bits, as far as that is asked for.

    The libraries read this when their devices are first used.
    """
    gpu = asked.accelerator == "cuda"
    if asked.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads what it has not written
    if asked.deterministic and gpu:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    if asked.deterministic_physics and gpu:
        warp.config.deterministic = warp.config.DeterministicMode.RUN_TO_RUN


def _some_action(envs: VectorEnv) -> Tensor:
    """An action that every environment takes: zeros, or the first choice of each that there is."""
    single = envs.single_action_space
    if isinstance(single, spaces.Discrete | spaces.MultiDiscrete):
        first = torch.as_tensor(single.start, dtype=torch.int64, device=envs.device)
        return first.expand(envs.num_envs, *single.shape).contiguous()
    return torch.zeros(envs.num_envs, *single.shape, device=envs.device)
