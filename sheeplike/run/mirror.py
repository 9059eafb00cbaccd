"""Copies of a run's checkpoints in a place that outlives the machine, such as a bucket: ``checkpoint.mirror=<URL>``.

::

    <URL>/files/<SHA-256>              parts of checkpoints and chunks of the replay, of all ranks
    <URL>/checkpoints/step_<n>.json    a checkpoint: the manifest of each rank, written after the files that these name
    <URL>/starts.jsonl                 tells the owner; beside it config.yaml and metrics.jsonl

A file is named by its content, so it is copied once, and an upload that is cut leaves earlier checkpoints as they were.
"""

from __future__ import annotations

import json
import os
import queue
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from sheeplike import checkpoint
from sheeplike.checkpoint import MANIFEST
from sheeplike.files import write_atomically
from sheeplike.monitor.progress import phase
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE, METRICS, STARTS, checkpoint_steps, place_of
from sheeplike.terminal import first_sentence, reason_of, warn

STOPPING, FINISHING = 60, 3600  # seconds that the last copy may take: after a signal or an error, and otherwise
PIP = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}  # protocol to package
_FILES, _SMALL = "files", (STARTS, CONFIG_FILE, METRICS)
_LIST, _SHA256 = re.compile(r"step_([0-9]{12,})\.json"), re.compile(r"[0-9a-f]{64}")


class Mirror:
    """The place of a run's copies.

    Raises:
        CommandError: there is no such protocol, or its package is missing. The place itself is not asked yet.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self.url, self.run_dir = url.rstrip("/"), run_dir
        expected = "a URL such as s3://bucket/prefix, gs://bucket/prefix or file:///directory"
        if not re.match(r"(?:file:///|(?!file:)[a-z][a-z0-9+.-]*:///?)[^/]", url):
            raise InvalidOption("checkpoint.mirror", url, expected)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        except Exception as error:  # packages raise errors of many kinds
            package = PIP.get(url.partition(":")[0]) if isinstance(error, ImportError) else None
            hint = f"the package of this protocol: pip install {package}" if package else f"{expected}; {error}"
            raise InvalidOption("checkpoint.mirror", url, hint) from None
        if "file" in self._fs.protocol and Path(self._root).resolve().is_relative_to(run_dir.resolve()):
            raise InvalidOption("checkpoint.mirror", url, f"a place outside of run_dir={run_dir}")
        self._fs.auto_mkdir = True  # of a file system with directories
        self._due: queue.Queue[bool] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._failed, self._copied = False, -1

    # --- an empty machine -------------------------------------------------------------------------------------------

    def newest_config(self) -> Mapping[str, Any] | None:
        """Return the configuration of the newest checkpoint there, or None; CommandError if it cannot be read."""
        with self._reading():
            if steps := self._steps():
                return checkpoint.parse_manifest(self._manifests(steps[-1])[0], self._path(steps[-1]))["config"]
        return None

    def download(self) -> None:
        """Copy the checkpoints there into a run directory that lacks the newest of them, which comes last.

        CommandError if one is damaged or cannot be read, or if the place belongs to another run.
        """
        with self._reading():
            here, there = checkpoint_steps(self.run_dir), self._steps()
            if here:
                self._check_owner()
            if here and (not there or there[-1] <= here[-1]):
                return
            # The configuration comes first: a directory without it is no run, and would not be taken up again.
            for name in [] if here else (CONFIG_FILE, STARTS, METRICS):
                write_atomically(self.run_dir / name, self._fs.cat_file(f"{self._root}/{name}"))
            for step in there:
                ranks = list(enumerate(self._manifests(step)))
                for rank, text in reversed(ranks):  # it counts once the first rank's part is there
                    if self._path(step, rank).exists():
                        continue
                    try:
                        checkpoint.install(self._path(step, rank), text, self._get)
                    except checkpoint.Corrupt:
                        expected = "expected the files that it lists; without it the others count"
                        place = f"{self.url}/{CHECKPOINTS}/step_{step:012d}.json"
                        raise CommandError(f"checkpoint.mirror: {place}: {expected}") from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with phase(f"reading {self.url}"):
                yield
        except CommandError:
            raise
        except Exception as error:  # packages raise errors of many kinds
            problem = first_sentence(reason_of(error))
            raise CommandError(f"checkpoint.mirror={self.url}: cannot be read: {problem}") from None

    def _sizes(self, folder: str) -> dict[str, int]:
        """Return the sizes of the files in a folder by name."""
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            found = self._fs.ls(f"{self._root}/{folder}", detail=True)
            return {entry["name"].rpartition("/")[2]: entry["size"] for entry in found}
        return {}

    def _steps(self) -> list[int]:
        return sorted(int(found[1]) for found in map(_LIST.fullmatch, self._sizes(CHECKPOINTS)) if found)

    def _manifests(self, step: int) -> list[str]:
        """Return the manifests of all ranks, as a checkpoint there lists them."""
        with suppress(ValueError):
            found = json.loads(self._fs.cat_file(self._list(step)))
            if found and isinstance(found, list) and all(isinstance(text, str) for text in found):
                return found
        raise CommandError(f"{self._list(step)}: expected manifests; without it the others count")

    def _get(self, sha256: str, path: Path) -> None:
        try:
            self._fs.get_file(self._file(sha256), str(path))
        except FileNotFoundError:
            raise checkpoint.Corrupt(f"{self._file(sha256)} is missing") from None

    def _file(self, sha256: str) -> str:
        return f"{self._root}/{_FILES}/{sha256}"

    def _list(self, step: int) -> str:
        return f"{self._root}/{CHECKPOINTS}/step_{step:012d}.json"

    def _path(self, step: int, rank: int = 0) -> Path:
        return place_of(self.run_dir, rank) / CHECKPOINTS / f"step_{step:012d}"

    def _check_owner(self) -> None:
        """Raise unless this run has made all starts of the run there: each start adds a line."""
        names = self._sizes("").keys()
        if STARTS not in names and (others := names & {*_SMALL}):
            raise CommandError(f"checkpoint.mirror={self.url} holds another {min(others)}: expected an empty place")
        own = (self.run_dir / STARTS).read_bytes()
        with suppress(FileNotFoundError):
            # A place without a checkpoint belongs to no run.
            if self._steps() and not own.startswith(self._fs.cat_file(f"{self._root}/{STARTS}")):
                what = "belongs to another run, or to this one as it went on elsewhere"
                expected = "another place, or an empty run_dir and resume=auto to go on from there"
                raise CommandError(f"checkpoint.mirror={self.url} {what}: expected {expected}")

    # --- copies -----------------------------------------------------------------------------------------------------

    def follow(self, writer: checkpoint.Writer) -> None:
        """Copy the newest checkpoint in the background each time that one is written."""
        self._writer, writer.written = writer, lambda: self._due.put(True)
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def catch_up(self) -> None:
        """Copy what a finished run has and the place lacks, and wait for it."""
        self._due.put(True)
        self.wait(FINISHING)

    def wait(self, limit: float) -> None:
        """Wait until the newest checkpoint is there, at most ``limit`` seconds; warn if it is not. Nothing follows."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._due.put(False)
        with phase(f"copying the newest checkpoint to {self.url}"):
            thread.join(limit)
        if self._failed or (thread.is_alive() and checkpoint_steps(self.run_dir)[-1:] != [self._copied]):
            warn(f"{self.url} lacks the newest checkpoint, which {self.run_dir} has")

    def _work(self) -> None:
        while self._due.get():
            try:
                self._copy()
                self._failed = False
            except Exception as error:  # packages raise errors of many kinds; training goes on
                if not self._failed:
                    what = f"a checkpoint could not be copied to {self.url}; the next one is tried all the same"
                    warn(f"{what}: {first_sentence(reason_of(error))}")
                self._failed = True
            finally:
                self._writer.pinned = None
                self._due.task_done()

    def _copy(self) -> None:
        """Copy the newest checkpoint, then others that are not there; remove what the run directory no longer holds."""
        self._check_owner()
        *others, newest = checkpoint_steps(self.run_dir)
        self._copy_one(newest)
        self._copied = newest
        self._prune()
        for step in sorted(set(others) - set(self._steps())):
            if checkpoint_steps(self.run_dir)[-1:] != [newest]:  # a newer one comes first
                return
            with suppress(FileNotFoundError):  # it was removed meanwhile
                self._copy_one(step)

    def _copy_one(self, step: int) -> None:
        self._writer.pinned = step
        there = self._sizes(_FILES)
        texts = self._own_manifests(step)
        for path, (size, sha256) in self._files(step, texts).items():
            if there.get(sha256) != size:
                self._fs.put_file(str(path), self._file(sha256))
        self._check_owner()  # another run may have begun there meanwhile
        for name in _SMALL:
            self._put(f"{self._root}/{name}", (self.run_dir / name).read_bytes())
        if texts == self._own_manifests(step):  # otherwise it was replaced meanwhile, and the new one is due
            self._put(self._list(step), json.dumps(texts).encode())

    def _put(self, path: str, data: bytes) -> None:
        """Write a small file, whole or not at all, as an object store does by itself."""
        if "file" in self._fs.protocol:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            write_atomically(Path(path), data)
        else:
            self._fs.pipe_file(path, data)

    def _own_manifests(self, step: int) -> list[str]:
        first = json.loads((self._path(step) / MANIFEST).read_bytes())
        ranks = range(first["meta"].get("ranks", 1))
        return [(self._path(step, rank) / MANIFEST).read_text("utf-8") for rank in ranks]

    def _files(self, step: int, texts: list[str]) -> dict[Path, tuple[int, str]]:
        """Return size and SHA-256 of the files that the manifests of a checkpoint name."""
        found = {}
        for rank, text in enumerate(texts):
            path = self._path(step, rank)
            found |= checkpoint.files_of(path, checkpoint.parse_manifest(text, path))
        return found

    def _prune(self) -> None:
        """Remove the checkpoints that are no longer here, and files that no remaining one needs."""
        kept, needed = checkpoint_steps(self.run_dir), set()
        if self._copied not in kept:  # the directory is gone, or a newer one is due
            return
        for step in self._steps():
            if step in kept:
                needed |= {sha256 for _, sha256 in self._files(step, self._manifests(step)).values()}
            else:
                self._fs.rm_file(self._list(step))
        for name in set(filter(_SHA256.fullmatch, self._sizes(_FILES))) - needed:
            self._fs.rm_file(self._file(name))
