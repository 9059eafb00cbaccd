"""Sequences drawn by episode: how often each start comes, against a count by hand, and after a resume."""

from __future__ import annotations

import io
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from sheeplike.memory import SequenceReplay

SPEC = {"is_first": ((), torch.bool), "is_last": ((), torch.bool)}
LENGTH, SEQUENCE = 24, 5


def make(begins: np.ndarray, *, sampling: str = "episode", draw_every: int = 0, online: bool = False) -> SequenceReplay:
    """A ring to which the steps were added whose flags are ``begins (steps, worlds)``, with draws in between."""
    worlds = begins.shape[1]
    replay = SequenceReplay(
        SPEC, num_envs=worlds, size=worlds * LENGTH, sequence=SEQUENCE, sampling=sampling, online=online, seed=2
    )
    extend(replay, begins, draw_every)
    return replay


def extend(replay: SequenceReplay, begins: np.ndarray, draw_every: int = 0) -> None:
    for row in begins:
        replay.add({"is_first": torch.from_numpy(row.copy()), "is_last": torch.zeros(len(row), dtype=torch.bool)})
        if draw_every and replay.added % draw_every == 0 and replay.ready:
            replay.draw(3)


def expected(begins: np.ndarray) -> dict[tuple[int, int], float]:
    """Probability of each (world, start), from all flags."""
    added, worlds = begins.shape
    oldest, stop = max(0, added - LENGTH), added - SEQUENCE + 1
    episodes = []
    for world in range(worlds):
        edges = [*sorted({oldest, *(t for t in range(oldest, stop) if begins[t, world])}), added]
        episodes += [(world, set(range(a, b))) for a, b in itertools.pairwise(edges)]
    chances: Counter = Counter()
    for world, steps in episodes:
        starts = [s for s in range(oldest, stop) if steps & set(range(s, s + SEQUENCE))]
        for start in starts:
            chances[world, start] += 1 / len(episodes) / len(starts)
    return chances


def flags(steps: int, worlds: int, share: float, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).random((steps, worlds)) < share
    found[0] = True
    return found


ONE_ENDLESS = np.zeros((61, 2), bool)
ONE_ENDLESS[0] = True
MIXED = flags(61, 3, 0.3)
MIXED[1:, 0] = False  # one endless episode beside short ones


@pytest.mark.parametrize("draw_every", [0, 1, 7, 40])
@pytest.mark.parametrize(
    "begins",
    [
        flags(5, 2, 0.4),
        flags(17, 3, 0.2),
        flags(24, 3, 0.2),
        flags(30, 2, 0.15, seed=1),
        flags(61, 3, 0.1, seed=2),
        np.ones((61, 2), bool),
        ONE_ENDLESS[:20],
        ONE_ENDLESS,
        MIXED,
    ],
    ids=["one start", "filling", "full", "wrapped", "wrapped often", "one step each", "endless", "lost begin", "mixed"],
)
def test_starts_come_as_often_as_a_count_by_hand_says(begins: np.ndarray, draw_every: int) -> None:
    replay = make(begins, draw_every=draw_every)
    draws = 60_000
    envs, starts = replay.draw(draws)
    found = Counter(zip(envs.tolist(), starts.tolist(), strict=True))
    chances = expected(begins)
    assert sum(chances.values()) == pytest.approx(1)
    assert found.keys() <= chances.keys()
    statistic = sum((found[cell] - chance * draws) ** 2 / (chance * draws) for cell, chance in chances.items())
    freedom = len(chances) - 1
    assert statistic <= freedom + 4 * np.sqrt(2 * max(freedom, 1))


def test_ends_of_an_episode_are_replayed_as_often_as_its_middle() -> None:
    begins = np.zeros((24, 1), bool)
    begins[[0, 8, 15]] = True  # the episode [8, 15) is away from both ends of the ring
    replay = make(begins)
    starts = replay.draw(90_000)[1]
    often = Counter((starts[:, None] + torch.arange(SEQUENCE)).flatten().tolist())
    counts = torch.tensor([often[time] for time in range(8, 15)], dtype=torch.float64)
    assert float(counts.std() / counts.mean()) < 0.15  # the other two episodes serve its ends a little more
    uniform = make(begins, sampling="uniform").draw(90_000)[1]
    often = Counter((uniform[:, None] + torch.arange(SEQUENCE)).flatten().tolist())
    assert often[0] < 0.25 * often[12], "uniformly, the first step of the stream has one start"


@pytest.mark.parametrize("steps", [9, 24, 61])
@pytest.mark.parametrize("whole", [True, False])
def test_a_resumed_ring_draws_what_the_first_would_have(steps: int, whole: bool) -> None:
    begins, later = flags(steps, 3, 0.2), flags(30, 3, 0.2, seed=5)
    replay, other = make(begins, draw_every=2, online=True), make(flags(40, 3, 0.5, seed=9), draw_every=3, online=True)
    file = io.BytesIO()
    torch.save(replay.state_dict(history=whole), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    for start in () if whole else range(replay.oldest, steps, 7):
        other.write_steps(start, replay.read_steps(start, min(start + 7, steps)))
    for number in range(30):
        for ring in (replay, other):
            extend(ring, later[number : number + 1])
        assert all(map(torch.equal, replay.draw(6), other.draw(6)))
    assert torch.equal(replay.generator.get_state(), other.generator.get_state())
