"""Readers: what is damaged is noticed and passed over, beside a writer and wherever the checkpoint came from."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import sheeplike
from sheeplike import checkpoint
from sheeplike.checkpoint import Corrupt, UnknownFormat, Writer, load, load_latest


def parts(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value)}, "loop": {"ratio": {"carry": 0.25}}}


def save(root: Path, step: int, parts: dict, meta: dict, keep_last: int) -> Path:
    with Writer(root, keep_last=keep_last) as writer:
        writer.save(step, parts, meta, finite=(), wait=True)
    return root / f"step_{step:012d}"


def save_steps(root: Path, *steps: int) -> list[Path]:
    return [save(root, step, parts(float(step)), {"config": "seed: 1"}, keep_last=9) for step in steps]


# Damage


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 1.0])
@pytest.mark.parametrize("name", ["agent.pt", "loop.pt", "manifest.json"])
def test_a_flipped_bit_is_noticed_and_the_one_before_is_loaded(root, lab, name, where):
    _, newest = save_steps(root, 1, 2)
    lab.flip_bit(newest / name, where)
    with pytest.raises(Corrupt, match=re.escape(str(newest / name))):
        load(newest)
    with pytest.warns(RuntimeWarning, match=str(name)):
        meta, loaded = load_latest(root)
    assert (meta["step"], loaded["agent"]["weight"][0]) == (1, 1.0)


@pytest.mark.parametrize("name", ["agent.pt", "loop.pt", "manifest.json"])
@pytest.mark.parametrize("left", [0, 100, None])
def test_a_truncated_or_missing_file_is_named(root, name, left):
    (path,) = save_steps(root, 1)
    (path / name).unlink() if left is None else os.truncate(path / name, left)
    with pytest.raises(Corrupt, match=re.escape(str(path / name))):
        load(path)


def test_every_damaged_one_is_passed_over(root, lab):
    first, second, third = save_steps(root, 1, 2, 3)
    lab.flip_bit(third / "agent.pt")
    shutil.rmtree(second)
    second.mkdir()
    with pytest.warns(RuntimeWarning, match="passing over") as caught:
        assert load_latest(root)[0]["step"] == 1
    assert len(caught) == 2
    (first / "manifest.json").write_text("[]")
    with pytest.warns(RuntimeWarning), pytest.raises(Corrupt, match=" 3 "):
        load_latest(root)


def test_no_checkpoint_is_another_error(root):
    with pytest.raises(FileNotFoundError, match="checkpoint"):
        load_latest(root)


def test_only_what_is_asked_for_is_read(root, lab):
    (path,) = save_steps(root, 1)
    (path / "loop.pt").unlink()
    assert load(path, only=("agent",))[1].keys() == load_latest(root, only=("agent",))[1].keys() == {"agent"}
    assert load(path, only=())[1] == {}
    lab.flip_bit(path / "agent.pt")
    with pytest.raises(Corrupt, match=r"agent\.pt"):
        load(path, only=("agent",))


@pytest.mark.parametrize("foreign", [0, 1, 99, "2", None])
def test_a_whole_checkpoint_of_another_format_is_not_passed_over(root, lab, foreign):
    """Going on from an older one would undo what another version of the package has done."""
    _, path = save_steps(root, 1, 2)
    lab.rewrite(path, format=foreign, versions={"sheeplike": "7.1"})
    message = rf"has format {foreign}, written by sheeplike 7\.1; this is sheeplike .*, which reads format 2$"
    for read in (lambda: load(path), lambda: load_latest(root)):
        with pytest.raises(UnknownFormat, match=message):
            read()


def test_files_that_are_not_in_the_manifest_are_not_read(root):
    (path,) = save_steps(root, 1)
    (path / "notes.pt").write_bytes(b"not mine")
    assert load_latest(root)[1].keys() == {"agent", "loop"}


# Beside a writer


WRITER = """
import sys, torch
from sheeplike import checkpoint
from sheeplike.memory import SequenceReplay
checkpoint.CHUNK_BYTES = 3 * 1000
spec = {"image": ((998,), torch.uint8), "is_first": ((), torch.bool), "is_last": ((), torch.bool)}
replay = SequenceReplay(spec, num_envs=1, size=20, sequence=4)
with checkpoint.Writer(sys.argv[1], keep_last=2, keep_best=0) as writer:
    for step in range(2, 10**6):
        flag = torch.zeros(1, dtype=torch.bool)
        replay.add({"image": torch.full((1, 998), step % 251), "is_first": flag, "is_last": flag})
        x = torch.full((20_000,), float(step))
        parts = {"agent": {"x": x}, "loop": {"x": x}}
        writer.save(step, parts, {"seen": step}, replay, wait=True)
        print(step, flush=True)
"""


def test_a_reader_beside_a_writer_never_sees_a_part_of_a_checkpoint(root):
    """Few are kept, so what is being read is removed all the time; nothing of that is worth a warning."""
    seen = [0]
    with subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE) as writer:
        try:
            writer.stdout.readline()
            deadline = time.monotonic() + 120
            with warnings.catch_warnings(action="error"):
                while len(set(seen)) < 40 and time.monotonic() < deadline:
                    meta, loaded = load_latest(root)
                    assert all((loaded[name]["x"] == meta["seen"]).all() for name in ("agent", "loop"))
                    assert meta["seen"] >= seen[-1]
                    seen.append(meta["seen"])
        finally:
            writer.kill()
    assert len(set(seen)) == 40, "the writer was at work"


def test_what_is_removed_while_it_is_read_is_passed_over_without_a_word(root, monkeypatch):
    """The next one may not even have been there when the first was chosen."""
    save(root, 1, parts(1.0), {}, keep_last=1)
    real, calls = checkpoint._open_verified, []

    def removed_meanwhile(path: Path, *expected: object) -> object:
        calls.append(path)
        if len(calls) == 1:
            save(root, 2, parts(2.0), {}, keep_last=1)
        return real(path, *expected)

    monkeypatch.setattr(checkpoint, "_open_verified", removed_meanwhile)
    with warnings.catch_warnings(action="error"):
        assert load_latest(root)[1]["agent"]["weight"][0] == 2.0


def test_what_has_been_verified_is_read_even_if_it_is_removed(root, monkeypatch):
    (path,) = save_steps(root, 1)
    real = checkpoint._read_part
    monkeypatch.setattr(checkpoint, "_read_part", lambda *a: shutil.rmtree(path, ignore_errors=True) or real(*a))
    assert load(path)[1]["agent"]["weight"][0] == 1.0


# From elsewhere


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", [pickle.dumps, None], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["agent.pt", "000000000000-000000000009.pt"])
def test_a_malicious_pickle_is_refused_and_not_run(root, lab, tmp_path, form, name):
    path = lab.save_ring(root, 1, lab.fill(lab.make_ring(), 15))
    buffer, fired = io.BytesIO(), tmp_path / "fired"
    torch.save({"x": Bomb(fired)}, buffer)
    content = form({"x": Bomb(fired)}) if form else buffer.getvalue()
    found, digest = json.loads((path / "manifest.json").read_text()), hashlib.sha256(content).hexdigest()
    if name == "agent.pt":
        (path / name).write_bytes(content)
        lab.rewrite(path, files=found["files"] | {name: {"bytes": len(content), "sha256": digest}})
    else:
        (root.parent / "replay" / name).write_bytes(content)
        lab.rewrite(path, chunks=[[name, 0, 10, len(content), digest]])
    with pytest.raises(Corrupt, match="weights_only"):
        lab.restore_ring(path)
    assert not fired.exists()


@pytest.mark.parametrize(
    "changed",
    [
        *({"files": {name: {"bytes": 1, "sha256": ""}}} for name in ("../../secret.pt", "/etc/passwd", "a/b.pt")),
        {"files": {"agent.pt": 5}},
        *({"chunks": [[name, 0, 1, 1, ""]]} for name in ("../notes.pt", "mine.pt", 5)),
        {"chunks": 5},
        {"chunks": [5]},
        {"chunks": [["000000000000-000000000009.pt", 0]]},
        {"chunks": [["000000000000-000000000009.pt", "0", 10, 1, ""]]},
        {"chunks": [["000000000000-000000000009.pt", 10, 10, 1, ""]]},
        *({"chunks": [["000000000000-000000000009.pt", *span, 1, ""]]} for span in ((0, 10.0), (False, 10), (0.0, 10))),
    ],
    ids=str,
)
def test_a_manifest_cannot_lead_astray(root, lab, changed):
    path = lab.save_ring(root, 1, lab.fill(lab.make_ring(), 15))
    lab.rewrite(path, **changed)
    with pytest.raises(Corrupt, match="manifest"):
        load(path)
    lab.save_ring(root, 2, lab.fill(lab.make_ring(), 15))  # nor keep the next one from being written
    assert load_latest(root)[0]["step"] == 2


@pytest.mark.parametrize("stop", [10**30, 11, 9])
def test_a_chunk_of_other_steps_than_the_manifest_says_is_refused(root, lab, stop):
    path = lab.save_ring(root, 1, lab.fill(lab.make_ring(), 15))
    ((name, start, _, *rest),) = json.loads((path / "manifest.json").read_text())["chunks"]
    lab.rewrite(path, chunks=[[name, start, stop, *rest]])
    with pytest.raises(ValueError, match=rf"steps \[0, {stop}"):
        lab.restore_ring(path)


def test_what_torch_says_is_cut_short(root, lab):
    (path,) = save_steps(root, 1)
    buffer = io.BytesIO()
    torch.save({"x": Bomb("fired")}, buffer)
    (path / "agent.pt").write_bytes(buffer.getvalue())
    entry = {"bytes": len(buffer.getvalue()), "sha256": hashlib.sha256(buffer.getvalue()).hexdigest()}
    lab.rewrite(path, files={"agent.pt": entry})
    with pytest.raises(Corrupt, match=r"agent\.pt.*weights_only.*Unsupported"):
        load(path)


def test_nothing_in_the_package_unpickles_freely():
    package = Path(sheeplike.__file__).parent
    for source in package.rglob("*.py"):
        text = source.read_text()
        assert not re.search(r"weights_only\s*=\s*False|pickle\.loads?\(|allow_pickle\s*=\s*True", text), source
        for call in re.findall(r"torch\.load\([^\n]*", text):
            assert "weights_only=True" in call, (source, call)
