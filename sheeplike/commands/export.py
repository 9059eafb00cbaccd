"""Write the weights of a run's agent as safetensors, with what it takes to load them.

``python -m sheeplike export run=<run_dir> [key=value …]`` makes a directory with ``weights.safetensors``, the agent's
networks by the names of their parameters, and ``model.json``: what was trained on which task, the agent's options and
the spaces it acts in. Both are data, without pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from sheeplike.agents import registry
from sheeplike.agents.config import AgentConfig
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import CommandError, as_command_errors, validated
from sheeplike.config.schema import Config
from sheeplike.files import read_text
from sheeplike.options import Options, explain_keys, keys_of
from sheeplike.run.run_dir import CHECKPOINTS, choose_checkpoint, open_run

if TYPE_CHECKING:
    import torch
    from gymnasium import spaces

    from sheeplike.agents.agent import Agent

FORMAT = 1
WEIGHTS, MODEL = "weights.safetensors", "model.json"
LIMIT = 2**20  # bytes of model.json; it takes about three thousand


class ExportOptions(Options):
    """Keys of this command."""

    run: str | None = Field(None, description="the directory of the run")
    checkpoint: str = Field(
        "last", description="last; best: of those kept, the one with the highest eval/return_mean; or its policy steps"
    )
    to: str | None = Field(None, description="a new directory for the files; null: <run_dir>/export/step_<steps>")


def main(request: Request) -> None:
    """Write an agent's weights and what describes them.

    Raises:
        CommandError: there is nothing to export, or the directory is taken; nothing was written.
    """
    if request.help:
        print(
            "python -m sheeplike export run=<run_dir> [key=value ...]",
            "",
            explain_keys(keys_of(ExportOptions)),
            sep="\n",
        )
        print(f"\nWrites {WEIGHTS} and {MODEL}, both at once; what is there already is never replaced.")
        print("safetensors.torch.load_file reads the weights alone.")
        return
    asked = load_options(ExportOptions, request.about_run())
    run_dir, config = open_run(asked.run, "export")
    path = choose_checkpoint(run_dir, asked.checkpoint)
    place = None if asked.to is None else Path(asked.to).expanduser()
    if place is not None:
        _check_free(place)
    print("loading torch and JAX", flush=True)
    place = export_run(run_dir, path, config, place)
    print(
        f"saved: {place}\nload it:\n"
        "  from sheeplike.commands.export import load_agent\n"
        f"  player = load_agent({str(place)!r}).player(num_envs=1)\n"
        "  action = player.act(observations, is_first)"
    )


def export_run(run_dir: Path, path: Path | None, config: Config, place: Path | None) -> Path:
    """Write the agent of a checkpoint.

    Args:
        path: the checkpoint; None: the newest that is whole.
        config: of the run.
        place: the directory to make; None: in the run's own.

    Returns:
        The directory.

    Raises:
        CommandError: the checkpoint is damaged or of another agent, or the directory is taken or cannot be written.
    """
    import torch

    from sheeplike import checkpoint
    from sheeplike.run.build import build_envs

    with as_command_errors(ValueError, TypeError, MemoryError, checkpoint.Corrupt, FileNotFoundError):
        meta, weights = _read_weights(run_dir, path)
        place = place or run_dir / "export" / f"step_{meta['step']:012d}"
        _check_free(place)
        envs = build_envs(_anywhere(config), 1, torch.device("cpu"))  # which say what the agent sees and does
        space, actions = envs.single_observation_space, envs.single_action_space
        envs.close()
        agent = _build(config.agent, space, actions, config.fabric.precision, 1, torch.device("cpu"))
    _load(agent, weights, f"run={run_dir}: the checkpoint is not of the agent in its config.yaml")
    # What only a value sees or a decoder predicts gives networks their shapes, and nobody needs it for acting.
    keys = getattr(agent, "keys", None)
    acting = getattr(agent, "policy_keys", keys).spaces if keys else space.spaces
    known = getattr(agent, "predicted", keys).spaces if keys else space.spaces
    learning = [key for key in known if key not in acting]
    model = {
        "format": FORMAT,
        "step": meta["step"],
        "run": {"exp": config.exp, "seed": config.seed},
        "env": config.env.model_dump(mode="json"),
        "agent": config.agent.model_dump(mode="json", by_alias=True),
        "precision": config.fabric.precision,
        "observations": {key: _space_to_data(one) for key, one in acting.items()},
        "only_for_learning": {key: _space_to_data(known[key]) for key in learning},
        "actions": _space_to_data(actions),
        "versions": meta["versions"],
    }
    with as_command_errors(OSError):
        _write(place, weights, model)
    return place


def load_agent(place: Path | str, *, num_envs: int = 1, device: torch.device | str = "cpu") -> Agent:
    """The agent that :func:`export_run` wrote, ready to act: ``load_agent(place).player(num_envs=1)``.

    Needs neither the task nor JAX. Nothing that the files hold is run.

    Args:
        num_envs: environments that it could learn from; a player has a number of its own.

    Raises:
        CommandError: a file is missing, damaged or not what it should be.
    """
    import torch
    from gymnasium import spaces
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = Path(place) / MODEL
    try:
        # A download may be a link into a cache of downloads.
        model = json.loads(read_text(file.resolve(), LIMIT))
        if not isinstance(model, dict) or model.get("format") != FORMAT:
            raise ValueError(f"expected the description of an agent, of format {FORMAT}")
        config = validated(registry.find(model["agent"]["name"]).config, model["agent"], "agent.")
        described = model["observations"] | model.get("only_for_learning", {})
        seen = spaces.Dict({key: _space_from_data(one) for key, one in described.items()})
        actions = _space_from_data(model["actions"])
        agent = _build(config, seen, actions, model["precision"], num_envs, torch.device(device))
        expected = model["weights"]["sha256"]
        with (Path(place) / WEIGHTS).open("rb") as weights:
            if hashlib.file_digest(weights, "sha256").hexdigest() != expected:
                raise CommandError(f"{Path(place) / WEIGHTS}: was altered, its SHA-256 is not that in {MODEL}")
        tensors = load_file(Path(place) / WEIGHTS, device="cpu")
    except OSError as error:
        raise CommandError(f"{error.filename or file}: {error.strerror or error}") from None
    except SafetensorError as error:
        raise CommandError(f"{Path(place) / WEIGHTS}: {error}") from None
    except CommandError as error:
        raise CommandError(f"{error} (in {place})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CommandError(f"{file}: is no description of an agent: {type(error).__name__}: {error}") from None
    _load(agent, tensors, f"{Path(place) / WEIGHTS}: is not of the agent in {MODEL}")
    return agent


def _anywhere(config: Config) -> Config:
    """The same run rendered by what a CPU has: an agent sees the same names, sizes and types."""
    renderer = config.env.renderer
    return config.replace(env=config.env.replace(renderer="warp" if renderer == "madrona" else renderer))


def _read_weights(run_dir: Path, path: Path | None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a checkpoint says of itself, and the parameters and buffers of its agent's networks."""
    import torch

    from sheeplike import checkpoint

    root, only = run_dir / CHECKPOINTS, ("agent",)
    meta, parts = checkpoint.load(path, only=only) if path else checkpoint.load_latest(root, only=only)
    weights = parts["agent"].get("modules") if isinstance(parts.get("agent"), Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CommandError(f"run={run_dir}: the checkpoint holds no agent: expected its networks")
    return meta, dict(weights)


def _build(
    config: AgentConfig,
    space: spaces.Dict,
    actions: spaces.Space,
    precision: str,
    num_envs: int,
    device: torch.device,
) -> Agent:
    """An agent that only acts."""
    import torch

    mixed = partial(torch.autocast, device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext
    build = registry.find(config.name).build
    options = {"num_envs": num_envs, "device": device, "compile": "off", "autocast": mixed, "seed": 0}
    return build(space, actions, config.acting_only(num_envs), **options)


def _load(agent: Agent, weights: Mapping[str, torch.Tensor], problem: str) -> None:
    networks = getattr(agent, "networks", None) or agent.modules
    try:
        networks.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise CommandError(f"{problem}: {error}") from error


def _check_free(place: Path) -> None:
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        free = next(
            name for count in range(2, 10_000) if not (name := place.with_name(f"{place.name}_{count}")).exists()
        )
        raise CommandError(f"{place} exists already: expected to=<another directory>; nearest: to={free}")


def _write(place: Path, weights: Mapping[str, torch.Tensor], model: dict[str, Any]) -> None:
    """All files or none: they are written beside the directory, and renamed."""
    from safetensors.torch import save_file

    place.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        fresh.mkdir()
        # Each tensor in memory of its own, as safetensors demands.
        save_file({name: value.detach().clone().contiguous() for name, value in weights.items()}, fresh / WEIGHTS)
        with (fresh / WEIGHTS).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        with (fresh / MODEL).open("w", encoding="utf-8") as file:
            described = {"file": WEIGHTS, "sha256": digest, "tensors": len(weights)}
            file.write(json.dumps(model | {"weights": described}, indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(fresh / MODEL, fresh / WEIGHTS)  # safetensors lets nobody else read what it writes
        os.rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _space_to_data(space: spaces.Space) -> dict[str, Any]:
    """A space as JSON has it; null stands for a bound that is infinite."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"type": "MultiDiscrete", "nvec": space.nvec.tolist(), "start": space.start.tolist()}
    bounds = {"low": float(space.low.min()), "high": float(space.high.max())}
    finite = {name: bound if math.isfinite(bound) else None for name, bound in bounds.items()}
    return {"type": "Box", "shape": list(space.shape), "dtype": str(space.dtype), **finite}


def _space_from_data(data: dict[str, Any]) -> spaces.Space:
    import numpy as np
    from gymnasium import spaces

    if data["type"] == "Discrete":
        _check_choices([data["n"]], [data.get("start", 0)])
        return spaces.Discrete(data["n"], start=data.get("start", 0))
    if data["type"] == "MultiDiscrete":
        _check_choices(data["nvec"], data["start"])
        return spaces.MultiDiscrete(data["nvec"], start=data["start"])
    shape, dtype = tuple(data["shape"]), data["dtype"]
    if data["type"] != "Box" or dtype not in ("uint8", "float32") or not all(0 < side <= 2**16 for side in shape):
        raise ValueError(
            f"{data}: expected a Box of uint8 or float32 with sides from 1 to 65536, or a (Multi)Discrete space"
        )
    if math.prod(shape) > 2**24:
        raise ValueError(f"a space of {shape}: expected at most {2**24} numbers")
    low, high = -np.inf if data["low"] is None else data["low"], np.inf if data["high"] is None else data["high"]
    return spaces.Box(low, high, shape, dtype)


def _check_choices(counts: list[int], starts: list[int]) -> None:
    """Refuse what is no number of actions to choose from, or so many that no network could."""
    integers = all(type(number) is int for number in (*counts, *starts))
    if not integers or len(counts) != len(starts) or min(counts, default=0) < 1 or sum(counts) > 2**16:
        raise ValueError(
            f"{counts} from {starts} on: expected counts from 1, at most {2**16} in all, and where they start"
        )
    if max(map(abs, starts)) > 2**31:
        raise ValueError(f"{starts}: expected integers of at most 31 bits")
