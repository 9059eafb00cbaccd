"""Checkpoints as directories that are whole or absent.

``<root>/step_<policy steps>/`` holds ``<part>.pt`` for each part and ``manifest.json`` with every file's size and
SHA-256. A directory is written under a temporary name beside its target (the same file system, whatever ``TMPDIR``
says), flushed to the disk, and only then renamed, so a kill or a power cut at any moment leaves the last one intact.
Reading verifies every byte first: ``torch.load`` alone does not notice a flipped bit. Nothing is ever unpickled but
tensors and plain Python values (``weights_only=True``), so a checkpoint from elsewhere can run no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import pickle
import re
import shutil
import uuid
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sheeplike import __version__
from sheeplike.files import open_regular, read_text

FORMAT = 1
MANIFEST = "manifest.json"
LARGEST_MANIFEST = 2**24  # bytes; one takes about a thousand
_TEMPORARY = ".tmp-"
_RETIRED = ".old-"
_NAME = re.compile(r"step_(\d{12,})")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


class Corrupt(Exception):
    """A checkpoint is incomplete or damaged; the message names the file."""


def save(
    root: Path | str, step: int, parts: Mapping[str, Mapping[str, Any]], meta: Mapping[str, Any], keep: int
) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep`` and the best.

    Args:
        root: where the run's checkpoints lie; made if it is not there. One process writes to it.
        step: policy steps; a checkpoint of the same step is replaced.
        parts: file name, without suffix, to a state dict of tensors, numbers, strings, bytes and containers of them.
        meta: what JSON can hold. ``meta["score"]``, a number, says how good this checkpoint is (see :func:`best`).
        keep: at least 1.

    Returns:
        The checkpoint's directory.

    Raises:
        TypeError: a part that could not be loaded again, by its key, or ``meta`` that is not JSON. Nothing is written.
        ValueError: ``keep`` below 1, a negative ``step``, or a part's name that is no file name.
        OSError: the disk; the earlier checkpoints are untouched.
    """
    root = Path(root)
    if keep < 1:
        raise ValueError(f"keep={keep}: expected at least 1 checkpoint to be kept")
    if step < 0:
        raise ValueError(f"step={step}: expected a number of policy steps, 0 or more")
    for name in parts:
        if not _PART.fullmatch(name):
            raise ValueError(f"part {name!r}: expected a file name of letters, digits, '_', '-' and '.'")
    try:
        described = json.loads(json.dumps(dict(meta)))
    except (TypeError, ValueError) as error:
        raise TypeError(f"meta cannot be written as JSON: {error}") from None
    for name, part in parts.items():
        _check_loadable(name, part)

    root.mkdir(parents=True, exist_ok=True)
    _recover(root)
    target = root / f"step_{step:012d}"
    temporary = root / f"{_TEMPORARY}{uuid.uuid4().hex}"
    try:
        temporary.mkdir()
        files = {f"{name}.pt": _write_part(temporary / f"{name}.pt", part) for name, part in parts.items()}
        manifest = {"format": FORMAT, "step": step, "files": files, "versions": _versions(), "meta": described}
        _write_manifest(temporary / MANIFEST, manifest)
        _sync_directory(temporary)
        if target.exists():
            # No directory can be renamed onto another. Between these two renames the retired one still counts.
            os.rename(target, root / f"{_RETIRED}{target.name}")
        os.rename(temporary, target)
        _sync_directory(root)
    finally:
        _recover(root)
    spared = best(root)
    for old in list_checkpoints(root)[:-keep]:
        if old != spared:
            _remove(old)
    return target


def load(
    path: Path | str, *, map_location: torch.device | str = "cpu", only: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Verify a checkpoint's directory and read it.

    Args:
        only: names of the parts that are wanted; others are neither read nor verified. All by default.

    Returns:
        ``meta`` as saved, with ``step`` and ``versions`` (of the packages that wrote it), and the parts by name, their
        tensors on ``map_location``.

    Raises:
        Corrupt: a file is missing, cut short, altered, or holds what ``weights_only`` refuses; by its name.
    """
    path = Path(path)
    manifest = _read_manifest(path / MANIFEST)
    parts: dict[str, Any] = {}
    for name, expected in manifest["files"].items():
        if not _PART.fullmatch(name):
            raise Corrupt(f"{path / MANIFEST}: names {name!r}, which is no file name")
        if only is None or name.removesuffix(".pt") in only:
            parts[name.removesuffix(".pt")] = _read_part(path / name, expected, map_location)
    return {**manifest["meta"], "step": manifest["step"], "versions": manifest["versions"]}, parts


def load_latest(
    root: Path | str, *, map_location: torch.device | str = "cpu", only: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint under ``root`` that is whole; warns of each damaged one that it passes over.

    Raises:
        FileNotFoundError: there is no checkpoint.
        Corrupt: there are checkpoints, and none of them is whole.
    """
    found = list_checkpoints(root)
    if not found:
        raise FileNotFoundError(f"no checkpoint in {root}: expected a directory such as step_{0:012d}")
    for path in reversed(found):
        try:
            return load(path, map_location=map_location, only=only)
        except Corrupt as error:
            warnings.warn(f"passing over a damaged checkpoint: {error}", RuntimeWarning, stacklevel=2)
    raise Corrupt(f"{root}: all {len(found)} checkpoints are damaged")


def best(root: Path | str) -> Path | None:
    """The checkpoint with the highest finite ``meta["score"]``, the oldest of several; None where none has a score.

    It follows from the manifests alone: there is no record of it that a kill could leave behind the truth.
    """
    scores: dict[Path, float] = {}
    for path in list_checkpoints(root):
        with contextlib.suppress(Corrupt):
            score = _read_manifest(path / MANIFEST)["meta"].get("score")
            if (isinstance(score, float) or (type(score) is int and abs(score) < 2**63)) and math.isfinite(score):
                scores[path] = score
    return max(scores, key=scores.__getitem__, default=None)


def list_checkpoints(root: Path | str) -> list[Path]:
    """Directories under ``root``, oldest first; they are not verified."""
    found: dict[int, Path] = {}
    for path in sorted(Path(root).glob("*"), reverse=True):  # ".old-…" comes last and counts where nothing replaced it
        match = _NAME.fullmatch(path.name.removeprefix(_RETIRED))
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found)]


def _recover(root: Path) -> None:
    """Undo what a killed or failed :func:`save` has left: half-written directories, and one retired too soon."""
    for retired in root.glob(f"{_RETIRED}*"):
        target = root / retired.name.removeprefix(_RETIRED)
        if target.exists():
            _remove(retired)
        else:
            os.rename(retired, target)
    for stale in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)


def _remove(path: Path) -> None:
    """Remove a checkpoint; a kill on the way leaves a temporary directory, never half a checkpoint."""
    temporary = path.with_name(f"{_TEMPORARY}{uuid.uuid4().hex}")
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


class _HashingFile:
    """Hashes what is written on its way to the disk: what the manifest promises is what was meant, not what arrived."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _write_part(path: Path, part: Mapping[str, Any]) -> dict[str, Any]:
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        torch.save(part, hashing)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": hashing.size, "sha256": hashing.digest.hexdigest()}


def _read_part(path: Path, expected: dict[str, Any], map_location: torch.device | str) -> Any:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise Corrupt(f"{path}: has {size} bytes, expected {expected['bytes']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                raise Corrupt(f"{path}: was altered, its SHA-256 is not the manifest's")
            file.seek(0)
            _check_archive(file)
            return torch.load(file, map_location=map_location, weights_only=True, mmap=False)
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise Corrupt(f"{path}: refused by weights_only: {str(error).splitlines()[0]}") from error
    except Corrupt:
        raise
    except Exception as error:  # torch and zipfile raise whatever they stumble over
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise  # which says nothing of the file
        reason = (str(error).splitlines() or [""])[0]
        raise Corrupt(f"{path}: is no file of a checkpoint: {type(error).__name__}: {reason}") from error


def _check_archive(file: BinaryIO) -> None:
    """Refuse an archive with compressed entries, which torch never writes: a small file could fill the memory."""
    if not zipfile.is_zipfile(file):
        file.seek(0)
        return
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("holds compressed entries")
    file.seek(0)


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest | {"sha256": _digest(manifest)}, indent=1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(read_text(path, LARGEST_MANIFEST))
        digest = manifest.pop("sha256")
        written = manifest["format"]
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path}: is no manifest: {error!r}") from None
    if digest != _digest(manifest):
        raise Corrupt(f"{path}: was altered, its SHA-256 is not its own")
    if written != FORMAT:
        raise Corrupt(f"{path}: has format {written}, expected {FORMAT}: written by another version of sheeplike")
    kinds = {"step": int, "files": dict, "versions": dict, "meta": dict}
    for name, kind in kinds.items():
        if type(manifest.get(name)) is not kind:
            raise Corrupt(f"{path}: is no manifest: {name} is no {kind.__name__}")
    if manifest["step"] < 0 or any(
        type(entry) is not dict or {"bytes", "sha256"} - entry.keys() for entry in manifest["files"].values()
    ):
        raise Corrupt(f"{path}: is no manifest: a negative step, or files without their size and SHA-256")
    return manifest


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sync_directory(path: Path) -> None:
    """A rename survives a power cut only once its directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"sheeplike": __version__}
    for package in ("torch", "jax", "mujoco"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _check_loadable(where: str, value: Any) -> None:
    """Raise ``TypeError`` for the first value that ``torch.load(weights_only=True)`` would not give back."""
    kind = type(value)  # Exactly: a numpy float is a float to isinstance, and is refused on loading.
    if kind in _SCALARS or kind in (torch.Tensor, torch.nn.Parameter):
        return
    if kind in (dict, OrderedDict):
        for key, entry in value.items():
            _check_loadable(f"a key of {where}", key)
            _check_loadable(f"{where}[{key!r}]", entry)
    elif kind in (list, tuple, set):
        for index, entry in enumerate(value):
            _check_loadable(f"{where}[{index}]", entry)
    else:
        raise TypeError(
            f"{where} is {kind.__module__}.{kind.__qualname__}: expected tensors, numbers, strings, bytes, or dicts, "
            "lists, tuples, sets of them (a numpy array as torch.as_tensor(array))"
        )
