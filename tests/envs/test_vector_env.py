"""The vector-environment contract, on cart-pole: next-step reset, spaces, determinism, memory, continuation."""

import os
import subprocess
import sys

import gymnasium
import jax
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

import sheeplike.envs
from sheeplike.envs.mjx.vector_env import jax_device_of


def leaves(tree):
    """Every tensor of nested dicts, by path."""
    if isinstance(tree, dict):
        return {f"{key}/{path}": leaf for key, value in tree.items() for path, leaf in leaves(value).items()}
    return {"": tree}


def play(env, actions):
    """Everything that stepping through `actions` (T, N, A) delivers, copied."""
    steps = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(action)
        parts = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated, "info": info}
        steps.append({path: leaf.clone() for path, leaf in leaves(parts).items()})
    return steps


def assert_equal(first, second, worlds=slice(None)):
    assert len(first) == len(second)
    for time, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.keys() == b.keys()
        for path in a:
            assert torch.equal(a[path][worlds], b[path][worlds]), f"{path} differs at step {time}"


def random_actions(env, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, *env.action_space.shape, generator=generator) * 2 - 1


def test_contract_of_attributes(cartpole):
    assert isinstance(cartpole, gymnasium.vector.VectorEnv)
    assert (cartpole.num_envs, cartpole.name, cartpole.episode_length) == (3, "cartpole_balance", 6)
    assert cartpole.device == torch.device("cpu")
    assert cartpole.metadata == {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 12.5}
    assert list(cartpole.single_observation_space) == ["pixels/fixed", "privileged_state", "state"]
    assert cartpole.single_observation_space["pixels/fixed"].shape == (20, 28, 3)
    assert cartpole.single_action_space.shape == (1,)
    assert cartpole.action_space.shape == (3, 1)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_observations_lie_in_the_spaces(cartpole, franka):
    for env in (cartpole, franka):
        obs, _ = env.reset(seed=0)
        assert {name: value.numpy() for name, value in obs.items()} in env.observation_space
        obs, *_ = env.step(torch.zeros(env.action_space.shape))
        assert {name: value.numpy() for name, value in obs.items()} in env.observation_space
        first = {name: value[0].numpy() for name, value in obs.items()}
        assert first in env.single_observation_space


def test_dtypes_and_keys_are_the_same_at_every_call(cartpole):
    obs, info = cartpole.reset(seed=0)
    shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves({"obs": obs, "info": info}).items()}
    obs, reward, terminated, truncated, info = cartpole.step(torch.zeros(3, 1))
    assert shapes == {path: (leaf.shape, leaf.dtype) for path, leaf in leaves({"obs": obs, "info": info}).items()}
    assert (reward.dtype, terminated.dtype, truncated.dtype) == (torch.float32, torch.bool, torch.bool)
    assert obs["pixels/fixed"].dtype == torch.uint8
    assert info["episode"]["length"].dtype == torch.int32
    assert set(info) == {"success", "reward_terms", "episode", "nonfinite"}
    assert set(info["episode"]) == {"return", "length", "success", "reward_terms"}


def test_next_step_reset_to_the_letter(cartpole):
    first, info = cartpole.reset(seed=0)
    assert not info["episode"]["length"].any()
    actions = random_actions(cartpole, 13)
    steps = play(cartpole, actions)
    for time, step in enumerate(steps, start=1):
        last = time in (6, 13)
        opening = time == 7
        assert bool(step["truncated/"].all()) == last
        assert bool(step["truncated/"].any()) == last
        assert not step["terminated/"].any()
        assert (step["reward/"] == 0).all() == opening
        # 6 steps, one reset, 6 more steps.
        assert (step["info/episode/length/"] == (time if time < 7 else time - 7)).all()
    # The last frame is the end of the old episode: what an ordinary step would have delivered, not a first frame.
    assert (steps[5]["info/episode/return/"] > 0).all()
    assert (steps[6]["info/episode/return/"] == 0).all()
    last, before = steps[5]["obs/state/"], steps[4]["obs/state/"]
    assert (last - before)[:, :3].abs().max() < 0.3, "poses move little in one step"
    assert (last[:, 3:].abs().max(1).values > 0.1).all(), "a first frame would be all but at rest"
    # A first frame: small angles, centred, the whole episode left, and another one than before.
    state, time_left = steps[6]["obs/state/"], steps[6]["obs/privileged_state/"][:, 5]
    assert (state[:, 0].abs() <= 0.1).all()
    assert (state[:, 2].abs() <= 0.035).all()
    assert (time_left == 1.0).all()
    assert not torch.equal(state, first["state"])
    for name in first:
        assert first[name].shape == steps[6][f"obs/{name}/"].shape


def test_the_action_of_a_reset_step_is_ignored(cartpole):
    runs = []
    for sign in (1.0, -1.0):
        cartpole.reset(seed=0)
        actions = random_actions(cartpole, 8)
        actions[6] = sign
        runs.append(play(cartpole, actions)[6:])
    assert_equal(*runs)


def test_only_the_worlds_that_ended_are_reset(cartpole):
    cartpole.reset(seed=0)
    actions = random_actions(cartpole, 4)
    play(cartpole, actions[:2])
    state = cartpole.state_dict()
    continued = play(cartpole, actions[2:])
    state["[1].ended"][1] = True
    cartpole.load_state_dict(state)
    mixed = play(cartpole, actions[2:])
    assert_equal(continued, mixed, worlds=[0, 2])
    assert mixed[0]["info/episode/length/"].tolist() == [3, 0, 3]
    assert mixed[1]["info/episode/length/"].tolist() == [4, 1, 4]
    assert mixed[0]["reward/"][1] == 0


def test_returns_are_sums_of_rewards_and_terms_sum_to_the_reward(cartpole):
    cartpole.reset(seed=1)
    total = torch.zeros(3)
    for step in play(cartpole, random_actions(cartpole, 6)):
        total += step["reward/"]
        torch.testing.assert_close(step["info/reward_terms/balance/"], step["reward/"])
        torch.testing.assert_close(step["info/episode/return/"], total)
        torch.testing.assert_close(step["info/episode/reward_terms/balance/"], total)


def make(physics, **options):
    return sheeplike.envs.make("cartpole_balance", image_size=(20, 28), episode_length=6, physics=physics, **options)


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_the_same_seed_gives_the_same_worlds(cartpole, physics):
    actions = random_actions(cartpole, 9)
    other = make(physics, num_envs=3, seed=5)
    runs = []
    for env, seed in ((cartpole, 5), (cartpole, 5), (other, None)):
        obs, _ = env.reset(seed=seed)
        runs.append([{k: v.clone() for k, v in obs.items()}, *play(env, actions)])
    for run in runs[1:]:
        assert_equal(runs[0][:1], run[:1])
        assert_equal(runs[0][1:], run[1:])
    obs, _ = cartpole.reset(seed=6)
    assert not torch.equal(obs["state"], runs[0][0]["state"])


def test_a_reset_without_a_seed_goes_on_in_each_worlds_stream(cartpole):
    first, _ = cartpole.reset(seed=0)
    first = first["state"].clone()
    second, info = cartpole.reset()
    assert not info["episode"]["length"].any()
    assert (second["state"][:, 0] != first[:, 0]).all()


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_a_worlds_stream_does_not_depend_on_how_many_there_are(cartpole, physics):
    more = make(physics, num_envs=5)
    few, _ = cartpole.reset(seed=0)
    many, _ = more.reset(seed=0)
    torch.testing.assert_close(many["state"][:3], few["state"], rtol=0, atol=1e-6)
    assert len({float(x) for x in many["state"][:, 0]}) == 5
    actions = random_actions(more, 8)
    for a, b in zip(play(cartpole, actions[:, :3]), play(more, actions), strict=True):
        torch.testing.assert_close(a["obs/state/"], b["obs/state/"][:3], rtol=0, atol=1e-4)


def test_state_is_donated_outputs_are_not_and_nothing_recompiles(cartpole):
    """Torch holds every output: state buffers keep their addresses, and outputs never share one with them."""

    def addresses(tree):
        arrays = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
        raw = [jax.random.key_data(a) if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a for a in arrays]
        return [a.unsafe_buffer_pointer() for a in raw]

    cartpole.reset(seed=0)
    play(cartpole, random_actions(cartpole, 2))
    before, held = addresses(cartpole._state.data), []
    for action in random_actions(cartpole, 10):
        obs, reward, terminated, truncated, info = cartpole.step(action)
        held.append(leaves({"o": obs, "r": reward, "e": terminated, "u": truncated, "i": info}))
        assert addresses(cartpole._state.data) == before
        state = set(addresses(cartpole._state))
        assert state.isdisjoint(leaf.data_ptr() for leaf in held[-1].values())
    copies = [{path: leaf.clone() for path, leaf in step.items()} for step in held]
    play(cartpole, random_actions(cartpole, 3))
    assert_equal(held, copies)
    assert cartpole.simulator.compilations == 1


def test_actions_may_be_overwritten_and_are_clipped(cartpole):
    runs = []
    for scale in (1.0, 50.0):
        cartpole.reset(seed=0)
        action = torch.ones(3, 1)
        steps = []
        for _ in range(4):
            action.fill_(scale)
            steps += play(cartpole, action[None])
            action.fill_(-1.0)
        runs.append(steps)
    assert_equal(*runs)
    assert (runs[0][-1]["obs/state/"][:, 3] > 0.3).all()


@pytest.mark.parametrize(
    "actions", [torch.zeros(3), torch.zeros(2, 1), torch.zeros(3, 1, dtype=torch.float64)], ids=["rank", "N", "dtype"]
)
def test_wrong_actions_are_refused(cartpole, actions):
    cartpole.reset(seed=0)
    with pytest.raises(ValueError, match=r"torch\.float32"):
        cartpole.step(actions)


def test_step_never_waits_for_the_device(cartpole, monkeypatch):
    cartpole.reset(seed=0)
    actions = random_actions(cartpole, 3)

    def forbidden(*args, **kwargs):
        raise AssertionError("a host synchronisation inside of step()")

    for name in ("item", "cpu", "numpy", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    monkeypatch.setattr(jax, "device_get", forbidden)
    monkeypatch.setattr(jax, "block_until_ready", forbidden)
    monkeypatch.setattr(type(cartpole._state.ended), "__array__", forbidden)
    monkeypatch.setattr(type(cartpole._state.ended), "_value", property(forbidden))
    for action in actions:
        cartpole.step(action)


def test_a_restored_state_continues_bit_by_bit(cartpole, swingup, physics):
    cartpole.reset(seed=0)
    actions = random_actions(cartpole, 12)
    play(cartpole, actions[:4])
    state = cartpole.state_dict()
    assert all(value.device.type == "cpu" for value in state.values())
    kept = {name: value.clone() for name, value in state.items()}
    straight = play(cartpole, actions[4:])
    other = make(physics, num_envs=3, seed=9)
    other.load_state_dict(state)
    assert_equal(straight, play(other, actions[4:]))
    assert all(torch.equal(kept[name].nan_to_num(), state[name].nan_to_num()) for name in kept), "a view was handed out"
    assert other.simulator.compilations == 1
    with pytest.raises(ValueError, match=r"float32 \(2"):
        swingup.load_state_dict(
            {k.replace("balance", "swingup"): v for k, v in state.items() if not k.startswith("[0]")}
        )
    with pytest.raises(ValueError, match="one"):
        cartpole.load_state_dict({name: value for name, value in state.items() if "qpos" not in name})


def test_order_of_calls_is_checked():
    env = sheeplike.envs.make("cartpole_balance", num_envs=1, image_size=4)
    with pytest.raises(RuntimeError):
        env.step(torch.zeros(1, 1))
    with pytest.raises(AssertionError):
        env.state_dict()
    with pytest.raises(ValueError, match="variation, memory, worlds"):
        env.reset(options={"x": 1})
    env.close()
    with pytest.raises(RuntimeError):
        env.step(torch.zeros(1, 1))
    with pytest.raises(AssertionError):
        env.reset()


def test_frames_differ_between_worlds_and_follow_the_motion(cartpole):
    obs, _ = cartpole.reset(seed=0)
    start = obs["pixels/fixed"].clone()
    assert start.float().std() > 20
    for _ in range(5):
        obs, *_ = cartpole.step(torch.tensor([[1.0], [-1.0], [0.0]]))
    assert not np.array_equal(obs["pixels/fixed"][0], obs["pixels/fixed"][1])
    assert not torch.equal(obs["pixels/fixed"][0], start[0])


def test_worlds_that_are_staggered_end_their_first_episodes_at_times_of_their_own():
    options = {"num_envs": 6, "renderer": "none", "episode_length": 12}
    for stagger in (False, True):
        env = sheeplike.envs.make("cartpole_swingup", stagger=stagger, **options)
        env.reset(seed=0)
        lengths = [[] for _ in range(6)]
        for _ in range(40):
            *_, truncated, info = env.step(torch.zeros(6, 1))
            for world in truncated.nonzero().flatten().tolist():
                lengths[world].append(int(info["episode"]["length"][world]))
        firsts = {each[0] for each in lengths}
        assert all(length == 12 for each in lengths for length in each[1:])
        assert all(1 <= length <= 12 for length in firsts)
        assert len(firsts) > 2 if stagger else firsts == {12}


def test_films_are_made_by_a_camera_that_is_no_observation():
    env = sheeplike.envs.make("franka_pick", num_envs=2, image_size=16)
    assert {name for name in env.single_observation_space if "/" in name} == {"pixels/front", "pixels/wrist"}
    with pytest.raises(AssertionError):
        env.film()
    env.reset(seed=0)
    first = env.film()["scene"].clone()
    assert (first.shape, first.dtype) == ((1, 180, 240, 3), torch.uint8)
    for _ in range(8):
        env.step(torch.tensor([[0.0, -1.0, 1.0]] * 2))
    assert (env.film()["scene"].int() - first.int()).abs().max() > 50  # the arm has moved
    for others in ({"name": "cartpole_balance"}, {"name": "franka_pick", "renderer": "none"}):
        assert sheeplike.envs.make(**others, num_envs=1, image_size=16).film() == {}


def test_the_cameras_of_the_agent_film_the_first_world_larger():
    env = sheeplike.envs.make("cartpole_balance", num_envs=2, image_size=(16, 32))
    env.film_pixels = 96
    obs, _ = env.reset(seed=0)
    (large,) = env.film().values()
    assert (large.shape, large.dtype) == ((1, 48, 96, 3), torch.uint8)
    small = large[0].unflatten(0, (16, 3)).unflatten(2, (32, 3)).float().mean((1, 3))
    assert (small - obs["pixels/fixed"][0].float()).abs().mean() < 12, "the same scene, with finer pixels"
    assert env.single_observation_space["pixels/fixed"].shape == (16, 32, 3)


@pytest.mark.slow
def test_what_the_environment_asks_of_jax_is_named_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch):
    with jax.enable_x64(True), pytest.raises(ValueError, match="leave JAX_ENABLE_X64 unset"):
        sheeplike.envs.make("cartpole_balance", num_envs=2, image_size=16)
    command = [sys.executable, "-m", "sheeplike", "exp=ppo", "env=cartpole_balance", "dry_run=true", "profile=cpu"]
    done = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "zz"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert {"JAX_PLATFORMS='zz';", "JAX_PLATFORMS=cpu;"} <= {*done.stderr.splitlines()[-1].split()}


class WithoutStreams:
    """A GPU of a client of JAX's that torch cannot wait for."""

    def get_stream_for_external_ready_events(self) -> int:
        raise RuntimeError("UNIMPLEMENTED: get_stream_for_external_ready_events is not implemented")


def test_a_gpu_whose_work_torch_cannot_wait_for_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda platform: [WithoutStreams()])
    with pytest.raises(ValueError, match=r"device='cuda:0'.*'cpu'.*UNIMPLEMENTED"):
        jax_device_of(torch.device("cuda", 0))


def test_a_gpu_that_a_run_on_the_cpu_has_switched_off_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "devices", lambda platform: [])
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    before = jax.config.jax_platforms
    messages = []
    try:
        for platforms in ("cpu", None):
            jax.config.update("jax_platforms", platforms)
            with pytest.raises(ValueError, match="device='cuda:0'") as error:
                jax_device_of(torch.device("cuda", 0))
            messages.append(str(error.value))
    finally:
        jax.config.update("jax_platforms", before)
    assert messages[0] != messages[1]


def test_what_variation_hands_out_lives_for_two_more_steps():
    line = {"field": "opt.gravity", "component": 2, "operation": "scale", "distribution": {"uniform": [0.5, 2.0]}}
    env = sheeplike.envs.make("cartpole_balance", num_envs=3, renderer="none", randomization={"gravity": line})
    env.reset(seed=0)

    def copies() -> int:
        return sum(array.shape == (3, 1, 1) for array in jax.live_arrays())

    before = copies()
    mean = env.variation["gravity"].mean()
    held = [copies() - before]
    for _ in range(3):
        env.step(torch.zeros(3, 1))
        held.append(copies() - before)
    assert [count > 0 for count in held] == [True, True, False, False]
    assert 0.5 <= mean <= 2.0
