"""Write the weights of a run's agent as safetensors, and the files that it takes to load them.

``python -m sheeplike export run=<run_dir> [key=value …]`` makes a directory with the files of
:mod:`sheeplike.trained.exported`. All are data, without pickle.
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, expand, require_writable
from sheeplike.options import CommandError, Options, explain_keys, keys_of
from sheeplike.run.layout import CONFIG_FILE, choose_checkpoint
from sheeplike.run.run_dir import free, open_run
from sheeplike.terminal import echo, info, warn
from sheeplike.trained import exported
from sheeplike.trained.exported import MODEL, WEIGHTS


class ExportOptions(Options):
    """Keys of this command."""

    run: str | None = Field(None, description="the directory of the run")
    checkpoint: str = Field(
        "last", description="last; best: the one still saved with the highest eval/return_mean; or its policy steps"
    )
    to: str | None = Field(None, description="a new or empty directory; null: <run_dir>/export/step_<steps>")


def main(request: Request) -> None:
    """Write an agent's weights and the files that describe them."""
    if request.help:
        echo(f"python -m sheeplike export run=<run_dir> [key=value ...]\n\n{explain_keys(keys_of(ExportOptions))}\n")
        echo(f"Writes {WEIGHTS}, {MODEL} and {CONFIG_FILE}: all or none. Existing files are never replaced.")
        echo("safetensors.torch.load_file reads the weights alone.")
        return
    asked = load_options(ExportOptions, request.about_run())
    if asked.run is not None and exported.is_export(found := exported.find(asked.run)):
        raise CommandError(f"run={asked.run}: expected the directory of a run; {found} is an export already")
    run_dir, config = open_run(asked.run, "export")
    choose_checkpoint(run_dir, asked.checkpoint)  # refuses before torch and JAX are loaded
    place = None if asked.to is None else expand(asked.to)
    require_writable("to", place or run_dir / "export")
    if place is not None:
        _check_free(place)
    info("loading torch and JAX")
    import torch

    from sheeplike.config.saved import changes
    from sheeplike.run.snapshot import forbidden_changes

    meta, weights = exported.read(run_dir, asked.checkpoint)
    if edited := forbidden_changes(changes(meta["config"], config)):
        warn(edited)
    place = place or run_dir / "export" / f"step_{meta['step']:012d}"
    _check_free(place)
    with as_command_errors(ValueError, TypeError, MemoryError):
        space, actions = exported.spaces_of(run_dir, meta).build()
        networks = exported.build(run_dir, weights, space, actions, config.agent, device=torch.device("cpu"))
    with as_command_errors(OSError):
        model = exported.save(place, networks, config, meta)
    acting = {key: space[key] for key in model.observations}
    shown = (f"{key!r}: torch.zeros({(1, *one.shape)}, dtype=torch.{one.dtype})" for key, one in acting.items())
    echo(
        f"saved: {place}\nload it:\n"
        "  import torch\n"
        "  from sheeplike.trained.exported import load_agent\n"
        f"  player = load_agent({str(place)!r}).player(num_envs=1)\n"
        f"  observations = {{{', '.join(shown)}}}\n"
        "  action = player.act(observations, is_first=torch.tensor([True]))"
    )


def _check_free(place: Path) -> None:
    if os.path.islink(place):
        raise CommandError(f"{place} is a link: expected to=<another directory>")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CommandError(f"{place} exists already: expected to=<another directory>; nearest: to={free(place)}")
