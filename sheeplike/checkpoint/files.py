"""The files of a checkpoint: written with their digests, verified before they are read."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import pickle
import platform
import re
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from sheeplike import __version__
from sheeplike.files import lock, open_regular, read_text

FORMAT = 2
READABLE = (1, 2)  # 1 had no journals: all that an agent had seen was in one part
MANIFEST = "manifest.json"
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # a file's name, and no way out of its directory
LARGEST_MANIFEST = 2**24  # bytes; one takes a few thousand
_PACKAGES = ("torch", "jax", "jaxlib", "mujoco", "mujoco-mjx", "warp-lang")
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype, torch.device)


class Corrupt(Exception):
    """A checkpoint is incomplete or damaged; the message names the file."""


class UnknownFormat(Corrupt):
    """A checkpoint is whole, and of a format that this version cannot read."""


class InUse(RuntimeError):
    """Another writer has the directory of checkpoints."""


class _HashingFile:
    """Hashes what is written on its way to the disk: what the manifest promises is what was meant, not what arrived."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = 0
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()

    def entry(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self.digest.hexdigest()}


def write_part(path: Path, part: Mapping[str, Any]) -> dict[str, Any]:
    """Write a state dict and flush it to the disk; returns its entry in the manifest."""
    with open(path, "wb") as file:
        hashing = _HashingFile(file)
        try:
            torch.save(part, hashing)
        except RuntimeError:
            if hashing.error is not None:  # torch has an error of its own for a disk that is full
                raise hashing.error from None
            raise
        file.flush()
        os.fsync(file.fileno())
    return hashing.entry()


def copy_file(source: Path, target: Path) -> dict[str, Any]:
    """Copy a file and flush it to the disk; returns the entry that is true of the copy."""
    with open_regular(source) as old, open(target, "wb") as file:
        hashing = _HashingFile(file)
        while block := old.read(1 << 20):
            hashing.write(block)
        file.flush()
        os.fsync(file.fileno())
    return hashing.entry()


def open_verified(path: Path, expected: Mapping[str, Any]) -> BinaryIO:
    """Open a file of which every byte is as the manifest says; what is open stays readable when it is removed.

    Raises:
        Corrupt: it is missing, cut short or altered.
    """
    try:
        file = open_regular(path)
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise Corrupt(f"{path}: has {size} bytes, expected {expected['bytes']}")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
            raise Corrupt(f"{path}: was altered, its SHA-256 is not the manifest's")
        file.seek(0)
    except OSError as error:
        file.close()
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    except Corrupt:
        file.close()
        raise
    return file


def read_part(file: BinaryIO, path: Path, map_location: torch.device | str = "cpu") -> Any:
    """Read what :func:`write_part` wrote.

    Raises:
        Corrupt: it holds what ``weights_only`` refuses, or cannot be read.
    """
    try:
        _check_archive(file)
        return torch.load(file, map_location=map_location, weights_only=True, mmap=False)
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    except pickle.UnpicklingError as error:
        raise Corrupt(f"{path}: refused by weights_only: {str(error).splitlines()[0]}") from error
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


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest, with its own digest in it, and flush it to the disk."""
    text = json.dumps(manifest | {"sha256": digest_of(manifest)}, indent=1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest, verified by its own digest, which is left out.

    Raises:
        Corrupt: it is missing or damaged.
        UnknownFormat: it is whole, and of another format.
    """
    try:
        manifest = json.loads(read_text(path, LARGEST_MANIFEST))
        digest = manifest.pop("sha256")
        written = manifest["format"]
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Corrupt(f"{path}: is no manifest: {error!r}") from None
    if digest != digest_of(manifest):
        raise Corrupt(f"{path}: was altered, its SHA-256 is not its own")
    if written not in READABLE:
        by = manifest.get("versions")
        by = f", written by sheeplike {by['sheeplike']}" if isinstance(by, dict) and "sheeplike" in by else ""
        raise UnknownFormat(
            f"{path}: has format {written}{by}; this is sheeplike {__version__}, which reads formats "
            f"{' and '.join(map(str, READABLE))}"
        )
    kinds = {"step": int, "files": dict, "versions": dict, "meta": dict}
    for name, kind in kinds.items():
        if type(manifest.get(name)) is not kind:
            raise Corrupt(f"{path}: is no manifest: {name} is no {kind.__name__}")
    if manifest["step"] < 0 or any(
        type(entry) is not dict or {"bytes", "sha256"} - entry.keys() for entry in manifest["files"].values()
    ):
        raise Corrupt(f"{path}: is no manifest: a negative step, or files without their size and SHA-256")
    for name in manifest["files"]:
        if not PART.fullmatch(name):
            raise Corrupt(f"{path}: names {name!r}, which is no file name")
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def claim(root: Path) -> int | None:
    """Lock the directory until the descriptor that is returned is closed, or the process ends in whatever way.

    Returns:
        None where the file system knows no locks.

    Raises:
        InUse: it is locked.
    """
    if os.name == "nt":  # which opens no directories
        return None
    descriptor = os.open(root, os.O_RDONLY)
    try:
        if lock(descriptor):
            return descriptor
    except BlockingIOError:
        os.close(descriptor)
        raise InUse(f"{root}: checkpoints are being written there by another writer: one at a time") from None
    os.close(descriptor)
    return None


def versions() -> dict[str, str | None]:
    """Of everything that a bit-exact continuation hangs on; None for what is not installed."""
    found: dict[str, str | None] = {"sheeplike": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def check_loadable(where: str, value: Any) -> None:
    """Raise ``TypeError`` for the first value that ``torch.load(weights_only=True)`` would not give back."""
    kind = type(value)  # Exactly: a numpy float is a float to isinstance, and is refused on loading.
    if kind in _SCALARS or kind in (torch.Tensor, torch.nn.Parameter):
        return
    if kind in (dict, OrderedDict):
        for key, entry in value.items():
            check_loadable(f"a key of {where}", key)
            check_loadable(f"{where}[{key!r}]", entry)
    elif kind in (list, tuple, set):
        for index, entry in enumerate(value):
            check_loadable(f"{where}[{index}]", entry)
    else:
        raise TypeError(
            f"{where} is {kind.__module__}.{kind.__qualname__}: expected tensors, numbers, strings, bytes, or dicts, "
            "lists, tuples, sets of them (a numpy array as torch.as_tensor(array))"
        )
