"""Configuration and curves of finished runs, read without torch, JAX and Hydra.

A run is a directory with ``config.yaml`` and ``metrics.jsonl``, as :mod:`sheeplike` writes them, or with only the event
files of TensorBoard, as other tools write them. It is not trusted: neither links nor pipes are opened.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sheeplike.agents import registry
from sheeplike.config.schema import all_keys
from sheeplike.files import EVENTS, open_regular, read_yaml
from sheeplike.options import CommandError, flat, is_within, marked, nearest
from sheeplike.terminal import first_sentence, one_line

CONFIG_FILE, METRICS_FILE, ANALYSIS_FILE = "config.yaml", "metrics.jsonl", "analysis.json"
LARGEST = 1e100  # limit of values, so that their sums of squares are finite too
MOST_STEPS = 10**12  # limit of total_steps
SUCCESS = ("eval/success_rate", "eval/episodes")  # metrics that are always read
# Names that other tools give the directories of their runs. The first is CleanRL's form.
_EXTERNAL_NAMES = (
    re.compile(r"(?P<env>.+)__(?P<name>.+)__(?P<seed>\d+)__\d{9,}"),
    re.compile(r"(?:(?P<name>.+?)[-_. ])??(?:(?:seed|run|version)[-_.= ]?)?(?P<seed>\d+)", re.IGNORECASE),
    re.compile(r"(?P<name>.*)", re.DOTALL),
)

Rows = Iterator[tuple[float, float, Mapping[str, Any]]]  # policy steps, seconds, metrics


class RunError(CommandError):
    """A directory cannot be read as a run, or runs cannot be compared."""


class Curve(NamedTuple):
    """Finite values of one metric of one run by ascending steps; each array ``(P,)`` float64."""

    step: np.ndarray  # policy steps, or gradient steps of a run that takes none
    seconds: np.ndarray  # training time; wall-clock time for runs of other tools
    value: np.ndarray

    def along(self, x: str) -> np.ndarray:
        """Return the positions of the points on the axis ``"steps"`` or ``"time"``."""
        return {"steps": self.step, "time": self.seconds}[x]


@dataclass(frozen=True)
class Run:
    """A run on the disk."""

    path: Path  # its directory
    env: str | None  # the task; None if the files do not tell
    name: str  # agent and recipe; runs of one name may still differ in their settings
    seed: str
    settings: Mapping[str, Any]  # full dotted key to value, without incidental ones
    dry_run: bool
    metrics: frozenset[str]  # names of all that were recorded
    curves: Mapping[str, Curve]  # of the metrics that were read and have a finite value
    nonfinite: Mapping[str, int]  # metric to the number of values that are in no curve
    first_evaluation: Any = None  # policy step, from the configuration
    unit: str = "policy steps"  # of its steps


def read_runs(places: Iterable[Path], metrics: Sequence[str]) -> tuple[list[Run], list[str]]:
    """Read runs of one task in and below some directories, and notes, one on each left out; RunError if none is left.

    Args:
        metrics: alternative names of the metric to compare; each run's first one is stored under the first name.
    """
    found: list[Run] = []
    problems: list[RunError] = []
    for path in find_runs(places):
        try:
            found.append(read_run(path, {*metrics, *SUCCESS}))
        except RunError as error:
            problems.append(error)
    tasks = {run.env.split()[-1]: run for run in reversed(found) if run.env and not run.dry_run}
    if len(tasks) > 1:
        listed = " and ".join(f"{tasks[task].env} ({tasks[task].path})" for task in sorted(tasks))
        raise RunError(f"expected runs of one task, and found {listed}; nearest: the directory of one of them")
    runs, notes = [], []
    for run in found:
        first = next((name for name in metrics if name in run.curves), None)
        if run.dry_run:
            problems.append(RunError(f"{run.path}: a dry run, too short to compare: expected other runs"))
        elif first is None:
            problems.append(_lacks(run, metrics[0]))
        else:
            runs.append(replace(run, curves={**run.curves, metrics[0]: run.curves[first]}))
            if first != metrics[0]:
                notes.append(f"{run.path}: {first} stands for {metrics[0]}, and its steps for policy steps.")
    if not runs:
        raise problems[0]
    return runs, [f"Left out: {problem}." for problem in problems] + notes


def find_runs(places: Iterable[Path]) -> list[Path]:
    """Find the directories of runs in and below some directories, each once; links are not followed."""
    found: dict[Path, Path] = {}
    for place in places:
        if not place.is_dir():
            problem = "is a file" if place.exists() else "does not exist"
            beside = sorted(map(str, place.parent.iterdir())) if place.parent.is_dir() and not place.exists() else []
            match = nearest(place, beside, cutoff=0.6)
            hint = f"; nearest: {match}" if match else ""
            raise RunError(f"{place} {problem}: expected a directory of runs{hint}")
        runs = {run.resolve(): run for run in _walk(place)}
        if not runs:
            expected = f"directories with {CONFIG_FILE} and {METRICS_FILE} or with {EVENTS}*"
            raise RunError(f"{place}: expected runs in it, {expected}, and found none")
        found |= runs
    return list(found.values())


def read_run(path: Path, wanted: Collection[str]) -> Run:
    """Read a directory that :func:`find_runs` returned, and only the wanted metrics: all would take seconds."""
    config, ours = _config(path / CONFIG_FILE), (path / METRICS_FILE).exists()
    if ours and config is None:
        raise RunError(f"{path}: expected {CONFIG_FILE} of a run beside {METRICS_FILE}, with exp, agent.name, env.name")
    recorded = _collect(read_rows(path / METRICS_FILE) if ours else _events(path), wanted)
    if config is None:
        return Run(path, *_named_by_directory(path), False, *recorded)
    agent, exp, env = config["agent"]["name"], config["exp"], config["env"]["name"]
    if isinstance(config["env"].get("id"), str):
        env = f"{env} {config['env']['id']}"  # each environment of a family is a task of its own
    name = agent if agent == exp else f"{agent}/{exp}"
    settings, seed, dry_run = _settings(config), one_line(config.get("seed")), config.get("dry_run") is True
    every = config["eval"].get("every") if isinstance(config.get("eval"), dict) else None
    offline = isinstance(config.get("data"), dict) and config["data"].get("updates") is not None
    unit = "gradient steps" if offline else "policy steps"
    return Run(path, one_line(env), one_line(name), seed, settings, dry_run, *recorded, every, unit)


def group_runs(runs: Iterable[Run], metric: str) -> tuple[dict[str, list[Run]], list[str]]:
    """Group runs that differ only in their seed, under labels that tell the groups apart.

    A label lists the settings in which runs of its name differ, and the conditions in which any two runs differ.
    Of two runs of one seed the one with the longer curve of ``metric`` is kept; also return a note on each other one.
    """
    runs = list(runs)
    configured = [run for run in runs if "env.name" in run.settings]
    conditions = {key for key in _differing(configured) - _marked("own_choice") if is_within(key, _marked("condition"))}
    families: dict[str, dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        families[run.name][json.dumps(run.settings, sort_keys=True, default=str)].append(run)
    groups: dict[str, list[Run]] = {}
    for _, family in sorted(families.items()):
        firsts = [members[0] for members in family.values()]
        keys = sorted(_differing(firsts) | conditions)
        labels = [_label(run, keys) for run in firsts]
        # Settings may print alike, such as the number 5 and the text "5".
        labels = [f"{label} ({n})" if label in labels[:n] else label for n, label in enumerate(labels)]
        groups |= dict(sorted(zip(labels, family.values(), strict=True), key=lambda pair: pair[0]))
    notes = []
    for label, members in groups.items():
        kept: dict[str, Run] = {}
        # The longest first, in numerical order of the seeds.
        for run in sorted(members, key=lambda run: (len(run.seed), run.seed, -run.curves[metric].step[-1])):
            if (other := kept.setdefault(run.seed, run)) is not run:
                reason = f"seed {run.seed} of {label} is also in {other.path}, which is as long or longer"
                notes.append(f"Left out: {run.path}: {reason}.")
        groups[label] = list(kept.values())
    return groups, notes


@functools.cache
def _marked(mark: str) -> frozenset[str]:
    return marked(all_keys(*registry.built_in()), mark)


def _lacks(run: Run, metric: str) -> RunError:
    others = sorted(run.metrics - {metric})
    waits = metric.startswith("eval/") and not any(name.startswith("eval/") for name in others)
    if metric in run.metrics:
        hint = f"none is finite and below {LARGEST:g}"
    elif waits and isinstance(run.first_evaluation, int):
        hint = f"it holds no evaluation (eval.every={run.first_evaluation})"
        if "rollout/return_mean" in others:
            hint += "; nearest: metric=rollout/return_mean"
    else:
        match = nearest(metric, others, cutoff=0.6)
        there = f"nearest: metric={match}" if match else f"there are {', '.join(others) or 'no rows at all yet'}"
        hint = f"there are none; {there}"
    return RunError(f"{run.path}: expected values of metric={metric}, and {hint}")


def _walk(place: Path) -> Iterator[Path]:
    """Yield the directories of runs, in order; subdirectories of a run are not searched."""

    def refuse(error: OSError) -> None:
        raise RunError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, inside, files in os.walk(place, onerror=refuse):
        inside.sort()
        if ANALYSIS_FILE in files and METRICS_FILE not in files:  # the events of an analysis are no run
            continue
        if METRICS_FILE in files or any(name.startswith(EVENTS) for name in files):
            inside.clear()
            yield Path(folder)


def _config(path: Path) -> dict[str, Any] | None:
    """Read the configuration of a run as plain data; None if there is none of this program."""
    try:
        data = read_yaml(path)
        required = data["exp"], data["agent"]["name"], data["env"]["name"]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        return None
    return data if all(isinstance(name, str) for name in required) else None


def _named_by_directory(path: Path) -> tuple[str | None, str, str, dict[str, Any]]:
    """Return task, name, seed and settings of a run of another tool."""
    # ``ppo/seed_3``, ``ppo/3``, ``PPO_3`` and CleanRL's ``<env>__ppo__3__<time>`` are seed 3 of ``ppo``; a directory
    # without a number is the only run of its name.
    place = path.resolve()
    found = next(match for form in _EXTERNAL_NAMES if (match := form.fullmatch(place.name))).groupdict()
    name, parent = found["name"], place.parent
    if name is None:
        name, parent = parent.name, parent.parent
    shown = parent.relative_to(Path.cwd()) if parent.is_relative_to(Path.cwd()) else parent
    env = found.get("env")
    settings = {"directory": one_line(shown)}
    return env and one_line(env), one_line(f"{name} (TensorBoard)"), found.get("seed", "none"), settings


def read_rows(path: Path) -> Rows:
    """Yield the rows of ``metrics.jsonl``, without a last line that is still being written."""
    try:
        with open_regular(path) as file:
            lines = file.readlines()
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            step, seconds = row.pop("step"), row.pop("seconds")
            numbers = all(type(one) in (int, float) and abs(one) <= LARGEST for one in (step, seconds))
            if not (numbers and 0 <= step <= MOST_STEPS and step % 1 == 0):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            if not line.endswith(b"\n"):
                return
            raise RunError(f"{path}, line {number}: expected a JSON object with step (to 10^12) and seconds") from None
        row.pop("gradient_steps", None)
        yield float(step), float(seconds), row


def _events(path: Path) -> Rows:
    """Yield the values in TensorBoard's event files; seconds count from the first event."""
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    for file in path.glob(f"{EVENTS}*"):  # TensorBoard's reader opens them without checks
        if file.is_symlink() or not file.is_file():
            raise RunError(f"{file}: cannot be read: is no regular file")
    try:
        reader = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()  # 0: all of them
        found = [(event, tag, event.value) for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)]
        for tag in reader.Tags()["tensors"]:  # TensorFlow 2 and JAX tools store scalars so
            if reader.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
                for event in reader.Tensors(tag):
                    if any(side.size != 1 for side in event.tensor_proto.tensor_shape.dim):  # before it is expanded
                        raise ValueError(f"{tag} is no scalar")
                    found.append((event, tag, make_ndarray(event.tensor_proto).item()))
    except (DecodeError, ValueError, TypeError) as error:
        raise RunError(f"{path}: cannot be read: {first_sentence(error)}") from None
    if found:
        # The first event has the time at which the file was made: for a converted log, after all other events.
        start = min(reader.FirstEventTimestamp(), *(event.wall_time for event, *_ in found))
        for event, tag, value in found:
            if not abs(event.wall_time - start) <= LARGEST:
                raise RunError(f"{path}: an event of {tag} has no time: expected files of TensorBoard's writers")
            yield event.step, event.wall_time - start, {tag: value}


def _collect(rows: Rows, wanted: Collection[str]) -> tuple[frozenset[str], dict[str, Curve], dict[str, int]]:
    """Return the names of all metrics, the curves of the wanted ones, and their numbers of non-finite values."""
    metrics: set[str] = set()
    points: dict[str, dict[float, tuple[float, float]]] = defaultdict(dict)
    nonfinite: dict[str, int] = defaultdict(int)
    for step, seconds, row in rows:
        metrics.update(row)
        for name in row.keys() & wanted:
            value = row[name]
            if type(value) in (int, float) and abs(value) <= LARGEST:  # JSON's integers have no limit
                points[name][step] = (seconds, value)  # the last value of a step counts
            else:
                nonfinite[name] += 1
    curves = {}
    for name, found in points.items():
        step, seconds, value = np.array([(step, *found[step]) for step in sorted(found)], np.float64).T
        curves[name] = Curve(step, np.maximum.accumulate(seconds), value)  # clocks are set back at times
    return frozenset(metrics), curves, nonfinite


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a configuration without incidental keys; add a summary of randomization, and the order of its lines."""
    lines = config.get("randomization")
    lines = list(map(str, lines)) if isinstance(lines, dict) else []
    summary = "+".join(lines[:2] + ([f"{len(lines) - 2} more"] if len(lines) > 2 else [])) or "none"
    own = {"randomization": summary, "randomization.lines": lines}
    if "image_size" in config["env"]:  # one value, also if each camera has its own
        own["env.image_size"] = config["env"]["image_size"]
    if begun := config["agent"].get("from"):  # each seed may begin with a run of its own
        own["agent.from"] = re.sub(r"/seed_\d+/*$", "", str(begun))
    left_out = _marked("incidental") | {"env.image_size"}
    return {key: value for key, value in flat(config) if value != {} and not is_within(key, left_out)} | own


def _differing(runs: Sequence[Run]) -> set[str]:
    """Return the keys that differ between runs; those of randomization only between runs with the same summary."""
    values: dict[tuple[str, Any], set[str]] = defaultdict(set)
    for key in set().union(*(run.settings for run in runs)):
        for run in runs:
            alike = run.settings.get("randomization") if key.startswith("randomization.") else None
            text = json.dumps(run.settings[key], default=str) if key in run.settings else ""
            values[key, alike].add(text)
    return {key for (key, _), found in values.items() if len(found) > 1}


def _label(run: Run, keys: Sequence[str]) -> str:
    """Join a run's name and its values of some keys, each without its section if that is unambiguous."""
    texts, names = [run.name], [key.rpartition(".")[2] for key in keys]
    for key, name in zip(keys, names, strict=True):
        if key in run.settings:
            value = json.dumps(run.settings[key], separators=(",", ":"), ensure_ascii=False, default=str)
            short = name if names.count(name) == 1 and not key.startswith("randomization.") else key
            texts.append(f"{short}={value}".replace('"', ""))
    return one_line(", ".join(texts))
