"""Episodes that were played, as files: what was seen and dreamt, and what it takes to play them again.

``<name>.npz`` holds, of ``T`` steps: ``seed`` of the start; ``begin``, the first step that is in it; ``action
(T - 1, ...)``, each chosen after the frame of its step; ``reward``, ``is_first``, ``is_last``, ``is_terminal (T,)``;
``real/<camera>`` and ``dream/<camera>``, uint8 ``(T, H, W, 3)``; ``value``, ``continue``, ``surprise``, ``error (T,)``.
``<name>.gif`` shows both sides.
"""

from __future__ import annotations

import io
import itertools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sheeplike.files import open_regular, write_atomically
from sheeplike.monitor.video import encode_gif
from sheeplike.options import CommandError

HEIGHT = 192  # pixels of the film, at least


@dataclass(frozen=True)
class Recording:
    """What it takes to play an episode again.

    Attributes:
        actions: ``(T - 1, ...)``, as the environment takes them.
    """

    name: str
    seed: int
    actions: np.ndarray


def read(file: Path) -> Recording:
    """A recorded episode.

    Raises:
        CommandError: it is none.
    """
    try:
        with open_regular(file) as opened, np.load(io.BytesIO(opened.read()), allow_pickle=False) as data:
            recording, begin = Recording(file.stem, int(data["seed"]), data["action"]), int(data["begin"])
    except (OSError, KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise CommandError(f"{file}: is no recorded episode: {type(error).__name__}: {error}") from None
    if not len(recording.actions):
        raise CommandError(f"{file}: holds no action")
    if begin:
        raise CommandError(f"{file}: begins at step {begin}: expected an episode from its first step on")
    return recording


def write(place: Path, episode: Mapping[str, np.ndarray], fps: float) -> str:
    """Write an episode and its film under a name that is free, which is returned.

    Raises:
        OSError: it cannot be written.
    """
    place.mkdir(parents=True, exist_ok=True)
    stem = f"seed_{episode['seed']}_{len(episode['reward'])}_steps"
    names = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
    name = next(name for name in names if not (place / f"{name}.npz").exists())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **episode)
    write_atomically(place / f"{name}.gif", encode_gif(film(episode), fps))
    write_atomically(place / f"{name}.npz", buffer.getvalue())
    return name


def film(episode: Mapping[str, np.ndarray]) -> torch.Tensor:
    """The real side left, the dream right, one camera below the other: uint8 ``(T, H, W, 3)``."""
    cameras = [key.removeprefix("real/") for key in episode if key.startswith("real/")]
    rows = []
    for camera in cameras:
        row = np.concatenate([episode[f"real/{camera}"], episode[f"dream/{camera}"]], 2)
        scale = -(-HEIGHT // row.shape[1])
        rows.append(row.repeat(scale, 1).repeat(scale, 2))
    widest = max(row.shape[2] for row in rows)
    rows = [np.pad(row, ((0, 0), (0, 0), (0, widest - row.shape[2]), (0, 0))) for row in rows]
    return torch.from_numpy(np.concatenate(rows, 1))


def list_names(place: Path) -> list[str]:
    """Names of the episodes recorded in a directory."""
    return sorted(file.stem for file in place.glob("*.npz")) if place.is_dir() else []
