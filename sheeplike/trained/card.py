"""The card of a trained agent: Markdown with the front matter that the Hugging Face Hub reads."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from sheeplike.config.compose import load
from sheeplike.config.saved import changes
from sheeplike.config.schema import Config, to_data
from sheeplike.config.sources import Sources
from sheeplike.files import read_text
from sheeplike.options import CommandError, format_value
from sheeplike.run.layout import STARTS
from sheeplike.terminal import one_line

CARD, FILM = "card.md", "scene.gif"  # FILM: of a task's own camera
LIMIT = 2**24  # bytes of starts.jsonl
FEW = 16  # episodes; of fewer, a bootstrap interval holds the mean in far less than 95 % of the cases
METRICS = {"eval/return_mean": "mean_reward", "eval/success_rate": "success_rate"}  # the hub's names of ours


def render(
    record: Mapping[str, Any], agent: Sequence[str], *, commit: str | None, film: Path | None, license: str | None
) -> str:
    """Return the card of an agent.

    Args:
        record: the ``result.json`` of an evaluation, which may come from anyone.
        agent: arguments of ``eval`` that name the agent.
        commit: of the program that trained it.
        film: a GIF that will lie beside the card.
        license: the hub's name of the licence, if its owner chose one.
    """
    about, metrics = record["run"], record["metrics"]
    task = about["env"] if about["id"] is None else f"{about['env']}: {about['id']}"
    title = one_line(f"{about['agent']} on {task}")
    result = {
        "task": {"type": "reinforcement-learning", "name": "reinforcement learning"},
        "dataset": {"name": task, "type": task},
        "metrics": [{"type": kind, "value": metrics[key]} for key, kind in METRICS.items() if key in metrics],
    }
    front = {
        **({"license": license} if license else {}),
        "library_name": "sheeplike",
        "pipeline_tag": "reinforcement-learning",
        "tags": ["reinforcement-learning", about["agent"], about["env"]],
        "model-index": [{"name": title, "results": [result]}],
    }
    rows = {
        "agent": f"{about['agent']}, {record['parameters']:,} parameters, {record['bytes'] / 1e6:.2f} MB",
        "trained": f"{record['step']:,} policy steps, seed {about['seed']}" + (f", commit {commit}" if commit else ""),
        **describe(metrics, record["settings"]),
        **({"license": license} if license else {}),
    }
    table = "".join(f"| {_cell(name)} | {_cell(text)} |\n" for name, text in rows.items())
    commands = {"Play it": command("eval", *agent), "Train another": record["command"]}
    blocks = "".join(f"\n{use}:\n\n```\n{one_line(line)}\n```\n" for use, line in commands.items() if line)
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {_cell(title)}\n\n"
        + (f"![Film of the agent]({quote(film.name)})\n\n" if film else "")
        + f"| | |\n|---|---|\n{table}\nThe intervals are over episodes of this one agent.\n{blocks}"
    )


def _cell(text: str) -> str:
    """Return text of one line that is neither markup nor HTML."""
    lines = [re.sub(r"([\\`\[\]<>|!])", r"\\\1", one_line(line)) for line in text.splitlines()]
    return "<br>".join(lines)


def choose_film(place: Path) -> Path | None:
    """Return the GIF of an evaluation that people see most in."""
    films = sorted(place.glob("*.gif"), key=lambda film: (film.name != FILM, film.name))
    return films[0] if films else None


def describe(metrics: Mapping[str, float], asked: Mapping[str, Any]) -> dict[str, str]:
    """Return the result of an evaluation as text by name; ``asked`` are its settings."""
    m = {name.removeprefix("eval/"): value for name, value in metrics.items()}
    terms = [f"{name.partition('/')[2]} {value:#.4g}" for name, value in m.items() if name.startswith("reward_terms/")]
    how = "sampled actions" if asked["sample"] else "the mode of the policy"
    how += "" if asked["randomize"] else "; without randomization"
    success = "{success_rate:.1%}, 95 % interval {success_lo:.1%} to {success_hi:.1%}"
    returns = [f"{m['return_mean']:#.4g}, 95 % interval {m['return_lo']:#.4g} to {m['return_hi']:#.4g}"]
    if asked["episodes"] < FEW:
        returns.append(f"{asked['episodes']} episodes: the interval is too narrow; take at least {FEW}")
    if m["return_lo"] == m["return_hi"]:
        returns.append("all returns were equal: the interval has no width, but the mean is not certain")
    return {
        "episodes": f"{asked['episodes']} in {asked['num_envs']} worlds; seed {asked['seed']}; {how}",
        "return": "\n".join(returns),
        **({"success": success.format(**m)} if "success_rate" in m else {}),
        "length": f"{m['length_mean']:.4g} steps",
        "reward terms": "\n".join(terms) or "none",
    }


def command(*arguments: str) -> str:
    """Return a command line of this program, quoted for a shell."""
    return shlex.join(["python", "-m", "sheeplike", *arguments])


def command_of(config: Config) -> str | None:
    """Return the shortest command line that composes a configuration; None if there is none here."""
    arguments = [f"exp={config.exp}", f"env={config.env.name}", f"profile={config.profile}", f"seed={config.seed}"]
    arguments += [f"env.id={config.env.id}"] if config.env.id else []
    try:
        changed = changes(to_data(load(arguments, Sources()).config), config)
        sections = {key.rpartition(".")[0] for key in changed}  # one that was empty stands among the keys below it
        arguments += [f"{key}={format_value(value)}" for key, (_, value) in changed.items() if key not in sections]
        same = not changes(to_data(load(arguments, Sources()).config), config)
    except CommandError:  # its recipe is not here, or is another now
        return None
    return command(*arguments) if same else None


def commit_of(run_dir: Path) -> str | None:
    """Return the program's commit at the last start of a run; None for an export, and outside a clone."""
    # The last line may be cut, and a stranger's hold anything.
    with suppress(OSError, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return str(json.loads(read_text(run_dir / STARTS, LIMIT).splitlines()[-1])["commit"]["sheeplike"])
    return None
