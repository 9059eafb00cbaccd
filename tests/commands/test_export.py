"""``export``: the weights of a run as safetensors, from which the same agent can be made without the task."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from lightning.fabric import Fabric
from safetensors.torch import load_file, save_file

from sheeplike import checkpoint
from sheeplike.__main__ import main
from sheeplike.agents.agent import Agent
from sheeplike.commands import Request
from sheeplike.config.compose import load, load_saved
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.envs.spaces import Spaces
from sheeplike.options import CommandError
from sheeplike.run.build import make_agent, make_envs
from sheeplike.run.run_dir import claim
from sheeplike.trained.exported import load_agent

AGENTS = {
    "dreamer_v3": ["exp=dreamer_v3", "agent.observations=[pixels/*,state]"],
    "ppo": ["exp=ppo", "agent.value_observations=[pixels/*,state]", "agent.frame_stack=2"],
}


@pytest.fixture(scope="module", params=AGENTS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Agent]:
    """A run with checkpoints at 64 and 128 policy steps, of an agent whose every parameter has moved; that agent."""
    run_dir = tmp_path_factory.mktemp("runs") / "mine"
    arguments = [*AGENTS[request.param], "env=cartpole_balance", "profile=cpu", "dry_run=true", f"run_dir={run_dir}"]
    config = load(arguments, Sources()).config
    envs = make_envs(config, config.env.num_envs, torch.device("cpu"))
    agent = make_agent(config, envs, Fabric(accelerator="cpu", devices=1))
    spaces = Spaces.of(envs.single_observation_space, envs.single_action_space).model_dump(mode="json")
    with claim(run_dir, config):
        pass
    for step in (64, 128):
        with torch.no_grad():
            for tensor in agent.state_dict(replay=False)["modules"].values():
                tensor.add_(torch.randn(tensor.shape) * 0.1 if tensor.is_floating_point() else 1)
        # A transposed view and a tensor that shares memory: neither is what safetensors takes.
        state = agent.state_dict(replay=False)
        state["modules"] = {
            name: value.t().contiguous().t() if value.ndim == 2 else value for name, value in state["modules"].items()
        }
        with checkpoint.Writer(run_dir / "checkpoints", keep_last=9, config=to_data(config)) as writer:
            writer.save(step, {"agent": state, "envs": {}}, {"score": -step, "spaces": spaces}, finite=(), wait=True)
    return run_dir, agent


@pytest.fixture
def run_dir(trained: tuple[Path, Agent], tmp_path: Path) -> Path:
    return shutil.copytree(trained[0], tmp_path / "run")


def experience(agent: Agent) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    seen = {
        key: torch.randint(256, (3, *space.shape), dtype=torch.uint8)
        if space.dtype == "uint8"
        else torch.randn(3, *space.shape)
        for key, space in agent.keys.spaces.items()
    }
    return seen, torch.tensor([True, False, False])


def test_the_agent_that_is_loaded_is_the_one_that_was_trained(
    trained: tuple[Path, Agent], run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["export", f"run={run_dir}"])
    place = run_dir / "export/step_000000000128"
    assert sorted(path.name for path in place.iterdir()) == ["config.yaml", "model.json", "weights.safetensors"]
    agent, expected = trained[1], trained[1].state_dict(replay=False)["modules"]
    tensors = load_file(place / "weights.safetensors")
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert tensors[name].dtype == value.dtype
        assert torch.equal(tensors[name], value), name

    loaded = load_agent(place)
    assert loaded.keys.spaces == agent.keys.spaces
    player, same = agent.player(3), loaded.player(3)
    for _ in range(3):
        obs, is_first = experience(agent)
        torch.manual_seed(0)
        action = same.act(obs, is_first)
        torch.manual_seed(0)
        assert torch.equal(action, player.act(obs, is_first))
    for key in agent.keys.images:  # of another dtype they would be other pictures
        with pytest.raises(TypeError, match=key):
            same.act(obs | {key: obs[key].float()}, is_first)

    # From the run itself, of any checkpoint.
    for name, is_it in (("last", True), ("64", False), (64, False)):
        found = load_agent(run_dir, checkpoint=name).state_dict()
        assert all(torch.equal(found[key], value) for key, value in expected.items()) == is_it

    # As printed; and without JAX, which a robot may not have.
    code = textwrap.dedent(capfd.readouterr().out.partition("load it:\n")[2])
    code += "import sys\nassert len(action) == 1\nassert not {'jax', 'mujoco', 'warp'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

    model = json.loads((place / "model.json").read_text())
    assert model["step"] == 128
    assert load_saved(place / "config.yaml").config == load_saved(run_dir / "config.yaml").config.replace(run_dir=None)
    assert model["versions"]["torch"]


def test_which_checkpoint_and_where(run_dir: Path, tmp_path: Path, refusal: Callable[..., str]) -> None:
    main(["export", f"run={run_dir}", "checkpoint=best", f"to={tmp_path}/shared/mine"])
    assert json.loads((tmp_path / "shared/mine/model.json").read_text())["step"] == 64
    assert not (run_dir / "export").exists()
    before = {path: path.read_bytes() for path in (tmp_path / "shared").rglob("*") if path.is_file()}
    error = refusal("export", f"run={run_dir}", f"to={tmp_path}/shared/mine")
    assert f"{tmp_path}/shared/mine" in error
    assert error.endswith(f"nearest: to={tmp_path}/shared/mine_2")
    assert {path: path.read_bytes() for path in (tmp_path / "shared").rglob("*") if path.is_file()} == before
    main(["export", f"run={run_dir}", "checkpoint=64"])
    error = refusal("export", str(run_dir), "checkpoint=64")
    assert error.names("export/step_000000000064", "to=")


@pytest.mark.parametrize(("to", "nearest"), [(".", "_2"), ("/", "/run_2"), ("~nouser/x", "./~nouser/x'")])
def test_places_without_a_name(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str], to: str, nearest: str
) -> None:
    monkeypatch.chdir(run_dir)
    assert refusal("export", f"run={run_dir}", f"to={to}").endswith(nearest)


def test_nothing_is_left_where_it_cannot_be_written(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("os.rename", full)
    assert os.strerror(28) in refusal("export", f"run={run_dir}")
    assert list((run_dir / "export").iterdir()) == []


def test_what_is_refused(run_dir: Path, refusal: Callable[..., str]) -> None:
    assert "run=" in refusal("export")
    assert "run=demo:franka_pick" in refusal("export", "run=demo")
    assert "models/franka_pick" in refusal("export", "run=demo:franka_pick")
    assert "nearest: checkpoint=64" in refusal("export", f"run={run_dir}", "checkpoint=6")
    assert "nearest: checkpoint" in refusal("export", f"run={run_dir}", "chekpoint=64")
    config = run_dir / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("- 64\n", "- 65\n").replace("size: 1m", "size: 12m"))
    meta, parts = checkpoint.load_latest(run_dir / "checkpoints")
    spaces = {"spaces": meta["spaces"]}
    saved = to_data(load_saved(config).config)
    with checkpoint.Writer(run_dir / "checkpoints", keep_last=9, config=saved) as writer:
        writer.save(192, parts, spaces, finite=(), wait=True)
    error = refusal("export", f"run={run_dir}")
    assert "config.yaml" in error
    config.write_text(text)
    saved = to_data(load_saved(config).config)
    with checkpoint.Writer(run_dir / "checkpoints", keep_last=9, config=saved) as writer:
        writer.save(256, {"agent": {"modules": [1]}}, spaces, finite=(), wait=True)
    assert f"run={run_dir}" in refusal("export", f"run={run_dir}")
    with checkpoint.Writer(run_dir / "checkpoints", keep_last=9, config=saved) as writer:
        writer.save(320, parts, {"spaces": 3}, finite=(), wait=True)
    assert f"run={run_dir}" in refusal("export", f"run={run_dir}")
    with checkpoint.Writer(run_dir / "checkpoints", keep_last=9, config=saved) as writer:
        writer.save(384, parts, {}, finite=(), wait=True)
    assert f"run={run_dir}" in refusal("export", f"run={run_dir}")
    assert not (run_dir / "export").exists()


def test_an_export_is_data_that_may_be_damaged(run_dir: Path) -> None:
    main(["export", f"run={run_dir}"])
    (place,) = (run_dir / "export").iterdir()
    weights, model = place / "weights.safetensors", place / "model.json"
    content, text = weights.read_bytes(), model.read_text()
    described = json.loads(text)

    def problem() -> str:
        with pytest.raises(CommandError) as caught:
            load_agent(place)
        return str(caught.value)

    weights.write_bytes(content[:-1])
    assert "weights.safetensors" in problem()
    weights.unlink()
    assert "weights.safetensors" in problem()
    weights.write_bytes(content)
    box = {"type": "Box", "shape": [2**16] * 4, "dtype": "float32", "low": None, "high": None}
    for change in (
        {"format": 2},
        {"step": -1},
        {"step": 10**400},
        {"observations": {"pixels/fixed": box}},
        {"observations": {"state": box | {"dtype": "object"}}},
        {"actions": {"type": "os.system"}},
        {"actions": {"type": "Discrete", "n": 0}},
        {"actions": {"type": "Discrete", "n": 10**9}},
        {"actions": {"type": "Discrete", "n": "3"}},
        {"actions": {"type": "MultiDiscrete", "nvec": [2, 3], "start": [0]}},
        {"actions": {"type": "MultiDiscrete", "nvec": [2, [3]], "start": [0, 0]}},
        {"actions": {"type": "MultiDiscrete", "nvec": [], "start": []}},
    ):
        model.write_text(json.dumps(described | change))
        assert str(place) in problem()
    model.write_text("[" * 100_000)
    assert "model.json" in problem()
    model.write_text(text)
    saved = place / "config.yaml"
    written = saved.read_text()
    agent = yaml.safe_load(written)["agent"]
    for changed in (agent | {"_target_": "os.system"}, {"name": "os"}, {"name": []}, [], None):
        saved.write_text(yaml.safe_dump({"format": 1, "agent": changed, "fabric": {"precision": "32-true"}}))
        assert str(place) in problem()
    saved.write_text(written)
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[:-1]), weights)
    assert "weights.safetensors" in problem()
    save_file({name: value.bool() for name, value in tensors.items()}, weights)
    assert "weights.safetensors" in problem()


def test_the_command_on_the_page_about_agents_counts(
    trained: tuple[Path, Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "howto/add_an_agent.md"
    program = re.search(r"## Add a command\n.*?```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    exec(program, names := {})
    names["main"](Request([f"run={trained[0]}"], [], help=False))
    weights = trained[1].state_dict(replay=False)["modules"]
    assert f"{sum(value.numel() for value in weights.values()):,}" in capsys.readouterr().out
