"""A trained agent as files, those of an export or of a run's checkpoint, and the networks built from them.

An export holds only data, and may come from anyone::

    <directory>/
        weights.safetensors   the networks by the names of their parameters
        model.json            what the agent observes and does
        config.yaml           configuration of the run that trained it
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from sheeplike.agents import registry
from sheeplike.agents.config import AgentConfig
from sheeplike.config.errors import as_command_errors, expand, nearest, validated
from sheeplike.config.saved import read_saved, to_yaml
from sheeplike.envs.contract import resolve_device
from sheeplike.envs.spaces import Data, Space, Spaces, describe
from sheeplike.files import open_regular, read_text, write_atomically
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import CHECKPOINTS, CONFIG_FILE, checkpoint_steps, choose_checkpoint, config_file
from sheeplike.terminal import first_sentence
from sheeplike.trained import hub

if TYPE_CHECKING:
    import torch
    from gymnasium import spaces

    from sheeplike.agents.policy import PolicyNetworks
    from sheeplike.config.schema import Config

WEIGHTS, MODEL = "weights.safetensors", "model.json"
DEMO, DEMOS = "demo:", Path(__file__).parents[1] / "models"
LIMIT = 2**20  # bytes of model.json, which usually has about 3,000


class Model(Data):
    """Content of ``model.json``."""

    format: Literal[1] = 1
    step: int = Field(ge=0, lt=2**63)
    observations: dict[str, Space]
    only_for_learning: dict[str, Space]
    actions: Space
    versions: dict[str, Any]
    sha256: str


def demos() -> list[str]:
    """Names of the trained agents that come with the program."""
    return sorted(path.parent.name for path in DEMOS.glob(f"*/{MODEL}"))


def find(run: str) -> Path:
    """Return the directory that ``run=`` names: of a run, an export, ``demo:<name>`` or ``hf://owner/name@revision``."""
    if run.startswith("hf:"):
        return hub.download(run, (WEIGHTS, MODEL, CONFIG_FILE))
    if not run.startswith(DEMO) and (run != DEMO[:-1] or Path(run).exists()):
        return expand(run)
    name = run.removeprefix(DEMO)
    if name not in demos():
        known = [DEMO + demo for demo in demos()]
        near = DEMO + (nearest(name, demos()) or demos()[0])
        raise InvalidOption("run", run, f"the directory of a run, or {' or '.join(known)}", near)
    return DEMOS / name


def is_export(place: Path) -> bool:
    return (place / MODEL).is_file()


def config_of(place: Path) -> Path:
    """Return the configuration file of a run, or of an export; in a download it may be a link into a cache."""
    return Path(os.path.realpath(place / CONFIG_FILE)) if is_export(place) else config_file(place, "run")


def refuse_checkpoint(checkpoint: str) -> None:
    if checkpoint != "last":
        raise InvalidOption("checkpoint", checkpoint, "last: an export holds one agent", "last")


def save(place: Path, networks: PolicyNetworks, config: Config, meta: Mapping[str, Any]) -> Model:
    """Write an agent, with the description in its checkpoint's ``meta``, into a new directory: all files or none."""
    from safetensors.torch import save as to_bytes

    # safetensors demands that tensors share no memory.
    content = to_bytes({name: value.detach().clone().contiguous() for name, value in networks.state_dict().items()})
    model = Model(
        step=meta["step"],
        observations={key: describe(one) for key, one in networks.observations.items()},
        only_for_learning={key: describe(one) for key, one in networks.only_for_learning.items()},
        actions=describe(networks.actions),
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


def load_agent(place: Path | str, *, checkpoint: str = "last", device: torch.device | str = "cpu") -> PolicyNetworks:
    """Load the networks of a trained agent: ``load_agent(place).player(num_envs=1)`` acts.

    Needs neither the task nor JAX. No code from the files is run.

    Args:
        place: directory of an export or of a run, ``demo:<name>``, or ``hf://<owner>/<name>[@revision]``.
        checkpoint: of a run: ``last``, ``best`` or its policy steps.

    Raises:
        CommandError: a file is missing, damaged or of another kind.
    """
    import torch

    place = find(str(place))
    with as_command_errors(ValueError):
        device = resolve_device(device)
    with _explain(place):
        # Only the agent's section is checked: the task may not be installed on this machine.
        saved = read_saved(config_of(place))
        config = validated(registry.find(saved["agent"]["name"]).config, saved["agent"], "agent.")
    meta, weights = read(place, checkpoint)
    known = spaces_of(place, meta)
    with _explain(place):
        mixed = saved["fabric"]["precision"] == "bf16-mixed"
        autocast = partial(torch.autocast, device.type, torch.bfloat16) if mixed else nullcontext
        space, actions = known.build()
        return build(place, weights, space, actions, config, device=device, autocast=autocast)


def build(
    place: Path,
    weights: Mapping[str, torch.Tensor],
    space: spaces.Dict,
    actions: spaces.Space,
    config: AgentConfig,
    *,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
) -> PolicyNetworks:
    """Build the networks of an agent and load their weights; CommandError for weights of another agent."""
    from sheeplike.checkpoint import check_finite

    networks_class = registry.find(config.name).load().networks_class
    networks = networks_class(space, actions, config, device=device, autocast=autocast)
    try:
        for name, own in networks.state_dict().items():
            if name in weights and weights[name].dtype != own.dtype:  # it would be cast in silence
                raise TypeError(f"{name} is {weights[name].dtype}, expected {own.dtype}")
        networks.load_state_dict(weights)
        check_finite("agent", networks.state_dict())
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        what = f"{place / WEIGHTS}: the weights are" if is_export(place) else f"run={place}: the checkpoint is"
        raise CommandError(f"{what} not of the agent in its {CONFIG_FILE}: {first_sentence(error)}") from error
    return networks


def read(place: Path, checkpoint: str = "last") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the description and the weights of an agent, from an export or a checkpoint of a run."""
    if is_export(place):
        refuse_checkpoint(checkpoint)
        return _read_export(place)
    import torch

    from sheeplike import checkpoint as files

    if not checkpoint_steps(place):
        raise CommandError(f"run={place}: expected a run with a checkpoint; this one has none")
    path, only = choose_checkpoint(place, str(checkpoint)), ("agent",)
    with as_command_errors(files.Corrupt, FileNotFoundError):
        meta, parts = files.load(path, only=only) if path else files.load_latest(place / CHECKPOINTS, only=only)
    weights = parts["agent"].get("modules") if isinstance(parts.get("agent"), Mapping) else None
    if not isinstance(weights, Mapping) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise CommandError(f"run={place}: the checkpoint holds no agent: expected its networks")
    return meta, weights


def spaces_of(place: Path, meta: Mapping[str, Any]) -> Spaces:
    """Return the spaces of one world that :func:`read` found."""
    if meta.get("spaces") is None:
        raise CommandError(f"run={place}: the actions are neither Box nor Discrete nor MultiDiscrete")
    try:
        return Spaces.model_validate_json(json.dumps(meta["spaces"]))
    except ValidationError as error:
        raise CommandError(f"run={place}: the checkpoint's spaces are damaged: {first_sentence(error)}") from error


def _read_export(place: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    with _explain(place, SafetensorError):
        # A download may consist of links into a cache.
        model = Model.model_validate_json(read_text(os.path.realpath(place / MODEL), LIMIT))
        with open_regular(os.path.realpath(place / WEIGHTS)) as file:
            content = file.read()
        if hashlib.sha256(content).hexdigest() != model.sha256:
            raise CommandError(f"{place / WEIGHTS}: was altered, its SHA-256 is not that in {MODEL}")
        known = Spaces(observations=model.observations | model.only_for_learning, actions=model.actions)
        return {"step": model.step, "spaces": known.model_dump(mode="json"), "versions": model.versions}, load(content)


@contextmanager
def _explain(place: Path, *failures: type[Exception]) -> Iterator[None]:
    """Turn errors of files that may come from anyone into one line."""
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
