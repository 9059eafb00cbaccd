"""The ring's memory: its footprint, the sizes it refuses, its state, and its steps by time."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sheeplike.memory import SequenceReplay
from sheeplike.memory import replay as replay_module

FLAGS = {name: ((), torch.bool) for name in ("is_first", "is_last", "is_terminal")}
# One step of a 12m model that sees a 64x64 camera: 12,288 + 4,096 + 32 + 7 * 4 + 4 + 3 bytes.
PIXELS = {
    "pixels/front": ((64, 64, 3), torch.uint8),
    "deter": ((2048,), torch.bfloat16),
    "stoch": ((32,), torch.uint8),
    "action": ((7,), torch.float32),
    "reward": ((), torch.float32),
    **FLAGS,
}
PAYLOAD = 12_288 + 4_096 + 32 + 28 + 4 + 3


def test_footprint_is_the_payload_of_the_whole_ring() -> None:
    assert SequenceReplay.footprint(PIXELS, num_envs=16, size=1600) == 1600 * PAYLOAD
    # Every world keeps the same number of steps: what does not divide is not kept.
    assert SequenceReplay.footprint(PIXELS, num_envs=16, size=1615) == 1600 * PAYLOAD


def reachable_bytes(item: object) -> int:
    """Bytes of the storages of every tensor held by an object's attributes and containers."""
    seen: dict[int, int] = {}

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, dict):
            for part in value.values():
                visit(part)
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part)

    visit(vars(item))
    return sum(seen.values())


def fill(replay: SequenceReplay, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        replay.add(
            {
                key: torch.randint(0, 2, (replay.num_envs, *ring.shape[2:]), generator=generator).to(ring.dtype)
                for key, ring in replay.storage.items()
            }
        )


def test_tensors_take_at_most_five_percent_over_the_payload() -> None:
    replay = SequenceReplay(PIXELS, num_envs=4, size=400, sequence=65)
    fill(replay, 100)
    replay.sample(2)
    assert 400 * PAYLOAD <= reachable_bytes(replay) <= 1.05 * 400 * PAYLOAD


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_resident_memory_grows_by_at_most_five_percent_over_the_payload() -> None:
    """Run in a process of its own: in this one, earlier tests have left memory that a ring could take."""
    program = """
import os, torch
from pathlib import Path
from sheeplike.memory import SequenceReplay
spec = {"image": ((48, 48, 3), torch.uint8), "is_first": ((), torch.bool), "is_last": ((), torch.bool)}
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def filled(length):
    replay = SequenceReplay(spec, num_envs=8, size=8 * length, sequence=65)
    for _ in range(length + 10):
        replay.add({key: torch.ones(8, *shape, dtype=dtype) for key, (shape, dtype) in spec.items()})
    return replay
small = filled(66)  # memory that is allocated once, on first use, is not the ring's
before = resident()
replay = filled(1500)
print((resident() - before) / (8 * 1500 * (48 * 48 * 3 + 2)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.95 < float(done.stdout) < 1.05


def test_a_size_that_does_not_fit_is_refused_before_allocation_with_one_that_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 50_000_000
    monkeypatch.setattr(replay_module, "free_memory", lambda device: free)
    size = 10**10  # 165 TB: the attempt itself would fail, with another error
    with pytest.raises(MemoryError, match=f"{size}") as refusal:
        SequenceReplay(PIXELS, num_envs=16, size=size, sequence=65)
    message = str(refusal.value)
    assert "\n" not in message
    fits = int(re.search(r"a size of (\d+) would fit", message)[1])
    assert 0.8 * free < SequenceReplay.footprint(PIXELS, 16, fits) <= free
    assert fits % 16 == 0
    SequenceReplay(PIXELS, num_envs=16, size=fits, sequence=65)


def test_no_size_is_suggested_that_would_be_refused_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 worlds need 66 steps each, 17 MB; a size for 1 MB would be too short to sample from."""
    monkeypatch.setattr(replay_module, "free_memory", lambda device: 1_000_000)
    with pytest.raises(MemoryError, match="1600") as refusal:
        SequenceReplay(PIXELS, num_envs=16, size=1600, sequence=65)
    suggested = re.search(r"a size of (\d+) would fit", str(refusal.value))
    assert suggested is None or int(suggested[1]) >= 16 * 66


def test_free_memory_of_this_machine_is_known_or_none() -> None:
    free = replay_module.free_memory(torch.device("cpu"))
    assert free is None or free > 1 << 20


def test_a_ring_is_refused_that_the_limit_of_a_container_does_not_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sheeplike.host.free_memory", lambda: 1_000_000)
    with pytest.raises(MemoryError, match="GiB"):
        SequenceReplay(PIXELS, num_envs=16, size=1600, sequence=65)


@pytest.mark.parametrize(("worlds", "size"), [(1, 65), (16, 16 * 66 - 1), (64, 100)])
def test_a_ring_shorter_than_a_sequence_and_a_step_is_refused_with_the_smallest_size(worlds: int, size: int) -> None:
    with pytest.raises(ValueError, match=rf"{size}.*{worlds * 66}$"):
        SequenceReplay(PIXELS, num_envs=worlds, size=size, sequence=65)
    SequenceReplay(PIXELS, num_envs=worlds, size=worlds * 66, sequence=65)


SMALL = {"value": ((2,), torch.float32), "code": ((3,), torch.uint8), **FLAGS}


def small(length: int = 12, seed: int = 0) -> SequenceReplay:
    return SequenceReplay(SMALL, num_envs=2, size=2 * length, sequence=4, seed=seed)


@pytest.mark.parametrize("steps", [9, 12, 31], ids=["filling", "full", "wrapped"])
def test_state_round_trip_gives_the_same_further_samples(steps: int) -> None:
    replay = small()
    fill(replay, steps)
    replay.sample(3)
    file = io.BytesIO()
    torch.save(replay.state_dict(), file)
    file.seek(0)
    other = small(seed=99)
    other.load_state_dict(torch.load(file, weights_only=True))
    for round_ in range(6):
        mine, theirs = replay.sample(5), other.sample(5)
        assert torch.equal(mine.envs, theirs.envs)
        assert torch.equal(mine.times, theirs.times)
        assert mine.data.keys() == theirs.data.keys()
        assert all(torch.equal(mine.data[key], theirs.data[key]) for key in mine.data)
        fill(replay, 3, seed=round_)
        fill(other, 3, seed=round_)


def test_loading_copies() -> None:
    replay, other = small(), small()
    fill(replay, 12)
    other.load_state_dict(replay.state_dict())
    kept = other.storage["value"].clone()
    fill(replay, 5, seed=1)
    assert torch.equal(other.storage["value"], kept)


def test_a_ring_of_another_length_or_shape_is_refused_and_nothing_is_changed() -> None:
    replay = small()
    fill(replay, 30)
    longer = small(length=20)
    with pytest.raises(ValueError, match=r"replay key 'value': stored \(12, 2, 2\), this ring expects \(20, 2, 2\)"):
        longer.load_state_dict(replay.state_dict())
    assert longer.added == 0
    other = SequenceReplay({**SMALL, "extra": ((), torch.float32)}, num_envs=2, size=24, sequence=4)
    before = other.storage["value"].fill_(7.0).clone()
    with pytest.raises(ValueError, match="replay key 'extra': stored None"):
        other.load_state_dict(replay.state_dict())
    assert torch.equal(other.storage["value"], before)


@pytest.mark.parametrize("sequence", [(2, 0), (-1, 0), (0, 30)])
def test_a_fresh_sequence_of_no_ring_is_refused(sequence: tuple[int, int]) -> None:
    replay = small()
    fill(replay, 30)
    with pytest.raises(ValueError, match="ring"):
        small().load_state_dict(replay.state_dict() | {"fresh": [sequence]})


# Steps by time: what never changes, out of the ring and back into it

STEPS = {
    "image": ((4,), torch.uint8),
    "deter": ((3,), torch.bfloat16),
    "is_first": ((), torch.bool),
    "is_last": ((), torch.bool),
}


def timed(added: int = 0) -> SequenceReplay:
    """A ring of 12 steps; time ``t`` holds ``t`` in every image of world 0, and ``t + 100`` in those of world 1."""
    replay = SequenceReplay(STEPS, num_envs=2, size=24, sequence=4, refreshed=("deter",))
    for time in range(added):
        step = {key: torch.full((2, *shape), time).to(dtype) for key, (shape, dtype) in STEPS.items()}
        step["image"][1] += 100
        replay.add(step)
    return replay


def times(steps: dict[str, torch.Tensor]) -> list[int]:
    assert steps.keys() == {"image", "is_first", "is_last"}
    assert torch.equal(steps["image"][:, 1], steps["image"][:, 0] + 100)
    return steps["image"][:, 0, 0].tolist()


@pytest.mark.parametrize("added", [1, 11, 12, 13, 23, 24, 25, 100])
def test_any_steps_that_are_held_can_be_read_by_time_as_copies(added: int) -> None:
    replay = timed(added)
    assert (replay.oldest, replay.step_bytes) == (max(0, added - 12), 2 * (4 + 1 + 1))
    read = {
        (start, stop): replay.read_steps(start, stop)
        for start in range(replay.oldest, added + 1)
        for stop in range(start, added + 1)
    }
    for start, stop in ((replay.oldest - 1, added), (replay.oldest, added + 1), (added, added - 1)):
        with pytest.raises(AssertionError):
            replay.read_steps(start, stop)
    replay.storage["image"].zero_()
    for (start, stop), steps in read.items():
        assert times(steps) == list(range(start, stop))


@pytest.mark.parametrize("added", [5, 12, 13, 31])
@pytest.mark.parametrize("size", [1, 5, 100])
@pytest.mark.parametrize("older", [0, 3])
def test_steps_are_put_back_in_pieces(added: int, size: int, older: int) -> None:
    """Also where a piece begins with steps that have left the ring since."""
    replay, other = timed(added), timed()
    other.chunks = ["of another past"]
    other.load_state_dict(replay.state_dict(history=False))
    assert other.chunks == []
    for start in range(replay.oldest, added, size):
        steps = replay.read_steps(start, min(start + size, added))
        if start == replay.oldest:
            steps = {key: torch.cat([value[:1].expand(older, *value.shape[1:]), value]) for key, value in steps.items()}
            start -= older
        for use in (lambda: other.draw(1), lambda: other.add({})):
            with pytest.raises(AssertionError, match=str(added)):
                use()
        other.write_steps(start, steps)
    assert all(torch.equal(other.storage[key], replay.storage[key]) for key in STEPS)
    other.add({key: ring[0] for key, ring in replay.storage.items()})
    assert other.added == added + 1


def test_an_empty_ring_needs_no_steps() -> None:
    replay = timed()
    replay.load_state_dict(timed().state_dict(history=False))
    replay.add({key: ring[0] for key, ring in timed(1).storage.items()})


def test_steps_that_do_not_follow_are_refused() -> None:
    replay, other = timed(20), timed()
    read = replay.read_steps
    with pytest.raises(ValueError, match="None"):
        other.write_steps(8, read(8, 10))
    other.load_state_dict(replay.state_dict(history=False))
    for start, steps in ((10, read(10, 12)), (4, {"image": torch.zeros(4, 2, 4)}), (8, {}), (19, read(8, 12))):
        with pytest.raises(ValueError, match=r" 8 .* 20"):
            other.write_steps(start, steps)
    good = read(8, 12)
    for steps in (
        {key: value for key, value in good.items() if key != "image"},
        good | {"image": good["image"].int()},
        good | {"image": good["image"][:, :1]},
        good | {"is_last": torch.zeros(5, 2, dtype=torch.bool)},
    ):
        with pytest.raises(ValueError, match="replay key"):
            other.write_steps(8, steps)
    other.write_steps(8, good)
    other.write_steps(12, read(12, 20))
    with pytest.raises(ValueError, match="None"):
        other.write_steps(12, read(12, 20))


def test_only_what_may_be_refreshed_is_written_back() -> None:
    replay = timed(12)
    sample = replay.sample(2)
    with pytest.raises(AssertionError):
        replay.write_back(sample.envs, sample.times, {name: sample.data[name] for name in ("deter", "image")})
    with pytest.raises(AssertionError):
        SequenceReplay(STEPS, num_envs=2, size=24, sequence=4, refreshed=("detr",))


@pytest.mark.parametrize("state", [torch.zeros(5), torch.zeros(5, dtype=torch.uint8), torch.zeros(16)], ids=str)
def test_what_no_generator_has_is_refused(state: torch.Tensor) -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    replay_module.load_generator(generator, torch.zeros(16, dtype=torch.uint8))
    assert torch.equal(generator.get_state(), before)
    with pytest.raises(ValueError, match="generator"):
        replay_module.load_generator(generator, state)
