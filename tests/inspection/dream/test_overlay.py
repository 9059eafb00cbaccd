"""Places that the model believes, against those in the frame."""

from __future__ import annotations

import mujoco
import numpy as np
import pytest
import torch

import sheeplike
from sheeplike import envs
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.inspection.dream import overlay
from sheeplike.inspection.model import States, TrainedModel

CAMERA = "pixels/front"


@pytest.fixture(scope="module")
def model() -> TrainedModel:
    return sheeplike.load("demo:franka_pick")


@pytest.fixture(scope="module")
def worlds():
    made = envs.make("franka_pick", num_envs=16, image_size=48, cameras=["front", "wrist"])
    yield made
    made.close()


def is_red(frame: torch.Tensor, x: float, y: float) -> bool:
    around = frame[max(int(y) - 1, 0) : int(y) + 2, max(int(x) - 1, 0) : int(x) + 2].float()
    return bool(((around[..., 0] > 90) & (around[..., 1:].amax(-1) < 60)).any())


def test_places_are_projected_to_where_the_camera_shows_them(worlds) -> None:
    obs, _ = worlds.reset(seed=4)
    camera = overlay.projection(mujoco.MjData(FrankaPick().model), "front", (48, 48))
    for frame, state in zip(obs[CAMERA], obs["privileged_state"], strict=True):
        place = state[FrankaPick.positions["box"]].double().numpy()
        x, y = camera.project(place)
        assert is_red(frame, x, y)
        assert not is_red(frame, x + 8, y)
        assert not is_red(frame, x, y - 8)
        for axis in range(3):  # across y the plane would be seen from its edge
            np.testing.assert_allclose(camera.unproject(x, y, place, axis), place, atol=1e-9)
            moved = camera.unproject(x + 2, y - 1, place, axis)
            np.testing.assert_allclose(camera.project(moved), (x + 2, y - 1), atol=1e-9)
            assert (axis == 1) or moved[axis] == pytest.approx(place[axis])
    assert overlay.projection(mujoco.MjData(FrankaPick().model), "wrist", (48, 48)) is None  # it moves with the hand
    assert camera.project(np.array([100.0, 0.0, 0.0])) is None


def test_places_are_where_a_moved_camera_shows_them() -> None:
    """Cameras are randomized for each episode: what is projected with the compiled one misses the box."""
    moved = {"field": "cam_pos", "of": "front", "operation": "add", "distribution": {"uniform": [-0.1, 0.1]}}
    turned = {"field": "cam_quat", "of": "front", "operation": "rotate", "distribution": {"uniform": [0, 10]}}
    made = envs.make("franka_pick", num_envs=1, image_size=48, randomization={"moved": moved, "turned": turned})
    state: dict[str, torch.Tensor] = {}
    places = overlay.Places(made, lambda states, expected: state["now"])
    missed = 0
    for seed in range(4):
        obs, _ = made.reset(seed=seed)
        state["now"] = obs["privileged_state"]
        _, (_, x, y) = places.project(state["now"], places.positions)[0][CAMERA]
        assert is_red(obs[CAMERA][0], x, y)
        compiled = overlay.projection(mujoco.MjData(FrankaPick().model), "front", (48, 48)).project
        place = obs["privileged_state"][0, FrankaPick.positions["box"]].double().numpy()
        missed += not is_red(obs[CAMERA][0], *compiled(place))
    assert missed
    made.close()


def test_a_model_that_was_taught_says_where_the_box_is(worlds, model: TrainedModel) -> None:
    obs, _ = worlds.reset(seed=5)
    states = model.observe_step(None, None, {CAMERA: obs[CAMERA]}, seed=0)
    assert overlay.is_taught(model)
    hits = 0
    places = overlay.Places(worlds, overlay.taught)
    believed = places.read(states, model.decode(states))
    for number, found in enumerate(places.project(believed, places.positions)):
        assert found.keys() == {CAMERA}
        assert [label for label, *_ in found[CAMERA]] == ["tip", "box"]
        hits += is_red(obs[CAMERA][number], *found[CAMERA][1][1:])
    assert hits >= 0.8 * worlds.num_envs


@pytest.mark.slow
def test_a_probe_reads_it_off_a_model_that_was_not_taught(worlds, model: TrainedModel, monkeypatch) -> None:
    """The same latents, read by a probe that has learnt from episodes of its own."""
    monkeypatch.setattr(overlay, "is_taught", lambda model: False)
    places = overlay.learn(model, worlds, *overlay.watch(model, worlds))
    obs, _ = worlds.reset(seed=6)
    states: States = model.observe_step(None, None, {CAMERA: obs[CAMERA]}, seed=0)
    box = FrankaPick.positions["box"]
    truth = obs["privileged_state"][:, box]
    assert (places.read(states, None)[:, box] - truth).abs().mean() < 0.02  # metres; boxes are spread over 10 cm
    assert places.trust["box"] > 0.8


def test_a_probe_of_a_model_that_has_learned_nothing_is_not_trusted(small_model, monkeypatch) -> None:
    made = envs.make("franka_pick", num_envs=4, image_size=48, cameras=["front"], episode_length=20)
    monkeypatch.setattr(overlay, "EPISODES", 4)
    model = small_model(made)
    places = overlay.learn(model, made, *overlay.watch(model, made))
    assert places.trust["box"] < 0.5
    assert places.movable == ["box"]
    made.close()


def test_tasks_without_places_have_none() -> None:
    made = envs.make("cartpole_balance", num_envs=1, renderer="none")
    assert made.positions == {}
    made.close()
