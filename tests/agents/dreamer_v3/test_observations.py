"""Observations of the model, and refusals of those that it cannot see."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config
from sheeplike.agents.dreamer_v3.storage import ModelKeys
from sheeplike.agents.dreamer_v3.world_model import Encoder

IMAGE = spaces.Box(0, 255, (48, 48, 3), np.uint8)
VECTOR = spaces.Box(-1, 1, (4,), np.float32)
SPACE = spaces.Dict({"state": VECTOR, "pixels/wrist": IMAGE, "privileged_state": VECTOR, "pixels/front": IMAGE})


@pytest.mark.parametrize(
    ("patterns", "images", "vectors"),
    [
        (("pixels/*",), ["pixels/front", "pixels/wrist"], []),
        (("pixels/wrist", "state"), ["pixels/wrist"], ["state"]),
        (("*state",), [], ["privileged_state", "state"]),
        (("*",), ["pixels/front", "pixels/wrist"], ["privileged_state", "state"]),
    ],
)
def test_patterns_choose_observations_in_sorted_order(
    patterns: tuple[str, ...], images: list[str], vectors: list[str]
) -> None:
    keys = ModelKeys(SPACE, patterns)
    assert (keys.images, keys.vectors) == (images, vectors)


@pytest.mark.parametrize(
    ("space", "patterns", "message"),
    [
        (SPACE, ("pixels/frnt",), r"^observation 'pixels/frnt': .*nearest: pixels/front$"),
        (spaces.Dict({"a": spaces.Box(0, 1, (2, 2), np.float32)}), ("*",), r"float32 \(2, 2\)"),
        (spaces.Dict({"a": spaces.Box(0, 1, (48, 48, 3), np.float32)}), ("*",), r"'a'"),
        (
            spaces.Dict({"a": IMAGE, "b": spaces.Box(0, 255, (50, 300, 3), np.uint8)}),
            ("*",),
            r"50x300.*nearest is 48x256$",
        ),
        (spaces.Dict({"replay_value": VECTOR}), ("*",), "'replay_value'"),
        (spaces.Dict({"stoch": VECTOR}), ("*",), "'stoch'"),
    ],
)
def test_what_the_model_cannot_see_is_refused_in_one_line(
    space: spaces.Dict, patterns: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        DreamerV3(space, VECTOR, DreamerV3Config(size="1m", observations=patterns, replay_size=100), num_envs=1)
    assert "\n" not in str(refusal.value)


def test_a_batch_longer_than_the_ring_is_refused(make_agent: Callable[..., DreamerV3]) -> None:
    with pytest.raises(ValueError, match="180"):
        make_agent(batch_length=60)


def test_cameras_are_concatenated_along_channels_in_sorted_order() -> None:
    keys = ModelKeys(SPACE, ("pixels/*",))
    encoder = Encoder(keys, depth=2, units=16)
    seen = []
    encoder.cnn.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    obs = {
        key: torch.full((2, 48, 48, 3), fill, dtype=torch.uint8)
        for key, fill in (("pixels/wrist", 9), ("pixels/front", 4))
    }
    encoder(obs)
    assert seen[0].dtype == torch.uint8
    assert seen[0][0, 0, 0].tolist() == [4, 4, 4, 9, 9, 9]


def test_vector_and_image_embeddings_are_joined() -> None:
    keys = ModelKeys(SPACE, ("pixels/front", "state"))
    encoder = Encoder(keys, depth=2, units=16)
    embed = encoder({"pixels/front": torch.zeros(5, 48, 48, 3, dtype=torch.uint8), "state": torch.zeros(5, 4)})
    assert embed.shape == (5, 16 + 3 * 3 * 8)
    assert encoder.outputs == embed.shape[1]
