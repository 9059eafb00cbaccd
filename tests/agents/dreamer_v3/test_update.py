"""One update of the whole agent: what moves, by how much, for every kind of environment, and across a checkpoint."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sheeplike import checkpoint
from sheeplike.agents.dreamer_v3 import DreamerV3

KINDS = {
    "vector": {"vectors": {"state": 5}},
    "two vectors": {"vectors": {"state": 5, "privileged_state": 9}},
    "camera": {"cameras": ("front",), "vectors": {}},
    "two cameras and a vector": {"cameras": ("front", "wrist")},
    "discrete": {"actions": spaces.Discrete(3)},
    "camera, discrete": {"cameras": ("front",), "vectors": {}, "actions": spaces.Discrete(2)},
    "one world": {"num_envs": 1, "replay_size": 60},
}


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_updates_are_finite_and_move_every_trainable_parameter(
    kind: str, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    agent = make_agent(free_nats=0.0, **KINDS[kind])
    start = snapshot(agent.networks)
    for round_ in range(3):
        play(agent, 15, last={(6, 0)}, terminal={(11, 0)}, seed=round_)
        metrics = agent.update()
        for name, value in metrics.items():
            assert value.shape == (), name
            assert not value.requires_grad, name
            assert bool(value.isfinite()), name
    for name, p in agent.networks.named_parameters():
        assert bool(p.isfinite().all()), name
        assert not torch.equal(p, start[name]), name
        if p.requires_grad:
            assert bool(p.grad.any()), name


def test_metrics_have_the_documented_groups(make_agent: Callable[..., DreamerV3], play: Callable[..., Any]) -> None:
    agent = make_agent(cameras=("front",))
    play(agent, 15)
    names = set(agent.update())
    assert {"grad_norm/world_model", "grad_norm/actor", "grad_norm/critic", "opt/learning_rate"} <= names
    assert {name.split("/")[0] for name in names} == {"loss", "wm", "actor", "critic", "grad_norm", "opt", "health"}


def test_updates_keep_all_memory_in_place(make_agent: Callable[..., DreamerV3], play: Callable[..., Any]) -> None:
    """Parameters, slow critic, returns scale, moments, ring: all stay where a captured graph has them.

    Gradients are made anew, in a captured update in the graph's own memory.
    """
    agent = make_agent()
    play(agent, 15)
    agent.update()

    def addresses() -> list[int]:
        tensors = [*agent.networks.parameters(), *agent.networks.buffers()]
        tensors += [value for state in agent.optimizer.state.values() for value in state.values()]
        tensors += list(agent.replay.storage.values())
        return [t.data_ptr() for t in tensors]

    before = addresses()
    agent.update()
    assert addresses() == before


def test_slow_critic_follows_the_fast_one_by_two_percent_after_the_optimizer_step(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agent = make_agent(learning_rate=0.01)
    play(agent, 15)
    for _ in range(3):
        before = snapshot(agent.actor_critic.slow_value)
        fast_before = snapshot(agent.actor_critic.value)
        agent.update()
        fast = snapshot(agent.actor_critic.value)
        for name, slow in snapshot(agent.actor_critic.slow_value).items():
            expected = before[name].double() + 0.02 * (fast[name].double() - before[name].double())
            np.testing.assert_allclose(slow, expected, rtol=1e-5, atol=1e-8)
        assert any(not torch.equal(fast[name], fast_before[name]) for name in fast)


def test_first_update_of_the_default_warm_up_changes_no_parameter(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agent = make_agent(warmup=1000)
    play(agent, 15)
    before = snapshot(agent.networks)
    assert agent.update()["opt/learning_rate"].item() == 0.0
    assert all(torch.equal(p, before[name]) for name, p in snapshot(agent.networks).items())
    assert agent.update()["opt/learning_rate"].item() == pytest.approx(4e-8)


def test_bfloat16_keeps_parameters_moments_losses_and_state_in_float32(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    agent = make_agent(cameras=("front",), autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    play(agent, 15)
    with agent.autocast():
        losses, _, posterior = agent.losses(agent.replay.sample(4).data)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    assert posterior.deter.dtype == posterior.stoch.dtype == torch.float32
    metrics = agent.update()
    assert all(bool(value.isfinite()) for value in metrics.values())
    held = [*agent.networks.parameters(), *agent.networks.buffers()]
    held += [value for state in agent.optimizer.state.values() for value in state.values()]
    assert {t.dtype for t in held} == {torch.float32}


@pytest.mark.parametrize(("kind", "saved"), [("camera", False), ("discrete", False), ("camera", True)])
def test_a_loaded_agent_continues_bit_for_bit(
    kind: str, saved: bool, tmp_path: Path, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    options = KINDS[kind] | {"learning_rate": 0.003, "warmup": 4, "replay_ratio": 0.3}
    torch.manual_seed(0)
    agent = make_agent(seed=1, **options)
    player = agent.player(3)
    play(agent, 30, player=player, last={(8, 0)})
    agent.updates_due(90)
    for _ in range(3):
        agent.update()
    agent.actor_critic.return_scale.range.copy_(torch.tensor([-3.0, 8.0]))
    parts = {"agent": agent.state_dict(history=not saved), "player": player.state_dict()}
    other = make_agent(seed=2, **options)
    if saved:
        with checkpoint.Writer(tmp_path / "checkpoints") as writer:
            writer.save(90, parts, {}, agent.history)
        _, state = checkpoint.load_latest(tmp_path / "checkpoints")
    else:
        file = io.BytesIO()
        torch.save(parts, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    other.load_state_dict(state["agent"])
    if saved:
        state["history"].copy_to(other.history)
    twin = other.player(3)
    twin.load_state_dict(state["player"])
    results = []
    for who, whose in ((agent, player), (other, twin)):
        torch.manual_seed(5)
        steps = play(who, 9, player=whose, seed=7)
        due = who.updates_due(117)
        results.append((steps, due, [who.update() for _ in range(3)], snapshot(who.networks), who.replay.storage))
    (steps, due, metrics, params, ring), (steps2, due2, metrics2, params2, ring2) = results
    assert due == due2
    assert all(torch.equal(a.action, b.action) for a, b in zip(steps, steps2, strict=True))
    for ours, theirs in zip(metrics, metrics2, strict=True):
        assert {k: v.item() for k, v in ours.items()} == {k: v.item() for k, v in theirs.items()}
    assert all(torch.equal(p, params2[name]) for name, p in params.items())
    assert all(torch.equal(value, ring2[key]) for key, value in ring.items())


def test_a_checkpoint_without_replay_restores_everything_else(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agent = make_agent(seed=1)
    play(agent, 20)
    agent.update()
    other = make_agent(seed=2)
    other.load_state_dict(agent.state_dict(replay=False))
    assert len(other.replay) == 0
    ours, theirs = agent.networks.state_dict(), other.networks.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    assert any("slow_value" in key for key in ours)
    assert any("return_scale" in key for key in ours)


def test_same_seed_same_agent_other_seed_another(make_agent: Callable[..., DreamerV3]) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    a, b, c = (snapshot(make_agent(seed=seed).networks) for seed in (3, 3, 4))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert any(not torch.equal(a[name], c[name]) for name in a)
    assert torch.equal(torch.random.get_rng_state(), before), (
        "building an agent draws nothing from the global generator"
    )


@pytest.mark.parametrize("method", ["warm_up", "report", "dream"])
def test_warming_up_and_reporting_disturb_nothing(
    method: str, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agents = [make_agent(cameras=("front",), seed=1) for _ in range(2)]
    metrics = []
    for disturbed, agent in enumerate(agents):
        torch.manual_seed(0)
        play(agent, 30)
        agent.actor_critic.return_scale.range.copy_(torch.tensor([-3.0, 8.0]))
        metrics.append([])
        for _ in range(3):
            if disturbed:
                getattr(agent, method)()
            metrics[-1].append({name: value.item() for name, value in agent.update().items()})
    assert metrics[0] == metrics[1]
    ours, theirs = (agent.replay.storage for agent in agents)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_evaluation_samples_unless_told_to_take_the_mode(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent()
    obs, first = {"state": torch.zeros(3, 5)}, torch.ones(3, dtype=torch.bool)
    torch.manual_seed(0)
    sampled = [agent.player(3).act(obs, first) for _ in range(2)]
    assert not torch.equal(*sampled)
    assert float(sampled[0].std()) > 0.3
    for action in (agent.player(3).act(obs, first, sample=False) for _ in range(2)):
        assert float(action.abs().max()) < 0.05  # the mean; the policy starts centred


def test_players_share_parameters_and_nothing_else(make_agent: Callable[..., DreamerV3]) -> None:
    agent = make_agent()
    one, two = agent.player(3), agent.player(3)
    no = torch.zeros(3, dtype=torch.bool)
    for _ in range(3):
        one.act({"state": torch.randn(3, 5)}, no)
    assert not any(value.any() for value in two.state.values())
    assert agent.player(7).act({"state": torch.zeros(7, 5)}, torch.ones(7, dtype=torch.bool)).shape == (7, 2)


def test_counters_tell_size_and_actual_ratio(make_agent: Callable[..., DreamerV3], play: Callable[..., Any]) -> None:
    agent = make_agent(learning_starts=30)
    play(agent, 20)
    assert agent.counters(60, 15) == {"replay/size": 60.0, "replay/ratio_actual": 0.5}
