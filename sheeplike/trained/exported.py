"""An agent as files that anybody may have: weights as safetensors, and what it takes to act with them.

::

    <directory>/
        weights.safetensors   the networks by the names of their parameters
        model.json            what the agent observes and does
        config.yaml           of the run that trained it
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from sheeplike import host
from sheeplike.agents import registry
from sheeplike.agents.config import AgentConfig
from sheeplike.config.errors import as_command_errors, expand, nearest, validated
from sheeplike.config.saved import read_saved, to_yaml
from sheeplike.envs.spaces import Data, Space, Spaces, describe
from sheeplike.files import open_regular, read_text, write_atomically
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE, checkpoint_steps, choose_checkpoint
from sheeplike.run.layout import config_file as config_of_run
from sheeplike.terminal import first_sentence

if TYPE_CHECKING:
    import torch
    from gymnasium import spaces
    from torch import nn

    from sheeplike.agents.agent import Agent
    from sheeplike.config.schema import Config

WEIGHTS, MODEL = "weights.safetensors", "model.json"
DEMO, DEMOS = "demo:", Path(__file__).parents[1] / "models"
LIMIT = 2**20  # bytes of model.json; it takes about three thousand


class Model(Data):
    """What ``model.json`` holds."""

    format: Literal[1] = 1
    step: int = Field(ge=0, lt=2**63)
    observations: dict[str, Space]
    only_for_learning: dict[str, Space]
    actions: Space
    versions: dict[str, Any]
    sha256: str  # of the weights


def is_export(place: Path) -> bool:
    return (place / MODEL).is_file()


def demo(name: str) -> Path:
    """The directory of a trained agent that comes with the program.

    Raises:
        InvalidOption: there is none of this name.
    """
    if name not in demos():
        names = [DEMO + known for known in demos()]
        raise InvalidOption(
            "run",
            DEMO + name,
            f"the directory of a run, or {' or '.join(names)}",
            DEMO + (nearest(name, demos()) or demos()[0]),
        )
    return DEMOS / name


def demos() -> list[str]:
    """Names of the trained agents that come with the program."""
    return sorted(path.parent.name for path in DEMOS.glob(f"*/{MODEL}"))


def save(
    place: Path, agent: Agent, space: spaces.Dict, actions: spaces.Space, config: Config, meta: Mapping[str, Any]
) -> Model:
    """Write an agent into a new directory: all files or none.

    Args:
        space, actions: of the environments that it was trained in.
        meta: of its checkpoint.

    Raises:
        OSError: it cannot be written.
    """
    from safetensors.torch import save as to_bytes

    # What only a value sees or a decoder predicts gives networks their shapes, and nobody needs it for acting.
    keys = getattr(agent, "keys", None)
    acting = getattr(agent, "policy_keys", keys).spaces if keys else space.spaces
    known = getattr(agent, "predicted", keys).spaces if keys else space.spaces
    # Each tensor in memory of its own, as safetensors demands.
    weights = _networks(agent).state_dict()
    content = to_bytes({name: value.detach().clone().contiguous() for name, value in weights.items()})
    model = Model(
        step=meta["step"],
        observations={key: describe(one) for key, one in acting.items()},
        only_for_learning={key: describe(one) for key, one in known.items() if key not in acting},
        actions=describe(actions),
        versions=meta["versions"],
        sha256=hashlib.sha256(content).hexdigest(),
    )
    fresh = place.parent / f".tmp-{uuid.uuid4().hex}"
    try:  # written beside the directory, which then gets its name
        fresh.mkdir(parents=True)
        write_atomically(fresh / WEIGHTS, content)
        write_atomically(fresh / MODEL, model.model_dump_json(indent=1) + "\n")
        write_atomically(fresh / CONFIG_FILE, to_yaml(config.replace(run_dir=None)))
        os.rename(fresh, place)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return model


def load_agent(
    place: Path | str, *, checkpoint: str = "last", num_envs: int = 1, device: torch.device | str = "cpu"
) -> Agent:
    """A trained agent, ready to act: ``load_agent(place).player(num_envs=1)``.

    Needs neither the task nor JAX. Nothing that the files hold is run.

    Args:
        place: what ``export`` wrote, the directory of a run, or ``demo:<name>``.
        checkpoint: of a run: ``last``, ``best`` or its policy steps.
        num_envs: environments that it could learn from; a player has a number of its own.

    Raises:
        CommandError: a file is missing, damaged or not what it should be.
    """

    device = _check_device(device)
    place = find(str(place))
    config_file = Path(os.path.realpath(place / CONFIG_FILE)) if is_export(place) else config_of_run(place, "run")
    with _of(place):
        # Not the whole configuration: its task may not be installed where the agent acts.
        saved = read_saved(config_file)
        config = validated(registry.find(saved["agent"]["name"]).config, saved["agent"], "agent.")
    if is_export(place):
        if checkpoint != "last":
            raise InvalidOption("checkpoint", checkpoint, "last: an export holds one agent", "last")
        model, weights = read(place)
        known = Spaces(observations=model.observations | model.only_for_learning, actions=model.actions)
        problem = f"{place / WEIGHTS}: is not of the agent in {CONFIG_FILE} and {MODEL}"
    else:
        _, known, weights = read_checkpoint(place, checkpoint)
        problem = f"run={place}: the checkpoint is not of the agent in its {CONFIG_FILE}"
    with _of(place):
        agent = build(config, *known.build(), saved["fabric"]["precision"], num_envs, device)
    load_weights(agent, weights, problem)
    return agent


def _check_device(device: torch.device | str) -> torch.device:
    """The device, if it is one and is here.

    Raises:
        InvalidOption: it is not.
    """
    import torch

    name = str(device)
    if name.partition(":")[0] not in ("cpu", "cuda"):
        raise InvalidOption("device", name, "cpu or cuda", "cpu" if "c" in name[:1] else "cuda")
    if name != "cpu" and not torch.cuda.is_available():
        raise InvalidOption(
            "device", name, f"a GPU that torch can use, but {host.gpu_problem() or 'it has none'}", "cpu"
        )
    return torch.device(name)


def find(place: str) -> Path:
    """The directory that ``run=`` means: of a run, of an export, or of ``demo:<name>``.

    Raises:
        CommandError: there is no such demo, or the path cannot be one.
    """
    return demo(place.removeprefix(DEMO)) if place.startswith(DEMO) else expand(place)


def read_checkpoint(run_dir: Path, checkpoint: str) -> tuple[dict[str, Any], Spaces, dict[str, torch.Tensor]]:
    """What a checkpoint of a run says of itself and of its worlds, and its agent's weights by name.

    Raises:
        CommandError: there is no such checkpoint, it is damaged, or it holds no agent.
    """
    import torch

    from sheeplike import checkpoint as files

    if not checkpoint_steps(run_dir):
        raise CommandError(f"run={run_dir}: expected a run with a checkpoint; this one has none")
    path, only = choose_checkpoint(run_dir, checkpoint), ("agent",)
    with as_command_errors(files.Corrupt, FileNotFoundError):
        meta, parts = files.load(path, only=only) if path else files.load_latest(run_dir / CHECKPOINTS, only=only)
    weights = parts["agent"].get("modules") if isinstance(parts.get("agent"), Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CommandError(f"run={run_dir}: the checkpoint holds no agent: expected its networks")
    if meta.get("spaces") is None:
        known = "an older version wrote it, or the actions are of another kind than Box, Discrete and MultiDiscrete"
        raise CommandError(f"run={run_dir}: the checkpoint does not say what its worlds show: {known}; resume the run")
    try:
        return meta, Spaces.model_validate_json(json.dumps(meta["spaces"])), weights
    except ValidationError as error:
        raise CommandError(f"run={run_dir}: the checkpoint's spaces are damaged: {first_sentence(error)}") from error


def read(place: Path) -> tuple[Model, dict[str, torch.Tensor]]:
    """What ``export`` wrote beside the configuration: a description, and weights by name.

    Raises:
        CommandError: a file is missing, damaged or not what it should be.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    with _of(place, SafetensorError):
        # A download may be a link into a cache of downloads.
        model = Model.model_validate_json(read_text(os.path.realpath(place / MODEL), LIMIT))
        with open_regular(os.path.realpath(place / WEIGHTS)) as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != model.sha256:
            raise CommandError(f"{place / WEIGHTS}: was altered, its SHA-256 is not that in {MODEL}")
        return model, load(content)


@contextmanager
def _of(place: Path, *failures: type[Exception]) -> Iterator[None]:
    """Turn what goes wrong with the files of an export into one line."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"{error.filename or place}: {error.strerror or error}") from None
    except CommandError as error:
        raise error if str(place) in str(error) else CommandError(f"{error} (in {place})") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CommandError(f"{place / MODEL}: is no description of an agent: {where}: {first['msg']}") from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, MemoryError, *failures) as error:
        raise CommandError(f"{place}: describes no agent: {type(error).__name__}: {first_sentence(error)}") from None


def build(
    config: AgentConfig, space: spaces.Dict, actions: spaces.Space, precision: str, num_envs: int, device: torch.device
) -> Agent:
    """An agent that only acts."""
    import torch

    mixed = partial(torch.autocast, device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext
    options = {"num_envs": num_envs, "device": device, "compile": "off", "autocast": mixed, "seed": 0}
    return registry.find(config.name).build(space, actions, config.acting_only(num_envs), **options)


def _networks(agent: Agent) -> nn.Module:
    return getattr(agent, "networks", None) or agent.modules


def load_weights(agent: Agent, weights: Mapping[str, torch.Tensor], problem: str) -> None:
    """Give an agent the weights of an export.

    Args:
        problem: how the error begins.

    Raises:
        CommandError: they are of another agent, or not finite.
    """
    from sheeplike.checkpoint import check_finite

    networks = _networks(agent)
    try:
        networks.load_state_dict(weights)
        check_finite("agent", networks.state_dict())
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise CommandError(f"{problem}: {first_sentence(error)}") from error
