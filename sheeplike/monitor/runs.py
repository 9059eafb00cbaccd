"""Reading the runs that lie on a disk: what was configured, and the curves. No torch, no JAX, no Hydra.

A run is a directory that holds ``config.yaml`` and ``metrics.jsonl``, as :mod:`sheeplike` writes them, or TensorBoard's
event files alone, as other tools write them.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from sheeplike.earlier import completed
from sheeplike.files import open_regular, read_text

CONFIG_FILE, METRICS_FILE, EVENT_FILES = "config.yaml", "metrics.jsonl", "events.out.tfevents."
LARGEST_CONFIG = 2**20  # bytes; one takes about three thousand
# Sections of a configuration that do not make another experiment: runs that differ in these alone are averaged.
INCIDENTAL = frozenset(
    {
        "seed",
        "compile",
        "run_dir",
        "dry_run",
        "profile",
        "total_steps",
        "log_every",
        "video_every",
        "watchdog",
        "faults",
        "checkpoint",
        "logger",
    }
    | {"eval.every", "eval.episodes", "eval.num_envs", "eval.video"}
)
ACTION_REPEAT = "env.action_repeat"
IMAGE_SIZE = "env.image_size"  # one value, also where each camera has its own
RANDOMIZATION = "randomization"  # one value: its lines in their order, in which they act
# Conditions of a comparison: where any two groups differ in one of these, all of them are labelled with it.
CONDITIONS = frozenset({ACTION_REPEAT, IMAGE_SIZE, RANDOMIZATION, "agent.observations", "eval.sample", "eval.nominal"})
CONDITIONS |= {f"env.{key}" for key in ("cameras", "renderer", "shadows", "textures", "depth")}
_LARGEST = sys.float_info.max  # an integer of JSON can be larger
_CLEANRL = re.compile(r"(?P<env>.+)__(?P<name>.+)__(?P<seed>\d+)__\d{9,}")
_NUMBERED = re.compile(r"(?:(?P<name>.+?)[-_. ])??(?:(?:seed|run|version)[-_.= ]?)?(?P<seed>\d+)", re.IGNORECASE)


class RunError(ValueError):
    """What lies there cannot be read as a run, or not together with the others. Its text is one line."""


class Curve(NamedTuple):
    """One metric of one run, in the order of its policy steps; ``P`` points, all finite.

    Attributes:
        step: ``(P,)`` float64 policy steps.
        seconds: ``(P,)`` float64 wall-clock time since the run began.
        value: ``(P,)`` float64.
    """

    step: np.ndarray
    seconds: np.ndarray
    value: np.ndarray

    def along(self, x: str) -> np.ndarray:
        """The places of the points on the axis ``"steps"`` or ``"time"``."""
        return {"steps": self.step, "time": self.seconds}[x]


@dataclass(frozen=True)
class Run:
    """A run on the disk.

    Attributes:
        path: its directory.
        env: the task; None where the files do not say.
        name: agent and recipe; runs of one name may still differ in their settings.
        seed: as text.
        settings: what tells it from other runs of its name: full dotted key to value.
        dry_run: it only went through the motions.
        metrics: names of all that was recorded.
        curves: metric to curve, of those that were read and have a value.
        nonfinite: metric to how often it was not finite; these values are in no curve.
    """

    path: Path
    env: str | None
    name: str
    seed: str
    settings: Mapping[str, Any]
    dry_run: bool
    metrics: frozenset[str]
    curves: Mapping[str, Curve]
    nonfinite: Mapping[str, int]


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The directories of runs in and below some places, each once; links to directories are not followed.

    Raises:
        RunError: there is no such place, no run in it, or a directory that cannot be read.
    """
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            raise RunError(
                f"{place}: expected a directory of runs, and there is {'a file' if place.exists() else 'none'}"
            )
        runs = list(_walk(place))
        if not runs:
            raise RunError(
                f"{place}: expected runs in it, directories with {CONFIG_FILE} and {METRICS_FILE} or with "
                f"{EVENT_FILES}*, and found none"
            )
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def read_run(path: Path, wanted: Collection[str]) -> Run:
    """Read some metrics of what a directory of :func:`find_runs` holds.

    A last line of ``metrics.jsonl`` that was cut short is left out: the run may be writing it just now.

    Args:
        wanted: the metrics to read; a run has dozens, and reading all of them would take seconds.

    Raises:
        RunError: a file cannot be read or is damaged.
    """
    config = _config(path / CONFIG_FILE)
    if (path / METRICS_FILE).exists() or not _event_files(path):
        if config is None:
            raise RunError(
                f"{path}: expected {CONFIG_FILE} of a run beside {METRICS_FILE}, with exp, agent.name, env.name"
            )
        recorded = _collect(_rows(path / METRICS_FILE), wanted)
    else:
        recorded = _collect(_events(path), wanted)
    if config is None:
        return Run(path, *_named_by_directory(path), False, *recorded)
    agent, exp, env = config["agent"]["name"], config["exp"], config["env"]["name"]
    if isinstance(config["env"].get("id"), str):
        env = f"{env} {config['env']['id']}"  # of a family of environments each is a task of its own
    settings = {key: value for key, value in _flat(completed(config)).items() if not _incidental(key)}
    name = agent if agent == exp else f"{agent}/{exp}"
    return Run(path, env, name, str(config.get("seed")), settings, config.get("dry_run") is True, *recorded)


def group_runs(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs that differ in nothing but their seed, under a name that tells them from the other groups.

    Where runs of one agent and recipe have other settings, they come apart, and the settings that differ are in the
    names. So are options of the task, and what else makes a comparison unequal, where any two groups differ in it.

    Raises:
        RunError: two runs of one group have the same seed.
    """
    runs = list(runs)
    configured = [run for run in runs if "env.name" in run.settings]
    telling = {key for key in _differing(configured) if key.startswith("env.options.") or key in CONDITIONS}
    unclear = _unclear(configured)
    groups: dict[str, list[Run]] = {}
    for name in sorted({run.name for run in runs}):
        family: dict[str, list[Run]] = {}
        for run in (run for run in runs if run.name == name):
            family.setdefault(json.dumps(run.settings, sort_keys=True, default=str), []).append(run)
        firsts = [members[0] for members in family.values()]
        keys = _differing(firsts) | {key for key in telling if any(key in run.settings for run in firsts)}
        labels = [_label(run, _brief(keys), unclear) for run in firsts]
        if len(set(labels)) < len(labels):
            labels = [_label(run, {key: key for key in sorted(keys)}, unclear) for run in firsts]
        groups |= dict(sorted(zip(labels, family.values(), strict=True), key=lambda pair: pair[0]))
    for label, members in groups.items():
        members.sort(key=_by_seed)
        for first, second in itertools.pairwise(members):
            if first.seed == second.seed:
                raise RunError(
                    f"seed {first.seed} of {label} is there twice, in {first.path} and {second.path}: "
                    "expected one run for each seed"
                )
    return groups


def _walk(place: Path) -> Iterator[Path]:
    """The directories of runs, in order; what is below one of them, such as its checkpoints, is left alone."""

    def refuse(error: OSError) -> None:
        raise RunError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, inside, files in os.walk(place, onerror=refuse):
        inside.sort()
        if _is_run(Path(folder), files):
            inside.clear()
            yield Path(folder)


def _is_run(folder: Path, files: list[str]) -> bool:
    """Whether the files of a directory make it a run; a ``config.yaml`` alone must be one of ours."""
    if METRICS_FILE in files or any(name.startswith(EVENT_FILES) for name in files):
        return True
    config = folder / CONFIG_FILE
    return config.is_file() and not config.is_symlink() and _config(config) is not None


def _config(path: Path) -> dict[str, Any] | None:
    """The configuration of a run as plain data, or None where there is none of ours."""
    try:
        text = read_text(path, LARGEST_CONFIG)
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            return None  # which we never write; a few lines of it can stand for more than any memory holds
        data = yaml.safe_load(text)
        names = data["exp"], data["agent"]["name"], data["env"]["name"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return data if all(isinstance(name, str) for name in names) else None


def _event_files(path: Path) -> list[Path]:
    return [entry for entry in path.iterdir() if entry.name.startswith(EVENT_FILES)]


def _named_by_directory(path: Path) -> tuple[str | None, str, str, dict[str, Any]]:
    """Task, name, seed and settings of a run of another tool.

    ``<env>__<name>__<seed>__<time>`` is CleanRL's form. Otherwise ``ppo/seed_3``, ``ppo/3`` and ``PPO_3`` are seed 3 of
    what stands before; a directory without a number is the only run of its name.
    """
    place = path.resolve()
    name, seed, env = place.name, "none", None
    if match := _CLEANRL.fullmatch(name):
        env, name, seed = match.group("env", "name", "seed")
    elif match := _NUMBERED.fullmatch(name):
        name, seed = match.group("name", "seed")
    parent = place.parent if name else place.parent.parent
    shown = parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent
    return env, f"{name or place.parent.name} (TensorBoard)", seed, {"directory": str(shown)}


def _rows(path: Path) -> Iterable[tuple[float, float, Mapping[str, Any]]]:
    """Policy steps, seconds and metrics of each row of ``metrics.jsonl``."""
    for number, line in enumerate(_lines(path), 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError
            step, seconds = float(row.pop("step")), float(row.pop("seconds"))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            if not line.endswith(b"\n"):  # the last one
                return
            raise RunError(f"{path}, line {number}: expected a JSON object with step and seconds") from None
        row.pop("gradient_steps", None)
        yield step, seconds, row


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            yield from file
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None


def _events(path: Path) -> Iterable[tuple[float, float, Mapping[str, Any]]]:
    """The same of TensorBoard's event files; seconds count from the first event."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    for file in _event_files(path):  # the reader opens whatever has the name
        if file.is_symlink() or not file.is_file():
            raise RunError(f"{file}: cannot be read: is no regular file")
    everything, little = 0, 1
    kinds = {"scalars": everything, "tensors": everything}
    kinds |= dict.fromkeys(("images", "audio", "histograms", "compressedHistograms"), little)
    reader = EventAccumulator(str(path), size_guidance=kinds)
    reader.Reload()
    tags = reader.Tags()
    found = [(event, tag, event.value) for tag in tags["scalars"] for event in reader.Scalars(tag)]
    for tag in tags["tensors"]:  # TensorFlow 2 and JAX tools write scalars so
        if reader.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            found += [(event, tag, make_ndarray(event.tensor_proto).item()) for event in reader.Tensors(tag)]
    if found:
        # The first event says when the file was begun; of a converted log, that may be after all that it tells.
        start = min(reader.FirstEventTimestamp(), *(event.wall_time for event, _, _ in found))
        yield from ((event.step, event.wall_time - start, {tag: value}) for event, tag, value in found)


def _collect(
    rows: Iterable[tuple[float, float, Mapping[str, Any]]], wanted: Collection[str]
) -> tuple[frozenset[str], dict[str, Curve], dict[str, int]]:
    """All names; of the wanted ones the curves, where of several values at one step the last counts, and how many
    values were not finite."""
    names: set[str] = set()
    points: dict[str, dict[float, tuple[float, float]]] = {}
    nonfinite: dict[str, int] = {}
    for step, seconds, metrics in rows:
        names.update(metrics)
        for name in metrics.keys() & wanted:
            value = metrics[name]
            if isinstance(value, int | float) and abs(value) <= _LARGEST:
                points.setdefault(name, {})[step] = (seconds, value)
            else:
                nonfinite[name] = nonfinite.get(name, 0) + 1
    curves = {}
    for name, found in points.items():
        step, seconds, value = np.array([(step, *found[step]) for step in sorted(found)], np.float64).T
        curves[name] = Curve(step, np.maximum.accumulate(seconds), value)  # clocks are set back at times
    return frozenset(names), curves, nonfinite


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Full dotted key to value."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if f"{prefix}{key}" == RANDOMIZATION:
            found[RANDOMIZATION] = [[name, line] for name, line in value.items()] if isinstance(value, dict) else []
        elif isinstance(value, dict) and f"{prefix}{key}" != IMAGE_SIZE:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _incidental(key: str) -> bool:
    return key in INCIDENTAL or key.partition(".")[0] in INCIDENTAL


def _differing(runs: list[Run]) -> set[str]:
    """Keys whose values are not the same in all runs; having none is a value too."""
    keys = set().union(*(run.settings for run in runs))
    return {key for key in keys if len({json.dumps(run.settings.get(key), default=str) for run in runs}) > 1}


def _brief(keys: set[str]) -> dict[str, str]:
    """Which of the differing keys a label shows, and how: a preset's name stands for all that it sets."""
    presets = {key.rpartition(".")[0] for key in keys if key.endswith(".name")}
    shown = {}
    for key in sorted(keys):
        section, _, last = key.rpartition(".")
        if last == "name":
            shown[key] = section.rpartition(".")[2]
        elif section not in presets:
            shown[key] = last
    return shown


def _label(run: Run, shown: Mapping[str, str], paths: Collection[str]) -> str:
    """A run's name and settings; of its randomization the first lines, and the numbers at ``paths``."""
    settings = run.settings | {RANDOMIZATION: _summary(run)}
    varied = _varied(run) if RANDOMIZATION in shown else {}
    told = [(short, settings.get(key)) for key, short in shown.items()]
    told += [(path, varied[path]) for path in paths if path in varied]
    return ", ".join([run.name, *(f"{short}={_say(value)}" for short, value in told)])


def _summary(run: Run) -> str | None:
    names = [name for name, _ in run.settings.get(RANDOMIZATION) or ()]
    return "+".join(names[:2]) + f"+{len(names) - 2} more" * (len(names) > 2) if names else None


def _varied(run: Run) -> dict[str, Any]:
    """The lines of a run by path, and their order."""
    lines = dict(run.settings.get(RANDOMIZATION) or ())
    return {"order of lines": list(lines), **_flat(lines)}


def _unclear(runs: list[Run]) -> list[str]:
    """Paths in which lines differ between runs whose summaries are the same."""
    alike: dict[str | None, list[dict[str, str]]] = {}
    for run in runs:
        texts = {path: json.dumps(value, default=str) for path, value in _varied(run).items()}
        alike.setdefault(_summary(run), []).append(texts)
    paths = dict.fromkeys(path for group in alike.values() for one in group for path in one)
    return [path for path in paths if any(len({one.get(path) for one in group}) > 1 for group in alike.values())]


def _say(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_say(one)}" for name, one in value.items()) + "}"
    return "[" + ",".join(map(_say, value)) + "]" if isinstance(value, list) else str(value)


def _by_seed(run: Run) -> tuple[int, str]:
    return (int(run.seed) if run.seed.isdigit() else -1, run.seed)
