"""Write the weights of a run's agent as safetensors, and the files that it takes to load them; or its policy as ONNX.

``python -m sheeplike export run=<run_dir> [key=value …]`` makes a directory with the files of
:mod:`sheeplike.trained.exported`; with ``format=onnx`` one file for :mod:`sheeplike.player`. All are data, without
pickle.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, expand, require_writable
from sheeplike.config.schema import Config
from sheeplike.files import write_atomically
from sheeplike.host import install
from sheeplike.options import CommandError, InvalidOption, Options, explain_keys, keys_of
from sheeplike.run.layout import CONFIG_FILE, METRICS, choose_checkpoint
from sheeplike.run.run_dir import free, open_run
from sheeplike.terminal import echo, info, warn
from sheeplike.trained import exported
from sheeplike.trained.card import commit_of
from sheeplike.trained.exported import MODEL, WEIGHTS
from sheeplike.trained.playing import AgentOptions, TrainedOptions, finite, open_trained, rebuild, results_of

if TYPE_CHECKING:
    import torch

    from sheeplike.agents.policy import PolicyNetworks

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class ExportOptions(Options):
    """Keys of this command."""

    run: str | None = Field(
        None, description="the directory of a run; for onnx also of an export, demo:<name>, or hf://<owner>/<name>"
    )
    checkpoint: str = AgentOptions.model_fields["checkpoint"]
    to: str | None = Field(
        None, description="a new or empty directory, or a new .onnx file; null: <run_dir>/export/step_<steps>[.onnx]"
    )
    format: Literal["safetensors", "onnx"] = Field(
        "safetensors", description="safetensors: all weights, to go on with in sheeplike; onnx: the policy alone"
    )
    sample: bool | None = Field(
        None, description="onnx: true draws actions, false takes the most likely ones; null: the run's eval.sample"
    )


def main(request: Request) -> None:
    """Write an agent's weights and the files that describe them."""
    if request.help:
        echo(f"python -m sheeplike export run=<run_dir> [key=value ...]\n\n{explain_keys(keys_of(ExportOptions))}\n")
        echo(f"Writes {WEIGHTS}, {MODEL} and {CONFIG_FILE}: all or none. Existing files are never replaced.")
        echo("safetensors.torch.load_file reads the weights alone, sheeplike/player.py plays what is ONNX.")
        return
    asked = load_options(ExportOptions, request.about_run())
    if asked.format == "onnx":
        export_policy(asked)
        return
    if asked.sample is not None:
        raise InvalidOption("sample", asked.sample, "format=onnx beside it", None)
    if asked.run is not None and exported.is_export(found := exported.find(asked.run)):
        raise CommandError(f"run={asked.run}: expected the directory of a run; {found} is an export already")
    run_dir, config = open_run(asked.run, "export")
    choose_checkpoint(run_dir, asked.checkpoint)  # refuses before torch and JAX are loaded
    place = None if asked.to is None else expand(asked.to)
    require_writable("to", place or run_dir / "export")
    if place is not None:
        refuse_taken(place)
    info("loading torch and JAX")
    meta, weights = exported.read(run_dir, asked.checkpoint)
    place = place or run_dir / "export" / f"step_{meta['step']:012d}"
    acting = save_weights(place, run_dir, config, meta, weights).observations.items()
    shown = (f"{key!r}: torch.zeros({(1, *one.shape)}, dtype=torch.{one.dtype})" for key, one in acting)
    echo(
        f"saved: {place}\nload it:\n"
        "  import torch\n"
        "  from sheeplike.trained.exported import load_agent\n"
        f"  player = load_agent({str(place)!r}).player(num_envs=1)\n"
        f"  observations = {{{', '.join(shown)}}}\n"
        "  action = player.act(observations, is_first=torch.tensor([True]))"
    )


def save_weights(
    place: Path, run_dir: Path, config: Config, meta: Mapping[str, Any], weights: Mapping[str, torch.Tensor]
) -> PolicyNetworks:
    """Write what :func:`exported.read` found into a new directory; returns the networks."""
    import torch

    from sheeplike.config.saved import changes
    from sheeplike.run.snapshot import forbidden_changes

    if "config" in meta and (edited := forbidden_changes(changes(meta["config"], config))):
        warn(edited)
    refuse_taken(place)
    with as_command_errors(ValueError, TypeError, MemoryError):
        space, actions = exported.spaces_of(run_dir, meta).build()
        networks = exported.build(run_dir, weights, space, actions, config.agent, device=torch.device("cpu"))
    with as_command_errors(OSError):
        exported.save(place, networks, config, meta)
    return networks


def export_policy(asked: ExportOptions) -> None:
    """Write a policy as one ONNX file."""
    place = None if asked.to is None else expand(asked.to)
    if place is not None:
        if place.suffix != ".onnx" or place.is_dir():
            raise InvalidOption("to", asked.to, "a new file whose name ends with .onnx", f"{asked.to or 'policy'}.onnx")
        refuse_taken(place)
        require_writable("to", place)
    one = TrainedOptions(run=asked.run, checkpoint=asked.checkpoint, episodes=1, num_envs=1, accelerator="cpu")
    run_dir, config, one = open_trained(one, "export", None if place else "export")
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise CommandError(f"format=onnx needs {' and '.join(missing)}: {install('onnx')}")
    info("loading torch and JAX")
    from sheeplike.monitor.progress import phase
    from sheeplike.trained import onnx

    step, networks, made = rebuild(run_dir, config, one, randomize=not envs.simulated(config.env.name))
    place = place or results_of(run_dir, "export") / f"step_{step:012d}.onnx"
    refuse_taken(place)
    networks.autocast = nullcontext  # the file computes in float32
    facts = {"env": config.env.task, "agent": config.agent.name, "step": step, **history(run_dir, step)}
    facts |= onnx.describe_task(made, networks) | {"randomized": sorted(config.randomization)}
    made.close()
    sample = config.eval.sample if asked.sample is None else asked.sample
    with phase("writing the policy as ONNX"):
        content = onnx.convert(networks, facts, actions=made.native_actions, sample=sample)
    with as_command_errors(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, content)
    echo(f"saved: {place}\nplay it:\n  from sheeplike.player import Player\n  player = Player({str(place)!r})")


def history(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the newest evaluation up to a step, and the commit of the run's last start; nothing of an export."""
    from sheeplike.analysis.runs import RunError, read_rows

    found: dict[str, Any] = {}
    with as_command_errors(OSError, RunError):
        rows = read_rows(run_dir / METRICS) if (run_dir / METRICS).exists() else []
        evaluations = [(when, row) for when, _, row in rows if when <= step and "eval/return_mean" in row]
    for when, row in evaluations[-1:]:
        scores = {k: v for k, v in row.items() if k.startswith("eval/") and type(v) in (int, float)}
        found["scores"] = {"step": int(when), **finite(scores)}
    if commit := commit_of(run_dir):
        found["commit"] = commit
    return found


def refuse_taken(place: Path) -> None:
    """Raise if there is a link, a file or a directory that is not empty."""
    if os.path.islink(place):
        raise CommandError(f"{place} is a link: expected to=<another place>")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise CommandError(f"{place} exists already: expected to=<another place>; nearest: to={free(place)}")
