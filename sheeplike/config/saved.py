"""The configuration that a run has saved: read as data, and what may change when the run goes on.

A run's directory may come from elsewhere. Nothing in it is composed, interpolated or run, and no link leads out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from sheeplike.config.schema import Config, to_data
from sheeplike.files import read_yaml
from sheeplike.options import CommandError, format_value

FORMAT = 1  # of config.yaml
# What may change when a run is resumed; anything else would make it another run.
RESUMABLE = {
    "seed",
    "total_steps",
    "compile",
    "log_every",
    "video_every",
    "watchdog",
    "eval",
    "checkpoint",
    "max_skipped",
    "logger",
}
SHOWN = 8  # changes, at most


def to_yaml(config: Config) -> str:
    """The configuration as a run saves it, every value in full; of ``env.options`` those that were given."""
    return yaml.safe_dump({"format": FORMAT} | to_data(config), sort_keys=False, allow_unicode=True)


def may_change(key: str) -> bool:
    """Whether a key may have another value when a run goes on."""
    return key.partition(".")[0] in RESUMABLE


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations: dotted key to both values; ``run_dir`` apart, which may have moved."""
    old, new = (dict(flat(to_data(config.replace(run_dir=None)))) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def describe_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """``total_steps 1000 -> 2000, log_every 10 -> 20``; of many the first few."""
    texts = [f"{key} {format_value(before)} -> {format_value(after)}" for key, (before, after) in changed.items()]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)


def read_saved(path: Path) -> dict[str, Any]:
    """The content of a saved configuration as plain data, not yet validated.

    Raises:
        CommandError: the file cannot be read, or holds what :func:`to_yaml` never writes.
    """
    try:
        data = read_yaml(path)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise CommandError(f"{path}: expected the configuration of a run")
    if data.pop("format", None) != FORMAT:
        raise CommandError(f"{path}: was written by another version of sheeplike, expected format {FORMAT}; start anew")
    return data


def flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in nested dictionaries; an empty one is a value."""
    for name, value in section.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + str(name), value
