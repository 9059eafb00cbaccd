"""A checkpoint is whole or absent, and what is damaged is noticed and passed over."""

import hashlib
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from sheeplike.checkpoint import Corrupt, UnknownFormat, best, list_checkpoints, load, load_latest, save


def parts(value: float = 1.0) -> dict:
    model = torch.nn.Linear(4, 3)
    torch.nn.init.constant_(model.weight, value)
    return {"agent": {"model": model.state_dict(), "updates": 7}, "loop": {"ratio": {"carry": 0.25}, "name": "dreamer"}}


def save_steps(root: Path, *steps: int, keep: int = 10) -> list[Path]:
    return [save(root, step, parts(float(step)), {"config": "seed: 1"}, keep_last=keep) for step in steps]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def rewrite(path: Path, manifest: dict) -> None:
    manifest.pop("sha256", None)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def flip_bit(path: Path, where: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


# What is saved is what is loaded


def test_a_checkpoint_loads_as_it_was_saved(tmp_path):
    path = save(tmp_path / "run" / "checkpoints", 1200, parts(3.0), {"config": "a: 1", "sizes": [1, 2]}, keep_last=3)
    assert path == tmp_path / "run" / "checkpoints" / "step_000000001200"
    for meta, loaded in (load(path), load_latest(path.parent)):
        assert (meta["step"], meta["config"], meta["sizes"]) == (1200, "a: 1", [1, 2])
        assert meta["versions"]["torch"] == torch.__version__
        packages = {"sheeplike", "torch", "jax", "jaxlib", "mujoco", "mujoco-mjx", "warp-lang", "python"}
        assert set(meta["versions"]) == packages
        assert torch.equal(loaded["agent"]["model"]["weight"], torch.full((3, 4), 3.0))
        assert loaded["agent"]["updates"] == 7
        assert loaded["loop"] == {"ratio": {"carry": 0.25}, "name": "dreamer"}


def test_the_manifest_describes_every_file(tmp_path):
    (path,) = save_steps(tmp_path, 5)
    assert names(path) == ["agent.pt", "loop.pt", "manifest.json"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["meta"]) == (2, 5, {"config": "seed: 1"})
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_everything_a_continuation_needs_can_be_saved(tmp_path):
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    optimizer.step()
    state = {
        "optimizer": optimizer.state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "generator": torch.Generator().get_state(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "plain": [True, 1, 2.5, 1j, "s", b"b", None, (1, (2,)), {1, 2}, {3: {"x": []}}, OrderedDict(a=1)],
        "types": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
        "frames": torch.randint(0, 256, (4, 8, 8, 3), dtype=torch.uint8),
        "deter": torch.randn(5).bfloat16(),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    _, loaded = load(save(tmp_path, 0, {"state": state}, {}, keep_last=1))
    loaded = loaded["state"]
    for name in ("python", "numpy", "plain", "types"):
        assert loaded[name] == state[name]
    for name in ("torch", "generator", "frames", "deter", "empty", "parameter"):
        assert torch.equal(loaded[name], state[name])
        assert loaded[name].dtype == state[name].dtype
    moments = loaded["optimizer"]["state"][0]
    assert torch.equal(moments["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_the_same_step_is_replaced(tmp_path):
    save(tmp_path, 5, parts(1.0), {}, keep_last=3)
    save(tmp_path, 5, parts(2.0), {}, keep_last=3)
    assert names(tmp_path) == ["step_000000000005"]
    assert load_latest(tmp_path)[1]["agent"]["model"]["weight"][0, 0] == 2.0


def test_the_newest_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 30, 400, keep=2)
    assert names(tmp_path) == ["step_000000000030", "step_000000000400"]
    save(tmp_path, 10**13, parts(), {}, keep_last=2)  # a step with more digits than the name is padded to
    assert [load(path)[0]["step"] for path in list_checkpoints(tmp_path)] == [400, 10**13]


def test_other_files_are_left_alone(tmp_path):
    for name in ("notes.txt", "step_1", "step_000000000001.bak"):
        (tmp_path / name).mkdir() if "." not in name else (tmp_path / name).touch()
    save_steps(tmp_path, 7, 8, keep=1)
    assert names(tmp_path) == ["notes.txt", "step_000000000001.bak", "step_000000000008", "step_1"]


def test_tmpdir_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not there"))
    monkeypatch.setattr("tempfile.tempdir", None)
    save_steps(tmp_path / "root", 1)
    assert load_latest(tmp_path / "root")[0]["step"] == 1


def test_files_and_directories_are_synced_before_and_after_the_rename(tmp_path, monkeypatch):
    log, real_sync, real_rename = [], os.fsync, os.rename

    def sync(descriptor):
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    def rename(source, target):
        log.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", rename)
    save_steps(tmp_path, 1)
    assert [re.sub(r"\.tmp-.*", "temporary", name) for name in log] == [
        "agent.pt",
        "loop.pt",
        "manifest.json",
        "temporary",
        "rename",
        tmp_path.name,
    ]


# The best


def save_scores(root: Path, *scores: object, keep: int = 1) -> list[int]:
    """Saves step 1, 2, … with these scores; returns the steps that are left."""
    for step, score in enumerate(scores, 1):
        save(root, step, parts(float(step)), {"score": score} if score is not None else {}, keep_last=keep)
    return [load(path)[0]["step"] for path in list_checkpoints(root)]


@pytest.mark.parametrize(
    ("scores", "keep", "left", "winner"),
    [
        ((1.0, 3.0, 2.0, None), 1, [2, 4], 2),
        ((1.0, 3.0, 2.0, 4.0), 1, [4], 4),
        ((1.0, 3.0, 3.0, 3.0), 1, [2, 4], 2),  # of several the oldest: it was evaluated, the others repeat its score
        ((5.0, 3.0, 2.0, 1.0, 0.0), 2, [1, 4, 5], 1),
        ((-7, -8, -9), 1, [1, 3], 1),
        ((math.nan, 1.0, math.inf, "good"), 1, [2, 4], 2),
        ((None, None, None), 1, [3], None),
    ],
)
def test_the_best_is_kept_beside_the_newest(tmp_path, scores, keep, left, winner):
    assert save_scores(tmp_path, *scores, keep=keep) == left
    found = best(tmp_path)
    assert (found and load(found)[0]["step"]) == winner


def test_a_best_one_without_a_readable_manifest_is_not_the_best(tmp_path):
    save_scores(tmp_path, 1.0, 3.0, 2.0, keep=3)
    (list_checkpoints(tmp_path)[1] / "manifest.json").write_text("{}")
    assert load(best(tmp_path))[0]["step"] == 3
    assert best(tmp_path / "absent") is None


def test_a_kill_before_the_old_ones_are_removed_leaves_nothing_behind_for_long(tmp_path, monkeypatch):
    save_scores(tmp_path, 1.0, 3.0)
    with monkeypatch.context() as patch:
        patch.setattr("sheeplike.checkpoint.directories.remove", lambda path: None)
        save(tmp_path, 3, parts(), {"score": 5.0}, keep_last=1)
    save(tmp_path, 4, parts(), {}, keep_last=1)
    assert [load(path)[0]["step"] for path in list_checkpoints(tmp_path)] == [3, 4]


def test_only_what_is_asked_for_is_read(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    (path / "loop.pt").unlink()
    assert load(path, only=("agent",))[1].keys() == {"agent"}
    assert load_latest(tmp_path, only=("agent",))[1]["agent"]["updates"] == 7
    with pytest.raises(Corrupt, match=r"loop\.pt: cannot be read"):
        load(path)
    flip_bit(path / "agent.pt", 0.5)
    with pytest.raises(Corrupt, match=r"agent\.pt: was altered"):
        load(path, only=("agent",))


# Damage


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("name", ["agent.pt", "loop.pt", "manifest.json"])
def test_a_flipped_bit_is_noticed_and_the_one_before_is_loaded(tmp_path, name, where):
    _, newest = save_steps(tmp_path, 1, 2)
    flip_bit(newest / name, where)
    with pytest.raises(Corrupt, match=re.escape(str(newest / name))):
        load(newest)
    with pytest.warns(RuntimeWarning, match=rf"passing over a damaged checkpoint: .*{name}"):
        meta, loaded = load_latest(tmp_path)
    assert meta["step"] == 1
    assert loaded["agent"]["model"]["weight"][0, 0] == 1.0


@pytest.mark.parametrize("name", ["agent.pt", "loop.pt", "manifest.json"])
@pytest.mark.parametrize("left", [0, 100])
def test_a_truncated_file_is_noticed(tmp_path, name, left):
    (path,) = save_steps(tmp_path, 1)
    os.truncate(path / name, left)
    with pytest.raises(Corrupt, match=re.escape(str(path / name))):
        load(path)


@pytest.mark.parametrize("name", ["agent.pt", "manifest.json"])
def test_a_missing_file_is_named(tmp_path, name):
    (path,) = save_steps(tmp_path, 1)
    (path / name).unlink()
    with pytest.raises(Corrupt, match=rf"{re.escape(str(path / name))}: cannot be read: No such file"):
        load(path)


def test_every_damaged_one_is_passed_over(tmp_path):
    first, second, third = save_steps(tmp_path, 1, 2, 3)
    flip_bit(third / "agent.pt", 0.5)
    shutil.rmtree(second)
    second.mkdir()
    with pytest.warns(RuntimeWarning, match="passing over") as caught:
        assert load_latest(tmp_path)[0]["step"] == 1
    assert len(caught) == 2
    (first / "manifest.json").write_text("[]")
    with pytest.warns(RuntimeWarning), pytest.raises(Corrupt, match="all 3 checkpoints are damaged"):
        load_latest(tmp_path)


def test_no_checkpoint_is_another_error(tmp_path):
    for root in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="no checkpoint in"):
            load_latest(root)


def test_another_format_is_named(tmp_path):
    (path,) = save_steps(tmp_path, 1)
    rewrite(path, json.loads((path / "manifest.json").read_text()) | {"format": 3})
    with pytest.raises(UnknownFormat, match=r"has format 3, written by sheeplike .*, which reads formats 1 and 2"):
        load(path)


# Interruption


def test_a_write_that_fails_leaves_the_earlier_ones_and_no_rest(tmp_path, monkeypatch):
    save_steps(tmp_path, 1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, step, parts(), {}, keep_last=1)
    assert names(tmp_path) == ["step_000000000001"]
    assert load_latest(tmp_path)[0]["step"] == 1


def test_a_replacement_that_fails_at_the_last_rename_brings_the_old_one_back(tmp_path, monkeypatch):
    save(tmp_path, 5, parts(1.0), {}, keep_last=1)
    real = os.rename

    def fail(source, target):
        if Path(source).name.startswith(".tmp-"):
            raise OSError(5, "Input/output error")
        real(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 5, parts(2.0), {}, keep_last=1)
    assert names(tmp_path) == ["step_000000000005"]
    assert load_latest(tmp_path)[1]["agent"]["model"]["weight"][0, 0] == 1.0


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    """The old one has been moved aside and the new one is not yet in its place."""
    (path,) = save_steps(tmp_path, 5)
    path.rename(tmp_path / ".old-step_000000000005")
    assert load_latest(tmp_path)[0]["step"] == 5
    save_steps(tmp_path, 6)
    assert names(tmp_path) == ["step_000000000005", "step_000000000006"]


def test_a_kill_after_the_second_rename_leaves_the_new_one(tmp_path):
    (path,) = save_steps(tmp_path, 5)
    shutil.copytree(path, tmp_path / ".old-step_000000000005")
    flip_bit(tmp_path / ".old-step_000000000005" / "agent.pt", 0.5)
    assert list_checkpoints(tmp_path) == [path]
    save_steps(tmp_path, 6)
    assert names(tmp_path) == ["step_000000000005", "step_000000000006"]


def test_what_a_killed_save_left_is_cleaned_up(tmp_path):
    stale = tmp_path / ".tmp-0123"
    stale.mkdir()
    (stale / "agent.pt").write_bytes(b"half")
    assert list_checkpoints(tmp_path) == []
    save_steps(tmp_path, 1)
    assert names(tmp_path) == ["step_000000000001"]


KILLS = """
import os, random, signal, sys, time
import torch
from sheeplike.checkpoint import load_latest, save

torch.set_num_threads(1)
root, kills, chance, done = sys.argv[1], int(sys.argv[2]), random.Random(0), 0
for _ in range(kills):
    reading, writing = os.pipe()
    child = os.fork()  # importing torch once is enough
    if child == 0:
        for step in range(done + 1, 10**6):
            tensor = torch.full((200_000,), float(step))
            # Every other time the checkpoint of the same step is replaced.
            save(root, step - step % 2, {"a": {"x": tensor}, "b": {"x": tensor}}, {"seen": step}, keep_last=2)
            os.write(writing, f"{step} ".encode())
    os.close(writing)
    acknowledged = os.read(reading, 4096)
    time.sleep(chance.uniform(0.0, 0.1))
    os.kill(child, signal.SIGKILL)
    while chunk := os.read(reading, 4096):
        acknowledged += chunk
    os.close(reading)
    os.waitpid(child, 0)
    meta, parts = load_latest(root)  # run with -W error: every directory must be whole
    assert meta["seen"] >= int(acknowledged.split()[-1]), (meta["seen"], acknowledged)
    done = meta["seen"]
    assert all(torch.equal(parts[name]["x"], torch.full((200_000,), float(done))) for name in "ab")
save(root, done + 2, {}, {}, keep_last=2)
print("all kills survived")
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    command = [sys.executable, "-W", "error", "-c", KILLS, str(tmp_path), "20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "all kills survived\n", done.stderr
    assert all(name.startswith("step_") for name in names(tmp_path))
    assert len(names(tmp_path)) == 2
