"""The records of a run: ``metrics.jsonl`` and TensorBoard, whose x-axis counts policy steps."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sheeplike.files import open_regular, write_atomically
from sheeplike.monitor.dashboard import layout, table_entry
from sheeplike.monitor.video import check_video, encode_gif

_FLUSH_SECONDS = 5


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
        self._writer = None
        if tensorboard:
            # Importing it takes seconds, which a run without TensorBoard need not pay.
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard hides the step that it is given as well; metrics.jsonl keeps it.
            purge = None if purge_step is None else purge_step + 1
            self._writer = SummaryWriter(self.run_dir, purge_step=purge, flush_secs=_FLUSH_SECONDS)
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
            step: policy steps. gradient_steps: updates. seconds: wall-clock time since the run began.

        Raises:
            ValueError: a metric is named like one of the axes.
        """
        axes = {"step": int(step), "gradient_steps": int(gradient_steps), "seconds": round(float(seconds), 3)}
        if taken := axes.keys() & metrics.keys():
            raise ValueError(f"metric {min(taken)!r}: the name is an axis of metrics.jsonl; expected <group>/<name>")
        values = {name: float(value) for name, value in metrics.items()}
        row = axes | {name: value if math.isfinite(value) else None for name, value in values.items()}
        with self._guard("metrics.jsonl"):
            _append(self._rows, row)
        self._tensorboard(lambda writer: [writer.add_scalar(name, value, step) for name, value in values.items()])

    def log_video(self, name: str, video: Tensor, *, step: int, fps: float) -> None:
        """Show a video as an animated GIF under TensorBoard's images; returns before it is encoded.

        Args:
            video: uint8 ``(T, H, W, 3)``; copied at once. fps: frames per second.

        Raises:
            TypeError, ValueError: another dtype or shape.
        """
        check_video(video, name)
        if self._writer is not None and not self._closed:
            frames = video.detach().to("cpu", copy=True)
            self._videos.put(lambda writer: _write_gif(writer, name, frames, step, fps))

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        """Show Markdown under TensorBoard's text."""
        self._tensorboard(lambda writer: writer.add_text(name, text, step))

    def log_hyperparameters(self, config: Mapping[str, Any]) -> None:
        """Enter the run into TensorBoard's table of runs (see :func:`~sheeplike.monitor.dashboard.table_entry`)."""
        self._tensorboard(lambda writer: [writer.file_writer.add_summary(part) for part in table_entry(config)])

    def log_layout(self, metrics: Iterable[str]) -> None:
        """Arrange the curves in charts, for an agent that writes ``metrics``; once is enough."""
        self._tensorboard(lambda writer: writer.add_custom_scalars(layout(metrics)))

    def close(self) -> None:
        """Finish the videos that are waiting, flush and close all writers. Calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._videos.put(None)
        self._encoder.join()
        self._tensorboard(lambda writer: writer.close())
        with self._guard("metrics.jsonl"):
            self._rows.close()

    def _encode(self) -> None:
        while (write := self._videos.get()) is not None:
            # Under "python -W error" a warning raises; a thread that died of it would block log_video for ever.
            with contextlib.suppress(Warning):
                self._tensorboard(write)

    def _tensorboard(self, write: Callable[[Any], object]) -> None:
        if self._writer is not None:
            with self._guard("TensorBoard"):
                write(self._writer)

    @contextlib.contextmanager
    def _guard(self, writer: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Whatever a writer raises, training is worth more than its record.
            if writer not in self._failed:
                self._failed.add(writer)
                problem = f"{writer} in {self.run_dir} cannot be written, training goes on: {error!r}"
                warnings.warn(problem, RuntimeWarning, stacklevel=4)


def _write_gif(writer: Any, name: str, video: Tensor, step: int, fps: float) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary

    # SummaryWriter.add_video needs moviepy, and with moviepy 2 writes nothing; an image may just as well be a GIF.
    height, width = video.shape[1:3]
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=encode_gif(video, fps))
    writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=image)]), step)


def _open_rows(path: Path, purge_step: int | None) -> Any:
    """The file, open for appending, without rows after ``purge_step`` and without a last row that was cut short."""
    if os.path.lexists(path):
        with open_regular(path) as file:
            lines = list(file)
        kept = [line for line in lines if _keep(line, purge_step)]
        if len(kept) != len(lines):
            write_atomically(path, b"".join(kept))
    return open(path, "ab", buffering=0)


def _keep(line: bytes, purge_step: int | None) -> bool:
    try:
        row = json.loads(line)
        return line.endswith(b"\n") and isinstance(row, dict) and (purge_step is None or row["step"] <= purge_step)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _append(file: Any, row: dict[str, Any]) -> None:
    """One whole line or nothing."""
    line = json.dumps(row, allow_nan=False).encode() + b"\n"
    start = file.seek(0, os.SEEK_END)
    try:
        if file.write(line) != len(line):
            raise OSError("the row was cut short: is the disk full?")
    except OSError:
        file.truncate(start)
        raise
