"""Descriptions of agents in the banner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gymnasium.spaces import Discrete
from torch import nn

from sheeplike.agents.agent import Agent
from sheeplike.agents.policy import PolicyNetworks
from sheeplike.agents.ppo import PPOConfig

Make = Callable[..., Any]


def assert_tells(described: dict[str, str], **facts: tuple[str, ...]) -> None:
    assert list(described) == ["sees", "agent", "one iteration", "learning", "memory"]
    for name, expected in facts.items():
        text = described[name.replace("_", " ")]
        assert [fact for fact in expected if fact not in text] == [], text


def test_dreamer_tells_size_rhythm_start_and_replay(make_agent: Make) -> None:
    agent = make_agent(size="1m", replay_ratio=0.5, learning_starts=None, num_envs=4)
    trained = sum(p.numel() for p in agent.optimizer.param_groups[0]["params"])
    assert_tells(
        agent.describe(),
        agent=("dreamer_v3", "size 1m", f"{trained:,} parameters"),
        one_iteration=("4 policy steps", "2 gradient steps"),
        learning=("policy step 28 ", "replay_ratio 0.5 is train_ratio 12"),
        memory=("replay of 180 policy steps",),
    )
    assert "every 5 iterations" in make_agent(replay_ratio=0.05, num_envs=4).describe()["one iteration"]


def test_ppo_tells_networks_rhythm_and_rollout(make_ppo: Make) -> None:
    agent = make_ppo(cameras=("front",), frame_stack=3)
    parameters = sum(p.numel() for p in agent.networks.parameters())
    assert_tells(
        agent.describe(),
        agent=("ppo", "max_pool network on 3 stacked frames", f"{parameters:,} parameters"),
        one_iteration=("3 policy steps",),
        learning=("every 8 iterations", "2 epochs of 4 minibatches of 6 steps"),
        memory=("rollout of 24 policy steps",),
    )
    assert "network" not in make_ppo().describe()["agent"]


def test_any_other_agent_tells_what_it_sees_its_name_and_its_parameters(make_space: Make) -> None:
    class Other(Agent):
        def __init__(self) -> None:
            space = make_space({}, {"state": 3, "more": 2})
            self.networks = Networks(space, Discrete(2), PPOConfig())

    class Networks(PolicyNetworks):
        def build(self) -> None:
            self.observations, self.linear = {"state": self.space["state"]}, nn.Linear(3, 400)

    assert Other().describe() == {"sees": "state 3 (not seen: more)", "agent": "ppo: 1,600 parameters"}
    assert Other().last_batch() == Other().counters(0, 0) == {}
    Other().warm_up()
