"""World-model losses by hand, the heads at initialisation, and the player beside the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.monitor.metrics import MetricBuffer


def random_posterior(agent: DreamerV3, *lead: int, seed: int = 0) -> tuple[Latent, torch.Tensor]:
    rssm, generator = agent.world_model.rssm, torch.Generator().manual_seed(seed)
    logits = torch.randn(*lead, rssm.stoch, rssm.classes, generator=generator)
    stoch = torch.eye(rssm.classes)[logits.argmax(-1)]
    return Latent(torch.randn(*lead, rssm.deter, generator=generator), stoch), logits


def random_batch(agent: DreamerV3, *lead: int, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = {"reward": torch.randn(*lead, generator=generator) * 10}
    batch |= {name: torch.rand(lead, generator=generator) < 0.3 for name in ("is_first", "is_last", "is_terminal")}
    for key, space in agent.keys.spaces.items():
        if key in agent.keys.images:
            batch[key] = torch.randint(0, 256, (*lead, *space.shape), dtype=torch.uint8, generator=generator)
        else:
            batch[key] = 30 * torch.randn(*lead, *space.shape, generator=generator)
    return batch


def test_reward_and_value_predict_exactly_zero_at_initialisation(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent()
    features = random_posterior(agent, 50, 7)[0].features * 100
    for head in (agent.world_model.reward, agent.actor_critic.value, agent.actor_critic.slow_value):
        assert torch.equal(head(features).pred(), torch.zeros(50, 7))


def test_hidden_layers_of_the_heads(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent()
    heads = {
        "reward": (agent.world_model.reward, 1, 255),
        "continue": (agent.world_model.cont, 1, 1),
        "policy": (agent.actor_critic.policy, 3, 2 * 2),
        "value": (agent.actor_critic.value, 3, 255),
    }
    for name, (head, layers, outputs) in heads.items():
        linear = [m for m in head.modules() if isinstance(m, torch.nn.Linear)]
        assert sum(m.out_features for m in linear[layers:]) == outputs, name
        assert [m.out_features for m in linear[:layers]] == [16] * layers, name


def test_policy_starts_nearly_uniform_with_output_scale_one_hundredth(make_agent: Callable[..., DreamerV3]) -> None:
    policy = make_agent().actor_critic.policy
    output = [m for m in policy.modules() if isinstance(m, torch.nn.Linear)][-1]
    assert output.weight.std().item() == pytest.approx(0.01 / 4, rel=0.25)  # fan-in 16
    dist = policy(torch.randn(200, make_agent().world_model.rssm.features))
    np.testing.assert_allclose(dist.mean.detach(), 0, atol=0.05)
    np.testing.assert_allclose(dist.std.detach(), 0.892717, atol=0.01)


def test_mean_and_deviation_have_output_layers_of_their_own(make_agent: Callable[..., DreamerV3]) -> None:
    """The authors' two layers are two tensors each, which gradient clipping bounds one by one; joined, it would not."""
    policy = make_agent(actions=2).actor_critic.policy
    linear = [m for m in policy.modules() if isinstance(m, torch.nn.Linear)]
    assert [m.out_features for m in linear] == [16, 16, 16, 2, 2]


def test_image_loss_is_summed_over_pixels_and_channels_against_pixels_in_0_1(
    make_agent: Callable[..., DreamerV3],
) -> None:
    agent = make_agent(cameras=("front", "wrist"), vectors={})
    world = agent.world_model
    posterior, logits = random_posterior(agent, 2, 3)
    batch = random_batch(agent, 2, 3)
    with torch.no_grad():
        losses, _ = world.losses(posterior, logits, batch)
        images = world.decoder(posterior.map(lambda x: x.flatten(0, 1)))
    for key in ("pixels/front", "pixels/wrist"):
        model, truth = images[key].double().numpy().reshape(2, 3, 48, 48, 3), batch[key].numpy() / 255
        expected = [[((model[b, t] - truth[b, t]) ** 2).sum() for t in range(3)] for b in range(2)]
        assert losses[key].shape == (2, 3)
        np.testing.assert_allclose(losses[key], expected, rtol=1e-4)


def test_each_camera_is_decoded_from_its_own_channels(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent(cameras=("wrist", "front"), vectors={})
    with torch.no_grad():
        agent.world_model.decoder.cnn.out.weight.zero_()
        agent.world_model.decoder.cnn.out.bias.copy_(torch.tensor([100.0, 100, 100, -100, -100, -100]))
        images = agent.world_model.decoder(random_posterior(agent, 1)[0])
    assert list(images) == ["pixels/front", "pixels/wrist"]
    assert bool(images["pixels/front"].eq(1).all())
    assert bool(images["pixels/wrist"].eq(0).all())


def test_vector_loss_is_summed_in_symlog_space(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent(vectors={"state": 5, "force": 2})
    posterior, logits = random_posterior(agent, 2, 3)
    batch = random_batch(agent, 2, 3)
    with torch.no_grad():
        losses, _ = agent.world_model.losses(posterior, logits, batch)
        predicted = agent.world_model.decoder(posterior.map(lambda x: x.flatten(0, 1)))
    for key in ("state", "force"):
        truth = batch[key].double().numpy()
        squashed = np.sign(truth) * np.log(1 + np.abs(truth))
        error = predicted[key].double().numpy().reshape(truth.shape) - squashed
        np.testing.assert_allclose(losses[key], (error**2).sum(-1), rtol=1e-4)


def test_vectors_enter_the_encoder_through_symlog_in_sorted_order(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent(vectors={"zeta": 1, "alpha": 2})
    seen = []
    agent.world_model.encoder.mlp[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    agent.world_model.encoder({"zeta": torch.tensor([[-9.0]]), "alpha": torch.tensor([[0.0, 99.0]])})
    np.testing.assert_allclose(seen[0], [[0.0, np.log(100), -np.log(10)]], rtol=1e-6)


def test_continue_target_is_one_minus_1_over_333_unless_terminal(make_agent: Callable[..., DreamerV3]) -> None:
    """``is_last`` alone, a truncation, must not enter: the episode would have gone on."""
    agent = make_agent()
    posterior, logits = random_posterior(agent, 1, 4)
    batch = random_batch(agent, 1, 4)
    batch["is_last"] = torch.tensor([[False, True, True, False]])
    batch["is_terminal"] = torch.tensor([[False, False, True, False]])
    with torch.no_grad():
        losses, _ = agent.world_model.losses(posterior, logits, batch)
        prob = agent.world_model.cont(posterior.features).prob().double().numpy()[0]
    target = np.array([332 / 333, 332 / 333, 0.0, 332 / 333])
    expected = -(target * np.log(prob) + (1 - target) * np.log(1 - prob))
    np.testing.assert_allclose(losses["continue"][0], expected, rtol=1e-4)


def test_reward_is_predicted_for_arriving_at_the_step(make_agent: Callable[..., DreamerV3]) -> None:
    """The loss at t reads the state of t and the reward stored at t; at initialisation it is ln 255 everywhere."""
    agent = make_agent()
    posterior, logits = random_posterior(agent, 2, 3)
    batch = random_batch(agent, 2, 3)
    with torch.no_grad():
        losses, _ = agent.world_model.losses(posterior, logits, batch)
        np.testing.assert_allclose(losses["reward"], np.log(255), rtol=1e-5)
        agent.world_model.reward.net[1].bias.copy_(torch.linspace(-3, 3, 255))
        losses, _ = agent.world_model.losses(posterior, logits, batch)
        expected = agent.world_model.reward(posterior.features).loss(batch["reward"])
    assert losses["reward"].shape == (2, 3)
    torch.testing.assert_close(losses["reward"], expected)


def test_reward_log_likelihood_is_told_by_the_sign_of_the_reward(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent()
    posterior, logits = random_posterior(agent, 2, 3)
    batch = random_batch(agent, 2, 3) | {"reward": torch.tensor([[0.0, 2.0, 0.0], [-1.0, 30.0, 0.5]])}
    buffer = MetricBuffer()
    with torch.no_grad():
        agent.world_model.reward.net[1].bias.copy_(torch.linspace(-3, 3, 255))
        losses, metrics = agent.world_model.losses(posterior, logits, batch)
        buffer.add(metrics)
        _, metrics = agent.world_model.losses(posterior, logits, batch | {"reward": torch.ones(2, 3)})
        buffer.add(metrics)
    found = -losses["reward"].flatten().double().numpy()
    assert {name for name in metrics if math.isnan(metrics[name])} == {
        f"wm/reward_log_likelihood/{sign}" for sign in ("negative", "zero")
    }
    row = {name.rpartition("/")[2]: value for name, value in buffer.take().read().items() if "likelihood" in name}
    later = metrics["wm/reward_log_likelihood/positive"].item()
    expected = {"negative": found[3], "zero": found[[0, 2]].mean(), "positive": (found[[1, 4, 5]].mean() + later) / 2}
    assert row == pytest.approx(expected, rel=1e-5)


def test_kl_losses_compare_the_posterior_with_the_prior_of_the_same_step(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent(free_nats=0.0)
    posterior, logits = random_posterior(agent, 2, 3)
    with torch.no_grad():
        losses, _ = agent.world_model.losses(posterior, 3 * logits, random_batch(agent, 2, 3))
        prior = agent.world_model.rssm.prior(posterior.deter).double().numpy()
    p, q = (
        0.99 * np.exp(x) / np.exp(x).sum(-1, keepdims=True) + 0.01 / 4 for x in (3 * logits.double().numpy(), prior)
    )
    expected = (p * np.log(p / q)).sum((-1, -2))
    np.testing.assert_allclose(losses["dyn"], expected, rtol=1e-4)
    np.testing.assert_allclose(losses["rep"], expected, rtol=1e-4)


@pytest.mark.usefixtures("argmax_sampling")
@pytest.mark.parametrize("cameras", [(), ("front",)], ids=["vector", "camera and vector"])
def test_player_latents_equal_the_world_models_on_the_same_sequence(
    make_agent: Callable[..., DreamerV3],
    play: Callable[..., Any],
    randomised: Callable[..., None],
    cameras: tuple[str, ...],
) -> None:
    """Episodes begin in the middle, in each world at another step."""
    agent = make_agent(cameras=cameras)
    randomised(agent.networks)
    player, length = agent.player(3), 14
    latents = []
    act = player.act

    def recorded(obs: dict[str, torch.Tensor], is_first: torch.Tensor) -> torch.Tensor:
        action = act(obs, is_first)
        latents.append(Latent(player.state["deter"], player.state["stoch"]))
        return action

    player.act = recorded
    steps = play(agent, length, player=player, last={(3, 0), (9, 0), (5, 2)}, terminal={(6, 1)})
    obs = {key: torch.stack([step.obs[key] for step in steps], 1) for key in agent.keys.spaces}
    actions = torch.stack([step.action for step in steps], 1)
    previous = torch.cat([torch.zeros_like(actions[:, :1]), actions[:, :-1]], 1)
    is_first = torch.stack([step.is_first for step in steps], 1)
    assert int(is_first.sum()) == 3 + 4
    start = agent.world_model.rssm.initial(3, torch.device("cpu"))
    with torch.no_grad():
        posterior, *_ = agent.world_model.observe(start, previous, obs, is_first)
    torch.testing.assert_close(torch.stack([x.deter for x in latents], 1), posterior.deter, rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.stack([x.stoch for x in latents], 1).argmax(-1), posterior.stoch.argmax(-1))
    # And so the replay holds the same latents, compactly.
    held = agent.replay.storage
    torch.testing.assert_close(held["deter"][:length].transpose(0, 1).float(), posterior.deter, rtol=5e-3, atol=1e-4)
    assert torch.equal(held["stoch"][:length].transpose(0, 1), posterior.stoch.argmax(-1).to(torch.uint8))
