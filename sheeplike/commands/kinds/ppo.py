"""PPO as the commands know it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from sheeplike.commands import schema
from sheeplike.commands.errors import InvalidValue
from sheeplike.commands.kinds.kind import (
    HALVINGS,
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

    from sheeplike.agents.ppo import PPO
    from sheeplike.agents.spaces import ActionCodec


class PPOKind(AgentKind):
    section = schema.PPO
    dry_run = ("agent.rollout_length=16", "agent.minibatches=2", "agent.epochs=2")
    collecting = "collecting a rollout"

    def build(self, section: schema.PPO, space: spaces.Dict, actions: spaces.Space, setup: Setup) -> PPO:
        from sheeplike.agents.ppo import PPO
        from sheeplike.agents.ppo.networks import Vision

        place = setup._asdict()
        del place["learning_starts"]
        return PPO(space, actions, **arguments(section, vision=Vision(**asdict(section.vision))), **place)

    def check(self, config: Config) -> Config:
        """A rollout must divide into minibatches, and the run must be long enough for one."""
        agent, worlds = config.agent, config.env.num_envs
        steps = worlds * agent.rollout_length
        if steps % agent.minibatches:
            divisors = [count for count in range(1, steps + 1) if steps % count == 0]
            raise InvalidValue(
                "agent.minibatches",
                agent.minibatches,
                f"a divisor of the rollout's {steps} steps (env.num_envs={worlds} x agent.rollout_length="
                f"{agent.rollout_length})",
                min(divisors, key=lambda count: abs(count - agent.minibatches)),
            )
        if config.learning_starts is not None:
            expected = "null: ppo learns whenever a rollout is complete"
            raise InvalidValue("learning_starts", config.learning_starts, expected)
        first = steps + worlds
        if config.total_steps < first:
            raise InvalidValue(
                "total_steps",
                config.total_steps,
                f"at least {first}, where the first rollout is complete: {agent.rollout_length} steps of each of the "
                f"{worlds} worlds, and the one that bootstraps them",
                first,
            )
        return config

    def acting(self, section: schema.PPO, num_envs: int) -> schema.PPO:
        return replace(section, rollout_length=1, minibatches=1)

    # --- when it learns ---------------------------------------------------------------------------------------------

    def learning_begins(self, config: Config) -> int:
        return config.agent.rollout_length * config.env.num_envs

    def gradient_steps(self, config: Config, begun: int) -> int:
        a = config.agent
        # A rollout is complete one iteration later: with the step that bootstraps it.
        ended, done = (
            max(math.ceil(steps / config.env.num_envs) - 1, 0) // a.rollout_length
            for steps in (config.total_steps, begun)
        )
        return (ended - done) * a.epochs * a.minibatches

    # --- what is told about it --------------------------------------------------------------------------------------

    def describe(self, config: Config, agent: PPO) -> dict[str, str]:
        a, n = config.agent, config.env.num_envs
        steps = a.rollout_length * n
        parameters = sum(p.numel() for p in agent.networks.parameters())
        frames = f"{a.frame_stack} stacked frames" if a.frame_stack > 1 else "single frames"
        cnn = f", {a.vision.layout} network on {frames}" if agent.keys.images else ""
        return {
            "agent": f"{a.name}{cnn}: {parameters:,} parameters",
            "one iteration": f"{n} policy steps",
            "learning": f"every {a.rollout_length} iterations: {a.epochs} epochs of {a.minibatches} minibatches of "
            f"{steps // a.minibatches:,} steps",
            "memory": f"rollout of {steps:,} policy steps",
        }

    def remembered(self, config: Config, num_envs: int) -> tuple[str, int]:
        return "rollout", config.agent.rollout_length * num_envs

    def benchmark(self, config: Config, sizes: Sequence[str] = ()) -> Benchmark:
        a = config.agent
        return Benchmark(
            config,
            cycle=a.epochs * a.minibatches,  # all updates of a rollout come before it can remember the next one
            period=a.rollout_length,
            update=f"One gradient step on a minibatch of {minibatch(config)} steps, its share of preparing a rollout "
            "included",
            # The more minibatches, the smaller they are.
            growth=tuple(f"agent.minibatches={count}" for count in reversed(around(a.minibatches, 2))),
        )

    # --- what it takes ----------------------------------------------------------------------------------------------

    def networks(self, config: Config, space: spaces.Dict, codec: ActionCodec) -> nn.Module:
        """Its networks alone."""
        from sheeplike.agents.ppo.networks import ActorCritic, Vision
        from sheeplike.agents.spaces import ObservationKeys

        a = config.agent
        names = ("distribution", "policy_layers", "value_layers", "shared_trunk", "activation")
        return ActorCritic(
            ObservationKeys(space, a.observations),
            ObservationKeys(space, a.value_observations or a.observations),
            codec,
            stack=a.frame_stack,
            vision=Vision(**asdict(a.vision)),
            **{name: getattr(a, name) for name in names},
        )

    def estimate(self, config: Config, space: spaces.Dict, actions: spaces.Space) -> MemoryEstimate:
        from sheeplike.agents.ppo.experience import rollout_spec
        from sheeplike.agents.spaces import ActionCodec, ObservationKeys
        from sheeplike.commands.memory import FULL, count_parameters, precision_bytes
        from sheeplike.memory import Rollout
        from sheeplike.nn.cnn import LAYOUTS

        a, codec = config.agent, ActionCodec(actions)
        keys = ObservationKeys(space, [*a.observations, *(a.value_observations or ())])
        parameters = count_parameters(lambda: self.networks(config, space, codec))
        memory = Rollout.footprint(
            rollout_spec(keys, codec, augment=a.augment), config.env.num_envs, a.rollout_length, a.frame_stack - 1
        )
        number = precision_bytes(config)
        layout, per_step = LAYOUTS[a.vision.layout], 0.0
        for key in keys.images:
            pixels = math.prod(keys.spaces[key].shape[:2])
            per_step += pixels * keys.channels(key) * a.frame_stack * (1 + FULL)
            for channels, stride in zip(layout.channels, layout.strides, strict=True):
                pixels //= stride**2
                per_step += pixels * channels * 2 * number  # before and after the activation
                pixels //= 4 if layout.pool else 1
        networks = 1 if a.shared_trunk else 2
        dense = 2 * (sum(a.policy_layers) + sum(a.value_layers)) * number
        return MemoryEstimate(
            learner=parameters * 4 * FULL,
            memory=memory,
            batch=int(minibatch(config) * (per_step * networks + dense)),
            saved=parameters * 3 * FULL,
            renewed=memory,
        )

    def in_words(self, config: Config) -> tuple[str, str]:
        return "the rollout", f"a minibatch of {minibatch(config):,} steps"

    def smaller(self, config: Config) -> Iterator[Choices]:
        a: Any = config.agent
        yield halved("agent.rollout_length", a.rollout_length)
        yield halved("agent.frame_stack", a.frame_stack)
        yield (
            (f"agent.minibatches={a.minibatches * 2**n}", {"agent.minibatches": a.minibatches * 2**n})
            for n in range(1, HALVINGS + 1)
        )


def minibatch(config: Config) -> int:
    """Steps of a minibatch."""
    return config.env.num_envs * config.agent.rollout_length // config.agent.minibatches
