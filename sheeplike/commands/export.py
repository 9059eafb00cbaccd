"""Write the weights of a run's agent as safetensors, with what it takes to load them.

``python -m sheeplike export run=<run_dir> [key=value …]`` makes a directory with ``weights.safetensors``, the agent's
networks by the names of their parameters, and ``model.json``: what was trained on which task, the agent's options and
the spaces it acts in. Both are data, without pickle.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sheeplike.agents import registry
from sheeplike.agents.config import AgentConfig
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, require_writable, validated
from sheeplike.files import open_regular, read_text, write_atomically
from sheeplike.options import CommandError, Options, explain_keys, keys_of
from sheeplike.run.run_dir import CHECKPOINTS, choose_checkpoint, open_run
from sheeplike.terminal import echo, info, warn

if TYPE_CHECKING:
    import torch
    from gymnasium import spaces

    from sheeplike.agents.agent import Agent

WEIGHTS, MODEL = "weights.safetensors", "model.json"
LIMIT = 2**20  # bytes of model.json; it takes about three thousand
Count = Annotated[int, Field(ge=1, le=2**16)]
Start = Annotated[int, Field(ge=-(2**31), le=2**31)]


class _Data(BaseModel):
    """A part of ``model.json``, which may come from anybody: nothing is converted, and sizes have limits."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Box(_Data):
    """Numbers; a bound of null is infinite."""

    type: Literal["Box"] = "Box"
    shape: tuple[Count, ...]
    dtype: Literal["uint8", "float16", "float32", "float64"]
    low: float | None
    high: float | None


class Discrete(_Data):
    type: Literal["Discrete"] = "Discrete"
    n: Count
    start: Start


class MultiDiscrete(_Data):
    type: Literal["MultiDiscrete"] = "MultiDiscrete"
    nvec: tuple[Count, ...] = Field(min_length=1, max_length=2**8)
    start: tuple[Start, ...]


Space = Annotated[Box | Discrete | MultiDiscrete, Field(discriminator="type")]


class Model(_Data):
    """What ``model.json`` holds."""

    format: Literal[1] = 1
    step: int
    run: dict[str, Any]
    env: dict[str, Any]
    agent: dict[str, Any]
    precision: str
    observations: dict[str, Space]
    only_for_learning: dict[str, Space]
    actions: Space
    versions: dict[str, Any]
    sha256: str  # of the weights


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
        echo(f"python -m sheeplike export run=<run_dir> [key=value ...]\n\n{explain_keys(keys_of(ExportOptions))}\n")
        echo(f"Writes {WEIGHTS} and {MODEL}, both at once; what is there already is never replaced.")
        echo("safetensors.torch.load_file reads the weights alone.")
        return
    asked = load_options(ExportOptions, request.about_run())
    run_dir, config = open_run(asked.run, "export")
    path = choose_checkpoint(run_dir, asked.checkpoint)  # None: the newest that is whole
    place = None if asked.to is None else Path(asked.to).expanduser()
    require_writable("to", place or run_dir / "export")
    if place is not None:
        _check_free(place)
    info("loading torch and JAX")
    import torch
    from safetensors.torch import save

    from sheeplike import checkpoint
    from sheeplike.run.build import build_envs, changes_since, edits

    only, device = ("agent",), torch.device("cpu")
    with as_command_errors(ValueError, TypeError, MemoryError, checkpoint.Corrupt, FileNotFoundError):
        root = run_dir / CHECKPOINTS
        meta, parts = checkpoint.load(path, only=only) if path else checkpoint.load_latest(root, only=only)
        if edited := edits(changes_since(meta, config)):
            warn(edited)
        weights = parts["agent"].get("modules") if isinstance(parts.get("agent"), Mapping) else None
        if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
            raise CommandError(f"run={run_dir}: the checkpoint holds no agent: expected its networks")
        place = place or run_dir / "export" / f"step_{meta['step']:012d}"
        _check_free(place)
        # The environments say what the agent sees and does: the same names, sizes and types whatever renders.
        renderer = "warp" if config.env.renderer == "madrona" else config.env.renderer
        envs = build_envs(config.replace(env=config.env.replace(renderer=renderer)), 1, device)
        space, actions = envs.single_observation_space, envs.single_action_space
        envs.close()
        agent = _build(config.agent, space, actions, config.fabric.precision, 1, device)
    _load(agent, weights, f"run={run_dir}: the checkpoint is not of the agent in its config.yaml")
    # What only a value sees or a decoder predicts gives networks their shapes, and nobody needs it for acting.
    keys = getattr(agent, "keys", None)
    acting = getattr(agent, "policy_keys", keys).spaces if keys else space.spaces
    known = getattr(agent, "predicted", keys).spaces if keys else space.spaces
    # Each tensor in memory of its own, as safetensors demands.
    content = save({name: value.detach().clone().contiguous() for name, value in weights.items()})
    model = Model(
        step=meta["step"],
        run={"exp": config.exp, "seed": config.seed},
        env=config.env.model_dump(mode="json"),
        agent=config.agent.model_dump(mode="json", by_alias=True),
        precision=config.fabric.precision,
        observations={key: _describe(one) for key, one in acting.items()},
        only_for_learning={key: _describe(one) for key, one in known.items() if key not in acting},
        actions=_describe(actions),
        versions=meta["versions"],
        sha256=hashlib.sha256(content).hexdigest(),
    )
    fresh = place.parent / f".tmp-{uuid.uuid4().hex}"
    try:  # both files or none: they are written beside the directory, which then gets its name
        with as_command_errors(OSError):
            fresh.mkdir(parents=True)
            write_atomically(fresh / WEIGHTS, content)
            write_atomically(fresh / MODEL, model.model_dump_json(indent=1) + "\n")
            os.rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shown = (f"{key!r}: torch.zeros({(1, *one.shape)}, dtype=torch.{one.dtype})" for key, one in acting.items())
    info(
        f"saved: {place}\nload it:\n"
        "  import torch\n"
        "  from sheeplike.commands.export import load_agent\n"
        f"  player = load_agent({str(place)!r}).player(num_envs=1)\n"
        f"  observations = {{{', '.join(shown)}}}\n"
        "  action = player.act(observations, is_first=torch.tensor([True]))"
    )


def load_agent(place: Path | str, *, num_envs: int = 1, device: torch.device | str = "cpu") -> Agent:
    """The agent that ``export`` wrote, ready to act: ``load_agent(place).player(num_envs=1)``.

    Needs neither the task nor JAX. Nothing that the files hold is run.

    Args:
        num_envs: environments that it could learn from; a player has a number of its own.

    Raises:
        CommandError: a file is missing, damaged or not what it should be.
    """
    import torch
    from gymnasium import spaces
    from safetensors import SafetensorError
    from safetensors.torch import load

    place = Path(place)
    try:
        # A download may be a link into a cache of downloads.
        model = Model.model_validate_json(read_text((place / MODEL).resolve(), LIMIT))
        config = validated(registry.find(model.agent.get("name")).config, model.agent, "agent.")
        described = model.observations | model.only_for_learning
        seen = spaces.Dict({key: _space(one) for key, one in described.items()})
        agent = _build(config, seen, _space(model.actions), model.precision, num_envs, torch.device(device))
        with open_regular((place / WEIGHTS).resolve()) as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != model.sha256:
            raise CommandError(f"{place / WEIGHTS}: was altered, its SHA-256 is not that in {MODEL}")
        tensors = load(content)
    except OSError as error:
        raise CommandError(f"{error.filename or place}: {error.strerror or error}") from None
    except CommandError as error:
        raise CommandError(f"{error} (in {place})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CommandError(f"{place / MODEL}: is no description of an agent: {where}: {first['msg']}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise CommandError(f"{place}: describes no agent: {type(error).__name__}: {error}") from None
    _load(agent, tensors, f"{place / WEIGHTS}: is not of the agent in {MODEL}")
    return agent


def _build(
    config: AgentConfig, space: spaces.Dict, actions: spaces.Space, precision: str, num_envs: int, device: torch.device
) -> Agent:
    """An agent that only acts."""
    import torch

    mixed = partial(torch.autocast, device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext
    options = {"num_envs": num_envs, "device": device, "compile": "off", "autocast": mixed, "seed": 0}
    return registry.find(config.name).build(space, actions, config.acting_only(num_envs), **options)


def _load(agent: Agent, weights: Mapping[str, torch.Tensor], problem: str) -> None:
    networks = getattr(agent, "networks", None) or agent.modules
    try:
        networks.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise CommandError(f"{problem}: {error}") from error


def _check_free(place: Path) -> None:
    """Raise where something is already."""
    if os.path.islink(place):
        raise CommandError(f"{place} is a link: expected to=<another directory>")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        beside = (place.with_name(f"{place.name}_{count}") for count in itertools.count(2))
        free = next(path for path in beside if not path.exists())
        raise CommandError(f"{place} exists already: expected to=<another directory>; nearest: to={free}")


def _space(data: Box | Discrete | MultiDiscrete) -> spaces.Space:
    from gymnasium import spaces

    if isinstance(data, Discrete):
        return spaces.Discrete(data.n, start=data.start)
    if isinstance(data, MultiDiscrete):
        return spaces.MultiDiscrete(data.nvec, start=data.start)
    if math.prod(data.shape) > 2**24:
        raise ValueError(f"a space of {data.shape}: expected at most {2**24} numbers")
    low, high = -math.inf if data.low is None else data.low, math.inf if data.high is None else data.high
    return spaces.Box(low, high, data.shape, data.dtype)


def _describe(space: spaces.Space) -> Box | Discrete | MultiDiscrete:
    """The inverse of :func:`_space`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(n=int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscrete(nvec=tuple(space.nvec.tolist()), start=tuple(space.start.tolist()))
    low, high = (bound if math.isfinite(bound) else None for bound in (float(space.low.min()), float(space.high.max())))
    return Box(shape=space.shape, dtype=str(space.dtype), low=low, high=high)
