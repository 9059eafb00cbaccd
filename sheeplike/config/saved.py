"""The configuration that a run has saved: read as data, and what may change when the run goes on.

A run's directory may come from elsewhere. Nothing in it is composed, interpolated or run, and no link leads out of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sheeplike.config.compose import COMMAND_LINE, Composed, Merged, check_key, flat, parse
from sheeplike.config.schema import Config, all_keys, to_data, validate
from sheeplike.config.sources import GROUPS
from sheeplike.files import read_text
from sheeplike.options import CommandError, InvalidOption, show

FORMAT = 1  # of config.yaml
# What may change when a run is resumed, beside its seed; anything else would make it another run.
RESUMABLE = {
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
LIMIT = 2**20  # bytes of a configuration; one takes about three thousand
DEPTH = 20  # of sections in each other; there are four
SHOWN = 8  # changes, at most


def to_yaml(config: Config) -> str:
    """The configuration as a run saves it, every value in full."""
    return yaml.safe_dump({"format": FORMAT} | to_data(config), sort_keys=False, allow_unicode=True)


def load_saved(path: Path, arguments: Sequence[str] = ()) -> Composed:
    """The configuration of a run, with the few changes that are allowed when it is resumed.

    Raises:
        CommandError: the file or a change is not valid.
    """
    merged, overrides = Merged(), [parse(argument) for argument in arguments]
    merged.add(_read(path), path.name)
    keys = {key.path: key for key in all_keys()}
    for argument, override in zip(arguments, overrides, strict=True):
        key = override.key_or_group
        if key not in GROUPS and not key.startswith("agent."):
            check_key(override, keys)
        if key in GROUPS or key.partition(".")[0] not in {*RESUMABLE, "seed"}:
            expected = ", ".join(sorted({*RESUMABLE, "seed"}))
            raise CommandError(f"'{argument}' cannot change when a run is resumed: expected {expected}")
        merged.set(key, override.value(), COMMAND_LINE)
    try:
        return Composed(validate(merged.data), merged.sources)
    except InvalidOption as error:
        if any(error.key.startswith(override.key_or_group) for override in overrides):
            raise  # the file is not to blame
        raise CommandError(f"{error} (in {path})") from None
    except CommandError as error:
        raise CommandError(f"{error} (in {path})") from None


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations: dotted key to both values; ``run_dir`` apart, which may have moved."""
    old, new = (dict(flat(to_data(config.replace(run_dir=None)))) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def describe_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """``total_steps 1000 -> 2000, log_every 10 -> 20``; of many the first few."""
    texts = [f"{key} {show(before)} -> {show(after)}" for key, (before, after) in changed.items()]
    more = [f"and {len(texts) - SHOWN} more"] if len(texts) > SHOWN else []
    return ", ".join(texts[:SHOWN] + more)


def refuse_links(run_dir: Path, key: str) -> None:
    """Refuse a directory of a run in which a link leads out of it: what is written there would be written elsewhere.

    Raises:
        CommandError: there is one.
    """
    inside = os.path.join(os.path.realpath(run_dir), "")
    for folder, directories, files in os.walk(run_dir):
        for name in (*directories, *files):
            path = os.path.join(folder, name)
            if os.path.islink(path) and not os.path.realpath(path).startswith(inside):
                raise CommandError(
                    f"{key}={run_dir}: {path} is a link to {os.path.realpath(path)}: expected everything of a run "
                    "within its directory; nearest: put there what the link leads to"
                )


def _read(path: Path) -> dict[str, Any]:
    """The content of a saved configuration as plain data.

    Raises:
        CommandError: the file cannot be read, or holds what :func:`to_yaml` never writes.
    """
    try:
        text = read_text(path, LIMIT)
        _refuse_unusual(text)
        data = yaml.safe_load(text)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path}: is no text") from None
    except (yaml.YAMLError, ValueError) as error:
        raise CommandError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise CommandError(f"{path}: expected the configuration of a run")
    if data.pop("format", None) != FORMAT:
        raise CommandError(f"{path}: was written by another version of sheeplike, expected format {FORMAT}; start anew")
    return data


def _refuse_unusual(text: str) -> None:
    """Refuse tags, which make objects; interpolations, which look into the environment; references, which multiply."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            found = f"the reference {event.anchor!r}"
        elif getattr(event, "tag", None):
            found = f"the tag {event.tag!r}"
        elif isinstance(event, yaml.ScalarEvent) and "${" in event.value:
            found = f"the interpolation {event.value!r}"
        elif depth > DEPTH:
            found = f"more than {DEPTH} sections in each other"
        else:
            continue
        raise ValueError(f"line {event.start_mark.line + 1} holds {found}: expected plain values, as they were saved")
