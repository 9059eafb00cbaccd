"""Observations of each network, the published sizes, and settings that do not go together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO, PPOConfig, Vision
from sheeplike.agents.ppo.networks import PPONetworks

BOX = spaces.Box(-1, 1, (3,), np.float32)


def build(
    observations: dict[str, tuple[int, ...]],
    *,
    value: tuple[str, ...] = ("*",),
    policy: tuple[str, ...] = ("*",),
    actions: spaces.Space = BOX,
    **options: Any,
) -> PPONetworks:
    """Networks for observations by shape: three axes are an image, one a vector."""
    space = spaces.Dict(
        {
            key: spaces.Box(0, 255, shape, np.uint8) if len(shape) == 3 else spaces.Box(-9, 9, shape, np.float32)
            for key, shape in observations.items()
        }
    )
    config = PPOConfig(observations=policy, value_observations=value, **options)
    return PPONetworks(space, actions, config)


def observe(networks: PPONetworks, batch: int = 4, stack: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    obs = {}
    for key, space in (networks.policy_trunk.keys.spaces | networks.value_trunk.keys.spaces).items():
        if len(space.shape) == 3:
            shape = (batch, *space.shape[:2], space.shape[2] * stack)
            obs[key] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        else:
            obs[key] = torch.randn(batch, *space.shape, generator=generator)
    return obs


def count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def outputs(networks: PPONetworks, obs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    policy, value = networks(obs)
    return policy.mean.detach(), value.detach()


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_published_networks_have_about_105_thousand_parameters_each() -> None:
    """Playground's pick-up from pixels: a CNN of 512 features, three layers of 128, mean and deviation of 3 actions."""
    layers = (128, 128, 128)
    networks = build({"pixels/front": (64, 64, 3)}, policy_layers=layers, value_layers=layers)
    cnn = (5 * 5 * 3 * 16 + 16) + (3 * 3 * 16 * 32 + 32)
    hidden = (512 * 128 + 128) + 2 * (128 * 128 + 128)
    assert count(networks.policy_trunk, networks.policy_head) == cnn + hidden + 128 * 6 + 6 == 105_318
    assert count(networks.value_trunk, networks.value_head) == cnn + hidden + 128 + 1 == 104_673
    assert count(networks) == 105_318 + 104_673


def test_state_networks_from_first_principles() -> None:
    networks = build({"state": (5,)}, policy_layers=(32, 16), value_layers=(8,), distribution="clipped_normal")
    assert count(networks.policy_trunk, networks.value_trunk) == 0
    assert count(networks.policy_head) == (5 * 32 + 32) + (32 * 16 + 16) + (16 * 3 + 3)
    assert count(networks.value_head) == (5 * 8 + 8) + (8 + 1)
    assert networks.log_std.tolist() == [0.0] * 3
    discrete = build({"state": (5,)}, policy_layers=(32,), actions=spaces.Discrete(7))
    assert count(discrete.policy_head) == (5 * 32 + 32) + (32 * 7 + 7)


def test_the_agent_passes_layers_on_to_the_head_they_are_for(make_ppo: Callable[..., PPO]) -> None:
    networks = make_ppo(policy_layers=(8, 4), value_layers=(6,)).networks
    heads = networks.policy_head, networks.value_head
    widths = [[part.out_features for part in head if isinstance(part, nn.Linear)] for head in heads]
    assert widths == [[8, 4, 2 * 2], [6, 1]]


@pytest.mark.parametrize("stack", [1, 4])
def test_features_of_all_cameras_and_vectors_side_by_side(stack: int) -> None:
    observations = {"pixels/a": (48, 48, 3), "pixels/b": (64, 48, 1), "state": (5,), "more": (2,)}
    networks = build(observations, frame_stack=stack)
    assert networks.policy_trunk.outputs == 3 * 3 * 32 + 4 * 3 * 32 + 5 + 2
    first = {key: cnn.convs[0].weight.shape[1] for key, cnn in networks.policy_trunk.cnns.items()}
    assert first == {"pixels/a": 3 * stack, "pixels/b": stack}
    policy, value = networks(observe(networks, stack=stack))
    assert policy.mean.shape == (4, 3)
    assert value.shape == (4,)


def test_one_cnn_for_all_cameras_or_one_each() -> None:
    observations = {"pixels/left": (48, 48, 3), "pixels/right.eye": (48, 48, 3)}
    each = build(observations)
    shared = build(observations, vision=Vision(shared=True))
    cnn = (5 * 5 * 3 * 16 + 16) + (3 * 3 * 16 * 32 + 32)
    assert count(each.policy_trunk) == count(each.value_trunk) == 2 * cnn
    assert count(shared.policy_trunk) == count(shared.value_trunk) == cnn
    obs = observe(each)
    swapped = dict(zip(obs, reversed(obs.values()), strict=True))
    for networks, same in ((shared, True), (each, False)):
        left, right = networks.policy_trunk(obs).chunk(2, -1)
        assert torch.equal(networks.policy_trunk(swapped), torch.cat([right, left], -1)) == same


def test_vectors_are_whitened_by_what_was_seen_and_images_are_not() -> None:
    networks = build({"pixels/a": (48, 48, 3), "state": (4,)})
    obs = observe(networks)
    before = networks.policy_trunk(obs)
    assert torch.equal(before[:, -4:], obs["state"])
    data = 7 + 3 * torch.randn(500, 4)
    networks.update_norms({"state": data})
    for trunk in (networks.policy_trunk, networks.value_trunk):
        expected = (obs["state"] - data.mean(0)) / data.std(0, correction=0)
        torch.testing.assert_close(trunk(obs)[:, -4:], expected)
    assert torch.equal(networks.policy_trunk(obs)[:, :-4], before[:, :-4])


def test_vision_and_activation_arrive_where_they_belong() -> None:
    vision = Vision(layout="nature", head="spatial_softmax", activation="relu", normalise_channels=True)
    networks = build({"pixels/a": (48, 48, 3)}, vision=vision, activation="tanh", policy_layers=(8,))
    cnn = networks.policy_trunk.cnns["pixels/a"]
    assert [conv.kernel_size[0] for conv in cnn.convs] == [8, 4, 3]
    assert networks.policy_trunk.outputs == 128
    assert cnn.normalise_channels
    assert isinstance(cnn.activation, nn.ReLU)
    x = torch.randn(5, 128)
    first, _, last = networks.policy_head
    torch.testing.assert_close(networks.policy_head(x), torch.tanh(x @ first.weight.T) @ last.weight.T)


@pytest.mark.parametrize("actions", [BOX, spaces.Discrete(3)], ids=["continuous", "discrete"])
def test_initial_weights_are_orthogonal_and_the_policy_starts_out_indifferent(actions: spaces.Space) -> None:
    """Gains sqrt(2) within, 0.01 for actions (Huang et al. 2022, detail 2); the value begins at 0."""
    networks = build({"pixels/a": (48, 48, 3)}, actions=actions)
    last = {networks.policy_head[-1]: 0.01, networks.value_head[-1]: 0.0}
    layers = [m for m in networks.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 2 * (2 + 3)
    for layer in layers:
        weight = layer.weight.detach().flatten(1)
        weight = weight if weight.shape[0] <= weight.shape[1] else weight.T
        gain = last.get(layer, math.sqrt(2))
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(len(weight)), atol=1e-5 * gain, rtol=1e-5)
        assert not layer.bias.any()
    policy, _ = networks(observe(networks))
    if isinstance(actions, spaces.Discrete):
        torch.testing.assert_close(policy.probs, torch.full((4, 3), 1 / 3), atol=0.02, rtol=0)
    else:
        assert policy.mean.abs().max() < 0.1
        torch.testing.assert_close(policy.std, torch.full((4, 3), math.log(2) + 0.001), atol=0.05, rtol=0)


def test_the_published_initial_weights() -> None:
    """Brax: uniform with a variance of one over the inputs within, the policy's last layer orthogonal by 0.2.

    The value begins at 0, unlike there.
    """
    networks = build({"state": (50,)}, initialisation="lecun_uniform", policy_gain=0.2, policy_layers=(400, 300))
    *hidden, last = (layer for layer in networks.policy_head if isinstance(layer, nn.Linear))
    for layer in hidden:
        limit = math.sqrt(3 / layer.in_features)
        assert 0.99 * limit < layer.weight.abs().max() <= limit
        assert layer.weight.var().item() == pytest.approx(1 / layer.in_features, rel=0.03)
    torch.testing.assert_close(last.weight @ last.weight.T, 0.04 * torch.eye(6))
    assert not networks.value_head[-1].weight.any()
    assert not any(layer.bias.any() for layer in networks.modules() if isinstance(layer, nn.Linear))


# --- who sees what ----------------------------------------------------------------------------------------------------


def test_the_value_sees_what_the_policy_does_not(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], randomised: Callable[..., None]
) -> None:
    """The policy would have nothing to go by where the privileged state is not to be had."""
    agent = make_ppo(
        cameras=("front", "above"),
        vectors={"state": 5, "privileged_state": 9},
        observations=("pixels/front", "state"),
        value_observations=("pixels/front", "privileged_state"),
    )
    randomised(agent.networks)
    assert list(agent.keys.spaces) == ["pixels/front", "privileged_state", "state"]
    assert "pixels/above" not in agent.rollout.storage
    obs = observe(agent.networks)
    sees = {"pixels/front": (True, True), "privileged_state": (False, True), "state": (True, False)}
    before = outputs(agent.networks, obs)
    for key, expected in sees.items():
        after = outputs(agent.networks, obs | {key: observe(agent.networks, seed=1)[key]})
        assert tuple(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) == expected, key
    obs["privileged_state"].requires_grad_()
    policy, value = agent.networks(obs)
    (gradient,) = torch.autograd.grad(policy.log_prob(policy.mode()).sum(), obs["privileged_state"], allow_unused=True)
    assert gradient is None
    (gradient,) = torch.autograd.grad(value.sum(), obs["privileged_state"])
    assert bool(gradient.any(0).all())
    # And a whole rollout of it.
    fill(agent)
    for _ in range(8):
        assert all(bool(x.isfinite()) for x in agent.update().values())


@pytest.mark.parametrize("shared", [False, True])
def test_policy_and_value_have_trunks_of_their_own_or_one(
    shared: bool, make_ppo: Callable[..., PPO], randomised: Callable[..., None]
) -> None:
    agent = make_ppo(cameras=("front",), shared_trunk=shared)
    networks = agent.networks
    assert (networks.policy_trunk is networks.value_trunk) == shared
    cnn = 1_216 + 4_640
    heads = count(networks.policy_head, networks.value_head)
    assert count(networks) == heads + (1 if shared else 2) * cnn
    randomised(networks)
    _, value = networks(observe(networks))
    policy_side = [*networks.policy_trunk.parameters(), *networks.policy_head.parameters()]
    gradients = torch.autograd.grad(value.sum(), policy_side, allow_unused=True)
    reached = [g is not None and bool(g.any()) for g in gradients]
    trunk = len(list(networks.policy_trunk.parameters()))
    assert reached == [shared] * trunk + [False] * (len(reached) - trunk)


@pytest.mark.parametrize(
    "options",
    [
        {"cameras": ("front",), "vectors": {}},
        {"vectors": {"state": 5}},
        {"cameras": ("front", "wrist"), "frame_stack": 2, "vision": Vision(shared=True)},
        {"cameras": ("front",), "actions": spaces.Discrete(4), "shared_trunk": True},
        {"actions": spaces.MultiDiscrete([2, 4])},
        {"cameras": ("front",), "distribution": "clipped_normal", "vision": Vision(layout="nature", head="average")},
        {
            "cameras": ("front",),
            "vision": Vision(layout="nature", head="spatial_softmax", normalise_channels=True),
            "augment": True,
        },
        {"vectors": {"state": 5, "more": 2}, "actions": spaces.Discrete(2), "value_clip": 0.2, "activation": "silu"},
    ],
    ids=[
        "pixels",
        "state",
        "cameras and state",
        "discrete",
        "several",
        "clipped normal",
        "spatial softmax",
        "two vectors",
    ],
)
def test_every_parameter_learns_whatever_is_seen_and_done(
    options: dict[str, Any],
    make_ppo: Callable[..., PPO],
    fill: Callable[..., list[Step]],
    snapshot: Callable[..., Any],
) -> None:
    agent = make_ppo(**options)
    before = snapshot(agent).parameters
    fill(agent, last={(3, 0)}, terminal={(5, 1)})
    for _ in range(agent.updates_due(0)):
        for name, value in agent.update().items():
            assert bool(value.isfinite()), name
    for name, p in agent.networks.named_parameters():
        assert bool(p.isfinite().all()), name
        assert bool((p != before[name]).any()), name


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minibatches": 5}, r"3 worlds.*8 steps"),
        (
            {"distribution": "categorical"},
            r"distribution=categorical.*clipped_normal.*nearest: tanh_normal",
        ),
        (
            {"distribution": "tanh_normal", "actions": spaces.Discrete(3)},
            r"distribution=tanh_normal.*nearest: categorical",
        ),
        ({"observations": ("pixels/*",)}, r"'pixels/\*'.*nearest: state"),
        ({"value_observations": ("privileged",)}, r"'privileged'.*state"),
        (
            {"vectors": {"state": 5, "more": 2}, "value_observations": ("more",), "shared_trunk": True},
            "nearest: shared_trunk=false",
        ),
        ({"actions": spaces.Box(-2, 2, (1,), np.float32)}, "-1 .* 1"),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    options: dict[str, Any], message: str, make_ppo: Callable[..., PPO]
) -> None:
    with pytest.raises(ValueError, match=message):
        make_ppo(**options)


def test_a_cnn_shared_by_cameras_of_different_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(48, 48, 3\).*\(64, 48, 3\).*nearest: shared=false"):
        build({"pixels/a": (48, 48, 3), "pixels/b": (64, 48, 3)}, vision=Vision(shared=True))


def test_adding_more_than_a_rollout_is_refused(make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> None:
    agent = make_ppo()
    steps = fill(agent)
    with pytest.raises(AssertionError, match="complete"):
        agent.add(steps[-1])
