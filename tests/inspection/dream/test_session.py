"""A play without a page: the demo beside its simulator, and every kind of action."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch
from gymnasium import spaces

from sheeplike import envs
from sheeplike.inspection.dream import recording
from sheeplike.inspection.dream import session as sessions
from sheeplike.inspection.dream.session import Session
from sheeplike.inspection.model import States, psnr
from sheeplike.inspection.trust import WINDOW
from sheeplike.options import CommandError, InvalidOption


@pytest.fixture
def pick(demo) -> Session:
    session = Session(*demo, seed=1)
    session.show_scene()  # a picture that few tests look at takes half of the time
    return session


def ticks(session: Session, count: int) -> list[np.ndarray]:
    """Plays on; the real side's frames, ``(H, W, 3)`` each."""
    frames = []
    for _ in range(count):
        session.tick()
        frames.append(session.here.pictures[0]["pixels/front"])
    return frames


def dreamt(session: Session, n: int = 1) -> np.ndarray:
    """The first camera of a dream as it is shown."""
    return next(iter(session.here.pictures[n].values()))


def same(one: States, other: States) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("deter", "stoch"))


# Both sides


def test_a_play_begins_with_what_is_seen(pick):
    assert (pick.now, pick.first, pick.last) == (0, 0, 0)
    assert [frames["pixels/front"].shape for frames in pick.here.pictures] == 2 * [(48, 48, 3)]
    assert same(pick.here.dreams, pick.here.posterior)
    assert np.array_equal(*pick.classes)
    assert pick.expected.shape == (pick.model.groups, pick.model.classes)
    np.testing.assert_allclose(pick.expected.sum(-1), 1, atol=1e-5)


def test_both_sides_follow_the_same_action(pick):
    ticks(pick, 20)
    assert pick.moments[5].action.abs().sum() > 0
    # The demo knows its world: twenty steps of dream look like the simulator, and not like a frame of the start.
    first = pick.moments[0].seen["pixels/front"][0].numpy()
    dream, real = dreamt(pick).astype(float), pick.here.pictures[0]["pixels/front"]
    assert np.square(dream - real).mean() < 0.5 * np.square(dream - first).mean()
    assert psnr(pick.here.numbers["error"][0]) > 18
    # Its dream is not what it believes: that has seen the frames.
    assert not same(pick.here.dreams, pick.here.posterior)


def test_the_numbers_of_a_step(pick):
    ticks(pick, 3)
    numbers = pick.here.numbers
    assert {name: len(values) for name, values in numbers.items()} == {
        "alarm": 1,
        "reward": 2,
        "value": 2,
        "continue": 2,
        "surprise": 1,
        "error": 1,
    }
    assert numbers["reward"][0] == pick.here.reward
    assert 0 <= numbers["continue"][1] <= 1
    real, dream = (frames["pixels/front"] / 255 for frames in pick.here.pictures)
    assert numbers["error"][0] == pytest.approx(np.square(real - dream).mean(), rel=1e-4)
    expected = pick.model.decode(pick.here.posterior)
    assert numbers["value"][0] == pytest.approx(float(expected.value), rel=1e-4)
    assert numbers["surprise"][0] == pytest.approx(float(pick.model.kl(pick.here.posterior)), rel=1e-4)
    strip = pick.strip(2)
    assert strip == {"numbers": [moment.numbers for moment in pick.moments[2:]], "begins": [], "ends": []}
    assert pick.strip(0)["begins"] == [0]


def test_the_alarm_needs_a_window_of_one_episode(dots):
    """It looks at the mean of the last steps, without the first of an episode, which is always a surprise."""
    play = dots()
    assert play.here.numbers["alarm"] == [0]
    seen = []
    play.alarm = -1.0
    for _ in range(2 * WINDOW + 2):
        play.tick()
        seen.append((play.here.age >= WINDOW, play.here.numbers["alarm"] == [1]))
    assert all(due == rung for due, rung in seen)
    assert {rung for _, rung in seen} == {True, False}
    surprise = [moment.numbers["surprise"][0] for moment in play.moments]
    mean = sum(surprise[1 : WINDOW + 1]) / WINDOW
    for threshold, rings in ((1.001 * mean, 0), (0.999 * mean, 1)):
        play.start(0)
        play.alarm = threshold
        for _ in range(WINDOW):
            play.tick()
        assert play.here.numbers["alarm"] == [rings]


def test_a_play_is_the_same_again(pick):
    before = ticks(pick, 5), dreamt(pick)
    pick.start(1)
    after = ticks(pick, 5), dreamt(pick)
    assert all(np.array_equal(one, other) for one, other in zip(before[0], after[0], strict=True))
    assert np.array_equal(before[1], after[1])
    pick.branch()
    ticks(pick, 2)
    pick.start(1)
    again = ticks(pick, 5), dreamt(pick)
    assert all(np.array_equal(one, other) for one, other in zip(before[0], again[0], strict=True))
    assert np.array_equal(before[1], again[1])
    pick.start()
    assert pick.seed == 2
    ticks(pick, 5)
    assert not np.array_equal(dreamt(pick), after[1])


def test_the_next_episode_begins_on_both_sides(dots):
    session = dots()
    ends = []
    for _ in range(30):
        session.tick()
        ends.append(session.here.is_last)
        assert bool(session.ends[0]) == session.here.is_last
    assert [n for n, end in enumerate(ends) if end] == [11, 24]  # a step between them shows the first frame
    begun = session.moments[13]
    assert begun.is_first
    assert begun.reward == 0
    assert same(begun.dreams, begun.posterior)
    assert session.strip(0)["begins"] == [0, 13, 26]
    assert [(begun.episode, begun.age), (session.here.episode, session.here.age)] == [(2, 0), (3, 4)]
    assert [step for step, _ in session.strip(0)["ends"]] == [12, 25]
    assert [step for step, _ in session.strip(13)["ends"]] == [25]


@pytest.mark.parametrize("limit", [("MAX_MOMENTS", 5), ("MAX_BYTES", 5)])
def test_the_oldest_steps_go(dots, monkeypatch, limit):
    bound, most = limit
    monkeypatch.setattr(sessions, bound, most if bound == "MAX_MOMENTS" else most * sessions.size(dots().here))
    session = dots()
    ticks_, version = 9, session.version
    for _ in range(ticks_):
        session.tick()
    assert (session.first, session.last, session.now) == (5, 9, 9)
    assert session.version == version
    assert len(session.strip(0)["numbers"]) == 5
    with pytest.raises(InvalidOption, match=r"step=3.*nearest: step=5"):
        session.go_to(3)


# Who chooses the action


def test_keys(pick):
    pick.choose("keys")
    still = ticks(pick, 6)[-1]
    pick.start(1)
    pick.choose("keys")
    pick.act([1.0, 0.0, 1.0])
    moved = ticks(pick, 6)[-1]
    assert pick.action == [1.0, 0.0, 1.0]
    assert not np.array_equal(still, moved)


def test_a_single_step_takes_the_newest_action(dots):
    session = dots()
    session.choose("keys")
    session.act([1.0, 0.0])
    session.act([0.0, 0.0])
    session.act([-1.0, 0.0])
    session.tick(newest=True)
    session.tick()
    assert [moment.reward for moment in session.moments] == [0, -1, -1]


def test_who_drives_a_dream(dots, monkeypatch):
    session = dots()
    session.choose("keys")
    session.act([1.0, -1.0])
    session.branch()
    given = []
    imagine = session.model.imagine
    monkeypatch.setattr(
        session.model, "imagine", lambda start, actions, **kw: given.append(actions) or imagine(start, actions, **kw)
    )
    for drivers in (("same", "same"), ("policy", "same"), ("random", "policy")):
        for dream, driver in enumerate(drivers):
            session.drive(dream, driver)
        start = session.here.dreams
        session.tick()
        policy = session.model.act(start, sample=False)
        for dream, driver in enumerate(drivers):
            action = given[-1][dream, 0]
            assert torch.equal(action, torch.tensor([1.0, -1.0])) == (driver == "same")
            assert torch.allclose(action, policy[dream], atol=1e-5) == (driver == "policy")
            assert action.abs().max() <= 1


def test_a_key_that_was_down_for_less_than_a_step_counts(dots):
    session = dots()
    session.choose("keys")
    session.act([1.0, 0.0])
    session.act([0.0, 0.0])
    for _ in range(3):
        session.tick()
    assert [moment.reward for moment in session.moments] == [0, 1, 0, 0]


@pytest.mark.parametrize(
    ("kind", "action", "neutral"),
    [("continuous", [0.5, -1.0], [0.0, 0.0]), ("discrete", 2, 0), ("multi", [2, 1], [0, 0])],
)
def test_every_kind_of_action(dots, kind, action, neutral):
    session = dots(kind)
    session.choose("keys")
    session.tick()
    assert session.action == neutral
    session.act(action)
    session.tick()
    assert session.action == action
    assert session.here.reward == (0.5 if kind == "continuous" else 1.0)
    for source in ("policy", "sample"):
        session.choose(source)
        session.tick()
        space = session.envs.single_action_space
        assert space.contains(np.asarray(session.action, space.dtype))
    session.drive(0, "random")
    session.tick()
    session.drive(0, "policy")
    session.tick()
    assert session.here.settings.drivers == ("policy",)


@pytest.mark.parametrize(
    ("kind", "action", "line"),
    [
        ("continuous", [2.0, 0.0], "nearest: action=[1.0,0.0]"),
        ("continuous", [0.0], "action=[0.0]"),
        ("continuous", [float("nan"), 0.0], "-1"),
        ("continuous", "left", "action=left"),
        ("continuous", [[0.0], 0.0], "-1"),
        ("discrete", 3, "nearest: action=2"),
        ("discrete", 0.5, "nearest: action=0"),
        ("discrete", None, "action=null"),
        ("multi", [0, 7], "nearest: action=[0,1]"),
        ("multi", 1, "action=1"),
    ],
)
def test_an_action_that_is_none_is_refused(dots, kind, action, line):
    session = dots(kind)
    session.choose("keys")
    with pytest.raises(InvalidOption) as error:
        session.act(action)
    assert line in str(error.value)
    session.tick()
    assert np.ravel(session.action).sum() == 0


# Looking back, and other futures


def test_back_to_a_step_on_both_sides(pick):
    frames = ticks(pick, 8)
    states = [moment.posterior for moment in pick.moments]
    assert pick.go_to(4) is None
    assert (pick.now, pick.last) == (4, 8)
    assert np.array_equal(pick.here.pictures[0]["pixels/front"], frames[3])
    version = pick.version
    again = ticks(pick, 4)  # the policy and the noise are the same
    assert pick.version > version
    assert all(np.array_equal(one, other) for one, other in zip(again, frames[4:], strict=True))
    assert same(pick.here.posterior, states[8])
    pick.go_to(4)
    pick.choose("keys")
    pick.act([-1.0, 1.0, 1.0])
    other = ticks(pick, 4)
    assert not np.array_equal(other[-1], frames[-1])
    assert (pick.now, pick.last) == (8, 8)


def test_looking_back_changes_nothing(pick):
    ticks(pick, 6)
    shown, action = dreamt(pick), pick.action
    for step in (0, 3, 5):
        pick.go_to(step)
        assert pick.expected.shape == (pick.model.groups, pick.model.classes)
    pick.go_to(6)
    assert np.array_equal(dreamt(pick), shown)
    assert pick.action == action
    pick.tick()
    assert pick.last == 7


def test_where_the_world_cannot_be_saved_the_dream_goes_back_alone(dots):
    session = dots()
    for _ in range(6):
        session.tick()
    newest, past = session.moments[6], session.moments[2]
    line = session.go_to(2)
    assert line == "Dot-continuous-v0 cannot be saved: the dream goes on from step 2, the real side from 6"
    session.tick()
    assert (session.now, session.last) == (7, 7)
    assert newest.action is not None
    assert session.envs.counters == {"env/restarts": 0.0}
    # The dream of step 7 is a step from that of step 2.
    seed = session._noise(7, 9)
    expected = session.model.imagine(past.dreams, newest.action[:, None], seed=seed).map(lambda x: x[:, 0])
    assert same(session.here.dreams, expected)


def test_a_branch_shows_two_futures(pick):
    ticks(pick, 5)
    pick.branch()
    assert len(pick.here.pictures) == 3
    assert np.array_equal(dreamt(pick, 1), dreamt(pick, 2))
    assert pick.here.settings.branched == 5
    ticks(pick, 5)
    assert not same(pick.here.dreams[:1], pick.here.dreams[1:])
    pick.drive(1, "random")
    ticks(pick, 10)
    assert not np.array_equal(dreamt(pick, 1), dreamt(pick, 2))
    assert len(pick.here.numbers["value"]) == 3
    assert len(pick.here.numbers["error"]) == 2
    pick.branch()
    assert len(pick.here.pictures) == 2
    assert pick.here.settings.branched is None
    with pytest.raises(InvalidOption, match="dream=1"):
        pick.drive(1, "policy")


def test_a_branch_from_the_same_moment_draws_anew(pick):
    ticks(pick, 5)
    pick.branch()
    ticks(pick, 5)
    once = pick.here.dreams
    pick.go_to(5)
    pick.branch()
    pick.branch()
    ticks(pick, 5)
    assert not same(pick.here.dreams[1:], once[1:])


def test_a_reality_check(pick):
    ticks(pick, 12)
    assert not same(pick.here.dreams, pick.here.posterior)
    before = pick.here.numbers["error"][0]
    pick.check_reality()
    assert same(pick.here.dreams, pick.here.posterior)
    assert pick.here.numbers["error"][0] != before
    assert np.array_equal(*pick.classes)


# The latent


def test_a_forced_class_changes_the_picture_and_is_released(pick):
    ticks(pick, 5)
    before, drawn = dreamt(pick), pick.classes[1]
    for group in range(8):
        pick.force(group, (int(drawn[group]) + 1) % pick.model.classes)
    assert not np.array_equal(dreamt(pick), before)
    assert pick.here.settings.forced == {group: (drawn[group] + 1) % pick.model.classes for group in range(8)}
    ticks(pick, 3)
    assert all(pick.classes[1][group] == one for group, one in pick.here.settings.forced.items())
    pick.go_to(4)
    assert pick.here.settings.forced == {}
    pick.go_to(5)
    assert len(pick.here.settings.forced) == 8
    for group in range(8):
        pick.force(group, None)
    assert pick.here.settings.forced == {}
    assert np.array_equal(dreamt(pick), before)


def test_what_is_forced_holds_in_the_first_dream_alone(pick):
    ticks(pick, 5)
    pick.branch()
    other = dreamt(pick, 2)
    for group in range(8):
        pick.force(group, 0)
    assert np.array_equal(dreamt(pick, 2), other)
    pick.release()
    assert np.array_equal(dreamt(pick, 1), other)


def test_what_the_model_expected_is_not_what_it_saw(pick):
    """The shade is the prior, at the start and after a reality check too."""
    ticks(pick, 8)
    expected = pick.expected
    pick.check_reality()
    posterior = pick.here.posterior
    prior = pick.model.rssm.distribution(pick.model.prior(posterior)).probs[0].numpy()
    np.testing.assert_array_equal(pick.expected, prior)
    assert np.abs(prior - pick.model.probabilities(posterior)[0].numpy()).max() > 0.1
    assert not np.array_equal(pick.expected, expected)


def test_a_change_in_the_past_forgets_what_came_after(pick):
    frames = ticks(pick, 8)
    pick.go_to(4)
    assert pick.last == 8
    pick.check_reality()
    assert (pick.now, pick.last) == (4, 4)
    assert np.array_equal(ticks(pick, 1)[0], frames[4])
    pick.go_to(2)
    pick.tick()
    assert (pick.now, pick.last) == (3, 3)


def test_a_branch_changes_nothing_of_the_real_side(pick):
    pick.choose("sample")
    frames = ticks(pick, 8)
    posterior = pick.here.posterior
    pick.go_to(3)
    pick.branch()
    assert all(np.array_equal(one, other) for one, other in zip(ticks(pick, 5), frames[3:], strict=True))
    assert same(pick.here.posterior, posterior)
    pick.go_to(2)
    pick.tick()
    assert pick.here.settings.branched is None


@pytest.mark.parametrize(
    ("group", "one", "line"),
    [(32, 0, "nearest: group=31"), (0, -1, "class=-1")],
)
def test_classes_that_are_not_there(pick, group, one, line):
    with pytest.raises(InvalidOption) as error:
        pick.force(group, one)
    assert line in str(error.value)


# What is dragged


@pytest.fixture
def grip(demo, places) -> Session:
    return Session(*demo, seed=1, places=places)


def centre_of_red(frame: np.ndarray) -> float:
    """Column of the centre of the box."""
    red = (frame[..., 0] > 90) & (frame[..., 1:].max(-1) < 60)
    return float(np.nonzero(red)[1].mean())


def test_points_over_the_frames(grip, places):
    grip.branch()
    assert len(grip.here.points) == 3
    for points in grip.here.points:
        assert points.keys() == {"pixels/front", "scene"}
        assert [name for name, *_ in points["scene"]] == ["tip", "box"]
    believed, real = (
        dict((name, at) for name, *at in one["pixels/front"]) for one in (grip.here.points[0], grip.handles)
    )
    assert real.keys() == {"box"}
    np.testing.assert_allclose(believed["box"], real["box"], atol=2)


@pytest.mark.parametrize("camera", ["pixels/front", "scene"])
def test_a_body_is_dragged_in_the_simulator(grip, places, camera):
    ticks(grip, 3)
    before, dream = grip.here, dreamt(grip)
    (_, x, y), box = grip.handles[camera][0], places.positions["box"]
    grip.drag(0, "box", camera, x + (4 if camera == "scene" else 3), y)
    grip.tick()
    shift = (grip.here.truth - before.truth)[0, box]
    # It rests on the floor, where it was put, in the plane of the arm.
    assert abs(float(shift[0])) < 0.003
    assert abs(float(shift[1])) > 0.01
    assert abs(float(shift[2])) < 0.01
    if camera == "pixels/front":
        assert dict(zip("nxy", grip.handles[camera][0], strict=True))["x"] == pytest.approx(x + 3, abs=0.3)
    # The dream does not know before it looks.
    assert centre_of_red(dreamt(grip)) == pytest.approx(centre_of_red(dream), abs=1)
    moved = places.moved(before.env, before.placed)
    changed = {key for key in moved if not torch.equal(moved[key], before.env[key])}
    assert all("qpos" in key or "qvel" in key for key in changed)


@pytest.mark.parametrize("y", [0, -60, -150, -1e6])
def test_a_drag_towards_the_horizon_does_not_throw_a_body_away(grip, places, y):
    _, x, _ = grip.handles["scene"][0]
    grip.drag(0, "box", "scene", x, y)
    grip.tick()
    place = grip.here.truth[0, places.positions["box"]]
    assert (place - torch.tensor([0.5, 0.0, 0.0])).abs().max() < 1


def test_a_body_is_not_put_into_the_floor(grip, places):
    ticks(grip, 2)
    _, x, y = grip.handles["pixels/front"][0]
    grip.drag(0, "box", "pixels/front", x + 4, y + 10)
    for _ in range(3):
        grip.tick()
        assert not grip.here.is_last
        assert float(grip.here.truth[0, places.positions["box"]][2]) == pytest.approx(0.03, abs=0.005)


def test_a_drag_is_played_again(grip, recordings):
    ticks(grip, 3)
    _, x, y = grip.handles["pixels/front"][0]
    grip.drag(0, "box", "pixels/front", x - 4, y - 6)
    frames = [*(moment.pictures[0]["pixels/front"] for moment in grip.moments[1:]), *ticks(grip, 4)]
    name = recording.write(recordings, grip.episode(), 20.0, grip.films)
    grip.replay(recording.read(recordings / f"{name}.npz"))
    assert all(np.array_equal(one, other) for one, other in zip(ticks(grip, 7), frames, strict=True))


@pytest.mark.parametrize("pixels", [-3, 3])  # 3 cm
def test_the_box_is_dragged_in_the_dream(grip, places, pixels):
    ticks(grip, 5)
    before, posterior, real = dreamt(grip), grip.here.posterior, grip.here.truth
    (_, tip, _), (_, x, y) = grip.here.points[1]["pixels/front"]
    assert grip.drag(1, "box", "pixels/front", x + pixels, y) is None
    (_, held, _), (_, box, _) = grip.here.points[1]["pixels/front"]
    assert box == pytest.approx(x + pixels, abs=0.5)
    assert held == pytest.approx(tip, abs=0.3)  # the arm does not come along
    assert (centre_of_red(dreamt(grip)) - centre_of_red(before)) / pixels > 0.6
    assert same(grip.here.posterior, posterior)
    assert torch.equal(grip.here.truth, real)
    assert grip.here.blind == 5  # a drag is no look


def test_a_drag_to_where_the_model_has_not_seen_the_box_is_told(grip, places):
    _, x, y = grip.here.points[1]["pixels/front"][1]
    assert "box" in grip.drag(1, "box", "pixels/front", x + 30, y)
    assert x < grip.here.points[1]["pixels/front"][1][1] < x + 15


@pytest.mark.parametrize("steps", [0, 8, 50])  # in the last the gripper holds the box
def test_a_dream_keeps_the_box_and_lays_it_on_the_ground(grip, places, steps):
    grip.show_scene()
    ticks(grip, steps)
    begun, box = grip.here, places.positions["box"]
    _, x, y = begun.points[1]["pixels/front"][1]
    height = float(places.read(begun.dreams, grip.model.decode(begun.dreams))[0, box][2])
    assert (height > 0.06) == (steps == 50)
    for across, down in ((0, -3), (0, 3), (3, 0), (-8, 0), (3, -3)):
        grip.moments[-1] = begun
        remark = grip.drag(1, "box", "pixels/front", x + across, y + down)
        read = places.read(grip.here.dreams, grip.model.decode(grip.here.dreams))[0]
        assert float(read[box][2]) == pytest.approx(0.03, abs=0.01)
        frame = dreamt(grip)
        assert ((frame[..., 0] > 90) & (frame[..., 1:].max(-1) < 60)).sum() >= 8
        assert grip.here.points[1]["pixels/front"][1][1] == pytest.approx(x + np.clip(across, -6, 6), abs=3)
        if down < 0:
            assert "box" in remark


def test_what_was_changed_by_hand_is_told_until_the_next_look(grip):
    ticks(grip, 3)
    _, x, y = grip.here.points[1]["pixels/front"][1]
    grip.drag(0, "box", "pixels/front", x, y)
    assert grip.here.by_hand == (set(),)
    grip.drag(1, "box", "pixels/front", x + 2, y)
    grip.branch()
    grip.force(0, 1)
    grip.release()
    ticks(grip, 2)
    assert grip.here.by_hand == ({"box", "classes"}, {"box"})
    grip.go_to(3)
    assert grip.here.by_hand == ({"box", "classes"}, {"box"})
    grip.go_to(2)
    assert grip.here.by_hand == (set(),)
    grip.go_to(5)
    grip.check_reality()
    assert grip.here.by_hand == (set(), set())
    grip.branch()
    assert grip.here.by_hand == (set(),)


def test_what_was_changed_by_hand_ends_with_the_episode(dots):
    session = dots()
    session.force(0, 1)
    for _ in range(12):
        session.tick()
        assert session.here.by_hand == ({"classes"},)
    session.release()
    session.tick()
    assert session.here.is_first
    assert session.here.by_hand == (set(),)


def test_the_policy_follows_the_box_that_was_dragged_in_its_dream(grip):
    grip.show_scene()
    ticks(grip, 5)
    grip.branch()
    for dream in range(2):
        grip.drive(dream, "policy")
    _, x, y = grip.here.points[2]["pixels/front"][1]
    grip.drag(2, "box", "pixels/front", x + 3, y)
    ticks(grip, 25)
    (usual, _), (follows, _) = (points["pixels/front"] for points in grip.here.points[1:])
    assert follows[1] - usual[1] > 2  # of 48 pixels: tips
    assert centre_of_red(dreamt(grip, 2)) - centre_of_red(dreamt(grip, 1)) > 2


def test_what_cannot_be_dragged(grip, dots):
    for given, line in (((0, "tip", "pixels/front"), "name=tip"), ((2, "box", "pixels/front"), "nearest: panel=1")):
        with pytest.raises(InvalidOption, match=line):
            grip.drag(*given, 1.0, 1.0)
    with pytest.raises(InvalidOption, match="camera=wrist"):
        grip.drag(0, "box", "wrist", 1.0, 1.0)
    with pytest.raises(InvalidOption, match="name=box"):
        dots().drag(0, "box", "pixels/front", 1.0, 1.0)


# What a dream has seen, and what else it might have been


def test_how_long_a_dream_has_been_blind(pick, dots):
    assert (pick.here.blind, pick.here.looks) == (0, 1)
    ticks(pick, 7)
    assert (pick.here.blind, pick.here.looks) == (7, 1)
    pick.check_reality()
    assert (pick.here.blind, pick.here.looks) == (0, 8)
    ticks(pick, 2)
    pick.go_to(6)
    assert (pick.here.blind, pick.here.looks) == (6, 1)
    session = dots()
    for _ in range(15):
        session.tick()
    assert (session.here.blind, session.here.looks) == (2, 1)


def test_dreams_with_other_noise_change_nothing_else(pick):
    ticks(pick, 5)
    alone = ticks(pick, 4) and dreamt(pick)
    pick.go_to(5)
    pick.spread()
    assert len(pick.here.crowd) == sessions.CROWD
    ticks(pick, 4)
    assert np.array_equal(dreamt(pick), alone)
    stoch = pick.here.crowd.stoch.flatten(1)
    assert len(stoch.unique(dim=0)) == sessions.CROWD
    assert len(pick.here.extras) == sessions.CROWD
    pick.check_reality()
    assert len(pick.here.crowd.stoch.flatten(1).unique(dim=0)) == 1
    pick.spread()
    assert pick.here.crowd is None
    assert pick.here.extras == {}


def test_the_effect_of_a_forced_class_is_shown_with_the_same_noise(pick):
    ticks(pick, 5)
    pick.go_to(5)
    ticks(pick, 4)
    unforced, states = dreamt(pick), pick.here.dreams
    pick.go_to(5)
    for group in range(4):
        pick.force(group, (int(pick.classes[1][group]) + 1) % pick.model.classes)
    ticks(pick, 4)
    assert same(pick.here.twin, states)
    difference = np.abs(dreamt(pick).astype(int) - unforced)
    assert pick.here.effect == pytest.approx(difference.mean())
    assert pick.here.effect > 0
    assert np.array_equal(pick.here.extras["effect"], np.minimum(difference * sessions.GAIN, 255))
    pick.release()
    assert pick.here.extras == {}


def test_the_scene_is_shown_beside_what_the_agent_sees(pick, dots):
    assert pick.filmed
    pick.show_scene()
    assert [*pick.here.pictures[0]] == ["scene", "pixels/front"]
    assert pick.here.pictures[0]["scene"].shape[1] >= 240
    assert [*pick.here.pictures[1]] == ["pixels/front"]
    pick.show_scene()
    ticks(pick, 1)
    assert [[*moment.pictures[0]] for moment in pick.moments] == 2 * [["pixels/front"]]
    pick.show_scene()
    assert "scene" in pick.here.pictures[0]
    # A play that cannot keep its rate keeps what it has for a while.
    pick.late = True
    ticks(pick, 8)
    assert len({id(moment.film["scene"]) for moment in pick.moments[1:]}) == 3
    assert not dots().filmed


def test_actions_are_shown_as_they_are_executed(pick, monkeypatch):
    drawn = torch.tensor([[-3.0, 0.5, 1.5]])
    monkeypatch.setattr(pick.model, "act", lambda states, **given: pick.model.to_env(drawn))
    pick.tick()
    assert pick.action == [-1.0, 0.5, 1.0]


# Recorded episodes


def test_a_recorded_episode_is_played_again(pick, recordings):
    frames = ticks(pick, 6)
    name = recording.write(recordings, pick.episode(), 20.0)
    assert recording.list_names(recordings) == [name]
    assert (recordings / f"{name}.gif").read_bytes().startswith(b"GIF")
    with np.load(recordings / f"{name}.npz") as saved:
        assert {key: value.shape for key, value in saved.items()} == {
            "seed": (),
            "begin": (),
            "action": (6, 3),
            **dict.fromkeys(("reward", "is_first", "is_last", "is_terminal"), (7,)),
            **dict.fromkeys(("real/value", "real/continue", "real/surprise"), (7,)),
            **dict.fromkeys(("dream/reward", "dream/value", "dream/continue", "dream/error", "dream/blind"), (7,)),
            "real/pixels/front": (7, 48, 48, 3),
            "dream/pixels/front": (7, 48, 48, 3),
        }
        assert np.array_equal(saved["real/pixels/front"][1:], frames)
        assert np.array_equal(saved["dream/pixels/front"][-1], dreamt(pick))
        assert saved["is_first"].tolist() == [True] + 6 * [False]
    assert name == "seed_1_6_steps"
    pick.start(7)
    pick.replay(recording.read(recordings / f"{name}.npz"))
    assert pick.source == "recorded"
    again = ticks(pick, 6)
    with pytest.raises(CommandError, match="over"):
        pick.tick()
    assert (pick.now, pick.last) == (6, 6)
    assert all(np.array_equal(one, other) for one, other in zip(again, frames, strict=True))
    assert recording.write(recordings, pick.episode(), 20.0) == f"{name}_2"


def test_what_was_shown_is_saved_and_what_was_played_is_played_again(pick, recordings):
    """After a forced class, a step back, a branch and a reality check."""
    ticks(pick, 6)
    pick.force(0, (int(pick.classes[1][0]) + 1) % pick.model.classes)
    forced = dreamt(pick)
    ticks(pick, 4)
    pick.go_to(8)
    pick.branch()
    pick.choose("keys")
    pick.act([1.0, 0.0, -1.0])
    shown = {8: dreamt(pick)}
    for step in (9, 10, 11):
        pick.tick()
        shown[step] = dreamt(pick)
    pick.check_reality()
    shown[11] = dreamt(pick)
    real = [moment.pictures[0]["pixels/front"] for moment in pick.moments]
    name = recording.write(recordings, pick.episode(), 20.0)
    with np.load(recordings / f"{name}.npz") as saved:
        assert np.array_equal(saved["dream/pixels/front"][6], forced)
        assert all(np.array_equal(saved["dream/pixels/front"][step], frame) for step, frame in shown.items())
        assert saved["dream/error"][11] == pytest.approx(pick.here.numbers["error"][0])
        assert saved["action"][8:].tolist() == 3 * [[1.0, 0.0, -1.0]]
    pick.replay(recording.read(recordings / f"{name}.npz"))
    assert all(np.array_equal(one, other) for one, other in zip(ticks(pick, 11), real[1:], strict=True))


def test_a_long_play_is_played_again_from_its_start(pick, recordings, monkeypatch):
    monkeypatch.setattr(sessions, "MAX_MOMENTS", 5)
    pick.choose("sample")
    frames = ticks(pick, 12)
    name = recording.write(recordings, pick.episode(), 20.0)
    with np.load(recordings / f"{name}.npz") as saved:
        assert (int(saved["begin"]), saved["action"].shape, saved["reward"].shape) == (8, (12, 3), (5,))
    pick.replay(recording.read(recordings / f"{name}.npz"))
    assert all(np.array_equal(one, other) for one, other in zip(ticks(pick, 12), frames, strict=True))


def test_a_step_that_fails_leaves_both_sides_where_they_were(pick, monkeypatch):
    frames = ticks(pick, 6)
    pick.go_to(3)

    def fail(*given: object, **more: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(pick.model, "decode", fail)
        with pytest.raises(RuntimeError, match="memory"):
            pick.tick()
    assert (pick.now, pick.last) == (3, 3)
    assert all(np.array_equal(one, other) for one, other in zip(ticks(pick, 3), frames[3:], strict=True))


def test_an_episode_end_is_saved_and_played_again(dots, recordings):
    session = dots()
    session.choose("sample")
    for _ in range(20):
        session.tick()
    seen = [moment.pictures[0] for moment in session.moments]
    name = recording.write(recordings, session.episode(), 20.0)
    session.replay(recording.read(recordings / f"{name}.npz"))
    for _ in range(20):
        session.tick()
    again = [moment.pictures[0] for moment in session.moments]
    assert sum(moment.is_first for moment in session.moments) == 2
    assert all(np.array_equal(one[key], other[key]) for one, other in zip(seen, again, strict=True) for key in one)


def test_what_is_no_recording(dots, recordings):
    recordings.mkdir()
    (recordings / "text.npz").write_text("nothing")
    with pytest.raises(CommandError, match=r"text\.npz"):
        recording.read(recordings / "text.npz")
    with pytest.raises(CommandError, match="episode"):
        recording.read(recordings / "missing.npz")
    np.savez(recordings / "object.npz", seed=0, begin=0, action=np.array([{}], object))
    with pytest.raises(CommandError, match="episode"):
        recording.read(recordings / "object.npz")
    np.savez(recordings / "infinite.npz", seed=np.inf, action=np.zeros((2, 2), np.float32))
    with pytest.raises(CommandError, match="episode"):
        recording.read(recordings / "infinite.npz")
    np.savez(recordings / "seed.npz", seed=2**40, begin=0, action=np.zeros((2, 2), np.float32))
    with pytest.raises(CommandError, match=r"seed=1099511627776.*2147483647"):
        recording.read(recordings / "seed.npz")
    parts = {"action": np.zeros((2**22, 2), np.float32), "placed/box": np.zeros((2**22, 3), np.float32)}
    np.savez_compressed(recordings / "bomb.npz", seed=0, **parts)
    with pytest.raises(CommandError, match=f"bomb.*{recording.MAX_BYTES:,}"):
        recording.read(recordings / "bomb.npz")
    np.savez(recordings / "plain.npz", seed=0, action=np.zeros((2, 2)))
    with zipfile.ZipFile(recordings / "plain.npz", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("action", bytes(recording.MAX_BYTES + 1))
    with pytest.raises(CommandError, match=f"plain.*{recording.MAX_BYTES:,}"):
        recording.read(recordings / "plain.npz")
    np.savez(recordings / "moved.npz", seed=0, action=np.zeros((2, 2)), **{"placed/box": np.zeros((3, 3))})
    with pytest.raises(CommandError, match="placed"):
        recording.read(recordings / "moved.npz")
    session = dots()
    for number, action in enumerate((np.zeros((2, 5)), np.full((2, 2), np.nan), np.array(1.0), np.array([["a", "b"]]))):
        np.savez(recordings / f"other_{number}.npz", seed=0, begin=0, action=action)
        before = session.moments
        with pytest.raises(CommandError, match=rf"other_{number}.*Dot-continuous-v0, 2"):
            session.replay(recording.read(recordings / f"other_{number}.npz"))
        assert session.moments is before


def test_a_film_is_a_figure(pick):
    pick.show_scene()
    ticks(pick, 3)
    pick.check_reality()
    ticks(pick, 2)
    video = recording.film(pick.episode(), 20.0, pick.films)
    # Beside each other: the scene, what the agent sees, and the dream; below them curves and a line.
    assert video.shape[0] == 6
    assert video.shape[1] > 1.8 * recording.SIDE
    assert video.shape[2] > (4 / 3 + 2) * recording.SIDE
    looks = (video == torch.tensor(recording.SEES, dtype=torch.uint8)).all(-1).flatten(1).sum(1)
    assert (looks[[0, 3]] > looks[[1, 4]]).all()  # the border of a dream that was shown the real picture
    assert video.shape[2] - recording.film(pick.episode(), 20.0).shape[2] > recording.SIDE
    assert len(recording.film(pick.episode(), 20.0, stride=2)) == 3


# What cannot be played


def test_a_model_without_images_is_refused(small_model):
    world = envs.make("gym", num_envs=1, id="CartPole-v1", frames="none")
    with pytest.raises(CommandError, match="pixels/"):
        Session(world, small_model(world, observations=("state",)))
    world.close()


def test_a_model_of_another_world_is_refused(world, small_model, demo):
    continuous, discrete = world("continuous"), world("discrete")
    with pytest.raises(CommandError, match=r"Dot-discrete-v0.*Discrete\(3\).*Box"):
        Session(discrete, small_model(continuous))
    simulator, model = demo
    with pytest.raises(CommandError, match=r"Dot-continuous-v0.*pixels/front"):
        Session(continuous, model)
    assert isinstance(simulator.single_action_space, spaces.Box)


def test_a_peak_signal_to_noise_ratio():
    assert psnr(0.01) == pytest.approx(20)
    assert psnr(0.0) == pytest.approx(120)
