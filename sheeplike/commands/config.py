"""From the command line to a checked configuration: Hydra's composition behind errors of one line."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sheeplike import entry_points
from sheeplike.commands import kinds, machine
from sheeplike.commands.errors import CommandError, InvalidValue, as_command_errors, unknown
from sheeplike.commands.saved import read_config
from sheeplike.commands.schema import AGENTS, Config, all_keys, defaults_of, keys_of
from sheeplike.commands.sources import CONFIGS, GROUPS, Sources
from sheeplike.commands.validation import from_data, unknown_key, validate
from sheeplike.earlier import completed
from sheeplike.envs import list_envs, task_options

T = TypeVar("T")
# What may change when a run is resumed; anything else would make it another run.
RESUMABLE = {
    "total_steps",
    "compile",
    "log_every",
    "video_every",
    "watchdog",
    "eval",
    "checkpoint",
    "faults",
    "logger",
}


def load(arguments: Sequence[str], sources: Sources) -> Config:
    """Compose and check the configuration that the overrides on the command line ask for.

    A profile that is not given, or ``auto``, becomes what the machine has; ``dry_run=true`` puts the overrides of
    ``dry_run.yaml`` in front of the user's own; ``run_dir`` gets its default.

    Raises:
        CommandError: the configuration cannot be met.
    """
    overrides = [_parse(argument) for argument in arguments]
    _meet_agent(overrides, sources)
    for override in overrides:
        if _is_group(override):
            _check_choice(override, sources)
        else:
            _check_key(override)
    line = [_for_hydra(override) for override in overrides if not _is_auto(override)]
    if not any(part.startswith("profile=") for part in line):
        line.append(f"profile={_profile(overrides)}")
    data, choices = _compose(line, sources)
    derived = _derived(data, choices, sources)
    if derived:
        line = [*derived, *line]
        data, choices = _compose(line, sources)
    if data.get("dry_run") is True:
        line = [*(_for_hydra(_parse(part)) for part in _dry_run(data)), *line]
        data, choices = _compose(line, sources)
    # There is a size whatever the agent, since a profile can only change a choice that has been made.
    sized = {kind for kind, section in AGENTS.items() if any(key.name == "size" for key in keys_of(section))}
    name = data["agent"].get("name")
    if name in AGENTS and name not in sized:
        asked = [override for override in overrides if override.key_or_group.replace("/", ".").startswith("agent.size")]
        if asked:
            raise CommandError(f"{asked[0].input_line}: {name} has no sizes; expected agent={', '.join(sorted(sized))}")
        data["agent"].pop("size", None)
    try:
        config = validate(data | {"exp": choices["exp"], "profile": choices["profile"]})
    except InvalidValue as error:
        if error.nearest is None:
            error.nearest = _default(error, line, sources)
        raise
    if config.run_dir is None:
        env = [choices["env"], *([re.sub(r"[^\w.-]", "_", config.env.id)] if config.env.id else [])]
        recipe = choices["randomization"]
        varied = ["randomized" if recipe == "none" else recipe] * bool(config.randomization)
        parts = ["logs", *["dry_run"] * config.dry_run, *env, *varied, choices["agent"], config.exp]
        config = dataclasses.replace(config, run_dir="/".join([*parts, f"seed_{config.seed}"]))
    if config.fabric.accelerator == "auto":
        found = dataclasses.replace(config.fabric, accelerator="cpu" if machine.gpu_problem() else "cuda")
        config = dataclasses.replace(config, fabric=found)
    return config


def load_saved(path: Path, arguments: Sequence[str]) -> Config:
    """The configuration of a run that is resumed, with the few changes that are allowed.

    The file is read as data: nothing in it is composed, interpolated or run.

    Raises:
        CommandError: the file or a change is not valid.
    """
    data = completed(read_config(path))
    for override in map(_parse, arguments):
        *sections, name = override.key_or_group.split(".")
        if _is_group(override) or (sections or [name])[0] not in RESUMABLE:
            raise CommandError(
                f"{override.input_line!r} cannot change when a run is resumed: expected {', '.join(sorted(RESUMABLE))}"
            )
        _check_key(override)
        section = data
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = override.value()
    try:
        return validate(data)
    except InvalidValue as error:
        if any(error.key == override.key_or_group for override in map(_parse, arguments)):
            raise  # the file is not to blame
        raise CommandError(f"{error} (in {path})") from None
    except CommandError as error:
        raise CommandError(f"{error} (in {path})") from None


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """What differs between two configurations: dotted key to both values; ``run_dir`` apart, which may have moved."""
    old, new = (_flat(dataclasses.asdict(dataclasses.replace(config, run_dir=None))) for config in (before, after))
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in section.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def load_settings(cls: type[T], arguments: Sequence[str]) -> T:
    """The keys of a command that composes no configuration: ``cls``, a dataclass of keys, with its defaults.

    Raises:
        CommandError: a key that does not exist, or a value that is not valid.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    given: dict[str, Any] = {}
    for override in map(_parse, arguments):
        if override.key_or_group not in defaults:
            raise unknown("key", override.key_or_group, defaults)
        given[override.key_or_group] = override.value()
    try:
        return from_data(cls, defaults | given)
    except InvalidValue as error:
        if error.nearest is None:
            error.nearest = defaults[error.key]
        raise


def to_yaml(config: Config) -> str:
    """The configuration as YAML, every value in full."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def _parse(argument: str) -> Override:
    if argument.startswith("=") or ("=" not in argument and not argument.startswith("~")):
        raise CommandError(f"{argument!r}: expected key=value")
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException as error:
        key, _, value = argument.partition("=")
        reason = str(error).splitlines()[0]
        raise CommandError(f"malformed override {argument!r}: {reason}; nearest: {key}=\"'{value}'\"") from None
    if override.is_delete():
        raise CommandError(f"{argument!r}: expected key=value; a key cannot be removed")
    if override.is_sweep_override():
        raise CommandError(f"{argument!r}: expected one value; a list is written [a,b], several seeds seeds=[a,b]")
    return override


def _is_group(override: Override) -> bool:
    return override.key_or_group in GROUPS and not isinstance(override.value(), dict)


def _is_auto(override: Override) -> bool:
    return override.key_or_group == "profile" and override.value() == "auto"


def _check_choice(override: Override, sources: Sources) -> None:
    group, name = override.key_or_group, override.value()
    choices = sources.choices(group)
    if name not in choices:
        raise unknown(group, str(name), choices)


def _check_key(override: Override) -> None:
    known = {item.path: item for item in all_keys()}
    key = override.key_or_group
    if key == "agent.size" and not isinstance(override.value(), dict):
        raise CommandError(f"{override.input_line!r}: expected a section; nearest: agent/size={override.value()}")
    parts = key.split(".")
    above = (known.get(".".join(parts[:depth])) for depth in range(1, len(parts)))
    if key not in known and not any(section and section.rule.open for section in above):
        raise unknown_key(key)


def _meet_agent(overrides: Sequence[Override], sources: Sources) -> None:
    """Import the agent that is asked for, if it is of another package: only it knows its keys.

    Raises:
        CommandError: it cannot be imported.
    """
    if not entry_points.plugins(kinds.GROUP):
        return
    line = [_for_hydra(override) for override in overrides if _is_group(override) and not _is_auto(override)]
    try:
        data, _ = _compose(line, sources)
    except CommandError:
        return  # what is wrong is told where it is looked at
    kinds.find(data["agent"].get("name"))


def _for_hydra(override: Override) -> str:
    """The override as Hydra takes it: ``++`` for keys, since only this module knows which of them exist."""
    line = override.input_line.lstrip("+")
    return line if _is_group(override) else f"++{line}"


def _profile(overrides: Sequence[Override]) -> str:
    """What ``profile=auto`` means: what the machine has, unless the command line chooses the device."""
    asked = {override.key_or_group: override.value() for override in overrides}.get("fabric.accelerator")
    if asked in ("cpu", "cuda", "gpu"):
        return "cpu" if asked == "cpu" else "gpu"
    if machine.gpu_count() and machine.gpu_problem():
        print(f"sheeplike: profile=cpu although there is a GPU: {machine.gpu_problem()}", file=sys.stderr)
    return "cpu" if machine.gpu_problem() else "gpu"


def _derived(data: dict[str, Any], choices: Mapping[str, str], sources: Sources) -> list[str]:
    """Overrides for numbers that a user's own file of ``env``, ``agent`` or ``profile`` would miss for its name.

    A file ``env/mine.yaml`` with ``name: franka_pick`` is that task still, and a profile for a CPU a CPU's.
    """
    agent, env = data["agent"].get("name"), data["env"].get("name")
    machine_kind = "cpu" if data["fabric"].get("accelerator") == "cpu" else "gpu"
    meant = {"hyperparameters": f"{agent}_{env}", "scale": f"{agent}_{machine_kind}", "worlds": f"{agent}_{env}"}
    return [
        f"{group}={name}"
        for group, name in meant.items()
        if choices[group] not in sources.choices(group) and name in sources.choices(group)
    ]


def _dry_run(data: Mapping[str, Any]) -> list[str]:
    """Overrides that make a run of this agent, and in these worlds, short."""
    found, env = yaml.safe_load((CONFIGS / "dry_run.yaml").read_text(encoding="utf-8")), data["env"].get("name")
    if env in list_envs():
        with as_command_errors(ValueError):
            lacking = "env.options.episode_length=" * ("episode_length" not in task_options(env))
        found = [override for override in found if not (lacking and override.startswith(lacking))]
    kind = kinds.find(data["agent"].get("name"))
    return found + list(kind.dry_run if kind else ())


def _compose(line: Sequence[str], sources: Sources) -> tuple[dict[str, Any], dict[str, str]]:
    """The composed configuration as plain data, and the name chosen from each group."""
    places = (QuotedString(f"file://{path}", Quote.single).with_quotes() for path in sources.directories[1:])
    searchpath = f"hydra.searchpath=[{','.join(places)}]"
    with _one_line(sources), _stored(sources):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = compose("config", [*line, searchpath], return_hydra_config=True)
        choices = dict(composed.hydra.runtime.choices)
        OmegaConf.set_struct(composed, False)
        del composed["hydra"]
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=True), choices


@contextmanager
def _stored(sources: Sources) -> Iterator[None]:
    """Within it, Hydra finds what has no file: an environment or an agent is its name, a recipe an agent."""
    store = ConfigStore.instance()
    contents = {
        "env": lambda name: {"name": name},
        "agent": lambda name: {"name": name},
        "exp": lambda name: {"defaults": [{"override /agent": name}]},
    }
    names = [(group, name) for group in contents for name in sources.without_file(group)]
    try:
        for group, name in names:
            store.store(name, contents[group](name), group, package="_global_" if group == "exp" else None)
        yield
    finally:  # what stays would be taken for the schema of a file of that name
        for group, name in names:
            store.repo[group].pop(f"{name}.yaml", None)


def _default(error: InvalidValue, line: Sequence[str], sources: Sources) -> Any:
    """What the invalid key would be without the overrides on the command line, if that is any better."""
    value: Any = _compose([part for part in line if not part.startswith("++")], sources)[0]
    if value["agent"].get("name") in AGENTS:
        value["agent"] = defaults_of(AGENTS[value["agent"]["name"]]) | value["agent"]
    for name in error.key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return None if isinstance(value, dict) or value == error.value else value


@contextmanager
def _one_line(sources: Sources) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        missing = re.search(r"You must specify '([\w/]+)'", str(error))
        if missing:
            group = missing[1]
            raise CommandError(
                f"{group}= is missing: expected one of {', '.join(sources.choices(group))}; "
                "for example: python -m sheeplike exp=dreamer_v3 env=franka_pick"
            ) from None
        text = str(error) if isinstance(error, yaml.YAMLError) else str(error).split("\n\n")[0]
        raise CommandError(text) from None
