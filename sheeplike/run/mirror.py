"""Copies of a run's checkpoints in a place that outlives the machine, such as a bucket: ``checkpoint.mirror=<URL>``.

::

    <URL>/files/<SHA-256>              parts of checkpoints and chunks of the replay, of all ranks
    <URL>/checkpoints/step_<n>.json    a checkpoint: the manifest of each rank, written after the files that these name
    <URL>/starts.jsonl                 tells the owner; beside it config.yaml and metrics.jsonl

A file is named by its content, so it is copied once, and an upload that is cut leaves earlier checkpoints as they were.
The place holds the checkpoints that the run directory holds; others are removed once the newest one is there.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec

from sheeplike import checkpoint
from sheeplike.checkpoint import MANIFEST, Corrupt, UnknownFormat
from sheeplike.config.errors import as_command_errors
from sheeplike.files import write_atomically
from sheeplike.monitor.progress import phase
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE, METRICS, STARTS, checkpoint_steps, place_of
from sheeplike.terminal import first_sentence, reason_of, warn

STOPPING, FINISHING = 60, 3600  # seconds that the last copy may take: after a signal or an error, and otherwise
_FILES, _SMALL = "files", (STARTS, CONFIG_FILE, METRICS)
_LIST = re.compile(r"step_([0-9]{12,})\.json")


class Mirror:
    """The place of a run's copies.

    Raises:
        CommandError: there is no such protocol, or its package is missing. The place itself is not asked yet.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        self.url, self.run_dir = url.rstrip("/"), run_dir
        protocol = url.partition("://")[0]
        try:
            if "::" in url or not re.match(r"[a-z][a-z0-9+.-]*:///?[^/]", url):  # "::" chains protocols
                raise ValueError(url)
            self._fs, self._root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True)
        except ValueError:
            expected = "a URL such as s3://bucket/prefix, gs://bucket/prefix or file:///directory"
            raise InvalidOption("checkpoint.mirror", url, expected) from None
        except ImportError as error:
            package = getattr(error.__cause__, "name", None) or protocol
            expected = f"the package {package}, which {protocol}:// needs; nearest: pip install {package}"
            raise InvalidOption("checkpoint.mirror", url, expected) from None
        if protocol in ("file", "local"):
            self._fs.auto_mkdir = True
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._due = self._ending = self._failed = False

    def _sizes(self, folder: str = "") -> dict[str, int]:
        """Return the sizes of the files in a folder by name."""
        path = f"{self._root}/{folder}".rstrip("/")
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            found = {entry["name"].rstrip("/"): entry["size"] for entry in self._fs.ls(path, detail=True)}
            found.pop(path, None)  # an object that marks the folder
            return {name.rpartition("/")[2]: size for name, size in found.items()}
        return {}

    def _read(self, name: str) -> bytes:
        """Return the content of a file, nothing if it is missing."""
        with suppress(FileNotFoundError):
            return self._fs.cat_file(f"{self._root}/{name}")
        return b""

    def _steps(self) -> list[int]:
        """Return the steps of the checkpoints there, oldest first; CommandError if the place holds something else."""
        names = self._sizes()
        if names and STARTS not in names:
            raise CommandError(f"checkpoint.mirror={self.url} holds other files: expected an empty place")
        return sorted(int(found[1]) for found in map(_LIST.fullmatch, self._sizes(CHECKPOINTS)) if found)

    def _manifests(self, step: int) -> list[str]:
        """Return the manifests of all ranks, as a checkpoint there lists them."""
        with suppress(ValueError, RecursionError):
            texts = json.loads(self._read(_list_of(step)))
            if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
                return texts
        raise Corrupt(f"{self.url}/{_list_of(step)}: is no list of manifests")

    def _path(self, step: int, rank: int = 0) -> Path:
        return place_of(self.run_dir, rank) / CHECKPOINTS / f"step_{step:012d}"

    @contextmanager
    def _reading(self, what: str = "reading", *, needed: bool = True) -> Iterator[None]:
        """Show that this takes long; an error is a CommandError, or a warning if what is read is not needed."""
        try:
            with phase(f"{what} {self.url}"), as_command_errors(UnknownFormat):
                yield
        except (CommandError, Corrupt):
            raise
        except Exception as error:  # packages raise errors of many kinds
            text = f"checkpoint.mirror={self.url}: cannot be read: {first_sentence(reason_of(error))}"
            if needed:
                raise CommandError(text) from None
            warn(f"{text}; it is tried again with the next checkpoint")

    def newest_config(self, *, auto: bool) -> Mapping[str, Any] | None:
        """Return the configuration of the newest checkpoint there, or None; without ``auto`` there must be none."""
        with as_command_errors(Corrupt), self._reading(needed=auto):
            steps = self._steps()
            if steps and not auto:
                expected = "resume=auto to continue it, or another place"
                raise CommandError(f"checkpoint.mirror={self.url} holds a run already: expected {expected}")
            if steps:
                return checkpoint.parse_manifest(self._manifests(steps[-1])[0], self._path(steps[-1]))["config"]
        return None

    def download(self) -> None:
        """Copy the checkpoints there into a run directory that has none, the newest first.

        CommandError if the place belongs to another run, or if this run needs it and it is damaged or cannot be read.
        """
        if checkpoint_steps(self.run_dir):
            with self._reading(needed=False):
                self._check_owner()
            return
        with self._reading():
            steps, self._there = self._steps(), self._sizes(_FILES)
            for name in _SMALL:
                write_atomically(self.run_dir / name, self._read(name))
        for step in reversed(steps):
            try:
                with self._reading(f"downloading the checkpoint of policy step {step:,} from"):
                    ranks = list(enumerate(self._manifests(step)))
                    for rank, text in reversed(ranks):  # it counts once the first rank's part is there
                        if not self._path(step, rank).exists():
                            checkpoint.install(self._path(step, rank), text, self._get)
            except Corrupt as error:
                warn(f"passing over a damaged checkpoint in {self.url}: {error}")
        if not checkpoint_steps(self.run_dir):
            raise CommandError(f"checkpoint.mirror={self.url}: all {len(steps)} checkpoints are damaged")

    def _get(self, size: int, sha256: str, path: Path) -> None:
        if self._there.get(sha256) != size:
            raise Corrupt(f"{self.url}/{_FILES}/{sha256}: is not there, or not of {size} bytes")
        self._fs.get_file(f"{self._root}/{_FILES}/{sha256}", str(path))

    def _check_owner(self) -> None:
        """Raise unless this run has made all starts of the run there: each start adds a line."""
        theirs = self._read(STARTS)
        if self._steps() and not (theirs and (self.run_dir / STARTS).read_bytes().startswith(theirs)):
            what = "belongs to another run, or to this one as it went on elsewhere"
            expected = "another place, or an empty run_dir and resume=auto to go on from there"
            raise CommandError(f"checkpoint.mirror={self.url} {what}: expected {expected}")

    def follow(self, writer: checkpoint.Writer) -> None:
        """Copy each checkpoint in the background once it is written; one that waits gives way to a newer one."""
        self._writer = writer
        writer.written = self._written

    def wait(self, limit: float) -> None:
        """Wait until the newest checkpoint is there, at most ``limit`` seconds; warn if it is not."""
        self._ending, thread, self._thread = True, self._thread, None
        if thread:
            with phase(f"copying the newest checkpoint to {self.url}"):
                thread.join(limit)
        if self._failed or (thread and thread.is_alive()):
            warn(f"{self.url} lacks the newest checkpoint, which {self.run_dir} has")
        self._failed = False

    def _written(self) -> None:
        with self._lock:
            self._due = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                self._due = False
            try:
                self._copy_all()
                self._failed = False
            except Exception as error:  # packages raise errors of many kinds; training goes on
                if not self._failed:
                    what = f"a checkpoint could not be copied to {self.url}; the next one is tried all the same"
                    warn(f"{what}: {first_sentence(reason_of(error))}")
                self._failed = True
            finally:
                self._writer.pinned = None

    def _copy_all(self) -> None:
        """Copy what is new here, the newest checkpoint first, and remove what is no more."""
        self._check_owner()
        for name in _SMALL:
            self._fs.pipe_file(f"{self._root}/{name}", (self.run_dir / name).read_bytes())
        self._there = self._sizes(_FILES)
        for number, step in enumerate(reversed(checkpoint_steps(self.run_dir))):
            if number and (self._due or self._ending):
                break
            self._writer.pinned = step
            if self._copy(step) and number == 0:
                self._prune()

    def _copy(self, step: int) -> bool:
        """Copy one checkpoint; return False if it was removed or replaced meanwhile."""
        texts = self._own_manifests(step)
        for path, (size, sha256) in self._own_files(step, texts).items():
            if self._there.get(sha256) != size:
                self._fs.put_file(str(path), f"{self._root}/{_FILES}/{sha256}")
                self._there[sha256] = size
        if not texts or texts != self._own_manifests(step):
            return False
        content = json.dumps(texts).encode()
        if self._read(_list_of(step)) != content:
            self._fs.pipe_file(f"{self._root}/{_list_of(step)}", content)
        return True

    def _own_manifests(self, step: int) -> list[str]:
        """Return the manifests of all ranks of a checkpoint here; none if it is no longer whole."""
        with suppress(FileNotFoundError):
            first = json.loads((self._path(step) / MANIFEST).read_bytes())
            return [
                (self._path(step, rank) / MANIFEST).read_text("utf-8") for rank in range(first["meta"].get("ranks", 1))
            ]
        return []

    def _own_files(self, step: int, texts: list[str]) -> dict[Path, tuple[int, str]]:
        """Return size and SHA-256 of the files that these manifests name."""
        paths = [self._path(step, rank) for rank in range(len(texts))]
        found = [checkpoint.files_of(p, checkpoint.parse_manifest(t, p)) for p, t in zip(paths, texts, strict=True)]
        return {path: entry for rank in found for path, entry in rank.items()}

    def _prune(self) -> None:
        """Remove the checkpoints that are no longer here, and files that no remaining one needs."""
        kept, needed = checkpoint_steps(self.run_dir), set()
        for step in set(self._steps()) - set(kept):
            self._fs.rm_file(f"{self._root}/{_list_of(step)}")
        for step in kept:
            needed |= {sha256 for _, sha256 in self._own_files(step, self._own_manifests(step)).values()}
        for name in self._sizes(_FILES).keys() - needed:
            self._fs.rm_file(f"{self._root}/{_FILES}/{name}")


def _list_of(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step:012d}.json"
