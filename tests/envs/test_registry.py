import importlib.resources
import subprocess
import sys

import mujoco
import pytest
import torch

import sheeplike.envs
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.registry import options_of


def test_importing_the_package_loads_nothing_heavy():
    code = "import sys, sheeplike.envs; sheeplike.envs.list_envs(); print([m for m in sys.modules if m in %r])"
    heavy = ("jax", "torch", "mujoco", "warp", "gymnasium", "numpy")
    result = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_lists_the_environments():
    tasks = {"cartpole_balance", "cartpole_swingup", "franka_pick"}
    families = {"atari", "dmc", "envpool", "gym", "minigrid"}
    assert sheeplike.envs.list_envs() == sorted(tasks | families | {"playground"})
    assert {name for name in sheeplike.envs.list_envs() if sheeplike.envs.simulated(name)} == tasks | {"playground"}
    with_ids = {name for name in sheeplike.envs.list_envs() if "id" in options_of(name).model_fields}
    assert with_ids == families | {"playground"}


@pytest.mark.parametrize("scene", ["cartpole.xml", "franka_pick.xml"])
def test_scenes_are_package_data_and_compile(scene):
    text = importlib.resources.files("sheeplike.envs.mjx.tasks").joinpath(scene).read_text(encoding="utf-8")
    assert mujoco.MjModel.from_xml_string(text).ncam >= 1


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"name": "franka_pik"}, r"name=franka_pik.*cartpole_balance.*nearest: .*franka_pick"),
        (
            {"episode_lenght": 9},
            r"options=episode_lenght: .*cartpole_balance.*nearest: .*episode_length",
        ),
        (
            {"picked_probability": 0.5},
            r"options=picked_probability.*cartpole_balance.*episode_length",
        ),
        ({"name": "franka_pick", "picked_probability": 1.5}, r"picked_probability=1.5"),
        ({"name": "franka_pick", "box_range": 0.3}, r"box_range=0.3.*nearest: .*0.2"),
        ({"name": "franka_pick", "box_range": float("nan")}, r"box_range=nan"),
        ({"episode_length": 0}, r"episode_length=0"),
        ({"num_envs": 0}, r"num_envs=0"),
        ({"num_envs": 2.0}, r"num_envs=2.0"),
        ({"image_size": 0}, r"image_size=0"),
        ({"image_size": (8, 8, 3)}, r"image_size=\(8, 8, 3\)"),
        (
            {"cameras": ["fxied"]},
            r"nearest: fixed",
        ),
        ({"cameras": ["fixed", "fixed"]}, "once"),
        ({"cameras": []}, r"cameras=\[\]"),
        ({"device": "gpu"}, r"device='gpu'"),
        ({"device": "mps"}, r"device='mps'"),
        ({"seed": -1}, r"seed=-1"),
    ],
)
def test_bad_values_are_refused_in_one_line(kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        sheeplike.envs.make(**{"name": "cartpole_balance", "num_envs": 2, **kwargs})
    assert "\n" not in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="CUDA"):
        sheeplike.envs.make("cartpole_balance", num_envs=2, device="cuda")


def test_task_options_name_their_defaults():
    assert sheeplike.envs.task_options("franka_pick") == {
        "episode_length": 200,
        "picked_probability": 0.05,
        "box_range": 0.05,
    }


@pytest.mark.parametrize(
    ("name", "given", "key", "nearest"),
    [
        ("minigird", {}, "name", "minigrid"),
        ("minigrid", {}, "id", None),
        ("cartpole_balance", {"id": "CartPole-v1"}, "id", None),
        ("gym", {"id": "CartPol-v1"}, "id", "CartPole-v1"),
        ("atari", {"id": "pong", "options": {"nops": 3}}, "options", "noops"),
        ("atari", {"id": "pong", "options": {"noops": "many"}}, "noops", 30),
        ("atari", {"id": "pong", "options": {"noops": -1}}, "noops", 0),
        ("franka_pick", {"options": {"box_range": float("nan")}}, "box_range", 0.05),
        ("minigrid", {"id": "MiniGrid-Empty-5x5-v0", "options": {"vectorization": "asinc"}}, "vectorization", "async"),
        ("dmc", {"id": "walker-walk", "simulation": SimulationOptions(cameras=("side",))}, "cameras", None),
        ("dmc", {"id": "walker-walk", "simulation": SimulationOptions(renderer="none")}, "renderer", "warp"),
        ("dmc", {"id": "walker-walk", "simulation": SimulationOptions(depth=True)}, "depth", False),
        ("dmc", {"id": "walker-walk", "image_size": {"side": 64}}, "image_size", None),
        ("dmc", {"id": "walker-walk", "randomization": {"mass": {}}}, "randomization", "none"),
        ("dmc", {"id": "walker-walk", "randomize": False}, "randomize", True),
    ],
)
def test_what_can_be_said_before_anything_is_built(name, given, key, nearest):
    with pytest.raises(sheeplike.envs.InvalidOption) as error:
        sheeplike.envs.check(name, **given)
    assert (error.value.key, error.value.nearest) == (key, nearest)


def test_checking_loads_nothing_heavy():
    pytest.importorskip("dm_control")
    names = "[('franka_pick', None), ('minigrid', 'MiniGrid-Empty-5x5-v0'), ('atari', 'pong'), ('dmc', 'walker-walk')]"
    code = f"import sys, sheeplike.envs as e; [e.check(name, id=id, randomize=True) for name, id in {names}]; "
    code += "print([m for m in sys.modules if m in ('jax', 'torch', 'mujoco', 'gymnasium', 'numpy')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
