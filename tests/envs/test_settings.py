"""Settings of a task: each world's own, from its next reset on, without a compilation and without a wait."""

from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch

from sheeplike.envs.mjx.options import FrankaPickOptions, SimulationOptions
from sheeplike.envs.mjx.task import Outcome, repeat_actions
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

SCENE = """
<mujoco>
  <option timestep="0.02" gravity="0 0 -10"><flag contact="disable"/></option>
  <worldbody>
    <camera name="side" pos="0 -6 2" xyaxes="1 0 0 0 0 1"/>
    <body name="stone">
      <joint name="height" type="slide" axis="0 0 1"/>
      <geom type="sphere" size="0.2" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="height" gear="20"/></actuator>
</mujoco>
"""
SPREAD, LOW = 2, 3
BOX_RANGE, MAX_BOX_RANGE = 0.05, 0.2


class Memory(NamedTuple):
    spread: jax.Array
    low: jax.Array


class Stone:
    """Falls from a height in [low, low + spread] to the floor; its memory shows what reset was given."""

    name = "stone"
    episode_length, substeps = 8, 3
    contacts_per_world, constraints_per_world = 1, 1

    def __init__(self):
        # Not in the order of the alphabet, in which JAX goes through a dictionary.
        self.settings = {"spread": 0.5, "low": 1}
        self.model = mujoco.MjModel.from_xml_string(SCENE)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, key, data, *, spread, low):
        return data.replace(qpos=low + spread * jax.random.uniform(key, (1,))), Memory(spread, low)

    def control(self, data, memory, action):
        return data.replace(ctrl=action), memory

    def evaluate(self, data, memory, action):
        return Outcome(data.qpos[0], data.qpos[0] < 0.0, data.qpos[0] > 2.0, {"height": data.qpos[0]}, memory)

    def observe(self, data, memory):
        state = jnp.concatenate([data.qpos, data.qvel])
        return {"state": state, "privileged_state": jnp.concatenate([state, jnp.stack([memory.spread, memory.low])])}


@pytest.fixture(scope="module", params=["native", pytest.param("warp", marks=pytest.mark.slow)])
def physics(request: pytest.FixtureRequest) -> str:
    """Both engines, one after the other."""
    return request.param


@pytest.fixture(scope="module")
def stones(physics):
    return MjxVectorEnv(Stone(), num_envs=3, image_size=8, simulation=SimulationOptions(physics=physics))


@pytest.fixture
def env(stones):
    """Three worlds with the defaults, which fall for some steps of their own number each."""
    stones.set_attr("spread", 0.5)
    stones.set_attr("low", 1.0)
    stones.reset(seed=0)
    return stones


@pytest.fixture
def pick(franka):
    yield franka
    franka.set_attr("box_range", BOX_RANGE)


ACTIONS = torch.tensor([[0.0], [0.25], [0.5]])


def play(env, steps):
    delivered, begun = [], []
    for _ in range(steps):
        obs, reward, terminated, truncated, info = env.step(ACTIONS[: env.num_envs])
        parts = {**obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        delivered.append({name: value.clone() for name, value in parts.items()})
        begun.append(info["episode"]["length"] == 0)
    return delivered, torch.stack(begun)


def equal(first, second, worlds=slice(None)):
    return all(torch.equal(a[name][worlds], b[name][worlds]) for a, b in zip(first, second, strict=True) for name in a)


def test_every_world_is_reset_with_its_own_values(env):
    obs, _ = env.reset(seed=0)
    assert obs["privileged_state"][:, [SPREAD, LOW]].tolist() == [[0.5, 1.0]] * 3
    env.set_attr("spread", 0.25)
    env.set_attr("low", [1.0, 2.0, 3.0])
    obs, _ = env.reset()
    assert obs["privileged_state"][:, [SPREAD, LOW]].tolist() == [[0.25, 1.0], [0.25, 2.0], [0.25, 3.0]]
    above = obs["state"][:, 0] - torch.tensor([1.0, 2.0, 3.0])
    assert ((above >= 0) & (above <= 0.25)).all()


def test_a_world_that_goes_on_is_untouched_bit_for_bit(env):
    env.set_attr("low", [0.3, 0.8, 2.0])
    env.reset(seed=0)
    before, _ = play(env, 2)
    straight, begun = play(env, 12)
    env.reset(seed=0)
    again, _ = play(env, 2)
    env.set_attr("low", [5.0, 6.0, 7.0])
    changed, changed_begun = play(env, 12)
    assert equal(before, again)
    firsts = [int(begun[:, world].int().argmax()) for world in range(3)]
    assert len(set(firsts)) > 1, "worlds end at different times"
    for world, first in enumerate(firsts):
        assert changed_begun[first, world]
        assert equal(straight[:first], changed[:first], worlds=world)
        assert not equal(straight[first : first + 1], changed[first : first + 1], worlds=world)
        assert changed[first]["privileged_state"][world, LOW] == 5.0 + world


def test_nothing_is_compiled_nor_uploaded_again(env):
    play(env, 2)
    for value in (1.0, 2, np.float32(3), [1, 2, 3], np.arange(3), torch.ones(3), (0.1, 0.2, 0.3)):
        env.set_attr("low", value)
        arrays = dict(env.simulator.settings.on_device)
        play(env, 2)
        assert all(env.simulator.settings.on_device[name] is array for name, array in arrays.items())
    env.reset(seed=1)
    play(env, 1)
    assert env.simulator.compilations == 1


def test_the_state_keeps_its_buffers_when_settings_change(env):
    def addresses():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(env._state.data) if leaf.size]

    play(env, 2)
    before = addresses()
    for value in range(4):
        env.set_attr("low", value)
        play(env, 1)
        assert addresses() == before


def test_nobody_waits_and_nothing_is_read_from_the_device(env, monkeypatch):
    def forbidden(*args, **kwargs):
        raise AssertionError("a host synchronisation")

    play(env, 1)
    monkeypatch.setattr(jax, "device_get", forbidden)
    monkeypatch.setattr(jax, "block_until_ready", forbidden)
    monkeypatch.setattr(type(env._state.ended), "__array__", forbidden)
    monkeypatch.setattr(type(env._state.ended), "_value", property(forbidden))
    env.step(ACTIONS)
    env.set_attr("low", [5.0, 6.0, 7.0])
    assert env.get_attr("low") == (5.0, 6.0, 7.0)
    assert env.settings["low"].tolist() == [5.0, 6.0, 7.0]
    env.step(ACTIONS)


def test_settings_read_are_copies(env):
    env.settings["spread"].fill_(9.0)
    given = np.array([1.0, 2.0, 3.0], np.float32)
    env.set_attr("low", given)
    given[:] = 9.0
    obs, _ = env.reset()
    assert obs["privileged_state"][:, LOW].tolist() == [1.0, 2.0, 3.0]
    assert obs["privileged_state"][:, SPREAD].tolist() == [0.5] * 3
    assert (env.get_attr("low"), env.get_attr("spread")) == ((1.0, 2.0, 3.0), (0.5,) * 3)
    assert {name: (tuple(value.shape), value.dtype) for name, value in env.settings.items()} == dict.fromkeys(
        ("spread", "low"), ((3,), torch.float32)
    )


def test_a_saved_state_goes_on_with_its_settings(env):
    env.set_attr("spread", [0.1, 0.2, 0.3])
    play(env, 2)
    saved = env.state_dict()
    straight, begun = play(env, 12)
    assert begun.any(0).all(), "resets included"
    env.set_attr("spread", 2.0)
    env.set_attr("low", 7.0)
    play(env, 3)
    env.load_state_dict(saved)
    assert env.get_attr("spread") == tuple(torch.tensor([0.1, 0.2, 0.3]).tolist())
    assert env.get_attr("low") == (1.0,) * 3
    continued, _ = play(env, 12)
    assert equal(straight, continued)
    assert env.simulator.compilations == 1


def test_a_saved_state_with_other_settings_changes_nothing(env):
    saved = env.state_dict()
    saved["settings.spread"] = torch.full((3,), 0.125)
    play(env, 1)
    worlds = env._state
    with pytest.raises(ValueError, match=r"'settings.lou'"):
        env.load_state_dict({**saved, "settings.lou": torch.zeros(3)})
    for missing in ("settings.low", "qpos"):
        with pytest.raises(ValueError, match=str(missing)):
            env.load_state_dict({name: value for name, value in saved.items() if missing not in name})
    assert env._state is worlds
    assert env.get_attr("spread") == (0.5,) * 3


def test_the_same_seed_and_settings_give_the_same_episodes_for_any_number_of_worlds(env, physics):
    few = MjxVectorEnv(Stone(), num_envs=2, image_size=8, simulation=SimulationOptions(physics=physics))
    for name, values in {"spread": [0.1, 0.2, 0.3], "low": [0.8, 1.3, 1.1]}.items():
        env.set_attr(name, values)
        few.set_attr(name, values[:2])
    env.reset(seed=5)
    few.reset(seed=5)
    (many, begun), (fewer, fewer_begun) = play(env, 15), play(few, 15)
    assert torch.equal(begun[:, :2], fewer_begun)
    assert begun.any(0).all()
    for a, b in zip(many, fewer, strict=True):
        torch.testing.assert_close(a["privileged_state"][:2], b["privileged_state"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("hight", 1.0, r"'hight'.*low, spread"),
        ("lo", 1.0, "nearest: low"),
        ("low", [1.0, 2.0], r"float64 \(2,\)"),
        ("low", torch.zeros(3, 1), r"float32 \(3, 1\)"),
        ("low", [], r"low: got float64 \(0,\)"),
        ("low", "high", r"<U4.*3"),
        ("low", None, r"low: got object"),
        ("low", True, r"low: got bool"),
        ("low", float("nan"), r"low=nan.*world 0"),
        ("low", [1.0, 2.0, float("inf")], r"low=inf.*world 2"),
        ("low", 1e39, r"low=inf.*world 0"),
    ],
)
def test_values_that_cannot_be_set_are_refused(env, name, values, message):
    with pytest.raises(ValueError, match=message) as error:
        env.set_attr(name, values)
    assert "\n" not in str(error.value)
    assert (env.get_attr("spread"), env.get_attr("low")) == ((0.5,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(("name", "nearest"), [("lo", "low"), ("spred", "spread")])
def test_names_that_cannot_be_read_are_refused(env, name, nearest):
    with pytest.raises(ValueError, match=rf"low, spread.*nearest: {nearest}"):
        env.get_attr(name)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_a_task_without_settings_has_none(cartpole):
    assert cartpole.settings == {}
    for call in (lambda: cartpole.set_attr("box_range", 1.0), lambda: cartpole.get_attr("box_range")):
        with pytest.raises(ValueError, match="'box_range'"):
            call()


class TakesLess(Stone):
    def reset(self, key, data, *, spread): ...


class TakesMore(Stone):
    def reset(self, key, data, *, spread, low, hue): ...


class TakesNone(Stone):
    def reset(self, key, data): ...


class Undeclared(Stone):
    settings = property(lambda self: {}, lambda self, value: None)


@pytest.mark.parametrize(
    ("task", "settings", "error", "message"),
    [
        (TakesLess, None, TypeError, "'low'"),
        (TakesNone, None, TypeError, "unexpected keyword"),
        (TakesMore, None, TypeError, "'hue'"),
        (Undeclared, None, TypeError, "'spread'"),
        (Stone, {"spreed": 1.0, "low": 1.0}, TypeError, "'spreed'"),
        (Stone, {"spread": "wide", "low": 1.0}, ValueError, "spread: "),
        (Stone, {"spread": True, "low": 1.0}, ValueError, "spread: .*bool"),
        (Stone, {"spread": 0.5, "low": float("nan")}, ValueError, "low=nan"),
        (Stone, {"spread": 0.5, "low": 1e39}, ValueError, "low=inf"),
    ],
)
def test_settings_and_reset_must_agree(task, settings, error, message):
    task = task()
    if settings is not None:
        task.settings = settings
    with pytest.raises(error, match=message):
        MjxVectorEnv(task, num_envs=2, image_size=4)


def places(env, resets, seed=0):
    drawn = [env.reset(seed=seed)[0]["state"][:, 8].clone()]
    drawn += [env.reset()[0]["state"][:, 8].clone() for _ in range(resets - 1)]
    return torch.stack(drawn)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_box_of_the_pick_task_lies_in_its_range(pick):
    usual = places(pick, 4)
    assert pick.get_attr("box_range") == (float(np.float32(BOX_RANGE)),) * 8
    assert usual.abs().max() <= BOX_RANGE
    pick.set_attr("box_range", 0.005)
    narrow = places(pick, 4)
    assert narrow.abs().max() <= 0.005
    assert narrow.unique().numel() == 32
    pick.set_attr("box_range", MAX_BOX_RANGE)
    wide = places(pick, 4)
    assert wide.abs().max() > 0.1
    assert wide.abs().max() <= MAX_BOX_RANGE
    # The same draw, scaled; and with its default the task is the one it always was.
    torch.testing.assert_close(wide / MAX_BOX_RANGE, usual / BOX_RANGE, rtol=0, atol=1e-5)
    pick.set_attr("box_range", torch.linspace(0, 0.2, 8))
    torch.testing.assert_close(places(pick, 4), usual / BOX_RANGE * torch.linspace(0, 0.2, 8), rtol=0, atol=1e-6)
    pick.set_attr("box_range", BOX_RANGE)
    assert torch.equal(places(pick, 4), usual)
    assert pick.simulator.compilations == 1


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_whole_box_is_seen_up_to_the_widest_range(pick):
    """Red pixels at both edges of the range: as many as in the middle, but for perspective."""
    seen = {}
    for box_range in (0.0, MAX_BOX_RANGE):
        pick.set_attr("box_range", box_range)
        for seed in range(6):
            obs, _ = pick.reset(seed=seed)
            red, green, _ = obs["pixels/front"].int().unbind(-1)
            count = ((red > 120) & (green < 80)).sum((1, 2))
            seen |= {float(y): int(n) for y, n in zip(obs["state"][:, 8], count, strict=True)}
    assert max(seen) > 0.18
    assert min(seen) < -0.18
    middle = seen[0.0]
    assert all(count > 0.6 * middle for count in seen.values()), seen


def test_options_of_the_command_become_the_defaults():
    task = FrankaPick(FrankaPickOptions(box_range=0.125))
    assert task.settings == repeat_actions(task, 2).settings == {"box_range": 0.125}


def test_a_repeated_action_passes_settings_through():
    env = MjxVectorEnv(repeat_actions(Stone(), 2), num_envs=2, image_size=4)
    env.set_attr("low", [3.0, 4.0])
    obs, _ = env.reset(seed=0)
    assert obs["privileged_state"][:, LOW].tolist() == [3.0, 4.0]
