"""Where the time of an update goes: its parts one by one, forward and backward, on tensors of a real update.

This is the one place that looks inside the agents; nothing of it is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3.agent import CONTEXT
from sheeplike.agents.dreamer_v3.experience import compact
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.ppo import PPO
from sheeplike.agents.ppo.losses import JUDGED
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.measure import Quantity, Task, interleaved, milliseconds
from sheeplike.commands.benchmark.tables import Table
from sheeplike.commands.benchmark.updates import Learner, experiences
from sheeplike.monitor.progress import phase
from sheeplike.nn.optimizers import update_slow

WHOLE, TOTAL = "the whole update", "all parts"


class Part(NamedTuple):
    """A part of an update.

    Attributes:
        run: does it once.
        share: how often it is done in one update.
    """

    run: Callable[[], object]
    share: float = 1.0


def breakdown(bench: Bench) -> Table:
    """The parts and the whole, taken in turns."""
    bench.forget_agent()
    table = Table("breakdown", "One update by part, eager", ["ms", "% of the whole"])
    with phase("building the parts of an update"):
        learner = Learner(bench, experiences(bench))
        parts_of = {DreamerV3: dreamer_parts, PPO: ppo_parts}.get(type(learner.agent))
        if parts_of is None:
            table.notes.append(f"The parts of {bench.config.agent.name} are not known.")
            return table
        parts = parts_of(learner.agent)
    tasks: dict[str, Task] = {name: _task(bench, part.run) for name, part in parts.items()}
    tasks[WHOLE] = learner.update
    with phase("timing the parts of an update"):
        # A quarter of the time for each: there are many of them.
        taken = interleaved(tasks, seconds=bench.seconds / 4, rounds=bench.rounds)
    whole = [seconds / learner.cycle for seconds in taken.pop(WHOLE)]
    spent = {name: [seconds * parts[name].share for seconds in taken[name]] for name in parts}
    spent[TOTAL] = [sum(turn) for turn in zip(*spent.values(), strict=True)]
    for name, seconds in (spent | {WHOLE: whole}).items():
        share = Quantity("%", tuple(100 * one / all_ for one, all_ in zip(seconds, whole, strict=True)))
        table.rows[name] = [milliseconds(seconds), share]
    table.notes.append(
        "Each part alone, forward and backward. The whole also computes metrics, and hands gradients from part to part."
    )
    return table


def _task(bench: Bench, run: Callable[[], object]) -> Task:
    def task(calls: int) -> float:
        bench.wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        bench.wait()
        return time.perf_counter() - start

    return task


def dreamer_parts(agent: DreamerV3) -> dict[str, Part]:
    """The parts of DreamerV3's update, on one batch that is sampled here."""
    world, critic, rssm = agent.world_model, agent.actor_critic, agent.world_model.rssm
    sample = agent.replay.sample(agent.batch_size)
    data = sample.data
    batch = {key: value[:, CONTEXT:] for key, value in data.items()}
    start = agent.context(data)
    previous_action = data["action"][:, CONTEXT - 1 : -1]
    images = {key: batch[key].flatten(0, 1) for key in world.encoder.keys.spaces}
    lead = batch["reward"].shape

    def encode() -> Tensor:
        return world.encoder(images)

    def observe(embed: Tensor) -> tuple[Latent, Tensor]:
        return rssm.observe(start, previous_action, embed.unflatten(0, lead), batch["is_first"])

    def decode(latent: Latent) -> list[Tensor]:
        flat = latent.map(lambda x: x.flatten(0, 1))
        return list(world.decoder.losses(world.decoder(flat), images).values())

    def model_losses(latent: Latent, logits: Tensor) -> list[Tensor]:
        goes_on = (1 - batch["is_terminal"].float()) * (1 - 1 / world.horizon)
        return [
            world.reward(latent.features).loss(batch["reward"]),
            world.cont(latent.features).loss(goes_on),
            *rssm.kl(logits, rssm.prior(latent.deter).float()),
        ]

    def imagine() -> tuple[Tensor, Tensor]:
        return critic.imagine(rssm, posterior.map(lambda x: x.flatten(0, 1)), agent.imagination_length)

    def behaviour(latent: Latent) -> list[Tensor]:
        return list(agent.behaviour_losses(*imagined, latent.features, batch)[0].values())

    with torch.no_grad(), agent.autocast():
        embed = encode()
        posterior, logits = observe(embed)
        imagined = imagine()

    def optimize() -> None:
        # On the gradients that the other parts leave behind.
        agent._gradient_norms()
        agent.optimizer.step()
        update_slow(critic.slow_value, critic.value, agent.slow_critic_rate)

    def replay() -> None:
        fresh = agent.replay.sample(agent.batch_size)
        agent.replay.write_back(fresh.worlds, fresh.times[:, CONTEXT:], compact(posterior))

    def learn(function: Callable[..., Any], *inputs: Any) -> Part:
        return Part(lambda: _learn(agent.autocast, function, *inputs))

    return {
        "replay: sampling and write-back": Part(replay),
        "encoder": learn(encode),
        "scan of the sequence": learn(observe, embed),
        "decoder and reconstruction loss": learn(decode, posterior),
        "reward, continue and KL losses": learn(model_losses, posterior, logits),
        "imagination (forward only)": Part(lambda: _forward(agent.autocast, imagine)),
        "actor and critic losses": learn(behaviour, posterior),
        "optimizer and slow critic": Part(optimize),
    }


def ppo_parts(agent: PPO) -> dict[str, Part]:
    """The parts of PPO's update, on the first minibatch of its rollout."""
    agent._prepare()
    each = 1 / (agent.epochs * agent.minibatches)
    index = torch.randperm(agent.valid.numel(), device=agent.device).view(agent.minibatches, -1)[0]
    data = agent.minibatch(index)

    def losses() -> list[Tensor]:
        return list(agent.losses(data, *(data[key] for key in JUDGED))[0].values())

    def optimize() -> None:
        nn.utils.clip_grad_norm_(agent.networks.parameters(), agent.max_grad_norm)
        agent.optimizer.step()

    return {
        "advantages, once per rollout": Part(agent._prepare, each),
        "reading the minibatch, augmentation": Part(lambda: agent.minibatch(index)),
        "losses": Part(lambda: _learn(nullcontext, losses)),  # it knows itself where precision is mixed
        "optimizer": Part(optimize),
    }


def _forward(precision: Callable[[], AbstractContextManager], function: Callable[..., Any], *inputs: Any) -> Any:
    with precision():
        return function(*inputs)


def _learn(precision: Callable[[], AbstractContextManager], function: Callable[..., Any], *inputs: Any) -> None:
    """Forward and backward, with gradients for the parameters and for the inputs."""
    inputs = pytree.tree_map(lambda x: x.detach().requires_grad_(), inputs)
    outputs = pytree.tree_leaves(_forward(precision, function, *inputs))
    sum(output.float().mean() for output in outputs if output.requires_grad).backward()
