"""The records of a run: ``metrics.jsonl`` and TensorBoard, whose x-axis counts policy steps."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import queue
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from sheeplike.files import EVENTS, open_regular, write_atomically
from sheeplike.monitor.dashboard import layout, table_entry
from sheeplike.monitor.video import check_video, encode_gif

_NUMBERS = itertools.count()  # of the event files of this process


class RunLogger:
    """Writes a run's metrics, videos and texts into ``run_dir``, which it makes.

    ``metrics.jsonl`` has one JSON object per call of :meth:`log`: ``step`` (policy steps), ``gradient_steps``,
    ``seconds`` and the metrics, a non-finite one as ``null``; it is flushed row by row. TensorBoard's event file lies
    in ``run_dir`` itself. Videos are encoded in a thread of their own. A writer that fails, on a full disk say, warns
    once and goes on trying; it never ends the training.

    Args:
        tensorboard: whether to write an event file; without one, videos and texts go nowhere.
        purge_step: the step from which a run is resumed. What an earlier attempt wrote after it is dropped from
            ``metrics.jsonl`` and hidden in TensorBoard.

    Raises:
        OSError: ``run_dir`` cannot be written at the start, or its ``metrics.jsonl`` is no regular file.
    """

    def __init__(self, run_dir: Path | str, *, tensorboard: bool = True, purge_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._rows = _open_rows(self.run_dir / "metrics.jsonl", purge_step)
        # TensorBoard hides the step that it is given as well; metrics.jsonl keeps it.
        purge = None if purge_step is None else purge_step + 1
        self._events = EventFile(self.run_dir, purge_step=purge) if tensorboard else None
        self._failed: set[str] = set()
        self._closed = False
        # When videos come faster than they are encoded, log_video waits: none is lost and memory stays bounded.
        self._videos: queue.Queue[Callable[[Any], None] | None] = queue.Queue(maxsize=4)
        self._encoder = threading.Thread(target=self._encode, name="video-encoder", daemon=True)
        self._encoder.start()

    def log(self, metrics: Mapping[str, float], *, step: int, gradient_steps: int, seconds: float) -> None:
        """Write one row.

        Args:
            metrics: name, such as ``"loss/dyn"``, to number.
            step: policy steps. gradient_steps: updates. seconds: training time.

        Raises:
            ValueError: a metric is named like one of the axes.
        """
        axes = {"step": int(step), "gradient_steps": int(gradient_steps), "seconds": round(float(seconds), 3)}
        if taken := axes.keys() & metrics.keys():
            raise ValueError(f"metric {min(taken)!r}: the name is an axis of metrics.jsonl; expected <group>/<name>")
        values = {name: float(value) for name, value in metrics.items()}
        row = axes | {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._guard("metrics.jsonl"):
            _append(self._rows, json.dumps(row, allow_nan=False).encode() + b"\n")
        self._tensorboard(lambda events: events.add_scalars(values, step))

    def log_video(self, name: str, video: Tensor, *, step: int, fps: float) -> None:
        """Show a video as an animated GIF under TensorBoard's images; returns before it is encoded.

        Args:
            video: uint8 ``(T, H, W, 3)``; copied at once. fps: frames per second.

        Raises:
            TypeError, ValueError: another dtype or shape.
        """
        check_video(video, name)
        if self._events is not None and not self._closed:
            frames = video.detach().to("cpu", copy=True)
            self._videos.put(lambda events: events.add_video(name, frames, step, fps))

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        """Show Markdown under TensorBoard's text."""
        self._tensorboard(lambda events: events.add_text(name, text, step))

    def log_hyperparameters(self, columns: Mapping[str, type], values: Mapping[str, float | str]) -> None:
        """Enter the run into TensorBoard's table of runs (see :func:`~sheeplike.monitor.dashboard.table_entry`)."""
        self._tensorboard(lambda events: [events.add(part) for part in table_entry(columns, values)])

    def log_layout(self, metrics: Iterable[str]) -> None:
        """Arrange the curves in charts, for an agent that writes ``metrics``; once is enough."""
        self._tensorboard(lambda events: events.add_layout(layout(metrics)))

    def close(self) -> None:
        """Finish the videos that are waiting, and close all files. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._videos.put(None)
        self._encoder.join()
        self._tensorboard(lambda events: events.close())
        with self._guard("metrics.jsonl"):
            self._rows.close()

    def _encode(self) -> None:
        while (write := self._videos.get()) is not None:
            # Under "python -W error" a warning raises; a thread that died of it would block log_video for ever.
            with contextlib.suppress(Warning):
                self._tensorboard(write)

    def _tensorboard(self, write: Callable[[Any], object]) -> None:
        if self._events is not None:
            with self._guard("TensorBoard"):
                write(self._events)

    @contextlib.contextmanager
    def _guard(self, writer: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Whatever a writer raises, training is worth more than its record.
            if writer not in self._failed:
                self._failed.add(writer)
                problem = f"{writer} in {self.run_dir} cannot be written, training goes on: {error!r}"
                warnings.warn(problem, RuntimeWarning, stacklevel=4)


class EventFile:
    """TensorBoard's event file, written by whoever adds to it, an event at a time, each whole or absent.

    ``SummaryWriter`` writes in a thread that ends at the first error: after a disk that was full for a moment, nothing
    would come any more.

    Args:
        purge_step: from here on, what other files of the directory say is hidden.

    Raises:
        OSError: the file cannot be created, or (of the methods) an event cannot be written; the next ones may be.
    """

    def __init__(self, run_dir: Path, *, purge_step: int | None = None) -> None:
        # Importing it takes seconds, which a run without TensorBoard need not pay.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary, session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        name = f"{EVENTS}{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file, self._lock = open_regular(run_dir / name, "ab"), threading.Lock()
        self._write(self._event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(self._event(step=purge_step, session_log=session(status=session.START)))

    def add(self, summary: Any, step: int = 0) -> None:
        """Add a ``Summary``."""
        self._write(self._event(summary=summary, step=step))

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to each curve."""
        value = self._summary.Value
        self.add(self._summary(value=[value(tag=name, simple_value=number) for name, number in values.items()]), step)

    def add_text(self, name: str, text: str, step: int) -> None:
        """Add Markdown."""
        from torch.utils.tensorboard.summary import text as summary

        self.add(summary(name, text), step)

    def add_layout(self, layout: Mapping[str, Any]) -> None:
        """Arrange the curves in charts; see :func:`~sheeplike.monitor.dashboard.layout`."""
        from torch.utils.tensorboard.summary import custom_scalars

        self.add(custom_scalars(layout))

    def add_video(self, name: str, video: Tensor, step: int, fps: float) -> None:
        """Add an animated GIF: to TensorBoard, that is an image."""
        self._add_image(name, encode_gif(video, fps), video.shape[2], video.shape[1], step)

    def add_image(self, name: str, png: bytes, step: int) -> None:
        """Add a picture."""
        with Image.open(io.BytesIO(png)) as picture:
            self._add_image(name, png, *picture.size, step)

    def _add_image(self, name: str, encoded: bytes, width: int, height: int, step: int) -> None:
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
        self.add(self._summary(value=[self._summary.Value(tag=name, image=image)]), step)

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        with self._lock:  # videos come from a thread of their own
            _append(self._file, record.getvalue())


def _open_rows(path: Path, purge_step: int | None) -> Any:
    """The file, open for appending, without rows after ``purge_step`` and without a last row that was cut short."""
    if os.path.lexists(path):
        with open_regular(path) as file:
            lines = list(file)
        kept = [line for line in lines if _keep(line, purge_step)]
        if len(kept) != len(lines):
            write_atomically(path, b"".join(kept))
    return open_regular(path, "ab")


def _keep(line: bytes, purge_step: int | None) -> bool:
    try:
        row = json.loads(line)
        return line.endswith(b"\n") and isinstance(row, dict) and (purge_step is None or row["step"] <= purge_step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _append(file: Any, data: bytes) -> None:
    """All of it or nothing."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError("it was cut short: is the disk full?")
    except OSError:
        file.truncate(start)
        raise
