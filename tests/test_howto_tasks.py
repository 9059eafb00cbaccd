"""The page on tasks, against the tasks."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import yaml
from PIL import Image

from sheeplike import envs
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources
from sheeplike.envs.mjx.options import (
    PLAYGROUND_IDS,
    CartpoleBalanceOptions,
    CartpoleSwingupOptions,
    PlaygroundOptions,
)
from sheeplike.envs.mjx.playground import PlaygroundTask
from sheeplike.envs.mjx.tasks import cartpole, franka_pick
from sheeplike.envs.registry import options_of

HOWTO = Path(__file__).parents[1] / "howto"
PAGE = (HOWTO / "tasks.md").read_text(encoding="utf-8")
FAMILIES = ("gym", "minigrid", "atari", "dmc", "envpool")
SIMULATED = {
    "franka_pick": franka_pick.FrankaPick,
    "cartpole_balance": lambda: cartpole.Cartpole(CartpoleBalanceOptions()),
    "cartpole_swingup": lambda: cartpole.Cartpole(CartpoleSwingupOptions()),
}


def section(name: str) -> str:
    return re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the table whose first header is ``header``, without backquotes."""
    table = re.search(rf"^\| {re.escape(header)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)[1]
    return [[cell.strip().replace("`", "") for cell in line[1:-1].split(" | ")] for line in table.splitlines()]


def slices(text: str, vector: str) -> dict[str, slice]:
    found = {}
    for place, meaning, *_ in rows(text, f"`{vector}`"):
        first, _, last = place.partition(" to ")
        found[meaning] = slice(int(first), int(last or first) + 1)
    return found


def state_of(task: Any, seed: int = 0) -> SimpleNamespace:
    """Some moment of a scene, as physics leaves it, with arrays shaped as MJX has them."""
    rng, data = np.random.default_rng(seed), mujoco.MjData(task.model)
    if task.model.nkey:
        mujoco.mj_resetDataKeyframe(task.model, data, task.model.nkey - 1)
    data.qpos += rng.normal(0, 0.05, task.model.nq)
    data.qvel = rng.normal(0, 1, task.model.nv)
    mujoco.mj_normalizeQuat(task.model, data.qpos)
    mujoco.mj_forward(task.model, data)
    names = ("qpos", "qvel", "ctrl", "xpos", "site_xpos")
    arrays = {name: jnp.asarray(getattr(data, name)) for name in names}
    return SimpleNamespace(**arrays, xmat=jnp.asarray(data.xmat.reshape(-1, 3, 3)), time=jnp.asarray(2.5))


@pytest.mark.parametrize("name", SIMULATED)
def test_the_overview(name: str) -> None:
    task, row = SIMULATED[name](), {cells[0]: cells for cells in rows(PAGE, "task")}[f"[{name}](#{name})"]
    cameras = [task.model.camera(number).name for number in range(task.model.ncam)]
    assert row[1].split(", ") == [camera for camera in cameras if camera != getattr(task, "film_camera", None)]
    assert row[2] == str(task.action_space.shape[0])
    seconds = task.substeps * task.model.opt.timestep
    assert float(row[3].removesuffix(" Hz")) == pytest.approx(1 / seconds)
    assert row[4] == f"{task.episode_length} steps, {task.episode_length * seconds:g} s"
    highest = franka_pick.MAX_RETURN if name == "franka_pick" else task.episode_length
    assert float(row[5]) == highest
    if name != "cartpole_swingup":
        actions = rows(section(name), "action")
        assert [int(number) for number, _ in actions] == list(range(task.action_space.shape[0]))
        assert f"one step of {1000 * seconds:g} ms" in section(name)


@pytest.mark.parametrize("name", [*SIMULATED, "playground"])
def test_the_options_of_a_task(name: str) -> None:
    found = {option: default for option, default, _ in rows(PAGE, f"`{name}` option")}
    fields = options_of(name).model_fields
    assert {f"env.options.{option}" for option in fields if option != "id"} == found.keys()
    for option, default in found.items():
        assert yaml.safe_load(default) == fields[option.removeprefix("env.options.")].default


def test_the_options_of_the_families() -> None:
    shown: dict[str, dict[str, str]] = {family: {} for family in FAMILIES}
    for families, options in rows(PAGE, "options of"):
        for family in families.split(", "):
            shown[family] |= dict(option.split("=") for option in options.split(", "))
    for family, found in shown.items():
        fields = {name: field for name, field in options_of(family).model_fields.items() if name != "id"}
        assert found.keys() == fields.keys()
        assert all(yaml.safe_load(default) == fields[option].default for option, default in found.items())


def test_the_pick_tasks_vectors() -> None:
    task, text = franka_pick.FrankaPick(), section("franka_pick")
    data = state_of(task)
    memory = franka_pick.Memory(jnp.array([0.6, 0.1, 0.2]), jnp.array(True), jnp.array(False), jnp.arange(5.0))
    seen = {name: np.asarray(vector) for name, vector in task.observe(data, memory).items()}
    tip, box = data.site_xpos[task.model.site("tip").id], data.xpos[task.model.body("box").id]
    turned = data.xmat[task.model.body("box").id]
    state = {
        "tip: x (forward), y (sideways), z (up)": tip,
        "commanded minus actual tip, y and z": (memory.tip - tip)[1:],
        "opening of the left finger": data.qpos[7:8],
        "its command": data.ctrl[7:8],
        "centre of the box": box,
        "box minus tip": box - tip,
        "target minus box": jnp.asarray(task.model.body("target").pos) - box,
        "the first two columns of the box's rotation matrix": jnp.concatenate([turned[:, 0], turned[:, 1]]),
    }
    privileged = {
        "state": jnp.asarray(seen["state"]),
        "angles of the seven arm joints, rad": data.qpos[:7],
        "velocities: arm joints (7, rad/s), fingers (2, m/s), box (3, m/s, and 3, rad/s)": data.qvel,
        "the weighted reward terms at the episode's best moment, in the order above": memory.best,
        "1 once the tip has reached the box": jnp.ones(1),
        "1 after the first step": jnp.zeros(1),
        "fraction of the episode that is left": jnp.full(1, 0.75),
    }
    compare(text, seen, {"state": state, "privileged_state": privileged})
    finger = task.model.joint(7)
    assert finger.qposadr[0] == 7
    assert task.model.body(task.model.jnt_bodyid[7]).name == "left_finger"


def test_the_carts_vectors() -> None:
    task, text = SIMULATED["cartpole_balance"](), section("cartpole_balance")
    data = state_of(task)
    seen = {name: np.asarray(v) for name, v in task.observe(data, cartpole.Memory(jnp.asarray(26))).items()}
    position, angle = data.qpos
    parts = (position, jnp.cos(angle), jnp.sin(angle), *data.qvel)
    names = ("position of the cart, m", "cosine of the pole's angle from upright", "its sine")
    names += ("velocity of the cart, m/s", "angular velocity of the pole, rad/s")
    privileged = {
        "state": jnp.asarray(seen["state"]),
        "fraction of the episode that is left": jnp.full(1, 0.75),
        "fraction of the second for which the pole has to be held, 1 once it has been": jnp.ones(1),
    }
    state = {name: part[None] for name, part in zip(names, parts, strict=True)}
    compare(text, seen, {"state": state, "privileged_state": privileged})


def compare(text: str, seen: dict[str, np.ndarray], parts: dict[str, dict[str, jax.Array]]) -> None:
    for vector, expected in parts.items():
        found = slices(text, vector)
        assert list(found) == list(expected)
        covered = [number for place in found.values() for number in range(place.start, place.stop)]
        assert covered == list(range(len(seen[vector])))
        for meaning, value in expected.items():
            np.testing.assert_allclose(seen[vector][found[meaning]], value, atol=1e-3, err_msg=meaning)


def test_the_pick_tasks_reward_and_its_reach() -> None:
    text, task = section("franka_pick"), franka_pick.FrankaPick()
    assert {name: float(weight) for name, weight, _ in rows(text, "reward term")} == franka_pick.WEIGHTS
    assert task.settings.keys() == {"box_range"}
    said = {
        "by up to 5 mm": franka_pick.TIP_STEP / 1e-3 == 5,
        "within 32 cm of the middle": franka_pick.TIP_HIGH[1] == -franka_pick.TIP_LOW[1] == np.float32(0.32),
        "between 2 and 50 cm above the floor": [franka_pick.TIP_LOW[2], franka_pick.TIP_HIGH[2]]
        == [np.float32(0.02), np.float32(0.5)],
        "closes each finger by 2 cm": franka_pick.GRIPPER_STEP == 0.02,
        "a finger travels 4 cm": task.model.joint(task.model.joint(7).name).range[1] == 0.04,
        "has been within 12 mm of the box": franka_pick.REACHED_DISTANCE == 0.012,
        "is above 5 cm": franka_pick.LIFTED_HEIGHT == 0.05,
        "within 5 cm of the rod's height and within 3 cm of the tip": (
            franka_pick.SUCCESS_TOLERANCE,
            franka_pick.HELD_DISTANCE,
        )
        == (0.05, 0.03),
        "green rod 20 cm above the floor": franka_pick.TARGET_HEIGHT == 0.20,
        "4 x 4 x 6 cm": (200 * task.model.geom("box").size).round(3).tolist() == [4, 4, 6],
    }
    for words, holds in said.items():
        assert words in text
        assert holds, words


def test_the_carts_success_and_reach() -> None:
    text, task = section("cartpole_balance"), SIMULATED["cartpole_balance"]()
    assert f"within {np.rad2deg(cartpole.SUCCESS_ANGLE):g} degrees of upright" in text
    assert f"within {cartpole.SUCCESS_POSITION:g} m of the middle, for {task._success_steps} steps in a row" in text
    assert task.model.jnt_range[0].tolist() == [-1.8, 1.8]
    assert task.model.actuator_gear[0, 0] == 10
    assert task.model.actuator_ctrlrange[0].tolist() == [-1, 1]
    assert task._reward_name == "balance"
    assert SIMULATED["cartpole_swingup"]()._reward_name == "swingup"


def test_what_an_agent_sees_by_default() -> None:
    assert load(["exp=dreamer_v3", "env=franka_pick", "profile=cpu"], Sources()).config.env.cameras == ("front",)
    table = [(family, id, lasts) for names, id, *_, lasts in rows(PAGE, "family") for family in names.split(", ")]
    for family, id, lasts in table:
        field = options_of(family).model_fields["id"]
        if field.is_required():
            assert id == "none: give one, such as CartPole-v1"
        else:
            assert id == field.default
        if family == "dmc" and importlib.util.find_spec("dm_control") is None:
            continue
        given = {"gym": ["env.id=CartPole-v1"], "envpool": ["env.id=CartPole-v1"]}.get(family, [])
        config = load(["exp=dreamer_v3", f"env={family}", *given, "profile=cpu"], Sources()).config
        assert config.env.action_repeat == {"one step": 1, "4 frames": 4, "2 control steps": 2}[lasts]


@pytest.mark.slow
def test_playgrounds_table() -> None:
    table = rows(section("MuJoCo Playground"), "task")
    found = {id: cells for ids, *cells in table for id in ids.split(", ")}
    assert tuple(found) == PLAYGROUND_IDS
    for id, (actions, width, rate, cameras) in found.items():
        task = PlaygroundTask(PlaygroundOptions(id=id))
        state = jax.eval_shape(task._env.reset, jax.eval_shape(lambda: jax.random.PRNGKey(0)))
        assert (int(actions), int(width)) == (task.action_space.shape[0], *state.obs.shape)
        assert float(rate.removesuffix(" Hz")) == pytest.approx(1 / (task.substeps * task.model.opt.timestep), rel=2e-3)
        first, *others = cameras.split(", ")
        assert (first,) == task.default_cameras
        assert {first, *others} == {task.model.camera(number).name for number in range(task.model.ncam)}
        assert task.episode_length == 1000


@pytest.mark.slow
def test_the_families_observations() -> None:
    for family, _, image, vectors, actions, _ in rows(PAGE, "family"):
        if family == "dmc" and importlib.util.find_spec("dm_control") is None:
            continue  # it has no wheels for some versions of Python
        made = envs.make(family, num_envs=1, image_size=64, **({"id": "CartPole-v1"} if family == "gym" else {}))
        keys = made.single_observation_space.spaces
        assert image.split(",")[0] in keys
        assert ("state" in keys) == ("state" in vectors)
        assert "discrete" not in actions or made.single_action_space.n == 7
        made.close()


@pytest.mark.slow
def test_the_pictures_are_those_that_the_program_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(Path(__file__).parent / "benchmarks" / "draw_tasks.py"), run_name="__main__")
    for name in SIMULATED:
        drawn, shown = (np.asarray(Image.open(place / f"task_{name}.png"), float) for place in (tmp_path, HOWTO))
        assert drawn.shape == shown.shape
        assert np.abs(drawn - shown).mean() < 1
