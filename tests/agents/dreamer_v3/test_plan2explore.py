"""Plan2Explore: the ensemble, what each loss teaches, and who acts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3.config import Plan2ExploreConfig
from sheeplike.agents.dreamer_v3.plan2explore import Ensemble, Plan2Explore
from sheeplike.options import InvalidOption


@pytest.fixture
def make(
    make_agent: Callable[..., Plan2Explore], play: Callable[..., object], randomised: Callable[..., None]
) -> Callable[..., Plan2Explore]:
    """Builds an explorer with experience and without outputs that are zero."""

    def build(**options: Any) -> Plan2Explore:
        agent = make_agent(agent=Plan2Explore, config=Plan2ExploreConfig, free_nats=0.0, members=3, **options)
        randomised(agent.networks, 0.05)
        play(agent, 20, last={(6, 0)}, terminal={(9, 1)})
        return agent

    return build


def reached(agent: DreamerV3, loss: Tensor) -> set[str]:
    """Return the modules to which the gradient of a loss comes."""
    names, params = zip(*((n, p) for n, p in agent.networks.named_parameters() if p.requires_grad), strict=True)
    found = torch.autograd.grad(loss.mean(), params, allow_unused=True, retain_graph=True)
    return {
        ".".join(name.split(".")[: 1 if name.startswith(("ensemble", "world")) else 2])
        for name, gradient in zip(names, found, strict=True)
        if gradient is not None and bool(gradient.any())
    }


def test_members_are_separate_networks_computed_together() -> None:
    torch.manual_seed(0)
    ensemble, x = Ensemble(3, 5, 8, 4), torch.randn(7, 5)
    together = ensemble(x)
    for member in range(3):
        y = x
        for number, (weight, bias) in enumerate(zip(ensemble.weights, ensemble.biases, strict=True)):
            if number:
                y = F.silu(y / (y.square().mean(-1, keepdim=True) + 1e-4).sqrt())
            y = y @ weight[member] + bias[member]
        torch.testing.assert_close(together[member], y)
    torch.testing.assert_close(ensemble.disagreement(x), together.std(0).mean(-1))
    (gradient,) = torch.autograd.grad(together[1].sum(), ensemble.weights[0])
    assert gradient[1].any()
    assert not gradient[0].any()
    assert not gradient[2].any()


def test_members_agree_where_they_have_learnt_and_not_elsewhere() -> None:
    torch.manual_seed(0)
    ensemble = Ensemble(5, 6, 32, 4)
    known, unknown = torch.rand(256, 6) * torch.tensor([1, 1, 1, 0, 0, 0]), torch.rand(256, 6) * 3
    truth, optimizer = known[:, :4].sin(), torch.optim.Adam(ensemble.parameters(), 3e-3)
    for _ in range(500):
        optimizer.zero_grad()
        (ensemble(known) - truth).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        assert ensemble.disagreement(unknown).mean() > 5 * ensemble.disagreement(known).mean()


def test_each_loss_teaches_its_own_network(make) -> None:
    agent = make()
    losses, _, _ = agent.losses(agent.replay.sample(4).data)
    assert reached(agent, losses["ensemble"]) == {"ensemble"}
    assert reached(agent, losses["explorer_policy"]) == {"explorer.policy"}
    assert reached(agent, losses["explorer_value"]) == {"explorer.value"}
    for name in losses.keys() - {"ensemble", "explorer_policy", "explorer_value"}:
        assert reached(agent, losses[name]) <= {"world_model", "actor_critic.policy", "actor_critic.value"}


def test_the_world_model_and_the_task_learn_as_in_dreamer(make, make_agent: Callable[..., DreamerV3]) -> None:
    explorer = make()
    dreamer = make_agent(free_nats=0.0)
    own = dreamer.networks.state_dict()
    dreamer.networks.load_state_dict({name: explorer.networks.state_dict()[name] for name in own})
    data = explorer.replay.sample(4).data
    found = []
    for agent in (dreamer, explorer):
        torch.manual_seed(3)
        found.append(agent.losses(data)[0])
    for name, loss in found[0].items():
        assert torch.equal(loss, found[1][name]), name


def test_the_first_step_after_an_episode_is_not_predicted(make) -> None:
    agent = make()
    data = agent.replay.sample(4).data
    torch.manual_seed(0)
    losses, _, _ = agent.losses(data)
    assert torch.equal(losses["ensemble"] == 0, data["is_first"][:, 2:])


@pytest.mark.parametrize(("share", "follows", "ignores"), [(1.0, "ensemble", "reward"), (0.0, "reward", "ensemble")])
def test_the_share_decides_what_the_explorer_follows(make, share: float, follows: str, ignores: str) -> None:
    agent = make(explore_scale=share)
    data = agent.replay.sample(4).data

    def policy_loss() -> Tensor:
        torch.manual_seed(0)
        for behaviour in agent.networks.behaviours.values():
            behaviour.return_scale.range.zero_()
        return agent.losses(data)[0]["explorer_policy"]

    modules = {"ensemble": agent.networks.ensemble, "reward": agent.world_model.reward}
    before = policy_loss()
    for changed, same in ((ignores, True), (follows, False)):
        with torch.no_grad():
            for parameter in modules[changed].parameters():
                parameter.add_(torch.randn_like(parameter))
        assert torch.equal(policy_loss(), before) == same, changed


def test_the_share_falls_to_nothing(make) -> None:
    agent = make(explore_scale=0.8, explore_steps=1000)
    for steps, expected in ((250, 0.6), (750, 0.2), (1000, 0.0), (5000, 0.0)):
        agent.updates_due(steps)
        assert agent.update()["explorer/share"].item() == pytest.approx(expected)


def test_the_share_goes_on_in_a_resumed_run(make) -> None:
    agent, resumed = make(explore_steps=1000), make(explore_steps=1000)
    agent.updates_due(500)
    resumed.load_state_dict(agent.state_dict())
    assert resumed.update()["explorer/share"].item() == pytest.approx(0.5)


def test_the_explorer_acts_in_training_and_the_task_in_evaluation(make) -> None:
    agent = make()
    obs = {key: torch.zeros(3, *space.shape) for key, space in agent.keys.spaces.items()}
    first = torch.ones(3, dtype=torch.bool)

    def actions() -> list[Tensor]:
        found = []
        for explore in (True, False):
            torch.manual_seed(0)
            found.append(agent.player(3, explore=explore).act(obs, first, sample=False))
        return found

    before = actions()
    with torch.no_grad():
        for parameter in agent.networks.explorer.policy.parameters():
            parameter.add_(0.3)
    after = actions()
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_acting_and_its_losses_compile_whole(make) -> None:
    agent = make()
    obs = {key: torch.zeros(3, *space.shape) for key, space in agent.keys.spaces.items()}
    state, first = agent.networks.initial(3), torch.ones(3, dtype=torch.bool)
    features, actions = torch.randn(12, 4, agent.world_model.rssm.features), torch.randn(12, 4, 2)
    for function, arguments in (
        (agent.networks.explore, (state, obs, first)),
        (agent.explorer_losses, (features, actions)),
    ):
        torch.manual_seed(0)
        agent.actor_critic.return_scale.range.zero_()
        agent.networks.explorer.return_scale.range.zero_()
        expected = function(*arguments)
        torch.manual_seed(0)
        agent.networks.explorer.return_scale.range.zero_()
        found = torch.compile(function, backend="eager", fullgraph=True)(*arguments)
        for x, y in zip(torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True):
            torch.testing.assert_close(x, y)


def test_the_explorer_follows_both_advantages(make_agent: Callable[..., Plan2Explore]) -> None:
    """Against losses computed step by step; new values are exactly 0, so that returns are sums of rewards."""
    torch.manual_seed(0)
    agent = make_agent(agent=Plan2Explore, config=Plan2ExploreConfig, members=3, entropy_scale=0.01)
    features, actions = torch.randn(5, 4, agent.world_model.rssm.features), torch.randn(5, 4, 2)
    rewards = torch.randn(5, 4)
    agent.imagined_reward = lambda features, actions: rewards
    agent.networks.share.fill_(0.25)
    own, task = agent.networks.explorer.return_scale, agent.actor_critic.return_scale
    task.range.copy_(torch.tensor([0.0, 3.0]))
    with torch.no_grad():
        alive = agent.world_model.cont(features).prob()
        inputs = torch.cat([features, actions.clamp(-1, 1)], -1)
        # The reward of state i + 1 is the disagreement about what action i does in state i.
        bonus = torch.stack([agent.networks.ensemble(inputs[:, i]).std(0).mean(-1) for i in range(3)], 1)

        def returns(after: Tensor) -> Tensor:
            last, found = torch.zeros(5), []
            for i in reversed(range(3)):
                last = after[:, i] + 0.95 * alive[:, i + 1] * last
                found.append(last)
            return torch.stack(found[::-1], 1)

        sought, asked = returns(bonus), returns(rewards[:, 1:])
        spread = copy.deepcopy(own).update(sought)
        policy = agent.networks.explorer.policy(features)
        advantage = 0.25 * sought / spread + 0.75 * asked / 3
        score = policy.log_prob(actions)[:, :-1] * advantage + 0.01 * policy.entropy()[:, :-1]
    losses, metrics = agent.explorer_losses(features, actions)
    torch.testing.assert_close(losses["explorer_policy"], -alive.cumprod(1)[:, :-1] * score)
    torch.testing.assert_close(metrics["explorer/imagined_return"], sought.mean())
    torch.testing.assert_close(own.current(), spread)
    assert task.range.tolist() == [0.0, 3.0], "the task's scale is that of the task's own returns"


def test_the_ensemble_predicts_what_an_action_leads_to(make) -> None:
    agent = make()
    data = agent.replay.sample(4).data
    torch.manual_seed(0)
    losses, _, posterior = agent.losses(data)
    for time in range(5):
        inputs = torch.cat([posterior.features[:, time], data["action"][:, 1 + time].clamp(-1, 1)], -1)
        error = (agent.networks.ensemble(inputs) - posterior.stoch[:, time + 1].flatten(-2)).square().sum((0, -1))
        within = ~data["is_first"][:, time + 2]
        torch.testing.assert_close(losses["ensemble"][within, time], error[within])


def test_replayed_returns_of_the_explorer_do_not_teach_the_tasks_critic(make) -> None:
    agent = make()
    losses, _, _ = agent.losses(agent.replay.sample(4).data)
    value = list(agent.actor_critic.value.parameters())
    _, total = agent.total(losses)
    expected = torch.autograd.grad(losses["value"].mean(), value, retain_graph=True)
    for found, own in zip(torch.autograd.grad(total, value), expected, strict=True):
        torch.testing.assert_close(found, own)


def test_a_skipped_update_leaves_both_behaviours(make) -> None:
    agent = make()
    agent.update()
    before = {name: value.clone() for name, value in agent.networks.state_dict().items()}
    agent.replay.storage["reward"].fill_(torch.inf)
    assert agent.update()["health/skipped_update"] == 1
    for name, value in agent.networks.state_dict().items():
        assert torch.equal(value, before[name]), name
    agent.replay.storage["reward"].zero_()
    agent.update()
    after = agent.networks.state_dict()
    for name in ("explorer.slow_value.net.1.bias", "explorer.policy.net.0.weight", "ensemble.weights.0"):
        assert not torch.equal(after[name], before[name]), name


def test_it_learns_on_one_device() -> None:
    with pytest.raises(InvalidOption):
        Plan2ExploreConfig().divide(2, 4)
