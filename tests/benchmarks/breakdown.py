"""Time of each part of an update: ``python tests/benchmarks/breakdown.py env=… agent=dreamer_v3 [modes=…]``.

Its parts one by one, forward and backward, eager and in each other mode, on the tensors of a real update; the
arithmetic of each part, and its speed as a share of that of a large matrix product; what an update of each mode asks of
the device.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from sheeplike.agents.dreamer_v3.agent import CONTEXT, DreamerV3
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.storage import pack_latent
from sheeplike.commands.bench import compose
from sheeplike.config.sources import Sources
from sheeplike.nn.linear import linear
from sheeplike.nn.optimizers import update_slow
from sheeplike.tools.bench import MODES, Bench, Table, ratio

# The beginnings of the names by which the profiler knows what is counted.
COUNTED = {
    "operator calls": ("aten::",),
    "kernel launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
    "copies and fills": ("cudaMemcpy", "cudaMemset"),
    "graph launches": ("cudaGraphLaunch",),
}


def parts(agent: DreamerV3) -> dict[str, Callable[[], object]]:
    """Each does its part once, on one batch that is sampled here."""
    world, critic, rssm = agent.world_model, agent.actor_critic, agent.world_model.rssm
    data, _, _ = agent.replay.sample(agent.config.batch_size)
    batch = {key: value[:, CONTEXT:] for key, value in data.items()}
    start, before = agent.context(data), data["action"][:, CONTEXT - 1 : -1]
    lead = batch["reward"].shape

    def flat(latent: Latent) -> Latent:
        return latent.map(lambda x: x.flatten(0, 1))

    def encode() -> Tensor:
        return world.encoder({key: batch[key].flatten(0, 1) for key in world.encoder.keys.spaces})

    def observe(embed: Tensor) -> tuple[Latent, Tensor]:
        return rssm.observe(start, before, embed.unflatten(0, lead), batch["is_first"])

    def model(latent: Latent, logits: Tensor) -> list[Tensor]:
        return list(world.losses(latent, logits, batch, embed.unflatten(0, lead))[0].values())

    def imagine() -> tuple[Tensor, Tensor]:
        return critic.imagine(rssm, flat(posterior), agent.config.imagination_length)

    def behaviour(latent: Latent) -> list[Tensor]:
        return list(agent.behaviour_losses(*imagined, latent.features, batch)[0].values())

    with torch.no_grad(), agent.autocast():
        embed = encode()
        posterior, logits = observe(embed)
        imagined = imagine()

    def replay() -> None:
        _, envs, times = agent.replay.sample(agent.config.batch_size)
        agent.replay.write_back(envs, times[:, CONTEXT:], pack_latent(posterior))

    def forward(function: Callable[..., Any], *inputs: Any) -> Any:
        with agent.autocast():
            return function(*inputs)

    def learn(function: Callable[..., Any], *inputs: Any) -> Callable[[], None]:
        def run() -> None:
            """Forward and backward, with gradients for the parameters and for the inputs."""
            leaves = pytree.tree_map(lambda x: x.detach().requires_grad_(), inputs)
            outputs = pytree.tree_leaves(forward(function, *leaves))
            sum(output.float().mean() for output in outputs if output.requires_grad).backward()

        return run

    def optimize() -> None:
        agent._gradient_norms()
        agent.optimizer.step()
        update_slow(critic.slow_value, critic.value, agent.config.slow_critic_rate)

    return {
        "replay: sampling and write-back": replay,
        "encoder": learn(encode),
        "scan of the sequence": learn(observe, embed),
        "decoder and losses of the world model": learn(model, posterior, logits),
        "imagination (forward only)": lambda: forward(imagine),
        "losses of actor and critic": learn(behaviour, posterior),
        "optimizer and slow critic": optimize,
    }


def work(part: Callable[[], object]) -> float:
    """Return the floating-point operations of matrix products and convolutions, all others left out."""
    products = {torch.ops.sheeplike.linear: lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0]}
    with FlopCounterMode(display=False, custom_mapping=products) as counter:
        part()
    return counter.get_total_flops()


def peak(device: torch.device, wait: Callable[[], None], size: int = 2048) -> float:
    """Return the float32 operations per second of a matrix product by the faster library, the best of 20 each."""
    a, best = torch.rand(size, size, device=device), float("inf")
    for multiply in [torch.matmul, linear] * 20:
        wait()
        start = time.perf_counter()
        multiply(a, a)
        wait()
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def count(agent: DreamerV3, wait: Callable[[], None]) -> list[list[float]]:
    with torch.profiler.profile() as profiler:
        agent.update()
        wait()
    found = dict.fromkeys(COUNTED, 0.0)
    for event in profiler.events():
        nested = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
        for name, beginnings in COUNTED.items():
            found[name] += event.name.startswith(beginnings) and not (nested and name == "operator calls")
    return [[number] for number in found.values()]


def main() -> None:
    asked, composed = compose(sys.argv[1:], Sources())
    bench = Bench(composed.config, seconds=asked.seconds, rounds=asked.rounds)
    options = composed.config.agent
    steps = bench.experience(bench.make_agent(options, "off"))

    def ready(mode: str) -> DreamerV3:
        agent = bench.make_agent(options, mode)
        if not isinstance(agent, DreamerV3):
            raise SystemExit(f"agent={options.name}: expected dreamer_v3")
        turns = itertools.cycle(steps)
        while not agent.replay.ready:
            agent.add(next(turns))
        return agent

    fastest = peak(bench.device, bench.wait)
    modes = ["off", *(mode for mode in asked.modes if mode == "inductor")]
    operations = {name: work(part) for name, part in parts(ready("off")).items()}
    operations |= dict.fromkeys(("all parts", "the whole update"), sum(operations.values()))
    for mode in modes:
        agent = ready(mode)
        agent.warm_up()
        tasks = {name: bench.repeat(part) for name, part in parts(agent).items()}
        taken = bench.timed(tasks | {"the whole update": bench.repeat(agent.update)}, seconds=asked.seconds / 4)
        whole = taken.pop("the whole update")
        taken |= {"all parts": [sum(turn) for turn in zip(*taken.values(), strict=True)], "the whole update": whole}
        columns = ["ms", "of the whole", "GFLOP", f"of {fastest / 1e9:.0f} GFLOP/s"]
        table = Table("breakdown", f"One update by part, {MODES[mode]}", columns)
        for name, seconds in taken.items():
            flop = operations[name]
            share = [flop / one / fastest for one in seconds]
            table.rows[name] = [[1e3 * one for one in seconds], ratio(seconds, whole), [flop / 1e9], share]
        print(table)

    table = Table("counts", "What one update asks of the device", list(COUNTED))
    for mode in asked.modes:
        if mode != "graph" or bench.cuda:
            agent = ready(mode)
            agent.warm_up()
            table.rows[mode] = count(agent, bench.wait)
    print(table)


if __name__ == "__main__":
    main()
