"""Worlds that go on in another process go on exactly: every bit of every output, ends of episodes included."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sheeplike.envs.mjx.options import TASKS, SimulationOptions
from sheeplike.envs.mjx.tasks.cartpole import Cartpole
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

BEFORE, AFTER = 8, 14
UNIFORM = {"operation": "set", "distribution": {"uniform": [0.0, 1.0]}}
GRAVITY_AND_COLOURS = {
    "gravity": {"field": "opt.gravity", "component": 0, **UNIFORM},
    "colours": {"field": "geom_rgba", "component": [0, 1, 2], **UNIFORM},
}


def build(name, varied, physics):
    task = {"franka_pick": FrankaPick, "cartpole_balance": Cartpole}[name](TASKS[name](episode_length=9))
    lines = GRAVITY_AND_COLOURS if varied else None
    return MjxVectorEnv(
        task, num_envs=4, image_size=48, randomization=lines, simulation=SimulationOptions(physics=physics)
    )


def leaves(tree, path=""):
    if isinstance(tree, dict):
        return {k: v for name, value in tree.items() for k, v in leaves(value, f"{path}/{name}").items()}
    return {path: tree.clone()}


def play(env, actions):
    """Everything that stepping through `actions` (T, N, A) delivers, as one flat dict a step."""
    return [leaves(dict(enumerate(env.step(action)))) for action in actions]


def continued(saved, outputs):
    parts = torch.load(saved, weights_only=True)
    env = build(parts["name"], parts["varied"], parts["physics"])
    env.load_state_dict(parts["envs"])
    torch.save(play(env, parts["actions"]), outputs)


@pytest.mark.slow
@pytest.mark.parametrize("physics", ["native", "warp"])
@pytest.mark.parametrize("varied", [False, True])
@pytest.mark.parametrize("name", ["franka_pick", "cartpole_balance"])
def test_another_process_goes_on_bit_for_bit(name, varied, physics, tmp_path):
    env = build(name, varied, physics)
    actions = torch.rand(BEFORE + AFTER, *env.action_space.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    if env.settings:
        env.set_attr("box_range", [0.0, 0.1, 0.15, 0.2])
    env.reset(seed=3)
    straight = play(env, actions)
    env.reset(seed=3)
    play(env, actions[:BEFORE])
    saved, outputs = tmp_path / "saved.pt", tmp_path / "outputs.pt"
    parts = {"name": name, "varied": varied, "physics": physics, "envs": env.state_dict()}
    parts["actions"] = actions[BEFORE:]
    torch.save(parts, saved)
    program = (
        "import sys; from importlib.util import module_from_spec, spec_from_file_location as spec_of;"
        "spec = spec_of('continuation', sys.argv[1]); there = module_from_spec(spec); spec.loader.exec_module(there);"
        "there.continued(*sys.argv[2:])"
    )
    subprocess.run([sys.executable, "-c", program, str(Path(__file__)), str(saved), str(outputs)], check=True)
    elsewhere = torch.load(outputs, weights_only=True)
    assert len(elsewhere) == AFTER
    ends = sum(int((step["/2"] | step["/3"]).sum()) for step in elsewhere)
    assert ends >= 8, "every world ends twice"
    for time, (a, b) in enumerate(zip(straight[BEFORE:], elsewhere, strict=True)):
        assert a.keys() == b.keys()
        for path in a:
            assert torch.equal(a[path], b[path]), f"{path} differs at step {time}"
