"""A save that fails is told, leaves what was there, and ends nothing; what is not sound is not saved."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from sheeplike import host
from sheeplike.checkpoint import NonFinite, NotWritten, Writer, list_checkpoints, load, snapshot, writing


def part(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value), "updates": 7}}


def steps(root: Path) -> list[int]:
    return [load(path)[0]["step"] for path in list_checkpoints(root)]


def no_space(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("blocking", [False, True], ids=["in the background", "without a copy"])
def test_a_full_disk_is_told_once_and_the_next_save_is_tried(tmp_path, monkeypatch, blocking):
    told: list[str] = []
    monkeypatch.setattr(host, "free_memory", lambda: 0 if blocking else None)
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


@pytest.mark.parametrize("raised", [MemoryError("no more"), RuntimeError("unexpected pos"), ZeroDivisionError("a bug")])
@pytest.mark.parametrize("blocking", [False, True], ids=["in the background", "without a copy"])
def test_an_error_that_is_not_of_the_disk_is_a_failed_save_as_well(tmp_path, monkeypatch, raised, blocking):
    """torch has a RuntimeError for a write that is cut short, and nothing of it is worth the run."""

    def broken(*arguments: object) -> None:
        raise raised

    told: list[str] = []
    monkeypatch.setattr(host, "free_memory", lambda: 0 if blocking else None)
    with Writer(tmp_path, report=told.append) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_part", broken)
            for step in (1, 2):
                writer.save(step, part(), {})
                assert not writer.holds(step)
            assert len(told) == 1
            assert f"{type(raised).__name__}: {raised}" in told[0]
            with pytest.raises(NotWritten) as waited:
                writer.wait()
            with pytest.raises(NotWritten) as asked:
                writer.save(3, part(), {}, wait=True)
            assert waited.value.__cause__ is asked.value.__cause__ is raised
        assert list(tmp_path.iterdir()) == []
        writer.save(4, part(), {})
    assert steps(tmp_path) == [4]


def test_the_copy_of_a_state_does_not_outlive_its_failed_save(tmp_path, monkeypatch):
    copies, real = [], snapshot.take

    def take(value: dict) -> dict:
        taken = real(value)
        copies.append(weakref.ref(taken["weight"]))
        return taken

    def broken(path: Path, state: dict) -> None:
        raise MemoryError

    monkeypatch.setattr(snapshot, "take", take)
    monkeypatch.setattr(writing, "write_part", broken)
    with Writer(tmp_path, report=lambda text: None) as writer:
        writer.save(1, part() | {"other": part()["agent"]}, {})
        assert not writer.holds(1)
        assert [copy() for copy in copies] == [None, None]


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
