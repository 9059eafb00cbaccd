"""Checkpoints, written and read atomically, and the replay beside them in files that are written once.

::

    <run>/checkpoints/step_<policy steps>/    <part>.pt for each part; manifest.json, with every size and SHA-256
    <run>/replay/<first>-<last>.pt            a chunk: time steps of the replay, which never change again

A directory is written under a temporary name beside its target, flushed to the disk, and only then renamed: a kill or a
power cut at any moment leaves the last one intact.

Of the replay (a :class:`History`) a checkpoint writes only new steps. Time is cut into chunks of equal length::

    time      oldest                             added
    ring         [..........................------]
    chunks    |..... ...|.........|.........|      |     written once; named, with their digests, by each manifest
    tail                                    |------|     written into each checkpoint, as are values that still change

A chunk that no manifest names is removed. A chunk is reused only if this process wrote or read it, never because of its
name: after a resume from an older checkpoint, the same times can hold other steps.

Reading verifies every byte first, since ``torch.load`` does not notice a flipped bit. Only tensors and plain Python
values are unpickled (``weights_only=True``), so a checkpoint from elsewhere runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import io
import json
import math
import os
import pickle
import platform
import re
import shutil
import threading
import traceback
import uuid
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import torch
from torch import Tensor

from sheeplike import __version__, files, host
from sheeplike.files import list_checkpoints, step_of
from sheeplike.terminal import first_sentence, reason_of, warn

FORMAT = 2
MANIFEST = "manifest.json"
NOT_WRITTEN = "a checkpoint could not be written; the next one is tried all the same"
HISTORY = "history"  # the part in which the tail of a History is saved
CHUNK_BYTES = 64 * 2**20
_LARGEST_MANIFEST = 2**24  # bytes; a usual one has a few thousand, and 200 per chunk
_TEMPORARY, _RETIRED = ".tmp-", ".old-"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a file's name, and no way out of its directory
_CHUNK = re.compile(r"[0-9]{12,}-[0-9]{12,}(?:\.[0-9]+)?\.pt")
_PACKAGES = ("torch", "jax", "jaxlib", "mujoco", "mujoco-mjx", "warp-lang")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)

Parts = Mapping[str, Mapping[str, Any]]


class Corrupt(Exception):
    """A checkpoint is incomplete or damaged; the message names the file."""


class UnknownFormat(Corrupt):
    """A checkpoint is whole, but of a format that this version cannot read."""


class NonFinite(ValueError):
    """A state holds NaN or infinity: it is neither saved nor loaded. The message names the tensor."""


class NotWritten(OSError):
    """A checkpoint could not be written because of an error that is no OSError, its ``__cause__``."""


# --- which checkpoints there are ------------------------------------------------------------------------------------


def best(root: Path | str) -> Path | None:
    """Return the oldest checkpoint with the highest finite ``meta["score"]``; None if none has a score."""
    return next(iter(_ranking(root)), None)


def _ranking(root: Path | str) -> list[Path]:
    """Return the checkpoints with a finite score, best first; of equal scores the oldest: later ones inherited it."""
    scores: dict[float, Path] = {}
    for path in list_checkpoints(root):
        with contextlib.suppress(Corrupt, TypeError, OverflowError):  # the last two: no float
            score = _read_manifest(path)["meta"].get("score")
            if math.isfinite(score):
                scores.setdefault(score, path)
    return [scores[score] for score in sorted(scores, reverse=True)]


def _replay_of(root: Path) -> Path:
    return root.absolute().parent / files.REPLAY


def _temporary(place: Path) -> Path:
    return place / f"{_TEMPORARY}{uuid.uuid4().hex}"


def _remove(path: Path) -> None:
    """Remove a checkpoint; a kill on the way leaves a temporary directory, never half a checkpoint."""
    temporary = _temporary(path.parent)
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def _recover(root: Path) -> None:
    """Clean up after a killed or failed save: remove half-written directories, restore a retired one."""
    for retired in root.glob(f"{_RETIRED}*"):
        target = root / retired.name.removeprefix(_RETIRED)
        if target.exists():
            _remove(retired)
        else:
            os.rename(retired, target)
    for stale in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)


# --- files ----------------------------------------------------------------------------------------------------------


class _HashingFile(io.BufferedWriter):
    """New file that hashes the data before it reaches the disk."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "x"))
        self.digest, self.error = hashlib.sha256(), None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def write_part(path: Path, part: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state dict to a new file and flush it to the disk; return its ``bytes`` and ``sha256``."""
    with _HashingFile(path) as file:
        try:
            torch.save(part, file)
        except RuntimeError:
            if file.error is not None:  # torch hides the error of a full disk
                raise file.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": file.digest.hexdigest()}


@contextlib.contextmanager
def _corrupt_if_unreadable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise Corrupt(f"{path}: is no text: {error}") from None


def _open_verified(path: Path, size: int, sha256: str) -> BinaryIO:
    """Open a file after checking its size and digest; it stays readable even if it is removed."""
    with _corrupt_if_unreadable(path), contextlib.ExitStack() as stack:
        file = stack.enter_context(files.open_regular(path))
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Corrupt(f"{path}: has {found} bytes, expected {size}")
        if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise Corrupt(f"{path}: was altered, its SHA-256 is not the manifest's")
        file.seek(0)
        stack.pop_all()
        return file


def _read_part(file: BinaryIO, path: Path) -> Any:
    """Read a file of :func:`write_part`; Corrupt if ``weights_only`` refuses it."""
    try:
        with _corrupt_if_unreadable(path):
            if zipfile.is_zipfile(file):
                with zipfile.ZipFile(file) as archive:
                    # torch never writes compressed entries, with which a small file could fill the memory.
                    if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                        raise ValueError("holds compressed entries")
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True, mmap=False)
    except (Corrupt, MemoryError, torch.OutOfMemoryError):
        raise
    except pickle.UnpicklingError as error:
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]  # advice to unpickle it anyway comes first
        raise Corrupt(f"{path}: refused by weights_only: {first_sentence(reason)}") from error
    except Exception as error:  # torch and zipfile raise errors of many kinds
        if "allocate memory" in str(error):
            raise
        reason = f"{type(error).__name__}: {first_sentence(error)}"
        raise Corrupt(f"{path}: is no file of a checkpoint: {reason}") from error


def _digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Read a manifest and verify it by its own digest, which is left out."""
    path = checkpoint / MANIFEST
    with _corrupt_if_unreadable(path):
        return parse_manifest(files.read_text(path, _LARGEST_MANIFEST), checkpoint)


def parse_manifest(text: str, checkpoint: Path) -> dict[str, Any]:
    """Parse a manifest and verify it by its own digest, which is left out; Corrupt if anything is wrong."""
    path = checkpoint / MANIFEST
    try:
        manifest = json.loads(text)
        if manifest.pop("sha256") != _digest_of(manifest):
            raise Corrupt(f"{path}: was altered, its SHA-256 is not its own")
        if manifest["format"] != FORMAT:
            by = manifest.get("versions", {}).get("sheeplike", "of another version")
            found = f"has format {manifest['format']}, written by sheeplike {by}"
            raise UnknownFormat(f"{path}: {found}; this is sheeplike {__version__}, which reads format {FORMAT}")
        # The digest detects damage, not forgery, so names of files and numbers are checked.
        kinds = {"step": int, "files": dict, "chunks": list, "versions": dict, "meta": dict, "config": dict}
        if wrong := [name for name, kind in kinds.items() if type(manifest[name]) is not kind]:
            raise ValueError(f"{wrong[0]} is {manifest[wrong[0]]!r}")
        if manifest["step"] != step_of(checkpoint):
            raise ValueError(f"it is of step {manifest['step']}, and not of the one in its name")
        for name, entry in manifest["files"].items():
            if not _PART.fullmatch(name) or {"bytes", "sha256"} - entry.keys():
                raise ValueError(f"{name!r} is no file with a size and a SHA-256")
        manifest["chunks"] = [Chunk(*entry) for entry in manifest["chunks"]]
        for chunk in manifest["chunks"]:
            whole = [type(value) for value in chunk] == [str, int, int, int, str]
            if not whole or not _CHUNK.fullmatch(chunk.name) or not 0 <= chunk.start < chunk.stop:
                raise ValueError(f"{chunk} is no chunk")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path}: is no manifest: {error!r}") from None
    return manifest


def files_of(checkpoint: Path, manifest: Mapping[str, Any]) -> dict[Path, tuple[int, str]]:
    """Return size and SHA-256 of each file that a checkpoint needs beside its manifest: parts and chunks."""
    parts = {checkpoint / name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    replay = _replay_of(checkpoint.parent)
    return parts | {replay / chunk.name: (chunk.bytes, chunk.sha256) for chunk in manifest["chunks"]}


def install(checkpoint: Path, text: str, get: Callable[[str, Path], None]) -> None:
    """Make a checkpoint of the text of its manifest and the files that ``get(sha256, path)`` writes.

    Chunks that are there already are kept. Corrupt if a file is not what the manifest says; then nothing is made.
    """
    manifest, temporary = parse_manifest(text, checkpoint), _temporary(checkpoint.parent)
    files.make_directory(temporary)
    try:
        for path, (size, sha256) in files_of(temporary, manifest).items():
            with contextlib.suppress(Corrupt):
                _open_verified(path, size, sha256).close()
                continue
            files.make_directory(path.parent)
            target = _temporary(path.parent)
            get(sha256, target)
            with _open_verified(target, size, sha256) as file:
                os.fsync(file.fileno())
            os.replace(target, path)  # a kill leaves no half of a chunk under its name
        files.write_atomically(temporary / MANIFEST, text)
        os.rename(temporary, checkpoint)
        files.sync_directory(checkpoint.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def versions() -> dict[str, str | None]:
    """Return the versions that a bit-exact continuation depends on; None for a package that is not installed."""
    found = {"sheeplike": __version__, "python": platform.python_version(), **dict.fromkeys(_PACKAGES)}
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


# --- states ---------------------------------------------------------------------------------------------------------


def _tensors(where: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a state with their keys; TypeError for what ``torch.load(weights_only=True)`` refuses."""
    kind = type(value)  # a numpy float is a float to isinstance, and is refused on loading
    if kind in (Tensor, torch.nn.Parameter):
        yield where, value
    elif kind in (dict, OrderedDict):
        for key, entry in value.items():
            yield from _tensors(f"a key of {where}", key)
            yield from _tensors(f"{where}[{key!r}]", entry)
    elif kind in (list, tuple, set):
        for index, entry in enumerate(value):
            yield from _tensors(f"{where}[{index}]", entry)
    elif kind not in _PLAIN:
        raise TypeError(
            f"{where} is {kind.__module__}.{kind.__qualname__}: expected tensors, numbers, strings, bytes, or dicts, "
            "lists, tuples, sets of them (a numpy array as torch.as_tensor(array))"
        )


def check_finite(name: str, state: Any) -> None:
    """Raise :class:`NonFinite` if a floating tensor in ``state``, which errors call ``name``, is not finite."""
    # One reduction per tensor, and one read by the host per device.
    devices: dict[torch.device, dict[str, Tensor]] = {}
    for where, value in _tensors(name, state):
        if value.is_floating_point() or value.is_complex():
            devices.setdefault(value.device, {})[where] = value.detach().isfinite().all()
    for checks in devices.values():
        for where, finite in zip(checks, torch.stack(list(checks.values())).tolist(), strict=True):
            if not finite:
                raise NonFinite(f"{where} holds NaN or infinity")


def _snapshot(value: Any, *, copied: bool) -> Any:
    """Copy the containers of a state, and its tensors to the host's memory if ``copied``."""
    if isinstance(value, Tensor):
        value = value.detach()
        # torch.save would write a view with all of the memory behind it.
        is_view = value.untyped_storage().nbytes() > value.nbytes
        return value.to("cpu", copy=True) if copied or is_view else value
    if isinstance(value, dict):
        result = type(value)((key, _snapshot(entry, copied=copied)) for key, entry in value.items())
        if isinstance(value, OrderedDict):
            vars(result).update(vars(value))  # state dicts of modules keep their versions there
        return result
    if isinstance(value, list | tuple | set):
        return type(value)(_snapshot(entry, copied=copied) for entry in value)
    return value


# --- the history ----------------------------------------------------------------------------------------------------


class History(Protocol):
    """Ring of time steps ``[oldest, added)`` that never change: ``sheeplike.memory.SequenceReplay``."""

    added: int
    chunks: list[Any]  # files that hold some of the steps; a new, empty list when the content is replaced

    @property
    def oldest(self) -> int: ...
    @property
    def step_bytes(self) -> int: ...
    def read_steps(self, start: int, stop: int) -> dict[str, Tensor]: ...
    def write_steps(self, start: int, steps: Mapping[str, Tensor]) -> None: ...


class Chunk(NamedTuple):
    """File of the time steps ``[start, stop)``, and its entry in a manifest."""

    name: str
    start: int
    stop: int
    bytes: int
    sha256: str


class Stored(NamedTuple):
    """History in a checkpoint, verified but not yet read, since it may need most of the memory."""

    place: Path
    chunks: tuple[Chunk, ...]
    tail_start: int
    tail: Mapping[str, Tensor]

    def copy_to(self, history: History, columns: slice | None = None) -> None:
        """Restore a history, one chunk in memory at a time; Corrupt or ValueError if a file was altered meanwhile.

        With ``columns``, the second axis of all steps is cut, and no file will be reused.
        """
        for chunk in self.chunks:
            path = self.place / chunk.name
            with _corrupt_if_unreadable(path), files.open_regular(path) as file:
                steps = _read_part(file, path)
            # The range in the manifest decides later whether the file is reused.
            if any(len(value) != chunk.stop - chunk.start for value in steps.values()):
                raise ValueError(f"{path} does not hold the steps [{chunk.start}, {chunk.stop})")
            history.write_steps(chunk.start, _cut(steps, columns))
        if any(len(value) for value in self.tail.values()):
            history.write_steps(self.tail_start, _cut(self.tail, columns))
        history.chunks = list(self.chunks) if columns is None else []


def _cut(steps: Mapping[str, Tensor], columns: slice | None) -> Mapping[str, Tensor]:
    return steps if columns is None else {key: value[:, columns] for key, value in steps.items()}


class _Plan:
    """Plan of the steps of a history that a checkpoint writes.

    Attributes:
        known: files that hold steps of this history.
        chunks, missing: files that the checkpoint uses, and ``(start, stop)`` of those still to be written.
        tail, end: the steps ``[tail, end)`` are written into the checkpoint itself.
    """

    def __init__(self, history: History, place: Path) -> None:
        self.history, self.place = history, place
        # Shared, not copied: a history whose content is replaced gets a new list.
        self.known: list[Chunk] = history.chunks
        self.known[:] = [chunk for chunk in self.known if chunk.stop > history.oldest and self._is_there(chunk)]
        self.chunks: list[Chunk] = []
        self.missing: list[tuple[int, int]] = []
        self.copies: dict[int, Mapping[str, Tensor]] = {}
        self.tail, self.end = history.oldest, history.added
        length = max(1, CHUNK_BYTES // history.step_bytes)
        while True:
            found = max((c for c in self.known if c.start <= self.tail < c.stop), key=lambda c: c.stop, default=None)
            stop = found.stop if found else (self.tail // length + 1) * length
            if stop > self.end:
                break
            if found:
                self.chunks.append(found)
            else:
                self.missing.append((self.tail, stop))
            self.tail = stop
        self.bytes = history.step_bytes * sum(stop - start for start, stop in [*self.missing, (self.tail, self.end)])

    def _is_there(self, chunk: Chunk) -> bool:
        """Return True if a file has its full length; reading every byte at each save would take too long."""
        with contextlib.suppress(OSError):
            return (self.place / chunk.name).lstat().st_size == chunk.bytes
        return False

    def copy(self) -> None:
        """Copy the missing steps to the host's memory, so that the history may change."""
        self.copies = {start: self.history.read_steps(start, stop) for start, stop in self.missing}

    def write(self) -> None:
        """Write the missing chunks, one after the other."""
        for start, stop in self.missing:
            files.make_directory(self.place)
            stem, number = f"{start:012d}-{stop - 1:012d}", 0
            name, temporary = f"{stem}.pt", _temporary(self.place)
            # A file of this name belongs to a kept checkpoint that holds other steps of the same times.
            while os.path.lexists(self.place / name):
                number += 1
                name = f"{stem}.{number}.pt"
            try:
                entry = write_part(temporary, self.copies.pop(start, None) or self.history.read_steps(start, stop))
                os.rename(temporary, self.place / name)
            finally:
                temporary.unlink(missing_ok=True)
            self.known.append(Chunk(name, start, stop, **entry))
            self.chunks.append(self.known[-1])
        if self.missing:
            files.sync_directory(self.place)
        self.chunks.sort(key=lambda chunk: chunk.start)


# --- writing --------------------------------------------------------------------------------------------------------


class Writer(contextlib.AbstractContextManager):
    """Writer of one run's checkpoints, in the background. The caller must hold the lock of the run.

    Args:
        root: directory of the checkpoints. It is created, and what a killed writer left is removed. Chunks lie beside
            it, in ``replay``.
        keep_last: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the highest ``meta["score"]`` to keep.
        config, device: entries of every manifest.
        report: called with one line for each new kind of error; by default on stderr.
        check: raises OSError if nothing may be written or removed any more.

    Attributes:
        written: called after each checkpoint, in the thread that has written it.
        pinned: step of a checkpoint that is kept for now.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep_last: int = 2,
        keep_best: int = 1,
        config: Mapping[str, Any] | None = None,
        device: str | None = None,
        report: Callable[[str], None] = warn,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        assert keep_last >= 1, keep_last
        self.root, self.keep_last, self.keep_best = Path(root).absolute(), keep_last, keep_best
        self.replay = _replay_of(self.root)
        self.extra = {"device": device, "config": dict(config or {})}
        self.written: Callable[[], None] = lambda: None
        self.pinned: int | None = None
        self._resumed_from: int | None = None
        self._check = check
        self._report = report
        self._reported: set[Any] = set()
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None
        files.make_directory(self.root)
        with contextlib.suppress(OSError):  # the disk may be full only for now
            _recover(self.root)

    def save(
        self,
        step: int,
        parts: Parts,
        meta: Mapping[str, Any],
        history: History | None = None,
        *,
        finite: Collection[str] = ("agent",),
        wait: bool = False,
    ) -> None:
        """Wait for the last save, copy the state to the host's memory, and write it in the background.

        If the copy would take more than half of the free memory, the state is written before this returns, one chunk of
        the history at a time. A failed write is reported and leaves the earlier checkpoints as they are.

        Args:
            step: policy steps. A checkpoint of the same step is replaced, later ones are removed.
            parts: file name, without suffix, to a state dict; it may change as soon as this returns.
            meta: values for JSON; ``meta["score"]`` ranks the checkpoints.
            history: only its new steps are written.
            finite: parts whose tensors must be finite.
            wait: write before this returns; OSError if that fails.
        """
        assert step >= 0, step
        assert all(_PART.fullmatch(name) and name != HISTORY for name in parts), list(parts)
        self.close()
        meta = json.loads(json.dumps(dict(meta)))
        needed = sum(tensor.nbytes for name, part in parts.items() for _, tensor in _tensors(name, part))
        for name in finite:
            check_finite(name, parts.get(name))
        plan = None if history is None else _Plan(history, self.replay)
        needed, free = needed + (plan.bytes if plan else 0), host.free_memory()
        in_background = not wait and (free is None or needed <= free // 2)
        parts = {name: _snapshot(part, copied=in_background) for name, part in parts.items()}
        if plan:
            parts[HISTORY] = {"start": plan.tail, "steps": history.read_steps(plan.tail, plan.end)}
            if in_background:
                plan.copy()
        self._error, job = None, (step, parts, meta, plan)
        if in_background:
            self._thread = threading.Thread(target=self._run, args=job, name="checkpoint", daemon=False)
            self._thread.start()
        elif wait:
            self._write(*job)
        else:
            self._run(*job)

    def wait(self) -> None:
        """Wait for the current save; OSError, such as :class:`NotWritten`, if it failed."""
        self.close()
        if self._error is not None:
            raise self._error

    def resumed_from(self, step: int) -> None:
        """Abandon checkpoints after ``step``; the next save removes their chunks first and their directories last."""
        self.close()
        self._resumed_from = step

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the current save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, *job: Any) -> None:
        try:
            self._write(*job)
        except OSError as error:
            del job
            for each in (error, error.__cause__):  # their frames would keep the copy of the state alive
                traceback.clear_frames(each and each.__traceback__)
            self._error, kind = error, error.errno or type(error.__cause__ or error)
            if kind not in self._reported:
                self._reported.add(kind)
                self._report(f"{NOT_WRITTEN}: {reason_of(error)}")

    def _write(self, step: int, parts: dict[str, Any], meta: dict[str, Any], plan: _Plan | None) -> None:
        """Write new chunks of the history, then the directory, then remove what need not be kept."""
        try:
            self._check()
            self._remove_chunks(plan, up_to=self._resumed_from)
            if plan:
                plan.write()
            self._write_directory(step, parts, meta, plan.chunks if plan else [])
            self._check()
            self._prune(step)
            self._remove_chunks(plan)
        except OSError:
            raise
        except Exception as error:  # torch raises other errors for a short write and for memory
            raise NotWritten(f"{type(error).__name__}: {error}") from error
        self._resumed_from = None
        self.written()

    def _write_directory(self, step: int, parts: dict[str, Any], meta: dict[str, Any], chunks: list[Chunk]) -> None:
        path, temporary = self.root / f"step_{step:012d}", _temporary(self.root)
        try:
            temporary.mkdir()
            # A part that is written frees its memory.
            entries = {f"{name}.pt": write_part(temporary / f"{name}.pt", parts.pop(name)) for name in list(parts)}
            manifest = {"format": FORMAT, "step": step, "files": entries, "chunks": chunks}
            manifest |= {"versions": versions(), **self.extra, "meta": meta}
            text = json.dumps(manifest | {"sha256": _digest_of(manifest)}, indent=1)
            files.write_atomically(temporary / MANIFEST, text)
            if path.exists():
                # A directory cannot be renamed onto another. Between the two renames the retired one counts.
                os.rename(path, self.root / f"{_RETIRED}{path.name}")
            os.rename(temporary, path)
            files.sync_directory(self.root)
        finally:
            _recover(self.root)

    def _prune(self, step: int) -> None:
        """Remove abandoned checkpoints, and those beyond ``keep_last`` and ``keep_best``, after writing ``step``."""
        reached = step if self._resumed_from is None else min(step, self._resumed_from)
        found = list_checkpoints(self.root)
        valid = [path for path in found if step_of(path) <= reached or step_of(path) == step]
        spared = valid[-self.keep_last :] + [path for path in _ranking(self.root) if path in valid][: self.keep_best]
        for path in found:
            if path not in spared and step_of(path) != self.pinned:
                _remove(path)

    def _remove_chunks(self, plan: _Plan | None, up_to: int | None = None) -> None:
        """Remove chunks that neither the history nor a checkpoint up to step ``up_to`` needs."""
        if not self.replay.is_dir():
            return
        needed = {chunk.name for chunk in plan.known} if plan else set()
        try:
            for path in list_checkpoints(self.root):
                if up_to is None or step_of(path) <= up_to:
                    needed |= {chunk.name for chunk in _read_manifest(path)["chunks"]}
        except Corrupt:  # its manifest may name any chunk, once the disk can be read again
            return
        for file in self.replay.iterdir():
            if file.name.startswith(_TEMPORARY) or (_CHUNK.fullmatch(file.name) and file.name not in needed):
                file.unlink()


# --- reading --------------------------------------------------------------------------------------------------------


def load(path: Path | str, *, only: Collection[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Verify a checkpoint and read it, or its parts in ``only``.

    Returns:
        ``meta`` as saved, with ``step``, ``versions``, ``device`` and ``config`` of the manifest; and the parts by
        name, their tensors in the host's memory. A saved history is a :class:`Stored`.

    Raises:
        Corrupt: a file is missing, cut short, altered, or refused by ``weights_only``.
        UnknownFormat: another version of sheeplike wrote it, in a format that this one cannot read.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    chunks, place = manifest["chunks"], _replay_of(path.absolute().parent)
    entries = {file.removesuffix(".pt"): (path / file, entry) for file, entry in manifest["files"].items()}
    entries = {name: entry for name, entry in entries.items() if only is None or name in only}
    with contextlib.ExitStack() as stack:
        opened = {}
        for name, (file, entry) in entries.items():
            opened[name] = stack.enter_context(_open_verified(file, entry["bytes"], entry["sha256"]))
        for chunk in chunks if HISTORY in entries else ():
            _open_verified(place / chunk.name, chunk.bytes, chunk.sha256).close()
        parts = {name: _read_part(file, entries[name][0]) for name, file in opened.items()}
    if HISTORY in parts:
        try:
            parts[HISTORY] = Stored(place, tuple(chunks), parts[HISTORY]["start"], parts[HISTORY]["steps"])
        except (LookupError, TypeError):
            raise Corrupt(f"{path}: its part {HISTORY} is no history") from None
    written = {key: manifest.get(key) for key in ("step", "versions", "device", "config")}
    return {**manifest["meta"], **written}, parts


def load_latest(root: Path | str, *, only: Collection[str] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """:func:`load` the newest checkpoint under ``root`` that is whole, and warn of each damaged one.

    FileNotFoundError if there is no checkpoint, Corrupt if none is whole. UnknownFormat if the newest whole one has
    another format: going on from an older one would undo it.
    """
    paths = list_checkpoints(root)
    for path in reversed(paths):
        try:
            return load(path, only=only)
        except UnknownFormat:
            raise
        except Corrupt as error:
            if not path.exists():  # a running writer has replaced it by newer ones
                return load_latest(root, only=only)
            warnings.warn(f"passing over a damaged checkpoint: {error}", RuntimeWarning, stacklevel=2)
    if not paths:
        raise FileNotFoundError(f"no checkpoint in {root}: expected a directory such as step_{0:012d}")
    raise Corrupt(f"{root}: all {len(paths)} checkpoints are damaged")
