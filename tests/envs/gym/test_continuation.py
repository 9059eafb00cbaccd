"""A run in an environment of another package that is resumed: a clean cut, new episodes, and a word about it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sheeplike
from sheeplike.envs import make
from sheeplike.envs.gym.world import derive_seed

SMALL = ["env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]", "dry_run=true"]
SMALL += ["logger=[]", "video_every=null", "eval.every=null", "env.options.episode_length=200"]
APPROXIMATE = "approximate"


def cartpole(num_envs: int = 2, **options: object):
    return make("gym", id="CartPole-v1", num_envs=num_envs, frames="none", **options)


def test_new_episodes_begin_in_all_worlds_with_seeds_that_were_not_there_before() -> None:
    env = cartpole(seed=3)
    assert not env.exact_resume
    with pytest.raises(AssertionError):
        env.state_dict()
    first = env.reset()[0]["state"]
    action = torch.ones(2, dtype=torch.int64)
    env.step(action)
    state = env.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    begun = [first]
    for _ in range(2):  # once more, from a checkpoint of the run that went on
        other = cartpole(seed=99)
        other.load_state_dict(state)
        obs, reward, terminated, truncated, info = other.step(action)
        assert obs["state"].abs().max() < 0.05
        assert not torch.stack([reward, terminated, truncated, info["episode"]["length"]]).any()
        assert other.step(action)[1].tolist() == [1, 1]
        begun.append(obs["state"])
        state = other.state_dict()
    assert len({tuple(row.tolist()) for obs in begun for row in obs}) == 6
    again = cartpole(seed=5)
    again.load_state_dict(env.state_dict())
    assert torch.equal(again.step(action)[0]["state"], begun[1])  # the same checkpoint, the same episodes
    expected = cartpole(1)
    expected.reset(seed=0)
    raw = expected._worlds.envs[0]._env.reset(seed=derive_seed(3, 1, 1))[0]
    assert torch.equal(begun[1][1], torch.from_numpy(raw))


def test_another_state_is_refused() -> None:
    env = cartpole()
    with pytest.raises(ValueError, match="'key'"):
        env.load_state_dict(
            {"seed": torch.tensor(0), "generation": torch.tensor(0), "restarts": torch.tensor(0), "key": 1}
        )


def test_restarts_are_counted_on() -> None:
    env = cartpole()
    env.reset()
    state = env.state_dict() | {"restarts": torch.tensor(4)}
    env.load_state_dict(state)
    assert env.counters == {"env/restarts": 4.0}


@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
def test_a_resumed_run_sees_a_clean_cut(agent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ["agent.rollout_length=63"] if agent == "ppo" else []
    overrides = [f"exp={agent}", *SMALL, *memory, f"run_dir={tmp_path / 'run'}", "total_steps=128"]
    with sheeplike.init(*overrides) as run:
        run.iterate(20)
        before = run.state.step
        episodes = before.is_first.clone()
    capsys.readouterr()
    with sheeplike.init(f"resume={tmp_path / 'run'}") as run:
        assert APPROXIMATE in capsys.readouterr().err
        step = run.state.step
        assert step.is_last.all()
        assert torch.equal(step.is_terminal, before.is_terminal)
        assert torch.equal(step.is_first, episodes)
        assert torch.equal(step.obs["state"], before.obs["state"])
        run.iterate(40)
        held = run.agent.replay if agent == "dreamer_v3" else run.agent.rollout
        rows = {name: held.storage[name][9:13] for name in ("is_first", "is_last", "is_terminal", "reward")}
        # Step 10 was under way when the run was saved; step 11 is the first of the run that goes on.
        assert rows["is_last"][1].all()
        assert torch.equal(rows["is_terminal"][1], before.is_terminal)
        assert rows["is_first"][2].all()
        assert not rows["is_first"][3].any()
        assert not rows["is_last"][2].any()
        assert not rows["reward"][2].any()
        assert (rows["reward"][3] == 1).all()
