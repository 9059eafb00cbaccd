"""Writers of recorded episodes; what is on the disk is whole at any time."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sheeplike.data.episodes import Episode
from sheeplike.data.reading import FACTS, require
from sheeplike.files import write_atomically
from sheeplike.options import CommandError

Format = Literal["npz", "minari", "lerobot"]


class NpzWriter:
    """A file per episode, and ``recording.json`` with what is the same for all.

    A file holds the observations under their names, ``(T + 1, ...)``; ``action`` and ``reward``, ``(T, ...)``, as
    ``env.step`` took and gave them; ``terminated`` and ``truncated``; and facts such as ``success``. An existing
    recording of the same environment goes on.

    Raises:
        CommandError: the directory holds something else.
    """

    def __init__(self, place: Path, facts: Mapping[str, Any]) -> None:
        self.place = place
        known = place / FACTS
        if known.is_file():
            if (before := json.loads(known.read_text(encoding="utf-8"))) != facts:
                changed = sorted(key for key in facts if before.get(key) != facts[key])
                raise CommandError(f"to={place}: holds a recording with another {', '.join(changed)}: expected its own")
        elif place.is_dir() and any(place.iterdir()):
            raise CommandError(f"to={place}: expected an empty directory or a recording; nearest: to={place}_2")
        place.mkdir(parents=True, exist_ok=True)
        write_atomically(known, json.dumps(facts, indent=1) + "\n")
        numbers = [int(path.stem.split("_")[1]) for path in place.glob("episode_*.npz")]
        self.written, self._next = len(numbers), max(numbers, default=-1) + 1

    def add(self, episode: Episode) -> None:
        data = io.BytesIO()
        ends = {"terminated": np.bool_(episode.terminal), "truncated": np.bool_(not episode.terminal)}
        np.savez_compressed(
            data, **episode.obs, action=episode.action[:-1], reward=episode.reward[1:], **ends, **episode.info
        )
        write_atomically(self.place / f"episode_{self._next:06d}.npz", data.getvalue())
        self._next, self.written = self._next + 1, self.written + 1


class Recording(NpzWriter):
    """A recording in any layout: npz files, converted as a whole once :meth:`finish` is called.

    Until then the files of another layout lie beside the place, in ``<place>.npz``: a killed recording goes on.
    """

    def __init__(self, place: Path, facts: Mapping[str, Any], layout: Format, spaces: tuple[Any, Any]) -> None:
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
            CONVERTERS[self._layout](self.place, self._final, self._fps, self._spaces)
            shutil.rmtree(self.place)
