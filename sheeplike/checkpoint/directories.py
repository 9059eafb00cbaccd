"""The directory that a run's checkpoints lie in: which there are, which is the best, which have to go."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import uuid
from pathlib import Path

from sheeplike.checkpoint.files import MANIFEST, Corrupt, UnknownFormat, read_manifest
from sheeplike.files import CHECKPOINT

TEMPORARY = ".tmp-"
RETIRED = ".old-"


def directory_name(step: int) -> str:
    return f"step_{step:012d}"


def list_checkpoints(root: Path | str) -> list[Path]:
    """Directories under ``root``, oldest first; they are not verified."""
    found: dict[int, Path] = {}
    for path in sorted(Path(root).glob("*"), reverse=True):  # ".old-…" comes last and counts where nothing replaced it
        match = CHECKPOINT.fullmatch(path.name)
        if match and path.is_dir():
            found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found)]


def step_of(path: Path) -> int:
    """Policy steps of a checkpoint, by its name."""
    return int(path.name.rpartition("_")[2])


def best(root: Path | str) -> Path | None:
    """The checkpoint with the highest finite ``meta["score"]``, the oldest of several; None where none has a score."""
    return next(iter(ranking(root)), None)


def ranking(root: Path | str) -> list[Path]:
    """Checkpoints with a finite ``meta["score"]``, best first; of those with the same score only the oldest.

    It follows from the manifests alone: there is no record of it that a kill could leave behind the truth. One that
    repeats a score was not evaluated itself.
    """
    scores: dict[float, Path] = {}
    for path in list_checkpoints(root):
        with contextlib.suppress(Corrupt):
            score = read_manifest(path / MANIFEST)["meta"].get("score")
            if (isinstance(score, float) or (type(score) is int and abs(score) < 2**63)) and math.isfinite(score):
                scores.setdefault(score, path)
    return [scores[score] for score in sorted(scores, reverse=True)]


def prune(root: Path, step: int, keep_last: int, keep_best: int, resumed_from: int | None = None) -> None:
    """Remove what need not be kept once the checkpoint of ``step`` is there.

    A run only goes forward. What is ahead of its newest checkpoint, or of the one that it was resumed from, was passed
    over then, and is of a future that did not happen; left alone, the next resume would jump into it, or a damaged one
    would push out those that are whole.

    Args:
        resumed_from: step of the checkpoint that the run went on from, at the first save since.
    """
    oldest_passed_over = step + 1 if resumed_from is None else min(step, resumed_from) + 1
    found = list_checkpoints(root)
    passed_over = [path for path in found if step_of(path) >= oldest_passed_over and step_of(path) != step]
    for path in passed_over:
        remove(path)
    found = [path for path in found if path not in passed_over]
    whole = [path for path in found if _seems_whole(path)]
    # What seems damaged goes with those of its time, not at once: a disk that fails for a moment removes nothing.
    oldest_kept = step_of(whole[-keep_last]) if len(whole) >= keep_last else 0
    last = {path for path in found if step_of(path) >= oldest_kept}
    spared = last.union([path for path in ranking(root) if path in whole][:keep_best])
    for path in found:
        if path not in spared:
            remove(path)


def _seems_whole(path: Path) -> bool:
    """Whether nothing is missing from a checkpoint or cut short; to read every byte each time would take too long."""
    try:
        files = read_manifest(path / MANIFEST)["files"]
        return all((path / name).lstat().st_size == entry["bytes"] for name, entry in files.items())
    except UnknownFormat:
        return True
    except (Corrupt, OSError, ValueError):
        return False


def recover(root: Path) -> None:
    """Undo what a killed or failed save has left: half-written directories, and one retired too soon."""
    for retired in root.glob(f"{RETIRED}*"):
        target = root / retired.name.removeprefix(RETIRED)
        if target.exists():
            remove(retired)
        else:
            os.rename(retired, target)
    for stale in root.glob(f"{TEMPORARY}*"):
        shutil.rmtree(stale, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a checkpoint; a kill on the way leaves a temporary directory, never half a checkpoint."""
    temporary = temporary_name(path.parent)
    os.rename(path, temporary)
    shutil.rmtree(temporary, ignore_errors=True)


def temporary_name(root: Path) -> Path:
    return root / f"{TEMPORARY}{uuid.uuid4().hex}"
