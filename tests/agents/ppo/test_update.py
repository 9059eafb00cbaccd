"""Gradient steps: against the algorithm written down once more, what is left out, and what stops them."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch import distributions as reference

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO

LAST, TERMINAL = {(0, 0), (3, 1), (7, 2)}, {(4, 0), (8, 1), (2, 2)}


def learn(agent: PPO) -> list[dict[str, Tensor]]:
    return [agent.update() for _ in range(agent.updates_due(0))]


# --- the algorithm, once more -----------------------------------------------------------------------------------------


def advantages(agent: PPO) -> tuple[Tensor, Tensor]:
    """Advantages by the recursion of Schulman et al. (2016), one number at a time; ``(T, N)`` each, targets second."""
    c = agent.config
    read = {key: agent.rollout.trajectory(key) for key in ("reward", "value", "is_last", "is_terminal")}
    steps, worlds = len(read["reward"]) - 1, agent.num_envs
    advantage = torch.zeros(steps, worlds)
    for n in range(worlds):
        later = 0.0
        for t in reversed(range(steps)):
            if read["is_last"][t, n]:
                later = 0.0
                continue
            after = 0.0 if read["is_terminal"][t + 1, n] else read["value"][t + 1, n].item()
            reward = c.reward_scaling * read["reward"][t + 1, n].item()
            later = 0.0 if read["is_last"][t + 1, n] else later
            later = reward + c.discount * after - read["value"][t, n].item() + 0.95 * c.discount * later
            advantage[t, n] = later
    return advantage, advantage + read["value"][:-1]


def total_loss(agent: PPO, networks: Any, row: list[tuple[int, int]], options: dict[str, Any]) -> Tensor:
    c = agent.config
    t, n = (torch.tensor(x) for x in zip(*row, strict=True))
    read = {key: agent.rollout.trajectory(key)[t, n] for key in agent.rollout.storage}
    advantage, target = (x[t, n] for x in advantages(agent))
    kept = ~read["is_last"]
    features = networks.policy_head(networks.policy_trunk(read))
    if agent.codec.discrete:
        policy = reference.OneHotCategorical(logits=features)
        log_prob, entropy = policy.log_prob(read["raw_action"]), policy.entropy()
    else:
        policy = reference.Normal(features, networks.log_std.exp())
        log_prob, entropy = policy.log_prob(read["raw_action"]).sum(-1), policy.entropy().sum(-1)
    value = networks.value_head(networks.value_trunk(read))[:, 0]
    advantage, log_prob, entropy, value = advantage[kept], log_prob[kept], entropy[kept], value[kept]
    target, old, old_value = target[kept], read["log_prob"][kept], read["value"][kept]
    if options.get("normalise_advantage", True):
        advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    ratio = torch.exp(log_prob - old)
    objective = torch.min(ratio * advantage, torch.clamp(ratio, 1 - c.clip, 1 + c.clip) * advantage)
    error = (value - target) ** 2
    if clip := options.get("value_clip"):
        error = torch.max(error, (old_value + torch.clamp(value - old_value, -clip, clip) - target) ** 2)
    return -objective.mean() + c.value_scale * 0.5 * error.mean() - c.entropy_scale * entropy.mean()


@pytest.mark.parametrize(
    "options",
    [
        {"distribution": "clipped_normal"},
        {"actions": spaces.Discrete(3), "value_clip": 0.05, "shared_trunk": True},
        {"distribution": "clipped_normal", "normalise_advantage": False, "reward_scaling": 0.1, "discount": 0.8},
        {"distribution": "clipped_normal", "cameras": ("front",), "max_grad_norm": 0.1, "clip": 0.05, "adam_eps": 1e-3},
    ],
    ids=["plain", "discrete, value clip, shared", "advantages and rewards as they are", "camera, short gradients"],
)
def test_two_rollouts_of_updates_are_those_of_the_algorithm(
    options: dict[str, Any], make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Losses from torch.distributions, plain Adam, and loops over steps, fed with the same minibatches."""
    agent = make_ppo(**options, learning_rate=3e-3, value_scale=0.7, entropy_scale=0.03)
    networks = deepcopy(agent.networks)
    optimizer = torch.optim.Adam(networks.parameters(), lr=3e-3, eps=agent.config.adam_eps, foreach=False)
    player, steps = agent.player(3), None
    for round_ in range(2):
        steps = fill(agent, last=LAST, terminal=TERMINAL, seed=round_, player=player, after=steps)
        for _ in range(agent.updates_due(0)):
            kept, turn = deepcopy(agent.rollout), agent.updates % agent.config.minibatches
            metrics = agent.update()
            rows = [(i // 3, i % 3) for i in agent.order[6 * turn : 6 * turn + 6].tolist()]
            current, agent.rollout = agent.rollout, kept
            loss = total_loss(agent, networks, rows, options)
            agent.rollout = current
            optimizer.zero_grad()
            loss.backward()
            norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in networks.parameters()))
            for p in networks.parameters():
                p.grad *= min(1.0, agent.config.max_grad_norm / norm)
            optimizer.step()
            assert metrics["loss/total"].item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
            assert metrics["grad_norm/total"].item() == pytest.approx(norm, rel=1e-3)
        for (name, ours), theirs in zip(agent.networks.named_parameters(), networks.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3, msg=name)
        networks.load_state_dict(agent.networks.state_dict())  # the normaliser, and no drift


@pytest.mark.parametrize("kind", [{}, {"actions": spaces.Discrete(2)}], ids=["continuous", "discrete"])
def test_it_learns_what_to_do_where(kind: dict[str, Any], make_ppo: Callable[..., PPO]) -> None:
    """The reward of a step is for the action before it, given what was seen before it."""
    torch.manual_seed(0)
    agent = make_ppo(**{"actions": 1} | kind, vectors={"state": 1}, num_envs=16, rollout_length=16, learning_rate=1e-2)
    player, generator = agent.player(16), torch.Generator().manual_seed(0)
    ended = torch.ones(16, dtype=torch.bool)
    reward, rewards = torch.zeros(16), []
    for t in range(16 * 12 + 1):
        sign = torch.randint(0, 2, (16, 1), generator=generator).float() * 2 - 1
        last = (torch.arange(16) + t) % 7 == 0
        action = player.act({"state": sign}, ended)
        agent.add(Step({"state": sign}, action, reward, ended, last, last, dict(player.extras)))
        chosen = action * 2.0 - 1 if agent.codec.discrete else action[:, 0]
        right = chosen * sign[:, 0]
        reward = torch.where(last, 5 * torch.randn(16, generator=generator), right)  # nonsense after ignored actions
        rewards.append(right[~last].mean().item())
        ended = last
        learn(agent)
    assert abs(sum(rewards[:16]) / 16) < 0.25
    assert sum(rewards[-16:]) / 16 > 0.7


# --- ignored steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"value_clip": 0.1, "distribution": "clipped_normal"},
        {"actions": spaces.Discrete(3), "cameras": ("front",), "vectors": {}},
        {"cameras": ("front",), "vectors": {}},
    ],
    ids=["clipped normal", "discrete camera", "camera"],
)
def test_the_ignored_step_changes_nothing_anywhere(
    options: dict[str, Any], make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    """Neither what was drawn, its log-probability, the reward after it nor, after a termination, value and image."""
    outcomes = []
    for changed in (False, True):
        torch.manual_seed(0)
        agent = make_ppo(**options)
        fill(agent, last=LAST, terminal=TERMINAL)
        storage = {key: agent.rollout.trajectory(key) for key in agent.rollout.storage}
        if changed:
            for t, n in {end for end in LAST | TERMINAL if end[0] < 8}:
                storage["raw_action"][t, n] = storage["raw_action"][t, n].flip(0) + (0 if agent.codec.discrete else 0.7)
                storage["log_prob"][t, n] += 1.3
                storage["reward"][t + 1, n] -= 50
            for t, n in {end for end in TERMINAL if end[0] < 8}:
                storage["value"][t, n] += 40
                for key in agent.keys.images:
                    storage[key][t, n] = 255 - storage[key][t, n]
        torch.manual_seed(1)
        metrics = learn(agent)
        outcomes.append((snapshot(agent), metrics))
    (before, old), (after, new) = outcomes
    assert not after.changed(before)
    for a, b in zip(old, new, strict=True):
        assert a.keys() == b.keys()
        assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert old[0]["ppo/valid_fraction"] < 1


def test_valid_fraction_is_the_share_of_steps_that_count(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(minibatches=1, epochs=1)
    fill(agent, last=LAST, terminal=TERMINAL)  # six endings, one of them in the step that bootstraps
    assert agent.update()["ppo/valid_fraction"].item() == pytest.approx(19 / 24)


def test_a_rollout_of_nothing_but_ignored_steps_changes_no_parameter(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    agent = make_ppo(rollout_length=1, minibatches=1, epochs=1)
    before = snapshot(agent).parameters
    fill(agent, last={(0, 0), (0, 1), (0, 2)})
    metrics = agent.update()
    assert all(torch.equal(p, before[name]) for name, p in agent.networks.named_parameters())
    assert all(bool(value.isfinite()) for value in metrics.values())


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_by_definition(make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> None:
    agent = make_ppo(minibatches=1, epochs=1, distribution="clipped_normal", clip=0.2)
    fill(agent, last=LAST, terminal=TERMINAL)
    agent.rollout.trajectory("log_prob")[:-1] += 0.4 * torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    agent.networks.log_std.data += torch.tensor([0.3, -0.2])
    rollout = {key: agent.rollout.trajectory(key)[:-1].clone() for key in agent.rollout.storage}
    _, target = advantages(agent)
    kept = ~rollout["is_last"]
    with torch.no_grad():
        policy, value = agent.networks({"state": rollout["state"].flatten(0, 1)})
        log_ratio = (policy.log_prob(rollout["raw_action"].flatten(0, 1)).view(8, 3) - rollout["log_prob"])[kept]
        value, target = value.view(8, 3)[kept], target[kept]
    metrics = {name: x.item() for name, x in agent.update().items()}
    assert metrics["ppo/approx_kl"] == pytest.approx((log_ratio.exp() - 1 - log_ratio).mean().item(), rel=1e-4)
    assert metrics["ppo/clip_fraction"] == pytest.approx(((log_ratio.exp() - 1).abs() > 0.2).float().mean().item())
    assert 0 < metrics["ppo/clip_fraction"] < 1
    assert metrics["critic/value"] == pytest.approx(value.mean().item(), rel=1e-4)
    explained = 1 - (target - value).var().item() / target.var().item()
    assert metrics["critic/explained_variance"] == pytest.approx(explained, rel=1e-3)
    stds = [math.exp(0.3), math.exp(-0.2)]
    assert metrics["actor/std"] == pytest.approx(sum(stds) / 2, rel=1e-5)
    entropy = sum(0.5 * math.log(2 * math.pi * math.e * std**2) for std in stds)
    assert metrics["actor/entropy"] == metrics["loss/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert metrics["opt/learning_rate"] == pytest.approx(1e-3)
    assert metrics["ppo/skipped"] == metrics["health/nonfinite_loss"] == 0


def test_metrics_are_scalars_without_gradient_that_later_updates_leave_alone(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(kl_control="adaptive_lr", kl_target=1e3, learning_rate=5e-4)
    fill(agent)
    updates = []
    for _ in range(8):
        metrics = agent.update()
        updates.append((metrics, {name: value.clone() for name, value in metrics.items()}))
    groups = {"loss", "ppo", "actor", "critic", "grad_norm", "opt", "health"}
    for metrics, copy in updates:
        assert {name.split("/")[0] for name in metrics} == groups
        for name, value in metrics.items():
            assert value.shape == (), name
            assert not value.requires_grad, name
            assert torch.equal(value, copy[name]), name
    assert len({metrics["opt/learning_rate"].item() for metrics, _ in updates}) > 4
