"""The configuration that a run has saved, read as data, and the keys that may change when the run is resumed.

A run's directory may come from elsewhere. Nothing in it is composed, interpolated or run, and no link leads out of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sheeplike.agents import registry
from sheeplike.config.schema import Config, all_keys, to_data
from sheeplike.files import read_yaml
from sheeplike.options import CommandError, flat, format_value, is_within, marked

FORMAT = 1
SHOWN = 8  # changes, at most


def to_yaml(config: Config) -> str:
    """Return the configuration as a run saves it: every value in full, but of ``env.options`` only those given."""
    return yaml.safe_dump({"format": FORMAT} | to_data(config), sort_keys=False, allow_unicode=True)


def resumable_keys() -> frozenset[str]:
    """Return the keys and sections that may change when a run is resumed."""
    return marked(all_keys(*registry.built_in()), "resumable")


def may_change(key: str) -> bool:
    """Return True if a key may have another value when a run is resumed."""
    return is_within(key, resumable_keys())


def changes(before: Mapping[str, Any], after: Config) -> dict[str, tuple[Any, Any]]:
    """Return both values of each dotted key that differs, except ``run_dir``: a run may have been moved."""
    old, new = (dict(flat({**data, "run_dir": None})) for data in (before, to_data(after)))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def describe_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return text such as ``total_steps 1000 -> 2000, log_every 10 -> 20``, of the first few."""
    texts = [f"{key} {format_value(before)} -> {format_value(after)}" for key, (before, after) in changed.items()]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)


def read_saved(path: Path) -> dict[str, Any]:
    """Return the content of a saved configuration as plain data, not yet validated."""
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
