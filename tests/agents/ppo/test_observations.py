"""Observations of PPO: images of any size and channels, depth, and vectors of any name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO, PPOConfig, Vision
from sheeplike.agents.ppo.agent import observations

BOX = spaces.Box(-1, 1, (2,), np.float32)


def make(shapes: dict[str, tuple[int, ...]], seed: int = 0, **options: Any) -> PPO:
    """An agent of worlds whose observations have these shapes: of one axis a vector, else an image."""
    space = {
        key: spaces.Box(0, 255, shape, np.uint8)
        if len(shape) == 3 and not key.startswith("depth/")
        else spaces.Box(-np.inf, np.inf, shape, np.float32)
        for key, shape in shapes.items()
    }
    defaults = {"observations": ("*",), "rollout_length": 4, "minibatches": 2, "epochs": 2}
    config = PPOConfig(**(defaults | {"policy_layers": (8,), "value_layers": (8,)} | options))
    return PPO(spaces.Dict(space), BOX, config, num_envs=3, seed=seed)


def observe(agent: PPO, generator: torch.Generator) -> dict[str, Tensor]:
    seen = {}
    for key, (shape, dtype) in agent.keys.stored().items():
        if dtype == torch.uint8:
            seen[key] = torch.randint(256, (3, *shape), dtype=dtype, generator=generator)
        else:
            seen[key] = 5 * torch.rand(3, *shape, generator=generator)
    return seen


def learn(agent: PPO) -> list[dict[str, Tensor]]:
    """A rollout and the updates on it; what was seen."""
    player, generator, nothing = agent.player(3), torch.Generator().manual_seed(0), torch.zeros(3)
    seen = []
    for t in range(5):
        seen.append(observe(agent, generator))
        first = torch.full((3,), t == 0)
        action = player.act(seen[-1], first)
        agent.add(Step(seen[-1], action, torch.randn(3), first, nothing > 0, nothing > 0, dict(player.extras)))
    for _ in range(agent.updates_due(0)):
        assert all(bool(value.isfinite()) for value in agent.update().values())
    return seen


IMAGES = {
    "pixels/front": (48, 64, 3),
    "pixels/grey": (24, 20, 1),
    "pixels/stack": (48, 48, 12),
    "depth/front": (32, 32, 1),
}


@pytest.mark.parametrize("options", [{}, {"frame_stack": 2, "augment": True}, {"shared_trunk": True}])
def test_cameras_of_every_size_and_depth_each_with_a_network_of_its_own(options: dict[str, Any]) -> None:
    agent = make(IMAGES, **options)
    before = {name: p.clone() for name, p in agent.networks.named_parameters()}
    learn(agent)
    assert agent.networks.policy_trunk.cnns.keys() == IMAGES.keys()
    stack = options.get("frame_stack", 1)
    for key, cnn in agent.networks.policy_trunk.cnns.items():
        assert cnn.convs[0].weight.shape[1] == stack * IMAGES[key][-1]
    assert all(bool((p != before[name]).any()) for name, p in agent.networks.named_parameters())


def test_depth_is_kept_in_metres_stacked_and_squashed_by_the_network() -> None:
    agent = make({"depth/front": (32, 32, 1)}, frame_stack=2, epochs=1)
    player, generator = agent.player(3), torch.Generator().manual_seed(0)
    steps, nothing, seen = [], torch.zeros(3), []
    agent.networks.policy_trunk.cnns["depth/front"].convs[0].register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    for t in range(5):
        obs, first = observe(agent, generator), torch.full((3,), t == 0)
        action = player.act(obs, first)
        agent.add(Step(obs, action, nothing, first, nothing > 0, nothing > 0, dict(player.extras)))
        steps.append(obs["depth/front"])
    assert torch.equal(agent.rollout.trajectory("depth/front"), torch.stack(steps))
    both = torch.cat([steps[3], steps[4]], -1)
    torch.testing.assert_close(seen[-1], (both / (1 + both)).permute(0, 3, 1, 2))
    worlds = torch.arange(3)
    read = observations(agent.rollout, agent.keys, torch.full_like(worlds, agent.rollout.newest), worlds)
    assert torch.equal(read["depth/front"], both)


def test_one_network_for_cameras_of_one_shape_only() -> None:
    same = {"pixels/left": (48, 48, 1), "pixels/right": (48, 48, 1)}
    learn(make(same, vision=Vision(shared=True)))
    for other in ((48, 64, 1), (48, 48, 3)):
        with pytest.raises(ValueError, match="nearest: shared=false"):
            make(same | {"pixels/other": other}, vision=Vision(shared=True))


# Methods of what holds the networks, a dot, characters of patterns, and what DreamerV3 calls its losses.
NAMES = ("privileged_state", "type", "keys", "values", "training", "a.b", "goal[0]", "task/variation", "reconstruction")


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_of_any_name_is_seen_by_the_value_and_not_by_the_policy(
    name: str, randomised: Callable[..., None]
) -> None:
    agent = make({"state": (3,), name: (2,)}, observations=("state",), value_observations=("state", name))
    randomised(agent.networks)
    assert agent.networks.policy_trunk.outputs == 3
    assert agent.networks.value_trunk.outputs == 5
    obs = observe(agent, torch.Generator().manual_seed(0))
    obs[name].requires_grad_()
    policy, value = agent.networks(obs)
    score = policy.log_prob(policy.mode()).sum() + policy.entropy().sum()
    assert torch.autograd.grad(score, obs[name], allow_unused=True) == (None,)
    (gradient,) = torch.autograd.grad(value.sum(), obs[name])
    assert bool(gradient.any(0).all())
    learn(agent)
    # Whitened by what was seen, and so saved.
    other = make({"state": (3,), name: (2,)}, observations=("state",), value_observations=("state", name), seed=1)
    other.load_state_dict(agent.state_dict())
    norm = other.networks.value_trunk.norms
    assert [int(one.count) for one in norm.values()] == [12, 12]


def test_it_acts_alike_without_what_only_the_value_sees() -> None:
    shapes = {"pixels/front": (48, 48, 3), "pixels/above": (48, 48, 3), "state": (3,), "privileged_state": (2,)}
    options = {"observations": ("pixels/front", "state"), "value_observations": ("*",), "frame_stack": 2}
    agent = make(shapes, **options)
    learn(agent)
    players, generator = [agent.player(3) for _ in range(2)], torch.Generator().manual_seed(1)
    for t in range(4):
        obs, first = observe(agent, generator), torch.full((3,), t == 0)
        acted = []
        for player, seen in zip(players, (obs, {key: obs[key] for key in ("pixels/front", "state")}), strict=True):
            torch.manual_seed(t)
            acted.append(player.act(seen, first))
        assert torch.equal(*acted)
        assert torch.equal(*(player.extras["log_prob"] for player in players))
        assert "value" in players[0].extras
        assert "value" not in players[1].extras
    with pytest.raises(KeyError, match="state"):
        players[1].act({"pixels/front": obs["pixels/front"]}, first)


@pytest.mark.parametrize("name", ["reward", "value", "target", "raw_action", "envs"])
def test_a_name_that_the_rollout_needs_itself_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'"):
        make({"state": (3,), name: (2,)})
