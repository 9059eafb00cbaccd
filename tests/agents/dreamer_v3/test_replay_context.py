"""Stored latents: what a trained sequence starts from, and what is written back after the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3 import agent as agent_module
from sheeplike.agents.dreamer_v3.rssm import Latent

pytestmark = pytest.mark.usefixtures("argmax_sampling")


@pytest.fixture
def agent(make_agent: Callable[..., DreamerV3], play: Callable[..., Any], randomised: Callable[..., None]) -> DreamerV3:
    agent = make_agent(cameras=("front",))
    randomised(agent.networks)
    play(agent, 40, last={(8, 0), (20, 1)}, terminal={(13, 2), (26, 0)})
    return agent


def test_storage_is_compact(agent: DreamerV3) -> None:
    held = {key: (tuple(ring.shape[2:]), ring.dtype) for key, ring in agent.replay.storage.items()}
    assert held == {
        "pixels/front": ((48, 48, 3), torch.uint8),
        "state": ((5,), torch.float32),
        "action": ((2,), torch.float32),
        "reward": ((), torch.float32),
        "is_first": ((), torch.bool),
        "is_last": ((), torch.bool),
        "is_terminal": ((), torch.bool),
        "deter": ((64,), torch.bfloat16),
        "stoch": ((32,), torch.uint8),
    }


def test_first_trained_step_starts_from_the_stored_latent_and_action_and_nothing_else_is_forced(
    agent: DreamerV3, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = agent.world_model.observe

    def spy(latent: Latent, action: Tensor, obs: dict[str, Tensor], is_first: Tensor) -> Any:
        calls.append((latent, action, {key: obs[key] for key in ("state", "pixels/front")}, is_first))
        return original(latent, action, obs, is_first)

    monkeypatch.setattr(agent.world_model, "observe", spy)
    data = agent.replay.sample(6).data
    agent.losses(data)
    ((latent, action, obs, is_first),) = calls
    assert torch.equal(latent.deter, data["deter"][:, 0].float())
    assert torch.equal(latent.stoch, torch.eye(4)[data["stoch"][:, 0].long()])
    assert torch.equal(action, data["action"][:, :-1])  # step 1 is reached by the action stored at step 0
    assert torch.equal(is_first, data["is_first"][:, 1:])
    for key, value in obs.items():
        assert torch.equal(value, data[key][:, 1:])


@torch.no_grad()
def test_the_context_step_counts_through_its_latent_and_action(agent: DreamerV3) -> None:
    data = agent.replay.sample(6).data
    data["is_first"][:] = False
    _, _, before = agent.losses(data)
    for key in ("deter", "stoch", "action"):
        changed = data[key].clone()
        changed[:, 0] = (changed[:, 0] + 1) % 4
        _, _, after = agent.losses(data | {key: changed})
        assert not torch.allclose(before.deter, after.deter), key


@torch.no_grad()
def test_nothing_else_of_the_context_step_counts(agent: DreamerV3) -> None:
    data = agent.replay.sample(6).data
    torch.manual_seed(0)
    losses, _, before = agent.losses(data)
    for key in ("state", "pixels/front", "reward", "is_first", "is_last", "is_terminal"):
        changed = data[key].clone()
        changed[:, 0] = ~changed[:, 0] if changed.dtype == torch.bool else changed[:, 0] + 1
        agent.actor_critic.return_scale.range.zero_()
        torch.manual_seed(0)
        again, _, after = agent.losses(data | {key: changed})
        assert torch.equal(before.features, after.features), key
        for name, loss in losses.items():
            torch.testing.assert_close(loss, again[name])


def test_imagination_starts_are_batch_major_like_the_returns_that_bootstrap_the_replayed_values(
    agent: DreamerV3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start's return is replaced by a number that names the start; it must come back at that start's step."""
    started: list[Tensor] = []
    bootstraps: list[Tensor] = []
    imagine, loss = agent.actor_critic.imagine, agent_module.imagination_loss

    def imagine_spy(rssm: Any, start: Latent, length: int, policy: Any) -> Any:
        started.append(start.deter.sum(-1))
        return imagine(rssm, start, length, policy)

    def loss_spy(*args: Any, **kwargs: Any) -> Any:
        losses, returns, metrics = loss(*args, **kwargs)
        return losses, started[0][:, None].expand_as(returns), metrics

    def replay_spy(last: Tensor, terminal: Tensor, reward: Tensor, bootstrap: Tensor, *args: Any, **kwargs: Any) -> Any:
        bootstraps.append(bootstrap)
        return torch.zeros(())

    monkeypatch.setattr(agent.actor_critic, "imagine", imagine_spy)
    monkeypatch.setattr(agent_module, "imagination_loss", loss_spy)
    monkeypatch.setattr(agent_module, "replay_value_loss", replay_spy)
    _, _, posterior = agent.losses(agent.replay.sample(4).data)
    assert bootstraps[0].shape == (4, 6)
    assert torch.equal(bootstraps[0], posterior.deter.sum(-1).detach())


def test_imagination_reads_means_of_reward_and_probabilities_of_continuing_for_every_state(
    agent: DreamerV3, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Tensor] = {}
    imagine, loss = agent.actor_critic.imagine, agent_module.imagination_loss

    def imagine_spy(*args: Any) -> Any:
        seen["features"], seen["action"] = imagine(*args)
        return seen["features"], seen["action"]

    def loss_spy(action: Tensor, reward: Tensor, cont: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen["reward"], seen["cont"] = reward, cont
        return loss(action, reward, cont, *args, **kwargs)

    monkeypatch.setattr(agent.actor_critic, "imagine", imagine_spy)
    monkeypatch.setattr(agent_module, "imagination_loss", loss_spy)
    _, _, posterior = agent.losses(agent.replay.sample(4).data)
    world, features = agent.world_model, seen["features"]
    assert features.shape == (4 * 6, 3 + 1, 64 + 32 * 4)  # 3 imagined steps: states 0 to 3
    assert seen["action"].shape == (4 * 6, 3 + 1, 2)
    assert not features.requires_grad
    assert torch.equal(features[:, 0], posterior.features.detach().flatten(0, 1))
    reward = world.reward(features)
    mean = (reward.log_probs.double().exp() * reward.bins.double()).sum(-1)
    np.testing.assert_allclose(seen["reward"], mean.detach(), rtol=1e-3, atol=1e-2)
    logit = world.cont.net(features).double().squeeze(-1)
    np.testing.assert_allclose(seen["cont"], (1 / (1 + torch.exp(-logit))).detach(), rtol=1e-5)
    # Each state follows from the one before by the action chosen in it.
    for step in range(3):
        deter, stoch = features[:, step].split([64, 128], -1)
        following = world.rssm.imagine(Latent(deter, stoch.unflatten(-1, (32, 4))), seen["action"][:, step])
        torch.testing.assert_close(features[:, step + 1], following.features.detach())


def test_new_latents_are_written_back_to_their_worlds_and_times(agent: DreamerV3) -> None:
    """40 steps in sequences of 7 leave 5 fresh ones per world; a batch of 4 takes those, which do not overlap."""
    before = {key: ring.clone() for key, ring in agent.replay.storage.items()}
    captured: dict[str, Any] = {}
    gather, losses = agent.replay.gather, agent.losses

    def gather_spy(*fetched: Any) -> Any:
        captured["sample"] = gather(*fetched)
        return captured["sample"]

    def losses_spy(data: dict[str, Tensor]) -> Any:
        captured["posterior"] = losses(data)
        return captured["posterior"]

    agent.replay.gather, agent.losses = gather_spy, losses_spy
    agent.update()
    worlds, times, posterior = captured["sample"].envs, captured["sample"].times, captured["posterior"][2]
    changed = 0
    for row in range(4):
        for step in range(1, 7):  # step 0 is the context, which keeps what it had
            slot = int(times[row, step]), int(worlds[row])
            before["deter"][slot] = posterior.deter[row, step - 1].detach().bfloat16()
            before["stoch"][slot] = posterior.stoch[row, step - 1].argmax(-1).to(torch.uint8)
            changed += 1
    assert changed == 24
    for key, ring in agent.replay.storage.items():
        assert torch.equal(ring, before[key]), key


def test_written_latents_are_what_the_next_update_starts_from(agent: DreamerV3) -> None:
    with torch.no_grad():
        for p in agent.world_model.rssm.parameters():
            p.mul_(1.5)  # the model has changed since the latents were stored
    sample = agent.replay.sample(1)
    _, _, posterior = agent.losses(sample.data)
    stale = agent.replay.storage["deter"][sample.times[0, 3], sample.envs[0]].float()
    latents = agent_module.pack_latent(posterior.detach())
    agent.replay.write_back(sample.envs, sample.times[:, 1:], latents)
    fresh = agent.replay.storage["deter"][sample.times[0, 3], sample.envs[0]].float()
    torch.testing.assert_close(fresh, posterior.deter[0, 2].detach(), rtol=5e-3, atol=1e-3)
    assert not torch.allclose(fresh, stale, rtol=5e-3, atol=1e-3)


def test_actions_are_stored_as_they_were_taken_but_zeroed_on_last_steps(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agent = make_agent()
    mean = [m for m in agent.actor_critic.policy.modules() if isinstance(m, torch.nn.Linear)][-2]
    torch.nn.init.constant_(mean.bias, 3.0)  # means of 0.995: many samples lie beyond 1
    steps = play(agent, 30, last={(4, 0)}, terminal={(7, 1)})
    stored = agent.replay.storage["action"]
    assert float(torch.stack([step.action for step in steps]).max()) == 1.0
    for t, step in enumerate(steps):
        expected = step.action * (~step.is_last)[:, None]
        assert torch.equal(stored[t], expected)
    assert not stored[4, 0].any()
    assert not stored[7, 1].any()
    assert bool(stored[4, 1].any())


def test_discrete_actions_are_stored_as_one_hot(make_agent: Callable[..., DreamerV3], play: Callable[..., Any]) -> None:
    agent = make_agent(actions=spaces.Discrete(3))
    steps = play(agent, 12, last={(4, 0)})
    for t, step in enumerate(steps):
        assert step.action.dtype == torch.int64
        expected = torch.eye(3)[step.action] * (~step.is_last)[:, None]
        assert torch.equal(agent.replay.storage["action"][t], expected)


def test_rewards_endings_and_observations_are_stored_with_the_step_they_arrived_at(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agent = make_agent(cameras=("front",))
    steps: list[Step] = play(agent, 12, last={(4, 0)}, terminal={(7, 1)})
    for t, step in enumerate(steps):
        held = {key: ring[t] for key, ring in agent.replay.storage.items()}
        for name in ("reward", "is_first", "is_last", "is_terminal"):
            assert torch.equal(held[name], getattr(step, name))
        for key, value in step.obs.items():
            assert torch.equal(held[key], value)
        assert torch.equal(held["deter"], step.extras["deter"])
        assert torch.equal(held["stoch"], step.extras["stoch"])
