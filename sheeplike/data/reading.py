"""Readers of recorded episodes, by layout; each yields one episode at a time, with all that its files hold.

======== ==============================================================================================================
npz      a file per episode, of this project, pydreamer, DreamerV2 and V-D4RL, or chunks of ``danijar/dreamerv3``
parquet  rows ``observation`` (an encoded image), ``action``, ``reward``, ``terminated``, ``truncated``
minari   a dataset of Minari, read by its own package
lerobot  a dataset of LeRobot v3.0, read by its own package; PyAV decodes its videos
======== ==============================================================================================================
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sheeplike.data.episodes import Episode
from sheeplike.host import install
from sheeplike.options import CommandError, flat

FLAGS = ("is_first", "is_last", "is_terminal", "terminated", "truncated", "reset", "terminal", "discount")
ENDS = ("is_terminal", "terminated", "terminal", "discount")
ROWS = ("observation", "action", "reward", "terminated", "truncated")
MARKS = ("success", "cut")  # facts of an episode: it succeeded; a world that failed cut it
FACTS = "recording.json"  # what this project writes beside its npz files
PIP = {
    "minari": install("minari"),
    "pyarrow": install("parquet"),
    "av": install("lerobot"),
    # lerobot 0.4.4 asks for torch<2.11, but reads and writes datasets with later ones too.
    "lerobot": f"{install('lerobot')} && pip install --no-deps lerobot==0.4.4",
}


def guess_format(path: Path) -> str:
    """Return the layout of a directory or file; CommandError if it has none."""
    if (path / "meta" / "info.json").is_file():
        return "lerobot"
    if (path / "data" / "metadata.json").is_file() or (path / "metadata.json").is_file():
        return "minari"
    for layout in ("npz", "parquet"):
        if _files(path, layout):
            return layout
    raise CommandError(f"data.path={path}: expected .npz or .parquet files, or a dataset of Minari or LeRobot")


def read(path: Path, layout: str | None = None) -> Iterator[Episode]:
    """Return the episodes of a directory or file in a fixed order; CommandError names a file that cannot be read."""
    return READERS[layout or guess_format(path)](path)


def control_rate(path: Path, layout: str) -> float | None:
    """Return the steps per second of a dataset, or None if it does not tell."""
    minari = path / "data/metadata.json" if (path / "data").is_dir() else path / "metadata.json"
    places = {"lerobot": {path / "meta/info.json"}, "minari": {minari}}.get(layout, set())
    places |= {file.parent / FACTS for file in _files(path, "npz")} if layout == "npz" else set()
    rates = set()
    for place in sorted(filter(Path.is_file, places)):
        with expecting(place, "JSON with fps, the steps per second"):
            facts = json.loads(place.read_text(encoding="utf-8"))
            if layout != "minari" or "fps" in facts:  # other programs write none
                rates.add(float(facts["fps"]))
    if len(rates) > 1:
        raise CommandError(f"data.path={path}: recordings of {sorted(rates)} steps per second; expected one rate")
    return next(iter(rates), None)


def require(module: str) -> Any:
    """Import a module of an optional package, or raise with its pip line."""
    try:
        return importlib.import_module(module)
    except Exception as error:  # a binary that does not fit raises RuntimeError or OSError
        name = module.partition(".")[0]
        raise CommandError(f"{name} cannot be imported ({error}); nearest: {PIP[name]}") from None


@contextlib.contextmanager
def expecting(place: Path | str, expected: str) -> Iterator[None]:
    """Raise CommandError with the place for any error: libraries raise all kinds for broken files."""
    try:
        yield
    except (CommandError, MemoryError):
        raise
    except Exception as error:
        reason = error.__context__ or error  # LeRobot looks for a missing file elsewhere
        raise CommandError(f"{place}: expected {expected}: {type(reason).__name__}: {reason}") from None


def _files(path: Path, suffix: str) -> list[Path]:
    return [path] if path.suffix == f".{suffix}" and path.is_file() else sorted(path.glob(f"**/*.{suffix}"))


def _episode(
    obs: Mapping[str, np.ndarray], action: np.ndarray, reward: np.ndarray, terminal: bool, source: str
) -> Episode:
    """Return the episode of ``T`` actions and what they earned; an observation of ``T`` steps repeats its last."""
    whole = {name: np.append(value, value[-1:], axis=0) for name, value in obs.items() if len(value) == len(action)}
    reward = np.append(np.zeros(1, np.float32), np.asarray(reward, np.float32))
    return Episode(
        {**obs, **whole}, np.append(action, np.zeros_like(action[:1]), axis=0), reward, bool(terminal), source
    )


def _read_npz(path: Path) -> Iterator[Episode]:
    for file in _files(path, "npz"):
        with expecting(file, "arrays of an episode, among them action and reward, without pickled objects"):
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            yield from _split(arrays, file)


def _split(arrays: dict[str, np.ndarray], file: Path) -> Iterator[Episode]:
    """Yield the episodes of one file's arrays, in our alignment."""
    if not (ends := [name for name in ENDS if name in arrays]):
        raise CommandError(f"{file}: expected one of {', '.join(ENDS)}, which tell how an episode ended")
    # The chunks of 2023 are stored with their unused rest; the name tells their length (dreamerv3, replay/chunk.py).
    if (chunk := re.fullmatch(r"\w+-\w+-\w+-(\d+)", file.stem)) and "is_first" in arrays:
        arrays = {name: value[: int(chunk[1])] for name, value in arrays.items()}
    if "image_t" in arrays:  # pydreamer compresses images with time as their last axis (generator.py)
        arrays["image"] = np.moveaxis(arrays.pop("image_t"), -1, 0)
    obs = {name: value for name, value in arrays.items() if name not in ("action", "reward", *FLAGS) and value.ndim}
    action, reward = arrays["action"], arrays["reward"].reshape(-1)
    lengths = {name: len(value) for name, value in obs.items()}
    steps = max(lengths.values(), default=0)
    if set(lengths.values()) != {steps} or len(action) not in (steps, steps - 1) or len(reward) != len(action):
        found = f"{len(action)} actions, {len(reward)} rewards and observations {lengths}"
        raise CommandError(f"{file}: found {found}, expected one length, and at most one action and reward fewer")
    ended = arrays[ends[0]].reshape(-1)
    ended = ended == 0 if ends[0] == "discount" else ended.astype(bool)
    if len(action) < steps:  # this project, as in Gymnasium: actions and rewards lie between observations
        episode = _episode(obs, action, reward, ended[-1], str(file))
        episode.info = {name: bool(arrays.get(name, False)) for name in MARKS}
        yield episode
        return
    if not {"is_first", "reset", "terminal", "discount"} & arrays.keys():
        raise CommandError(f"{file}: found {steps} actions and observations, expected one observation more or is_first")
    first = arrays.get("is_first", arrays.get("reset", np.zeros(steps))).reshape(-1).astype(bool)
    if _precedes(arrays, action, first):
        action = np.append(action[1:], np.zeros_like(action[:1]), axis=0)
    starts = [0, *(int(t) for t in np.flatnonzero(first) if t)]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], steps], strict=True)):
        if stop - start > 1 or "is_first" not in arrays:  # a chunk may begin or end with a single row
            part = slice(start, stop)
            own = {name: value[part] for name, value in obs.items()}
            yield Episode(own, action[part], reward[part], bool(ended[part][-1]), f"{file}, episode {number}")


def _precedes(arrays: Mapping[str, np.ndarray], action: np.ndarray, first: np.ndarray) -> bool:
    """Return True if ``action[t]`` led to ``obs[t]``; otherwise it was chosen there.

    It does in pydreamer (``envs/wrappers.py``, with ``reset``) and V-D4RL (``conversion_scripts``, with ``discount``).
    DreamerV2 and DreamerV3 name their arrays alike, but the action that an episode lacks is zero: the one before its
    first observation in DreamerV2 (``common/driver.py``), after its last in DreamerV3 (``embodied/core/driver.py``).
    """
    if "is_first" not in arrays or "discount" in arrays:
        return True
    last = arrays["is_last"].reshape(-1).astype(bool)
    return bool(first.any() and not action[first].any() and action[last].any())


def _pixels(value: Any) -> np.ndarray:
    """Return an encoded or decoded image, or any other value, as an array."""
    from PIL import Image

    if isinstance(value, dict):
        value = Image.open(io.BytesIO(value["bytes"]))
    return np.asarray(value.convert("RGB") if isinstance(value, Image.Image) else value)


def _read_parquet(path: Path) -> Iterator[Episode]:
    """Yield the episodes of each shard, parts at its ends included; rows of ``EpicPinkPenguin/visual_dm_control``."""
    require("pyarrow")
    from pyarrow import parquet

    for file in _files(path, "parquet"):
        with expecting(file, f"rows of {', '.join(ROWS)}"), parquet.ParquetFile(file) as table:
            rows, done = [], 0
            for batch in table.iter_batches(batch_size=64, columns=list(ROWS)):
                for row in batch.to_pylist():
                    rows.append({name: _pixels(value) for name, value in row.items()})
                    if row["terminated"] or row["truncated"]:
                        yield _of_rows(rows, f"{file}, row {done}")
                        rows, done = [], done + len(rows)
            if len(rows) > 1:
                yield _of_rows(rows, f"{file}, row {done}")


def _of_rows(rows: list[dict[str, np.ndarray]], source: str) -> Episode:
    columns = {name: np.stack([row[name] for row in rows]) for name in ROWS}
    image, action, reward, terminated, truncated = columns.values()
    # In an episode without an end, the last row is the closing observation.
    used = slice(None if terminated[-1] or truncated[-1] else -1)
    return _episode({"observation": image}, action[used], reward[used], terminated[-1], source)


def _read_minari(path: Path) -> Iterator[Episode]:
    minari = require("minari")
    with expecting(path, "a dataset of Minari"):
        dataset = minari.MinariDataset(path / "data" if (path / "data").is_dir() else path)
        for one in dataset.iterate_episodes():
            parts = flat({"observation": one.observations})
            obs = {name.removeprefix("observation.").replace(".", "/"): np.asarray(value) for name, value in parts}
            source = f"{path}, episode {one.id}"
            yield _episode(obs, np.asarray(one.actions), one.rewards, one.terminations[-1], source)


def _read_lerobot(path: Path) -> Iterator[Episode]:
    module, info = require("lerobot.datasets.lerobot_dataset"), path / "meta" / "info.json"
    if not info.is_file():  # LeRobot would create the directory
        raise CommandError(f"{info}: expected a dataset of LeRobot v3.0")
    with expecting(path, "a whole dataset of LeRobot v3.0 with action, next.reward and next.done"):
        # LeRobot downloads what is missing; the hub has no repository of such a name.
        dataset = module.LeRobotDataset(str(path.absolute()), root=path)
        table, meta = dataset.hf_dataset.with_format(None), dataset.meta
        for episode in meta.episodes:
            rows = table[episode["dataset_from_index"] : episode["dataset_to_index"]]
            rows = {name: np.stack([_pixels(value) for value in values]) for name, values in rows.items()}
            for key in meta.video_keys:
                video = path / meta.get_video_file_path(episode["episode_index"], key)
                rows[key] = _decode(video, episode[f"videos/{key}/from_timestamp"], len(rows["index"]), meta.fps)
            own = {name: value for name, value in rows.items() if name.startswith("observation.")}
            own = {name.removeprefix("observation.").replace(".", "/"): value for name, value in own.items()}
            obs = {re.sub("^images/", "pixels/", name): value for name, value in own.items()}
            done = rows["next.done"].reshape(-1)
            terminal = done[-1] and not rows.get("next.truncated", ~done)[-1]
            # As this project writes it, the last frame but one is done too: the last is what its action led to.
            used = slice(-1 if len(done) > 1 and done[-2] else None)
            source = f"{path}, episode {episode['episode_index']}"
            yield _episode(obs, rows["action"][used], rows["next.reward"].reshape(-1)[used], terminal, source)


def _decode(video: Path, begin: float, count: int, fps: float) -> np.ndarray:
    """Return frames from second ``begin`` on; LeRobot's decoders need FFmpeg's libraries or an older torchvision."""
    av, frames = require("av"), []
    with expecting(video, f"a video of {count} frames from {begin:.3f} s on"), av.open(str(video)) as container:
        container.seek(int(begin * av.time_base))
        for frame in container.decode(video=0):
            if frame.time > begin - 0.5 / fps:
                frames.append(frame.to_ndarray(format="rgb24"))
            if len(frames) == count:
                break
        return np.stack(frames)


READERS: dict[str, Callable[[Path], Iterator[Episode]]] = {
    "npz": _read_npz,
    "parquet": _read_parquet,
    "minari": _read_minari,
    "lerobot": _read_lerobot,
}
