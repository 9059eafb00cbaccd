"""The sequence ring: which windows it serves, how often, and what write-back changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from sheeplike.memory import SequenceReplay
from sheeplike.memory.replay import Sequences

SPEC = {
    "time": ((), torch.int64),
    "world": ((), torch.int64),
    "is_first": ((), torch.bool),
    "is_last": ((), torch.bool),
    "latent": ((3,), torch.bfloat16),
    "index": ((2,), torch.uint8),
}

FLAGS = {key: SPEC[key] for key in ("is_first", "is_last")}


def make(
    *, worlds: int = 3, length: int = 20, sequence: int = 5, online: bool = False, seed: int = 0
) -> SequenceReplay:
    return SequenceReplay(
        SPEC,
        num_envs=worlds,
        size=worlds * length,
        sequence=sequence,
        online=online,
        seed=seed,
        refreshed=("latent", "index"),
    )


def add(
    replay: SequenceReplay, steps: int, *, first: Iterable[tuple[int, int]] = (), last: Iterable[tuple[int, int]] = ()
) -> None:
    """Append steps that carry their own name; ``first`` and ``last`` hold (time, world) pairs."""
    first, last, worlds = set(first), set(last), range(replay.num_envs)
    for time in range(replay.added, replay.added + steps):
        replay.add(
            {
                "time": torch.full((len(worlds),), time),
                "world": torch.arange(len(worlds)),
                "is_first": torch.tensor([(time, world) in first for world in worlds]),
                "is_last": torch.tensor([(time, world) in last for world in worlds]),
                "latent": torch.full((len(worlds), 3), float(time)),
                "index": torch.full((len(worlds), 2), time % 7),
            }
        )


def starts(sample: Sequences) -> list[tuple[int, int]]:
    """(world, start time) of each sequence, as the data itself says."""
    return list(zip(sample.data["world"][:, 0].tolist(), sample.data["time"][:, 0].tolist(), strict=True))


@pytest.mark.parametrize("case", range(12))
def test_windows_are_consecutive_steps_of_one_world_and_never_span_the_write_head(case: int) -> None:
    rng = np.random.default_rng(case)
    worlds, sequence = int(rng.integers(1, 6)), int(rng.integers(2, 9))
    length = sequence + int(rng.integers(1, 12))
    replay = make(worlds=worlds, length=length, sequence=sequence, online=bool(case % 2), seed=case)
    add(replay, sequence)
    for _ in range(25):
        sample = replay.sample(40)
        times, oldest = sample.data["time"], max(0, replay.added - length)
        assert times.shape == (40, sequence)
        assert torch.equal(times, times[:, :1] + torch.arange(sequence))
        assert torch.equal(times, sample.times)
        assert torch.equal(sample.data["world"], sample.envs[:, None].expand(-1, sequence))
        assert oldest <= int(times.min())
        assert int(times.max()) < replay.added
        add(replay, int(rng.integers(1, 4)))


@pytest.mark.parametrize("added", [13, 20, 29, 57], ids=["filling", "just full", "seam in the middle", "wrapped often"])
def test_sampling_is_uniform_over_all_starts_of_all_worlds(added: int) -> None:
    replay = make(seed=1)
    add(replay, added)
    held = min(added, 20)
    cells = 3 * (held - 5 + 1)
    draws = 60_000
    counts = Counter(starts(replay.sample(draws)))
    assert set(counts) == {(world, time) for world in range(3) for time in range(added - held, added - 4)}
    expected = draws / cells
    statistic = sum((count - expected) ** 2 / expected for count in counts.values())
    freedom = cells - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # beyond the 99.9 % quantile


def served(replay: SequenceReplay, batch: int) -> list[tuple[int, int]]:
    """(world, start time) of the fresh sequences that the next batch takes: those with which it begins."""
    waiting = list(replay.fresh)
    drawn = list(zip(*(part.tolist() for part in replay.draw(batch)), strict=True))
    taken = waiting[: len(waiting) - len(replay.fresh)]
    assert drawn[: len(taken)] == taken
    return taken


@pytest.mark.parametrize(
    ("worlds", "batch", "updates", "most"),
    [
        (512, 16, 32, 1),  # replay_ratio 1/16, as in the next three
        (16, 16, 1, 1),
        (4, 16, 0.25, 1),
        (1, 16, 1 / 16, 1),
        (16, 16, 0.1, 3),  # fewer updates than fresh sequences: 2.5 for each
        (4, 2, 0.25, 1),
    ],
)
def test_each_fresh_sequence_is_served_once_in_turn_beside_uniform_ones(
    worlds: int, batch: int, updates: float, most: int
) -> None:
    sequence = 65 if worlds == 512 else 64
    replay = SequenceReplay(FLAGS, num_envs=worlds, size=worlds * 6 * sequence, sequence=sequence)
    step = {key: torch.zeros(worlds, dtype=torch.bool) for key in FLAGS}
    found: list[tuple[int, int]] = []
    due, rounds = 0.0, 8
    for _ in range(rounds * sequence):
        replay.add(step)
        due += updates * replay.ready
        while due >= 1:
            due -= 1
            some = bool(replay.fresh)
            found += (taken := served(replay, batch))
            assert some <= len(taken) <= most
        assert len(replay.fresh) <= most * worlds
    assert len(found) >= (rounds - most) * worlds
    assert found == [(world, n * sequence) for n in range(rounds) for world in range(worlds)][: len(found)]


def test_fresh_sequences_that_have_gathered_before_the_first_update_leave_room_for_others() -> None:
    replay = make(worlds=4, length=100, sequence=5, online=True)
    add(replay, 100)
    found = served(replay, 16)
    assert len(found) == 15
    while replay.fresh:
        found += served(replay, 16)
    assert found == [(world, start) for start in range(0, 100, 5) for world in range(4)]
    assert len(set(starts(replay.sample(20_000)))) == 4 * 96, "and then all is uniform"


def test_a_sequence_is_fresh_only_when_it_is_whole() -> None:
    replay = make(worlds=2, length=40, sequence=4, online=True)
    add(replay, 7)
    assert list(replay.fresh) == [(0, 0), (1, 0)]
    add(replay, 1)
    assert list(replay.fresh) == [(0, 0), (1, 0), (0, 4), (1, 4)]


def test_fresh_sequences_overwritten_while_they_waited_are_dropped() -> None:
    replay = make(worlds=1, length=9, sequence=4, online=True)
    add(replay, 16)  # starts 0, 4, 8, 12 were queued; the ring holds 7..15
    assert starts(replay.sample(3))[:2] == [(0, 8), (0, 12)]
    assert not replay.fresh


def test_without_the_online_queue_nothing_is_queued() -> None:
    replay = make(online=False)
    add(replay, 30)
    assert not replay.fresh


def test_is_last_is_repaired_where_a_stream_was_cut() -> None:
    replay = make(worlds=2, length=12, sequence=6)
    add(replay, 17, first=[(0, 0), (8, 0), (12, 1)], last=[(14, 1)])
    sample = replay.sample(300)
    true_last = {(7, 0), (11, 1), (14, 1)}
    for world, times, is_last in zip(sample.envs.tolist(), sample.times.tolist(), sample.data["is_last"], strict=True):
        # The last step of a window knows nothing of what follows, so only a true ending marks it.
        seen = [(t, world) in true_last and (t != times[-1] or (t, world) == (14, 1)) for t in times]
        assert is_last.tolist() == seen
    assert int(replay.storage["is_last"].sum()) == 1, "the repair is made on the sample, not on the ring"


def test_write_back_lands_on_its_world_and_time_and_nowhere_else() -> None:
    replay = make(worlds=3, length=10, sequence=4)
    add(replay, 17)  # the seam lies at slot 7
    worlds, times = torch.tensor([2, 0]), torch.tensor([[8, 9, 10], [13, 14, 15]])
    before = {key: value.clone() for key, value in replay.storage.items()}
    latent = torch.arange(18.0).reshape(2, 3, 3) + 100
    index = torch.arange(12).reshape(2, 3, 2) + 50
    replay.write_back(worlds, times, {"latent": latent, "index": index})
    for row, world in enumerate((2, 0)):
        for column in range(3):
            slot = int(times[row, column]) % 10
            assert replay.storage["latent"][slot, world].tolist() == latent[row, column].tolist()
            assert replay.storage["index"][slot, world].tolist() == index[row, column].tolist()
            before["latent"][slot, world] = latent[row, column]
            before["index"][slot, world] = index[row, column]
    for key, value in replay.storage.items():
        assert torch.equal(value, before[key])
        assert value.dtype == SPEC[key][1]


def test_write_back_skips_steps_whose_slot_now_holds_a_newer_one() -> None:
    replay = make(worlds=2, length=8, sequence=4)
    add(replay, 8)
    worlds, times = torch.tensor([1]), torch.tensor([[0, 1, 2, 3]])
    add(replay, 2)  # overwrites times 0 and 1 by 8 and 9
    replay.write_back(worlds, times, {"latent": torch.full((1, 4, 3), -1.0)})
    held = {
        int(t): float(v) for t, v in zip(replay.storage["time"][:, 1], replay.storage["latent"][:, 1, 0], strict=True)
    }
    assert held == {8: 8, 9: 9, 2: -1, 3: -1, 4: 4, 5: 5, 6: 6, 7: 7}


def test_added_values_are_copies() -> None:
    replay = make(worlds=1, length=6, sequence=2)
    latent = torch.ones(1, 3)
    flags = {"is_first": torch.zeros(1, dtype=torch.bool), "is_last": torch.zeros(1, dtype=torch.bool)}
    number = {"time": torch.zeros(1), "world": torch.zeros(1), "index": torch.zeros(1, 2)}
    replay.add({**flags, **number, "latent": latent})
    latent.fill_(7)
    assert replay.storage["latent"][0].eq(1).all()


def test_samples_are_copies() -> None:
    replay = make()
    add(replay, 20)
    replay.sample(4).data["time"].fill_(-1)
    assert int(replay.storage["time"].min()) == 0


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_a_step_with_other_keys_is_refused(change: str) -> None:
    replay = make(worlds=1)
    step = {key: torch.zeros(1, *shape) for key, (shape, _) in SPEC.items()}
    if change == "missing":
        step.pop("time")
    else:
        step["speed"] = torch.zeros(1)
    with pytest.raises(AssertionError):
        replay.add(step)
    assert replay.added == 0


def test_sampling_before_a_sequence_is_held_is_refused() -> None:
    replay = make(sequence=5)
    add(replay, 4)
    assert not replay.ready
    with pytest.raises(AssertionError):
        replay.sample(1)
    add(replay, 1)
    assert replay.ready
    assert replay.sample(1).times.tolist() == [[0, 1, 2, 3, 4]]
    assert len(replay) == 15
