"""Recorded episodes of a play, as files that can be played again.

``<name>.npz`` holds the ``seed`` of the start and every ``action (A, ...)`` since then, each chosen after the frame of
its step. For ``T`` steps, from step ``begin`` on (0, unless the play was very long), it holds ``reward``, ``is_first``,
``is_last``, ``is_terminal (T,)`` of the simulator; ``real/<camera>`` and ``dream/<camera>``, uint8 ``(T, H, W, 3)``;
``real/value``, ``real/continue``, ``real/surprise``, ``dream/reward``, ``dream/value``, ``dream/continue``,
``dream/error (T,)``, of the first dream. ``<name>.gif`` shows both sides.
"""

from __future__ import annotations

import io
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from sheeplike.files import open_regular, write_atomically
from sheeplike.monitor.video import encode_gif
from sheeplike.options import CommandError

MIN_HEIGHT = 192  # pixels of each camera in the film
MOST_SEED = 2**31 - 1


@dataclass(frozen=True)
class Recording:
    """Seed and actions of an episode."""

    name: str
    seed: int
    actions: np.ndarray | torch.Tensor  # (A, ...), as the environment takes them


def read(file: Path) -> Recording:
    """Read a recorded episode, or raise a CommandError."""
    try:
        with open_regular(file) as opened, np.load(io.BytesIO(opened.read()), allow_pickle=False) as data:
            recording = Recording(file.stem, int(data["seed"]), data["action"])
    except (OSError, KeyError, ValueError, TypeError, OverflowError, EOFError, BadZipFile, zlib.error) as error:
        raise CommandError(f"{file}: is no recorded episode: {type(error).__name__}: {error}") from None
    if not np.size(recording.actions):
        raise CommandError(f"{file}: holds no action")
    if not 0 <= recording.seed <= MOST_SEED:
        raise CommandError(f"{file}: seed={recording.seed}: expected from 0 to {MOST_SEED}")
    return recording


def write(place: Path, episode: Mapping[str, np.ndarray], fps: float) -> str:
    """Write an episode and its film under a free name, and return it."""
    place.mkdir(parents=True, exist_ok=True)
    stem = f"seed_{episode['seed']}_{len(episode['action'])}_steps"
    names = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
    name = next(name for name in names if not (place / f"{name}.npz").exists())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **episode)
    video, enlarged = film(episode)
    write_atomically(place / f"{name}.gif", encode_gif(video, fps, enlarged))
    write_atomically(place / f"{name}.npz", buffer.getvalue())
    return name


def film(episode: Mapping[str, np.ndarray]) -> tuple[torch.Tensor, int]:
    """Join the real side (left) and the dream: uint8 ``(T, H, W, 3)``, and the factor to enlarge it by."""
    cameras = [key.removeprefix("real/") for key in episode if key.startswith("real/") and episode[key].ndim == 4]
    rows = [np.concatenate([episode[f"real/{camera}"], episode[f"dream/{camera}"]], 2) for camera in cameras]
    widest = max(row.shape[2] for row in rows)
    padded = [np.pad(row, ((0, 0), (0, 0), (0, widest - row.shape[2]), (0, 0))) for row in rows]
    return torch.from_numpy(np.concatenate(padded, 1)), -(-MIN_HEIGHT // min(row.shape[1] for row in rows))


def list_names(place: Path) -> list[str]:
    """Return the names of the episodes recorded in a directory."""
    return sorted(file.stem for file in place.glob("*.npz")) if place.is_dir() else []
