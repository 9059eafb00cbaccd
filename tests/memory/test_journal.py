"""The journal of a ring: what never changes, by time, out of the ring and back into it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from sheeplike.memory import SequenceReplay

SPEC = {
    "image": ((4,), torch.uint8),
    "deter": ((3,), torch.bfloat16),
    "is_first": ((), torch.bool),
    "is_last": ((), torch.bool),
}


def ring(added: int = 0, length: int = 12) -> SequenceReplay:
    """Time ``t`` holds ``t`` in every image of world 0, and ``t + 100`` in those of world 1."""
    replay = SequenceReplay(SPEC, num_envs=2, size=2 * length, sequence=4, refreshed=("deter",))
    for time in range(added):
        step = {key: torch.zeros(2, *shape, dtype=dtype) for key, (shape, dtype) in SPEC.items()}
        step["image"] += torch.tensor([[time], [time + 100]], dtype=torch.uint8)
        step["deter"] += time
        replay.add(step)
    return replay


def times(steps: dict[str, torch.Tensor]) -> list[int]:
    assert torch.equal(steps["image"][:, 1], steps["image"][:, 0] + 100)
    return steps["image"][:, 0, 0].tolist()


def test_it_holds_what_never_changes_and_nothing_else() -> None:
    replay = ring(5)
    assert replay.journal.read(0, 5).keys() == {"image", "is_first", "is_last"}
    assert replay.journal.step_bytes == 2 * (4 + 1 + 1)
    assert replay.state_dict(history=False)["storage"].keys() == {"deter"}
    assert replay.state_dict()["storage"].keys() == SPEC.keys()


@pytest.mark.parametrize("added", [1, 11, 12, 13, 23, 24, 25, 100])
def test_any_part_of_what_is_held_can_be_read_by_time(added) -> None:
    journal = ring(added).journal
    assert (journal.oldest, journal.end) == (max(0, added - 12), added)
    for start in range(journal.oldest, added + 1):
        for stop in range(start, added + 1):
            assert times(journal.read(start, stop)) == list(range(start, stop))
    for start, stop in ((journal.oldest - 1, added), (journal.oldest, added + 1), (added, added - 1)):
        with pytest.raises(ValueError, match="no steps"):
            journal.read(start, stop)


def test_what_is_read_is_a_copy() -> None:
    replay = ring(12)
    steps = replay.journal.read(0, 12)
    replay.storage["image"].zero_()
    assert times(steps) == list(range(12))


@pytest.mark.parametrize("added", [5, 12, 13, 31])
@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("older", [0, 3])
def test_what_was_read_is_put_back_in_pieces(added, size, older) -> None:
    """Also where a piece begins with steps that the ring has forgotten since."""
    replay, other = ring(added), ring()
    other.load_state_dict(replay.state_dict(history=False))
    oldest = replay.oldest
    for start in range(oldest, added, size):
        stop = min(start + size, added)
        steps = replay.journal.read(start, stop)
        if start == oldest:
            padding = {key: value[:1].expand(older, *value.shape[1:]) for key, value in steps.items()}
            steps = {key: torch.cat([padding[key], value]) for key, value in steps.items()}
            start -= older
        with pytest.raises(RuntimeError, match="put back up to"):
            other.draw(1)
        with pytest.raises(RuntimeError, match="put back up to"):
            other.add({})
        other.journal.write(start, steps)
    for key in SPEC:
        assert torch.equal(other.storage[key], replay.storage[key])
    assert other.added == added
    if added >= 4:
        other.draw(1)


def test_an_empty_ring_awaits_nothing() -> None:
    replay = ring()
    replay.load_state_dict(ring().state_dict(history=False))
    replay.add({key: torch.zeros(2, *shape, dtype=dtype) for key, (shape, dtype) in SPEC.items()})


def test_what_does_not_follow_is_refused() -> None:
    replay, other = ring(20), ring()
    read = replay.journal.read
    with pytest.raises(ValueError, match="expected those from None"):
        other.journal.write(8, read(8, 10))
    other.load_state_dict(replay.state_dict(history=False))
    for start, steps in ((10, read(10, 12)), (4, {"image": torch.zeros(4, 2, 4)}), (8, {}), (19, read(8, 12))):
        with pytest.raises(ValueError, match="expected those from 8 up to 20"):
            other.journal.write(start, steps)
    good = read(8, 12)
    for steps in (
        {key: value for key, value in good.items() if key != "image"},
        good | {"image": good["image"].int()},
        good | {"image": good["image"][:, :1]},
        good | {"is_last": torch.zeros(5, 2, dtype=torch.bool)},
    ):
        with pytest.raises(ValueError, match="journal key"):
            other.journal.write(8, steps)
    other.journal.write(8, good)
    other.journal.write(12, read(12, 20))
    with pytest.raises(ValueError, match="expected those from None"):
        other.journal.write(12, read(12, 20))


def test_only_what_may_be_refreshed_is_written_back() -> None:
    replay = ring(12)
    sample = replay.sample(2)
    with pytest.raises(ValueError, match=r"write_back of \['deter', 'image'\]: only \['deter'\] may be refreshed"):
        replay.write_back(sample.worlds, sample.times, {name: sample.data[name] for name in ("deter", "image")})
    with pytest.raises(ValueError, match=r"refreshed=\['detr'\]: expected keys of the ring"):
        SequenceReplay(SPEC, num_envs=2, size=24, sequence=4, refreshed=("detr",))


def test_the_lineage_changes_with_the_content_and_only_then() -> None:
    replay, other = ring(12), ring(12)
    first = replay.journal.lineage
    assert first != other.journal.lineage
    replay.journal.parent = "a checkpoint"
    replay.sample(2)
    assert (replay.journal.lineage, replay.journal.parent) == (first, "a checkpoint")
    for history in (True, False):
        before = replay.journal.lineage
        replay.journal.parent = "a checkpoint"
        replay.load_state_dict(other.state_dict(history=history))
        assert replay.journal.lineage != before
        assert replay.journal.parent is None


def test_a_ring_is_freed_without_the_garbage_collector() -> None:
    """It may be most of the memory that there is."""
    replay = ring(5)
    replay.journal.read(0, 5)
    gone = weakref.ref(replay)
    gc.disable()
    try:
        del replay
        assert gone() is None
    finally:
        gc.enable()
