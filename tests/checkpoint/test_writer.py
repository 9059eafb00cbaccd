"""Saving in the background: what is saved is what was, and a disk that fails ends nothing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sheeplike import checkpoint
from sheeplike.checkpoint import InUse, NonFinite, Writer, list_checkpoints, load, load_latest, snapshot, writing


def part(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value), "updates": 7}}


def steps(root: Path) -> list[int]:
    return [load(path)[0]["step"] for path in list_checkpoints(root)]


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until the event is set, at the latest when the context ends."""
    allowed, real = threading.Event(), writing.write_part

    def waiting(*arguments: object) -> dict:
        assert allowed.wait(60)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_part", waiting)
        try:
            yield allowed
        finally:
            allowed.set()


# In the background


def test_what_changes_after_the_call_is_not_saved(tmp_path, monkeypatch, rings):
    """Neither in tensors, nor in containers, nor in a ring that wraps until nothing of it is left."""
    replay, expected = rings.make(), rings.make()
    rings.fill(replay, 47)
    rings.fill(expected, 47)
    rings.assert_same(replay, expected)
    weight, names, counts = torch.ones(5), ["a"], {"n": {1}}
    parts = {"agent": {"w": weight, "half": weight[:2], "names": names, "counts": counts}}
    parts["memory"] = replay.state_dict(history=False)
    with Writer(tmp_path) as writer:
        with held(monkeypatch) as allowed:
            writer.save(1, parts, {}, {"memory": {"replay": replay.journal}})
            weight.zero_()
            names.append("b")
            counts["n"].add(2)
            parts["agent"]["late"] = 1
            rings.fill(replay, 100, seed=9)
            assert list_checkpoints(tmp_path) == [], "it is written in the background"
            allowed.set()
        writer.wait()
    agent = load(tmp_path / "step_000000000001")[1]["agent"]
    assert torch.equal(agent.pop("w"), torch.ones(5))
    assert torch.equal(agent.pop("half"), torch.ones(2))
    assert agent == {"names": ["a"], "counts": {"n": {1}}}
    rings.assert_same(expected, rings.restore(tmp_path))


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    with Writer(tmp_path, keep_last=9) as writer, held(monkeypatch) as allowed:
        writer.save(1, part(), {})
        threading.Timer(0.2, allowed.set).start()
        writer.save(2, part(), {})
        assert steps(tmp_path)[0] == 1
        assert writer.holds(2)
        assert not writer.holds(1)
    assert steps(tmp_path) == [1, 2]


def test_closing_waits(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    with held(monkeypatch) as allowed:
        writer.save(1, part(), {})
        threading.Timer(0.2, allowed.set).start()
        writer.close()
        assert steps(tmp_path) == [1]
    writer.close()


def test_a_process_that_ends_without_closing_finishes_its_checkpoint(tmp_path):
    program = """
import sys, torch
from sheeplike.checkpoint import Writer
Writer(sys.argv[1]).save(1, {"agent": {"x": torch.ones(5_000_000)}}, {})
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (2, False), (None, True)])
def test_a_state_that_would_not_fit_twice_is_written_without_a_copy(tmp_path, monkeypatch, rings, missing, fits):
    """Half of what is free must be enough: for the weights, for the state of the ring and for its journal."""
    replay = rings.make()
    rings.fill(replay, 25)
    state = replay.state_dict(history=False)
    needed = 50 * 4 + state["storage"]["latent"].nbytes + state["generator"].nbytes + 25 * 36
    free = None if missing is None else 2 * needed - missing
    copies, threads, real = [], [], snapshot.take
    monkeypatch.setattr(snapshot, "free_memory", lambda: free)
    monkeypatch.setattr(snapshot, "take", lambda value: copies.append(value) or real(value))
    write = writing.write_part
    monkeypatch.setattr(writing, "write_part", lambda *a: threads.append(threading.current_thread().name) or write(*a))
    with Writer(tmp_path) as writer:
        parts = {"agent": {"w": torch.ones(50)}, "memory": replay.state_dict(history=False)}
        writer.save(1, parts, {}, {"memory": {"replay": replay.journal}})
    assert bool(copies) == fits
    assert set(threads) == {"checkpoint" if fits else "MainThread"}
    rings.assert_same(replay, rings.restore(tmp_path))


def test_a_view_is_saved_without_what_lies_behind_it(tmp_path):
    """Also where no copy is made."""
    big = torch.zeros(1_000_000)
    with Writer(tmp_path) as writer:
        for wait in (False, True):
            writer.save(1, {"agent": {"x": big[:10]}}, {}, wait=wait)
            writer.wait()
            assert (writer.last.path / "agent.pt").stat().st_size < 10_000


def test_the_parameters_and_versions_of_modules_come_back(tmp_path):
    module = torch.nn.BatchNorm1d(3)
    with Writer(tmp_path) as writer:
        writer.save(1, {"agent": {"module": module.state_dict(keep_vars=True)}}, {})
    state = load_latest(tmp_path)[1]["agent"]["module"]
    assert isinstance(state["weight"], torch.nn.Parameter)
    assert state._metadata == module.state_dict()._metadata
    module.load_state_dict(state)


def test_bytes_and_seconds_are_told(tmp_path, monkeypatch):
    with Writer(tmp_path) as writer:
        assert writer.last is None
        with held(monkeypatch) as allowed:
            writer.save(5, part(), {})
            threading.Timer(0.3, allowed.set).start()
            writer.wait()
        saved = writer.last
        assert (saved.step, saved.path, saved.linked) == (5, tmp_path / "step_000000000005", 0)
        assert saved.written == (saved.path / "agent.pt").stat().st_size
        assert saved.blocked < 0.3 <= saved.seconds


# Failures


def no_space(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("blocking", [False, True], ids=["in the background", "without a copy"])
def test_a_full_disk_is_told_once_and_the_next_save_is_tried(tmp_path, monkeypatch, blocking):
    told: list[str] = []
    monkeypatch.setattr(snapshot, "free_memory", lambda: 0 if blocking else None)
    with Writer(tmp_path, report=told.append) as writer:
        writer.save(1, part(), {})
        writer.wait()
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_part", no_space)
            for step in (2, 3):
                writer.save(step, part(), {})
                assert not writer.holds(step)
            with pytest.raises(OSError, match="No space left"):
                writer.wait()
            assert len(told) == 1
            assert "No space left" in told[0]
            patch.setattr(writing, "write_part", lambda *a: os.stat(tmp_path / "absent"))
            writer.save(4, part(), {})
            assert not writer.holds(4)
            assert len(told) == 2, "another kind"
        assert [path.name for path in tmp_path.iterdir()] == ["step_000000000001"]
        writer.save(5, part(), {})
        writer.wait()
        assert steps(tmp_path) == [1, 5]
        assert len(told) == 2


def test_who_waits_gets_the_error(tmp_path, monkeypatch):
    told: list[str] = []
    with Writer(tmp_path, report=told.append) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_part", no_space)
            with pytest.raises(OSError, match="No space left"):
                writer.save(1, part(), {}, wait=True)
        assert told == []
        assert list(tmp_path.iterdir()) == []
        writer.save(1, part(), {}, wait=True)
    assert steps(tmp_path) == [1]


def test_a_failure_is_a_warning_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "write_part", no_space)
    with pytest.warns(RuntimeWarning, match="could not be written; the next one is tried all the same"):  # noqa: SIM117
        with Writer(tmp_path) as writer:
            writer.save(1, part(), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Writer(tmp_path) as writer:
            writer.save(1, part(), {})
            with pytest.raises(OSError, match="No space left"):
                writer.wait()


def test_an_error_that_is_not_of_the_disk_reaches_the_caller(tmp_path, monkeypatch):
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a bug")

    writer = Writer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_part", broken)
        writer.save(1, part(), {})
        with pytest.raises(ZeroDivisionError):
            writer.save(2, part(), {})
    writer.save(3, part(), {}, wait=True)
    writer.close()
    assert steps(tmp_path) == [3]


LIMITED = """
import resource, sys, torch, warnings
from sheeplike.checkpoint import Writer
warnings.simplefilter("error")
told = []
with Writer(sys.argv[1], report=told.append) as writer:
    writer.save(1, {"agent": {"x": torch.ones(1000)}}, {}, wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, resource.RLIM_INFINITY))
    big = {"agent": {"x": torch.ones(5_000_000)}}
    for step in (2, 3):
        writer.save(step, big, {})
        assert not writer.holds(step)
    try:
        writer.save(4, big, {}, wait=True)
    except OSError as error:
        print(len(told), type(error).__name__, error.errno)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    writer.save(5, big, {}, wait=True)
"""


def test_a_file_that_the_system_does_not_let_grow(tmp_path):
    """A limit on the size of files stands in for a full disk: the write itself fails, half-way through a tensor."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"1 OSError {errno.EFBIG}\n", done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000000000001", "step_000000000005"]
    assert steps(tmp_path) == [1, 5]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_directory(tmp_path):
    told: list[str] = []
    with Writer(tmp_path, report=told.append) as writer:
        writer.save(1, part(), {}, wait=True)
        tmp_path.chmod(0o500)
        writer.save(2, part(), {})
        writer.close()
        tmp_path.chmod(0o700)
    assert "Permission denied" in told[0]
    assert steps(tmp_path) == [1]


def test_a_file_system_that_becomes_read_only(tmp_path, monkeypatch):
    told: list[str] = []
    with Writer(tmp_path, report=told.append) as writer:
        writer.save(1, part(), {}, wait=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", lambda *a: os.strerror(1) and no_write())
            writer.save(2, part(), {})
            assert not writer.holds(2)
        writer.save(3, part(), {}, wait=True)
    assert "Read-only file system" in told[0]
    assert steps(tmp_path) == [1, 3]


def no_write() -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_place_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Writer(tmp_path / "file" / "checkpoints")


# Not worth saving


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wait", [False, True])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, value, wait):
    state = part()["agent"] | {"optimizer": {"state": {0: {"exp_avg": torch.ones(4, dtype=torch.bfloat16)}}}}
    with Writer(tmp_path) as writer:
        writer.save(1, {"agent": state}, {}, wait=True)
        state["optimizer"]["state"][0]["exp_avg"][2] = value
        with pytest.raises(
            NonFinite, match=r"^agent\['optimizer'\]\['state'\]\[0\]\['exp_avg'\] holds NaN or infinity"
        ):
            writer.save(2, {"agent": state}, {}, wait=wait)
        assert steps(tmp_path) == [1]
        writer.save(3, {"agent": {"x": torch.tensor([1, 2])}, "loop": state}, {}, wait=True)
        writer.save(4, {"agent": state}, {}, finite=(), wait=True)


def test_finiteness_is_read_once(tmp_path, monkeypatch):
    reads, real = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or real(self))
    snapshot.check_finite({"agent": {str(i): torch.ones(3) for i in range(50)} | {"empty": torch.zeros(0)}}, ("agent",))
    assert [read.shape for read in reads] == [(51,)]


# The manifest, the lock, and what is kept


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
