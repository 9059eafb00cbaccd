"""Readers: of older formats, beside a writer, and wherever the checkpoint came from."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch

from sheeplike.checkpoint import UnknownFormat, list_checkpoints, load, load_latest, reading, save
from sheeplike.checkpoint.files import write_manifest


def part(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value)}}


def old_checkpoint(root: Path, step: int, parts: dict) -> Path:
    """As format 1 had it: all that an agent had seen in one part."""
    path = root / f"step_{step:012d}"
    path.mkdir(parents=True)
    files = {}
    for name, content in parts.items():
        torch.save(content, path / f"{name}.pt")
        data = (path / f"{name}.pt").read_bytes()
        files[f"{name}.pt"] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest = {"format": 1, "step": step, "files": files, "versions": {"sheeplike": "0"}, "meta": {"score": 3.0}}
    write_manifest(path / "manifest.json", manifest)
    return path


def test_a_checkpoint_of_format_1_is_loaded_and_gone_on_from(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 47)
    old_checkpoint(tmp_path, 1, {**part(2.0), "memory": {"replay": replay.state_dict()}})
    meta, parts = load_latest(tmp_path)
    assert (meta["step"], meta["score"], meta["device"]) == (1, 3.0, None)
    assert parts.keys() == {"agent", "memory"}
    assert load_latest(tmp_path, only=("agent",))[1]["agent"]["weight"][0] == 2.0
    other = rings.make()
    other.load_state_dict(parts["memory"]["replay"])
    rings.assert_same(replay, other)
    rings.save(tmp_path, 2, other, keep_last=1)
    rings.assert_same(other, rings.restore(tmp_path))
    assert [load(path)[0]["step"] for path in list_checkpoints(tmp_path)] == [1, 2], "the old one has the best score"


@pytest.mark.parametrize("foreign", [0, 3, 99, "2", None])
def test_a_whole_checkpoint_of_another_format_is_not_passed_over(tmp_path, foreign):
    """Going on from an older one would undo what another version of the package has done."""
    save(tmp_path, 1, part(), {}, keep_last=9)
    path = save(tmp_path, 2, part(), {}, keep_last=9)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    write_manifest(path / "manifest.json", manifest | {"format": foreign, "versions": {"sheeplike": "7.1"}})
    message = rf"has format {foreign}, written by sheeplike 7\.1; this is sheeplike .*, which reads formats 1 and 2"
    for read in (lambda: load(path), lambda: load_latest(tmp_path)):
        with pytest.raises(UnknownFormat, match=message):
            read()


def test_files_that_are_not_in_the_manifest_are_left_alone(tmp_path):
    path = save(tmp_path, 1, part(), {}, keep_last=1)
    (path / "notes.pt").write_bytes(b"not mine")
    (path / "memory.replay.000000000000-000000000010.pt").write_bytes(b"not mine")
    assert load_latest(tmp_path)[1].keys() == {"agent"}
    save(tmp_path, 2, part(), {}, keep_last=1)
    assert not path.exists()


WRITER = """
import sys, torch
from sheeplike.checkpoint import Writer
with Writer(sys.argv[1], keep_last=1, keep_best=0) as writer:
    for step in range(2, 10**6):
        x = torch.full((20_000,), float(step))
        # Every other time the checkpoint of the same step is replaced.
        writer.save(step - step % 2, {"agent": {"x": x}, "loop": {"x": x}}, {"seen": step}, wait=True)
        print(step, flush=True)
"""


def test_a_reader_beside_a_writer_never_sees_a_part_of_a_checkpoint(tmp_path):
    """Only one is kept, so what is being read is removed all the time; nothing of that is worth a warning."""
    save(tmp_path, 1, {name: {"x": torch.ones(20_000)} for name in ("agent", "loop")}, {"seen": 1}, keep_last=1)
    seen = [0]
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        try:
            writer.stdout.readline()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                deadline = time.monotonic() + 30
                while len(set(seen)) < 40 and time.monotonic() < deadline:
                    meta, parts = load_latest(tmp_path)
                    assert all((parts[name]["x"] == meta["seen"]).all() for name in ("agent", "loop"))
                    assert meta["seen"] >= seen[-1]
                    seen.append(meta["seen"])
        finally:
            writer.kill()
    assert len(set(seen)) == 40, "the writer was at work"


@pytest.mark.parametrize("replaced", [False, True])
def test_what_is_removed_while_it_is_read_is_passed_over_without_a_word(tmp_path, monkeypatch, replaced):
    """The next one may not even have been there when the first was chosen."""
    save(tmp_path, 1, part(1.0), {}, keep_last=1)
    real, calls = reading.open_verified, []

    def removed_meanwhile(path: Path, expected: dict) -> object:
        calls.append(path)
        if len(calls) == 1:
            save(tmp_path, 1 if replaced else 2, part(2.0), {}, keep_last=1)
        return real(path, expected)

    monkeypatch.setattr(reading, "open_verified", removed_meanwhile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, parts = load_latest(tmp_path)
    assert parts["agent"]["weight"][0] == 2.0
    assert len(calls) == 2


def test_a_checkpoint_that_goes_between_two_looks_at_the_directory_is_looked_for_anew(tmp_path, monkeypatch):
    save(tmp_path, 1, part(1.0), {}, keep_last=1)
    real, looks = reading.list_checkpoints, []

    def listed(root: Path) -> list[Path]:
        found = real(root)
        looks.append(found)
        if len(looks) == 1:
            save(tmp_path, 2, part(2.0), {}, keep_last=1)
        return found

    monkeypatch.setattr(reading, "list_checkpoints", listed)
    assert load_latest(tmp_path)[1]["agent"]["weight"][0] == 2.0


def test_what_has_been_verified_is_read_even_if_it_is_removed(tmp_path, monkeypatch):
    path = save(tmp_path, 1, part(), {}, keep_last=1)
    real = reading.read_part
    monkeypatch.setattr(reading, "read_part", lambda *a: shutil.rmtree(path, ignore_errors=True) or real(*a))
    assert load(path)[1]["agent"]["weight"][0] == 1.0


@pytest.mark.skipif(
    not os.access("/dev/shm", os.W_OK) or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev,
    reason="there is no second file system",
)
def test_a_temporary_directory_on_another_file_system_does_not_matter(tmp_path, monkeypatch, rings):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        monkeypatch.setenv("TMPDIR", elsewhere)
        monkeypatch.setattr("tempfile.tempdir", None)
        replay = rings.make()
        for number in (1, 2):
            rings.fill(replay, 25, seed=number)
            rings.save(tmp_path, number, replay)
        rings.assert_same(replay, rings.restore(tmp_path))
        assert os.listdir(elsewhere) == []
        # And the other way round: checkpoints there, temporary files here.
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        rings.assert_same(replay, rings.restore(rings.save(Path(elsewhere), 1, replay)))
