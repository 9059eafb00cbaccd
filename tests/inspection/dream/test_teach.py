"""Episodes that a person plays in the simulator are recorded, to learn from."""

from __future__ import annotations

import numpy as np
import pytest

from sheeplike import envs
from sheeplike.data.reading import read
from sheeplike.data.writing import NpzWriter
from sheeplike.inspection.dream.session import Session
from sheeplike.options import CommandError


@pytest.fixture
def taught(dots, tmp_path):
    """A session that records into a directory, and that directory."""

    def begin(kind: str = "continuous"):
        return dots(kind, demos=lambda: NpzWriter(tmp_path / "demos", {"fps": 20})), tmp_path / "demos"

    return begin


def play(session, steps: int, action=(1.0, 0.0)) -> None:
    session.choose("keys")
    for _ in range(steps):
        session.act(action)
        session.tick()


@pytest.mark.parametrize(("kind", "action"), [("continuous", (0.5, 0.0)), ("discrete", 2), ("multi", (2, 1))])
def test_whole_episodes_are_recorded(taught, kind, action):
    session, place = taught(kind)
    assert not place.exists(), "nothing is written before it is asked for"
    session.teach()
    session.start(3)
    play(session, 12 + 1 + 12 + 5, action)
    episodes = list(read(place))
    assert len(episodes) == len(session.taught) == 2
    (key,) = session.model.cameras
    for number, episode in enumerate(episodes):
        assert len(episode) == 13
        assert episode.terminal
        begin = number * 13
        frames = np.stack([moment.seen[key][0].numpy() for moment in session.moments[begin : begin + 13]])
        np.testing.assert_array_equal(episode.obs[key], frames)
        np.testing.assert_array_equal(episode.action[:-1], np.broadcast_to(action, episode.action[:-1].shape))
        assert episode.reward[0] == 0
        assert episode.reward[1:].tolist() == [moment.reward for moment in session.moments[begin + 1 : begin + 13]]


def test_an_episode_that_had_begun_is_not_whole(taught):
    session, place = taught()
    play(session, 3)
    session.teach()
    play(session, 9)
    assert session.here.is_last
    assert session.taught == {}
    (end,) = session.strip(0)["ends"]
    assert end == (session.now, session.ends[0])
    assert session.here.recorded in end[1], "the page tells why"
    play(session, 13)
    assert session.here.is_last
    assert session.here.recorded in session.taught
    assert len(session.taught) == len(list(place.glob("*.npz"))) == 1


def test_an_end_that_is_taken_back_is_not_kept(small_model, tmp_path):
    place = tmp_path / "demos"
    world = envs.make("cartpole_balance", num_envs=1, image_size=48, episode_length=6)
    session = Session(world, small_model(world), demos=lambda: NpzWriter(place, {"fps": 12.5}))
    session.teach()
    session.start(0)
    play(session, 6, action=(0.1,))
    assert session.here.is_last
    assert len(list(place.glob("*.npz"))) == 1
    session.go_to(session.last - 2)
    play(session, 2, action=(-0.1,))
    assert session.here.is_last
    (episode,) = read(place)
    np.testing.assert_allclose(episode.action[:6, 0], [0.1, 0.1, 0.1, 0.1, -0.1, -0.1])
    assert list(session.taught) == list(place.glob("*.npz"))
    world.close()


def test_it_stops_when_asked(taught):
    session, _ = taught()
    session.teach()
    session.start(0)
    play(session, 12)
    session.teach()
    play(session, 13)
    assert len(session.taught) == 1


def test_where_it_cannot_be_recorded(dots):
    with pytest.raises(CommandError):
        dots("continuous").teach()
