"""The on-policy rollout against a plain list of everything that was ever added to it."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.memory import Rollout

WORLDS, HEIGHT, WIDTH, CHANNELS = 3, 10, 12, 2
SPEC = {
    "pixels/front": ((HEIGHT, WIDTH, CHANNELS), torch.uint8),
    "is_first": ((), torch.bool),
    "reward": ((), torch.float32),
    "time": ((), torch.int64),
}
SIZES = [(0, 5), (1, 4), (2, 5), (3, 2), (4, 1), (2, 3)]  # (history, length): also more history than steps


def make(history: int = 0, length: int = 5, spec: Any = SPEC) -> Rollout:
    return Rollout(spec, num_envs=WORLDS, length=length, history=history)


class Book:
    """Adds random steps to a rollout and writes down every one of them."""

    def __init__(self, rollout: Rollout, seed: int = 0, *, chance: float = 0.3) -> None:
        self.rollout, self.chance = rollout, chance
        self.generator = torch.Generator().manual_seed(seed)
        self.steps: list[dict[str, Tensor]] = []

    def add(self, count: int = 1) -> None:
        for _ in range(count):
            shape = (WORLDS, HEIGHT, WIDTH, CHANNELS)
            step = {
                "pixels/front": torch.randint(0, 256, shape, dtype=torch.uint8, generator=self.generator),
                "is_first": torch.rand(WORLDS, generator=self.generator) < self.chance,
                "reward": torch.randn(WORLDS, generator=self.generator),
                "time": torch.full((WORLDS,), len(self.steps)),
            }
            self.steps.append({key: value.clone() for key, value in step.items()})
            self.rollout.add(step)
            for value in step.values():
                value.zero_()  # the simulator may use its memory again

    def complete(self) -> int:
        """Fill the trajectory; the time of its first step."""
        while not self.rollout.full:
            self.add()
        return len(self.steps) - 1 - self.rollout.length

    def frames(self, time: int, world: int, history: int) -> Tensor:
        """The last frames of the episode, oldest first: ``(H, W, (history + 1) * C)``."""
        frames = [self.steps[time]["pixels/front"][world]]
        for _ in range(history):
            begins = time == 0 or bool(self.steps[time]["is_first"][world])
            time = time if begins else time - 1
            frames.insert(0, self.steps[time]["pixels/front"][world])
        return torch.cat(frames, -1)


def everywhere(rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Slot and world of each step of the trajectory and the one after it."""
    grid = torch.cartesian_prod(torch.arange(rollout.length + 1) + rollout.history, torch.arange(WORLDS))
    return grid[:, 0], grid[:, 1]


# --- slots ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("history", "length"), SIZES)
def test_a_trajectory_needs_one_more_step_which_also_begins_the_next(history: int, length: int) -> None:
    rollout = make(history, length)
    book = Book(rollout)
    assert not rollout.full
    for added in range(length + 1):
        assert not rollout.full
        book.add()
        assert rollout.newest == history + added
        assert torch.equal(rollout.storage["time"][rollout.newest], torch.full((WORLDS,), added))
    for round_ in range(4):
        assert rollout.full
        times = range(round_ * length, (round_ + 1) * length + 1)
        assert rollout.trajectory("time").tolist() == [[t] * WORLDS for t in times]
        for key in SPEC:
            expected = torch.stack([book.steps[t][key] for t in times])
            assert torch.equal(rollout.trajectory(key), expected)
        rollout.restart()
        assert rollout.newest == history
        assert not rollout.full
        assert torch.equal(rollout.storage["time"][history], torch.full((WORLDS,), times[-1]))
        book.add(length)


def test_a_complete_trajectory_takes_no_more() -> None:
    rollout = make(length=2)
    book = Book(rollout)
    book.complete()
    before = rollout.trajectory("reward").clone()
    with pytest.raises(AssertionError):
        book.add()
    assert torch.equal(rollout.trajectory("reward"), before)


def test_a_trajectory_is_a_view() -> None:
    rollout = make(2, 3)
    Book(rollout).complete()
    rollout.storage["reward"][2] = 9.0
    assert rollout.trajectory("reward")[0].tolist() == [9.0] * WORLDS


# --- stacks of frames -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8])
@pytest.mark.parametrize(("history", "length"), SIZES)
def test_stacks_reach_back_within_the_episode_and_across_trajectories(history: int, length: int, chance: float) -> None:
    rollout = make(history, length)
    book = Book(rollout, seed=10 * history + length, chance=chance)
    for _ in range(6):
        start = book.complete()
        slot, world = everywhere(rollout)
        found = rollout.stack("pixels/front", slot, world)
        assert found.dtype == torch.uint8
        for row, s, n in zip(found, slot.tolist(), world.tolist(), strict=True):
            assert torch.equal(row, book.frames(start + s - history, n, history)), (s, n)
        rollout.restart()


def test_stacks_are_the_same_while_the_trajectory_grows() -> None:
    rollout = make(3, 4)
    book = Book(rollout)
    for _ in range(14):
        book.add()
        slot, world = torch.full((WORLDS,), rollout.newest), torch.arange(WORLDS)
        for n, row in enumerate(rollout.stack("pixels/front", slot, world)):
            assert torch.equal(row, book.frames(len(book.steps) - 1, n, 3))
        if rollout.full:
            rollout.restart()


def test_any_order_and_any_repetition_of_steps_can_be_asked_for() -> None:
    rollout = make(2, 5)
    book = Book(rollout, seed=4)
    book.complete()
    slot, world = torch.tensor([6, 2, 6, 4, 4]), torch.tensor([1, 0, 1, 2, 0])
    found = rollout.stack("pixels/front", slot, world)
    assert found.shape == (5, HEIGHT, WIDTH, 3 * CHANNELS)
    for row, s, n in zip(found, slot.tolist(), world.tolist(), strict=True):
        assert torch.equal(row, book.frames(s - 2, n, 2))


def moved(image: Tensor, rows: int, columns: int) -> Tensor:
    """DrQ's shift: pad by repeating the edge, then crop at an offset. ``(H, W, C)``."""
    padded = F.pad(image.permute(2, 0, 1).float().unsqueeze(0), (4, 4, 4, 4), mode="replicate")[0]
    cropped = padded[:, 4 + rows : 4 + rows + image.shape[0], 4 + columns : 4 + columns + image.shape[1]]
    return cropped.permute(1, 2, 0).to(torch.uint8)


@pytest.mark.parametrize(("history", "length"), SIZES)
def test_a_shift_pads_with_the_edge_and_crops(history: int, length: int) -> None:
    rollout = make(history, length)
    book = Book(rollout, seed=history)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        start = book.complete()
        slot, world = everywhere(rollout)
        shift = torch.randint(-4, 5, (len(slot), 2), generator=generator)
        shift[:2] = torch.tensor([[4, -4], [-4, 4]])
        found = rollout.stack("pixels/front", slot, world, shift)
        assert found.dtype == torch.uint8
        for row, s, n, (dy, dx) in zip(found, slot.tolist(), world.tolist(), shift.tolist(), strict=True):
            assert torch.equal(row, moved(book.frames(start + s - history, n, history), dy, dx))
        rollout.restart()


def test_no_shift_and_a_shift_of_nothing_are_the_same() -> None:
    rollout = make(2, 4)
    Book(rollout).complete()
    slot, world = everywhere(rollout)
    still = rollout.stack("pixels/front", slot, world, torch.zeros(len(slot), 2, dtype=torch.int64))
    assert torch.equal(still, rollout.stack("pixels/front", slot, world))


# --- memory -----------------------------------------------------------------------------------------------------------


def test_adding_and_restarting_keep_all_memory_in_place() -> None:
    rollout = make(2, 3)
    book = Book(rollout)

    def addresses() -> list[int]:
        return [x.data_ptr() for x in (*rollout.storage.values(), rollout.age)]

    before = addresses()
    for _ in range(3):
        book.complete()
        rollout.restart()
    assert addresses() == before


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("added", [0, 1, 3, 4, 5, 9], ids="{} steps".format)
def test_a_saved_rollout_goes_on_as_if_nothing_had_happened(added: int) -> None:
    original, resumed = make(2, 4), make(2, 4)
    book = Book(original, seed=1)
    for _ in range(added):
        book.add()
        if original.full:
            original.restart()
    file = io.BytesIO()
    torch.save(original.state_dict(), file)
    file.seek(0)
    Book(resumed, seed=7).add(2)  # something else that must be forgotten
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.newest == original.newest
    assert resumed.full == original.full
    while not original.full:
        book.add()
        resumed.add(book.steps[-1])
    slot, world = everywhere(original)
    assert torch.equal(original.stack("pixels/front", slot, world), resumed.stack("pixels/front", slot, world))
    for key in SPEC:
        assert torch.equal(original.trajectory(key), resumed.trajectory(key))


def test_loading_copies() -> None:
    original, resumed = make(), make()
    Book(original).complete()
    resumed.load_state_dict(original.state_dict())
    original.storage["reward"].zero_()
    original.age.fill_(7)
    assert resumed.storage["reward"].any()
    assert not resumed.age.any()


@pytest.mark.parametrize(
    ("other", "found", "expected"),
    [
        ({"length": 6}, r"\(7, 3, 10, 12, 2\)", r"\(6, 3, 10, 12, 2\)"),
        ({"history": 2}, r"\(8, 3, 10, 12, 2\)", r"\(6, 3, 10, 12, 2\)"),
        ({"spec": SPEC | {"pixels/front": ((8, 12, 2), torch.uint8)}}, r"\(6, 3, 8, 12, 2\)", r"\(6, 3, 10, 12, 2\)"),
    ],
    ids=["length", "history", "image"],
)
def test_a_rollout_of_another_shape_is_refused(other: dict[str, Any], found: str, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"'pixels/front'.*shape {found}"):
        make().load_state_dict(make(**other).state_dict())


def test_ages_and_steps_that_no_rollout_has() -> None:
    whole, other = make(), make()
    Book(whole).complete()
    with pytest.raises(ValueError, match=r"-1 .* 6"):
        other.load_state_dict(whole.state_dict() | {"steps": -1})
    other.load_state_dict(whole.state_dict() | {"age": torch.full_like(whole.age, 10**9)})
    assert int(other.age.max()) == other.history


def test_a_rollout_of_other_worlds_is_refused() -> None:
    other = Rollout(SPEC, num_envs=WORLDS + 1, length=5)
    with pytest.raises(ValueError, match=r"shape \(6, 4, 10, 12, 2\).*\(6, 3, 10, 12, 2\)"):
        make().load_state_dict(other.state_dict())
