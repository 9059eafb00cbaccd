"""The demo beside its simulator, and small models beside a Gymnasium environment with every kind of action."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from sheeplike import envs
from sheeplike.agents.dreamer_v3 import DreamerV3Config, Size
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.config.compose import load_saved
from sheeplike.inspection.dream.overlay import EPISODES, Places, learn, watch
from sheeplike.inspection.dream.session import Session
from sheeplike.inspection.model import TrainedModel, load
from sheeplike.run.build import make_envs
from sheeplike.trained.exported import DEMOS

TINY = Size(deter=64, hidden=16, classes=4, depth=2, units=16)
SIDE, LENGTH = 48, 12
ACTIONS = {
    "continuous": spaces.Box(-1, 1, (2,), np.float32),
    "discrete": spaces.Discrete(3),
    "multi": spaces.MultiDiscrete([3, 2]),
}


class Dot(gymnasium.Env):
    """A white dot, moved by the first action; it ends after 12 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012, as Gymnasium has it

    def __init__(self, actions: str = "continuous", render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.action_space, self.render_mode = ACTIONS[actions], render_mode
        self.x = self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.steps = int(self.np_random.integers(8, SIDE - 8)), 0
        return self._seen(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        first = float(np.ravel(action)[0])
        move = first if isinstance(self.action_space, spaces.Box) else first - 1
        self.x, self.steps = int(np.clip(self.x + round(4 * move), 4, SIDE - 4)), self.steps + 1
        return self._seen(), move, self.steps >= LENGTH, False, {}

    def _seen(self) -> np.ndarray:
        image = np.zeros((SIDE, SIDE, 3), np.uint8)
        image[20:28, self.x - 4 : self.x + 4] = 255
        return image


for kind in ACTIONS:
    gymnasium.register(f"Dot-{kind}-v0", lambda kind=kind, **given: Dot(kind, **given), max_episode_steps=LENGTH)


def make_model(world: VectorEnv, **options: Any) -> TrainedModel:
    """A small model of an environment, which has learned nothing."""
    torch.manual_seed(0)
    config = DreamerV3Config(**{"size": TINY, "observations": ("pixels/*",), "learning_starts": 0} | options)
    space, actions = world.single_observation_space, world.single_action_space
    return TrainedModel(DreamerNetworks(space, actions, config))


@pytest.fixture
def world() -> Iterator[Callable[..., VectorEnv]]:
    """Makes one world of the dot, by its kind of actions."""
    made = []

    def make(kind: str = "continuous") -> VectorEnv:
        made.append(envs.make("gym", num_envs=1, image_size=SIDE, id=f"Dot-{kind}-v0"))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def dots(world: Callable[..., VectorEnv]) -> Callable[..., Session]:
    """Makes a session of the dot and a small model of it."""

    def make(kind: str = "continuous", **options: Any) -> Session:
        one = world(kind)
        return Session(one, make_model(one), **options)

    return make


@pytest.fixture
def small_model() -> Callable[..., TrainedModel]:
    return make_model


@pytest.fixture(scope="session")
def demo() -> Iterator[tuple[VectorEnv, TrainedModel]]:
    """The simulator of ``franka_pick`` and the model that comes along."""
    config = load_saved(DEMOS / "franka_pick" / "config.yaml").config
    simulator = make_envs(config, 1, torch.device("cpu"))
    yield simulator, load("demo:franka_pick")
    simulator.close()


@pytest.fixture(scope="session")
def places(demo: tuple[VectorEnv, TrainedModel]) -> Places:
    """Positions of the demo's world, as it believes them, and directions to move them."""
    simulator, model = demo
    worlds = make_envs(load_saved(DEMOS / "franka_pick" / "config.yaml").config, EPISODES, torch.device("cpu"))
    simulator.reset(seed=0)
    with closing(worlds):
        return learn(model, simulator, *watch(model, worlds))


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    return tmp_path / "recordings"
