"""Forks of the simulator beside the dream: the same state, the same actions, and one thing that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mujoco
import numpy as np
import pytest
import torch
from gymnasium.vector import VectorEnv

from sheeplike import envs
from sheeplike.agents.dreamer_v3 import DreamerV3Config, Size
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.envs.mjx.tasks.cartpole import Cartpole
from sheeplike.inspection import trust
from sheeplike.inspection.model import TrainedModel
from sheeplike.inspection.trust import CHANGES, WINDOW, Fork, Rollout, lines, measure
from sheeplike.options import CommandError
from sheeplike.trained.playing import finite

WORLDS, CAMERA, LENGTH = 4, "pixels/fixed", 40
ADDED = lines(Cartpole().model, [CAMERA], {})


@pytest.fixture(scope="module")
def worlds() -> Iterator[VectorEnv]:
    made = envs.make("cartpole_balance", num_envs=WORLDS, image_size=48, randomization=ADDED, episode_length=LENGTH)
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(worlds: VectorEnv) -> TrainedModel:
    torch.manual_seed(0)
    size = Size(deter=64, hidden=16, classes=4, depth=2, units=16)
    config = DreamerV3Config(size=size, observations=("pixels/*", "state"))
    return TrainedModel(DreamerNetworks(worlds.single_observation_space, worlds.single_action_space, config))


def rollout(reward: list[list[float]], surprise: list[list[float]] | None = None) -> Rollout:
    values = torch.tensor(reward)
    nothing = torch.zeros_like(values)
    seen = nothing if surprise is None else torch.tensor(surprise)
    return Rollout({}, nothing, values, torch.ones_like(values), seen, nothing)


def test_a_fork_repeats_the_simulator_and_changes_one_thing(worlds: VectorEnv, model: TrainedModel) -> None:
    with torch.no_grad():
        fork = Fork(model, worlds, ADDED, seed=7)
        usual = fork.real(model.act, 12, frames=True)
        again = fork.real(model.act, 12, frames=True)
        same = {name: fork.real(trust._replay(usual), 12, change, frames=True) for name, change in CHANGES.items()}
    for name, value in vars(again).items():
        if name != "frames":
            assert torch.equal(value, getattr(usual, name)) or name == "success", name
    assert torch.equal(same["unchanged"].frames[CAMERA], usual.frames[CAMERA])
    for name in ("brightness x 0.5", "other colours", "camera up to 5 cm off"):
        assert torch.equal(same[name].reward, usual.reward), "looks change nothing else"
        assert not torch.equal(same[name].frames[CAMERA][:, 0], usual.frames[CAMERA][:, 0]), name
    for name in ("mass x 4", "gravity x 2", "damping x 4", "action 3 steps late"):
        assert not torch.equal(same[name].reward, usual.reward), name
    dark, light = (one.frames[CAMERA][:, 0].float().mean() for one in (same["brightness x 0.5"], usual))
    assert dark / light == pytest.approx(0.5, abs=0.02)


def test_only_cameras_that_follow_nothing_are_moved() -> None:
    scene = mujoco.MjModel.from_xml_string("""
        <mujoco><worldbody><body><geom size="1"/>
            <camera name="fixed"/><camera name="behind" mode="trackcom"/>
        </body></worldbody></mujoco>""")
    moved = lines(scene, ["pixels/fixed", "pixels/behind", "depth/fixed"], {})[f"{trust._PREFIX}camera"]
    assert moved["of"] == ["fixed"]
    assert f"{trust._PREFIX}camera" not in lines(scene, ["pixels/behind"], {})
    assert not [name for name in lines(scene, [], {}) if name.endswith(("camera", "colours", "brightness"))]


def test_a_run_with_delays_of_its_own_keeps_them() -> None:
    own = {"late": {"field": "action.delay", "operation": "set", "distribution": {"choice": [2]}}}
    assert ADDED.keys() - lines(Cartpole().model, [CAMERA], own).keys() == {f"{trust._PREFIX}delay"}


def test_the_draws_of_a_fork_stand_behind_those_that_the_agent_knows() -> None:
    own = {"öffnung": {"field": "opt.gravity", "operation": "scale", "distribution": {"choice": [0.5, 2.0]}}}
    made = envs.make("cartpole_balance", num_envs=WORLDS, image_size=16, randomization=own | ADDED)
    obs, _ = made.reset(seed=0)
    drawn = made.unwrapped.variation["öffnung"].reshape(WORLDS, -1)
    assert torch.equal(obs["variation"][:, : drawn.shape[1]], drawn)
    made.close()


@pytest.mark.slow
def test_measured_twice_it_is_the_same(worlds: VectorEnv, model: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: CHANGES[name] for name in ("unchanged", "gravity x 2")}
    monkeypatch.setattr(trust, "CHANGES", few)
    state = torch.get_rng_state()
    found = finite(measure(model, worlds, ADDED))  # NaN equals nothing
    assert torch.equal(torch.get_rng_state(), state)
    assert found == finite(measure(model, worlds, ADDED))
    assert found["steps"] == LENGTH - found["context"] + 1
    assert set(found["drift"]["unchanged"][CAMERA]) <= {0, None}
    assert found["drift"]["dream"][CAMERA][0] > 0
    assert set(found["changes"]) == {"dream", *few}
    assert found["ranking"]["policies"][0] == "0% random"
    assert found["exploitability"]["real"] == found["changes"]["unchanged"]["return"]
    assert found["changes"]["unchanged"]["lost_interval"] == [0, 0]
    other = measure(model, worlds, ADDED, seed=1)
    assert other["ranking"]["real"] != found["ranking"]["real"]


def test_a_promise_that_is_not_kept_is_an_exploit() -> None:
    rng = np.random.default_rng(0)
    real = rng.normal(1, 0.1, (30, 5)).tolist()
    more = rng.normal(2, 0.1, (30, 5)).tolist()
    assert trust._gap(rollout(more), rollout(real))["exploited"]
    assert not trust._gap(rollout(real), rollout(more))["exploited"]
    assert not trust._gap(rollout(real), rollout(real))["exploited"]
    cut = replace(rollout(more), weight=torch.tensor([[1.0, 1.0, 0.0, 0.0, 0.0]] * 30))
    assert trust._gap(cut, rollout(real))["dreamt"] == pytest.approx(4, abs=0.2), "what the end cuts off is no promise"


def test_the_alarm_is_silent_until_something_changes() -> None:
    calm = [[1.0] * 20, [1.2] * 20]
    jump = [[1.0] * 8 + [9.0] * 12, [1.0] * 20]
    found = trust._alarm(rollout(calm, calm), rollout(calm, calm), {"change": rollout(calm, jump)})
    assert found["threshold"] == pytest.approx(1.2)
    assert found["unchanged"] == {"share": 0.0}
    # The mean over the window passes the threshold with the first step after the change.
    assert found["change"] == {"share": 0.5, "delay": 9}
    assert found["change"]["delay"] >= WINDOW


def test_episodes_that_ended_before_the_fork_count_nowhere(
    worlds: VectorEnv, model: TrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "CONTEXT", 9)
    with torch.no_grad():
        fork = Fork(model, worlds, ADDED, seed=3)
        one, dream = fork.real(model.act, 4), fork.dream(model.act, 4)
    count = int(fork.alive.sum())
    assert 0 < count < WORLDS, "the test needs a seed with both"
    assert len(one.returns) == len(dream.returns) == count
    assert not one.weight[fork.alive == 0].any()
    alarm = trust._alarm(one, one, {})
    assert alarm == {"threshold": alarm["threshold"], "unchanged": {"share": 0.0}}
    monkeypatch.setattr(trust, "CONTEXT", LENGTH)
    with pytest.raises(CommandError), torch.no_grad():
        Fork(model, worlds, ADDED, seed=3)


@pytest.mark.parametrize(("steps", "means"), [(2, [0.8]), (WINDOW, [2.0]), (WINDOW + 1, [2.0, 2.0])])
def test_the_mean_of_the_last_steps(steps: int, means: list[float]) -> None:
    values = torch.full((1, steps), 2.0)
    assert trust.smooth(values, values > 0)[0].tolist() == pytest.approx(means)


def test_policies_are_ranked_by_their_mean_returns() -> None:
    low, middle, high = (rollout([[value] * 3] * 4) for value in (0.0, 1.0, 2.0))
    same = {"a": (low, low), "b": (middle, middle), "c": (high, high)}
    turned = {"a": (low, high), "b": (middle, middle), "c": (high, low)}
    assert trust._ranking(same)["agreement"] == pytest.approx(1)
    assert trust._ranking(turned)["agreement"] == pytest.approx(-1)
