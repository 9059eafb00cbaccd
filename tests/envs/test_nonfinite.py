"""A world that diverges is truncated, counted and reset, and its neighbours never notice."""

import numpy as np
import pytest
import torch

from sheeplike.agents.agent import Agent
from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config, Size
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.loop import LoopState, train
from sheeplike.monitor.metrics import EpisodeStatistics

POISON = {
    "qpos": ["qpos"],
    "qvel": ["qvel"],
    "everything": ["qpos", "qvel", "qacc_warmstart", "ctrl", "time", "qacc", "cvel"],
}


def frames_and_vectors(obs):
    return {name: value.clone() for name, value in obs.items()}


def run(env, actions):
    out = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        out.append(
            {
                **frames_and_vectors(obs),
                "reward": reward.clone(),
                "terminated": terminated.clone(),
                "truncated": truncated.clone(),
                "nonfinite": info["nonfinite"].clone(),
                "return": info["episode"]["return"].clone(),
            }
        )
    return out


@pytest.fixture(params=["cartpole", "franka"])
def env(request, physics):
    env = request.getfixturevalue(request.param)
    env.reset(seed=3)
    return env


def actions_for(env, steps):
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(steps, *env.action_space.shape, generator=generator) * 2 - 1
    actions[..., -1] = actions[..., -1].abs()
    return actions


@pytest.mark.parametrize("fields", POISON.values(), ids=POISON)
def test_a_poisoned_world_heals_and_its_neighbours_are_untouched(env, fields):
    actions = actions_for(env, 8)
    run(env, actions[:2])
    state = env.state_dict()
    clean = run(env, actions[2:])
    poisoned = {name: value.clone() for name, value in state.items()}
    for field in fields:
        poisoned[f"[1].data.{field}"][1] = torch.nan
    env.load_state_dict(poisoned)
    sick = run(env, actions[2:])

    neighbours = [world for world in range(env.num_envs) if world != 1]
    for a, b in zip(clean, sick, strict=True):
        for name in a:
            assert torch.equal(a[name][neighbours], b[name][neighbours]), name
    assert [step["nonfinite"].nonzero().flatten().tolist() for step in sick] == [[1]] + [[]] * 5
    assert sick[0]["truncated"].tolist() == [world == 1 for world in range(env.num_envs)]
    assert not sick[0]["terminated"].any()
    assert sick[0]["reward"][1] == 0
    assert (sick[0]["state"][1] == 0).all()
    assert (sick[0]["privileged_state"][1] == 0).all()
    assert sick[1]["reward"][1] == 0
    assert sick[1]["return"][1] == 0
    for step in sick:
        for name, value in step.items():
            assert torch.isfinite(value.float()).all(), name

    # Nothing of it survives the reset: the same world, ended by hand where it diverged, lives the same new episode.
    state["[1].ended"][1] = True
    env.load_state_dict(state)
    ended = run(env, actions[3:])
    for a, b in zip(sick[1:], ended, strict=True):
        for name in a:
            assert torch.equal(a[name][1], b[name][1]), name


def test_nan_actions_cost_their_world_one_episode(env):
    actions = actions_for(env, 4)
    actions[1, 2] = torch.nan
    steps = run(env, actions[:2])
    # What is filmed of the world meanwhile is the scene's default pose, and no camera or light is placed by a NaN.
    qpos = env.state_dict()["[1].data.qpos"][2]
    torch.testing.assert_close(qpos, torch.tensor(env.simulator.task.model.qpos0, dtype=torch.float32))
    steps += run(env, actions[2:])
    assert [step["nonfinite"].nonzero().flatten().tolist() for step in steps] == [[], [2], [], []]
    assert steps[1]["truncated"][2]
    assert steps[2]["reward"][2] == 0
    for step in steps:
        for name, value in step.items():
            assert torch.isfinite(value.float()).all(), name


class Watch:
    """Keeps what the loop reports, and counts diverged worlds as a run does."""

    def __init__(self, env):
        self.statistics = EpisodeStatistics(env.num_envs, env.device)
        self.steps, self.nonfinite, self.metrics = [], [], []

    def stepped(self, step, info):
        self.statistics.add(step.reward, step.is_terminal, step.is_last & ~step.is_terminal, info)
        self.steps.append(step)
        self.nonfinite.append(info["nonfinite"].clone())

    def learned(self, metrics):
        self.metrics.append(metrics)


def make_agent(kind: str, env) -> Agent:
    spaces = env.single_observation_space, env.single_action_space
    if kind == "ppo":
        config = PPOConfig(observations=("state",), rollout_length=7, minibatches=1, epochs=1)
        return PPO(*spaces, config, num_envs=3)
    size = Size(deter=16, hidden=8, classes=4, depth=2, units=8)
    batch = {"batch_size": 2, "batch_length": 4, "replay_size": 90, "replay_ratio": 0.2}
    config = DreamerV3Config(observations=("state",), size=size, **batch, imagination_length=2)
    return DreamerV3(*spaces, config, num_envs=3)


@pytest.mark.parametrize("kind", ["dreamer_v3", "ppo"])
def test_an_action_that_is_no_number_costs_one_episode_and_is_counted(kind, cartpole, monkeypatch):
    agent, watch = make_agent(kind, cartpole), Watch(cartpole)
    state = LoopState.begin(agent, cartpole, seed=0)
    train(agent, cartpole, state, total_steps=6, observer=watch)
    if kind == "ppo":  # it remembers nothing: what it sees is no number, once
        act = state.player.act

        def once(obs, is_first):
            monkeypatch.undo()
            sick = {**obs, "state": obs["state"].clone()}
            sick["state"][1] = torch.nan
            return act(sick, is_first)

        monkeypatch.setattr(state.player, "act", once)
    else:
        state.player.state["deter"][1] = torch.nan
    train(agent, cartpole, state, total_steps=6 + 3 * 14, observer=watch)

    sick = torch.stack(watch.nonfinite)[2:, 1]
    assert sick.tolist() == [True] + [False] * 13
    assert watch.steps[2].is_last.tolist() == [False, True, False]
    assert not watch.steps[2].is_terminal.any()
    assert watch.statistics.take().read()["health/nonfinite_worlds"] == 1
    # The episode that ended early, the next one that ran its six steps, and all that came after.
    lasts = torch.stack([step.is_last for step in watch.steps])[:, 1]
    assert np.flatnonzero(lasts.numpy()).tolist() == [2, 9]
    assert all(bool(step.action[1].isfinite().all()) for step in watch.steps[4:])
    assert all(bool(value.isfinite().all()) for value in state.player.extras.values())
    assert all(bool(value.isfinite().all()) for value in agent.networks.state_dict().values())
    # The rollout that holds what PPO saw cannot be learnt from; no more than that.
    skipped = [metrics["health/skipped_update"].item() for metrics in watch.metrics]
    assert skipped == [float(kind == "ppo")] + [0.0] * (len(skipped) - 1)
    assert len(skipped) > 1
