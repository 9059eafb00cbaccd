"""Videos as uint8 tensors ``(T, H, W, 3)``: layout of frames, and encoding as an animated GIF."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

READABLE = 96  # minimum side in pixels of a picture for people
BORDER = 2
OBSERVING = (0, 255, 0)
IMAGINING = (255, 0, 0)
TRACE_COLOURS = ((255, 176, 0), (100, 200, 255), (200, 200, 200), (220, 120, 200))
TRACE_HEIGHT = 24  # pixels
LONGEST_FRAME = 655_350  # ms, the limit of the format
MAX_GIF_FPS = 50  # browsers slow a GIF down whose frames last less than 20 ms


def check_video(video: Tensor) -> None:
    """Assert that ``video`` is uint8 ``(T, H, W, 3)`` and holds a frame."""
    assert video.dtype == torch.uint8, video.dtype
    assert video.dim() == 4, video.shape
    assert video.shape[-1] == 3, video.shape
    assert video.numel(), video.shape


def encode_gif(video: Tensor, fps: float) -> bytes:
    """Encode uint8 ``(T, H, W, 3)`` as an animated GIF that loops; above 50 frames per second it leaves frames out.

    All frames share one palette, so that nothing flickers.
    """
    check_video(video)
    assert fps > 0, fps
    stride = math.ceil(fps / MAX_GIF_FPS)
    images = _to_palette(video[::stride].detach().cpu().numpy())
    # Ends in units of 10 ms: rounding ends instead of durations keeps the length of the video right.
    ends = [round(i * 100 * stride / fps) for i in range(len(images) + 1)]
    durations = [min(10 * (end - start), LONGEST_FRAME) for start, end in itertools.pairwise(ends)]
    buffer = io.BytesIO()
    images[0].save(buffer, "GIF", save_all=True, append_images=images[1:], duration=durations, loop=0)
    return buffer.getvalue()


def _to_palette(frames: np.ndarray) -> list[Image.Image]:
    """Reduce frames to 256 colours, fitted to a sample of all pixels: frame by frame is many times slower."""
    pixels = frames.reshape(-1, 3)
    sample = pixels[np.random.default_rng(0).integers(len(pixels), size=min(len(pixels), 32_768))]
    palette = Image.fromarray(sample[None]).quantize(256, method=Image.Quantize.MEDIANCUT)
    # A table of the nearest palette entry of every colour, 6 bits a channel, saves a search per pixel.
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
    """Return frames ``(..., C)`` as ``(..., 3)``: the newest of stacked colour frames, else the last channel in grey.

    Three stacked grey frames look like colours: what moves has coloured edges.
    """
    channels = frames.shape[-1]
    return frames[..., -3:] if channels % 3 == 0 else frames[..., -1:].expand(*frames.shape[:-1], 3)


def enlarge(frames: Tensor) -> Tensor:
    """Repeat pixels of ``(..., H, W, C)``, a whole number of times, until each side is at least ``READABLE``."""
    factor = math.ceil(READABLE / min(frames.shape[-3:-1]))
    return frames.repeat_interleave(factor, -3).repeat_interleave(factor, -2)


def label_rows(video: Tensor, labels: Sequence[str]) -> Tensor:
    """Write a name to the left of each row of a video ``(T, H, W, 3)``; the rows are equally high."""
    font, height = ImageFont.load_default(), video.shape[1] // len(labels)
    width = 8 + math.ceil(max(font.getlength(label) for label in labels))
    image = Image.new("RGB", (width, video.shape[1]))
    for row, label in enumerate(labels):
        ImageDraw.Draw(image).text((4, int((row + 0.5) * height) - 6), label, font=font)
    margin = torch.from_numpy(np.array(image)).to(video.device)
    return torch.cat([margin.expand(len(video), -1, -1, -1), video], 2)


def tile_envs(frames: Tensor, rows: int, cols: int) -> Tensor:
    """Lay out the first ``rows * cols`` worlds: ``(T, N, H, W, C)`` to ``(T, rows * H, cols * W, 3)``."""
    frames = to_colour(frames)
    steps, worlds, height, width, channels = frames.shape
    shown = min(worlds, rows * cols)
    grid = frames.new_zeros(steps, rows * cols, height, width, channels)
    grid[:, :shown] = frames[:, :shown]
    grid = grid.view(steps, rows, cols, height, width, channels).permute(0, 1, 3, 2, 4, 5)
    return grid.reshape(steps, rows * height, cols * width, channels)


def _framed(frames: Tensor, context: int) -> Tensor:
    """Add borders to ``(T, ..., H, W, 3)``: green ones to the first ``context`` frames, red ones to the others."""
    steps, *others, height, width, _ = frames.shape
    framed = frames.new_empty(steps, *others, height + 2 * BORDER, width + 2 * BORDER, 3)
    framed[:context] = torch.tensor(OBSERVING, dtype=torch.uint8, device=frames.device)
    framed[context:] = torch.tensor(IMAGINING, dtype=torch.uint8, device=frames.device)
    framed[..., BORDER:-BORDER, BORDER:-BORDER, :] = frames
    return framed


def open_loop_video(truth: Tensor, model: Tensor, context: int) -> Tensor:
    """Show the truth, the world model's prediction and its error in three rows, one column per sequence.

    The error is ``(model - truth + 255) / 2``: grey where they agree. Panels have a green border while the model
    observes (``t < context``), and a red one while it imagines from the actions alone, as in ``danijar/dreamerv3``.

    Args:
        truth, model: uint8 ``(T, B, H, W, C)``.
        context: number of frames that the model observes, 0 to ``T``.

    Returns:
        uint8 ``(T, 3 * (H + 2 * BORDER), B * (W + 2 * BORDER), 3)``.
    """
    assert truth.dtype == model.dtype == torch.uint8, (truth.dtype, model.dtype)
    assert truth.shape == model.shape, (truth.shape, model.shape)
    truth, model = to_colour(truth), to_colour(model)
    assert 0 <= context <= len(truth), (context, len(truth))
    error = ((model.int() - truth.int() + 255) // 2).to(torch.uint8)
    panels = _framed(torch.stack([truth, model, error], 1), context)
    return panels.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def dream_video(seen: Tensor, model: Tensor, traces: Mapping[str, Tensor]) -> Tensor:
    """Show real frames, then those that the model dreams, above curves of its predictions; one column per dream.

    Panels have a green border while the frames are real, a red one in the dream. Each trace is drawn up to now, with
    its value; all columns share one scale.

    Args:
        seen, model: uint8 ``(P, B, H, W, C)`` and ``(I, B, H, W, C)``, enlarged to ``H'`` and ``W'``.
        traces: name to ``(I, B)``.

    Returns:
        uint8 ``(P + I, H' + 2 * BORDER + traces * TRACE_HEIGHT, B * (W' + 2 * BORDER), 3)``.
    """
    assert seen.dtype == model.dtype == torch.uint8, (seen.dtype, model.dtype)
    assert seen.shape[1:] == model.shape[1:], (seen.shape, model.shape)
    assert all(values.shape == model.shape[:2] for values in traces.values()), model.shape
    context, panels = len(seen), _framed(enlarge(to_colour(torch.cat([seen, model])).cpu()), len(seen))
    steps, batch, high, wide, _ = panels.shape
    canvas = panels.new_zeros(steps, batch, high + len(traces) * TRACE_HEIGHT, wide, 3)
    canvas[:, :, :high] = panels
    for number, (name, values) in enumerate(traces.items()):
        colour, top = TRACE_COLOURS[number % len(TRACE_COLOURS)], high + number * TRACE_HEIGHT
        low, most = values.min().item(), values.max().item()
        for column in range(batch):
            strips = _trace(name, values[:, column].tolist(), low, most, wide, colour)
            canvas[context:, column, top : top + TRACE_HEIGHT] = strips
    return canvas.transpose(1, 2).flatten(2, 3)


def _trace(name: str, values: list[float], low: float, high: float, width: int, colour: tuple[int, int, int]) -> Tensor:
    """Draw a growing curve under its name and newest value: uint8 ``(I, TRACE_HEIGHT, width, 3)``."""
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
