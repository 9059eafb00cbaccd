"""Reading checkpoints: verified as a whole before anything of them is used."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from sheeplike.checkpoint.directories import list_checkpoints
from sheeplike.checkpoint.files import (
    MANIFEST,
    Corrupt,
    UnknownFormat,
    digest_of,
    open_verified,
    read_manifest,
    read_part,
)
from sheeplike.checkpoint.journals import Stored, described_journals

JOURNALS = "journals"  # the part by which load() returns them


class _OnlyJournals(Corrupt):
    """Only parts that have journals are damaged."""


def load(
    path: Path | str, *, map_location: torch.device | str = "cpu", only: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Verify a checkpoint's directory and read it.

    Args:
        only: names of the parts that are wanted; others, and their journals, are neither read nor verified. All by
            default.

    Returns:
        ``meta`` as saved, with ``step``, ``versions`` (of the packages that wrote it), ``device`` and
        ``config_sha256``; and the parts by name, their tensors on ``map_location``. Where parts have journals, those
        are there too, verified but not yet read: ``parts["journals"][part][name]`` is a :class:`Stored`.

    Raises:
        Corrupt: a file is missing, cut short, altered, or holds what ``weights_only`` refuses; by its name.
        UnknownFormat: it was written by another version of sheeplike, in a format that this one cannot read.
    """
    return _load(Path(path), map_location, only)


def load_latest(
    root: Path | str, *, map_location: torch.device | str = "cpu", only: Collection[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest checkpoint under ``root`` that is whole; warns of each damaged one that it passes over.

    Checkpoints share the files of their journals, so that one flipped bit can damage all of them. Where nothing else is
    damaged, the newest is loaded without the parts that have journals, with a warning.

    Another process may go on writing and removing checkpoints meanwhile.

    Raises:
        FileNotFoundError: there is no checkpoint.
        Corrupt: there are checkpoints, and none of them is whole.
        UnknownFormat: the newest that is whole is of another format: going on from an older one would undo it.
    """
    tried: set[tuple[int, int]] = set()
    forgetful: Path | None = None
    reasons: list[str] = []
    while (found := _newest(root, tried)) is not None:
        path, identity = found
        try:
            return _load(path, map_location, only)
        except UnknownFormat:
            raise
        except Corrupt as error:
            tried.add(identity)
            if _identity(path) != identity:  # removed or replaced while it was read: nothing is wrong with it
                continue
            if isinstance(error, _OnlyJournals) and forgetful is None:
                forgetful = path
            reasons.append(str(error))
            warnings.warn(f"passing over a damaged checkpoint: {error}", RuntimeWarning, stacklevel=2)
    if forgetful is not None:
        loaded = _load(forgetful, map_location, only, journals=False)
        warnings.warn(
            f"{forgetful}: loaded without what the agent has seen, since every checkpoint of that is damaged. The "
            "resume is approximate: it begins with an empty memory",
            RuntimeWarning,
            stacklevel=2,
        )
        return loaded
    if not reasons:
        raise FileNotFoundError(f"no checkpoint in {root}: expected a directory such as step_{0:012d}")
    raise Corrupt(f"{root}: all {len(reasons)} checkpoints are damaged")


def _newest(root: Path | str, tried: Collection[tuple[int, int]]) -> tuple[Path, tuple[int, int]] | None:
    """The newest directory that has not been tried, and what tells it from another of the same name."""
    empty = 0
    while True:
        identities = {path: _identity(path) for path in reversed(list_checkpoints(root))}
        # A directory is not listed at one moment: the list can miss the newest checkpoint because it was not yet there,
        # and the one before because it was no longer.
        if not identities and empty < 10:
            empty += 1
            time.sleep(0.005)
            continue
        if None not in identities.values():  # else one was removed since it was listed, and a newer one may be there
            return next(((path, found) for path, found in identities.items() if found not in tried), None)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    # An inode is given to a new directory at once; that one is younger.
    return status.st_ino, status.st_mtime_ns


def _load(
    path: Path, map_location: torch.device | str, only: Collection[str] | None, *, journals: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = read_manifest(path / MANIFEST)
    files, described = manifest["files"], described_journals(path, manifest)
    chunks = [file for part in described.values() for journal in part.values() for file, *_ in journal["chunks"]]
    wanted = [name for name in files if name not in chunks and (only is None or name.removesuffix(".pt") in only)]
    if not journals:
        wanted = [name for name in wanted if name.removesuffix(".pt") not in described]
    remembered = [name for name in wanted if name.removesuffix(".pt") in described]
    digest = digest_of(manifest)
    stored: dict[str, dict[str, Stored]] = {}
    with ExitStack() as stack:
        # What one can go on without comes last.
        plain = [name for name in wanted if name not in remembered]
        opened = {name: stack.enter_context(open_verified(path / name, files[name])) for name in plain}
        try:
            for name in remembered:
                opened[name] = stack.enter_context(open_verified(path / name, files[name]))
                entries = described[name.removesuffix(".pt")].items()
                stored[name.removesuffix(".pt")] = {
                    journal: Stored.verified(path, digest, entry, files) for journal, entry in entries
                }
        except Corrupt as error:
            raise _OnlyJournals(str(error)) from None
        parts = {name.removesuffix(".pt"): read_part(file, path / name, map_location) for name, file in opened.items()}
    if stored:
        parts[JOURNALS] = stored
    written = {key: manifest.get(key) for key in ("step", "versions", "device", "config_sha256")}
    return {**manifest["meta"], **written}, parts
