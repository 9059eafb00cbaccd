"""Recorded episodes of a play, as files that can be played again.

``<name>.npz`` holds the arrays that ``howto/play_in_the_dream.md`` lists.
``<name>.gif`` is a figure: what people see, what the agent sees and the dream, above curves of both and a caption.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from sheeplike.files import open_regular, write_atomically
from sheeplike.monitor.video import encode_gif
from sheeplike.options import CommandError

MOST_SEED = 2**31 - 1
PLACED = "placed/"  # prefix of what was dragged
MAX_BYTES = 2**26  # limit of what is read
MAX_FRAMES = 400  # of a film; of a longer play frames are left out
SIDE, CURVE, MARGIN = 192, 44, 10  # heights of a picture and of a curve, and a distance, in pixels
CURVES = ("reward", "value", "error")
INK, SOFT, RULE = (29, 31, 34), (120, 124, 130), (223, 223, 218)
REAL, DREAM, SEES = (35, 104, 169), (194, 87, 26), (40, 150, 70)


@dataclass(frozen=True)
class Recording:
    """Seed and actions of an episode."""

    name: str
    seed: int
    actions: np.ndarray | torch.Tensor  # (A, ...), as the environment takes them
    moves: Mapping[str, np.ndarray] = field(default_factory=dict)  # name to (A, 3), NaN where nothing was dragged

    def placed(self, step: int) -> dict[str, np.ndarray]:
        """Return the positions to which things are dragged before an action."""
        return {name: moves[step] for name, moves in self.moves.items() if np.isfinite(moves[step]).all()}


def read(file: Path) -> Recording:
    """Read a recorded episode, or raise a CommandError."""
    try:
        with open_regular(file) as opened, np.load(opened, allow_pickle=False) as data:
            names = {name for name in data.files if name in ("seed", "action") or name.startswith(PLACED)}
            size = sum(one.file_size for one in data.zip.infolist() if one.filename.removesuffix(".npy") in names)
            if size > MAX_BYTES:
                raise ValueError(f"it unpacks to {size:,} bytes: expected at most {MAX_BYTES:,}")
            found = {name: data[name] for name in names}
        moves = {name.removeprefix(PLACED): found[name].astype(np.float32) for name in found if PLACED in name}
        recording = Recording(file.stem, int(found["seed"]), found["action"], moves)
        if not np.size(recording.actions) or any(move.shape != (len(recording.actions), 3) for move in moves.values()):
            raise ValueError(f"expected actions, and three numbers of {PLACED}* for each")
    except Exception as error:  # NumPy raises many kinds, with advice to unpickle
        reason = error if type(error) is ValueError and "pickle" not in str(error) else "it cannot be read"
        raise CommandError(f"{file}: is no recorded episode: {reason}") from None
    if not 0 <= recording.seed <= MOST_SEED:
        raise CommandError(f"{file}: seed={recording.seed}: expected from 0 to {MOST_SEED}")
    return recording


def write(place: Path, episode: Mapping[str, np.ndarray], fps: float, scene: Sequence[np.ndarray | None] = ()) -> str:
    """Write an episode and its film under a free name, and return it; ``scene``: what people see at each step."""
    place.mkdir(parents=True, exist_ok=True)
    stem = f"seed_{episode['seed']}_{len(episode['action'])}_steps"
    names = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
    name = next(name for name in names if not (place / f"{name}.npz").exists())
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **episode)
    stride = -(-len(episode["reward"]) // MAX_FRAMES)
    write_atomically(place / f"{name}.gif", encode_gif(film(episode, fps, scene, stride), fps / stride))
    write_atomically(place / f"{name}.npz", buffer.getvalue())
    return name


def film(
    episode: Mapping[str, np.ndarray], fps: float, scene: Sequence[np.ndarray | None] = (), stride: int = 1
) -> torch.Tensor:
    """Draw every ``stride``-th step of an episode as a figure: uint8 ``(T, H, W, 3)``.

    A picture of the dream has a green border where it was shown the real one, and an orange one where it is imagined.
    """
    columns = [("scene", scene)] if any(frame is not None for frame in scene) else []
    for side, title in (("real", "simulator, as the agent sees it"), ("dream", "dream, imagined")):
        found = [values for key, values in episode.items() if key.startswith(f"{side}/") and values.ndim == 4]
        columns += [(title, values) for values in found]
    frames = []
    for step in range(0, len(episode["reward"]), stride):
        blind = int(episode["dream/blind"][step])
        pictures = [(title, _enlarged(column[step])) for title, column in columns]
        width = sum(one.width + MARGIN for _, one in pictures) + MARGIN
        image = Image.new("RGB", (width, SIDE + 2 * MARGIN + len(CURVES) * CURVE + 44), (255, 255, 255))
        draw, x = ImageDraw.Draw(image), MARGIN
        draw.font = ImageFont.load_default(12)
        for title, one in pictures:
            draw.text((x, 6), title, INK)
            image.paste(one, (x, 24))
            if title.startswith("dream"):
                draw.rectangle((x - 2, 22, x + one.width + 1, 25 + SIDE), outline=DREAM if blind else SEES, width=2)
            x += one.width + MARGIN
        for n, name in enumerate(CURVES):
            _curve(draw, episode, name, step, 24 + SIDE + MARGIN + n * CURVE, width - MARGIN)
        decibels = -10 * math.log10(max(float(episode["dream/error"][step]), 1e-12))
        told = f"has been blind for {blind} steps ({blind / fps:.1f} s)" if blind else "begins with the real frame"
        told = f"step {int(episode['begin']) + step} · the dream {told} · {decibels:.1f} dB"
        draw.text((MARGIN, image.height - 24), told, INK)
        frames.append(np.asarray(image))
    return torch.from_numpy(np.stack(frames))


def _enlarged(frame: np.ndarray | None) -> Image.Image:
    """Scale a frame ``(H, W, 3)`` to the height of the film; black where there is none."""
    frame = np.zeros((3, 4, 3), np.uint8) if frame is None else frame
    height, width = frame.shape[:2]
    smooth = Image.Resampling.BILINEAR if height > SIDE / 2 else Image.Resampling.NEAREST
    return Image.fromarray(frame).resize((round(SIDE * width / height), SIDE), smooth)


def _curve(
    draw: ImageDraw.ImageDraw, episode: Mapping[str, np.ndarray], name: str, now: int, top: int, right: int
) -> None:
    """Draw the numbers of both sides up to now, below ``top`` pixels."""
    sides = [(episode[f"dream/{name}"], DREAM)]
    if name != "error":
        sides.insert(0, (episode.get(f"real/{name}", episode.get(name)), REAL))
    low, high = (float(pick([pick(values) for values, _ in sides])) for pick in (np.nanmin, np.nanmax))
    left, last, bottom = MARGIN + 96, max(len(episode["reward"]) - 1, 1), top + CURVE - 10
    across = [left + n / last * (right - left) for n in range(last + 1)]
    draw.text((MARGIN, top), name, INK)
    draw.text((MARGIN, top + 15), f"{low:.2g} to {high:.2g}", SOFT)
    draw.line((left, bottom, right, bottom), RULE)
    for step in np.flatnonzero(episode["dream/blind"] == 0):  # where a dream begins
        draw.line((across[step], top, across[step], bottom), SEES)
    for values, colour in sides:
        heights = bottom - (np.nan_to_num(values, nan=low) - low) / max(high - low, 1e-9) * (bottom - top)
        draw.line([(x, y) for x, y in zip(across[: now + 1], heights[: now + 1].tolist(), strict=True)], colour, 2)


def list_names(place: Path) -> list[str]:
    """Return the names of the episodes recorded in a directory."""
    return sorted(file.stem for file in place.glob("[!.]*.npz")) if place.is_dir() else []
