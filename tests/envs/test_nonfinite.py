"""A world that diverges is truncated, counted and reset, and its neighbours never notice."""

import pytest
import torch

POISON = {
    "qpos": ["qpos"],
    "qvel": ["qvel"],
    "everything": ["qpos", "qvel", "qacc_warmstart", "ctrl", "time", "qacc", "cvel", "_impl.efc__force", "_impl.qLD"],
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
def env(request):
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
