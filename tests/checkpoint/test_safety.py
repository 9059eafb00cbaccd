"""What could not be loaded again is not written, and nothing that could run code is read."""

import errno
import hashlib
import io
import json
import pickle
import re
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

import sheeplike
from sheeplike.checkpoint import Corrupt, load, load_latest, save


def parts(value: float = 1.0) -> dict:
    model = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(model.weight, value)
    return {"agent": {"model": model.state_dict(), "updates": 7}, "loop": {"ratio": {"carry": 0.25}, "name": "dreamer"}}


def save_steps(root: Path, *steps: int, keep: int = 10) -> list[Path]:
    return [save(root, step, parts(float(step)), {"config": "seed: 1"}, keep_last=keep) for step in steps]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def forge(path: Path, part: str, content: bytes) -> None:
    """Replace a part's file and make the manifest agree, as an attacker would."""
    (path / part).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][part] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(path, manifest)


def read(path: Path) -> dict:
    return json.loads((path / "manifest.json").read_text())


def rewrite(path: Path, manifest: dict) -> None:
    manifest.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


# Refusals, before anything is written


class Colour(int):
    pass


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.zeros(3), "numpy.ndarray"),
        (np.float64(1.0), "numpy.float64"),
        (defaultdict(list), "collections.defaultdict"),
        (Counter(), "collections.Counter"),
        (Path("x"), "pathlib.PosixPath"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (Colour(1), "test_safety.Colour"),
        (lambda: None, "builtins.function"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_could_not_be_loaded_is_refused_by_its_key(tmp_path, value, kind):
    with pytest.raises(TypeError) as caught:
        save(tmp_path, 1, {"agent": {"player": [0, {"carry": value}]}}, {}, keep_last=1)
    message = str(caught.value)
    assert message.startswith("agent['player'][1]['carry'] is ")
    assert kind.split(".")[-1] in message
    assert "expected tensors, numbers" in message
    assert "\n" not in message
    assert names(tmp_path) == []


def test_a_key_that_could_not_be_loaded_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"a key of agent is numpy\.int64"):
        save(tmp_path, 1, {"agent": {np.int64(1): 1}}, {}, keep_last=1)


@pytest.mark.parametrize(
    ("step", "part", "meta", "keep", "error", "message"),
    [
        (1, "agent", {}, 0, ValueError, "keep_last=0: expected at least 1"),
        (-1, "agent", {}, 1, ValueError, "step=-1: expected"),
        (1, "../agent", {}, 1, ValueError, r"part '\.\./agent': expected a file name"),
        (1, "", {}, 1, ValueError, "part ''"),
        (1, "agent", {"path": Path("x")}, 1, TypeError, "meta cannot be written as JSON"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, step, part, meta, keep, error, message):
    with pytest.raises(error, match=message):
        save(tmp_path, step, {part: {}}, meta, keep_last=keep)
    assert names(tmp_path) == []


# Hostile checkpoints


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("wrap", [pickle.dumps, None], ids=["pickle", "torch.save"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, wrap):
    save_steps(tmp_path / "root", 1)
    (path,) = save_steps(tmp_path / "root", 2)
    buffer, fired = io.BytesIO(), tmp_path / "fired"
    torch.save({"x": Bomb(fired)}, buffer)
    forge(path, "agent.pt", wrap({"x": Bomb(fired)}) if wrap else buffer.getvalue())
    with pytest.raises(Corrupt, match=r"agent\.pt: refused by weights_only"):
        load(path)
    with pytest.warns(RuntimeWarning, match="refused by weights_only"):
        assert load_latest(tmp_path / "root")[0]["step"] == 1
    assert not fired.exists()


@pytest.mark.parametrize("name", ["../../secret.pt", "/etc/passwd", "a/b.pt"])
def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path, name):
    (path,) = save_steps(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": ""}
    rewrite(path, manifest)
    with pytest.raises(Corrupt, match="which is no file name"):
        load(path)


@pytest.mark.parametrize(
    "journals",
    [
        [1],
        {"memory": [1]},
        {"memory": {"replay": 7}},
        {"memory": {"replay": {"lineage": "mine", "oldest": 0, "end": 5, "chunks": [1]}}},
        {"memory": {"replay": {"lineage": "mine", "oldest": 0, "end": 5, "chunks": [["absent.pt", 0, 5]]}}},
        {"memory": {"replay": {"lineage": "mine", "oldest": 0, "end": 5, "chunks": [["agent.pt", "0", 5]]}}},
        {"memory": {"replay": {"oldest": 0, "end": 0, "chunks": []}}},
    ],
)
def test_a_manifest_that_was_made_up_does_not_keep_the_next_checkpoint_from_being_written(tmp_path, rings, journals):
    replay = rings.make()
    replay.lineage = "mine"
    rings.fill(replay, 25)
    path = rings.save(tmp_path, 1, replay)
    rewrite(path, read(path) | {"journals": journals})
    rings.fill(replay, 5)
    rings.assert_same(replay, rings.restore(rings.save(tmp_path, 2, replay)))


@pytest.mark.parametrize("copied", [False, True], ids=["linked", "copied"])
@pytest.mark.parametrize("size", ["its own", "the other's"])
def test_a_file_from_elsewhere_does_not_get_into_the_next_checkpoint(tmp_path, rings, fail, copied, size):
    """Neither by a name that leads out of the directory, nor by a link to what is the same."""
    if copied:
        fail("os.link", OSError(errno.EPERM, "no links here"))
    replay = rings.make()
    rings.fill(replay, 10)
    path = rings.save(tmp_path / "root", 1, replay)
    (chunk,) = path.glob("memory.replay.*.pt")
    secret = tmp_path / "secret.pt"
    chunk.rename(secret)
    chunk.symlink_to(secret)
    manifest = read(path)
    if size == "its own":
        manifest["files"][chunk.name]["bytes"] = chunk.lstat().st_size
    rewrite(path, manifest)
    newest = rings.save(tmp_path / "root", 2, replay)
    assert not any(file.is_symlink() or file.samefile(secret) for file in newest.iterdir())
    rings.assert_same(replay, rings.restore(newest))
    manifest = read(path)
    name = f"../../{secret.name}"
    files = {name if key == chunk.name else key: entry for key, entry in manifest["files"].items()}
    manifest["journals"]["memory"]["replay"]["chunks"] = [[name, 0, 10]]
    rewrite(path, manifest | {"files": files})
    shutil.rmtree(newest)
    newest = rings.save(tmp_path / "root", 2, replay)
    assert f"{secret.name}" not in {file.name for file in newest.iterdir()}
    assert not any(file.samefile(secret) for file in newest.iterdir())
    rings.assert_same(replay, rings.restore(newest))


def test_nothing_in_the_package_unpickles_freely():
    package = Path(sheeplike.__file__).parent
    for source in package.rglob("*.py"):
        text = source.read_text()
        assert not re.search(r"weights_only\s*=\s*False|pickle\.loads?\(|allow_pickle\s*=\s*True", text), source
        for call in re.findall(r"torch\.load\([^\n]*", text):
            assert "weights_only=True" in call, (source, call)
