"""Everything that is logged is read back: the rows as JSON, the rest with TensorBoard's own reader."""

import io
import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sheeplike.monitor import logger as logger_module
from sheeplike.monitor.logger import EventFile, RunLogger, Sink


def rows(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def events(run_dir: Path) -> EventAccumulator:
    reader = EventAccumulator(str(run_dir), size_guidance={"images": 0, "scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def video(frames=3):
    clip = torch.zeros(frames, 16, 24, 3, dtype=torch.uint8)
    for t in range(frames):
        clip[t, :, 4 * t : 4 * t + 4] = 255
    return clip


def log(run: RunLogger, step: int, **metrics: float) -> None:
    run.log(metrics or {"loss/dyn": float(step)}, step=step, gradient_steps=step // 10, seconds=step / 100)


def test_rows_and_curves_count_policy_steps(tmp_path):
    run = RunLogger(tmp_path / "run", [EventFile])
    run.log({"loss/dyn": 1.5, "rollout/return_mean": 2}, step=100, gradient_steps=7, seconds=1.23456)
    run.log({"loss/dyn": 0.5}, step=200, gradient_steps=9, seconds=2)
    run.close()
    assert rows(tmp_path / "run") == [
        {"step": 100, "gradient_steps": 7, "seconds": 1.235, "loss/dyn": 1.5, "rollout/return_mean": 2.0},
        {"step": 200, "gradient_steps": 9, "seconds": 2.0, "loss/dyn": 0.5},
    ]
    curve = events(tmp_path / "run").Scalars("loss/dyn")
    assert [(point.step, point.value) for point in curve] == [(100, 1.5), (200, 0.5)]


def test_a_row_is_on_the_disk_at_once_and_what_is_not_finite_is_null(tmp_path):
    run = RunLogger(tmp_path)
    log(run, 1, a=math.nan, b=math.inf, c=-math.inf, d=0.0)
    (row,) = rows(tmp_path)
    assert row == {"step": 1, "gradient_steps": 0, "seconds": 0.01, "a": None, "b": None, "c": None, "d": 0.0}
    run.close()


def test_without_tensorboard_there_is_no_event_file(tmp_path):
    run = RunLogger(tmp_path)
    log(run, 1)
    run.log_video("video", video(), step=1, fps=10)
    run.each(lambda sink: sink.add_text("config", "text", 1))
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_metric_cannot_hide_an_axis(tmp_path):
    run = RunLogger(tmp_path)
    with pytest.raises(AssertionError, match="step"):
        run.log({"step": 5.0}, step=1, gradient_steps=0, seconds=0)
    run.close()


def test_a_video_reads_back_as_a_gif(tmp_path):
    run, clip = RunLogger(tmp_path, [EventFile]), video()
    run.log_video("open_loop/front", clip, step=50, fps=10)
    run.log_video("open_loop/front", clip, step=60, fps=10)
    clip.zero_()  # it was copied
    run.close()
    images = events(tmp_path).Images("open_loop/front")
    assert [(image.step, image.height, image.width) for image in images] == [(50, 16, 24), (60, 16, 24)]
    gif = Image.open(io.BytesIO(images[0].encoded_image_string))
    assert (gif.format, gif.n_frames, gif.info["loop"]) == ("GIF", 3, 0)
    for t in range(3):
        gif.seek(t)
        np.testing.assert_array_equal(np.asarray(gif.convert("RGB")), video()[t].numpy())


def test_videos_are_encoded_beside_the_training(tmp_path, monkeypatch):
    import threading

    caller, threads = threading.get_ident(), []
    real = logger_module.encode_gif

    def spy(*arguments):
        threads.append(threading.get_ident())
        return real(*arguments)

    monkeypatch.setattr(logger_module, "encode_gif", spy)
    run = RunLogger(tmp_path, [EventFile])
    for step in range(10):  # more than the queue holds
        run.log_video("video", video(), step=step, fps=10)
    run.close()
    assert len(threads) == 10
    assert caller not in threads
    assert len(events(tmp_path).Images("video")) == 10


def test_a_video_of_the_wrong_type_is_refused_at_once(tmp_path):
    run = RunLogger(tmp_path)
    with pytest.raises(AssertionError):
        run.log_video("open_loop", video().float(), step=1, fps=10)
    run.close()


def test_a_text_reads_back(tmp_path):
    run = RunLogger(tmp_path, [EventFile])
    run.each(lambda sink: sink.add_text("config", "```yaml\nseed: 1\n```", 0))
    run.close()
    tensor = events(tmp_path).Tensors("config/text_summary")[0].tensor_proto
    assert tensor.string_val[0].decode() == "```yaml\nseed: 1\n```"


def test_a_resumed_run_drops_what_came_after_its_checkpoint(tmp_path):
    first = RunLogger(tmp_path, [EventFile])
    for step in (10, 20, 30, 40):
        log(first, step)
    first.close()
    second = RunLogger(tmp_path, [EventFile], purge_step=20)
    assert [row["step"] for row in rows(tmp_path)] == [10, 20]
    log(second, 25)
    second.close()
    assert [row["step"] for row in rows(tmp_path)] == [10, 20, 25]
    assert [point.step for point in events(tmp_path).Scalars("loss/dyn")] == [10, 20, 25]


def test_without_purge_all_rows_stay(tmp_path):
    for step in (10, 5):
        run = RunLogger(tmp_path)
        log(run, step)
        run.close()
    assert [row["step"] for row in rows(tmp_path)] == [10, 5]


@pytest.mark.parametrize("torn", [b'{"step": 20, "gradi', b'{"step": 20, "gradient_steps": 2, "seconds": 1}'])
def test_a_row_cut_short_by_a_kill_is_dropped(tmp_path, torn):
    whole = b'{"step": 10, "gradient_steps": 1, "seconds": 1}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + torn)
    run = RunLogger(tmp_path)
    log(run, 30)
    run.close()
    assert [row["step"] for row in rows(tmp_path)] == [10, 30]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("odd", ["[1]", "7", "null", '{"step": "x"}', '{"step": [1]}', "{}", "[" * 100_000])
def test_a_row_that_nobody_wrote_is_dropped(tmp_path, odd):
    whole = '{"step": 10, "gradient_steps": 1, "seconds": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(whole + odd + "\n" + whole)
    RunLogger(tmp_path, purge_step=20).close()
    assert (tmp_path / "metrics.jsonl").read_text() == 2 * whole


def test_a_row_that_is_no_object_is_dropped_without_a_purge_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('[1]\n{"step": 10}\nnull\n')
    RunLogger(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 10}\n'


@pytest.mark.parametrize("kind", ["link", "link to nothing", "pipe"])
def test_metrics_that_are_no_file_are_refused_at_the_start(tmp_path, kind):
    (tmp_path / "elsewhere").write_text("mine\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    if kind == "pipe":
        os.mkfifo(run_dir / "metrics.jsonl")
    else:
        (run_dir / "metrics.jsonl").symlink_to(tmp_path / ("elsewhere" if kind == "link" else "absent"))
    with pytest.raises(OSError, match="link" if "link" in kind else "is no regular file"):
        RunLogger(run_dir)
    assert (tmp_path / "elsewhere").read_text() == "mine\n"
    assert not (tmp_path / "absent").exists()


def test_what_is_kept_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And is not written through what an attempt or another user has left in its place."""
    (tmp_path / "elsewhere").write_text("mine\n")
    run = RunLogger(tmp_path / "run")
    for step in (10, 20):
        log(run, step)
    run.close()
    (tmp_path / f"run/.metrics.jsonl.{os.getpid()}").symlink_to(tmp_path / "elsewhere")
    done, sync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: done.append(Path(os.readlink(f"/proc/self/fd/{file}")).name) or sync(file)
    )
    monkeypatch.setattr(os, "replace", lambda *names: done.append("replace") or replace(*names))
    RunLogger(tmp_path / "run", purge_step=10).close()
    assert done == [f".metrics.jsonl.{os.getpid()}", "replace", "run"]
    assert (tmp_path / "elsewhere").read_text() == "mine\n"
    assert [row["step"] for row in rows(tmp_path / "run")] == [10]


class FullDisk:
    """A file on a disk that fills up in the middle of a row, and has room again later."""

    def __init__(self, file):
        self.file, self.full = file, False

    def write(self, data):
        return self.file.write(data[:5] if self.full else data)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_a_full_disk_warns_once_and_rows_stay_whole(tmp_path, recwarn):
    run = RunLogger(tmp_path)
    run._rows = disk = FullDisk(run._rows)
    log(run, 1)
    disk.full = True
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl"):
        log(run, 2)
    log(run, 3)
    assert not recwarn.list  # pytest.warns took the only one
    disk.full = False
    log(run, 4)
    run.close()
    assert [row["step"] for row in rows(tmp_path)] == [1, 4]


def test_curves_go_on_when_a_full_disk_has_room_again(tmp_path):
    run = RunLogger(tmp_path, [EventFile])
    run._sinks[0]._file = disk = FullDisk(run._sinks[0]._file)
    log(run, 1)
    disk.full = True
    with pytest.warns(RuntimeWarning, match="TensorBoard"):
        log(run, 2)
    disk.full = False
    log(run, 3)
    run.close()
    assert [event.step for event in events(tmp_path).Scalars("loss/dyn")] == [1, 3]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_tensorboard_that_fails_warns_once_and_the_rows_go_on(tmp_path, monkeypatch, recwarn):
    run = RunLogger(tmp_path, [EventFile])

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run._sinks[0], "_write", fail)
    with pytest.warns(RuntimeWarning, match="device"):
        log(run, 1)
    log(run, 2)
    run.each(lambda sink: sink.add_text("config", "text", 2))
    run.log_video("video", video(), step=2, fps=10)
    run.close()
    assert not recwarn.list  # pytest.warns took the only one
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_encoder_does_not_stall_when_warnings_are_errors(tmp_path, monkeypatch):
    def fail(*arguments):
        raise ValueError("no encoder")

    monkeypatch.setattr(logger_module, "encode_gif", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = RunLogger(tmp_path, [EventFile])
        for step in range(3):
            run.log_video("video", video(), step=step, fps=10)
        run.close()
    assert run._videos.empty()  # the encoder outlived the first failure


def test_closing_twice_and_logging_video_after_closing_are_harmless(tmp_path):
    run = RunLogger(tmp_path, [EventFile])
    run.close()
    run.close()
    for step in range(10):
        run.log_video("video", video(), step=step, fps=10)


def test_a_run_dir_that_cannot_be_written_is_an_error_at_the_start(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        RunLogger(tmp_path / "file" / "run", [EventFile])
    assert os.listdir(tmp_path) == ["file"]


def test_a_further_sink_gets_what_tensorboard_gets(tmp_path: Path) -> None:
    calls: list[tuple[str, object]] = []

    class Stub(Sink):
        name = "stub"

        def __getattribute__(self, method: str) -> object:
            if not method.startswith(("add_", "close")):
                return super().__getattribute__(method)
            return lambda *arguments: calls.append((method, arguments[0] if arguments else None))

    run = RunLogger(tmp_path, [Stub])
    run.log({"loss/dyn": 1.0}, step=1, gradient_steps=0, seconds=0.0)
    run.each(lambda sink: sink.add_text("config", "seed: 0", 0))
    run.log_video("eval/front", video(), step=1, fps=10)
    run.close()
    assert calls == [
        ("add_scalars", {"loss/dyn": 1.0}),
        ("add_text", "config"),
        ("add_video", "eval/front"),
        ("close", None),
    ]
