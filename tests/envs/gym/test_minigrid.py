"""MiniGrid: the frames are MiniGrid's own, and every environment that it can build works."""

from __future__ import annotations

import re

import gymnasium
import minigrid  # noqa: F401, registers its environments
import numpy as np
import pytest
import torch
from minigrid.wrappers import RGBImgPartialObsWrapper

import sheeplike.envs
from sheeplike.envs import InvalidOption
from sheeplike.envs.gym.minigrid import PartialView, tile_size
from sheeplike.envs.gym.options import MinigridOptions

NEEDS_FILES = {
    f"MiniGrid-WFC-{name}-v0"
    for name in (
        "DungeonMazeScaled",
        "MazeSimple",
        "ObstaclesAngular",
        "ObstaclesBlackdots",
        "ObstaclesHogs3",
        "RoomsFabric",
    )
}
"""The patterns that these begin from are missing from the wheel of MiniGrid 3.2.0."""


def check_frames(id: str, steps: int) -> None:
    """The frames of our view are those of MiniGrid's wrapper, pixel by pixel, through whole episodes."""
    ours = PartialView(gymnasium.make(id, disable_env_checker=True), tile=8, image_size=(64, 64))
    theirs = RGBImgPartialObsWrapper(gymnasium.make(id, disable_env_checker=True), tile_size=8)
    obs, _ = ours.reset(seed=5)
    expected, _ = theirs.reset(seed=5)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        assert ours.observation_space.contains(obs), id
        assert np.array_equal(obs["image"], expected["image"]), id
        assert obs["direction"] == expected["direction"]
        action = int(rng.integers(ours.action_space.n))
        obs, reward, terminated, truncated, info = ours.step(action)
        expected, *outcome, _ = theirs.step(action)
        assert [reward, terminated, truncated] == outcome
        assert info["is_success"] == (terminated and reward > 0)
        if terminated or truncated:
            (obs, _), (expected, _) = ours.reset(), theirs.reset()
    assert ours._drawable, id


@pytest.mark.parametrize("id", ["MiniGrid-DoorKey-8x8-v0", "MiniGrid-Unlock-v0", "MiniGrid-Dynamic-Obstacles-6x6-v0"])
def test_frames_are_minigrids_own(id: str) -> None:
    check_frames(id, 150)


@pytest.mark.parametrize(
    ("image_size", "tile"), [((64, 64), 8), ((48, 48), 6), ((96, 96), 12), ((128, 64), 8), ((80, 80), 10)]
)
def test_cells_are_as_large_as_fits_and_even(image_size: tuple[int, int], tile: int) -> None:
    assert tile_size(image_size) == tile


def test_the_view_is_padded() -> None:
    env = sheeplike.envs.make("minigrid", num_envs=2, seed=3)
    assert env.name == "MiniGrid-Empty-5x5-v0"
    assert set(env.single_observation_space) == {"direction", "pixels/image", "state"}  # no mission
    image = env.reset()[0]["pixels/image"]
    assert image.shape == (2, 64, 64, 3)
    border = image.clone()
    border[:, 4:60, 4:60] = 0
    assert border.sum() == 0
    assert (image[:, 4:60, 4:60].float().mean((1, 2, 3)) > 10).all()
    assert env.episode_length == 100  # 4 * 5 * 5, as the environment has it


def test_cells_that_do_not_fit_are_refused_at_once() -> None:
    told = "tile_size=20: expected at most 9, with which 7x7 cells fit into 64x64; nearest: tile_size=9"
    with pytest.raises(InvalidOption, match=re.escape(told)):
        sheeplike.envs.make("minigrid", num_envs=1, tile_size=20)
    env = sheeplike.envs.make("minigrid", num_envs=1, tile_size=9)
    env.reset()
    env.close()


def test_reaching_the_goal_is_a_success() -> None:
    env = sheeplike.envs.make("minigrid", num_envs=1, id="MiniGrid-Empty-5x5-v0")
    env.reset(seed=0)
    forward, right = 2, 1
    for action in (forward, forward, right, forward):
        *_, info = env.step(torch.tensor([action]))
        assert not info["success"].any()
    _, reward, terminated, _, info = env.step(torch.tensor([forward]))
    assert terminated.all()
    assert info["success"].all()
    assert reward.item() == pytest.approx(1 - 0.9 * 5 / 100)


def test_actions_have_minigrids_names() -> None:
    made = sheeplike.envs.make("minigrid", num_envs=1, id="MiniGrid-Empty-5x5-v0", image_size=56)
    assert made.action_names == ["left", "right", "forward", "pickup", "drop", "toggle", "done"]
    made.close()


def test_an_unknown_id_gets_the_nearest() -> None:
    for id, nearest in (
        ("MiniGrid-Dorkey-8x8-v0", "MiniGrid-DoorKey-8x8-v0"),
        ("MiniGrid-DoorKey-8x8", "MiniGrid-DoorKey-8x8-v0"),
        ("MiniGrid-Empty-5x5-v7", "MiniGrid-Empty-5x5-v0"),
        ("MiniGrid-WFC-Maze-v0", "MiniGrid-WFC"),
    ):
        with pytest.raises(InvalidOption, match=f"env.id={id}.*nearest: env.id={nearest}"):
            sheeplike.envs.make("minigrid", num_envs=1, id=id)


def test_a_version_that_is_there_is_taken() -> None:
    for version in (0, 1):
        id = f"MiniGrid-ObstructedMaze-Full-v{version}"
        assert MinigridOptions(id=id).recipe((64, 64))[1].id == id


@pytest.mark.slow
def test_every_environment_of_minigrid_works() -> None:
    """Stepped through our worlds, and its frames compared with MiniGrid's own."""
    known = sorted(id for id in gymnasium.registry if id.startswith("MiniGrid-"))
    failed: dict[str, str] = {}
    for id in known:
        try:
            env = sheeplike.envs.make("minigrid", id=id, num_envs=2, max_restarts=0, seed=1)
            obs, _ = env.reset()
            for _ in range(20):
                actions = torch.randint(int(env.single_action_space.n), (2,))
                obs, reward, *_ = env.step(actions)
                assert obs["pixels/image"].shape == (2, 64, 64, 3)
                assert obs["pixels/image"].float().std() > 1
                assert reward.isfinite().all()
            env.close()
            check_frames(id, 30)
        except Exception as error:
            failed[id] = f"{type(error).__name__}: {error}"
    print(f"{len(known) - len(failed)} of {len(known)} work; the others: {failed}")
    assert set(failed) <= NEEDS_FILES, failed
    assert len(known) - len(failed) >= 76
