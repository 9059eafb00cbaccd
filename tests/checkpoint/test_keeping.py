"""Whose a directory of checkpoints is, what their manifests tell, and which of them are kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sheeplike import checkpoint
from sheeplike.checkpoint import InUse, Writer, list_checkpoints, load, load_latest


def part(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value), "updates": 7}}


def steps(root: Path) -> list[int]:
    return [load(path)[0]["step"] for path in list_checkpoints(root)]


def test_the_manifest_tells_where_it_comes_from(tmp_path):
    with Writer(tmp_path, config="seed: 1\n", device="cuda") as writer:
        writer.save(1, part(), {"score": 2.0}, wait=True)
    meta, _ = load_latest(tmp_path)
    assert (meta["device"], meta["score"]) == ("cuda", 2.0)
    assert meta["config_sha256"] == hashlib.sha256(b"seed: 1\n").hexdigest()
    manifest = json.loads((writer.last.path / "manifest.json").read_text())
    assert manifest["format"] == checkpoint.FORMAT == 2
    assert manifest["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(manifest["versions"].values())


def test_one_writer_at_a_time(tmp_path):
    """What another process is writing is not taken for a rest."""
    with Writer(tmp_path) as writer:
        (tmp_path / ".tmp-busy").mkdir()
        for other in (lambda: Writer(tmp_path), lambda: checkpoint.save(tmp_path, 1, {}, {}, keep_last=1)):
            with pytest.raises(InUse, match="another writer"):
                other()
        program = f"from sheeplike.checkpoint import Writer; Writer({str(tmp_path)!r})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert "InUse" in done.stderr
        assert (tmp_path / ".tmp-busy").exists()
        writer.save(1, part(), {}, wait=True)
    (tmp_path / ".tmp-stale").mkdir()
    Writer(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001"], "cleaned at the start"


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [
        (1, 0, [6]),
        (1, 1, [2, 6]),
        (1, 2, [2, 5, 6]),
        (2, 2, [2, 5, 6]),
        (1, 3, [2, 4, 5, 6]),
        (9, 9, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last, keep_best, left):
    with Writer(tmp_path, keep_last=keep_last, keep_best=keep_best) as writer:
        for step, score in enumerate([1.0, 9.0, 9.0, 3.0, 5.0, None], 1):
            writer.save(step, part(), {"score": score} if score is not None else {}, wait=True)
    # Step 3 repeats the score of step 2, so it was not evaluated itself.
    assert steps(tmp_path) == left


@pytest.mark.parametrize("numbers", [{"keep_last": 0}, {"keep_best": -1}])
def test_numbers_that_make_no_sense(tmp_path, numbers):
    with pytest.raises(ValueError, match=f"{next(iter(numbers))}="):
        Writer(tmp_path / "root", **numbers)
    assert not (tmp_path / "root").exists()


def test_what_is_ahead_of_a_resumed_run_is_removed_once_it_has_saved(tmp_path):
    """It was damaged, or it would have been resumed; kept, it would push out what is whole, or be resumed next time."""
    for step in (1, 2, 30):
        checkpoint.save(tmp_path, step, part(), {"score": float(step)}, keep_last=9)
    with Writer(tmp_path, keep_last=2, keep_best=1) as writer:
        assert steps(tmp_path) == [1, 2, 30]
        writer.save(5, part(), {}, wait=True)
    assert steps(tmp_path) == [2, 5]


@pytest.mark.parametrize("in_place", [False, True], ids=["in another process", "in this one"])
@pytest.mark.parametrize("next_step", [12, 15, 20])
def test_what_a_run_passed_over_never_pushes_out_what_it_went_on_from(tmp_path, next_step, in_place):
    """Damaged, and with the best score of all: it goes with the first checkpoint that is written since, not before."""
    for step, score in ((5, 2.0), (10, 1.0), (15, 9.0), (18, None)):
        meta = {} if score is None else {"score": score}
        damaged = checkpoint.save(tmp_path, step, part(), meta, keep_last=9)
    for name in ("step_000000000015", "step_000000000018"):
        (tmp_path / name / "agent.pt").write_bytes(b"x" * (damaged / "agent.pt").stat().st_size)
    with pytest.warns(RuntimeWarning, match="passing over"):
        resumed_from = load_latest(tmp_path)[0]["step"]
    assert resumed_from == 10
    with Writer(tmp_path, keep_last=2, keep_best=1, resumed_from=None if in_place else resumed_from) as writer:
        if in_place:
            writer.went_back_to(resumed_from)
        with pytest.raises(checkpoint.NotWritten):
            writer.save(next_step, part(), {}, {"agent": {"broken": NoJournal()}}, wait=True)
        assert len(list_checkpoints(tmp_path)) == 4
        writer.save(next_step, part(), {}, wait=True)
        assert steps(tmp_path) == [5, 10, next_step]
        writer.save(next_step + 7, part(), {}, wait=True)
        assert steps(tmp_path) == [5, next_step, next_step + 7], "from then on the run only goes forward"


class NoJournal:
    """A journal that cannot be read."""

    lineage, parent, oldest, end, step_bytes = "a", None, 0, 5, 8

    def read(self, start: int, stop: int) -> dict:
        raise RuntimeError("unreadable")


def test_going_back_waits_for_the_save_that_is_under_way(tmp_path):
    """That one was of the future that the run leaves: it does not count as the first since."""
    checkpoint.save(tmp_path, 10, part(), {}, keep_last=9)
    with Writer(tmp_path, keep_last=9) as writer:
        writer.save(20, {"agent": {"x": torch.ones(2_000_000)}}, {})
        writer.went_back_to(10)
        assert steps(tmp_path) == [10, 20]
        assert not writer.holds(20), "the run may come to this step again, in another state"
        writer.save(30, part(), {}, wait=True)
    assert steps(tmp_path) == [10, 30]


@pytest.mark.parametrize("damage", ["no manifest", "cut short", "missing"])
def test_what_is_damaged_does_not_count(tmp_path, damage):
    for step, score in ((1, 1.0), (2, 5.0), (3, None)):
        checkpoint.save(tmp_path, step, part(), {} if score is None else {"score": score}, keep_last=9)
    for step in (2, 3):
        path = tmp_path / f"step_{step:012d}"
        if damage == "cut short":
            os.truncate(path / "agent.pt", 100)
        else:
            (path / {"no manifest": "manifest.json", "missing": "agent.pt"}[damage]).unlink()
    with Writer(tmp_path, keep_last=2, keep_best=1) as writer:
        writer.save(4, part(), {}, wait=True)
        assert (tmp_path / "step_000000000001").exists(), "the only whole one beside the new one"
        writer.save(5, part(), {}, wait=True)
    assert steps(tmp_path) == [1, 4, 5], "1 is the best of the whole ones"


def test_a_disk_that_cannot_be_read_for_a_moment_removes_nothing(tmp_path, monkeypatch):
    for step in (1, 2):
        checkpoint.save(tmp_path, step, part(), {}, keep_last=9)
    with monkeypatch.context() as patch:
        patch.setattr("sheeplike.checkpoint.directories.read_manifest", unreadable)
        with Writer(tmp_path, keep_last=2) as writer:
            writer.save(3, part(), {}, wait=True)
    assert steps(tmp_path) == [1, 2, 3]


def unreadable(path: Path) -> dict:
    raise checkpoint.Corrupt(f"{path}: cannot be read: Input/output error")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch, code):
    def unsupported(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", unsupported)
    with Writer(tmp_path) as writer:
        writer.save(1, part(), {}, wait=True)
    assert steps(tmp_path) == [1]


def test_a_new_root_survives_a_power_cut(tmp_path, monkeypatch):
    synced, real = [], os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}"))) or real(file)
    )
    Writer(tmp_path / "run" / "checkpoints").close()
    assert synced == [tmp_path, tmp_path / "run"]
    Writer(tmp_path / "run" / "checkpoints").close()
    assert len(synced) == 2


@pytest.mark.parametrize(
    ("parts", "journals", "message"),
    [
        ({"journals": {}}, {}, "part 'journals'"),
        ({"a": {}}, {"b": {}}, "journals of 'b'"),
        ({"a": {}}, {"a": {"/": None}}, "'/'"),
    ],
)
def test_names_that_do_not_fit(tmp_path, parts, journals, message):
    with Writer(tmp_path) as writer, pytest.raises(ValueError, match=message):
        writer.save(1, parts, {}, journals)
