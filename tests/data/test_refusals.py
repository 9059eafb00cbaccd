"""Files that cannot be used: one line that names the file, the key, and what was found or expected."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from sheeplike.data.episodes import fit
from sheeplike.data.reading import guess_format, read, require
from sheeplike.options import CommandError

SPACES = {"pixels/front": spaces.Box(0, 255, (6, 8, 3), np.uint8), "state": spaces.Box(-9, 9, (4,), np.float32)}
BOX, CHOICES = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)


def whole(steps=5):
    """An episode as this project writes it."""
    return {
        "pixels/front": np.zeros((steps + 1, 6, 8, 3), np.uint8),
        "state": np.zeros((steps + 1, 4), np.float32),
        "action": np.zeros((steps, 2), np.float32),
        "reward": np.zeros(steps, np.float32),
        "terminated": np.bool_(False),
        "truncated": np.bool_(True),
    }


def refused(place, actions=BOX, layout=None, observations=SPACES):
    with pytest.raises(CommandError) as caught:
        list(fit(episode, observations, actions, {}) for episode in read(place, layout))
    line = str(caught.value)
    assert "\n" not in line
    assert str(place) in line
    return line


def set_to(name, value):
    return lambda arrays: arrays | {name: value}


def without(*names):
    return lambda arrays: {name: value for name, value in arrays.items() if name not in names}


FRAMES = np.zeros((6, 6, 8, 3))
MALFORMED = {
    "no observation": (without("state"), ["state", "pixels/front", "data.keys"]),
    "no image": (without("pixels/front"), ["pixels/front", "data.keys"]),
    "no actions": (without("action"), ["action"]),
    "no rewards": (without("reward"), ["reward"]),
    "no end": (without("terminated", "truncated"), ["terminated", "is_terminal"]),
    "nothing but an end": (lambda arrays: {"terminated": np.True_}, ["action"]),
    "other image size": (set_to("pixels/front", np.zeros((6, 64, 64, 3), np.uint8)), ["pixels/front", "image_size=64"]),
    "oblong image": (set_to("pixels/front", np.zeros((6, 3, 48, 64), np.uint8)), ["image_size=[48,64]"]),
    "float image": (set_to("pixels/front", FRAMES.astype(np.float32)), ["pixels/front", "float32", "uint8"]),
    "other vector size": (set_to("state", np.zeros((6, 5), np.float32)), ["state", "(6, 5)", "(6, 4)"]),
    "text for a vector": (set_to("state", np.full((6, 4), "a")), ["state", "numbers"]),
    "NaN in a vector": (set_to("state", np.full((6, 4), np.nan)), ["state", "NaN"]),
    "too large for float32": (set_to("state", np.full((6, 4), 1e300)), ["state", "float32"]),
    "NaN reward": (set_to("reward", np.array([0, 0, np.nan, 0, 0])), ["reward", "NaN"]),
    "text for rewards": (set_to("reward", np.array(["a"] * 5)), ["reward"]),
    "infinite action": (set_to("action", np.full((5, 2), np.inf)), ["action", "infinity"]),
    "action out of range": (set_to("action", np.full((5, 2), 1.01)), ["action", "1.01", "from -1 to 1"]),
    "other action size": (set_to("action", np.zeros((5, 3))), ["action", "(6, 3)", "(6, 2)"]),
    "fewer rewards": (set_to("reward", np.zeros(4)), ["4 rewards", "5 actions"]),
    "fewer actions": (set_to("action", np.zeros((3, 2))), ["3 actions"]),
    "fewer of one observation": (set_to("state", np.zeros((5, 4))), ["'state': 5", "'pixels/front': 6"]),
    "a single number for actions": (set_to("action", np.float32(1)), [""]),
    "as many actions as observations": (
        lambda arrays: arrays | {"action": np.zeros((6, 2)), "reward": np.zeros(6)},
        ["6 actions", "is_first"],
    ),
    "pickled objects": (set_to("state", np.array([{}] * 6, object)), ["pickle"]),
    "one step": (lambda arrays: whole(0), ["1 step", "at least 2"]),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_npz(case, tmp_path):
    change, facts = MALFORMED[case]
    np.savez(tmp_path / "fine.npz", **whole())
    np.savez(tmp_path / "wrong.npz", **change(whole()))
    line = refused(tmp_path)
    for fact in ("wrong.npz", *facts):
        assert fact in line


@pytest.mark.parametrize(
    ("action", "facts"),
    [
        (np.array([0, 1, 2, 3, 0]), ["action", "0 to 3", "Discrete(3)"]),
        (np.array([0, -1, 2, 1, 0]), ["action", "-1 to 2"]),
        (np.array([0, 0.5, 1, 1, 0]), ["action", "float64", "whole numbers"]),
        (np.zeros((5, 2), np.int64), ["action", "(6, 2)", "(6,)"]),
        (np.full((5, 3), 1 / 3), ["action", "(6, 3)", "(6,)"]),  # probabilities are no choice
    ],
)
def test_choices(action, facts, tmp_path):
    np.savez(tmp_path / "wrong.npz", **whole() | {"action": action})
    line = refused(tmp_path, CHOICES)
    for fact in ("wrong.npz", *facts):
        assert fact in line


@pytest.mark.parametrize("content", ["", "PK", "cut", "text", "array"])
@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_broken_files(content, suffix, tmp_path):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    file = tmp_path / f"wrong.{suffix}"
    np.savez(tmp_path / "a.npz", **whole())
    with open(tmp_path / "array", "wb") as array:
        np.save(array, np.zeros(3))
    known = {"cut": (tmp_path / "a.npz").read_bytes()[:900], "array": (tmp_path / "array").read_bytes()}
    (tmp_path / "a.npz").unlink()
    file.write_bytes(known.get(content, content.encode()))
    assert guess_format(tmp_path) == suffix
    assert f"wrong.{suffix}" in refused(tmp_path)


def test_no_files(tmp_path):
    with pytest.raises(CommandError, match=rf"data\.path={tmp_path}.*npz.*parquet.*Minari.*LeRobot"):
        guess_format(tmp_path)
    assert not list(read(tmp_path, "npz"))


PICTURE = io.BytesIO()
Image.fromarray(np.zeros((6, 8, 3), np.uint8)).save(PICTURE, "PNG")


def rows(steps=4, **changed):
    columns = {
        "observation": [{"bytes": PICTURE.getvalue(), "path": ""}] * steps,
        "action": [[0.0, 0.0]] * steps,
        "reward": [0.0] * steps,
        "terminated": [False] * (steps - 1) + [True],
        "truncated": [False] * steps,
    }
    return {name: value for name, value in (columns | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"reward": None}, "reward"),
        ({"truncated": None}, "truncated"),
        ({"action": [[0.0], [0.0, 0.0], [0.0], [0.0]]}, "shape"),
        ({"observation": [{"bytes": b"no image", "path": ""}] * 4}, "image"),
        ({"observation": [None] * 4}, "observation"),
        ({"reward": [None] * 4}, "reward: found NaN"),
        ({"action": ["left"] * 4}, "action: found"),
    ],
)
def test_parquet(changed, fact, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "wrong.parquet"
    pq.write_table(pa.table(rows(**changed)), file)
    assert fact in refused(file, observations={"pixels/front": SPACES["pixels/front"]})
    file.write_bytes(file.read_bytes()[:-20])
    assert "wrong.parquet" in refused(file)


def test_minari(tmp_path):
    pytest.importorskip("minari")
    facts = tmp_path / "data" / "metadata.json"
    facts.parent.mkdir()
    for content in (
        "{",
        "{}",
        "[]",
        json.dumps({"data_format": "hdf5", "observation_space": "{", "action_space": "{"}),
    ):
        facts.write_text(content)
        assert guess_format(tmp_path) == "minari"
        assert "Minari" in refused(tmp_path)
    assert "Minari" in refused(tmp_path / "absent", layout="minari")
    assert not (tmp_path / "absent").exists()


def test_lerobot(tmp_path, monkeypatch):
    """A dataset that is not whole is refused, and nothing is fetched in its place."""
    pytest.importorskip("lerobot")
    try:
        require("lerobot.datasets.lerobot_dataset")
    except CommandError as error:
        pytest.skip(str(error))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("connects to the network"))
    facts = tmp_path / "meta" / "info.json"
    facts.parent.mkdir()
    whole = {"codebase_version": "v3.0", "fps": 25, "features": {}, "total_frames": 0, "total_episodes": 0}
    for content in ("{", "{}", "[]", json.dumps(whole), json.dumps(whole | {"codebase_version": "v2.1"})):
        facts.write_text(content)
        assert guess_format(tmp_path) == "lerobot"
        assert "LeRobot v3.0" in refused(tmp_path)
    assert "LeRobot" in refused(tmp_path / "absent", layout="lerobot")
    assert not (tmp_path / "absent").exists()


def test_another_camera_is_taken_by_name_alone(cartpole):
    episode = cartpole.episodes[0]
    other = replace(episode, obs={"pixels/wrist": episode.obs["pixels/fixed"]})
    spaces = {"pixels/fixed": cartpole.spaces["pixels/fixed"]}
    with pytest.raises(CommandError, match="pixels/fixed"):
        fit(other, spaces, cartpole.action, {})
    found = fit(other, spaces, cartpole.action, {"pixels/fixed": "pixels/wrist"})
    assert np.array_equal(found.obs["pixels/fixed"], episode.obs["pixels/fixed"])
