"""Saved and loaded into a fresh agent, learning goes on as if nothing had happened."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gymnasium import spaces

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO

KINDS = {
    "stacked camera and state": {"cameras": ("front",), "frame_stack": 3, "augment": True},
    "discrete, adaptive": {"actions": spaces.Discrete(3), "kl_control": "adaptive_lr", "learning_rate": 3e-3},
    "clipped normal, early stop": {"distribution": "clipped_normal", "kl_control": "early_stop", "kl_target": 1e-3},
}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def learn(agent: PPO) -> list[dict[str, float]]:
    return [{k: v.item() for k, v in agent.update().items()} for _ in range(agent.updates_due(0))]


@pytest.mark.parametrize("played", [0, 3, 7], ids=["between rollouts", "within a rollout", "before the last step"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(
    kind: str,
    played: int,
    make_ppo: Callable[..., PPO],
    fill: Callable[..., list[Step]],
    play: Callable[..., list[Step]],
    snapshot: Callable[..., Any],
) -> None:
    agent = make_ppo(**KINDS[kind])
    player = agent.player(3)
    steps = fill(agent, player=player, last={(4, 0)})
    learn(agent)
    if played:
        steps = play(agent, played, player=player, begin=steps[-1].is_last, seed=1, last={(2, 1)})
    saved = through_a_file({"agent": agent.state_dict(), "player": player.state_dict(), "rng": torch.get_rng_state()})
    resumed = make_ppo(**KINDS[kind], seed=99)
    runs = []
    for one in (agent, resumed):
        if one is resumed:
            resumed.load_state_dict(saved["agent"])
            player = resumed.player(3)
            player.load_state_dict(saved["player"])
        torch.set_rng_state(saved["rng"])
        after, metrics = steps, []
        for round_ in range(2):
            after = fill(one, player=player, after=after, terminal={(1, 2)}, seed=10 + round_)
            metrics += learn(one)
        runs.append((metrics, after[-1].action, snapshot(one)))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1], runs[1][1])
    assert not runs[0][2].changed(runs[1][2])
    assert len(runs[0][0]) == 16
    buffers = zip(agent.networks.buffers(), resumed.networks.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)


@pytest.mark.parametrize("made", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_learning_goes_on_bit_for_bit(
    kind: str, made: int, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    """A run that is stopped between two updates on one rollout makes the others when it goes on."""
    agent, resumed = make_ppo(**KINDS[kind]), make_ppo(**KINDS[kind], seed=99)
    fill(agent, last={(4, 0)})
    left = agent.updates_due(0) - made
    for _ in range(made):
        agent.update()
    resumed.load_state_dict(through_a_file(agent.state_dict()))
    assert all(torch.equal(value, resumed.last_batch()[key]) for key, value in agent.last_batch().items())
    random, metrics = torch.get_rng_state(), []
    for one in (agent, resumed):
        torch.set_rng_state(random)
        metrics.append([{k: v.item() for k, v in one.update().items()} for _ in range(left)])
    assert metrics[0] == metrics[1]
    assert not snapshot(agent).changed(snapshot(resumed))
    assert (agent.updates, agent.rollout.full) == (resumed.updates, resumed.rollout.full) == (0, False)


def test_without_replay_a_new_rollout_begins_and_everything_learnt_is_kept(
    make_ppo: Callable[..., PPO],
    fill: Callable[..., list[Step]],
    play: Callable[..., list[Step]],
    snapshot: Callable[..., Any],
) -> None:
    agent = make_ppo(cameras=("front",), augment=True)
    player = agent.player(3)
    steps = fill(agent, player=player)
    learn(agent)
    play(agent, 2, player=player, begin=steps[-1].is_last)
    state = through_a_file(agent.state_dict(replay=False))
    assert "rollout" not in state
    resumed = make_ppo(cameras=("front",), augment=True, seed=99)
    resumed.load_state_dict(state)
    assert not snapshot(agent).changed(snapshot(resumed))
    assert torch.equal(agent.shift, resumed.shift)
    assert resumed.updates_due(1000) == 0
    assert len(fill(resumed)) == 9
    assert resumed.updates_due(1000) == 8
    assert all(bool(value.isfinite()) for value in resumed.update().values())


def test_a_rollout_that_begins_within_an_episode_stores_what_learning_will_see(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]], play: Callable[..., list[Step]]
) -> None:
    """Resumed without replay, the player still knows the frames before; the new rollout does not."""
    options = {"cameras": ("front",), "vectors": {}, "frame_stack": 4, "minibatches": 1, "epochs": 1}
    agent = make_ppo(**options, learning_rate=1e-2)
    player = agent.player(3)
    steps = fill(agent, player=player)
    learn(agent)
    steps = play(agent, 3, player=player, begin=steps[-1].is_last)
    resumed = make_ppo(**options)
    resumed.load_state_dict(through_a_file(agent.state_dict(replay=False)))
    known = player.state_dict()
    player = resumed.player(3)
    player.load_state_dict(known)
    fill(resumed, player=player, after=steps, last={(6, 1)})
    metrics = resumed.update()
    assert metrics["ppo/approx_kl"].item() == pytest.approx(0, abs=1e-9)


def test_the_saved_state_holds_tensors_and_plain_values_of_the_expected_size(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(cameras=("front",))
    fill(agent)
    learn(agent)
    without = through_a_file(agent.state_dict(replay=False))
    assert set(without) == {"modules", "optimizer", "generator", "shift", "skipped_in_a_row", "skipped_total"}
    rollout = agent.state_dict()["rollout"]
    stored = sum(x.nbytes for x in (*rollout["storage"].values(), rollout["age"]))
    # Per step and world: image, state, three flags, reward, log-probability and value, two actions, age.
    assert stored == 9 * 3 * (48 * 48 * 3 + 5 * 4 + 3 + 3 * 4 + 2 * 4 + 8)


def test_a_learning_rate_that_moved_is_restored(make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> None:
    agent = make_ppo(kl_control="adaptive_lr", kl_target=1e3, learning_rate=1e-4)
    fill(agent)
    learn(agent)
    moved = agent.optimizer.learning_rate().item()
    assert moved > 2e-4
    resumed = make_ppo(kl_control="adaptive_lr", kl_target=1e-9, learning_rate=1e-4)
    resumed.load_state_dict(through_a_file(agent.state_dict()))
    assert resumed.optimizer.learning_rate().item() == moved
    fill(resumed)
    learn(resumed)
    assert resumed.optimizer.learning_rate().item() < moved
    assert agent.optimizer.learning_rate().item() == moved


def test_a_rollout_of_another_kind_is_refused(make_ppo: Callable[..., PPO]) -> None:
    with pytest.raises(ValueError, match=r"'state'.*shape \(9, 3, 5\).*\(5, 3, 5\)"):
        make_ppo(rollout_length=4).load_state_dict(make_ppo().state_dict())
    with pytest.raises(ValueError, match="'shift'"):
        make_ppo(cameras=("front",), augment=True).load_state_dict(make_ppo(cameras=("front",)).state_dict())


def test_random_numbers_of_another_kind_of_device_are_left_behind(make_ppo: Callable[..., PPO]) -> None:
    """A CUDA generator's state has 16 bytes and means nothing to a CPU's, nor the other way round."""
    agent = make_ppo()
    resumed = make_ppo(seed=3)
    own = resumed.generator.get_state()
    resumed.load_state_dict(agent.state_dict() | {"generator": torch.zeros(16, dtype=torch.uint8)})
    assert torch.equal(resumed.generator.get_state(), own)
    resumed.load_state_dict(agent.state_dict())
    assert torch.equal(resumed.generator.get_state(), agent.generator.get_state())


def test_warming_up_changes_nothing(
    make_ppo: Callable[..., PPO], play: Callable[..., list[Step]], snapshot: Callable[..., Any]
) -> None:
    agent = make_ppo(cameras=("front",), augment=True, frame_stack=2)
    play(agent, 3)
    before, rollout = snapshot(agent), through_a_file(agent.rollout.state_dict())
    random, generator = torch.get_rng_state(), agent.generator.get_state()
    buffers = [b.clone() for b in agent.networks.buffers()]
    agent.warm_up()
    assert not snapshot(agent).changed(before)
    assert all(torch.equal(a, b) for a, b in zip(buffers, agent.networks.buffers(), strict=True))
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(agent.generator.get_state(), generator)
    assert all(torch.equal(rollout["storage"][key], value) for key, value in agent.rollout.storage.items())
    assert agent.rollout.steps == rollout["steps"] == 3
    assert all(p.grad is None or not p.grad.any() for p in agent.networks.parameters())
    assert agent.updates_due(0) == 0


def test_there_is_nothing_more_to_report(make_ppo: Callable[..., PPO]) -> None:
    agent = make_ppo()
    assert agent.report() == ({}, {})
    assert agent.counters(100, 10) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_checkpoint_from_the_cpu_goes_on_on_the_gpu(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    options = {"cameras": ("front",), "augment": True, "kl_control": "adaptive_lr"}
    agent = make_ppo(**options)
    fill(agent)
    learn(agent)
    resumed = make_ppo(**options, device="cuda")
    resumed.load_state_dict(through_a_file(agent.state_dict()))
    fill(resumed)
    for _ in range(resumed.updates_due(0)):
        metrics = resumed.update()
        assert {value.device.type for value in metrics.values()} == {"cuda"}
        assert all(bool(value.isfinite()) for value in metrics.values())
    assert {x.device.type for state in resumed.optimizer.state.values() for x in state.values()} == {"cuda"}
