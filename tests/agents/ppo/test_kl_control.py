"""Limits of learning: a policy that has moved too far, and gradients that are no numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO

TARGET = 0.01


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_ppo(make_ppo: Callable[..., PPO], request: pytest.FixtureRequest) -> Callable[..., PPO]:
    """On both kinds of device: fused Adam, which skips the steps, is another implementation on each."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return partial(make_ppo, device=request.param)


def pretend(agent: PPO, kl: float) -> None:
    """Change what was stored so that the estimate of the first update, r - 1 - log r everywhere, is ``kl``."""
    low, high = 0.0, 3.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle) - 1 - middle < kl else (low, middle)
    agent.rollout.trajectory("log_prob")[:] -= low


@pytest.mark.parametrize(
    ("kl", "start", "expected"),
    [
        (2.1 * TARGET, 1e-3, 1e-3 / 1.5),
        (1.9 * TARGET, 1e-3, 1e-3),
        (0.55 * TARGET, 1e-3, 1e-3),
        (0.45 * TARGET, 1e-3, 1.5e-3),
        (2.1 * TARGET, 1.2e-5, 1e-5),
        (0.45 * TARGET, 9e-3, 1e-2),
    ],
)
def test_adaptive_lr_moves_the_learning_rate_as_brax_does(
    kl: float,
    start: float,
    expected: float,
    make_ppo: Callable[..., PPO],
    fill: Callable[..., list[Step]],
    snapshot: Callable[..., Any],
) -> None:
    """Changes by 1.5 beyond twice the target and below half of it, from 1e-5 to 1e-2, for the step itself too."""
    agent = make_ppo(kl_control="adaptive_lr", kl_target=TARGET, learning_rate=start, minibatches=1, epochs=1)
    fill(agent)
    pretend(agent, kl)
    before = snapshot(agent).parameters
    metrics = agent.update()
    assert metrics["ppo/approx_kl"].item() == pytest.approx(kl, rel=1e-2)
    assert metrics["opt/learning_rate"].item() == pytest.approx(expected, rel=1e-5)
    assert agent.optimizer.learning_rate().item() == pytest.approx(expected, rel=1e-5)
    # The first step of Adam moves a parameter by the learning rate, wherever its gradient is not tiny.
    moved = max((p - before[name]).abs().max().item() for name, p in snapshot(agent).parameters.items())
    assert moved == pytest.approx(expected, rel=0.02)


def test_adaptive_lr_stays_where_nothing_was_measured(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    """A divergence of exactly zero, as of a minibatch of ignored steps, says nothing; so has Brax."""
    agent = make_ppo(kl_control="adaptive_lr", rollout_length=1, minibatches=1, epochs=1)
    fill(agent, last={(0, 0), (0, 1), (0, 2)})
    metrics = agent.update()
    assert metrics["ppo/approx_kl"] == 0
    assert metrics["opt/learning_rate"].item() == pytest.approx(1e-3)


@pytest.mark.parametrize("control", ["none", "early_stop"])
def test_the_learning_rate_stays_otherwise(
    control: str, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    agent = make_ppo(kl_control=control)
    fill(agent)
    pretend(agent, 1.0)
    rates = {agent.update()["opt/learning_rate"].item() for _ in range(8)} | {agent.optimizer.learning_rate().item()}
    assert list(rates) == pytest.approx([1e-3])


@pytest.mark.parametrize(
    ("control", "kl", "stops"),
    [
        ("early_stop", 1.6 * TARGET, True),
        ("early_stop", 1.4 * TARGET, False),
        ("none", 100 * TARGET, False),
        ("adaptive_lr", 100 * TARGET, False),
    ],
)
def test_early_stop_begins_with_the_update_that_finds_the_policy_too_far_away(
    control: str,
    kl: float,
    stops: bool,
    make_ppo: Callable[..., PPO],
    fill: Callable[..., list[Step]],
    snapshot: Callable[..., Any],
) -> None:
    agent = make_ppo(kl_control=control, kl_target=TARGET)
    fill(agent)
    agent.update()
    pretend(agent, kl)
    before = snapshot(agent)
    assert agent.update()["ppo/skipped"].item() == float(stops)
    moved = {name for name in snapshot(agent).changed(before) if name in before.parameters}
    assert moved == (set() if stops else before.parameters.keys())


def test_after_early_stop_nothing_changes_until_the_next_rollout(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    """Parameters and Adam's moments and counters keep every bit; even when the divergence would be small again."""
    agent = make_ppo(kl_control="early_stop", kl_target=TARGET, epochs=4, learning_rate=3e-3)
    player = agent.player(3)
    steps = fill(agent, player=player)
    for _ in range(5):
        assert agent.update()["ppo/skipped"] == 0
    kept = agent.rollout.storage["log_prob"].clone()
    pretend(agent, 1.0)
    stopped = snapshot(agent)
    assert agent.update()["ppo/skipped"] == 1
    assert not snapshot(agent).changed(stopped)
    agent.config = agent.config.replace(kl_target=1e6)
    agent.rollout.storage["log_prob"].copy_(kept)
    for _ in range(10):
        assert agent.update()["ppo/skipped"] == 1
        assert not snapshot(agent).changed(stopped)
    assert not agent.rollout.full, "the rollout is over all the same"

    fill(agent, player=player, after=steps, seed=1)
    assert agent.update()["ppo/skipped"] == 0
    after = snapshot(agent)
    assert after.changed(stopped) == {*after.parameters, *after.adam}
    assert {x.item() for (_, kind), x in stopped.adam.items() if kind == "step"} == {5.0}
    assert {x.item() for (_, kind), x in after.adam.items() if kind == "step"} == {6.0}


# --- gradients that are no numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", ["none", "early_stop", "adaptive_lr"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_skipped_and_learning_goes_on(
    poison: float,
    control: str,
    make_ppo: Callable[..., PPO],
    fill: Callable[..., list[Step]],
    snapshot: Callable[..., Any],
) -> None:
    agent = make_ppo(kl_control=control, kl_target=1e3, normalise_advantage=False)
    player = agent.player(3)
    steps = fill(agent, player=player)
    for _ in range(8):
        agent.update()
    steps = fill(agent, player=player, after=steps, seed=1)
    agent.rollout.trajectory("reward")[3, 1] = poison
    skipped = 0.0
    for _ in range(8):
        before = snapshot(agent)
        metrics = agent.update()
        assert metrics["ppo/skipped"] == metrics["health/nonfinite_loss"]
        assert bool(snapshot(agent).changed(before)) != bool(metrics["ppo/skipped"])
        skipped += metrics["ppo/skipped"].item()
    assert 2 <= skipped < 8, "once or more per epoch, by where the poisoned steps went; GAE carries it to earlier ones"
    fill(agent, player=player, after=steps, seed=2)
    for _ in range(8):
        before = snapshot(agent)
        assert agent.update()["ppo/skipped"] == 0
        assert snapshot(agent).changed(before)
    assert all(bool(p.isfinite().all()) for p in agent.networks.parameters())


def test_one_gradient_that_overflows_is_enough_to_skip(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    agent = make_ppo()
    fill(agent)
    agent.update()
    before = snapshot(agent)
    handle = agent.networks.value_head[0].bias.register_hook(lambda g: torch.full_like(g, float("inf")))
    metrics = agent.update()
    handle.remove()
    assert metrics["ppo/skipped"] == 1
    assert metrics["health/nonfinite_loss"] == 0
    assert not snapshot(agent).changed(before)
    assert agent.update()["ppo/skipped"] == 0
    assert snapshot(agent).changed(before)
