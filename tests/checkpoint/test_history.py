"""A checkpoint of what only grows writes what is new, and never takes another past for its own."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sheeplike import checkpoint
from sheeplike.checkpoint import Corrupt, Writer, load, load_latest
from sheeplike.memory import SequenceReplay

FIRST, SECOND, THIRD = ("000000000000-000000000009.pt", "000000000010-000000000019.pt", "000000000020-000000000029.pt")


# What is restored is what was saved


@pytest.mark.parametrize("steps", [0, 3, 10, 25, 40, 41, 95, 400])
def test_a_ring_comes_back_bit_for_bit(root, lab, steps):
    replay = lab.fill(lab.make_ring(), steps)
    other = lab.restore_ring(lab.save_ring(root, 1, replay))
    assert other.added == steps
    for ring in (replay, other):
        lab.fill(ring, 7, seed=1)
    lab.assert_same(replay, other)


@pytest.mark.parametrize("restored", [False, True])
@pytest.mark.parametrize("between", [1, 10, 13, 39, 40, 100])
def test_every_checkpoint_of_a_row_comes_back_bit_for_bit(root, lab, between, restored):
    """Independent of what was written before, and of how often the ring wraps in between."""
    replay = lab.make_ring(length=47)  # no multiple of a chunk
    for number in range(1, 9):
        lab.fill(replay, between, seed=number)
        other = lab.restore_ring(lab.save_ring(root, number, replay, keep_last=2), length=47)
        lab.assert_same(replay, other)
        replay = other if restored else replay


def test_the_chunks_are_restored_one_by_one(root, lab, monkeypatch):
    replay = lab.fill(lab.make_ring(), 95)
    lab.save_ring(root, 1, replay)
    _, parts = load_latest(root)
    assert parts["memory"]["storage"].keys() == {"latent"}
    sizes, write = [], SequenceReplay.write_steps
    monkeypatch.setattr(
        SequenceReplay, "write_steps", lambda *args: sizes.append(len(args[2]["image"])) or write(*args)
    )
    other = lab.make_ring()
    other.load_state_dict(parts["memory"])
    parts["history"].copy_to(other)
    assert sizes == [5, 10, 10, 10, 5]
    lab.assert_same(replay, other)


# Only what is new is written, and only what is needed is kept


def test_full_chunks_are_written_once_and_go_with_the_last_checkpoint_that_needs_them(root, lab):
    replay = lab.fill(lab.make_ring(), 25)
    first = lab.save_ring(root, 1, replay, keep_last=2)
    before = lab.chunks(root)
    assert list(before) == lab.needed(first) == [FIRST, SECOND]
    lab.fill(replay, 9)
    second = lab.save_ring(root, 2, replay, keep_last=2)
    assert list(lab.chunks(root)) == lab.needed(second) == [FIRST, SECOND, THIRD]
    assert before.items() <= lab.chunks(root).items(), "the same files"
    # Steps [0, 15) have left the ring by now; the second checkpoint still holds them.
    lab.fill(replay, 21)
    third = lab.save_ring(root, 3, replay, keep_last=2)
    assert lab.needed(third)[0] == SECOND
    assert next(iter(lab.chunks(root))) == FIRST
    assert before.items() <= lab.chunks(root).items()
    lab.save_ring(root, 4, replay, keep_last=2)
    assert list(lab.chunks(root)) == lab.needed(third)
    lab.assert_same(replay, lab.restore_ring(root))


def test_the_best_keeps_its_chunks(root, lab):
    replay = lab.fill(lab.make_ring(), 35)
    best = lab.save_ring(root, 1, replay, keep_last=1, score=1.0)
    kept = lab.restore_ring(best)
    for number in range(2, 6):
        lab.save_ring(root, number, lab.fill(replay, 35), keep_last=1)
    assert set(lab.needed(best)) <= set(lab.chunks(root))
    lab.assert_same(lab.restore_ring(best), kept)


def test_a_run_that_saves_no_replay_any_more_keeps_no_chunks(root, lab):
    lab.save_ring(root, 1, lab.fill(lab.make_ring(), 35))
    with checkpoint.Writer(root, keep_last=1) as writer:
        writer.save(2, {"agent": {}}, {}, finite=(), wait=True)
    assert lab.chunks(root) == {}


@pytest.mark.parametrize("length", [3, 4, 20, 1000])
def test_chunks_of_another_length_are_no_obstacle(root, lab, monkeypatch, length):
    lab.save_ring(root, 1, lab.fill(lab.make_ring(), 37))
    again = lab.restore_ring(root)
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 36 * length)
    for number in (2, 3, 4):
        lab.save_ring(root, number, lab.fill(again, 9, seed=number))
        lab.assert_same(again, lab.restore_ring(root))


def test_a_chunk_that_is_cut_short_or_gone_is_written_anew(root, lab):
    replay = lab.fill(lab.make_ring(), 25)
    lab.save_ring(root, 1, replay)
    os.truncate(root.parent / "replay" / FIRST, 100)
    (root.parent / "replay" / SECOND).unlink()
    lab.assert_same(replay, lab.restore_ring(lab.save_ring(root, 2, replay)))


def test_what_is_no_chunk_is_left_alone(root, lab):
    replay = lab.fill(lab.make_ring(), 25)
    lab.save_ring(root, 1, replay)
    for name in ("notes.txt", "mine.pt"):
        (root.parent / "replay" / name).touch()
    lab.save_ring(root, 2, replay)
    assert {"notes.txt", "mine.pt"} <= lab.chunks(root).keys()


# Another past


def test_after_going_back_nothing_of_the_future_that_was_left_is_used(root, lab, monkeypatch):
    """The same times hold other steps; those of the future are gone before any is written."""
    replay = lab.fill(lab.make_ring(), 25)
    old = lab.save_ring(root, 1, replay)
    newer = lab.save_ring(root, 3, lab.fill(replay, 14, seed=1))
    before = lab.chunks(root)
    (newer / "agent.pt").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="passing over"):
        again = lab.restore_ring(root)
    assert again.added == 25
    seen, real = [], checkpoint.write_part
    monkeypatch.setattr(checkpoint, "write_part", lambda *a: seen.append(list(lab.chunks(root))) or real(*a))
    lab.fill(again, 14, seed=2)
    with Writer(root, keep_last=9) as writer:
        writer.resumed_from(1)
        writer.save(2, lab.parts_of(again), {}, again, wait=True)
    assert [name for name in seen[0] if not name.startswith(".tmp-")] == lab.needed(old)
    assert not newer.exists()
    assert lab.chunks(root).keys() == before.keys()
    assert lab.chunks(root)[SECOND] == before[SECOND]
    lab.assert_same(again, lab.restore_ring(root))
    assert not torch.equal(again.storage["image"], replay.storage["image"])


@pytest.mark.parametrize("how", ["a new ring", "replaced"])
def test_steps_of_another_past_are_written_beside_those_that_a_kept_checkpoint_holds(root, lab, how):
    replay = lab.fill(lab.make_ring(), 25)
    kept = lab.save_ring(root, 1, replay)
    old = lab.restore_ring(kept)
    other = lab.fill(lab.make_ring(), 35, seed=5)
    if how == "replaced":
        replay.load_state_dict(other.state_dict())
        other = replay
    newer = lab.save_ring(root, 2, other)
    assert not set(lab.needed(kept)) & set(lab.needed(newer))
    lab.assert_same(lab.restore_ring(newer), other)
    lab.assert_same(lab.restore_ring(kept), old)


def test_what_is_replaced_while_it_is_written_does_not_get_the_files_of_before(root, lab, monkeypatch):
    replay, other = lab.fill(lab.make_ring(), 25), lab.fill(lab.make_ring(), 35, seed=5).state_dict()
    real = checkpoint.write_part

    def write(path: Path, part: dict) -> dict:
        if replay.added != 35:
            replay.load_state_dict(other)
        return real(path, part)

    with Writer(root) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_part", write)
            writer.save(1, lab.parts_of(replay), {}, replay)
            writer.wait()
        writer.save(2, lab.parts_of(replay), {}, replay)
    lab.assert_same(replay, lab.restore_ring(root))


def test_where_a_manifest_cannot_be_read_no_chunk_is_removed(root, lab):
    replay = lab.fill(lab.make_ring(), 45)
    first = lab.save_ring(root, 1, replay)
    manifest = (first / "manifest.json").read_bytes()
    (first / "manifest.json").write_bytes(b"for a moment")
    lab.save_ring(root, 2, lab.fill(replay, 50), keep_last=9)
    (first / "manifest.json").write_bytes(manifest)
    assert lab.restore_ring(first).added == 45


# Damage


@pytest.mark.parametrize("damage", ["flip_bit", "truncate", "unlink"])
@pytest.mark.parametrize("name", ["history.pt", THIRD])
def test_damage_is_noticed_and_an_older_whole_one_is_loaded(root, lab, damage, name):
    replay = lab.fill(lab.make_ring(), 25)
    lab.save_ring(root, 1, replay)
    newest = lab.save_ring(root, 2, lab.fill(replay, 10))
    file = newest / name if name == "history.pt" else root.parent / "replay" / name
    {"flip_bit": lab.flip_bit, "truncate": lambda file: os.truncate(file, 10), "unlink": Path.unlink}[damage](file)
    with pytest.raises(Corrupt, match=name):
        load(newest)
    with pytest.warns(RuntimeWarning, match="passing over") as caught:
        assert load_latest(root)[0]["step"] == 1
    assert len(caught) == 1
    assert load_latest(root, only=("agent",))[0]["step"] == 2


def test_a_bit_that_all_checkpoints_share_damages_them_all(root, lab):
    replay = lab.fill(lab.make_ring(), 25)
    for number in (1, 2, 3):
        lab.save_ring(root, number, replay)
    lab.flip_bit(root.parent / "replay" / FIRST)
    with pytest.warns(RuntimeWarning, match=FIRST), pytest.raises(Corrupt, match=" 3 "):
        load_latest(root)


def test_a_chunk_that_vanishes_after_it_was_verified_is_an_error_and_the_ring_is_not_used(root, lab):
    path = lab.save_ring(root, 1, lab.fill(lab.make_ring(), 25))
    _, parts = load(path)
    (root.parent / "replay" / SECOND).unlink()
    other = lab.make_ring()
    other.load_state_dict(parts["memory"])
    with pytest.raises(Corrupt, match=r"\.pt"):
        parts["history"].copy_to(other)
    with pytest.raises(AssertionError):
        other.draw(1)


# Kills and full disks at every point


class Killed(BaseException):
    """The process is gone: nothing that it would do from here on happens."""


@contextlib.contextmanager
def killed_at(operation: int) -> Iterator[None]:
    """Nothing reaches the disk from the given operation on, in any order of operations."""
    count = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count >= operation:
                raise Killed
            return real(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink", "fsync", "mkdir", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        with contextlib.suppress(Killed):
            yield
            assert count < operation, "it was caught"


@pytest.mark.parametrize("back", [False, True], ids=["forward", "after going back"])
def test_a_kill_at_any_operation_leaves_the_last_checkpoint_or_the_new_one(tmp_path, lab, back):
    """The run goes on from there as if nothing had been, and leaves no file behind that is not needed."""
    begun, replay = tmp_path / "begun" / "checkpoints", lab.fill(lab.make_ring(), 25)
    lab.save_ring(begun, 1, replay)
    lab.save_ring(begun, 2, lab.fill(replay, 20, seed=1))
    before = 1 if back else 2
    for operation in range(1, 1000):
        root = shutil.copytree(begun.parent, tmp_path / str(operation)) / "checkpoints"
        replay = lab.fill(lab.restore_ring(root / f"step_{before:012d}"), 31, seed=2)
        done = False
        with killed_at(operation):
            with Writer(root, keep_last=1) as writer:
                writer.resumed_from(before)
                writer.save(3, lab.parts_of(replay), {}, replay, wait=True)
            done = True
        with warnings.catch_warnings(action="ignore" if back else "error"):
            step, again = load_latest(root)[0]["step"], lab.restore_ring(root)
        assert step in ((1, 2, 3) if back else (2, 3))
        if step == 3:
            lab.assert_same(replay, again)
        lab.fill(again, 17, seed=3)
        with Writer(root, keep_last=1) as writer:
            writer.resumed_from(step)
            writer.save(4, lab.parts_of(again), {}, again, wait=True)
        lab.assert_same(again, lab.restore_ring(root))
        assert [path.name for path in root.iterdir()] == ["step_000000000004"]
        assert list(lab.chunks(root)) == lab.needed(root / "step_000000000004")
        if done:
            break
    assert operation > 20


def test_a_disk_that_is_full_while_a_chunk_is_written(root, lab, monkeypatch):
    replay = lab.fill(lab.make_ring(), 35)
    real, left = checkpoint.write_part, [1]

    def full(path: Path, part: dict) -> dict:
        entry = real(path, part)
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        return entry

    with Writer(root) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_part", full)
            with pytest.raises(OSError, match="No space left"):
                writer.save(1, lab.parts_of(replay), {}, replay, wait=True)
        before = lab.chunks(root)
        assert list(before) == [FIRST]
        assert list(root.iterdir()) == []
        writer.save(2, lab.parts_of(replay), {}, replay, wait=True)
    assert lab.chunks(root)[FIRST] == before[FIRST]
    lab.assert_same(replay, lab.restore_ring(root))
