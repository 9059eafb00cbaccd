"""``export format=onnx``: a policy that acts as PyTorch's does, from a file that needs neither torch nor the task."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mujoco
import numpy as np
import pytest
import torch
from gymnasium import spaces

import sheeplike.player
from sheeplike.agents import registry
from sheeplike.agents.policy import PolicyNetworks
from sheeplike.commands import Request, export
from sheeplike.commands.export import history, main
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources
from sheeplike.envs.gym.observations import translate
from sheeplike.options import CommandError
from sheeplike.player import Player
from sheeplike.trained import onnx

IMAGE = spaces.Box(0, 255, (48, 48, 3), np.uint8)
DEPTH = spaces.Box(0, np.inf, (48, 48, 1), np.float32)
VECTOR = spaces.Box(-np.inf, np.inf, (5,), np.float32)
WORLD = {"pixels/a": IMAGE, "pixels/b": IMAGE, "depth/a": DEPTH, "state": VECTOR, "privileged_state": VECTOR}
CONTINUOUS = spaces.Box(-1, 1, (3,), np.float32)
slow = pytest.mark.slow
KINDS = {
    "dreamer, pixels": (["exp=dreamer_v3"], ["pixels/a"], CONTINUOUS, True),
    "ppo, frame stack": (
        ["exp=ppo", "agent.frame_stack=3", "agent.value_observations=[pixels/*,privileged_state]"],
        ["pixels/a"],
        CONTINUOUS,
        True,
    ),
    "dreamer, all": (["exp=dreamer_v3"], ["pixels/*", "depth/a", "state"], spaces.MultiDiscrete([2, 3]), True),
    "dreamer, vectors": (["exp=dreamer_v3"], ["state"], spaces.Discrete(4, start=-1), False),
    "ppo, vectors": (["exp=ppo", "agent.distribution=clipped_normal"], ["state"], CONTINUOUS, True),
    "ppo, cameras": (["exp=ppo"], ["pixels/*", "state"], spaces.Discrete(4), False),
}
QUICK = 2  # the others need minutes together


def make(arguments: list[str], observations: list[str], actions: spaces.Space) -> PolicyNetworks:
    chosen = [*arguments, "env=cartpole_balance", "profile=cpu", f"agent.observations=[{','.join(observations)}]"]
    config = load(chosen, Sources()).config.agent
    return registry.find(config.name).load().networks_class(spaces.Dict(WORLD), actions, config)


def look(random: np.random.Generator, networks: PolicyNetworks) -> dict[str, np.ndarray]:
    return {
        key: random.integers(256, size=space.shape, dtype=np.uint8)
        if space.dtype == np.uint8
        else random.standard_normal(space.shape, np.float32)
        for key, space in networks.observations.items()
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if number < QUICK else slow) for number, kind in enumerate(KINDS)]
)
def test_the_player_acts_as_the_networks_do(kind: str, randomised: Callable[[torch.nn.Module], None]) -> None:
    arguments, observations, actions, sample = KINDS[kind]
    networks = make(arguments, observations, actions)
    randomised(networks)
    player, same = Player(onnx.convert(networks, {}, sample=sample), seed=7), np.random.default_rng(7)
    random, chosen = np.random.default_rng(0), set()
    for step in range(200):
        if step % 60 == 0:
            player.reset()
            state, is_first = networks.initial(1), torch.tensor([True])
        seen = look(random, networks)
        noise = [
            torch.from_numpy(
                (same.random if one["kind"] == "uniform" else same.standard_normal)(one["shape"], np.float32)
            )
            for one in player.facts["noise"]
        ]
        obs = {key: torch.from_numpy(value)[None] for key, value in seen.items()}
        with onnx.GivenNoise(noise):
            state, expected, _ = networks.act(state, obs, is_first, sample=sample)
        is_first = torch.tensor([False])
        action = player.act({**seen, "another": 0})
        np.testing.assert_allclose(action, expected[0].numpy(), atol=1e-4)
        assert action.shape == actions.shape
        assert actions.contains(action.astype(actions.dtype))
        chosen.add(action.tobytes())
    assert len(chosen) > 1, "it acts on what it sees"


SPACES = {
    "box": spaces.Box(np.array([[-2.0, 0.0]]), np.array([[1.0, 9.0]]), dtype=np.float64),
    "whole box": spaces.Box(-3, 2**31 - 1, (2,), np.int64),
    "choices": spaces.Discrete(5, start=2),
    "several": spaces.MultiDiscrete([[2, 3]], start=[[1, -1]]),
    "bits": spaces.MultiBinary(3),
}


@pytest.mark.parametrize("name", SPACES)
def test_actions_are_scaled_as_the_environment_does(name: str) -> None:
    native = SPACES[name]
    ours, to_env = translate(native)
    ours.seed(0)
    described = onnx.describe_actions(native)
    for _ in range(50):
        action = np.asarray(ours.sample() * 1.5 if isinstance(ours, spaces.Box) else ours.sample())
        given = onnx.to_native(torch.as_tensor(action)[None], native, ours)[0].numpy()
        np.testing.assert_allclose(given, to_env(action), atol=1e-6)
        assert list(given.shape) == described["shape"]
        assert given.dtype == described["dtype"]
        assert np.all(given >= described["low"])
        assert np.all(given <= described["high"])


class Swapped(PolicyNetworks):
    """A policy of another package, which returns its state in another order than it began with."""

    def build(self) -> None:
        self.observations = {"state": VECTOR}

    def initial(self, num_envs: int) -> dict[str, torch.Tensor]:
        return {"sum": torch.zeros(num_envs, 3), "count": torch.zeros(num_envs, 3)}

    def act(self, state: dict, obs: dict, is_first: torch.Tensor, *, sample: bool = True) -> tuple:
        before = {name: torch.where(is_first[:, None], 0.0, value) for name, value in state.items()}
        state = {"count": before["count"] + 1, "sum": before["sum"] + obs["state"][:, :3]}
        return state, (state["sum"] / state["count"]).clamp(-1, 1), {}


class Drawing(Swapped):
    def act(self, state: dict, obs: dict, is_first: torch.Tensor, *, sample: bool = True) -> tuple:
        state, action, extras = super().act(state, obs, is_first)
        drawn = torch.randn(action.shape) if sample else torch.bernoulli(torch.full(action.shape, 0.5))
        return state, action + drawn, extras


def test_state_is_kept_by_name() -> None:
    networks = Swapped(spaces.Dict(WORLD), CONTINUOUS, None)
    player = Player(onnx.convert(networks, {}, sample=False))
    actions = [player.act({"state": np.full(5, value, np.float32)})[0] for value in (0.2, 0.4, 0.9)]
    np.testing.assert_allclose(actions, [0.2, 0.3, 0.5], atol=1e-6)


@pytest.mark.parametrize("sample", [True, False])
def test_a_policy_that_draws_in_another_way_is_refused(sample: bool) -> None:
    with pytest.raises(CommandError, match="draws by"):
        onnx.convert(Drawing(spaces.Dict(WORLD), CONTINUOUS, None), {}, sample=sample)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's policy, written by the command."""
    place = tmp_path_factory.mktemp("policies") / "pick.onnx"
    main(Request(["run=demo:franka_pick", "format=onnx", f"to={place}", "sample=false"], [], help=False))
    return place


def test_the_file_says_what_a_robot_needs(file: Path) -> None:
    facts = Player(str(file)).facts
    assert facts["observations"] == {"pixels/front": {"shape": [48, 48, 3], "dtype": "uint8"}}
    assert (facts["rate"], facts["action_names"]) == (20.0, ["sideways", "up", "gripper"])
    assert facts["action"] == {"shape": [3], "dtype": "float32", "low": [-1.0] * 3, "high": [1.0] * 3}
    assert str(Path(sheeplike.player.__file__).parent).encode() not in file.read_bytes(), "no path of this machine"
    front = facts["cameras"]["front"]
    assert (front["body"], front["mode"], front["fov_y"]) == ("world", "fixed", 36.0)
    assert len(front["position"]) + len(front["quaternion"]) == 7


def test_the_player_needs_neither_torch_nor_this_package(file: Path, tmp_path: Path) -> None:
    copied = shutil.copy(sheeplike.player.__file__, tmp_path / "player.py")
    program = f"""
import sys
sys.modules.update(dict.fromkeys(["torch", "jax", "sheeplike", "gymnasium", "mujoco"]))
import numpy as np
from player import Player
player = Player({str(file)!r})
first = player.act({{"pixels/front": np.zeros((48, 48, 3), np.uint8)}})
assert first.shape == (3,) and first.dtype == np.float32
"""
    subprocess.run([sys.executable, "-c", program], cwd=Path(copied).parent, check=True)


def test_an_observation_that_does_not_fit_is_refused(file: Path) -> None:
    player = Player(str(file))
    with pytest.raises(ValueError, match="pixels/front"):
        player.act({})
    with pytest.raises(ValueError, match="float64"):
        player.act({"pixels/front": np.zeros((48, 48, 3))})


def test_a_new_episode_forgets_the_last_one(file: Path) -> None:
    dark, bright = ({"pixels/front": np.full((48, 48, 3), value, np.uint8)} for value in (0, 255))
    one, other = Player(str(file)), Player(str(file))
    first = one.act(dark)
    assert other.act(bright).tolist() != first.tolist()
    for player in (one, other):
        player.reset()
    assert one.act(dark).tolist() == other.act(dark).tolist(), "both have drawn the same noise so far"
    one.act(dark)
    other.act(bright)
    assert one.act(dark).tolist() != other.act(dark).tolist(), "within an episode it remembers"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["to=policy.bin"], "policy.bin.onnx"),
        (["format=safetensors", "sample=true"], "format=onnx"),
        (["checkpoint=best"], "last"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(arguments: list[str], expected: str) -> None:
    with pytest.raises(CommandError, match=expected):
        main(Request(["run=demo:franka_pick", "format=onnx", *arguments], [], help=False))


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_what_is_there_is_never_replaced(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(export, "rebuild")  # it is refused before that
    place = tmp_path / "policy.onnx"
    {"file": place.touch, "directory": place.mkdir, "link": lambda: place.symlink_to("elsewhere")}[kind]()
    with pytest.raises(CommandError, match=r"policy\.onnx"):
        main(Request(["run=demo:franka_pick", "format=onnx", f"to={place}"], [], help=False))


def test_what_a_run_tells_of_its_policy(tmp_path: Path) -> None:
    assert history(tmp_path, 100) == {}, "as of an export"
    rows = [{"step": step, "seconds": 1.0, "eval/return_mean": float(step), "loss/kl": 1.0} for step in (50, 100, 150)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "starts.jsonl").write_text('{"commit": {"sheeplike": "abc"}}\n')
    assert history(tmp_path, 120) == {"scores": {"step": 100, "eval/return_mean": 100.0}, "commit": "abc"}
    for damaged in (b"", b"[1]\n", b'{"commit": ', b'{"commit": {}}\n', b"[" * 100_000, b"\xff"):
        (tmp_path / "starts.jsonl").write_bytes(damaged)
        assert "commit" not in history(tmp_path, 120)


def test_a_run_in_a_gymnasium_environment_keeps_its_bounds(tmp_path: Path) -> None:
    job = ["exp=ppo", "env=gym", "env.id=Pendulum-v1", "env.options.frames=none", "agent.observations=[state]"]
    with sheeplike.init(*job, "profile=cpu", "compile=off", "dry_run=true", f"run_dir={tmp_path / 'run'}") as run:
        run.iterate(1)
    main(Request([f"run={tmp_path / 'run'}", "format=onnx"], [], help=False))
    (file,) = (tmp_path / "run" / "export").iterdir()
    player = Player(str(file))
    assert player.facts["action"] == {"shape": [1], "dtype": "float32", "low": [-2.0], "high": [2.0]}
    assert (player.facts["rate"], player.facts["cameras"]) == (None, {})
    assert player.act({"state": np.zeros(3, np.float32)}).shape == (1,)


@pytest.mark.parametrize("facts", ["", "[1]", "null", "{}", '{"format": 0}', '{"format": 1, "observations": []}'])
def test_an_onnx_file_of_another_kind_is_refused(facts: str, file: Path) -> None:
    import onnx as library

    model = library.load(str(file))
    model.metadata_props[0].value = facts
    with pytest.raises(ValueError, match="format=onnx"):
        Player(model.SerializeToString())


@slow
def test_the_robot_of_the_page_is_driven(file: Path) -> None:
    deploy = Path(__file__).parents[2] / "howto" / "deploy"
    arguments = ["--rate", "0", "--episodes", "1", "--port", "8731"]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, str(deploy / "robot.py"), *arguments], **pipes) as robot:
        assert "listening" in robot.stdout.readline()
        control = [sys.executable, str(deploy / "control.py"), str(file), "localhost:8731", "--rate", "0"]
        subprocess.run(control, check=True)
        assert "1 of 1" in robot.stdout.read()


def test_cameras_are_described_as_mujoco_has_them() -> None:
    model = mujoco.MjModel.from_xml_string(
        """<mujoco><worldbody><body name="arm"><joint/><geom size="1" mass="1"/>
        <camera name="still" pos="1 2 3" fovy="30"/><camera name="follows" mode="trackcom"/>
        </body></worldbody></mujoco>"""
    )
    found = onnx.describe_cameras(model, ["follows", "still"])
    assert found["follows"]["mode"] == "trackcom"
    assert found["still"] == {
        "body": "arm",
        "mode": "fixed",
        "position": [1.0, 2.0, 3.0],
        "quaternion": [1.0, 0.0, 0.0, 0.0],
        "fov_y": 30.0,
    }
