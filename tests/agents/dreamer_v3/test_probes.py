"""Probes on the latents while they are learnt: they see everything, and touch nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3.config import CONTEXT

Make = Callable[..., DreamerV3]
VECTORS = {"state": 5, "privileged_state": 3, "noise": 2}
METRICS = {f"probe/r2/privileged_state/{head}" for head in ("linear", "mlp")}


@pytest.fixture
def make(make_agent: Make) -> Make:
    def call(**options: Any) -> DreamerV3:
        defaults = {"vectors": VECTORS, "observations": ("state",), "probes": ("priv*",), "learning_rate": 1e-3}
        return make_agent(**(defaults | options))

    return call


def collect(agent: DreamerV3, steps: int, hidden: Callable[[Tensor], Tensor] = lambda state: state[:, :3]) -> None:
    """Steps whose ``privileged_state`` is ``hidden(state)``; the player is not shown it."""
    player, generator, none = agent.player(3), torch.Generator().manual_seed(0), torch.zeros(3)
    for t in range(steps):
        state = torch.randn(3, 5, generator=generator)
        first = torch.full((3,), t % 20 == 0)
        action = player.act({"state": state}, first)
        noise = torch.randn(3, 2, generator=generator)
        obs = {"state": state, "privileged_state": hidden(state), "noise": noise}
        agent.add(Step(obs, action, none + 0.1 * t % 1, first, none > 0, none > 0, dict(player.extras)))


def test_probes_change_no_bit_of_anything_else(make: Make) -> None:
    agents = [make(probes=probes) for probes in ((), ("priv*", "noise"))]
    found, states, draws = [], [], []
    for agent in agents:
        torch.manual_seed(7)
        collect(agent, 40)
        found.append([agent.update() for _ in range(4)])
        draws.append(agent._last_draw)
        states.append((agent.state_dict(), torch.get_rng_state()))
    for without, beside in zip(*found, strict=True):
        more = beside.keys() - without.keys()
        assert more >= METRICS
        assert all(name.startswith("probe/") for name in more)
        torch.testing.assert_close(without, {name: beside[name] for name in without}, rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(*draws, strict=True))
    (without, stream), (beside, other) = states
    assert torch.equal(stream, other)
    assert beside.pop("probes")
    ring = beside["replay"]
    torch.testing.assert_close(without["modules"], beside["modules"], rtol=0, atol=0)
    torch.testing.assert_close(without["optimizer"], beside["optimizer"], rtol=0, atol=0)
    assert without["ratio"] == beside["ratio"]
    assert torch.equal(without["replay"]["generator"], ring["generator"])
    for name, ours in agents[0].replay.storage.items():
        assert torch.equal(ours, agents[1].replay.storage[name]), name


def test_the_model_neither_sees_nor_predicts_what_is_probed(make: Make) -> None:
    agent = make()
    assert list(agent.keys.spaces) == list(agent.predicted.spaces) == ["state"]
    assert not agent.networks.only_for_learning
    assert "privileged_state" in agent.replay.storage
    assert "noise" not in agent.replay.storage
    collect(agent, 20)
    assert bool(agent.replay.storage["privileged_state"][:20].any())
    before = agent.update()
    assert "loss/privileged_state" not in before
    assert not any(p is q for p in agent.networks.parameters() for q in agent.probes.heads.parameters())


def test_no_gradient_reaches_the_latents(make: Make) -> None:
    agent = make()
    collect(agent, 20)
    features = torch.randn(4, 6, agent.world_model.rssm.features, requires_grad=True)
    batch = {"privileged_state": torch.randn(4, 6, 3)}
    agent.probes.step(agent.probes.differentiate(features, batch)["probe/loss"], torch.zeros(()))
    assert features.grad is None


@pytest.mark.slow
def test_probes_read_what_is_there_and_no_noise(make: Make) -> None:
    agent = make(probes=("privileged_state", "noise"), learning_rate=3e-3, replay_size=3 * 200, batch_size=16)
    collect(agent, 180)
    metrics = [agent.update() for _ in range(180)]
    late = {
        name: float(torch.stack([m[name] for m in metrics[-20:]]).mean()) for name in metrics[0] if "probe/" in name
    }
    assert late["probe/r2/privileged_state/linear"] > 0.15, late
    assert late["probe/r2/privileged_state/mlp"] > 0.15, late
    assert max(late["probe/r2/noise/linear"], late["probe/r2/noise/mlp"]) < 0.05, late
    assert abs(float(metrics[0]["probe/r2/privileged_state/mlp"])) < 0.2, "it begins as the mean"


def test_the_metric_is_the_explained_share_of_the_whitened_variance(make: Make) -> None:
    agent = make()
    collect(agent, 30, lambda state: 5 + 100 * state[:, :3])
    with torch.no_grad():
        for p in agent.probes.heads.parameters():
            p.add_(0.05 * torch.randn_like(p))
    features = torch.randn(4, 6, agent.world_model.rssm.features)
    data = {"privileged_state": agent.replay.sample(4).data["privileged_state"][:, CONTEXT:]}
    truth = agent.probes.heads["norms"][0](data["privileged_state"]).double()
    expected = {}
    for head in ("linear", "mlp"):
        error = (agent.probes.heads[head][0](features).double() - truth).square().sum()
        expected[f"probe/r2/privileged_state/{head}"] = 1 - error / (truth - truth.mean((0, 1))).square().sum()
    found = agent.probes.differentiate(features, data)
    del found["probe/loss"]
    torch.testing.assert_close(
        found, {name: value.detach().float() for name, value in expected.items()}, rtol=1e-4, atol=1e-4
    )


def test_a_state_goes_on_bit_for_bit(make: Make) -> None:
    agent, other = make(), make(seed=5)
    collect(agent, 30)
    agent.update()
    other.load_state_dict(copy.deepcopy(agent.state_dict()))
    found = []
    for one in (agent, other):
        torch.manual_seed(3)
        found.append([one.update() for _ in range(3)][-1])
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(agent.probes.state_dict(), other.probes.state_dict(), rtol=0, atol=0)


def test_warming_up_leaves_them_as_they_are(make: Make) -> None:
    agent = make()
    collect(agent, 30)
    agent.update()
    before = copy.deepcopy(agent.probes.state_dict())
    agent.warm_up()
    torch.testing.assert_close(agent.probes.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("poisoned", ["privileged_state", "reward"])
def test_what_is_not_finite_moves_no_probe_and_stops_no_learning(make: Make, poisoned: str) -> None:
    agent = make()
    collect(agent, 30)
    agent.update()
    agent.replay.storage[poisoned].fill_(torch.nan)
    before, learnt = copy.deepcopy(agent.probes.state_dict()), copy.deepcopy(agent.networks.state_dict())
    metrics = agent.update()
    torch.testing.assert_close(agent.probes.state_dict(), before, rtol=0, atol=0)
    assert bool(metrics["health/skipped_update"]) == (poisoned == "reward")
    same = all(torch.equal(value, learnt[name]) for name, value in agent.networks.state_dict().items())
    assert same == (poisoned == "reward")


def test_an_agent_that_only_acts_has_none_and_takes_the_same_state(make: Make) -> None:
    agent = make()
    collect(agent, 20)
    agent.update()
    acting = make(probes=())
    assert acting.networks.state_dict().keys() == agent.networks.state_dict().keys()
    acting.load_state_dict(agent.state_dict(replay=False))
    obs, first = {"state": torch.randn(3, 5)}, torch.ones(3, dtype=torch.bool)
    actions = []
    for one in (agent, acting):
        torch.manual_seed(0)
        actions.append(one.player(3).act(obs, first))
    assert torch.equal(*actions)


def test_nothing_is_read_on_the_host(make: Make, no_host_reads: Callable[[], Any]) -> None:
    agent = make()
    collect(agent, 30)
    for _ in range(2):
        agent.update()
    with no_host_reads():
        agent.update()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"probes": ("privileged",)},
            r"'privileged'.*nearest: privileged_state$",
        ),
        ({"cameras": ("front",), "probes": ("*front",)}, "'pixels/front'"),
    ],
)
def test_probes_that_cannot_be(make: Make, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        make(**options)
    assert "\n" not in str(refusal.value)


def test_a_probe_of_what_it_sees_or_predicts_is_one_too(make: Make) -> None:
    agent = make(probes=("state", "noise"), targets=("noise",))
    collect(agent, 20)
    assert {f"probe/r2/{key}/linear" for key in ("state", "noise")} < agent.update().keys()
