"""Names of files in the directory of a run, and the choice of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from sheeplike.config.errors import nearest
from sheeplike.files import REPLAY, find_unusual, list_checkpoints, step_of, why_not_regular
from sheeplike.options import CommandError, InvalidOption

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
LOCK_FILE = ".lock"
METRICS = "metrics.jsonl"
STARTS = "starts.jsonl"
ASIDE = "metrics_before_{}.jsonl"  # kept from an attempt without a checkpoint
RANKS = "ranks"  # shares of checkpoints: ranks/<rank>/checkpoints and ranks/<rank>/replay, of all ranks but the first
EVALUATIONS = "eval"
ANALYSES = "analyze"
LAST_BATCH = "nonfinite_batch.pt"  # the batch of the last update before a halt
FILES = (CONFIG_FILE, METRICS, STARTS, LOCK_FILE, LAST_BATCH)
OURS = {*FILES, CHECKPOINTS, REPLAY, RANKS, EVALUATIONS, ANALYSES}  # everything that a run writes


def config_file(run_dir: Path, key: str) -> Path:
    """Return the configuration file of the run that ``key=<run_dir>`` names.

    Raises:
        CommandError: there is no such run, or it holds links or devices.
    """
    file = run_dir / CONFIG_FILE
    if not file.is_file():
        runs = [found.parent for found in sorted(Path("logs").rglob(CONFIG_FILE))]
        below = [run for run in runs if run.resolve().is_relative_to(run_dir.resolve())]
        below = below or [found.parent for found in run_dir.glob(f"*/{CONFIG_FILE}")]
        newest = max(below, key=lambda run: (run / CONFIG_FILE).stat().st_mtime, default=None)
        match = newest or nearest(str(run_dir), map(str, runs))
        hint = f"; nearest: {key}={match}" if match else ""
        raise CommandError(f"{key}={run_dir}: expected the directory of a run, with a {CONFIG_FILE} in it{hint}")
    paths = (*(run_dir / name for name in FILES), *(run_dir / REPLAY).glob("*"))
    found = find_unusual(run_dir) or next((f"{path} {why}" for path in paths if (why := why_not_regular(path))), None)
    if found:
        raise CommandError(
            f"{key}={run_dir}: {found}: expected files and directories of the run alone; nearest: put there what "
            "a link leads to"
        )
    return file


def place_of(run_dir: Path, rank: int) -> Path:
    """Return the directory in which a rank has its share of checkpoints; the first rank's is the run's own."""
    return run_dir / RANKS / str(rank) if rank else run_dir


def checkpoint_steps(run_dir: Path) -> list[int]:
    """Return the policy steps in the names of a run's checkpoints, oldest first, without reading any."""
    return [step_of(path) for path in list_checkpoints(run_dir / CHECKPOINTS)]


def choose_checkpoint(run_dir: Path, name: str) -> Path | None:
    """Return the directory that ``checkpoint=`` means; None: the newest that is whole."""
    if name == "last":
        return None
    if name == "best":
        from sheeplike.checkpoint import best  # torch takes seconds to import

        path = best(run_dir / CHECKPOINTS)
        if path is None:
            raise InvalidOption("checkpoint", name, "one that was saved after an evaluation; here is none", "last")
        return path
    paths = {step_of(path): path for path in list_checkpoints(run_dir / CHECKPOINTS)}
    step = name.removeprefix("step_")
    expected = f"best, last, or one of {', '.join(map(str, paths))}"
    if not step.isdecimal() or len(step) > 20:
        raise InvalidOption("checkpoint", name, expected, nearest(name, ("best", "last")) or "last")
    if int(step) not in paths:
        raise InvalidOption("checkpoint", name, expected, min(paths, key=lambda other: abs(other - int(step))))
    return paths[int(step)]
