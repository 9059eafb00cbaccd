"""DreamerV3 as the commands know it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from sheeplike.commands import schema
from sheeplike.commands.errors import InvalidValue
from sheeplike.commands.kinds.kind import (
    AgentKind,
    Benchmark,
    Choices,
    MemoryEstimate,
    Setup,
    arguments,
    around,
    halved,
)
from sheeplike.commands.schema import Config

if TYPE_CHECKING:
    from gymnasium import spaces
    from torch import nn

    from sheeplike.agents.dreamer_v3 import DreamerV3, Size
    from sheeplike.agents.spaces import ActionCodec

# How the agent uses its memory: one stored step comes before each trained sequence, and the write head takes one.
CONTEXT, WRITE_HEAD = 1, 1


class DreamerV3Kind(AgentKind):
    section = schema.DreamerV3
    dry_run = (
        "agent/size=1m",
        "agent.replay_ratio=0.0625",
        "agent.replay_size=1024",
        "agent.batch_size=4",
        "agent.batch_length=8",
    )
    collecting = "filling the replay"

    def build(self, section: schema.DreamerV3, space: spaces.Dict, actions: spaces.Space, setup: Setup) -> DreamerV3:
        from sheeplike.agents.dreamer_v3 import DreamerV3

        betas, free_nats = (section.beta1, section.beta2), section.kl_free_nats
        numbers = arguments(section, size=widths(section), betas=betas, free_nats=free_nats)
        for name in ("beta1", "beta2", "kl_free_nats"):
            del numbers[name]
        return DreamerV3(space, actions, **numbers, **setup._asdict())

    def check(self, config: Config) -> Config:
        _check_replay(config)
        return replace(config, learning_starts=_learning_starts(config))

    def acting(self, section: schema.DreamerV3, num_envs: int) -> schema.DreamerV3:
        return replace(section, replay_size=num_envs * (section.batch_length + CONTEXT + WRITE_HEAD))

    # --- when it learns ---------------------------------------------------------------------------------------------

    def learning_begins(self, config: Config) -> int:
        return config.learning_starts

    def gradient_steps(self, config: Config, begun: int) -> int:
        return int(max(config.total_steps - max(config.learning_starts, begun), 0) * config.agent.replay_ratio)

    # --- what is told about it --------------------------------------------------------------------------------------

    def describe(self, config: Config, agent: DreamerV3) -> dict[str, str]:
        a, n = config.agent, config.env.num_envs
        per_iteration = n * a.replay_ratio
        train_ratio = a.replay_ratio * a.batch_size * a.batch_length
        if per_iteration >= 1:
            rhythm = f"{n} policy steps, then {per_iteration:g} gradient steps"
        else:
            rhythm = f"{n} policy steps; one gradient step every {1 / per_iteration:g} iterations"
        parameters = sum(p.numel() for p in agent.modules.parameters() if p.requires_grad)
        return {
            "agent": f"{a.name}, size {a.size.name}: {parameters:,} parameters",
            "one iteration": rhythm,
            "learning": f"from policy step {config.learning_starts:,} on; replay_ratio {a.replay_ratio:g} is "
            f"train_ratio {train_ratio:g}: each frame is replayed {train_ratio:g} times on average",
            "memory": f"replay of {agent.replay.describe()}",
        }

    def remembered(self, config: Config, num_envs: int) -> tuple[str, int]:
        return "replay", config.agent.replay_size

    def benchmark(self, config: Config, sizes: Sequence[str] = ()) -> Benchmark:
        a = config.agent
        smallest = replace(self.acting(a, config.env.num_envs), replay_ratio=1.0)
        updates = Fraction(a.replay_ratio * config.env.num_envs)  # per iteration
        growth = [f"agent.batch_size={count}" for count in around(a.batch_size, 2)]
        if a.size.name in sizes:
            larger = sizes[sizes.index(a.size.name) + 1 :]
            growth += [f"agent/size={name}" for name in larger[: 2 if config.fabric.accelerator == "cuda" else 1]]
        return Benchmark(
            replace(config, learning_starts=0, agent=smallest),
            period=updates.limit_denominator(1000 if updates < 1 else 10).denominator,
            update=f"Batch {a.batch_size} x {a.batch_length}, imagination {a.imagination_length}, size {a.size.name}",
            growth=tuple(growth),
        )

    # --- what it takes ----------------------------------------------------------------------------------------------

    def networks(self, config: Config, space: spaces.Dict, codec: ActionCodec) -> nn.Module:
        """Its networks alone."""
        import torch

        from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic
        from sheeplike.agents.dreamer_v3.observations import ModelKeys
        from sheeplike.agents.dreamer_v3.world_model import WorldModel

        a, size, keys = config.agent, widths(config.agent), ModelKeys(space, config.agent.observations)
        numbers = {"unimix": a.unimix, "free_nats": a.kl_free_nats, "horizon": a.horizon}
        world = WorldModel(keys, codec.width, size, predicted=keys.with_targets(space, a.targets), **numbers)
        return torch.nn.ModuleList([world, ActorCritic(world.rssm.features, codec, size.units)])

    def estimate(self, config: Config, space: spaces.Dict, actions: spaces.Space) -> MemoryEstimate:
        from sheeplike.agents.dreamer_v3.agent import CONTEXT, LATENTS
        from sheeplike.agents.dreamer_v3.experience import replay_spec
        from sheeplike.agents.dreamer_v3.observations import ModelKeys
        from sheeplike.agents.spaces import ActionCodec
        from sheeplike.commands.memory import FULL, count_parameters, precision_bytes
        from sheeplike.memory import SequenceReplay
        from sheeplike.nn.vision import STAGES

        a, codec, seen = config.agent, ActionCodec(actions), ModelKeys(space, config.agent.observations)
        keys = seen.with_targets(space, a.targets)
        parameters = count_parameters(lambda: self.networks(config, space, codec))
        spec = replay_spec(keys, codec, widths(a))
        latents = {name: spec[name] for name in LATENTS}
        steps = a.batch_size * (a.batch_length + CONTEXT)
        number = precision_bytes(config)
        # Of each stage the convolution's output, and a quarter of it thrice: pooled, normalised, activated; and once
        # more in the decoder. Of each image the bytes, the floats, its prediction and the error.
        maps = sum(
            images.height * images.width // 4**n * a.size.depth * m
            for images in (*seen.sizes, *keys.sizes)
            for n, m in enumerate(STAGES)
        )
        frames = sum(math.prod(keys.spaces[key].shape) * (keys.dtype(key).itemsize + 3 * FULL) for key in keys.images)
        images = steps * (frames + maps * 1.75 * number)
        features = a.size.deter + 32 * a.size.classes
        recurrent = steps * (6 * a.size.deter + 4 * 32 * a.size.classes + 8 * a.size.hidden) * FULL
        # From each step on, the features of every imagined one, and the layers of policy, value, reward and the rest.
        imagined = steps * (a.imagination_length + 1) * (2 * features * FULL + 3 * 3 * 3 * a.size.units * number)
        return MemoryEstimate(
            learner=parameters * 4 * FULL,
            memory=SequenceReplay.footprint(spec, config.env.num_envs, a.replay_size),
            batch=int(images + recurrent + imagined),
            saved=parameters * 3 * FULL,
            renewed=SequenceReplay.footprint(latents, config.env.num_envs, a.replay_size),
        )

    def in_words(self, config: Config) -> tuple[str, str]:
        a = config.agent
        return f"a replay of {a.replay_size:,} policy steps", f"a batch of {a.batch_size} sequences"

    def smaller(self, config: Config) -> Iterator[Choices]:
        from sheeplike.agents.dreamer_v3.sizes import SIZES

        a = config.agent
        for name in ("replay_size", "batch_size", "batch_length", "imagination_length"):
            yield halved(f"agent.{name}", getattr(a, name))
        yield (
            (f"agent/size={name}", {"agent.size": {"name": name, **asdict(size)}})
            for name, size in reversed(SIZES.items())
            if size.deter < a.size.deter
        )

    def smaller_on_disk(self, config: Config) -> Iterator[Choices]:
        yield halved("agent.replay_size", config.agent.replay_size)


def widths(agent: schema.DreamerV3) -> Size:
    """The size of the model, without its name."""
    from sheeplike.agents.dreamer_v3 import Size

    return Size(**{name: value for name, value in asdict(agent.size).items() if name != "name"})


def _check_replay(config: Config) -> None:
    """A sequence must fit into each world's part of the replay memory."""
    agent, worlds = config.agent, config.env.num_envs
    needed = worlds * (agent.batch_length + CONTEXT + WRITE_HEAD)
    if agent.replay_size < needed:
        steps = agent.replay_size // worlds
        longest = steps - CONTEXT - WRITE_HEAD
        raise InvalidValue(
            "agent.batch_length",
            agent.batch_length,
            f"at most {longest}, since agent.replay_size={agent.replay_size} keeps {steps} steps of each of the "
            f"{worlds} worlds; or agent.replay_size={needed}"
            if longest >= 2
            else f"a replay that holds a sequence of each of the {worlds} worlds: agent.replay_size={needed}",
            longest if longest >= 2 else None,
        )


def _learning_starts(config: Config) -> int:
    """When the first gradient step can be made; the run must be long enough to make it."""
    agent, worlds = config.agent, config.env.num_envs
    smallest = max(
        worlds * (agent.batch_length + CONTEXT), min(agent.batch_size * agent.batch_length, agent.replay_size)
    )
    starts = smallest if config.learning_starts is None else config.learning_starts
    if starts < smallest:
        raise InvalidValue(
            "learning_starts",
            starts,
            f"at least {smallest}, when the replay holds one batch of {agent.batch_size} x {agent.batch_length} steps, "
            f"and each of the {worlds} worlds a sequence of it and the step before",
            smallest,
        )
    first = starts + math.ceil(1 / config.agent.replay_ratio)
    if config.total_steps < first:
        raise InvalidValue(
            "total_steps",
            config.total_steps,
            f"at least {first}, where the first gradient step comes (learning_starts={starts})",
            first,
        )
    return starts
