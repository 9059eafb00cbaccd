"""Videos as uint8 tensors ``(T, H, W, 3)``: laying frames out, and encoding them as an animated GIF."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

READABLE = 96  # pixels: of a side of a picture that people look at, at least
BORDER = 2
OBSERVING = (0, 255, 0)
IMAGINING = (255, 0, 0)
TRACE_COLOURS = ((255, 176, 0), (100, 200, 255), (200, 200, 200), (220, 120, 200))
TRACE_HEIGHT = 24  # pixels
LONGEST_FRAME = 655_350  # ms in a GIF
MAX_GIF_FPS = 50  # Browsers slow a GIF down whose frames last less than 20 ms.


def check_video(video: Tensor, name: str = "video") -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``video`` is uint8 ``(T, H, W, 3)`` and holds a frame."""
    if not isinstance(video, Tensor) or video.dtype != torch.uint8:
        got = video.dtype if isinstance(video, Tensor) else type(video).__name__
        raise TypeError(f"{name} is {got}: expected a torch.uint8 tensor")
    if video.dim() != 4 or video.shape[-1] != 3 or video.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(video.shape)}: expected (T, H, W, 3), T at least 1")


def encode_gif(video: Tensor, fps: float, enlarged: int = 1) -> bytes:
    """An animated GIF that loops for ever, at the speed of ``fps`` frames per second; above 50 it leaves frames out.

    All frames share one palette of 256 colours, so that nothing flickers.

    Args:
        video: uint8 ``(T, H, W, 3)``.
        enlarged: how often each pixel is repeated, across and down.

    Raises:
        TypeError, ValueError: another dtype or shape, or ``fps`` not above 0.
    """
    check_video(video)
    if not fps > 0:
        raise ValueError(f"fps={fps}: expected a number above 0")
    size = video.shape[2] * enlarged, video.shape[1] * enlarged
    stride = math.ceil(fps / MAX_GIF_FPS)
    images = [image.resize(size) for image in _to_palette(video[::stride].detach().cpu().numpy())]
    # In units of 10 ms. Rounding the frames' ends, not their lengths, keeps the whole video's length right.
    ends = [round(i * 100 * stride / fps) for i in range(len(images) + 1)]
    durations = [min(10 * (end - start), LONGEST_FRAME) for start, end in itertools.pairwise(ends)]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return buffer.getvalue()


def _to_palette(frames: np.ndarray) -> list[Image.Image]:
    """Frames in the 256 colours that suit a sample of all pixels; fitting them frame by frame is many times slower."""
    pixels = frames.reshape(-1, 3)
    sample = pixels[np.random.default_rng(0).integers(len(pixels), size=min(len(pixels), 32_768))]
    palette = Image.fromarray(sample[None]).quantize(256, method=Image.Quantize.MEDIANCUT)
    # The nearest palette entry of every colour, at 6 bits a channel: one look-up per pixel instead of a search.
    levels = np.arange(2, 256, 4, dtype=np.uint8)
    cube = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), -1).reshape(512, 512, 3)
    nearest = np.asarray(Image.fromarray(cube).quantize(palette=palette, dither=Image.Dither.NONE)).ravel()
    images = []
    for frame in frames:
        red, green, blue = (frame[..., i].astype(np.int32) >> 2 for i in range(3))
        images.append(Image.fromarray(nearest[red << 12 | green << 6 | blue]))
        images[-1].putpalette(palette.getpalette())
    return images


def to_colour(frames: Tensor) -> Tensor:
    """Frames of any channels as people see them: uint8 ``(..., C)`` to ``(..., 3)``.

    Shows the newest, last of stacked colour frames, and of any other number of channels the last one in grey. Three
    stacked grey frames look like colours: what moves has coloured edges.
    """
    channels = frames.shape[-1]
    return frames[..., -3:] if channels % 3 == 0 else frames[..., -1:].expand(*frames.shape[:-1], 3)


def enlarge(frames: Tensor) -> Tensor:
    """Frames ``(..., H, W, C)`` whose pixels are repeated, a whole number of times, until each side is ``READABLE``."""
    factor = math.ceil(READABLE / min(frames.shape[-3:-1]))
    return frames.repeat_interleave(factor, -3).repeat_interleave(factor, -2)


def label_rows(video: Tensor, labels: Sequence[str]) -> Tensor:
    """The video with a name to the left of each of its rows, which are equally high.

    Args:
        video: uint8 ``(T, H, W, 3)``.
    """
    font, height = ImageFont.load_default(), video.shape[1] // len(labels)
    width = 8 + math.ceil(max(font.getlength(label) for label in labels))
    image = Image.new("RGB", (width, video.shape[1]))
    for row, label in enumerate(labels):
        ImageDraw.Draw(image).text((4, int((row + 0.5) * height) - 6), label, font=font)
    margin = torch.from_numpy(np.array(image)).to(video.device)
    return torch.cat([margin.expand(len(video), -1, -1, -1), video], 2)


def tile_envs(frames: Tensor, rows: int, cols: int) -> Tensor:
    """The first ``rows * cols`` worlds side by side, row by row; black where there are fewer.

    Args:
        frames: uint8 ``(T, N, H, W, C)``, shown as :func:`to_colour` does.

    Returns:
        uint8 ``(T, rows * H, cols * W, 3)``.
    """
    frames = to_colour(frames)
    steps, worlds, height, width, channels = frames.shape
    shown = min(worlds, rows * cols)
    grid = frames.new_zeros(steps, rows * cols, height, width, channels)
    grid[:, :shown] = frames[:, :shown]
    grid = grid.view(steps, rows, cols, height, width, channels).permute(0, 1, 3, 2, 4, 5)
    return grid.reshape(steps, rows * height, cols * width, channels)


def open_loop_video(truth: Tensor, model: Tensor, context: int) -> Tensor:
    """Rows of what happened, what the world model expects and its error, one column per sequence.

    The error is ``(model - truth + 255) / 2``: grey where they agree. Panels have a green border while the model
    observes (``t < context``), and a red one once it imagines from the actions alone, as in ``danijar/dreamerv3``.

    Args:
        truth, model: uint8 ``(T, B, H, W, C)``, shown as :func:`to_colour` does.
        context: number of frames that the model observes, 0 to ``T``.

    Returns:
        uint8 ``(T, 3 * (H + 2 * BORDER), B * (W + 2 * BORDER), 3)``.

    Raises:
        TypeError, ValueError: other dtypes, shapes, or ``context`` out of range.
    """
    if truth.dtype != torch.uint8 or model.dtype != torch.uint8:
        raise TypeError(f"truth is {truth.dtype}, model {model.dtype}: expected torch.uint8")
    if truth.dim() != 5 or truth.shape != model.shape:
        raise ValueError(f"truth is {tuple(truth.shape)}, model {tuple(model.shape)}: expected one (T, B, H, W, C)")
    truth, model = to_colour(truth), to_colour(model)
    steps, batch, height, width, _ = truth.shape
    if not 0 <= context <= steps:
        raise ValueError(f"context={context}: expected 0 to T={steps}")
    error = ((model.int() - truth.int() + 255) // 2).to(torch.uint8)
    canvas = truth.new_zeros(steps, 3, batch, height + 2 * BORDER, width + 2 * BORDER, 3)
    canvas[:context] = torch.tensor(OBSERVING, dtype=torch.uint8, device=truth.device)
    canvas[context:] = torch.tensor(IMAGINING, dtype=torch.uint8, device=truth.device)
    canvas[:, :, :, BORDER:-BORDER, BORDER:-BORDER] = torch.stack([truth, model, error], 1)
    canvas = canvas.permute(0, 1, 3, 2, 4, 5)
    return canvas.reshape(steps, 3 * (height + 2 * BORDER), batch * (width + 2 * BORDER), 3)


def dream_video(seen: Tensor, model: Tensor, traces: Mapping[str, Tensor]) -> Tensor:
    """What was seen, then what the model dreams, above what it expects; one column per dream.

    Panels have a green border while the frames are real, a red one in the dream. Below, each trace is drawn up to now,
    with its value; the height of all columns spans the trace's smallest and largest value in the film.

    Args:
        seen: uint8 ``(C, B, H, W, C)``; model: uint8 ``(I, B, H, W, C)``. Shown as :func:`to_colour` does,
            and as large as :func:`enlarge` makes them.
        traces: name to ``(I, B)``.

    Returns:
        uint8 ``(C + I, H' + 2 * BORDER + traces * TRACE_HEIGHT, B * (W' + 2 * BORDER), 3)``.

    Raises:
        TypeError, ValueError: other dtypes or shapes.
    """
    if seen.dtype != torch.uint8 or model.dtype != torch.uint8:
        raise TypeError(f"seen is {seen.dtype}, model {model.dtype}: expected torch.uint8")
    if seen.dim() != 5 or seen.shape[1:] != model.shape[1:] or any(v.shape != model.shape[:2] for v in traces.values()):
        shapes = [tuple(x.shape) for x in (seen, model, *traces.values())]
        raise ValueError(f"shapes {shapes}: expected (C, B, H, W, C), (I, B, H, W, C) and (I, B) of each trace")
    context, frames = len(seen), enlarge(to_colour(torch.cat([seen, model])).cpu())
    steps, batch, height, width, _ = frames.shape
    wide, high = width + 2 * BORDER, height + 2 * BORDER
    canvas = frames.new_zeros(steps, batch, high + len(traces) * TRACE_HEIGHT, wide, 3)
    canvas[:context, :, :high] = torch.tensor(OBSERVING, dtype=torch.uint8)
    canvas[context:, :, :high] = torch.tensor(IMAGINING, dtype=torch.uint8)
    canvas[:, :, BORDER : BORDER + height, BORDER : BORDER + width] = frames
    for number, (name, values) in enumerate(traces.items()):
        colour, top = TRACE_COLOURS[number % len(TRACE_COLOURS)], high + number * TRACE_HEIGHT
        low, most = values.min().item(), values.max().item()
        for column in range(batch):
            strips = _trace(name, values[:, column].tolist(), low, most, wide, colour)
            canvas[context:, column, top : top + TRACE_HEIGHT] = strips
    return canvas.permute(0, 2, 1, 3, 4).reshape(steps, canvas.shape[2], batch * wide, 3)


def _trace(name: str, values: list[float], low: float, high: float, width: int, colour: tuple[int, int, int]) -> Tensor:
    """A curve that grows, under its name and newest value: uint8 ``(I, TRACE_HEIGHT, width, 3)``."""
    spread, last = max(high - low, 1e-9), max(len(values) - 1, 1)
    at = [(2 + n / last * (width - 5), TRACE_HEIGHT - 3 - (v - low) / spread * 10) for n, v in enumerate(values)]
    strips = []
    for now, value in enumerate(values):
        image = Image.new("RGB", (width, TRACE_HEIGHT))
        draw = ImageDraw.Draw(image)
        draw.text((2, 0), f"{name} {value:.2f}", fill=colour)
        if now:
            draw.line(at[: now + 1], fill=colour)
        strips.append(np.asarray(image))
    return torch.from_numpy(np.stack(strips))
