"""A run's directory that may come from elsewhere: read as data, and never a way out of itself."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from sheeplike.commands.errors import CommandError
from sheeplike.files import read_text

LIMIT = 2**20  # bytes of a configuration; one takes about three thousand
DEPTH = 20  # of sections in each other; there are four


def read_config(path: Path) -> dict[str, Any]:
    """The configuration that a run saved, as plain data: nothing in it is composed, interpolated or run.

    Raises:
        CommandError: the file cannot be read, or holds what :func:`~sheeplike.commands.config.to_yaml` never writes.
    """
    try:
        text = read_text(path, LIMIT)
        _refuse_unusual(text)
        data = OmegaConf.to_container(OmegaConf.create(text), resolve=False) if text.strip() else None
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path}: is no text") from None
    except (yaml.YAMLError, ValueError, AssertionError) as error:
        raise CommandError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise CommandError(f"{path}: expected the configuration of a run")
    return data


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
