"""Layouts are exact to the pixel; a GIF decodes to the frames and the speed that went in."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from sheeplike.monitor.video import (
    BORDER,
    READABLE,
    TRACE_HEIGHT,
    dream_video,
    encode_gif,
    enlarge,
    label_rows,
    open_loop_video,
    tile_envs,
    to_colour,
)

GREEN, RED = [0, 255, 0], [255, 0, 0]


def moving_square(frames=6, size=32):
    """A white square on a colour gradient, a little further right in every frame."""
    video = torch.zeros(frames, size, size, 3, dtype=torch.uint8)
    video[..., 0] = torch.linspace(0, 200, size).to(torch.uint8)
    video[..., 2] = torch.linspace(0, 200, size).to(torch.uint8)[:, None]
    for t in range(frames):
        video[t, 4:10, 4 * t : 4 * t + 6] = 255
    return video


def decode(gif: bytes):
    image = Image.open(io.BytesIO(gif))
    frames, durations = [], []
    for i in range(image.n_frames):
        image.seek(i)
        frames.append(np.asarray(image.convert("RGB")))
        durations.append(image.info["duration"])
    return np.stack(frames), durations, image


def test_a_gif_decodes_to_its_frames_and_loops_for_ever():
    video = moving_square()
    frames, durations, image = decode(encode_gif(video, fps=10))
    assert frames.shape == video.shape
    assert np.abs(frames.astype(int) - video.numpy().astype(int)).mean() < 4
    assert durations == [100] * 6
    assert image.info["loop"] == 0


def test_borders_keep_their_colour_in_a_gif():
    noise = torch.randint(0, 256, (4, 2, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    frames, _, _ = decode(encode_gif(open_loop_video(noise, noise.flip(0), context=2), fps=10))
    assert np.abs(frames[0, 0, 0].astype(int) - GREEN).max() < 40
    assert np.abs(frames[3, 0, 0].astype(int) - RED).max() < 40


@pytest.mark.parametrize(("fps", "shown"), [(15, 30), (30, 30), (50, 30), (60, 15), (100, 15), (240, 6)])
def test_a_gif_keeps_the_speed(fps, shown):
    frames, durations, _ = decode(encode_gif(moving_square(30, 160), fps))
    assert len(frames) == shown
    assert min(durations) >= 20  # browsers slow faster ones down
    assert sum(durations) == pytest.approx(1000 * 30 / fps, abs=10)


def test_a_single_frame_is_a_gif():
    frames, _, _ = decode(encode_gif(moving_square(1), fps=10))
    assert frames.shape[0] == 1


@pytest.mark.parametrize(
    "video",
    [torch.zeros(2, 8, 8, 3), torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(0, 8, 8, 3, dtype=torch.uint8)],
)
def test_what_is_no_video_is_refused(video):
    with pytest.raises(AssertionError):
        encode_gif(video, fps=10)


def test_a_frame_lasts_as_long_as_a_gif_can_say():
    _, durations, _ = decode(encode_gif(moving_square(2), fps=1e-6))
    assert durations == [655_350] * 2


def test_tiles_are_row_by_row_and_black_where_worlds_are_missing():
    frames = (torch.arange(5).view(1, 5, 1, 1, 1) + 10).expand(2, 5, 3, 4, 3).to(torch.uint8)
    tiled = tile_envs(frames, 2, 3)
    assert tiled.shape == (2, 6, 12, 3)
    assert tiled[1, ::3, ::4, 0].tolist() == [[10, 11, 12], [13, 14, 0]]
    assert torch.equal(tiled[:, 3:6, 4:8], frames[:, 4])


def test_tiles_show_the_first_worlds():
    frames = torch.arange(9, dtype=torch.uint8).view(1, 9, 1, 1, 1).expand(1, 9, 2, 2, 3)
    assert tile_envs(frames, 2, 2)[0, ::2, ::2, 0].tolist() == [[0, 1], [2, 3]]


def test_tiles_keep_the_inside_of_a_world():
    frames = torch.randint(0, 256, (2, 4, 3, 5, 3), dtype=torch.uint8)
    tiled = tile_envs(frames, 2, 2)
    assert torch.equal(tiled[:, 3:, 5:], frames[:, 3])
    assert torch.equal(tiled[:, :3, 5:], frames[:, 1])


@pytest.mark.parametrize(("channels", "shown"), [(1, [0, 0, 0]), (3, [0, 1, 2]), (4, [3, 3, 3]), (12, [9, 10, 11])])
def test_of_other_channels_the_newest_colours_or_grey_are_shown(channels, shown):
    frames = torch.arange(channels, dtype=torch.uint8).expand(2, 4, 6, 8, channels)
    assert to_colour(frames)[1, 2, 3, 4].tolist() == shown
    tiled = tile_envs(frames, 2, 2)
    assert tiled.shape == (2, 12, 16, 3)
    assert tiled[1, 9, 9].tolist() == shown
    film = open_loop_video(frames, frames, context=1)
    assert film.shape == (2, 3 * (6 + 2 * BORDER), 4 * (8 + 2 * BORDER), 3)
    assert film[1, BORDER, BORDER].tolist() == shown


def test_open_loop_rows_borders_and_error():
    b, steps, batch, height, width = BORDER, 4, 2, 6, 8
    truth = torch.full((steps, batch, height, width, 3), 100, dtype=torch.uint8)
    model = truth.clone()
    model[:, 1] = 0
    truth[:, 1] = 255
    video = open_loop_video(truth, model, context=1)
    assert video.shape == (steps, 3 * (height + 2 * b), batch * (width + 2 * b), 3)
    assert video.dtype == torch.uint8

    panels = video.view(steps, 3, height + 2 * b, batch, width + 2 * b, 3).permute(0, 1, 3, 2, 4, 5)
    inside = panels[:, :, :, b:-b, b:-b]
    assert torch.equal(inside[:, 0], truth)
    assert torch.equal(inside[:, 1], model)
    assert inside[:, 2, 0].unique().tolist() == [127]  # no error: grey
    assert inside[:, 2, 1].unique().tolist() == [0]  # (0 - 255 + 255) // 2

    edge = torch.ones(height + 2 * b, width + 2 * b, dtype=torch.bool)
    edge[b:-b, b:-b] = False
    for t, colour in enumerate([GREEN, RED, RED, RED]):
        assert panels[t][:, :, edge].unique(dim=0).shape[0] >= 1
        assert (panels[t][:, :, edge] == torch.tensor(colour)).all()


def test_open_loop_error_is_exact_for_every_pair_of_values():
    values = torch.arange(256, dtype=torch.uint8)
    truth = values.view(1, 1, 256, 1, 1).expand(1, 1, 256, 256, 3)
    model = values.view(1, 1, 1, 256, 1).expand(1, 1, 256, 256, 3)
    error = open_loop_video(truth, model, 0)[0, -256 - BORDER : -BORDER, BORDER:-BORDER, 0]
    expected = (values.double()[None] - values.double()[:, None] + 255) / 2
    assert torch.equal(error, expected.floor().to(torch.uint8))


@pytest.mark.parametrize(
    ("truth", "context"),
    [
        (torch.zeros(2, 1, 4, 4, 3), 1),
        (torch.zeros(2, 1, 4, 5, 3, dtype=torch.uint8), 1),
        (torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8), 3),
    ],
)
def test_open_loop_refuses(truth, context):
    with pytest.raises(AssertionError):
        open_loop_video(truth, torch.zeros(2, 1, 4, 4, 3, dtype=torch.uint8), context)


def test_a_dream_shows_what_was_seen_then_what_was_dreamt_above_its_traces():
    seen = torch.full((2, 3, 48, 48, 3), 90, dtype=torch.uint8)
    model = torch.full((4, 3, 48, 48, 3), 200, dtype=torch.uint8)
    rising = torch.linspace(0, 1, 4)[:, None].expand(4, 3)
    video = dream_video(seen, model, {"reward": rising, "value": -rising})
    high = wide = 2 * 48 + 2 * BORDER  # twice as large, so that there is room for a number
    assert video.shape == (6, high + 2 * TRACE_HEIGHT, 3 * wide, 3)
    assert video[:2, 0, 0].tolist() == [GREEN] * 2
    assert video[2:, 0, 0].tolist() == [RED] * 4
    inside = video[:, BORDER : high - BORDER, wide + BORDER : 2 * wide - BORDER]
    assert inside[:2].unique().tolist() == [90]
    assert inside[2:].unique().tolist() == [200]
    below = video[:, high:]
    assert not bool(below[:2].any()), "nothing is expected of what was seen"
    assert bool(below[2:].flatten(1).any(1).all())
    # The curve of the first trace climbs to the right, that of the second falls.
    curve = video[-1, high + 12 : high + TRACE_HEIGHT, :wide].any(-1).int().argmax(0)
    other = video[-1, high + TRACE_HEIGHT + 12 :, :wide].any(-1).int().argmax(0)
    assert curve[4] > curve[-8]
    assert other[4] < other[-8]


def test_a_dream_of_one_step_and_of_equal_values_is_drawn():
    frame = torch.zeros(1, 1, 128, 128, 1, dtype=torch.uint8)
    video = dream_video(frame, frame, {"continue": torch.ones(1, 1)})
    assert video.shape == (2, 128 + 2 * BORDER + TRACE_HEIGHT, 128 + 2 * BORDER, 3)


@pytest.mark.parametrize(
    ("seen", "model", "trace"),
    [
        (torch.zeros(1, 2, 8, 8, 3), torch.zeros(1, 2, 8, 8, 3), torch.zeros(1, 2)),
        (torch.zeros(1, 2, 8, 8, 3).byte(), torch.zeros(1, 3, 8, 8, 3).byte(), torch.zeros(1, 3)),
        (torch.zeros(1, 2, 8, 8, 3).byte(), torch.zeros(4, 2, 8, 8, 3).byte(), torch.zeros(1, 2)),
    ],
)
def test_what_is_no_dream_is_refused(seen, model, trace):
    with pytest.raises(AssertionError):
        dream_video(seen, model, {"reward": trace})


@pytest.mark.parametrize(
    ("size", "factor"), [((48, 48), 2), ((64, 100), 2), ((20, 90), 5), ((96, 96), 1), ((480, 300), 1)]
)
def test_small_frames_are_enlarged_by_whole_pixels(size: tuple[int, int], factor: int) -> None:
    frames = torch.randint(0, 256, (2, 3, *size, 1), dtype=torch.uint8)
    large = enlarge(frames)
    assert large.shape == (2, 3, factor * size[0], factor * size[1], 1)
    assert min(large.shape[2:4]) >= READABLE
    assert torch.equal(large[:, :, ::factor, ::factor], frames)
    assert torch.equal(large[:, :, factor - 1 :: factor, factor - 1 :: factor], frames)


def test_rows_have_their_names_beside_them() -> None:
    video = torch.randint(0, 256, (3, 90, 40, 3), dtype=torch.uint8)
    labelled = label_rows(video, ("truth", "model", "error"))
    assert torch.equal(labelled[:, :, -40:], video)
    margin = labelled[:, :, :-40]
    assert torch.equal(margin[0], margin[2])
    rows = margin[0].unflatten(0, (3, 30))
    assert all(bool((row > 128).any()) for row in rows)
    assert not torch.equal(rows[0], rows[1])
