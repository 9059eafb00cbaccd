import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch

from sheeplike.envs.mjx.tasks import panda
from sheeplike.envs.mjx.tasks.franka_pick import MAX_RETURN, TIP_HIGH, TIP_LOW, WEIGHTS, FrankaPick

TIP, COMMAND_ERROR, BOX = slice(0, 3), slice(3, 5), slice(7, 10)
BEST, REACHED, BEGUN, TIME_LEFT = slice(44, 49), 49, 50, 51


@pytest.fixture(scope="module")
def task():
    return FrankaPick()


def test_forward_kinematics_is_the_scenes(task):
    data = mujoco.MjData(task.model)
    rng = np.random.default_rng(0)
    forward = jax.jit(panda.forward)
    for _ in range(20):
        joints = rng.uniform(panda.JOINT_LOW, panda.JOINT_HIGH).astype(np.float32)
        data.qpos[:7] = joints
        mujoco.mj_kinematics(task.model, data)
        mujoco.mj_comPos(task.model, data)
        jacobian = np.zeros((6, task.model.nv))
        mujoco.mj_jacSite(task.model, data, jacobian[:3], jacobian[3:], task.model.site("tip").id)
        tip, rotation, own_jacobian = forward(joints)
        np.testing.assert_allclose(tip, data.site("tip").xpos, atol=1e-5)
        np.testing.assert_allclose(rotation, data.site("tip").xmat.reshape(3, 3), atol=1e-5)
        np.testing.assert_allclose(own_jacobian, jacobian[:, :7], atol=1e-5)


def test_every_entry_of_the_privileged_state_has_one_name(task):
    named = task.positions | task.entries
    found = sorted(number for place in named.values() for number in range(place.start, place.stop))
    assert found == list(range(TIME_LEFT + 1))
    assert [named[name] for name in ("tip", "box", "best term")] == [TIP, BOX, BEST]
    assert [named[name].start for name in ("reached", "begun", "time left")] == [REACHED, BEGUN, TIME_LEFT]


def test_joint_limits_are_the_scenes(task):
    np.testing.assert_allclose(task.model.jnt_range[:7].T, [panda.JOINT_LOW, panda.JOINT_HIGH], atol=1e-6)


def test_inverse_kinematics_follows_to_a_fraction_of_a_millimetre(task):
    """Random commands over the whole allowed plane, one step of inverse kinematics for each, as in the task."""
    home, down = jnp.asarray(task.model.keyframe("home").ctrl[:7], jnp.float32), jnp.diag(jnp.array([1.0, -1.0, -1.0]))
    start, _, _ = panda.forward(home)

    def follow(carry, move):
        joints, tip = carry
        tip = jnp.clip(tip + 0.005 * jnp.concatenate([jnp.zeros(1), jnp.clip(move, -1, 1)]), TIP_LOW, TIP_HIGH)
        joints = panda.inverse_step(joints, tip, down, home)
        reached, rotation, _ = panda.forward(joints)
        turn = jnp.arccos(jnp.clip((jnp.trace(rotation @ down) - 1) / 2, -1, 1))
        return (joints, tip), (jnp.linalg.norm(reached - tip), turn, tip, joints)

    rng = np.random.default_rng(0)
    directions = np.repeat(rng.uniform(-1.5, 1.5, (60, 10, 2)), 20, axis=1) + rng.normal(0, 0.3, (60, 200, 2))
    run = jax.jit(jax.vmap(lambda moves: jax.lax.scan(follow, (home, start), moves)[1]))
    error, turn, tip, joints = map(np.asarray, run(jnp.asarray(directions, jnp.float32)))
    assert error.mean() < 1e-4
    assert error.max() < 1e-3
    assert np.degrees(turn.max()) < 0.5
    assert (joints >= panda.JOINT_LOW).all()
    assert (joints <= panda.JOINT_HIGH).all()
    # The commands did cover the plane.
    assert np.ptp(tip[..., 1]) > 0.6
    assert tip[..., 2].min() == pytest.approx(0.02)
    assert tip[..., 2].max() == pytest.approx(0.5)


def test_the_box_rests_on_the_floor_and_is_placed_anew_in_every_episode(franka):
    places = []
    for _ in range(4):
        obs, _ = franka.reset() if places else franka.reset(seed=0)
        box = obs["state"][:, BOX]
        assert (box[:, 1].abs() <= 0.05).all()
        torch.testing.assert_close(box[:, 2], torch.full((8,), 0.03), rtol=0, atol=1e-6)
        assert (box[:, 0] == box[0, 0]).all()
        places += box[:, 1].tolist()
        # Nothing of the episode before: no record, not reached, not begun.
        assert (obs["privileged_state"][:, 44:51] == 0).all()
        assert (obs["privileged_state"][:, TIME_LEFT] == 1).all()
        torch.testing.assert_close(obs["state"][:, TIP], torch.tensor([[0.631, 0.0, 0.182]] * 8), rtol=0, atol=1e-3)
        franka.step(torch.zeros(8, 3))
    assert len(set(places)) == 32
    assert max(places) > 0.025
    assert min(places) < -0.025
    obs, _ = franka.reset()
    start = obs["state"][:, BOX].clone()
    for _ in range(12):
        obs, *_ = franka.step(torch.zeros(8, 3))
    # It neither pops out of the floor nor slides, and the arm holds its place.
    torch.testing.assert_close(obs["state"][:, BOX], start, rtol=0, atol=5e-4)
    torch.testing.assert_close(obs["state"][:, TIP], torch.tensor([[0.631, 0.0, 0.182]] * 8), rtol=0, atol=1e-3)


def test_actions_move_the_tip_in_its_plane_and_the_gripper(franka):
    obs, _ = franka.reset(seed=0)
    start = obs["state"].clone()
    action = torch.tensor([[1.0, 0.0, 1.0], [-1.0, 0.0, -1.0], [0.0, 1.0, 1.0], [0.0, 0.0, -1.0]]).repeat(2, 1)
    for _ in range(10):
        obs, *_ = franka.step(action)
    for _ in range(8):
        obs, *_ = franka.step(action * torch.tensor([0.0, 0.0, 1.0]))
    moved = (obs["state"] - start)[:, TIP]
    expected = 0.05 * torch.tensor([[0.0, 1.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    expected = expected.repeat(2, 1)
    torch.testing.assert_close(moved, expected, rtol=0, atol=2e-3)
    assert (obs["state"][:, COMMAND_ERROR].abs() < 2e-3).all()
    torch.testing.assert_close(obs["state"][:, 6], torch.tensor([0.04, 0.0, 0.04, 0.0] * 2))
    torch.testing.assert_close(obs["state"][:, 5], torch.tensor([0.04, 0.0, 0.04, 0.0] * 2), rtol=0, atol=2e-3)


def test_a_scripted_controller_picks_the_box(franka, scripted_pick):
    """The task can be solved, its return telescopes and stays below its bound, and success ends the episode."""
    obs, _ = franka.reset(seed=1)
    total, first = torch.zeros(8), torch.zeros(8, 5)
    ended = torch.zeros(8, dtype=torch.bool)
    successes, lengths = [], []
    for _ in range(72):
        obs, reward, terminated, truncated, info = franka.step(scripted_pick(obs["state"]))
        assert (reward >= 0).all()
        terms = torch.stack([info["reward_terms"][name] for name in WEIGHTS], dim=1)
        torch.testing.assert_close(terms.sum(1), reward, rtol=0, atol=1e-5)
        total = torch.where(ended, 0, total + reward)
        torch.testing.assert_close(info["episode"]["return"], total, rtol=0, atol=1e-4)
        assert (total <= MAX_RETURN).all()
        best = obs["privileged_state"][:, BEST]
        length = info["episode"]["length"]
        assert (reward[length == 1] == 0).all()
        first = torch.where((length == 1)[:, None], best, first)
        # Telescoping, term by term: an episode's sums are its best moment minus its first.
        sums = torch.stack([info["episode"]["reward_terms"][name] for name in WEIGHTS], dim=1)
        torch.testing.assert_close(sums[length > 0], (best - first)[length > 0], rtol=0, atol=1e-4)
        assert not (info["success"] & ~terminated).any()
        if ended.any():
            assert (length[ended] == 0).all()
            assert (obs["privileged_state"][ended, 44:51] == 0).all()
        ended = terminated | truncated
        successes += info["success"][ended].tolist()
        lengths += length[ended].tolist()
        assert (total[info["success"]] > 10).all()
    assert len(successes) >= 8
    assert np.mean(successes) > 0.9
    assert max(lengths) < 90


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_random_actions_hardly_ever_succeed(franka):
    franka.reset(seed=2)
    generator = torch.Generator().manual_seed(0)
    successes = torch.zeros(8)
    for _ in range(60):
        *_, info = franka.step(torch.rand(8, 3, generator=generator) * 2 - 1)
        successes += info["success"]
    assert successes.sum() == 0
    returns = info["episode"]["return"]
    assert ((returns >= 0) & (returns < 6)).all()


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_episodes_can_start_with_the_box_grasped(franka_picked):
    obs, _ = franka_picked.reset(seed=0)
    torch.testing.assert_close(obs["state"][:, BOX], torch.tensor([[0.6315, 0.0, 0.115]] * 2), rtol=0, atol=1e-3)
    for _ in range(10):
        obs, reward, terminated, _, info = franka_picked.step(torch.tensor([[0.0, 0.0, -1.0]] * 2))
    assert (obs["state"][:, 9] > 0.11).all(), "the grasp does not hold"
    assert obs["privileged_state"][:, REACHED].all()
    assert obs["privileged_state"][:, BEGUN].all()
    assert not terminated.any()
    # Bobbing up and down earns nothing beyond the best height.
    before = info["episode"]["return"].clone()
    for direction in (1.0, -1.0, 1.0, -1.0):
        for _ in range(3):
            *_, info = franka_picked.step(torch.tensor([[0.0, direction, -1.0], [0.0, direction, -1.0]]))
    bobbed = info["episode"]["return"].clone()
    assert (bobbed - before < 1.0).all()
    # Opening drops the box: no success, no reward, though it falls through the heights.
    for _ in range(6):
        obs, reward, terminated, _, info = franka_picked.step(torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, -1.0]]))
        assert reward[0] == 0
    assert obs["state"][0, 9] < 0.05
    assert not info["success"][0]
    for _ in range(6):
        *_, terminated, truncated, info = franka_picked.step(torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, -1.0]]))
        if terminated[1]:
            break
    assert terminated.tolist() == [False, True]
    assert not truncated.any()
    assert info["success"].tolist() == [False, True]
    assert info["reward_terms"]["success"][1] == 2.0


def test_a_box_that_leaves_ends_the_episode_without_success(franka_picked):
    franka_picked.reset(seed=0)
    state = franka_picked.state_dict()
    state["[1].data.qpos"][0, 10] = 1.5
    franka_picked.load_state_dict(state)
    _, _, terminated, truncated, info = franka_picked.step(torch.zeros(2, 3))
    assert terminated.tolist() == [True, False]
    assert not truncated.any()
    assert not info["success"].any()


def test_touching_the_floor_is_seen(task):
    data = mujoco.MjData(task.model)

    class Batch:
        def __init__(self):
            self.geom_xpos = jnp.asarray(data.geom_xpos)
            self.geom_xmat = jnp.asarray(data.geom_xmat.reshape(-1, 3, 3))

    down = np.diag([1.0, -1.0, -1.0]).astype(np.float32)
    home = jnp.asarray(task.model.keyframe("home").ctrl[:7], jnp.float32)
    step = jax.jit(panda.inverse_step)
    joints = home
    for height, above in ((0.1, True), (0.015, True), (0.005, False)):
        for _ in range(60):
            joints = step(joints, jnp.array([0.631, 0.0, height]), down, home)
        data.qpos[:7] = joints
        data.qpos[task.model.joint("box").qposadr[0]] = 0.4
        mujoco.mj_forward(task.model, data)
        touching = [c for c in data.contact if task.model.geom("box").id not in c.geom]
        assert bool(task._above_floor(Batch())) is above
        assert (len(touching) == 0) is above


@pytest.mark.parametrize("physics", ["native"], scope="module")
def test_both_cameras_show_what_matters(franka):
    obs, _ = franka.reset(seed=0)
    assert obs["pixels/wrist"].shape == (8, 32, 32, 3)
    assert obs["depth/front"].shape == (8, 32, 32, 1)
    red, green, blue = obs["pixels/front"].int().unbind(-1)
    for shade in ((red > 120) & (green < 80), (green > 120) & (red < 100), (blue > 120) & (red < 80)):
        assert (shade.flatten(1).sum(1) >= 3).all(), "box, target or fingers are not seen"
    red, green, _ = obs["pixels/wrist"].int().unbind(-1)
    assert (((red > 120) & (green < 80)).flatten(1).sum(1) >= 3).all()
    # The box of each world is where its picture says: columns of red move with y.
    red, green, _ = obs["pixels/front"].int().unbind(-1)
    mask = ((red > 120) & (green < 80)).float()
    column = (mask.sum(1) * torch.arange(32)).sum(1) / mask.sum((1, 2))
    order = obs["state"][:, 8].argsort()
    assert (column[order].diff() >= 0).all()
