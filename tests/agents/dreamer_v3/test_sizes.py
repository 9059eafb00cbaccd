"""Parameter counts of every preset, which the authors' architecture fixes to the last parameter."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from sheeplike.agents.dreamer_v3 import SIZES, DreamerV3, DreamerV3Config
from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic
from sheeplike.agents.dreamer_v3.storage import ModelKeys
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.agents.spaces import ActionCodec

SIX = spaces.Box(-1, 1, (6,), np.float32)
VISION = spaces.Dict({"pixels/front": spaces.Box(0, 255, (64, 64, 3), np.uint8)})
VECTOR = spaces.Dict({"state": spaces.Box(-np.inf, np.inf, (24,), np.float32)})


def count(size: str, observations: spaces.Dict, actions: gymnasium.spaces.Space = SIX) -> int:
    """Trainable parameters of a model that is never allocated."""
    codec, config = ActionCodec(actions), DreamerV3Config(size=size)
    with torch.device("meta"):
        world = WorldModel(ModelKeys(observations, ("*",)), codec.width, config)
        critic = ActorCritic(world.rssm.features, codec, config)
    return sum(p.numel() for part in (world, critic) for p in part.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ("1m", 686_846),
        ("12m", 10_494_158),
        ("25m", 23_489_326),
        ("50m", 41_650_062),
        ("100m", 93_468_238),
        ("200m", 165_948_686),
        ("400m", 372_896_398),
    ],
)
def test_vision_64x64x3_with_six_actions(size: str, expected: int) -> None:
    assert count(size, VISION) == expected


def test_vector_of_24_with_six_actions_at_1m_is_640867() -> None:
    assert count("1m", VECTOR) == 640_867


def test_the_optimizer_holds_exactly_these_and_not_the_slow_critic() -> None:
    agent = DreamerV3(VECTOR, SIX, DreamerV3Config(size="1m", observations=("state",), replay_size=200), num_envs=1)
    held = [p for group in agent.optimizer.param_groups for p in group["params"]]
    assert sum(p.numel() for p in held) == 640_867
    slow = {id(p) for p in agent.actor_critic.slow_value.parameters()}
    assert not slow & {id(p) for p in held}


def test_six_discrete_actions_need_one_output_each_where_continuous_ones_need_two() -> None:
    difference = count("1m", VISION) - count("1m", VISION, spaces.Discrete(6))
    assert difference == 64 * 6 + 6


def test_a_second_camera_adds_channels_to_the_first_and_last_convolution_only() -> None:
    two = spaces.Dict({f"pixels/{name}": VISION["pixels/front"] for name in ("front", "wrist")})
    first, last = 5 * 5 * 3 * (2 * 4), 5 * 5 * (2 * 4) * 3 + 3  # depth 4, twice that in the first stage
    assert count("1m", two) - count("1m", VISION) == first + last


@pytest.mark.parametrize("size", SIZES)
def test_widths_follow_the_pattern_of_the_presets(size: str) -> None:
    s = SIZES[size]
    assert (s.deter, s.hidden, s.classes, s.depth) == (8 * s.units, s.units, s.units // 16, s.units // 16)
