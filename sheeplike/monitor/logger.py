"""Records of a run: ``metrics.jsonl``, and loggers beside it, of which TensorBoard is one."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import os
import queue
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor

from sheeplike.files import EVENTS, open_regular, write_atomically
from sheeplike.monitor.video import check_video, encode_gif

_NUMBERS = itertools.count()  # they tell the event files of this process apart


class Sink:
    """Base class of loggers: destinations beside ``metrics.jsonl``, which override what they can show.

    Methods may run in the video thread too. They must not wait for a network; an error is reported once, and the next
    record is tried again.

    Args:
        run_dir: directory of the run.
        run_id: id of the run in this destination, if it has one and the run is resumed.
        purge_step: policy step from which the run is resumed; later records are to be dropped if possible.
    """

    name: str  # for messages, and in checkpoints
    remedy = ""  # ends the message of an error
    run_id: str | None = None  # kept in checkpoints

    def __init__(self, run_dir: Path, *, run_id: str | None = None, purge_step: int | None = None) -> None: ...
    def add_scalars(self, values: Mapping[str, float], step: int) -> None: ...
    def add_text(self, name: str, text: str, step: int) -> None: ...
    def add_video(self, name: str, gif: bytes, step: int) -> None: ...
    def add_config(self, config: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class NoLogger:
    """Logger of a rank that writes nothing."""

    run_ids: ClassVar[dict[str, str]] = {}

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class RunLogger:
    """Writer of a run's metrics, videos and texts into ``run_dir``, which it makes, and into other destinations.

    ``metrics.jsonl`` has one row per call of :meth:`log`; non-finite metrics are ``null``. Videos are encoded in a
    thread. A destination that fails, for example on a full disk, warns once and is tried again, unless it failed at the
    start; training goes on.

    Args:
        sinks: further destinations; without any, videos and texts are dropped.
        purge_step: policy step from which a run is resumed. Later records are dropped from ``metrics.jsonl`` and
            hidden in TensorBoard.
        run_ids: ids of the run in its destinations, by their names.
    """

    def __init__(
        self,
        run_dir: Path | str,
        sinks: Sequence[type[Sink]] = (),
        *,
        purge_step: int | None = None,
        run_ids: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._rows = _open_rows(self.run_dir / "metrics.jsonl", purge_step)
        self._failed: set[str] = set()
        self._closed = False
        self.run_ids = dict(run_ids or {})
        self._sinks: list[Sink] = []
        for kind in sinks:
            with self._guard(kind.name, kind.remedy):
                sink = kind(self.run_dir, run_id=self.run_ids.get(kind.name), purge_step=purge_step)
                self._sinks.append(sink)
                if sink.run_id:
                    self.run_ids[kind.name] = sink.run_id
        # When the queue is full, log_video waits: no video is lost, and memory stays bounded.
        self._videos: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=4)
        self._encoder = threading.Thread(target=self._encode, name="video-encoder", daemon=True)
        self._encoder.start()

    def log(self, metrics: Mapping[str, float], *, step: int, gradient_steps: int, seconds: float) -> None:
        """Write one row: metrics such as ``loss/dyn``, at ``step`` policy steps and ``seconds`` of training."""
        axes = {"step": int(step), "gradient_steps": int(gradient_steps), "seconds": round(float(seconds), 3)}
        assert not axes.keys() & metrics.keys(), f"metrics are named like axes: {sorted(axes.keys() & metrics.keys())}"
        values = {name: float(value) for name, value in metrics.items()}
        row = axes | {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._guard("metrics.jsonl"):
            _append(self._rows, json.dumps(row, allow_nan=False).encode() + b"\n")
        self.each(lambda sink: sink.add_scalars(values, step))

    def log_video(self, name: str, video: Tensor, *, step: int, fps: float) -> None:
        """Show a video, uint8 ``(T, H, W, 3)``, as an animated GIF, which is encoded after this returns."""
        check_video(video)
        if self._sinks and not self._closed:
            frames = video.detach().to("cpu", copy=True)
            self._videos.put(partial(self._add_video, name, frames, step, fps))

    def close(self) -> None:
        """Finish the videos that are waiting, and close all files."""
        if self._closed:
            return
        self._closed = True
        self._videos.put(None)
        self._encoder.join()
        self.each(lambda sink: sink.close())
        with self._guard("metrics.jsonl"):
            self._rows.close()

    def _encode(self) -> None:
        while (write := self._videos.get()) is not None:
            # Under "python -W error" a warning would end the thread, and log_video would wait for ever.
            with contextlib.suppress(Warning), self._guard("a video"):
                write()

    def _add_video(self, name: str, frames: Tensor, step: int, fps: float) -> None:
        gif = encode_gif(frames, fps)
        self.each(lambda sink: sink.add_video(name, gif, step))

    def each(self, write: Callable[[Sink], object]) -> None:
        """Call a method of every destination, such as ``lambda sink: sink.add_text(name, text, step)``."""
        for sink in self._sinks:
            with self._guard(sink.name, sink.remedy):
                write(sink)

    @contextlib.contextmanager
    def _guard(self, writer: str, remedy: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # training is worth more than its record
            if writer not in self._failed:
                self._failed.add(writer)
                problem = re.sub(r"://[^/\s]+@", "://", repr(error))  # an address may hold a password
                problem = f"{writer} of {self.run_dir} cannot be written, training goes on: {problem}{remedy}"
                warnings.warn(problem, RuntimeWarning, stacklevel=4)


class EventFile(Sink):
    """Event file of TensorBoard, written in the caller's thread, each event atomically.

    The thread of torch's ``SummaryWriter`` ends at the first error, such as a disk that is full for a moment. Here any
    method may raise OSError, and the next one may succeed. TensorBoard hides what older files hold after purge_step.
    """

    name = "TensorBoard"

    def __init__(self, run_dir: Path, *, run_id: str | None = None, purge_step: int | None = None) -> None:
        # This import takes seconds, which a run without TensorBoard need not pay.
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary, session = event_pb2.Event, summary_pb2.Summary, event_pb2.SessionLog
        # TensorBoard reads files in the order of their names.
        name = f"{EVENTS}{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_NUMBERS)}"
        self._file, self._lock = open_regular(run_dir / name, "ab"), threading.Lock()
        self._write(self._event(file_version="brain.Event:2"))
        if purge_step is not None:
            # TensorBoard hides from the given step on.
            self._write(self._event(step=purge_step + 1, session_log=session(status=session.START)))

    def add(self, summary: Any, step: int = 0) -> None:
        """Add a ``Summary``."""
        self._write(self._event(summary=summary, step=step))

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        value = self._summary.Value
        self.add(self._summary(value=[value(tag=name, simple_value=number) for name, number in values.items()]), step)

    def add_text(self, name: str, text: str, step: int) -> None:
        from torch.utils.tensorboard.summary import text as summary

        self.add(summary(name, text), step)

    def add_image(self, name: str, encoded: bytes, step: int) -> None:
        """Add a PNG or a GIF."""
        with Image.open(io.BytesIO(encoded)) as picture:
            width, height = picture.size
        image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encoded)
        self.add(self._summary(value=[self._summary.Value(tag=name, image=image)]), step)

    add_video = add_image

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        with self._lock:  # the thread of videos writes too
            _append(self._file, record.getvalue())


def _open_rows(path: Path, purge_step: int | None) -> Any:
    """Open the file for appending; drop rows after ``purge_step``, and a last row that was cut short."""
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
    """Append all of ``data`` or nothing."""
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(data) != len(data):
            raise OSError("it was cut short: is the disk full?")
    except OSError:
        file.truncate(start)
        raise
