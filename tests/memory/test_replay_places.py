"""A ring on the device, in the host's memory and in a file: the same sequences, and what each of them takes."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sheeplike.memory import SequenceReplay
from sheeplike.memory import replay as replay_module

SPEC = {
    "image": ((5, 7, 3), torch.uint8),
    "reward": ((), torch.float32),
    "deter": ((6,), torch.bfloat16),
    "is_first": ((), torch.bool),
    "is_last": ((), torch.bool),
}
PLACES = ["device", "cpu", "disk"]
GPU = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
    ),
]
linux = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="mappings are read from /proc")


def make(place: str, directory: Path, **options: Any) -> SequenceReplay:
    options = {"num_envs": 3, "size": 3 * 20, "sequence": 5, "refreshed": ("deter",), "seed": 4} | options
    return SequenceReplay(SPEC, place=place, directory=directory, **options)


def fill(replay: SequenceReplay, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        step = {k: torch.randint(0, 200, (3, *shape), generator=generator).to(d) for k, (shape, d) in SPEC.items()}
        step["is_first"] = torch.rand(3, generator=generator) < 0.2
        replay.add({key: value.to(replay.device) for key, value in step.items()})


def learn(replay: SequenceReplay, rounds: int = 6) -> Iterator[dict[str, torch.Tensor]]:
    """Add, sample and write back; yield the batches."""
    for round_ in range(rounds):
        fill(replay, 4, seed=round_)
        for _ in range(2):
            data, envs, times = replay.sample(7)
            replay.write_back(envs, times, {"deter": data["deter"] + 1})
            yield {key: value.cpu() for key, value in (data | {"envs": envs, "times": times}).items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(value, theirs[key]) for key, value in ours.items())


@pytest.mark.parametrize("sampling", ["uniform", "episode"])
@pytest.mark.parametrize("device", GPU)
def test_all_places_serve_the_same_bits(device: str, sampling: str, tmp_path: Path) -> None:
    first, *others = (make(place, tmp_path, device=device, sampling=sampling) for place in PLACES)
    for replay in (first, *others):
        fill(replay, 7, seed=99)
    expected = list(learn(first))
    for other in others:
        assert all(map(same, learn(other), expected))
        for key in SPEC:
            assert torch.equal(other.state_dict()["storage"][key].cpu(), first.storage[key].cpu())
    assert first.added > first.length


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("before", PLACES)
@pytest.mark.parametrize("device", GPU)
def test_a_state_of_one_place_goes_on_in_another(
    device: str, before: str, after: str, whole: bool, tmp_path: Path
) -> None:
    replay = make(before, tmp_path, device=device, sampling="episode")
    other = make(after, tmp_path, device=device, sampling="episode", seed=5)
    fill(replay, 7, seed=3)
    list(learn(replay))
    fill(other, 23, seed=8)
    list(learn(other))
    file = io.BytesIO()
    torch.save(replay.state_dict(history=whole), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    for start in () if whole else range(replay.oldest, replay.added, 6):
        other.write_steps(start, replay.read_steps(start, min(start + 6, replay.added)))
    assert all(map(same, learn(other), learn(replay)))


def test_a_file_has_no_name_and_a_ring_on_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = make("disk", tmp_path)
    fill(replay, 9, seed=0)
    assert not list(tmp_path.iterdir())
    size = 10**12
    with pytest.raises(replay_module.TooLarge, match=f"{size}") as refusal:
        make("disk", tmp_path, size=size)
    assert str(tmp_path) in str(refusal.value)
    fits = int(re.search(r"a size of (\d+) would fit", str(refusal.value))[1])
    free = os.statvfs(tmp_path)
    assert SequenceReplay.footprint(SPEC, 3, fits) <= free.f_bavail * free.f_frsize

    def full(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(replay_module.TooLarge, match=re.escape(str(tmp_path))):
        make("disk", tmp_path)


def resident() -> int:
    """Bytes of all rings' files that are resident in this process."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = "(deleted)" in line and "/#" in line
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@linux
def test_pages_of_a_file_leave_the_process_and_keep_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, others = {"num_envs": 3, "size": 3 * 20_000}, resident()  # those of rings that other tests have left
    replay, plain = make("disk", tmp_path, **options), make("device", tmp_path, **options)
    whole = SequenceReplay.footprint(SPEC, 3, 3 * 20_000)
    monkeypatch.setattr(replay_module, "RESIDENT", whole // 8)
    peak, step = 0, {key: torch.full((3, *shape), 7).to(dtype) for key, (shape, dtype) in SPEC.items()}
    for time in range(20_000):
        step["image"].fill_(time % 251)
        for ring in (replay, plain):
            ring.add(step)
        if time % 1000 == 999:
            peak = max(peak, resident() - others)
            assert same(replay.sample(64).data, plain.sample(64).data)
    assert 0 < peak < whole / 2
    for key in SPEC:
        assert torch.equal(replay.storage[key], plain.storage[key])
