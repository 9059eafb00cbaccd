"""The parts of a run, built from its configuration: device, environments, agent; and their first steps."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import torch
import torch.distributed as dist
import warp
from gymnasium.vector import VectorEnv

from sheeplike import envs
from sheeplike.agents import registry
from sheeplike.agents.agent import Agent
from sheeplike.config.errors import as_command_errors, expand
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import Config
from sheeplike.config.schema import Fabric as FabricOptions
from sheeplike.envs.contract import GaveUp
from sheeplike.host import choose_cores, cpu_cores
from sheeplike.loop import first_step
from sheeplike.memory.replay import TooLarge
from sheeplike.monitor.progress import phase
from sheeplike.nn.compilation import EAGER_CALLS, CannotCompile, is_out_of_memory
from sheeplike.options import CommandError, InvalidOption
from sheeplike.ranks import ALONE, Ranks
from sheeplike.run import signals
from sheeplike.terminal import text_of, warn

if TYPE_CHECKING:
    from lightning.fabric import Fabric

PATIENCE = 5.0  # seconds that this process has to end by itself after another rank failed


def launch_ranks(config: Config, *, resume: bool) -> tuple[Fabric, Ranks]:
    """Return device and ranks: as many processes as the configuration asks for, each with its part of the cores."""
    asked = config.fabric
    if config.ranks == 1:
        if (started := os.environ.get("WORLD_SIZE", "1")) != "1" and "LOCAL_RANK" in os.environ:
            raise CommandError(f"WORLD_SIZE={started}: expected fabric.devices x fabric.num_nodes to be as many")
        return launch(config), ALONE
    if dist.is_initialized():
        raise CommandError(f"fabric.devices={asked.devices}: expected one run on several devices in a program")
    limit = timedelta(seconds=asked.timeout)
    strategy = _one_device_per_rank(asked.devices, limit)
    os.environ.setdefault(signals.LAUNCHER, str(os.getpid()))  # for the ranks that are started here
    try:
        with phase("waiting for the other ranks"), as_command_errors(ValueError, RuntimeError):
            fabric = launch(config, strategy=strategy, num_nodes=asked.num_nodes)
            hosts = dist.new_group(backend="gloo", timeout=limit)
        ranks = Ranks(fabric.global_rank, fabric.world_size, hosts)
        check_alike(ranks, f"resume: {resume}\n{to_yaml(config)}")
    except BaseException as error:
        end_ranks(strategy, type(error))
        raise
    return fabric, ranks


def check_alike(ranks: Ranks, planned: str) -> None:
    """Raise if a rank has ``planned`` another run than the first: its machine may differ, or the files that it sees."""
    first, *others = ranks.collect(planned)
    for rank, theirs in enumerate(others, 1):
        if theirs != first:
            lines = (
                f"{ours!r} and {line!r}"
                for ours, line in zip(first.split("\n"), theirs.split("\n"), strict=False)
                if ours != line
            )
            raise CommandError(f"rank {rank} has another configuration than rank 0: {next(lines, 'more lines')}")


def end_ranks(strategy: Any, kind: type | None, *error: object) -> None:
    """Wait for the ranks that this process started; after an error kill them, since they would wait for this one."""
    started = getattr(strategy.launcher, "procs", [])
    processes = list(started)
    started.clear()  # or their end would end this process
    for process in processes:
        if kind is not None:
            process.kill()
        process.wait()
    names = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", signals.LAUNCHER)
    for name in names if processes else ():
        os.environ.pop(name, None)  # set for the ranks


def _watch(processes: list[subprocess.Popen]) -> None:
    """End this process with the status of the first rank that fails: it may wait for that one in a library."""

    def watch() -> None:
        while processes:
            time.sleep(1.0)
            failed = [(rank, process.returncode) for rank, process in enumerate(processes, 1) if process.poll()]
            if failed:
                time.sleep(PATIENCE)
                if processes:
                    rank, status = failed[0]
                    warn(f"rank {rank} ended with status {status}: all end")
                    for process in processes:
                        process.kill()
                    os._exit(status if status > 0 else 128 - status)

    threading.Thread(target=watch, name="watch ranks", daemon=True).start()


def _one_device_per_rank(devices: int, timeout: timedelta) -> Any:
    """Return Fabric's DDP, which starts and connects the ranks, for processes that see one device each."""
    from lightning.fabric.strategies import DDPStrategy
    from lightning.fabric.strategies.launchers import subprocess_script
    from lightning.fabric.utilities.rank_zero import rank_zero_module

    for logger in (logging.getLogger("lightning.fabric"), rank_zero_module.log):
        logger.setLevel(logging.WARNING)  # the import sets another level

    subprocess_script._launch_process_observer = _watch  # Fabric's kills this process without a word

    class OneDevicePerRank(DDPStrategy):
        num_processes = devices  # of this node; DDP takes what this process sees

        @property
        def root_device(self) -> torch.device:
            return self.parallel_devices[0]

    return OneDevicePerRank(timeout=timeout)


def launch(config: Config, **places: Any) -> Fabric:
    """Set up device, precision and threads as the configuration asks; ``places`` are Fabric's, by default one process.

    Raises:
        CommandError: there is no such device.
    """
    if config.fabric.accelerator == "cuda" and not torch.cuda.is_available():
        raise CommandError(
            "fabric.accelerator=cuda: torch cannot use the GPU; python -m sheeplike doctor says why; nearest: cpu"
        )
    if config.fabric.accelerator == "cuda":
        jax.config.update("jax_cuda_visible_devices", "0")  # JAX would take memory of all GPUs
        if config.fabric.precision == "bf16-mixed" and not torch.cuda.is_bf16_supported(including_emulation=False):
            expected = f"32-true, since {torch.cuda.get_device_name()} has no bf16"
            raise InvalidOption("fabric.precision", "bf16-mixed", expected, "32-true")
    elif not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")  # JAX would start CUDA on all GPUs, and may fail there
    _make_deterministic(config.fabric)
    torch.set_float32_matmul_precision("high" if config.fabric.precision == "bf16-mixed" else "highest")
    from lightning.fabric import Fabric  # slow to import, and not needed to play a loaded model
    from lightning.fabric.plugins.environments import LightningEnvironment

    # Without a cluster there is one process, and the variables of a cluster are ignored.
    places = places or {"plugins": LightningEnvironment()}
    asked = config.fabric
    fabric = Fabric(accelerator=asked.accelerator, devices=1, precision=asked.precision, **places)
    fabric.launch()
    choose_cores(asked.devices if "strategy" in places else 1)
    if fabric.device.type == "cpu":
        # Simulation and learning take turns, so each may use all cores; more threads would spin and wait.
        torch.set_num_threads(asked.threads or min(torch.get_num_threads(), cpu_cores()))
    return fabric


def _make_deterministic(asked: FabricOptions) -> None:
    """Make two runs give the same bits, if asked. The libraries read this when their devices are first used."""
    gpu = asked.accelerator == "cuda"
    torch.use_deterministic_algorithms(asked.deterministic)
    if asked.deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = False  # no code reads memory before it writes it
    if asked.deterministic and gpu:
        torch.backends.cudnn.benchmark = False
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    if asked.deterministic_physics and gpu:
        warp.config.deterministic = warp.config.DeterministicMode.RUN_TO_RUN


def build_envs(config: Config, num_envs: int, device: torch.device, **options: Any) -> VectorEnv:
    """Call :func:`make_envs`; an error of another package's environment becomes one line."""
    refused = (ValueError, TypeError) if envs.simulated(config.env.name) else (Exception,)
    with phase("building worlds"), as_command_errors(*refused):
        return make_envs(config, num_envs, device, **options)


def make_envs(
    config: Config, num_envs: int, device: torch.device, *, randomize: bool = True, stagger: bool = False, rank: int = 0
) -> VectorEnv:
    """Return the environments that the configuration describes; with ``rank``, its part of those of all ranks."""
    env = config.env
    modes = torch.is_grad_enabled(), torch.get_default_dtype()
    made = envs.make(
        env.name,
        num_envs=num_envs,
        device=device,
        image_size=env.image_size,
        action_repeat=env.action_repeat,
        seed=config.seed,
        first_env=rank * num_envs,
        randomization=config.randomization,
        randomize=randomize,
        stagger=stagger,
        simulation=env,
        **({} if env.id is None else {"id": env.id}),
        **env.options,
    )
    if (torch.is_grad_enabled(), torch.get_default_dtype()) != modes:  # learning would fail
        warn(f"{env.task} changed torch's gradient mode or default dtype: set back")
        torch.set_grad_enabled(modes[0])
        torch.set_default_dtype(modes[1])
    return made


def make_agent(config: Config, envs: VectorEnv, fabric: Fabric, ranks: Ranks = ALONE) -> Agent:
    """Return the agent that the configuration describes, built to learn in ``env.num_envs`` of these worlds."""
    others: dict[str, Any] = {} if ranks.size == 1 else {"ranks": ranks}
    if config.agent.has_replay:
        run_dir = expand(config.run_dir or "").absolute()  # made only when all is built
        others["directory"] = next(place for place in (run_dir, *run_dir.parents) if place.is_dir())
    with as_command_errors(ValueError, TypeError):
        return registry.find(config.agent.name).load()(
            envs.single_observation_space,
            envs.single_action_space,
            config.agent,
            num_envs=config.env.num_envs,
            device=fabric.device,
            compile=config.compile,
            autocast=fabric.autocast,
            seed=config.seed,
            **others,
        )


def warm_up(config: Config, train_envs: VectorEnv, agent: Agent) -> float:
    """Take the first steps, of the policy too, or raise CommandError; returns the seconds of one environment step."""
    simulated = envs.simulated(config.env.name)
    known = agent.networks.observations | agent.networks.only_for_learning
    if simulated and config.env.renderer != "none" and not any(len(space.shape) == 3 for space in known.values()):
        warn("the agent sees no images: env.renderer=none saves rendering them, and videos in training with them")
    refused = envs.Unusable if simulated else Exception
    label = "building simulation and rendering kernels" if simulated else "first steps of the environment"
    with phase(label), as_command_errors(refused):
        step_seconds = time_envs(train_envs)
    with phase("first steps of the policy"), as_command_errors(CannotCompile):
        obs, player = train_envs.reset(seed=0)[0], agent.player(train_envs.num_envs, explore=True)
        step = first_step(obs, train_envs.num_envs)
        for _ in range(EAGER_CALLS + 1):  # until acting is compiled, and captured on a GPU
            player.act(step.obs, step.is_first)
    return step_seconds


def time_envs(envs: VectorEnv, steps: int = 4) -> float:
    """Step until the simulation's kernels are built; returns the seconds of one further step."""
    envs.reset(seed=0)
    single = envs.single_action_space
    first = torch.as_tensor(getattr(single, "start", 0.0), device=envs.device)  # zero, or the first of the choices
    first = first if first.is_floating_point() else first.long()
    action = first.expand(envs.num_envs, *single.shape).contiguous()
    for _ in range(10 if envs.device.type == "cuda" else 1):  # Warp captures graphs in its first steps
        envs.step(action)[1].sum().item()  # the read waits for the device
    start = time.perf_counter()
    for _ in range(steps):
        _, reward, *_ = envs.step(action)
    reward.sum().item()
    return (time.perf_counter() - start) / steps


def describe(
    config: Config, envs: VectorEnv, agent: Agent, start: int, run_dir: Path, files: Sequence[str], step_seconds: float
) -> dict[str, str]:
    """Return the lines of the banner, name to text; ``start`` counts the policy steps made before."""
    updates = None if config.offline else config.agent.updates(start, config.total_steps, config.env.num_envs)
    updating = "" if updates is None else f", {updates:,} gradient steps"
    evaluated = "" if config.eval.every is None else f", evaluated every {config.eval.every:,}"
    continued = f"continued from policy step {start:,}: " if start else ""
    unused = ("one iteration", "learning", "memory") if config.offline else ()
    share = f", {config.data.fraction:.0%} of every batch" if config.data.fraction else ""
    lines = {
        "task": f"{config.env.task}: {config.env.num_envs} worlds, episodes of {envs.episode_length} steps",
        "randomized": ", ".join(config.randomization),
        "device": describe_device(config, envs.device),
        "ranks": describe_ranks(config),
        **{name: text for name, text in agent.describe().items() if name not in unused},
        "data": f"{config.data.path}{share}" if config.data.path else "",
        "configs": ", ".join(files),
        "run": f"{continued}{config.last_step - start:,} {config.unit}{updating}{evaluated}, in {run_dir}",
        "mirror": config.checkpoint.mirror or "",
        "simulation": f"{config.env.num_envs / step_seconds:,.0f} policy steps/s alone",
    }
    return {name: text for name, text in lines.items() if text}


def describe_ranks(config: Config) -> str:
    """Return what all ranks share, and the part of each, as text; empty if there is one."""
    if config.ranks == 1:
        return ""
    own, steps = config.share(), config.total_steps
    numbers = {"worlds": (config.env.num_envs, own.env.num_envs), "policy steps": (steps, steps // config.ranks)}
    sizes = [name for name in ("batch_size", "replay_size") if hasattr(own.agent, name)]
    numbers |= {name: (getattr(config.agent, name), getattr(own.agent, name)) for name in sizes}
    shares = ", ".join(f"{name} {all_:,} ({each:,} each)" for name, (all_, each) in numbers.items())
    nodes = f"{config.fabric.devices} on each of {config.fabric.num_nodes} node(s)"
    return f"{config.ranks}, {nodes}, scale={config.scale}: {shares}"


def describe_device(config: Config, device: torch.device) -> str:
    """Return device, precision and profile of a run as text."""
    plural = "s" if cpu_cores() > 1 else ""
    cores = f"simulation on {cpu_cores()} core{plural}, learning on {torch.get_num_threads()}, in turns"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU: {cores}"
    exact = "; deterministic" if config.fabric.deterministic else ""
    return f"{name}; {config.fabric.precision}{exact}; profile {config.profile}"


def numerics_device(config: Config) -> str:
    """Return the device, and on a CPU the thread count, that determine the last bits of an update."""
    return "cuda" if config.fabric.accelerator == "cuda" else f"{torch.get_num_threads()} threads of torch"


@contextmanager
def explain_oom(config: Config) -> Iterator[None]:
    """Turn running out of memory into a :class:`CommandError` that names the settings that would help."""
    try:
        yield
    except GaveUp:  # has its own exit status, even if its environment ran out of memory
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(text_of(error).splitlines()), "")
        if isinstance(error, TooLarge):  # the message says what would fit
            raise CommandError(f"agent.replay_size: {reason}") from error
        agent = config.agent
        smaller = {"env.num_envs": config.env.num_envs}
        if config.eval.every is not None and config.eval.num_envs > config.env.num_envs:
            smaller = {"eval.num_envs": config.eval.num_envs} | smaller
        smaller |= {f"agent.{name}": getattr(agent, name) for name in agent.memory_options}
        settings = ", ".join(f"{key}={value // 2}" for key, value in smaller.items() if value > 1)
        raise CommandError(f"out of memory: {reason}; what helps: {settings}, or smaller images") from error
