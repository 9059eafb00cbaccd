"""Writers of recorded episodes; what is on the disk is whole at any time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from sheeplike.data.episodes import Episode, fit
from sheeplike.data.reading import FACTS, expecting, read, require
from sheeplike.files import sync_directory, write_atomically
from sheeplike.options import CommandError

Format = Literal["npz", "minari", "lerobot"]
Spaces = Mapping[str, gymnasium.Space]


class NpzWriter:
    """A file per episode, and ``recording.json`` with what is the same for all.

    A file holds the observations under their names, ``(T + 1, ...)``; ``action`` and ``reward``, ``(T, ...)``, as
    ``env.step`` took and gave them; ``terminated`` and ``truncated``; and facts such as ``success``. An existing
    recording of the same environment goes on.

    Raises:
        CommandError: the directory holds something else.
    """

    def __init__(self, place: Path, facts: Mapping[str, Any]) -> None:
        self.place, known = place, place / FACTS
        facts = json.loads(json.dumps(facts))
        if known.is_file():
            with expecting(known, "the facts of a recording"):
                before = dict(json.loads(known.read_text(encoding="utf-8")))
            if changed := [key for key in sorted(facts | before) if before.get(key) != facts.get(key)]:
                key = changed[0]
                raise CommandError(f"to={place}: {key}: found {before.get(key)}, expected {facts.get(key)}")
        elif place.exists() and (place.is_file() or any(place.iterdir())):
            raise CommandError(f"to={place}: expected an empty directory or a recording; nearest: to={place}_2")
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(known, json.dumps(facts, indent=1) + "\n")
        numbers = [int(path.stem[len("episode_") :]) for path in place.glob("episode_" + "[0-9]" * 6 + ".npz")]
        self.written, self._next = len(numbers), max(numbers, default=-1) + 1

    def add(self, episode: Episode) -> None:
        data = io.BytesIO()
        facts = {"terminated": episode.terminal, "truncated": not episode.terminal, **episode.info}
        np.savez_compressed(data, **episode.obs, action=episode.action[:-1], reward=episode.reward[1:], **facts)
        write_atomically(self.place / f"episode_{self._next:06d}.npz", data.getvalue())
        self._next, self.written = self._next + 1, self.written + 1


@contextlib.contextmanager
def _whole(place: Path) -> Iterator[Path]:
    """Give the name of a temporary sibling, which becomes ``place`` if nothing is raised and vanishes otherwise."""
    if place.exists():
        raise CommandError(f"to={place}: exists already; nearest: to={place}_2")
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        os.replace(temporary, place)
        sync_directory(place.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _recorded(parts: Path, spaces: Spaces) -> Iterator[Episode]:
    observations = {key: space for key, space in spaces.items() if key != "action"}
    return (fit(episode, observations, spaces["action"], {}) for episode in read(parts, "npz"))


def to_minari(parts: Path, place: Path, spaces: Spaces) -> None:
    """Convert a recording of npz files into a dataset of Minari, whole or absent; frames stay exact.

    Args:
        spaces: observations by name, and ``action``.
    """
    minari = require("minari")
    storage, buffer = require("minari.dataset.minari_storage"), require("minari.data_collector").EpisodeBuffer
    nested = _nest({key: space for key, space in spaces.items() if key != "action"})
    space = Dict({key: Dict(value) if isinstance(value, dict) else value for key, value in nested.items()})

    def buffers() -> Iterator[Any]:
        for episode in _recorded(parts, spaces):
            steps = len(episode) - 1
            ends = np.arange(1, steps + 1) == steps
            yield buffer(
                observations=_nest(episode.obs),
                actions=episode.action[:-1],
                rewards=episode.reward[1:],
                terminations=ends & episode.terminal,
                truncations=ends & (not episode.terminal),
            )

    with _whole(place) as temporary:
        (temporary / "data").mkdir(parents=True)
        made = storage.MinariStorage.new(temporary / "data", space, spaces["action"], jpeg_encoding=False)
        name = re.sub(r"\W", "_", place.name)
        made.update_metadata({"dataset_id": f"{name}-v0", "minari_version": minari.__version__})
        made.update_episodes(buffers())


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"pixels": {"front": …}}`` for ``{"pixels/front": …}``: HDF5 takes a slash for a group."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *groups, name = key.split("/", 1)
        (tree.setdefault(groups[0], {}) if groups else tree)[name] = value
    return tree


def to_lerobot(parts: Path, place: Path, fps: float, spaces: Spaces, *, task: str = "", videos: bool = True) -> None:
    """Convert a recording of npz files into a dataset of LeRobot v3.0, whole or absent.

    The observation that the last action led to is one frame more, with a neutral action: it and the frame before have
    ``next.done``, and ``next.truncated`` if a limit of time ended the episode.

    Args:
        spaces: observations by name, and ``action``.
        task: what is done, in words; None: the name of ``place``.
        videos: store cameras as videos, which are lossy; otherwise, and if ``fps`` is no whole number, which LeRobot's
            videos need, as exact images.
    """
    module = require("lerobot.datasets.lerobot_dataset")
    if fps == int(fps):
        fps = int(fps)
    videos = videos and isinstance(fps, int)
    names, features = {"action": "action"}, {}
    for key, space in spaces.items():
        image, kind = key.startswith("pixels/"), "float32" if isinstance(space, Box) else "int64"
        feature = re.sub("^pixels/", "images/", key).replace("/", ".")
        names.setdefault(key, f"observation.{feature}")
        features[names[key]] = {
            "dtype": ("video" if videos else "image") if image else kind,
            "shape": space.shape or (1,),
            "names": ["height", "width", "channels"] if image else None,
        }
    for name, kind in (("next.reward", "float32"), ("next.done", "bool"), ("next.truncated", "bool")):
        features[name] = {"dtype": kind, "shape": (1,), "names": None}
    with _whole(place) as temporary:
        made = module.LeRobotDataset.create(place.name, fps, features, root=temporary, use_videos=videos)
        for episode in _recorded(parts, spaces):
            done = np.arange(len(episode)) >= len(episode) - 2
            frames = {names[key]: value for key, value in {**episode.obs, "action": episode.action}.items()}
            frames["next.reward"] = np.append(episode.reward[1:], np.float32(0))
            frames |= {"next.done": done, "next.truncated": done & (not episode.terminal)}
            for t in range(len(episode)):
                frame = {name: value[t].reshape(features[name]["shape"]) for name, value in frames.items()}
                made.add_frame({**frame, "task": task or place.name})
            for name in frames:
                if features[name]["shape"] == (1,):  # from numpy 2.4 on, such an array is no number for datasets
                    made.episode_buffer[name] = np.concatenate(made.episode_buffer[name])
            made.save_episode(parallel_encoding=False)
        made.finalize()
        shutil.rmtree(temporary / "images", ignore_errors=True)  # empty by now


class Recording(NpzWriter):
    """A recording in any layout: npz files, converted as a whole once :meth:`finish` is called.

    Until then the files of another layout lie beside the place, in ``<place>.npz``: a killed recording goes on.
    """

    def __init__(self, place: Path, facts: Mapping[str, Any], layout: Format, spaces: Spaces) -> None:
        self._final, self._layout, self._spaces, self._fps = place, layout, spaces, facts["fps"]
        if layout != "npz":
            require(layout)
            if place.exists():
                raise CommandError(f"to={place}: exists; a dataset of {layout} is written once; nearest: to={place}_2")
            place = place.with_name(f"{place.name}.npz")
        super().__init__(place, facts)

    def finish(self) -> None:
        """Convert the files, if another layout is asked for, and remove them."""
        if self._layout != "npz":
            if self._layout == "minari":
                to_minari(self.place, self._final, self._spaces)
            else:
                to_lerobot(self.place, self._final, self._fps, self._spaces)
            shutil.rmtree(self.place)
