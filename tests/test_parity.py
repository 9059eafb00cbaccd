"""DreamerV3 and PPO are compared under the same conditions: worlds, counting and evaluation are the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike import envs as environments
from sheeplike.agents import registry
from sheeplike.agents.agent import Agent, Step
from sheeplike.loop import Every, LoopState, evaluate, train

ROOT = Path(__file__).parents[1]


class Side(NamedTuple):
    agent: Agent
    envs: VectorEnv


@pytest.fixture(scope="module")
def sides() -> Iterator[list[Side]]:
    """Both agents as their registry builds them, each in worlds of its own."""
    built = []
    for name in ("dreamer_v3", "ppo"):
        envs = environments.make("cartpole_balance", num_envs=3, image_size=64, episode_length=6, seed=7)
        spec = registry.find(name)
        config = spec.config(observations=("*",), **spec.config.dry_run).check(num_envs=3, total_steps=200)
        spaces = envs.single_observation_space, envs.single_action_space
        built.append(Side(spec.load()(*spaces, config, num_envs=3, seed=7), envs))
    yield built
    for side in built:
        side.envs.close()


class Witness:
    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.updates = 0

    def stepped(self, step: Step, info: dict[str, Any]) -> None:
        self.steps.append(step)

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.updates += 1


def test_first_observations_are_the_same_to_the_byte(sides: list[Side]) -> None:
    first, second = (LoopState.begin(side.agent, side.envs, 7).step for side in sides)
    assert set(first.obs) == set(second.obs) >= {"pixels/fixed", "state"}
    for key, value in first.obs.items():
        assert value.dtype == second.obs[key].dtype
        assert value.numpy().tobytes() == second.obs[key].numpy().tobytes(), key
    assert len(first.obs["pixels/fixed"].unique()) > 10  # something is to be seen


def test_the_same_actions_lead_to_the_same_frames(sides: list[Side]) -> None:
    """Nothing but the agents' choices tells the two sides apart."""
    seen = []
    for side in sides:
        side.envs.reset(seed=3)
        actions = torch.linspace(-1, 1, 8).view(8, 1, 1).expand(8, 3, 1).contiguous()
        seen.append([side.envs.step(action)[0]["pixels/fixed"].numpy().tobytes() for action in actions])
    assert seen[0] == seen[1]
    assert len(set(seen[0])) > 5


def test_policy_steps_are_counted_alike(sides: list[Side]) -> None:
    """One for each world and iteration, the ignored step after an end included; hooks come at the same counts."""
    counts = []
    for side in sides:
        at: list[int] = []
        hook = Every(30, lambda state, at=at: at.append(state.policy_steps))
        witness = Witness()
        state = LoopState.begin(side.agent, side.envs, 7)
        train(side.agent, side.envs, state, total_steps=200, observer=witness, hooks=[hook])
        assert witness.updates == state.gradient_steps > 0
        assert any(bool(step.is_last.any()) for step in witness.steps)
        counts.append((state.policy_steps, len(witness.steps), at))
    assert counts[0] == counts[1] == (201, 67, [30, 60, 90, 120, 150, 180])


def test_evaluation_begins_alike_in_the_same_worlds(sides: list[Side]) -> None:
    results = [evaluate(side.agent, side.envs, episodes=4, seed=11, video_envs=2) for side in sides]
    first, second = (result.frames["fixed"] for result in results)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[-1], second[-1])  # two policies, after all


def test_the_loop_knows_no_agent() -> None:
    text = (ROOT / "sheeplike/loop.py").read_text(encoding="utf-8")
    assert "ppo" not in text.lower()
    assert "isinstance" not in text.replace("isinstance(a, dict)", "").replace("isinstance(values[0], dict)", "")
