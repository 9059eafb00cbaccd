"""Program of one rank: 20 updates of both agents on its share of worlds, with noise and draws from tables.

The tables are indexed by global world and global sequence, so that N ranks with 1/N of the batch see what one rank with
all of it sees. The argument of the program is a JSON object with rank, size, double, captured, device, and the paths
meet and out.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gymnasium import spaces
from torch.utils import _pytree as pytree

from sheeplike.agents.agent import Agent, Step
from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config, Size
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.host import choose_gpu
from sheeplike.nn import linear
from sheeplike.nn.distributions import Normal, OneHotCategorical, TanhNormal, _log_slope
from sheeplike.ranks import Ranks

PARTS = 4  # the largest number of ranks: worlds and batches are dealt in so many parts
WORLDS, BATCH, UPDATES, BAD_UPDATE, BAD_WORLD = 8, 8, 20, 7, 6
LENGTH = 10  # of a rollout
SPACE = spaces.Dict(
    {
        "pixels/front": spaces.Box(0, 255, (48, 48, 3), np.uint8),
        "privileged_state": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "state": spaces.Box(-np.inf, np.inf, (4,), np.float32),
    }
)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


class Table:
    """Random numbers for all ranks, of which each takes its rows."""

    def __init__(self, ranks: Ranks, device: str) -> None:
        self.ranks, self.device, self.drawn = ranks, device, 0

    def take(self, draw: Any, shape: Any, **options: Any) -> torch.Tensor:
        self.drawn += 1
        generator = torch.Generator().manual_seed(self.drawn)
        rows, rank = shape[0], self.ranks.rank
        drawn = draw(rows * self.ranks.size, *shape[1:], generator=generator, **options)
        return drawn[rank * rows :][:rows].to(self.device)


def tabulate(table: Table) -> None:
    def sample_index(self: OneHotCategorical) -> torch.Tensor:
        probs = self.probs.detach()
        uniform = table.take(torch.rand, probs.shape[:-1], dtype=torch.float64)
        return (probs.cumsum(-1)[..., :-1] <= uniform.to(probs.dtype).unsqueeze(-1)).sum(-1)

    def rsample(self: Normal) -> torch.Tensor:
        noise = table.take(torch.randn, self.mean.shape, dtype=torch.float64)
        return self.mean + self.std * noise.to(self.mean.dtype)

    def entropy(self: TanhNormal) -> torch.Tensor:
        noise = table.take(torch.randn, self.mean.shape, dtype=torch.float64)
        return Normal.entropy(self) + _log_slope(self.mean + self.std * noise.to(self.mean.dtype)).sum(-1)

    OneHotCategorical.sample_index, Normal.rsample, TanhNormal.entropy = sample_index, rsample, entropy


class Replayed:
    """A step as a CUDA graph takes it: inputs and outputs stay at their addresses, and are copied."""

    def __init__(self, function: Any) -> None:
        self.function, self.inputs = function, None

    def __call__(self, *inputs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(inputs)
        if self.inputs is None:
            self.inputs = [leaf.clone() for leaf in leaves]
        for ours, leaf in zip(self.inputs, leaves, strict=True):
            ours.copy_(leaf)
        outputs = self.function(*pytree.tree_unflatten(self.inputs, spec))
        return pytree.tree_map(torch.Tensor.clone, outputs)


def capture(agent: Agent, wanted: bool) -> None:
    for name in ("_differentiate_share", "_apply_sum") if wanted else ():
        setattr(agent, name, Replayed(getattr(agent, name)))


def play(agent: Agent, table: Table, player: Any, begin: torch.Tensor, steps: int) -> torch.Tensor:
    """Let the agent act on random observations; returns where the next step begins an episode."""
    n = agent.num_envs
    for _ in range(steps):
        # The units of the vectors differ, so that their whitening matters.
        obs = {name: 3 + 2 * table.take(torch.randn, (n, *SPACE[name].shape)) for name in ("privileged_state", "state")}
        image = table.take(torch.rand, (n, *SPACE["pixels/front"].shape))
        obs["pixels/front"] = (image * 256).to(torch.uint8)
        ended, terminal = table.take(torch.rand, (n,)) < 0.2, table.take(torch.rand, (n,)) < 0.5
        reward = table.take(torch.randn, (n,)).round() * ~begin
        action = player.act(obs, begin)
        agent.add(Step(obs, action, reward, begin, ended, ended & terminal, dict(player.extras)))
        begin = ended
    return begin


def learn_dreamer(ranks: Ranks, *, captured: bool, device: str, actor_gradient: str = "reinforce") -> dict[str, Any]:
    table, n, batch = Table(ranks, device), WORLDS // ranks.size, BATCH // ranks.size
    tabulate(table)
    config = DreamerV3Config(
        size=Size(deter=16, hidden=8, classes=4, depth=2, units=8),
        observations=("pixels/*", "state"),
        targets=("privileged_state",),
        probes=("privileged_state",),
        batch_size=batch,
        batch_length=5,
        replay_size=n * 40,
        imagination_length=3,
        warmup=3,
        learning_starts=0,
        actor_gradient=actor_gradient,
    )
    agent = DreamerV3(SPACE, ACTIONS, config, num_envs=n, device=device, seed=3, ranks=ranks)
    capture(agent, captured)
    widen(agent.replay.storage)
    noisy(agent.networks)
    begin = play(agent, table, agent.player(n), torch.ones(n, dtype=torch.bool, device=device), 30)
    draws = np.random.default_rng(0)
    metrics = []
    for update in range(UPDATES):
        # Sequences of each part of the batch come from the worlds of that part.
        part, per = WORLDS // PARTS, BATCH // PARTS
        worlds = np.concatenate([part * p + draws.integers(part, size=per) for p in range(PARTS)])
        starts, own = draws.integers(30 - 7, size=BATCH), slice(ranks.rank * batch, (ranks.rank + 1) * batch)
        bad = update == BAD_UPDATE
        if bad:
            worlds[worlds // part == BAD_WORLD // part] = BAD_WORLD
        chosen = (torch.tensor(worlds[own]) - ranks.rank * n).to(device), torch.tensor(starts[own]).to(device)
        agent.replay.draw = lambda count, chosen=chosen: chosen
        if bad and ranks.rank * n <= BAD_WORLD < (ranks.rank + 1) * n:
            before = agent.replay.storage["reward"].clone()
            agent.replay.storage["reward"][:, BAD_WORLD - ranks.rank * n] = torch.nan
            metrics.append(agent.update())
            agent.replay.storage["reward"].copy_(before)
        else:
            metrics.append(agent.update())
    play(agent, table, agent.player(n), begin, 2)
    return outcome(agent, metrics)


def learn_ppo(ranks: Ranks, *, captured: bool, device: str) -> dict[str, Any]:
    table, n = Table(ranks, device), WORLDS // ranks.size
    tabulate(table)
    config = PPOConfig(
        observations=("pixels/*", "state"), rollout_length=LENGTH, minibatches=5, epochs=2, kl_control="adaptive_lr"
    )
    agent = PPO(SPACE, ACTIONS, config, num_envs=n, device=device, seed=3, ranks=ranks)
    capture(agent, captured)
    widen(agent.rollout.storage)
    noisy(agent.networks, 0.02)
    player, begin = agent.player(n), torch.ones(n, dtype=torch.bool, device=device)
    metrics, orders = [], np.random.default_rng(1)
    torch.randperm = lambda *_, **__: order(orders, ranks, config.minibatches)
    while len(metrics) < UPDATES:
        begin = play(agent, table, player, begin, agent.rollout.length + 1 - agent.rollout.steps)
        for _ in range(agent.updates_due(0)):
            if len(metrics) == BAD_UPDATE and ranks.rank * n <= BAD_WORLD < (ranks.rank + 1) * n:
                before = agent.target.clone()
                agent.target[BAD_WORLD - ranks.rank * n :: n] = torch.nan
                metrics.append(agent.update())
                agent.target.copy_(before)
            else:
                metrics.append(agent.update())
    return outcome(agent, metrics)


def order(draws: np.random.Generator, ranks: Ranks, minibatches: int) -> torch.Tensor:
    """Return a permutation whose minibatches have as many steps of each part of the worlds."""
    n, part, minibatch = WORLDS // ranks.size, WORLDS // PARTS, []
    steps = np.arange(LENGTH * WORLDS).reshape(LENGTH, WORLDS)
    for p in range(PARTS):
        minibatch.append(draws.permutation(steps[:, part * p : part * (p + 1)].ravel()).reshape(minibatches, -1))
    own = minibatch[ranks.rank * PARTS // ranks.size : (ranks.rank + 1) * PARTS // ranks.size]
    chosen = np.concatenate(own, 1).ravel()
    return torch.tensor(chosen // WORLDS * n + chosen % WORLDS - ranks.rank * n)


def widen(storage: dict[str, torch.Tensor]) -> None:
    """Store numbers as the networks compute them; latents stay bfloat16."""
    storage |= {name: x.to(torch.get_default_dtype()) for name, x in storage.items() if x.dtype == torch.float32}


def as_adam_takes_it(optimizer: torch.optim.Adam) -> torch.optim.Adam:
    optimizer.found_inf = optimizer.found_inf.to(torch.float32)
    for group in optimizer.param_groups:
        group["lr"] = group["lr"].to(torch.float32)
    for state in optimizer.state.values():
        state["step"] = state["step"].to(torch.float32)
    return optimizer


def noisy(networks: torch.nn.Module, spread: float = 0.1) -> None:
    """Give every parameter noise: outputs that begin at zero would pass no gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in networks.parameters():
            p.add_((spread * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.device))


def outcome(agent: Agent, metrics: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    state = agent.state_dict(replay=False)
    kept = ("modules", "optimizer", "probes", "skipped_in_a_row", "skipped_total")
    return {"state": {name: state[name] for name in kept if name in state}, "metrics": metrics}


def main() -> None:
    asked = json.loads(sys.argv[1])
    rank, size = asked["rank"], asked["size"]
    torch.set_num_threads(1)
    choose_gpu()
    if asked["double"]:
        # The numbers of the agents are float32 by `float()`; stored latents stay bfloat16.
        torch.set_default_dtype(torch.float64)
        torch.Tensor.float = torch.Tensor.double
        linear.ONEDNN = False
        # The fused Adam takes its counter, rate and flag as float32 only.
        step = torch.optim.Adam.step
        torch.optim.Adam.step = lambda optimizer: step(as_adam_takes_it(optimizer))
    hosts = None
    if size > 1:
        meet, backend = Path(asked["meet"]).as_uri(), "gloo" if asked["device"] == "cpu" else "nccl"
        dist.init_process_group(backend, init_method=meet, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        hosts = dist.new_group(backend="gloo")
    ranks = Ranks(rank, size, hosts)
    options = {"captured": asked["captured"], "device": asked["device"]}
    found = {"dreamer_v3": learn_dreamer(ranks, **options), "ppo": learn_ppo(ranks, **options)}
    found |= {"collectives": ranks.collectives, "bytes": ranks.bytes}
    torch.save(found | {"both": learn_dreamer(ranks, **options, actor_gradient="both")}, asked["out"])


if __name__ == "__main__":
    main()
