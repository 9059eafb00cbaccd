"""Writing checkpoints, at once or in the background."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sheeplike import host
from sheeplike.checkpoint import snapshot
from sheeplike.checkpoint.directories import RETIRED, directory_name, prune, recover, temporary_name
from sheeplike.checkpoint.files import (
    FORMAT,
    MANIFEST,
    PART,
    check_loadable,
    claim,
    versions,
    write_manifest,
    write_part,
)
from sheeplike.checkpoint.journals import Altered, Journal, Plan, adopt
from sheeplike.checkpoint.reading import JOURNALS
from sheeplike.files import make_directory, sync_directory

Parts = Mapping[str, Mapping[str, Any]]
Journals = Mapping[str, Mapping[str, Journal]]


class NotWritten(OSError):
    """A checkpoint could not be written for a reason that is not the disk's; the error itself is the cause."""


@dataclass
class Saved:
    """A checkpoint that was written.

    Attributes:
        step: policy steps.
        path: its directory.
        blocked: seconds for which the caller waited.
        seconds: in all, from the call to the removal of old checkpoints.
        written, linked: bytes that were written, and those that only had to be linked.
    """

    step: int
    path: Path
    blocked: float = 0.0
    seconds: float = 0.0
    written: int = 0
    linked: int = 0


@dataclass
class _Job:
    """A checkpoint that is to be written; whatever can be refused has been."""

    root: Path
    step: int
    parts: dict[str, Any]
    meta: dict[str, Any]
    plans: dict[str, dict[str, Plan]]
    extra: dict[str, Any]
    keep_last: int
    keep_best: int
    resumed_from: int | None
    saved: Saved = field(init=False)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.saved = Saved(self.step, self.root / directory_name(self.step))

    def size(self) -> int:
        """Bytes of a snapshot."""
        return snapshot.size(self.parts) + sum(plan.fresh_bytes for plan in self._all_plans())

    def take(self) -> None:
        """Copy everything that may change from now on."""
        self.parts = {name: snapshot.take(part) for name, part in self.parts.items()}
        for plan in self._all_plans():
            plan.take()

    def write(self) -> Saved:
        """Write the directory, give it its name, and remove the checkpoints that need not be kept."""
        target, temporary = self.saved.path, temporary_name(self.root)
        try:
            temporary.mkdir()
            files = self._write_files(temporary)
            journals = {part: {n: plan.describe() for n, plan in plans.items()} for part, plans in self.plans.items()}
            manifest = {"format": FORMAT, "step": self.step, "files": files, "journals": journals}
            manifest |= {"versions": versions(), **self.extra, "meta": self.meta}
            write_manifest(temporary / MANIFEST, manifest)
            sync_directory(temporary)
            if target.exists():
                # No directory can be renamed onto another. Between these two renames the retired one still counts.
                os.rename(target, self.root / f"{RETIRED}{target.name}")
            os.rename(temporary, target)
            sync_directory(self.root)
        finally:
            recover(self.root)
        prune(self.root, self.step, self.keep_last, self.keep_best, self.resumed_from)
        self.saved.seconds = time.monotonic() - self.began
        return self.saved

    def _write_files(self, place: Path) -> dict[str, Any]:
        files: dict[str, Any] = {}
        for name in list(self.parts):
            files[f"{name}.pt"] = write_part(place / f"{name}.pt", self.parts.pop(name))  # its memory is free again
            self.saved.written += files[f"{name}.pt"]["bytes"]
        for plan in self._all_plans():
            for chunk in plan.chunks:
                linked = False
                if chunk.source is not None:
                    files[chunk.name], linked = adopt(chunk, place / chunk.name)
                else:
                    steps = chunk.steps or plan.journal.read(chunk.start, chunk.stop)
                    files[chunk.name] = write_part(place / chunk.name, steps)
                    chunk.steps = steps = None
                size = files[chunk.name]["bytes"]
                self.saved.linked += size * linked
                self.saved.written += size * (not linked)
        return files

    def _all_plans(self) -> Iterator[Plan]:
        for plans in self.plans.values():
            yield from plans.values()


def save(
    root: Path | str,
    step: int,
    parts: Parts,
    meta: Mapping[str, Any],
    *,
    keep_last: int,
    keep_best: int = 1,
    journals: Journals | None = None,
    finite: Collection[str] = (),
) -> Path:
    """Write a checkpoint at once, then remove those that need not be kept; see :class:`Writer`.

    Returns:
        The checkpoint's directory.

    Raises:
        InUse: a :class:`Writer`, here or in another process, has this directory.
        OSError: the disk, or :class:`NotWritten`; the earlier checkpoints are untouched.
        Otherwise what :class:`Writer` and its ``save`` raise.
    """
    root = Path(root)
    _check_numbers(keep_last, keep_best)
    _check(step, parts, meta, journals or {})
    with Writer(root, keep_last=keep_last, keep_best=keep_best) as writer:
        return writer._save_here(writer._job(step, parts, meta, journals or {}, finite)).path


class Writer:
    """Writes the checkpoints of one run, in the background.

    Args:
        root: where the run's checkpoints lie; made if it is not there. It is locked until :meth:`close`, and what a
            killed writer has left half-written is removed.
        keep_last: newest checkpoints that are kept, at least 1.
        keep_best: checkpoints that are kept beside them for their ``meta["score"]``, a finite number.
        resumed_from: step of the checkpoint that the run goes on from (see :meth:`went_back_to`).
        config: text of the run's configuration, whose SHA-256 goes into every manifest.
        device: kind of the device that the run computes on, likewise.
        report: is told, once for each kind of error, that a save in the background failed; by default a warning.

    Raises:
        ValueError: ``keep_last`` below 1 or ``keep_best`` below 0.
        InUse: another writer has ``root``.
        OSError: ``root`` cannot be made.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        resumed_from: int | None = None,
        config: str | None = None,
        device: str | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        _check_numbers(keep_last, keep_best)
        self.root, self.keep_last, self.keep_best = Path(root), keep_last, keep_best
        digest = None if config is None else hashlib.sha256(config.encode()).hexdigest()
        self.extra = {"device": device, "config_sha256": digest}
        self.last: Saved | None = None  # of those that were written, unless the run went back since
        self._resumed_from = resumed_from
        self._report = report or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=2))
        self._reported: set[Any] = set()
        self._distrusted: set[Path] = set()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        make_directory(self.root)
        self._lock = claim(self.root)
        with contextlib.suppress(OSError):  # a disk that cannot be written now may be later
            recover(self.root)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save(
        self,
        step: int,
        parts: Parts,
        meta: Mapping[str, Any],
        journals: Journals | None = None,
        *,
        finite: Collection[str] = ("agent",),
        wait: bool = False,
    ) -> None:
        """Copy the state to the host's memory, and write it in the background.

        The last save is waited for. Where the copy would take more than half of the memory that is free, the state is
        written before this returns, one chunk of the journals at a time. Whatever fails on the way to the disk is
        reported, and otherwise left to the next save.

        Args:
            step: policy steps; a checkpoint of the same step is replaced, one that is ahead of it is removed.
            parts: file name, without suffix, to a state dict of tensors, numbers, strings, bytes and containers of
                them. They may change as soon as this returns.
            meta: what JSON can hold. ``meta["score"]``, a number, says how good this checkpoint is.
            journals: part to name to what is only appended to, as far as that is not in the part itself.
            finite: parts that are not saved if a floating tensor in them is not finite.
            wait: until it is written, or has failed.

        Raises:
            TypeError: a part that could not be loaded again, by its key, or ``meta`` that is not JSON.
            ValueError: a negative ``step``, or a name that is no file name.
            NonFinite: by the tensor. In none of these cases is anything written.
            OSError: as of :meth:`wait`, if asked to wait; the earlier checkpoints are untouched.
        """
        begin = time.monotonic()
        self._join()
        job = self._job(step, parts, meta, journals or {}, finite)
        job.began = begin
        free = host.free_memory()
        if wait or (free is not None and job.size() > free // 2):
            self._error = None
            try:
                self._save_here(job)
            except OSError as error:
                if wait:
                    raise
                self._failed(error)
            job.saved.blocked = time.monotonic() - begin
            return
        job.take()
        self._error = None
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=False)
        self._thread.start()
        job.saved.blocked = time.monotonic() - begin

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            OSError: the last save failed. What is not the disk's failure, such as a lack of memory, is the cause of a
                :class:`NotWritten`.
        """
        self._join()
        if self._error is not None:
            raise self._error

    def went_back_to(self, step: int) -> None:
        """The run goes on from the checkpoint of ``step``.

        What is ahead of it was passed over, because it is damaged or not good: it is removed once another is written.
        """
        self._join()
        self._resumed_from = step
        self.last = None  # of a future that the run has left, though it may come to the same step again

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def holds(self, step: int) -> bool:
        """Whether the last checkpoint that was written, if need be after waiting for it, is that of ``step``."""
        self._join()
        return self.last is not None and self.last.step == step

    def close(self) -> None:
        """Wait for the save that is under way, and unlock the directory."""
        try:
            self._join()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _job(
        self, step: int, parts: Parts, meta: Mapping[str, Any], journals: Journals, finite: Collection[str]
    ) -> _Job:
        described = _check(step, parts, meta, journals)
        snapshot.check_finite(parts, finite)
        plans = {
            part: {name: Plan.make(part, name, entry, self.root, self._distrusted) for name, entry in entries.items()}
            for part, entries in journals.items()
            if entries
        }
        kept = self.keep_last, self.keep_best, self._resumed_from
        return _Job(self.root, step, dict(parts), described, plans, self.extra, *kept)

    def _save_here(self, job: _Job) -> Saved:
        """Write in this thread, without a copy."""
        job.parts = {name: snapshot.trim(part) for name, part in job.parts.items()}
        return self._write(job)

    def _run(self, job: _Job) -> None:
        try:
            self._write(job)
        except OSError as error:
            del job
            for each in (error, error.__cause__):  # or the copy of the state would live as long as the error
                traceback.clear_frames(each and each.__traceback__)
            self._failed(error)

    def _write(self, job: _Job) -> Saved:
        try:
            self.last = job.write()
        except Altered as error:
            self._distrusted.add(error.path)
            raise
        except OSError:
            raise
        except Exception as error:  # torch has errors of its own for a write that is cut short, and for its memory
            raise NotWritten(f"{type(error).__name__}: {error}") from error
        self._resumed_from = None  # what was ahead of it is gone
        return self.last

    def _failed(self, error: OSError) -> None:
        self._error = error
        kind = error.errno or type(error.__cause__ or error)
        if kind not in self._reported:
            self._reported.add(kind)
            with contextlib.suppress(Warning):  # of those who turn warnings into errors, which would be lost here
                self._report(f"a checkpoint could not be written; the next one is tried all the same: {error}")

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _check_numbers(keep_last: int, keep_best: int) -> None:
    if keep_last < 1:
        raise ValueError(f"keep_last={keep_last}: expected at least 1 checkpoint to be kept")
    if keep_best < 0:
        raise ValueError(f"keep_best={keep_best}: expected a number of checkpoints, 0 or more")


def _check(step: int, parts: Parts, meta: Mapping[str, Any], journals: Journals) -> dict[str, Any]:
    """Refuse what could not be written or loaded again; returns ``meta`` as JSON has it."""
    if step < 0:
        raise ValueError(f"step={step}: expected a number of policy steps, 0 or more")
    for name in (*parts, *(name for entries in journals.values() for name in entries)):
        if not PART.fullmatch(name) or name == JOURNALS:
            raise ValueError(f"part {name!r}: expected a file name of letters, digits, '_', '-' and '.'")
    for part in journals:
        if part not in parts:
            raise ValueError(f"journals of {part!r}: expected one of the parts {', '.join(parts)}")
    try:
        described = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta cannot be written as JSON: {error}") from None
    for name, part in parts.items():
        check_loadable(name, part)
    return described
