"""Readers of recorded episodes, by layout; each yields episodes with all that its files hold.

======== ==============================================================================================================
npz      a file per episode, of this project, pydreamer, DreamerV2 and V-D4RL, or chunks of ``danijar/dreamerv3``
parquet  rows ``observation`` (an encoded image), ``action``, ``reward``, ``terminated``, ``truncated``
minari   a dataset of Minari, read by its own package
lerobot  a dataset of LeRobot, read by its own package
======== ==============================================================================================================
"""

from __future__ import annotations

import importlib
import io
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sheeplike.data.episodes import Episode
from sheeplike.options import CommandError

FLAGS = ("is_first", "is_last", "is_terminal", "terminated", "truncated", "reset", "terminal", "discount")
ENDS = ("is_terminal", "terminated", "terminal", "discount")
FACTS = "recording.json"  # what this project writes beside its npz files
PIP = {"minari": "pip install minari", "lerobot": "pip install lerobot", "pyarrow": "pip install pyarrow"}


def guess_format(path: Path) -> str:
    """Return the layout of a directory or file; CommandError if it has none."""
    if (path / "meta" / "info.json").is_file():
        return "lerobot"
    if (path / "data" / "metadata.json").is_file() or (path / "data" / "main_data.hdf5").is_file():
        return "minari"
    for suffix, found in ((".npz", "npz"), (".parquet", "parquet")):
        if path.suffix == suffix or next(path.glob(f"**/*{suffix}"), None):
            return found
    raise CommandError(f"data.path={path}: expected .npz or .parquet files, or a dataset of Minari or LeRobot")


def read(path: Path, layout: str | None = None) -> Iterator[Episode]:
    """Yield the episodes of a directory or file in a fixed order; CommandError names a file that cannot be read."""
    return READERS[layout or guess_format(path)](path)


def control_rate(path: Path, layout: str) -> float | None:
    """Return the steps per second of a dataset, or None if it does not tell."""
    place = {"npz": path / FACTS, "lerobot": path / "meta" / "info.json"}.get(layout)
    if place is None or not place.is_file():
        return None
    try:
        return float(json.loads(place.read_text(encoding="utf-8"))["fps"])
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"{place}: fps: expected steps per second") from None


def require(package: str) -> Any:
    """Import an optional package, or raise with its pip line."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise CommandError(f"data.path: {name} cannot be imported ({error}); nearest: {PIP[name]}") from None


def _read_npz(path: Path) -> Iterator[Episode]:
    for file in [path] if path.is_file() else sorted(path.glob("**/*.npz")):
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise CommandError(f"{file}: expected arrays of an episode, without pickled objects: {error}") from None
        yield from _split(arrays, str(file))


def _split(arrays: Mapping[str, np.ndarray], source: str) -> Iterator[Episode]:
    """Yield the episodes of one file's arrays, in our alignment."""
    for name in ("action", "reward"):
        if name not in arrays:
            raise CommandError(f"{source}: {name}: found {', '.join(sorted(arrays)) or 'nothing'}, expected {name}")
    if not any(name in arrays for name in ENDS):
        raise CommandError(f"{source}: expected one of {', '.join(ENDS)}, which tell how an episode ended")
    action, reward = np.asarray(arrays["action"]), np.asarray(arrays["reward"]).reshape(-1)
    obs, info = {}, {}
    for name, value in arrays.items():
        if name in ("action", "reward", *FLAGS):
            continue
        if name.endswith("_t") and value.ndim == 4:  # pydreamer compresses images with time as their last axis
            name, value = name[:-2], np.moveaxis(value, -1, 0)
        (info if value.ndim == 0 else obs)[name] = value
    lengths = {len(value) for value in obs.values()}
    if len(lengths) != 1:
        raise CommandError(f"{source}: found observations of {sorted(lengths)} steps, expected arrays of one length")
    steps = lengths.pop()
    if len(action) not in (steps, steps - 1) or len(reward) != len(action):
        found = f"{steps} observations, {len(action)} actions and {len(reward)} rewards"
        raise CommandError(f"{source}: found {found}, expected as many of each, or one observation more")
    preceding = any(name in arrays for name in ("reset", "terminal", "discount"))
    if len(action) < steps:  # as in Gymnasium: actions and rewards lie between observations
        action, reward = np.append(action, action[-1:] * 0, axis=0), np.append(np.zeros(1, reward.dtype), reward)
    elif preceding:  # action[t] led to obs[t]
        action = np.append(action[1:], action[:1] * 0, axis=0)
    first = np.asarray(arrays.get("is_first", arrays.get("reset", np.zeros(steps)))).reshape(-1).astype(bool)
    starts = [0, *(int(t) for t in np.flatnonzero(first) if 0 < t < steps)]
    for number, (start, stop) in enumerate(zip(starts, [*starts[1:], steps], strict=True)):
        part = slice(start, stop)
        where = source if len(starts) == 1 else f"{source}, episode {number}"
        own = {name: value[part] for name, value in obs.items()}
        facts = {name: value.item() for name, value in info.items()}
        yield Episode(own, action[part], reward[part], _terminal(arrays, part), where, facts)


def _terminal(arrays: Mapping[str, np.ndarray], part: slice) -> bool:
    for name in ENDS:
        if name in arrays:
            value = np.asarray(arrays[name])
            end = value if value.ndim == 0 else value.reshape(-1)[part][-1]
            return bool(end == 0) if name == "discount" else bool(end)
    return False


def close_rows(rows: Mapping[str, list], terminated: bool, source: str) -> Episode:
    """Return the episode of rows whose reward was given after their action; the last frame, not stored, is repeated."""
    obs = {name: np.stack([*values, values[-1]]) for name, values in rows.items() if name not in ("action", "reward")}
    action = np.stack(rows["action"])
    reward = np.append(np.zeros(1, np.float32), np.asarray(rows["reward"], np.float32))
    return Episode(obs, np.append(action, action[-1:] * 0, axis=0), reward, terminated, source)


def _read_parquet(path: Path) -> Iterator[Episode]:
    require("pyarrow")
    from PIL import Image
    from pyarrow import ArrowException, parquet

    needed = ("observation", "action", "reward", "terminated", "truncated")
    for file in [path] if path.is_file() else sorted(path.glob("**/*.parquet")):
        rows: dict[str, list] = {"observation": [], "action": [], "reward": []}
        number = 0
        try:
            with parquet.ParquetFile(file) as table:
                if missing := set(needed) - set(table.schema_arrow.names):
                    raise CommandError(f"{file}: {sorted(missing)[0]}: expected columns {', '.join(needed)}")
                for batch in table.iter_batches(batch_size=256, columns=list(needed)):
                    for row in batch.to_pylist():
                        picture = row["observation"]
                        if isinstance(picture, dict):
                            with Image.open(io.BytesIO(picture["bytes"])) as image:
                                picture = np.asarray(image.convert("RGB"))
                        rows["observation"].append(np.asarray(picture, np.uint8))
                        rows["action"].append(np.asarray(row["action"]))
                        rows["reward"].append(row["reward"])
                        if row["terminated"] or row["truncated"]:
                            yield close_rows(rows, bool(row["terminated"]), f"{file}, episode {number}")
                            rows, number = {name: [] for name in rows}, number + 1
        except (ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise CommandError(f"{file}: expected rows of {', '.join(needed)}: {error}") from None
        if len(rows["reward"]) > 1:  # the shard ends in the middle of an episode
            yield close_rows(rows, False, f"{file}, episode {number}")


def _read_minari(path: Path) -> Iterator[Episode]:
    minari = require("minari")
    try:
        dataset = minari.MinariDataset(path / "data" if (path / "data").is_dir() else path)
        for one in dataset.iterate_episodes():
            source = f"{path}, episode {one.id}"
            obs = dict(_flatten(one.observations if isinstance(one.observations, dict) else {"obs": one.observations}))
            action, reward = np.asarray(one.actions), np.asarray(one.rewards, np.float32)
            action, reward = np.append(action, action[-1:] * 0, axis=0), np.append(np.zeros(1, np.float32), reward)
            yield Episode(obs, action, reward, bool(one.terminations[-1]), source)
    except (OSError, KeyError, ValueError, ImportError, AssertionError, IndexError) as error:
        raise CommandError(f"{path}: expected a dataset of Minari: {error}") from None


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}/")
        else:
            yield prefix + name, np.asarray(value)


def _read_lerobot(path: Path) -> Iterator[Episode]:
    module = require("lerobot.datasets.lerobot_dataset")
    try:
        dataset = module.LeRobotDataset(path.name, root=path)
        rows: dict[str, list] = {}
        done: list[bool] = []
        terminal = False
        for index in range(len(dataset)):
            frame = dataset[index]
            if rows and int(frame["frame_index"]) == 0:
                yield _close_frames(rows, done, terminal, source)
                rows, done = {}, []
            source = f"{path}, episode {int(frame['episode_index'])}"
            for name, value in frame.items():
                if name.startswith("observation.images.") or name == "observation.image":
                    pixels = (value.permute(1, 2, 0) * 255).round().byte().numpy()  # (C, H, W) in [0, 1]
                    rows.setdefault(_camera(name), []).append(pixels)
                elif name.startswith("observation."):
                    rows.setdefault(name.removeprefix("observation."), []).append(value.float().numpy())
            rows.setdefault("action", []).append(frame["action"].numpy())
            for name in ("next.reward", "next.done"):
                if name not in frame:
                    raise CommandError(f"{path}: {name}: expected it among the features, to learn from")
            rows.setdefault("reward", []).append(float(frame["next.reward"]))
            done.append(bool(frame["next.done"]))
            terminal = done[-1] and not bool(frame.get("next.truncated", False))
        if rows:
            yield _close_frames(rows, done, terminal, source)
    except (OSError, KeyError, ValueError, RuntimeError, IndexError) as error:
        raise CommandError(f"{path}: expected a dataset of LeRobot: {error}") from None


def _camera(name: str) -> str:
    return f"pixels/{name.removeprefix('observation.images.')}" if name != "observation.image" else "image"


def _close_frames(rows: dict[str, list], done: list[bool], terminal: bool, source: str) -> Episode:
    """Return the episode of frames whose reward was given after their action.

    If the last frame but one is done already, the last is the observation that it led to, as this project writes it.
    """
    if len(done) < 2 or not done[-2]:
        return close_rows(rows, terminal, source)
    obs = {name: np.stack(values) for name, values in rows.items() if name not in ("action", "reward")}
    reward = np.asarray([0.0, *rows["reward"][:-1]], np.float32)
    return Episode(obs, np.stack(rows["action"]), reward, terminal, source)


READERS: dict[str, Callable[[Path], Iterator[Episode]]] = {
    "npz": _read_npz,
    "parquet": _read_parquet,
    "minari": _read_minari,
    "lerobot": _read_lerobot,
}
