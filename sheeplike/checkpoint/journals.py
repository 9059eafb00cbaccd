"""What is only ever appended to is written once, however many checkpoints hold it.

A journal's time is cut into chunks of equal length. A chunk that is complete never changes: the next checkpoint links
to its file (a hard link, so that every directory stays whole by itself) and writes only what is new::

    time      oldest                              end
    ring         [..........................------]
    chunks    |..... ...|.........|.........|---   |
    files      linked    linked    linked    written again each time

After a resume from an older checkpoint the same time can hold something else. So a chunk is linked only from a
checkpoint whose content is this journal's own past: one that was saved under the same ``lineage``, or the ``parent``
that it was restored from.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from sheeplike.checkpoint.directories import list_checkpoints
from sheeplike.checkpoint.files import MANIFEST, Corrupt, copy_file, digest_of, open_verified, read_manifest, read_part
from sheeplike.files import open_regular

CHUNK_BYTES = 64 * 2**20


class Journal(Protocol):
    """Steps of fixed size that are appended, never changed, and forgotten from the oldest on.

    Attributes:
        oldest, end: time steps that it holds now, ``[oldest, end)``; both only grow.
        step_bytes: of one time step.
        lineage: a random name, drawn anew whenever the content is replaced instead of appended to.
        parent: which checkpoint the content was restored from; set by :meth:`Stored.copy_to`, None after any other
            replacement.
    """

    lineage: str
    parent: str | None

    @property
    def oldest(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def step_bytes(self) -> int: ...

    def read(self, start: int, stop: int) -> dict[str, Tensor]:
        """The steps ``[start, stop)``: key to ``(stop - start, ...)``, copied to the host's memory."""

    def write(self, start: int, steps: Mapping[str, Tensor]) -> None:
        """Put back what :meth:`read` gave; in order of time, all up to :attr:`end`."""


@dataclass
class Chunk:
    """One file of a journal in a checkpoint that is being written.

    Attributes:
        name: of the file.
        start, stop: its time steps.
        source: the file of an earlier checkpoint that holds the same, or None.
        entry: of that file in its manifest.
        steps: a copy of the content, if one was made.
    """

    name: str
    start: int
    stop: int
    source: Path | None = None
    entry: Mapping[str, Any] | None = None
    steps: dict[str, Tensor] | None = None


class Altered(OSError):
    """A file that had to be copied is not what its manifest says."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path}: was altered since it was written; it is written anew next time")
        self.path = path


@dataclass
class Plan:
    """How a journal goes into the next checkpoint; fixed before anything is written."""

    journal: Journal
    lineage: str
    oldest: int
    end: int
    chunks: list[Chunk]

    @classmethod
    def make(cls, part: str, name: str, journal: Journal, root: Path, distrusted: Collection[Path]) -> Plan:
        """Find out what can be linked.

        Args:
            part, name: whose journal it is, and what it is called.
            root: where earlier checkpoints lie.
            distrusted: files that must not be linked or copied.
        """
        plan = cls(journal, journal.lineage, journal.oldest, journal.end, [])
        held = _past(part, name, journal, root)
        length = max(1, CHUNK_BYTES // journal.step_bytes)
        for begin in range(plan.oldest // length * length, plan.end, length):
            start, stop = max(begin, plan.oldest), min(begin + length, plan.end)
            chunk = Chunk(f"{part}.{name}.{start:012d}-{stop:012d}.pt", start, stop)
            for first, path, entry in held.get(stop, ()):
                # One that reaches further back was written before its first steps were forgotten.
                if first <= start and path not in distrusted and _size(path) == entry["bytes"]:
                    chunk = Chunk(path.name, first, stop, path, entry)
                    break
            plan.chunks.append(chunk)
        return plan

    @property
    def fresh_bytes(self) -> int:
        """What has to be read from the journal."""
        return sum(chunk.stop - chunk.start for chunk in self.chunks if not chunk.source) * self.journal.step_bytes

    def take(self) -> None:
        """Copy what is new to the host's memory: from here on the journal may go on."""
        for chunk in self.chunks:
            if chunk.source is None:
                chunk.steps = self.journal.read(chunk.start, chunk.stop)

    def describe(self) -> dict[str, Any]:
        """Its entry in the manifest."""
        chunks = [[chunk.name, chunk.start, chunk.stop] for chunk in self.chunks]
        return {"lineage": self.lineage, "oldest": self.oldest, "end": self.end, "chunks": chunks}


def adopt(chunk: Chunk, target: Path) -> tuple[dict[str, Any], bool]:
    """Link a chunk's source to ``target``, or copy it where the file system has no links; entry, and whether linked.

    Raises:
        Altered: what was copied is not what it should be.
    """
    try:
        os.link(chunk.source, target)
        return dict(chunk.entry), True
    except OSError:
        entry = copy_file(chunk.source, target)
    if entry != chunk.entry:
        raise Altered(chunk.source)
    return entry, False


def _past(part: str, name: str, journal: Journal, root: Path) -> dict[int, list[tuple[int, Path, Mapping[str, Any]]]]:
    """Files that hold this journal's own past, by the time at which they stop: where they start, path, entry."""
    for path in reversed(list_checkpoints(root)):
        try:
            manifest = read_manifest(path / MANIFEST)
            described = described_journals(path, manifest)[part][name]
        except (Corrupt, KeyError):
            continue
        if described.get("lineage") == journal.lineage or digest_of(manifest) == journal.parent:
            files = manifest["files"]
            return {stop: [(start, path / file, files[file])] for file, start, stop in described["chunks"]}
    return {}


def described_journals(path: Path, manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the manifest of a checkpoint says of journals, by part and name.

    Raises:
        Corrupt: that is not what a manifest says, or it names a file that it does not describe.
    """
    described = manifest.get("journals", {})
    try:
        for entry in (entry for part in described.values() for entry in part.values()):
            numbers = [entry["oldest"], entry["end"]]
            for file, *steps in entry["chunks"]:
                numbers += steps
                if type(file) is not str or len(steps) != 2:
                    raise TypeError("a chunk is no file, start and stop")
                if file not in manifest["files"]:
                    raise Corrupt(f"{path / MANIFEST}: does not describe {file}")
            if any(type(number) is not int or number < 0 for number in numbers):
                raise TypeError("a time is no number of steps")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corrupt(f"{path / MANIFEST}: is no manifest: journals: {error!r}") from None
    return described


def _size(path: Path) -> int | None:
    """Of a file that is one itself; a link could lead anywhere."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@dataclass(frozen=True)
class Stored:
    """A journal in a checkpoint that has been verified.

    Attributes:
        path: the checkpoint.
        digest: of its manifest.
        oldest, end: time steps that it holds.
        chunks: file, start and stop, in order of time.
    """

    path: Path
    digest: str
    oldest: int
    end: int
    chunks: tuple[tuple[str, int, int], ...]

    @classmethod
    def verified(cls, path: Path, digest: str, described: Mapping[str, Any], files: Mapping[str, Any]) -> Stored:
        """Read every byte of it once.

        Raises:
            Corrupt: a file is missing, cut short or altered, or they do not cover the whole time.
        """
        stored = cls(path, digest, described["oldest"], described["end"], tuple(map(tuple, described["chunks"])))
        reached = stored.oldest
        for file, start, stop in stored.chunks:
            if start > reached or stop <= reached:
                raise Corrupt(f"{path / MANIFEST}: {file} leaves a gap: it begins at {start}, expected {reached}")
            open_verified(path / file, files[file]).close()
            reached = stop
        if reached != stored.end:
            raise Corrupt(f"{path / MANIFEST}: a journal ends at {reached}, expected {stored.end}")
        return stored

    def copy_to(self, journal: Journal) -> None:
        """Put everything back, one chunk in memory at a time.

        Raises:
            Corrupt: a file has been removed or altered since it was verified.
            ValueError: the journal does not expect this.
        """
        if journal.end != self.end:
            raise ValueError(f"{self.path}: a journal of {self.end} time steps, expected {journal.end}")
        for name, start, _ in self.chunks:
            try:
                with open_regular(self.path / name) as file:
                    steps = read_part(file, self.path / name)
            except OSError as error:
                raise Corrupt(f"{self.path / name}: cannot be read: {error.strerror or error}") from None
            journal.write(start, steps)
        journal.parent = self.digest
