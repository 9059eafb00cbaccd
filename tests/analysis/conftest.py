"""Runs that the real writers wrote, in ``logs/`` of an empty working directory."""

import csv
import functools
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from sheeplike.config.compose import load
from sheeplike.config.saved import to_yaml
from sheeplike.config.sources import Sources
from sheeplike.monitor.logger import EventFile, RunLogger


class Printed(NamedTuple):
    output: str
    rows: dict[str, dict[str, str]]


@pytest.fixture(autouse=True)
def _alone(alone: None) -> None: ...


@functools.cache
def _saved(env: str, agent: str) -> str:
    job = [f"exp={agent}", f"env={env}", "profile=cpu", "fabric.accelerator=cpu"]
    job += ["env.action_repeat=1", "eval.sample=true"]  # which the pick's profile has for one agent alone
    return to_yaml(load(job, Sources()).config)


def _begin(place: Path, env: str = "franka_pick", agent: str = "dreamer_v3", **changes: object) -> Path:
    place.mkdir(parents=True)
    config = yaml.safe_load(_saved(env, agent))
    for key, value in changes.items():
        *sections, name = key.split("__")
        section = config
        for part in sections:
            section = section[part]
        section[name] = value
    (place / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return place


def _record(
    place: Path, returns: Sequence[float], every: int = 1000, speed: float = 100.0, tensorboard: bool = False, **more
) -> Path:
    run = RunLogger(place, [EventFile] if tensorboard else [])
    for index, value in enumerate(returns):
        step = every * (index + 1)
        axes = {"gradient_steps": step // 8, "seconds": step / speed}
        run.log({"rollout/return_mean": 0.5, "loss/dyn": 1.0}, step=step - every // 2, **axes)
        metrics = {f"eval/{name}": values[index] for name, values in more.items()}
        run.log({"eval/return_mean": value} | metrics, step=step, **axes)
    run.close()
    return place


@pytest.fixture
def begin() -> Callable[..., Path]:
    """Makes a run directory with nothing but its configuration; ``a__b=1`` stands for the key ``a.b``."""
    return _begin


@pytest.fixture
def record() -> Callable[..., Path]:
    """Writes rows as a run does: learning metrics in between, an evaluation each ``every`` policy steps."""
    return _record


@pytest.fixture
def trained() -> Callable[..., Path]:
    """Writes one run per seed below ``logs/``, each with its returns; the options are those of begin and record."""

    def call(curves: Mapping[int, Sequence[float]], agent: str = "dreamer_v3", env: str = "franka_pick", **options):
        recorded = {key: options.pop(key) for key in list(options) if key in ("every", "speed", "success_rate")}
        if "success_rate" in recorded:
            recorded["episodes"] = [20.0] * len(recorded["success_rate"])
        for seed, returns in curves.items():
            place = Path(f"logs/{env}/{agent}/{agent}/seed_{seed}")
            _record(_begin(place, env, agent, seed=seed, **options), returns, **recorded)
        return Path("logs") / env

    return call


@pytest.fixture
def two_agents(trained) -> Path:
    """Four seeds of each, of which those of DreamerV3 are better and those of PPO ten times as fast."""
    trained({seed: [10, 20 + seed, 30 + seed, 40 + seed] for seed in range(4)})
    return trained({seed: [5, 6 + seed, 7 + seed, 8 + seed] for seed in range(4)}, agent="ppo", speed=1000)


@pytest.fixture
def read_table() -> Callable[[str], dict[str, dict[str, str]]]:
    def call(text: str) -> dict[str, dict[str, str]]:
        cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if "|" in line]
        return {row[0]: dict(zip(cells[0][1:], row[1:], strict=True)) for row in cells[2:]}

    return call


@pytest.fixture
def compared(sheeplike, read_table) -> Callable[..., Printed]:
    """Runs ``compare`` on requests that can be met."""

    def call(*arguments: str) -> Printed:
        result = sheeplike("compare", *arguments)
        assert (result.status, result.error) == (0, "")
        return Printed(result.output, read_table(result.output))

    return call


@pytest.fixture
def refused(refused) -> Callable[..., str]:
    """Runs ``compare`` on requests that must be refused, and returns the one line."""
    return functools.partial(refused, "compare")


@pytest.fixture
def points() -> Callable[[str], list[dict[str, str]]]:
    """Reads a CSV file."""
    return lambda file: list(csv.DictReader(io.StringIO(Path(file).read_text())))
