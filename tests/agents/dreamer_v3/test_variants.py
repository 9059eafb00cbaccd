"""Variants of DreamerV3: representations without reconstruction, and gradients of the actor through the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config
from sheeplike.agents.dreamer_v3.actor_critic import lambda_return
from sheeplike.agents.dreamer_v3.world_model import barlow_loss
from sheeplike.nn.distributions import TwoHot, symexp
from sheeplike.options import InvalidOption


@pytest.fixture
def make(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object], randomised: Callable[..., None]
) -> Callable[..., DreamerV3]:
    """Builds an agent with experience and without outputs that are zero."""

    def build(**options: Any) -> DreamerV3:
        agent = make_agent(**({"cameras": ("front",), "free_nats": 0.0} | options))
        randomised(agent.networks, 0.05)
        play(agent, 20, last={(6, 0)}, terminal={(9, 1)})
        return agent

    return build


def gradients(agent: DreamerV3, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss that are not zero, by parameter."""
    names, params = zip(*((n, p) for n, p in agent.networks.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss.mean(), params, allow_unused=True, retain_graph=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None and bool(g.any())}


# --- barlow -----------------------------------------------------------------------------------------------------------


def test_barlow_loss_is_that_of_the_correlation_matrix() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 4)) * (1, 2, 3, 4) + 7, rng.standard_normal((50, 4))
    correlation = np.corrcoef(x, y, rowvar=False)[:4, 4:] * 49 / 50  # torch's deviation divides by 49, the mean by 50
    weights = np.where(np.eye(4), 1, 0.01)
    expected = (weights * (correlation - np.eye(4)) ** 2).sum()
    assert barlow_loss(torch.tensor(x), torch.tensor(y), 0.01).item() == pytest.approx(expected, rel=1e-5)


def test_without_reconstruction_pictures_shape_nothing_and_the_encoder_learns_through_the_latents(make) -> None:
    agent = make(
        representation="barlow", vectors={"state": 5, "target": 2}, targets=("target",), observations=("[ps]*",)
    )
    losses, _, _ = agent.losses(agent.replay.sample(4).data)
    assert {"pixels/front", "target", "barlow"} <= losses.keys()
    assert "state" not in losses
    assert all(name.startswith("world_model.decoder.") for name in gradients(agent, losses["pixels/front"]))
    for name in ("barlow", "target"):
        assert any(part.startswith("world_model.encoder.") for part in gradients(agent, losses[name]))
    assert not any(part.startswith("world_model.decoder.") for part in gradients(agent, losses["barlow"]))


def test_its_target_is_the_encoder_without_gradient(make) -> None:
    agent = make(representation="barlow")
    data = agent.replay.sample(4).data
    world, batch = agent.world_model, {key: value[:, 1:] for key, value in data.items()}
    posterior, logits, embed = world.observe(agent.context(data), data["action"][:, :-1], batch, batch["is_first"])
    losses, _ = world.losses(posterior, logits, batch, embed)
    again, _ = world.losses(posterior.detach(), logits.detach(), batch, embed)
    assert torch.equal(losses["barlow"], again["barlow"])
    assert not any(name.startswith("world_model.encoder.") for name in gradients(agent, again["barlow"]))


def test_the_decoder_beside_it_changes_no_bit_of_the_rest(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object]
) -> None:
    found = []
    for decoder in (True, False):
        agent = make_agent(cameras=("front",), representation="barlow", decoder=decoder)
        torch.manual_seed(0)
        play(agent, 20)
        metrics = [agent.update() for _ in range(3)]
        found.append({n: p for n, p in agent.networks.state_dict().items() if not n.startswith("world_model.decoder.")})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name
    assert "loss/pixels/front" not in metrics[-1]
    assert agent.report() == ({}, {})
    assert agent.dream() == {}


def test_what_is_reconstructed_needs_a_decoder() -> None:
    with pytest.raises(InvalidOption, match=r"agent\.decoder"):
        DreamerV3Config(decoder=False).check(num_envs=4, total_steps=10**6)


def test_an_image_cannot_be_its_target(make_agent: Callable[..., DreamerV3]) -> None:
    with pytest.raises(ValueError, match=r"pixels/front.*agent\.representation=reconstruction"):
        make_agent(cameras=("front",), observations=("state",), targets=("pixels/front",), representation="barlow")


# --- gradients of the actor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "actions", [2, spaces.Discrete(3), spaces.MultiDiscrete([2, 3])], ids=["box", "one", "several"]
)
@pytest.mark.parametrize("kind", ["dynamics", "both"])
def test_the_actor_learns_through_the_model_which_gets_no_gradient(make, kind: str, actions: Any) -> None:
    agent = make(actor_gradient=kind, actions=actions)
    losses, _, _ = agent.losses(agent.replay.sample(4).data)
    reached = gradients(agent, losses["policy"])
    assert reached.keys() == {f"actor_critic.policy.{name}" for name, _ in agent.actor_critic.policy.named_parameters()}
    assert not any(name.startswith("actor_critic.policy.") for name in gradients(agent, losses["value"]))


def test_dynamics_is_the_gradient_of_the_imagined_advantage(make) -> None:
    """Through the model itself, and asked for the policy alone."""
    agent = make(actor_gradient="dynamics", entropy_scale=0.0)
    data, critic, world = agent.replay.sample(4).data, agent.actor_critic, agent.world_model
    torch.manual_seed(1)
    losses, _, _ = agent.losses(data)
    found = gradients(agent, losses["policy"])
    spread = critic.return_scale.range[1] - critic.return_scale.range[0]
    torch.manual_seed(1)
    batch = {key: value[:, 1:] for key, value in data.items()}
    posterior, *_ = world.observe(agent.context(data), data["action"][:, :-1], batch, batch["is_first"])
    latent = posterior.detach().map(lambda x: x.flatten(0, 1))
    features = [latent.features]
    for _ in range(agent.config.imagination_length):
        policy = critic.policy(latent.features.detach())
        latent = world.rssm.imagine(latent, policy.mean + policy.std * torch.randn_like(policy.mean))
        features.append(latent.features)
    states = torch.stack(features, 1)

    def mean(two_hot: TwoHot) -> torch.Tensor:
        """Return the mean with the gradient of that in symlog space."""
        smooth = symexp((two_hot.log_probs.exp() * torch.linspace(-20, 20, 255)).sum(-1))
        return two_hot.pred().detach() + smooth - smooth.detach()

    reward, cont, value = mean(world.reward(states)), world.cont(states).prob(), mean(critic.value(states))
    returns = lambda_return(torch.zeros_like(cont), 1 - cont, reward, value, 1.0, agent.config.return_lambda)
    weight = torch.cumprod(cont, 1)[:, :-1].detach()
    expected = gradients(agent, -weight * (returns - value[:, :-1]) / spread.clamp_min(1.0))
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-8)


def test_the_model_in_which_it_learns_keeps_the_weights_of_the_model(make) -> None:
    agent = make(actor_gradient="dynamics")
    for step in range(3):
        agent.update()
        if step == 1:
            agent.load_state_dict(agent.state_dict())
    for twin, own in ((agent.dreamt, agent.world_model), (agent.dreamt_value, agent.actor_critic.value)):
        for (name, ours), theirs in zip(twin.named_parameters(), own.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
            assert ours.grad is None


# --- scaled rewards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("actor_gradient", ["reinforce", "both"])
def test_scaled_rewards_are_learnt_as_rewards_that_come_scaled(make, actor_gradient: str) -> None:
    found = []
    for factor in (8.0, 1.0):
        torch.manual_seed(0)
        agent = make(reward_scaling=factor, actor_gradient=actor_gradient)
        agent.replay.storage["reward"].mul_(4 / factor)
        found.append(agent.update())
    for name, value in found[0].items():
        if name.startswith(("loss/", "grad_norm/")):
            torch.testing.assert_close(value, found[1][name], rtol=1e-4, atol=1e-5)
    for name in ("wm/imagined_reward", "critic/value", "actor/imagined_return", "actor/return_scale"):
        torch.testing.assert_close(8 * found[0][name], found[1][name], rtol=1e-4, atol=1e-5)


def test_returns_are_divided_by_at_least_the_unit_of_scaled_rewards(make) -> None:
    assert make(reward_scaling=8.0).actor_critic.return_scale.current().item() == 1 / 8
