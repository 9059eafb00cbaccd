"""Spaces that a checkpoint saves of its environment."""

from __future__ import annotations

import json

import numpy as np
import pytest
from gymnasium import spaces

from sheeplike.envs.spaces import Spaces

SEEN = {
    "pixels/front": spaces.Box(0, 255, (48, 64, 3), np.uint8),
    "depth/front": spaces.Box(0, np.inf, (48, 64, 1), np.float32),
    "state": spaces.Box(-np.inf, np.inf, (70_000,), np.float32),
}
ACTIONS = [
    spaces.Box(-1, 1, (3,), np.float32),
    spaces.Discrete(4, start=-1),
    spaces.MultiDiscrete([2, 3], start=[1, 0]),
]


@pytest.mark.parametrize("actions", ACTIONS, ids=["continuous", "discrete", "several"])
def test_spaces_come_back_from_text_as_they_were(actions: spaces.Space) -> None:
    written = json.dumps(Spaces.of(spaces.Dict(SEEN), actions).model_dump(mode="json"))
    assert Spaces.model_validate_json(written).build() == (spaces.Dict(SEEN), actions)


def test_what_no_agent_sees_is_left_out() -> None:
    ids = {"segmentation/front": spaces.Box(-1, 2**31 - 1, (48, 64, 1), np.int32)}
    empty = {"nothing": spaces.Box(-1, 1, (0,), np.float32)}
    found, _ = Spaces.of(spaces.Dict(SEEN | ids | empty), ACTIONS[0]).build()
    assert found == spaces.Dict(SEEN)


def test_actions_of_another_kind_are_nothing_that_is_known_here() -> None:
    assert Spaces.of(spaces.Dict(SEEN), spaces.MultiBinary(3)) is None
