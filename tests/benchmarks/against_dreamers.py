"""DreamerV3's update beside those of two other PyTorch implementations, r2dreamer and sheeprl.

``python tests/benchmarks/against_dreamers.py R2DREAMER [threads] [rounds] [names …]``: R2DREAMER is a clone of
https://github.com/NM512/r2dreamer, which needs ``pip install tensordict``; ``pip install sheeprl`` (0.8 or newer) has
``dreamer_v3_5``. The first four of ``NAMES`` are compared unless others are given. The last two compile loops that are
unrolled, for many minutes; r2dreamer's configuration does so by default.

All learn in float32 from batches of 16 sequences of 64 steps of noise, frames of 64x64x3 and 6 actions, and imagine 15
steps, with the widths of the authors' ``size1m`` and the other options at the defaults, which are the authors'. Ours
also samples its batches from a replay and writes the latents back; the others are given theirs. Each has a process of
its own, and they take turns, so that what else the machine does meets all alike.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import torch
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config
from sheeplike.agents.dreamer_v3.storage import pack_latent

BATCH, LENGTH, HORIZON = 16, 64, 15
FRAME = gymnasium.spaces.Box(0, 255, (64, 64, 3), np.uint8)
SPACE = gymnasium.spaces.Dict({"image": FRAME})
ACTION = gymnasium.spaces.Box(-1, 1, (6,), np.float32)
WORLDS, STEPS = 16, 256  # of the replay
WARM_UP = 2
NAMES = ("compile=auto", "compile=off", "r2dreamer", "sheeprl", "r2dreamer-compiled", "sheeprl-compiled")


def noise(*lead: int) -> dict[str, Tensor]:
    """Return steps of noise, some of which begin an episode; none ends one."""
    return {
        "image": torch.randint(0, 256, (*lead, *FRAME.shape), dtype=torch.uint8),
        "action": torch.rand(*lead, *ACTION.shape) * 2 - 1,
        "reward": torch.randn(lead),
        "is_first": torch.rand(lead) < 0.02,
        "is_last": torch.zeros(lead, dtype=torch.bool),
        "is_terminal": torch.zeros(lead, dtype=torch.bool),
    }


def ours(mode: str) -> tuple[Callable[[], object], int]:
    """Return an update on sequences of a full replay, and the number of learned parameters."""
    config = DreamerV3Config(
        observations=("image",),
        size="1m",
        batch_size=BATCH,
        batch_length=LENGTH,
        imagination_length=HORIZON,
        replay_size=WORLDS * STEPS,
    )
    agent = DreamerV3(SPACE, ACTION, config, num_envs=WORLDS, compile=mode)
    latent = pack_latent(agent.world_model.rssm.initial(WORLDS, agent.device))
    for _ in range(STEPS):
        agent.replay.add(noise(WORLDS) | latent)
    return agent.update, sum(p.numel() for p in agent.networks.parameters() if p.requires_grad)


def r2dreamer(checkout: str, compiled: bool) -> tuple[Callable[[], object], int]:
    """Return the same of r2dreamer, with the losses of DreamerV3 (``rep_loss=dreamer``)."""
    sys.path.insert(0, checkout)
    import dreamer
    import hydra
    from tensordict import TensorDict

    # Float32 needs neither; on a CPU the update asks for float16 otherwise.
    dreamer.autocast = lambda **_: contextlib.nullcontext()
    dreamer.GradScaler = partial(torch.amp.GradScaler, enabled=False)
    widths = {"deter": 512, "hidden": 64, "discrete": 4, "depth": 4, "units": 64}
    changes = ["device=cpu", "env=dmc_vision", "model=size12M", "model.rep_loss=dreamer", f"model.compile={compiled}"]
    changes += [f"model.imag_horizon={HORIZON}", *(f"model.{name}={width}" for name, width in widths.items())]
    with hydra.initialize_config_dir(f"{checkout}/configs", version_base=None):
        config = hydra.compose("configs", changes)
    agent = dreamer.Dreamer(config.model, SPACE, ACTION)
    steps = {key: x.unsqueeze(-1) if x.dim() == 2 else x for key, x in noise(BATCH, LENGTH).items()}
    batch = TensorDict(steps, batch_size=(BATCH, LENGTH))
    start = agent.get_initial_state(BATCH)
    replay = SimpleNamespace(
        sample=lambda: (batch.clone(recurse=False), None, (start["stoch"], start["deter"])),
        update=lambda index, stoch, deter: None,
    )
    return partial(agent.update, replay), sum(p.numel() for p in agent._named_params.values())


def sheeprl(compiled: bool) -> tuple[Callable[[], object], int]:
    """Return the same of sheeprl's ``dreamer_v3_5``."""
    import hydra
    from lightning.fabric import Fabric
    from omegaconf import OmegaConf
    from sheeprl.algos.dreamer_v3_5 import dreamer_v3_5 as peer
    from sheeprl.utils.utils import dotdict

    changes = ["exp=dreamer_v3_5", "algo=dreamer_v3_5_1M", f"algo.compile.enabled={compiled}"]
    sizes = {"horizon": HORIZON, "per_rank_batch_size": BATCH, "per_rank_sequence_length": LENGTH}
    changes += [f"algo.{name}={size}" for name, size in sizes.items()]
    with hydra.initialize_config_module("sheeprl.configs", version_base=None):
        cfg = dotdict(OmegaConf.to_container(hydra.compose("config", changes), resolve=True))
    fabric = Fabric(accelerator="cpu", devices=1)
    space = gymnasium.spaces.Dict({"rgb": gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8)})
    world, actor, critic, slow, _ = peer.build_agent(fabric, ACTION.shape, True, cfg, space)
    parameters = [*world.parameters(), *actor.parameters(), *critic.parameters()]
    optimizer = fabric.setup_optimizers(hydra.utils.instantiate(cfg.algo.optimizer, params=parameters))
    metrics = hydra.utils.instantiate(cfg.metric.aggregator)
    scale = cfg.algo.actor.moments
    moments = peer.Moments(scale.decay, scale.max, scale.percentile.low, scale.percentile.high)
    steps = noise(LENGTH + 1, BATCH)
    batch = {"rgb": steps["image"].movedim(-1, -3).contiguous(), "actions": steps["action"]}
    names = {"rewards": "reward", "is_first": "is_first", "terminated": "is_terminal", "truncated": "is_last"}
    batch |= {name: steps[key].unsqueeze(-1).float() for name, key in names.items()}
    batch["deter"] = torch.zeros(LENGTH + 1, BATCH, 512, dtype=torch.float16)
    batch["stoch"] = torch.zeros(LENGTH + 1, BATCH, 32, dtype=torch.uint8)

    def update() -> None:
        peer.train(fabric, cfg, world, actor, critic, slow, optimizer, moments, batch, metrics, ACTION.shape)
        peer.update_target_critic(critic, slow, cfg.algo.critic.tau)

    return update, sum(p.numel() for p in parameters)


def serve(name: str, checkout: str, threads: int, pipe: Connection) -> None:
    """Tell the number of parameters; then, for each message, the seconds that an update takes and those of CPU."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    kind, _, compiled = name.partition("-")
    with contextlib.redirect_stdout(None):
        if kind == "r2dreamer":
            update, parameters = r2dreamer(checkout, bool(compiled))
        elif kind == "sheeprl":
            update, parameters = sheeprl(bool(compiled))
        else:
            update, parameters = ours(name.removeprefix("compile="))
        for _ in range(WARM_UP):
            update()
    pipe.send(parameters)
    while pipe.recv():
        start, spent = time.perf_counter(), time.process_time()
        update()
        pipe.send((time.perf_counter() - start, time.process_time() - spent))


def main() -> None:
    checkout, *numbers = sys.argv[1:4] or [""]
    threads, rounds = map(int, [*numbers, *("2", "20")[len(numbers) :]])
    names = sys.argv[4:] or NAMES[:4]
    if not Path(checkout, "dreamer.py").is_file() or not set(names) <= set(NAMES):
        raise SystemExit(__doc__)
    if not find_spec("tensordict") or not find_spec("sheeprl"):
        raise SystemExit("this compares with r2dreamer and sheeprl: pip install tensordict sheeprl")
    context = multiprocessing.get_context("spawn")
    pipes, parameters = {}, set()
    for name in names:
        pipes[name], end = context.Pipe()
        arguments = name, str(Path(checkout).resolve()), threads, end
        context.Process(target=serve, args=arguments, daemon=True).start()
        end.close()  # or a process that fails would be waited for
        parameters.add(pipes[name].recv())
    assert len(parameters) == 1, f"the networks differ: {parameters} parameters"
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for count in range(rounds):
        for name in names if count % 2 else reversed(names):
            pipes[name].send(True)
            spent[name].append(pipes[name].recv())
    for pipe in pipes.values():
        pipe.send(False)
    print(
        f"sheeprl {version('sheeprl')}, torch {torch.__version__}, {threads} threads, {parameters.pop():,} parameters, "
        f"{rounds} rounds in turns: median [quartiles]"
    )
    for name in names:
        pairs = list(zip(spent[name], spent[names[0]], strict=True))
        duration = quartiles([1000 * wall for wall, _ in spent[name]], ",.0f")
        times, work = (quartiles([this[i] / first[i] for this, first in pairs], ".2f") for i in range(2))
        print(f"{name:18} {duration} ms; {times} times as long as {names[0]}; {work} times by seconds of CPU")


def quartiles(numbers: list[float], form: str) -> str:
    """Median, first and third quartile."""
    first, median, third = statistics.quantiles(numbers, n=4)
    return f"{median:{form}} [{first:{form}}, {third:{form}}]"


if __name__ == "__main__":
    main()
