"""Of what only grows, a checkpoint writes what is new, and never takes another history for its own."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from sheeplike import checkpoint
from sheeplike.checkpoint import Corrupt, Writer
from sheeplike.checkpoint.files import write_manifest
from sheeplike.memory import SequenceReplay

# What is restored is what was saved


@pytest.mark.parametrize("steps", [0, 3, 10, 25, 40, 41, 95, 400])
def test_a_ring_comes_back_bit_for_bit(tmp_path, rings, steps):
    replay = rings.make()
    rings.fill(replay, steps)
    other = rings.restore(rings.save(tmp_path, 1, replay))
    assert other.added == steps
    if replay.ready:
        rings.assert_same(replay, other)
        rings.fill(replay, 7, seed=1)
        rings.fill(other, 7, seed=1)
        rings.assert_same(replay, other)


@pytest.mark.parametrize("between", [1, 4, 10, 13, 39, 40, 41, 100, 333])
def test_every_checkpoint_of_a_row_comes_back_bit_for_bit(tmp_path, rings, between):
    """Whatever is linked or written, and however often the ring wraps in between."""
    replay = rings.make(length=47)  # no multiple of a chunk
    for number in range(1, 9):
        rings.fill(replay, between, seed=number)
        path = rings.save(tmp_path, number, replay, keep_last=2)
        if replay.ready:
            rings.assert_same(replay, rings.restore(path, length=47))


def test_a_ring_that_goes_on_after_a_restore_is_saved_as_well(tmp_path, rings):
    replay = rings.make()
    for number in range(1, 7):
        rings.fill(replay, 17, seed=number)
        rings.save(tmp_path, number, replay, keep_last=1)
        other = rings.restore(tmp_path)
        rings.assert_same(replay, other)
        replay = other


def test_the_chunks_are_restored_one_by_one(tmp_path, rings, monkeypatch):
    replay = rings.make()
    rings.fill(replay, 95)
    rings.save(tmp_path, 1, replay)
    _, parts = checkpoint.load_latest(tmp_path)
    assert parts["memory"]["storage"].keys() == {"latent"}
    stored = parts["journals"]["memory"]["replay"]
    sizes = []
    other = rings.make()
    other.load_state_dict(parts["memory"])
    write = type(other.journal).write

    def counted(self, start, steps):
        sizes.append(len(steps["image"]))
        write(self, start, steps)

    monkeypatch.setattr(type(other.journal), "write", counted)
    stored.copy_to(other.journal)
    assert sizes == [5, 10, 10, 10, 5]
    rings.assert_same(replay, other)


# Only what is new is written


def test_complete_chunks_are_linked_and_the_rest_is_written(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 25)
    first = rings.chunks(rings.save(tmp_path, 1, replay))
    assert list(first) == ["000000000000-000000000010", "000000000010-000000000020", "000000000020-000000000025"]
    rings.fill(replay, 9)
    second = rings.chunks(rings.save(tmp_path, 2, replay))
    assert list(second)[2:] == ["000000000020-000000000030", "000000000030-000000000034"]
    assert [second[name] == first.get(name) for name in second] == [True, True, False, False]
    # Nothing new: the tail is linked too.
    third = rings.chunks(rings.save(tmp_path, 3, replay))
    assert third == second
    # Steps [0, 15) have left the ring by now; the chunk of [10, 20) stays as it is.
    rings.fill(replay, 21)
    fourth = rings.chunks(rings.save(tmp_path, 4, replay))
    assert "000000000000-000000000010" not in fourth
    assert fourth["000000000010-000000000020"] == first["000000000010-000000000020"]
    rings.assert_same(replay, rings.restore(tmp_path))


def test_a_chunk_that_was_written_when_it_was_half_forgotten_is_linked_while_it_is_enough(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 45)
    first = rings.chunks(rings.save(tmp_path, 1, replay))
    assert next(iter(first)) == "000000000005-000000000010"
    rings.fill(replay, 3)
    second = rings.chunks(rings.save(tmp_path, 2, replay))
    assert second["000000000005-000000000010"] == first["000000000005-000000000010"]
    rings.assert_same(replay, rings.restore(tmp_path))


def test_as_many_bytes_are_written_as_are_new(tmp_path):
    """A megabyte of images in chunks of 64 KiB; later saves write 2 of 16 chunks and the latents."""
    spec = {"image": ((4096,), torch.uint8), "latent": ((1,), torch.uint8)}
    spec |= {name: ((), torch.bool) for name in ("is_first", "is_last")}
    replay = SequenceReplay(spec, num_envs=1, size=256, sequence=4, refreshed=("latent",))
    step = {key: torch.zeros(1, *shape, dtype=dtype) for key, (shape, dtype) in spec.items()}
    with pytest.MonkeyPatch.context() as patch, Writer(tmp_path) as writer:
        patch.setattr("sheeplike.checkpoint.journals.CHUNK_BYTES", 16 * replay.journal.step_bytes)

        def saved(number: int) -> checkpoint.Saved:
            parts = {"agent": {}, "memory": replay.state_dict(history=False)}
            writer.save(number, parts, {}, {"memory": {"replay": replay.journal}}, wait=True)
            return writer.last

        for _ in range(256):
            replay.add(step)
        assert 2**20 < saved(1).written < 1.1 * 2**20
        assert saved(2).written < 10_000
        for _ in range(32):
            replay.add(step)
        third = saved(3)
        assert 32 * 4096 < third.written < 1.1 * 32 * 4096 + 10_000
        assert third.linked > 0.8 * 2**20
        blocks = sum(file.stat().st_size for file in writer.last.path.glob("memory.replay.*"))
        assert blocks > 2**20, "and every directory is whole by itself"


@pytest.mark.parametrize("length", [3, 4, 20, 1000])
def test_chunks_of_another_length_are_no_obstacle(tmp_path, rings, monkeypatch, length):
    replay = rings.make()
    rings.fill(replay, 37)
    rings.save(tmp_path, 1, replay)
    again = rings.restore(tmp_path)
    monkeypatch.setattr("sheeplike.checkpoint.journals.CHUNK_BYTES", 36 * length)
    for number in (2, 3, 4):
        rings.fill(again, 9, seed=number)
        rings.save(tmp_path, number, again)
        rings.assert_same(again, rings.restore(tmp_path))


def test_a_checkpoint_is_whole_when_those_it_was_linked_from_are_gone(tmp_path, rings):
    replay = rings.make()
    for number in (1, 2, 3):
        rings.fill(replay, 12, seed=number)
        path = rings.save(tmp_path, number, replay, keep_last=1)
    moved = shutil.copytree(path, tmp_path / "elsewhere")
    shutil.rmtree(path)
    rings.assert_same(replay, rings.restore(moved))


def test_a_source_of_another_size_is_not_linked(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 25)
    first = rings.save(tmp_path, 1, replay)
    os.truncate(next(first.glob("memory.replay.000000000010*")), 100)
    next(first.glob("memory.replay.000000000000*")).unlink()
    second = rings.save(tmp_path, 2, replay)
    rings.assert_same(replay, rings.restore(second))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EPERM, errno.EMLINK, errno.EXDEV])
def test_without_hard_links_files_are_copied(tmp_path, rings, fail, code):
    fail("os.link", OSError(code, os.strerror(code)))
    replay = rings.make()
    for number in (1, 2, 3):
        rings.fill(replay, 25, seed=number)
        path = rings.save(tmp_path, number, replay)
    assert all(file.stat().st_nlink == 1 for file in path.iterdir())
    rings.assert_same(replay, rings.restore(path))


def test_a_damaged_source_that_would_be_copied_is_noticed_and_written_anew_next_time(tmp_path, rings, fail):
    fail("os.link", OSError(errno.EPERM, "no links"))
    replay = rings.make()
    rings.fill(replay, 25)
    parts = {"agent": {}, "memory": replay.state_dict(history=False)}
    journals = {"memory": {"replay": replay.journal}}
    with Writer(tmp_path) as writer:
        writer.save(1, parts, {}, journals, wait=True)
        rings.flip_bit(next(writer.last.path.glob("memory.replay.000000000010*")))
        with pytest.raises(OSError, match=r"memory\.replay\.000000000010-000000000020\.pt: was altered"):
            writer.save(2, parts, {}, journals, wait=True)
        writer.save(3, parts, {}, journals, wait=True)
    rings.assert_same(replay, rings.restore(tmp_path))


# Lineage


def test_after_a_resume_from_an_older_checkpoint_nothing_of_the_newer_one_is_used(tmp_path, rings):
    """The same times hold other steps: those between the two checkpoints happened twice."""
    replay = rings.make()
    rings.fill(replay, 25)
    old = rings.save(tmp_path, 1, replay)
    rings.fill(replay, 14, seed=1)
    newer = rings.save(tmp_path, 3, replay)
    (newer / "agent.pt").write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="passing over"):
        again = rings.restore(tmp_path)
    assert again.added == 25
    shared, foreign = rings.chunks(old), rings.chunks(newer)
    rings.fill(again, 14, seed=2)
    path = rings.save(tmp_path, 2, again)
    assert rings.chunks(path)["000000000010-000000000020"] == shared["000000000010-000000000020"]
    assert rings.chunks(path)["000000000020-000000000030"] != foreign["000000000020-000000000030"]
    rings.assert_same(again, rings.restore(path))
    assert not torch.equal(again.storage["image"], replay.storage["image"])


def test_a_newer_checkpoint_that_is_replaced_lends_nothing_to_the_one_in_its_place(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 25)
    old = rings.save(tmp_path, 1, replay)
    rings.fill(replay, 14, seed=1)
    rings.save(tmp_path, 2, replay)
    again = rings.restore(old)
    rings.fill(again, 14, seed=2)
    rings.assert_same(again, rings.restore(rings.save(tmp_path, 2, again)))


def test_two_continuations_of_one_checkpoint_share_only_what_came_before(tmp_path, rings):
    """A copy of a run's directory goes on elsewhere, and its checkpoint is brought back."""
    replay = rings.make()
    rings.fill(replay, 25)
    start = rings.save(tmp_path / "a", 1, replay)
    shutil.copytree(start, tmp_path / "b" / start.name)
    for root, seed in ((tmp_path / "a", 1), (tmp_path / "b", 2)):
        branch = rings.restore(root)
        rings.fill(branch, 14, seed=seed)
        rings.save(root, 2, branch)
        rings.fill(branch, 3, seed=seed)
    shutil.rmtree(tmp_path / "b" / "step_000000000002")
    shutil.copytree(tmp_path / "a" / "step_000000000002", tmp_path / "b" / "step_000000000002")
    rings.assert_same(branch, rings.restore(rings.save(tmp_path / "b", 3, branch)))


def test_a_ring_that_begins_anew_links_nothing(tmp_path, rings):
    """After a resume without its memory, time begins at 0 again."""
    replay = rings.make()
    rings.fill(replay, 25)
    first = rings.save(tmp_path, 1, replay)
    fresh = rings.make()
    rings.fill(fresh, 25, seed=5)
    second = rings.save(tmp_path, 2, fresh)
    assert not set(rings.chunks(first).values()) & set(rings.chunks(second).values())
    rings.assert_same(fresh, rings.restore(second))


def test_a_ring_whose_content_was_replaced_in_memory_links_nothing(tmp_path, rings):
    replay, other = rings.make(), rings.make()
    rings.fill(replay, 25)
    rings.fill(other, 25, seed=5)
    first = rings.save(tmp_path, 1, replay)
    replay.load_state_dict(other.state_dict())
    second = rings.save(tmp_path, 2, replay)
    assert not set(rings.chunks(first).values()) & set(rings.chunks(second).values())
    rings.assert_same(other, rings.restore(second))


def test_two_agents_with_journals_of_the_same_name_do_not_share(tmp_path, rings):
    one, two = rings.make(), rings.make()
    rings.fill(one, 25, seed=1)
    rings.fill(two, 25, seed=2)
    for number in (1, 2):
        parts = {name: ring.state_dict(history=False) for name, ring in (("one", one), ("two", two))}
        journals = {"one": {"replay": one.journal}, "two": {"replay": two.journal}}
        checkpoint.save(tmp_path, number, parts, {}, keep_last=2, journals=journals)
    _, parts = checkpoint.load_latest(tmp_path)
    for name, ring in (("one", one), ("two", two)):
        back = rings.make()
        back.load_state_dict(parts[name])
        parts["journals"][name]["replay"].copy_to(back.journal)
        rings.assert_same(ring, back)


# Damage


def journal_files(path: Path) -> list[Path]:
    return sorted(path.glob("memory.replay.*"))


@pytest.mark.parametrize("damage", ["flip_bit", "truncate", "unlink"])
@pytest.mark.parametrize("number", [0, 2])
def test_a_damaged_journal_is_noticed_and_an_older_whole_one_is_loaded(tmp_path, rings, damage, number):
    replay = rings.make()
    rings.fill(replay, 25)
    rings.save(tmp_path, 1, replay)
    again = rings.restore(tmp_path)
    again.lineage, again.parent = "another", None  # nothing is shared
    newest = rings.save(tmp_path, 2, again)
    file = journal_files(newest)[number]
    {"flip_bit": rings.flip_bit, "truncate": lambda file: os.truncate(file, 10), "unlink": Path.unlink}[damage](file)
    with pytest.raises(Corrupt, match=journal_files(tmp_path / "step_000000000001")[number].name):
        checkpoint.load(newest)
    with pytest.warns(RuntimeWarning, match="passing over") as caught:
        meta, parts = checkpoint.load_latest(tmp_path)
    assert (meta["step"], len(caught)) == (1, 1)
    assert "memory" in parts


@pytest.mark.parametrize("shared", [True, False], ids=["a shared chunk", "the refreshed values"])
def test_where_only_memories_are_damaged_the_newest_is_loaded_without(tmp_path, rings, shared):
    replay = rings.make()
    rings.fill(replay, 25)
    for number in (1, 2, 3):
        rings.save(tmp_path, number, replay)
    (tmp_path / "step_000000000003" / "agent.pt").write_bytes(b"damaged")
    for path in checkpoint.list_checkpoints(tmp_path)[:2]:
        if shared:
            rings.flip_bit(journal_files(path)[0]) if path.name.endswith("1") else None
        else:
            rings.flip_bit(path / "memory.pt")
    with pytest.warns(RuntimeWarning) as caught:
        meta, parts = checkpoint.load_latest(tmp_path)
    assert meta["step"] == 2
    assert parts == {"agent": {"step": 2}}
    assert "The resume is approximate: it begins with an empty memory" in str(caught[-1].message)
    assert len(caught) == 4


def test_who_wants_only_the_agent_does_not_read_journals(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 25)
    path = rings.save(tmp_path, 1, replay)
    for file in journal_files(path):
        file.unlink()
    assert checkpoint.load(path, only=("agent",))[1] == {"agent": {"step": 1}}
    assert checkpoint.load_latest(tmp_path, only=("agent",))[0]["step"] == 1


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_manifest_that_leaves_out_a_chunk_is_noticed(tmp_path, rings, index):
    replay = rings.make()
    rings.fill(replay, 25)
    path = rings.save(tmp_path, 1, replay)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"], manifest["journals"]["memory"]["replay"]["chunks"][index]
    write_manifest(path / "manifest.json", manifest)
    with pytest.raises(Corrupt, match=r"leaves a gap|a journal ends at 20, expected 25"):
        checkpoint.load(path)


def test_a_journal_that_vanishes_after_it_was_verified_is_an_error_and_the_ring_is_not_used(tmp_path, rings):
    replay = rings.make()
    rings.fill(replay, 25)
    path = rings.save(tmp_path, 1, replay)
    _, parts = checkpoint.load(path)
    journal_files(path)[1].unlink()
    other = rings.make()
    other.load_state_dict(parts["memory"])
    with pytest.raises(Corrupt, match="cannot be read: No such file"):
        parts["journals"]["memory"]["replay"].copy_to(other.journal)
    with pytest.raises(RuntimeError, match="put back up to 10 of 25"):
        other.draw(1)
