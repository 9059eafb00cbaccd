"""Spaces of environments that agents take, and refusals of the rest."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from sheeplike.agents.spaces import ActionCodec, ObservationKeys

# --- actions ----------------------------------------------------------------------------------------------------------


def test_discrete_actions_are_indices_outside_and_one_hot_inside() -> None:
    codec = ActionCodec(spaces.Discrete(4))
    inside, outside = torch.eye(4)[[2, 0, 3]], torch.tensor([2, 0, 3])
    assert (codec.width, codec.classes, codec.discrete) == (4, (4,), True)
    assert codec.to_env(inside).dtype == torch.int64
    assert torch.equal(codec.to_env(inside), outside)
    assert torch.equal(codec.from_env(outside), inside)
    assert codec.from_env(outside).dtype == torch.float32


def test_several_discrete_actions_are_one_hots_side_by_side() -> None:
    codec = ActionCodec(spaces.MultiDiscrete([2, 4, 3]))
    inside = torch.tensor([[0.0, 1, 0, 0, 0, 1, 1, 0, 0], [1, 0, 0, 1, 0, 0, 0, 0, 1]])
    outside = torch.tensor([[1, 3, 0], [0, 1, 2]])
    assert (codec.width, codec.classes, codec.discrete) == (9, (2, 4, 3), True)
    assert codec.to_env(inside).dtype == torch.int64
    assert torch.equal(codec.to_env(inside), outside)
    assert torch.equal(codec.from_env(outside), inside)
    assert codec.from_env(outside).dtype == torch.float32


@pytest.mark.parametrize(
    ("space", "inside", "outside"),
    [
        (spaces.Discrete(3, start=-1), [[0, 0, 1], [1, 0, 0]], [1, -1]),
        (spaces.MultiDiscrete([2, 3], start=[5, -2]), [[0, 1, 1, 0, 0], [1, 0, 0, 0, 1]], [[6, -2], [5, 0]]),
        (spaces.MultiDiscrete([3]), [[0, 0, 1], [1, 0, 0]], [[2], [0]]),
    ],
)
def test_actions_begin_where_the_space_begins(space: spaces.Space, inside: Any, outside: Any) -> None:
    codec = ActionCodec(space)
    inside, outside = torch.tensor(inside).float(), torch.tensor(outside)
    assert torch.equal(codec.to_env(inside), outside)
    assert torch.equal(codec.from_env(outside), inside)
    assert all(space.contains(one) for one in codec.to_env(inside).numpy())


def test_continuous_actions_are_the_same_on_both_sides_but_clipped_outside() -> None:
    codec = ActionCodec(spaces.Box(-1, 1, (2,), np.float32))
    action = torch.tensor([[1.7, -3.0]])
    assert (codec.width, codec.classes, codec.discrete) == (2, (), False)
    assert codec.to_env(action).tolist() == [[1, -1]]
    assert torch.equal(codec.from_env(action), action)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-2, 1, (2,), np.float32), "-1 .* 1"),
        (spaces.Box(-1, 1, (2, 2), np.float32), r"Box.*nearest: shape \(4,\)$"),
        (spaces.Box(-1, 1, (), np.float32), r"nearest: shape \(1,\)$"),
        (spaces.Box(-1, 1, (0,), np.float32), r"\(0,\)"),
        (spaces.Box(-1, 1, (2,), np.int8), "nearest: float32"),
        (spaces.MultiDiscrete([[2, 3]]), r"Discrete, MultiDiscrete.*Box"),
        (spaces.MultiBinary(3), r"nearest: MultiDiscrete\(\[2, 2, 2\]\)$"),
        (spaces.Tuple([spaces.Discrete(2)]), r"Discrete, MultiDiscrete.*Box"),
    ],
)
def test_other_action_spaces_are_refused(space: gymnasium.spaces.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        ActionCodec(space)
    assert "\n" not in str(refusal.value)


# --- observations -----------------------------------------------------------------------------------------------------


def test_colours_depth_and_vectors_are_told_apart() -> None:
    space = spaces.Dict(
        {
            "state": spaces.Box(-9, 9, (4,), np.float32),
            "pixels/front": spaces.Box(0, 255, (48, 64, 12), np.uint8),
            "depth/front": spaces.Box(0, np.inf, (48, 64, 1), np.float32),
        }
    )
    keys = ObservationKeys(space, ["*"])
    assert keys.images == ["depth/front", "pixels/front"]
    assert keys.vectors == ["state"]
    assert keys.stored() == {
        "depth/front": ((48, 64, 1), torch.float32),
        "pixels/front": ((48, 64, 12), torch.uint8),
        "state": ((4,), torch.float32),
    }


def test_a_key_is_a_pattern_of_itself_whatever_it_is_called() -> None:
    space = spaces.Dict({"pixels/cam[0]": spaces.Box(0, 255, (48, 48, 3), np.uint8)})
    assert ObservationKeys(space, ["pixels/cam[0]"]).images == ["pixels/cam[0]"]


@pytest.mark.parametrize(
    ("key", "space", "message"),
    [
        ("a", spaces.Box(0, 1, (0,), np.float32), r"float32 \(0,\)"),
        ("a", spaces.Box(0, 255, (48, 48, 0), np.uint8), r"uint8 \(48, 48, 0\)"),
        ("a", spaces.Box(0, 1, (2,), np.float64), r"float64 \(2,\); .*; nearest: float32 \(2,\), cast"),
        ("a", spaces.Box(0, 9, (2,), np.int64), r"int64 \(2,\); .*; nearest: float32 \(2,\), cast"),
        ("a", spaces.Box(0, 255, (2,), np.uint8), r"uint8 \(2,\); .*; nearest: float32 \(2,\), cast"),
        ("a", spaces.Box(0, 1, (), np.float32), r"float32 \(\); .*; nearest: float32 \(1,\)$"),
        ("a", spaces.Box(0, 1, (3, 4), np.float32), r"nearest: float32 \(12,\)$"),
        ("a", spaces.Box(0, 255, (48, 64), np.uint8), r"nearest: uint8 \(48, 64, 1\)$"),
        ("a", spaces.Box(0, 1, (48, 48, 3), np.float32), r"nearest: uint8 \(48, 48, 3\).*255"),
        ("a", spaces.Discrete(3), r"Discrete\(3\).*Box"),
        ("a", spaces.Text(3), "Box"),
        ("depth/a", spaces.Box(0, 9, (48, 48, 1), np.float64), r"nearest: float32 \(48, 48, 1\)"),
        ("depth/a", spaces.Box(0, 9, (48, 48, 2), np.float32), r"nearest: float32 \(48, 48, 1\)"),
        ("segmentation/a", spaces.Box(0, 9, (48, 48, 1), np.int32), r"int32 \(48, 48, 1\); .*ids .*; nearest: pixels/"),
    ],
)
def test_what_no_network_can_see_is_refused_with_what_is_nearest(key: str, space: spaces.Space, message: str) -> None:
    with pytest.raises(ValueError, match=f"^observation '{key}': .*{message}") as refusal:
        ObservationKeys(spaces.Dict({key: space}), ["*"])
    assert "\n" not in str(refusal.value)
