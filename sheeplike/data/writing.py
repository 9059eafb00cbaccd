"""Writers of recorded episodes; what is on the disk is whole at any time."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

from sheeplike.data.episodes import Episode, fit
from sheeplike.data.reading import FACTS, FLAGS, MARKS, expecting, read, require
from sheeplike.files import lock, open_regular, sync_directory, write_atomically
from sheeplike.options import CommandError

Spaces = Mapping[str, gymnasium.Space]
LOCK = ".lock"
TAKEN = {"action", "reward", "policy", "file", "allow_pickle", "image_t", *FLAGS, *MARKS}  # numpy or readers use them


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
        self._locked = open_regular(place / LOCK, "ab")  # until this object goes
        try:
            lock(self._locked.fileno())
        except BlockingIOError:
            raise CommandError(f"to={place}: another program records there; nearest: to={place}_2") from None
        numbers = [int(path.stem[len("episode_") :]) for path in place.glob("episode_" + "[0-9]" * 6 + ".npz")]
        self.written, self._next = len(numbers), max(numbers, default=-1) + 1

    def add(self, episode: Episode) -> Path:
        """Write an episode; return its file."""
        data = io.BytesIO()
        facts = {"terminated": episode.terminal, "truncated": not episode.terminal, **episode.info}
        np.savez_compressed(data, **episode.obs, action=episode.action[:-1], reward=episode.reward[1:], **facts)
        file = self.place / f"episode_{self._next:06d}.npz"
        write_atomically(file, data.getvalue())
        self._next, self.written = self._next + 1, self.written + 1
        return file


def to_minari(episodes: Iterable[Episode], place: Path, name: str, spaces: Spaces, fps: float) -> None:
    """Write a dataset of Minari; frames stay exact, ``pixels/front`` is ``pixels.front``, infos hold the marks."""
    minari = require("minari")
    storage, buffer = require("minari.dataset.minari_storage"), require("minari.data_collector").EpisodeBuffer
    observed = Dict({key.replace("/", "."): space for key, space in spaces.items() if key != "action"})

    def buffers() -> Iterator[Any]:
        for episode in episodes:
            ends = np.arange(1, len(episode)) == len(episode) - 1
            yield buffer(
                observations={key.replace("/", "."): value for key, value in episode.obs.items()},
                actions=episode.action[:-1],
                rewards=episode.reward[1:],
                terminations=ends & episode.terminal,
                truncations=ends & (not episode.terminal),
                infos={name: np.full(len(episode), mark) for name, mark in episode.info.items()},
            )

    data = (place / "data").resolve()  # Minari joins a relative place with itself
    data.mkdir(parents=True)
    made = storage.MinariStorage.new(data, observed, spaces["action"], jpeg_encoding=False)
    identity = re.sub(r"\W", "_", name)
    made.update_metadata({"dataset_id": f"{identity}-v0", "minari_version": minari.__version__, "fps": fps})
    made.update_episodes(buffers())


def to_lerobot(episodes: Iterable[Episode], place: Path, name: str, spaces: Spaces, fps: float) -> None:
    """Write a dataset of LeRobot v3.0; videos, which are lossy, need whole numbers of frames per second.

    The observation that the last action led to is one frame more, with a neutral action: it and the frame before have
    ``next.done``, ``next.truncated`` if a limit of time ended the episode, and its marks, such as ``next.success``.
    Other frame rates get exact images.
    """
    module = require("lerobot.datasets.lerobot_dataset")
    videos = fps == int(fps)
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
    flags = ("done", "truncated", *MARKS)
    for key, kind in {"reward": "float32", **dict.fromkeys(flags, "bool")}.items():
        features[f"next.{key}"] = {"dtype": kind, "shape": (1,), "names": None}
    made = module.LeRobotDataset.create(name, int(fps) if videos else fps, features, root=place, use_videos=videos)
    for episode in episodes:
        done = np.arange(len(episode)) >= len(episode) - 2
        frames = {names[key]: value for key, value in {**episode.obs, "action": episode.action}.items()}
        frames["next.reward"] = np.append(episode.reward[1:], np.float32(0))
        marks = {"done": True, "truncated": not episode.terminal, **episode.info}
        frames |= {f"next.{key}": done & marks[key] for key in flags}
        for t in range(len(episode)):
            frame = {key: value[t].reshape(features[key]["shape"]) for key, value in frames.items()}
            made.add_frame({**frame, "task": name})
        for key in frames:
            if features[key]["shape"] == (1,):  # from numpy 2.4 on, such an array is no number for datasets
                made.episode_buffer[key] = np.concatenate(made.episode_buffer[key])
        made.save_episode(parallel_encoding=False)
    made.finalize()
    shutil.rmtree(place / "images", ignore_errors=True)  # empty by now


CONVERTERS = {"minari": to_minari, "lerobot": to_lerobot}


class Recording(NpzWriter):
    """A recording in any layout: npz files, converted as a whole once :meth:`finish` is called.

    Until then the files of another layout lie beside the place, in ``<place>.unfinished``: a killed recording goes on.

    Args:
        spaces: observations by name, and ``action``.
    """

    def __init__(self, place: Path, facts: Mapping[str, Any], layout: str, spaces: Spaces) -> None:
        self._final, self._layout, self._spaces, self._fps = place, layout, spaces, facts["fps"]
        if layout != "npz":
            require(layout)
            if place.exists():
                raise CommandError(f"to={place}: exists; a dataset of {layout} is written once; nearest: to={place}_2")
            place = place.with_name(f"{place.name}.unfinished")
        super().__init__(place, facts)

    def finish(self) -> None:
        """Convert the files, if another layout is asked for, and remove them."""
        if self._layout == "npz":
            return
        observations = {key: space for key, space in self._spaces.items() if key != "action"}
        episodes = (fit(one, observations, self._spaces["action"], {}) for one in read(self.place, "npz"))
        converted = self.place / "converted"
        shutil.rmtree(converted, ignore_errors=True)  # a kill may have left it
        CONVERTERS[self._layout](episodes, converted, self._final.name, self._spaces, self._fps)
        os.replace(converted, self._final)
        sync_directory(self._final.parent)
        shutil.rmtree(self.place)
