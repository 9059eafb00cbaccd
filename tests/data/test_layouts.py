"""Other projects' npz files, in which the same steps are aligned and named in other ways; and control rates."""

import numpy as np
import pytest
from gymnasium import spaces

from sheeplike.data.episodes import fit
from sheeplike.data.reading import control_rate, guess_format, read
from sheeplike.options import CommandError

SPACES = {"pixels/front": spaces.Box(0, 255, (6, 8, 3), np.uint8)}
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
LENGTHS = (5, 4, 6)  # steps of three episodes; the second ends by itself
REWARD = np.concatenate([np.r_[0, np.arange(1, steps)] for steps in LENGTHS]).astype(np.float32)
FIRST = np.concatenate([np.arange(steps) == 0 for steps in LENGTHS])
LAST = np.concatenate([np.arange(steps) == steps - 1 for steps in LENGTHS])
TERMINAL = LAST & (np.cumsum(FIRST) == 2)
random = np.random.default_rng(0)
IMAGE = random.integers(0, 256, (sum(LENGTHS), 6, 8, 3)).astype(np.uint8)
CHOSEN = random.uniform(-1, 1, (sum(LENGTHS), 2)).astype(np.float32) * ~LAST[:, None]
LED = np.roll(CHOSEN, 1, axis=0)  # zero where an episode begins

PYDREAMER = {"image": IMAGE, "action": LED, "reward": REWARD, "terminal": TERMINAL, "reset": FIRST}
FLAGS = {"is_first": FIRST, "is_last": LAST, "is_terminal": TERMINAL}
V2 = {"image": IMAGE, "action": LED, "reward": REWARD, **FLAGS}
V3 = V2 | {"action": CHOSEN, "stepid": random.integers(0, 256, (len(LAST), 20)).astype(np.uint8)}


def cut(arrays, begin, end):
    return {name: value[begin:end] for name, value in arrays.items()}


def check(place, begin=0, end=15):
    """The episodes read are the steps from ``begin`` to ``end`` of those above."""
    assert guess_format(place) == "npz"
    starts = sorted({begin, *(t for t in np.flatnonzero(FIRST) if begin < t < end)})
    found = [fit(episode, SPACES, ACTIONS, {}) for episode in read(place)]
    for episode, start, stop in zip(found, starts, [*starts[1:], end], strict=True):
        assert np.array_equal(episode.obs["pixels/front"], IMAGE[start:stop])
        assert np.array_equal(episode.action[:-1], CHOSEN[start : stop - 1])
        assert np.array_equal(episode.reward, REWARD[start:stop])
        assert episode.terminal == TERMINAL[stop - 1]


def test_pydreamer(tmp_path):
    np.savez_compressed(tmp_path / "ep000000_000002-0-r10-0015.npz", **PYDREAMER, policy_value=np.full(15, np.nan))
    check(tmp_path)
    compressed = {"image_t": IMAGE.transpose(1, 2, 3, 0), **PYDREAMER}
    del compressed["image"]
    np.savez_compressed(tmp_path / "ep000000_000002-0-r10-0015.npz", **compressed)
    check(tmp_path)
    np.savez_compressed(tmp_path / "ep000000_000002-0-r10-0015.npz", **cut(compressed | {"image_t": IMAGE}, 2, 9))
    with pytest.raises(CommandError, match="image"):
        list(read(tmp_path))


@pytest.mark.parametrize("extra", [{}, {"discount": 1 - TERMINAL.astype(np.float32)}])
def test_dreamer_v2_and_vd4rl(extra, tmp_path):
    """A file per episode; V-D4RL stores a discount too."""
    arrays, begin = V2 | extra, 0
    for number, steps in enumerate(LENGTHS):
        name = f"20220101T00000{number}-4f5e6a7b8c9d-{steps - 1}.npz"
        np.savez_compressed(tmp_path / name, **cut(arrays, begin, begin + steps))
        begin += steps
    check(tmp_path)


def test_dreamer_v1_and_older_vd4rl(tmp_path):
    arrays = {name: V2[name] for name in ("image", "action", "reward")}
    arrays["discount"] = 1 - TERMINAL.astype(np.float32)
    np.savez_compressed(tmp_path / "one.npz", **cut(arrays, 5, 9))
    check(tmp_path, 5, 9)


def test_channels_first(tmp_path):
    arrays = V2 | {"observation": IMAGE.transpose(0, 3, 1, 2), "discount": np.ones(15, np.float32)}
    del arrays["image"]
    np.savez_compressed(tmp_path / "vd4rl.npz", **arrays)
    check(tmp_path)


@pytest.mark.parametrize(("begin", "end"), [(0, 15), (2, 12), (5, 7), (4, 10), (3, 6)])
def test_dreamer_v3(begin, end, tmp_path):
    """A chunk may begin and end in the middle of an episode; a single row there is no episode."""
    chunk = tmp_path / f"20250101T000000F123-4f5e6a7b-0-{end - begin}.npz"
    np.savez_compressed(chunk, **cut(V3, begin, end))
    check(tmp_path, 5 if begin == 4 else begin, {10: 9, 6: 5}.get(end, end))


def test_dreamer_v3_of_2023(tmp_path):
    """Its ``reset`` is something else, and what a chunk had no use for is stored with it."""
    arrays = {name: np.append(value, value[:7], axis=0) for name, value in (V3 | {"reset": LAST}).items()}
    np.savez_compressed(tmp_path / "20230101T000000F000123-4f5e6a7b-0-15.npz", **arrays)
    check(tmp_path)


def test_two_images_need_names(tmp_path):
    np.savez_compressed(tmp_path / "one.npz", **cut(V2, 0, 5), other=IMAGE[:5])
    (episode,) = read(tmp_path)
    with pytest.raises(CommandError, match=r"one\.npz.*image, other.*data\.keys={pixels/front:"):
        fit(episode, SPACES, ACTIONS, {})
    fitted = fit(episode, SPACES, ACTIONS, {"pixels/front": "image"})
    assert fitted.obs.keys() == SPACES.keys()
    with pytest.raises(CommandError, match="picture"):
        fit(episode, SPACES, ACTIONS, {"pixels/front": "picture"})


def test_one_hot_and_other_choices(tmp_path):
    choices = random.integers(0, 3, 4)
    one_hot = np.append(np.zeros((1, 3), np.float32), np.eye(3, dtype=np.float32)[choices], axis=0)
    np.savez(tmp_path / "one.npz", **cut(V2, 0, 5) | {"action": one_hot})
    (episode,) = read(tmp_path)
    found = fit(episode, SPACES, spaces.Discrete(3), {}).action
    assert found.dtype == np.int64
    assert found.tolist() == [*choices, 0]
    pairs = np.append(random.integers(0, 2, (4, 2)), [[99, 99]], axis=0)  # the last one means nothing
    episode.action = pairs
    found = fit(episode, SPACES, spaces.MultiDiscrete([2, 2]), {}).action
    assert found.tolist() == [*pairs[:4].tolist(), [0, 0]]
    episode.action = np.array([2, 3, 1, 2, 9])
    assert fit(episode, SPACES, spaces.Discrete(3, start=1), {}).action.tolist() == [2, 3, 1, 2, 1]


def test_a_little_beyond_the_limits_is_cut(tmp_path):
    np.savez(tmp_path / "one.npz", **cut(V3, 0, 5) | {"action": CHOSEN[:5] * 0 + 1.0005})
    (episode,) = read(tmp_path)
    episode.action[-1] = np.nan  # ignored
    assert fit(episode, SPACES, ACTIONS, {}).action.tolist() == [[1, 1]] * 4 + [[0, 0]]


@pytest.mark.parametrize(("layout", "name"), [("npz", "recording.json"), ("lerobot", "meta/info.json")])
def test_control_rate(layout, name, tmp_path):
    (tmp_path / "episode.npz").touch()
    assert control_rate(tmp_path, layout) is None
    facts = tmp_path / name
    facts.parent.mkdir(exist_ok=True)
    facts.write_text('{"fps": 12.5}')
    assert control_rate(tmp_path, layout) == 12.5
    for broken in ('{"fps": 12.5', '{"rate": 3}', "[]", '{"fps": "quick"}', '{"fps": null}', ""):
        facts.write_text(broken)
        with pytest.raises(CommandError, match=rf"{facts}.*fps"):
            control_rate(tmp_path, layout)


def test_the_control_rate_of_recordings_below_and_of_one_file(tmp_path):
    for name, rate in (("a", 20), ("b", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "episode.npz").touch()
        (tmp_path / name / "recording.json").write_text(f'{{"fps": {rate}}}')
    assert control_rate(tmp_path, "npz") == control_rate(tmp_path / "b/episode.npz", "npz") == 20
    (tmp_path / "b/recording.json").write_text('{"fps": 10}')
    with pytest.raises(CommandError, match=r"10.*20"):
        control_rate(tmp_path, "npz")


def test_one_file_is_read_at_a_time(tmp_path, monkeypatch):
    """A reader holds one episode of a directory, not all."""
    for number in range(3):
        np.savez(tmp_path / f"{number}.npz", **cut(V2, 0, 5))
    opened = []
    load = np.load
    monkeypatch.setattr(np, "load", lambda file, **options: opened.append(file) or load(file, **options))
    for number, _ in enumerate(read(tmp_path), 1):
        assert len(opened) == number
