"""The directory that a run's checkpoints lie in: which there are, which is the best, which have to go."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import uuid
from pathlib import Path

from sheeplike.checkpoint.files import MANIFEST, Corrupt, read_manifest

TEMPORARY = ".tmp-"
RETIRED = ".old-"
_NAME = re.compile(r"step_(\d{12,})")


def directory_name(step: int) -> str:
    return f"step_{step:012d}"


def list_checkpoints(root: Path | str) -> list[Path]:
    """Directories under ``root``, oldest first; they are not verified."""
    found: dict[int, Path] = {}
    for path in sorted(Path(root).glob("*"), reverse=True):  # ".old-…" comes last and counts where nothing replaced it
        match = _NAME.fullmatch(path.name.removeprefix(RETIRED))
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


def prune(root: Path, step: int, keep_last: int, keep_best: int) -> None:
    """Remove what need not be kept once the checkpoint of ``step`` is there.

    A run only goes forward. What is ahead of its newest checkpoint was passed over when the run was resumed, and is of
    a future that did not happen; left alone, the next resume would jump into it.
    """
    found = list_checkpoints(root)
    ahead = [path for path in found if step_of(path) > step]
    for path in ahead:
        remove(path)
    found = [path for path in found if path not in ahead]
    spared = {*found[-keep_last:], *ranking(root)[:keep_best]}
    for path in found:
        if path not in spared:
            remove(path)


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
