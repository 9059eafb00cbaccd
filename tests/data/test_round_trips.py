"""Recordings are read as they were written, in each format."""

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sheeplike.data import reading
from sheeplike.data.episodes import fit
from sheeplike.data.reading import control_rate, guess_format, read, require
from sheeplike.data.writing import NpzWriter, Recording
from sheeplike.host import install
from sheeplike.options import CommandError


def check(recording, place, layout, same, spaces=None):
    assert guess_format(place) == layout
    found = list(read(place))
    assert len(found) == len(recording.episodes)
    for one, other in zip(recording.episodes, found, strict=True):
        assert str(place) in other.source
        assert same(one, fit(other, spaces or recording.spaces, recording.action, {}))


@pytest.fixture(params=["cartpole", "discrete"])
def recording(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def lerobot():
    """LeRobot, if it can be imported."""
    pytest.importorskip("lerobot")
    try:
        return require("lerobot.datasets.lerobot_dataset")
    except CommandError as error:  # torchvision may not fit torch
        pytest.skip(str(error))


def test_npz(recording, same):
    check(recording, recording.place, "npz", same)
    assert control_rate(recording.place, "npz") == recording.fps
    (first, *_) = read(recording.place / "episode_000000.npz")
    assert same(recording.episodes[0], fit(first, recording.spaces, recording.action, {}))


def test_facts_of_an_episode_are_kept(cartpole, tmp_path):
    writer = NpzWriter(tmp_path / "new", {"fps": 50})
    cartpole.episodes[0].info = {"success": True}
    writer.add(cartpole.episodes[0])
    assert np.load(tmp_path / "new" / "episode_000000.npz")["success"]
    (episode,) = read(tmp_path / "new")
    assert fit(episode, cartpole.spaces, cartpole.action, {}).source.endswith("episode_000000.npz")


@pytest.mark.parametrize("layout", ["minari", "lerobot"])
def test_a_dataset_marks_episodes(layout, discrete, tmp_path, request):
    pytest.importorskip(layout)
    place, marks = tmp_path / "made", [{"success": True}, {"cut": True}]
    episodes = [replace(one, info=info) for one, info in zip(discrete.episodes, marks, strict=False)]
    convert(episodes, place, layout, discrete.spaces | {"action": discrete.action}, 50)
    if layout == "minari":
        infos = [one.infos for one in require("minari").MinariDataset(place / "data").iterate_episodes()]
        found = [(bool(info["success"][-1]), bool(info["cut"][-1])) for info in infos]
    else:
        module = request.getfixturevalue("lerobot")
        table = module.LeRobotDataset("any", root=place).hf_dataset.with_format(None)
        ends = np.cumsum([len(one) for one in episodes]) - 1
        found = [(bool(table[int(end)]["next.success"]), bool(table[int(end)]["next.cut"])) for end in ends]
    assert found == [(True, False), (False, True)]


def test_a_recording_goes_on(cartpole, tmp_path):
    facts = {"fps": 50, "action_low": (-1.0,)}
    NpzWriter(tmp_path, facts).add(cartpole.episodes[0])
    writer = NpzWriter(tmp_path, facts)
    writer.add(cartpole.episodes[1])
    assert writer.written == 2
    with pytest.raises(CommandError, match=f"to={tmp_path}"):  # its writer is open
        NpzWriter(tmp_path, facts)
    assert len(list(read(tmp_path))) == 2
    del writer
    with pytest.raises(CommandError, match=r"fps.*50.*20"):
        NpzWriter(tmp_path, {**facts, "fps": 20})
    (tmp_path / "recording.json").write_text("{")
    with pytest.raises(CommandError, match=r"recording\.json"):
        NpzWriter(tmp_path, facts)
    (tmp_path / "recording.json").unlink()
    with pytest.raises(CommandError, match=f"to={tmp_path}.*nearest"):
        NpzWriter(tmp_path, facts)


def convert(episodes, place, layout, spaces, fps):
    writer = Recording(place, {"fps": fps}, layout, spaces)
    for episode in episodes:
        writer.add(episode)
    writer.finish()


def test_minari(recording, same, tmp_path, monkeypatch):
    minari = pytest.importorskip("minari")
    monkeypatch.chdir(tmp_path)
    place = Path("demos/v0")  # relative, as on a command line
    convert(recording.episodes, place, "minari", recording.spaces | {"action": recording.action}, recording.fps)
    check(recording, place, "minari", same)
    assert control_rate(place, "minari") == control_rate(place / "data", "minari") == recording.fps
    dataset = minari.MinariDataset(place / "data")
    assert dataset.action_space == recording.action
    assert dataset.total_steps == sum(len(episode) - 1 for episode in recording.episodes)
    assert dataset[0].truncations[-1] != recording.episodes[0].terminal
    assert [path.name for path in place.parent.iterdir()] == ["v0"]
    with pytest.raises(CommandError, match=f"to={place}.*nearest"):
        Recording(place, {"fps": recording.fps}, "minari", recording.spaces)


@pytest.mark.parametrize("jpeg", [False, True])
def test_minari_of_one_image(jpeg, cartpole, same, tmp_path):
    pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    episode, space = cartpole.episodes[0], cartpole.spaces["pixels/fixed"]
    storage = MinariStorage.new(tmp_path, space, cartpole.action, jpeg_encoding=jpeg)
    storage.update_metadata({"dataset_id": "one-v0", "minari_version": require("minari").__version__})
    ends = np.arange(len(episode) - 1) == len(episode) - 2
    rows = {"observations": episode.obs["pixels/fixed"], "actions": episode.action[:-1], "rewards": episode.reward[1:]}
    storage.update_episodes([EpisodeBuffer(**rows, terminations=ends, truncations=ends)])
    (found,) = read(tmp_path)
    found = fit(found, {"pixels/fixed": space}, cartpole.action, {})
    assert found.terminal
    assert found.obs["pixels/fixed"].shape == episode.obs["pixels/fixed"].shape
    assert np.array_equal(found.obs["pixels/fixed"], episode.obs["pixels/fixed"]) == (not jpeg)


def test_lerobot_with_images(recording, same, tmp_path, lerobot):
    """A frame rate that is no whole number gets exact images; the other recording has none."""
    place = tmp_path / "exact"
    convert(recording.episodes, place, "lerobot", recording.spaces | {"action": recording.action}, recording.fps)
    check(recording, place, "lerobot", same)
    assert control_rate(place, "lerobot") == recording.fps
    assert [path.name for path in tmp_path.iterdir()] == ["exact"]
    assert not list(tmp_path.glob("**/*.mp4"))


def test_lerobot_with_videos(cartpole, same, tmp_path, lerobot):
    """Grey frames, each of its own brightness: a frame is in its place, and nearly as it was."""
    place, greys = tmp_path / "video", iter(range(5, 255, 15))
    spaces = spaces_of(cartpole) | {"state": cartpole.spaces["state"]}
    episodes = []
    for one in cartpole.episodes:
        frames = np.stack([np.full((64, 64, 3), next(greys), np.uint8) for _ in range(len(one))])
        episodes.append(replace(one, obs={"pixels/fixed": frames, "state": one.obs["state"]}, info={}))
    convert(episodes, place, "lerobot", spaces | {"action": cartpole.action}, 25.0)
    found = [fit(episode, spaces, cartpole.action, {}) for episode in read(place)]
    for one, other in zip(episodes, found, strict=True):
        apart = np.abs(one.obs["pixels/fixed"].astype(int) - other.obs.pop("pixels/fixed"))
        assert apart.max() <= 7  # half the step from one grey to the next
        assert same(replace(one, obs={"state": one.obs["state"]}), other)
    dataset = lerobot.LeRobotDataset("any", root=place)
    assert dataset.meta.tasks.index.tolist() == ["video"]
    assert (dataset.meta.fps, dataset.meta.total_frames) == (25, sum(map(len, episodes)))
    for video in place.glob("videos/**/*.mp4"):
        video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    with pytest.raises(CommandError, match="mp4"):
        list(read(place))
    video.unlink()
    with pytest.raises(CommandError, match=str(place)):
        list(read(place))


@pytest.mark.parametrize("layout", ["minari", "lerobot"])
def test_after_a_conversion_that_fails_the_files_are_there(layout, cartpole, same, tmp_path, request):
    pytest.importorskip(layout)
    if layout == "lerobot":
        request.getfixturevalue("lerobot")
    place, spaces = tmp_path / "made", cartpole.spaces | {"action": cartpole.action}
    with pytest.raises(CommandError, match="none"):
        convert(cartpole.episodes, place, layout, spaces | {"none": cartpole.action}, cartpole.fps)
    assert not place.exists()
    Recording(place, {"fps": cartpole.fps}, layout, spaces).finish()
    check(cartpole, place, layout, same)


def shard(file, rows):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def to_rows(episode):
    rows = []
    for t in range(len(episode) - 1):
        data = io.BytesIO()
        Image.fromarray(episode.obs["pixels/fixed"][t]).save(data, "PNG")
        row = {"observation": {"bytes": data.getvalue(), "path": None}, "action": episode.action[t].tolist()}
        row |= {"reward": float(episode.reward[t + 1]), "terminated": False, "truncated": t == len(episode) - 2}
        rows.append(row)
    return rows


def test_parquet(cartpole, tmp_path):
    """A shard may begin and end in the middle of an episode."""
    first, second = (to_rows(episode) for episode in cartpole.episodes)
    shard(tmp_path / "task" / "train-00000-of-00002.parquet", first + second[:4])
    shard(tmp_path / "task" / "train-00001-of-00002.parquet", second[4:])
    assert guess_format(tmp_path) == "parquet"
    found = [fit(one, spaces_of(cartpole), cartpole.action, {}) for one in read(tmp_path)]
    assert [len(one) for one in found] == [len(first) + 1, 4, len(second) - 4 + 1]
    for other, number, begin in zip(found, (0, 1, 1), (0, 0, 4), strict=True):
        one, end = cartpole.episodes[number], begin + len(other) - 1
        assert np.array_equal(other.obs["pixels/fixed"][:-1], one.obs["pixels/fixed"][begin:end])
        closing = end if number and not begin else end - 1  # a whole episode repeats its last frame
        assert np.array_equal(other.obs["pixels/fixed"][-1], one.obs["pixels/fixed"][closing])
        assert np.array_equal(other.action[:-1], one.action[begin:end])
        assert np.array_equal(other.reward[1:], one.reward[begin + 1 : end + 1])
        assert not other.terminal


def spaces_of(recording):
    return {"pixels/fixed": recording.spaces["pixels/fixed"]}


@pytest.mark.parametrize("package", ["minari", "pyarrow", "lerobot"])
def test_a_missing_package_is_named_with_its_pip_line(package, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    layout = {"pyarrow": "parquet"}.get(package, package)
    with pytest.raises(CommandError, match=f"{package}.*{re.escape(install(layout))}"):
        list(read(tmp_path, layout))
    if layout != "parquet":
        with pytest.raises(CommandError, match=package):
            Recording(tmp_path / "new", {"fps": 50}, layout, {})


def test_a_missing_decoder_is_named_with_its_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(CommandError, match=f"av.*{re.escape(install('lerobot'))}"):
        reading._decode(tmp_path / "video.mp4", 0.0, 1, 20.0)
