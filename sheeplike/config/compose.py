"""Compose a checked configuration from a command line, with the file that each value comes from.

Hydra parses overrides and lists the chosen files in their order. The files are merged here: a later one wins, and a
file may also hold values for one agent or one machine only::

    # configs/profile/cpu.yaml
    env: {image_size: 48}
    agents:
      ppo: {env: {num_envs: 64}, agent: {rollout_length: 32}}

No other module knows Hydra.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sheeplike import envs, host
from sheeplike.agents import registry
from sheeplike.agents.config import AgentConfig
from sheeplike.config.errors import UnknownKey, UnknownName, as_command_errors, validated
from sheeplike.config.saved import may_change, read_saved, resumable_keys
from sheeplike.config.schema import Config, Start, all_keys, to_data, validate
from sheeplike.config.sources import CONFIGS, GROUPS, Sources
from sheeplike.options import CommandError, InvalidOption, Key, Options, expectation, flat, format_value, keys_of
from sheeplike.terminal import warn

COMMAND_LINE = "command line"
T = TypeVar("T", bound=Options)
PATHS = ("resume", "run", "run_dir", "out", "to", "reference", "checkpoint.mirror", "agent.from", "data.path")
SECTIONS = {"agents": "agent", "profiles": "profile"}  # section of a file -> the group whose choices its names are


class Composed(NamedTuple):
    """A configuration, and by dotted key the source of each value that is no default: a file or ``command line``."""

    config: Config
    sources: dict[str, str]

    @property
    def files(self) -> list[str]:
        """Sources that changed a value: files in the order of merging, then the command line."""
        # A choice without a file is shown as agent=ppo.
        return [source for source in dict.fromkeys(self.sources.values()) if "=" not in source]


def load(arguments: Sequence[str], sources: Sources) -> Composed:
    """Compose and check the configuration of a command line, or raise CommandError; fill in profile and run_dir."""
    # Choices name files, changes set keys.
    chosen, changes = [], []
    for override in map(parse, arguments):
        is_choice = override.key_or_group in GROUPS and not isinstance(override.value(), dict)
        (chosen if is_choice else changes).append(override)
    for choice in chosen:
        _check_choice(choice, sources)
    given = {change.key_or_group: change.value() for change in changes}
    line = [one.input_line.lstrip("+") for one in chosen if (one.key_or_group, one.value()) != ("profile", "auto")]
    if not any(part.startswith("profile=") for part in line):
        line.append(f"profile={_profile(given.get('fabric.accelerator'))}")

    # Merge the files in order; a later one wins.
    files, choices = _list_files(line, sources)
    merged = _merge_files(files, choices, sources)
    with as_command_errors(ValueError):
        agent = registry.find(merged.data["agent"].get("name")).config
    known = {key.path: key for key in all_keys(*registry.built_in(), agent)}  # the agent's own come last
    for file in files:
        _check_keys(file, known)
    for change in changes:
        check_key(change, known)
        name, chosen_agent = change.value(), merged.data["agent"]["name"]
        if change.key_or_group == "agent.name" and name != chosen_agent and name in registry.list_agents():
            raise CommandError(f"agent.name={name}: expected {chosen_agent}; nearest: exp={name}")
    if given.get("dry_run", merged.data.get("dry_run")) is True:
        _add_dry_run(merged, agent)

    # The command line comes last.
    for change in changes:
        merged.set(change.key_or_group, change.value(), COMMAND_LINE)
    try:
        defaults = {key.path: key.schema.get("default") for key in known.values() if "." not in key.path}
        config = validate(merged.resolved(defaults) | {"exp": choices["exp"], "profile": choices["profile"]})
    except InvalidOption as error:
        _suggest_default(error, known)
        raise _with_source(error, merged.sources.get(error.key, ""), sources) from None
    if config.run_dir is None:
        config = config.replace(run_dir=_run_dir(config, choices))
    if config.fabric.accelerator == "auto":
        config = config.replace(fabric=config.fabric.replace(accelerator="cpu" if host.gpu_problem() else "cuda"))
    return Composed(config, merged.sources)


def _merge_files(files: Sequence[_File], choices: Mapping[str, str], sources: Sources) -> Merged:
    merged = Merged()
    for group in ("env", "agent"):  # the name defaults to the file's
        if not isinstance(choices.get(group), str):
            raise CommandError(f"{group}: expected one name, such as '- override /{group}: <name>' in a recipe")
        merged.set(f"{group}.name", choices[group], f"{group}={choices[group]}")
    # Sections of agent X also apply to agents derived from X, by `defaults` or by subclassing its options.
    agents = {name for file in files if isinstance(name := file.content.get("agent", {}).get("name"), str)}
    with as_command_errors(ValueError):
        agents |= {base for name in agents & set(registry.list_agents()) for base in registry.lineage(name)}
    chosen = {file.choice for file in files} | {f"agent/{name}" for name in agents}
    for file in files:
        _check_file(file, sources)
        for needed, values in file.parts():
            if chosen.issuperset(needed):
                merged.add(values, file.source)
    return merged


def _with_source(error: InvalidOption, source: str, sources: Sources) -> CommandError:
    """Return an error that names the file of an invalid value."""
    if source == f"env={error.value}" and sources.find(f"env/{error.value}"):
        return CommandError(
            f"env/{error.value}.yaml: expected what it builds on, as in 'defaults: [franka_pick]', or env.name"
        )
    return CommandError(f"{error} (in {source})") if source.endswith(".yaml") else error


def load_options(cls: type[T], arguments: Iterable[str]) -> T:
    """Return the options of a command that composes no configuration."""
    known = {key.path: key for key in keys_of(cls)}
    given: dict[str, Any] = {}
    for override in map(parse, arguments):
        if override.key_or_group not in known:
            raise UnknownName("key", override.key_or_group, known)
        given[override.key_or_group] = override.value()
    try:
        return validated(cls, given)
    except InvalidOption as error:
        _suggest_default(error, known)
        raise


def load_saved(path: Path, arguments: Sequence[str] = ()) -> Composed:
    """Return the configuration of a run, with the few changes that are allowed when it is resumed."""
    merged, overrides = Merged(), [parse(argument) for argument in arguments]
    merged.add(read_saved(path), path.name)
    keys = {key.path: key for key in all_keys()}
    for argument, override in zip(arguments, overrides, strict=True):
        key = override.key_or_group
        if key not in GROUPS and not key.startswith("agent."):
            check_key(override, keys)
        if key in GROUPS or not may_change(key):
            expected = ", ".join(sorted(resumable_keys()))
            raise CommandError(
                f"'{argument}' cannot change when a run is resumed: expected {expected}; nearest: leave it out, or the "
                "command line that began the run with resume=auto"
            )
        merged.set(key, override.value(), COMMAND_LINE)
    try:
        return Composed(validate(merged.data), merged.sources)
    except CommandError as error:
        changed = tuple(override.key_or_group for override in overrides)
        if isinstance(error, InvalidOption) and error.key.startswith(changed):
            raise  # the change is to blame, not the file
        raise CommandError(f"{error} (in {path})") from None


def start_of(arguments: Iterable[str]) -> tuple[Start, list[str]]:
    """Split a command line into the keys of :class:`Start`, which are not saved with the run, and the rest."""
    arguments = list(arguments)
    own = [argument for argument in arguments if argument.partition("=")[0] in Start.model_fields]
    return load_options(Start, own), [argument for argument in arguments if argument not in own]


def parse(argument: str, *, sweeps: bool = False) -> Override:
    """Parse ``key=value`` or ``group=name``, with ``sweeps`` also ``key=value,value``."""
    if argument.startswith(("=", "~")) or "=" not in argument:
        raise CommandError(f"{argument!r}: expected key=value")
    key, _, value = argument.partition("=")
    if key in PATHS and value[:1] not in ("'", '"') and value != "null":  # a path may hold characters of the grammar
        argument = f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    try:
        override = OverridesParser.create().parse_override(argument)
    except (HydraException, ValueError) as error:  # a number of thousands of digits raises ValueError
        reason = str(error).splitlines()[0]
        hint = "closed brackets and texts in quotes" if set(value) & set("[]{}") else f"{key}=\"'{value}'\""
        raise CommandError(f"malformed override {argument!r}: {reason}; nearest: {hint}") from None
    if override.is_sweep_override() and not sweeps:
        raise CommandError(f"{argument!r}: expected one value; a list is written [a,b], several seeds seeds=[a,b]")
    return override


def as_loop(command: str, words: Sequence[str]) -> str:
    """Return the loops of a shell that run what a sweep of Hydra, such as ``agent.clip=0.1,0.2``, would run."""
    loops, line = [], f"python -m sheeplike {command}"
    place = shlex.quote(dict(word.partition("=")[::2] for word in words).get("run_dir", "logs"))
    for word in words:
        key, equals, _ = word.partition("=")
        override = parse(word, sweeps=True) if equals and not key.startswith("-") else None
        if override is None or not override.is_discrete_sweep() or isinstance(override.value(), Glob):
            line += f" {shlex.quote(word)}"
            continue
        name = f"v{len(loops) + 1}"
        loops.append(f"for {name} in {shlex.join(override.sweep_string_iterator())}; do ")
        line, place = f'{line} "{key}=${name}"', f'{place}/{key}-"${name}"'
    if loops and command == "train":
        line += f" run_dir={place}"  # by default, runs that differ only in such a key would share one
    return f"{''.join(loops)}{line}{'; done' * len(loops)}"


class _File(NamedTuple):
    """A choice such as ``profile/cpu``; the name of its file, or without one the typed text; and its values."""

    choice: str
    source: str
    content: dict[str, Any]

    def parts(self, choices: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        """Yield the file's values, then those of each section, with the choices that a section is for."""
        yield choices, {name: value for name, value in self.content.items() if name not in SECTIONS}
        for section, group in SECTIONS.items():
            named = self.content.get(section) or {}
            if not isinstance(named, dict):
                raise CommandError(f"{self.source}: {section}: expected {group} names with keys below them")
            for name, part in named.items():
                for below in ("", "env", "agent"):
                    if not isinstance(part, dict) or not isinstance(part.get(below, {}), dict):
                        place = f"{self.source}: {section}: {name}: {below}".removesuffix(": ")
                        raise CommandError(f"{place}: expected keys with their values")
                yield from self._replace(content=part).parts((*choices, f"{group}/{name}"))


class Merged:
    """Values merged in order, each with its source."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def add(self, values: Mapping[str, Any], source: str) -> None:
        """Merge nested values."""
        self._add(self.data, values, source, "")

    def set(self, path: str, value: Any, source: str) -> None:
        """Set one dotted key."""
        for name in reversed(path.split(".")):
            value = {name: value}
        self.add(value, source)

    def _add(self, into: dict[str, Any], values: Mapping[str, Any], source: str, prefix: str) -> None:
        for name, value in values.items():
            path = prefix + str(name)
            is_section = isinstance(value, Mapping) and (value or source != COMMAND_LINE)  # `env.options={}` clears it
            if is_section and not isinstance(into.get(name), dict) and source == self.sources.get(path) == COMMAND_LINE:
                raise CommandError(f"{path}={format_value(into[name])}: expected it or the keys below it, not both")
            if not (is_section and isinstance(into.get(name), dict)):
                into[name] = {} if is_section else value
                self.sources = {key: old for key, old in self.sources.items() if not f"{key}.".startswith(f"{path}.")}
            if is_section:
                self._add(into[name], value, source, f"{path}.")
            else:
                self.sources[path] = source

    def resolved(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with interpolations resolved; ``${seed}`` may name a key that has only its default."""
        with _one_line():
            try:
                whole = OmegaConf.create({**defaults, **self.data})
                resolved = OmegaConf.to_container(whole, resolve=True, throw_on_missing=True)
                return {name: resolved[name] for name in self.data}
            except OmegaConfBaseException as error:
                source = self.sources.get(error.full_key or "", "a file")
                raise CommandError(f"{source}: {error.full_key}: {str(error).splitlines()[0]}") from None


def _list_files(line: Sequence[str], sources: Sources) -> tuple[list[_File], dict[str, str]]:
    """Return the files of the choices on a command line, in the order of merging, and the choices by group."""
    places = (QuotedString(f"file://{path}", Quote.single).with_quotes() for path in sources.directories[1:])
    searchpath = f"hydra.searchpath=[{','.join(places)}]"
    with _one_line(sources), _stored(sources):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            listed = loader.compute_defaults_list("config", [*line, searchpath], RunMode.RUN)
        own = [entry for entry in listed.defaults if entry.config_path and not entry.config_path.startswith("hydra")]
        return [_read(entry, sources) for entry in own], dict(listed.overrides.known_choices)


def _read(entry: ResultDefault, sources: Sources) -> _File:
    """Read a file; its values go below the package that its header or its folder names."""
    path, source = sources.find(entry.config_path), f"{entry.config_path}.yaml"
    if path is None:
        group, _, name = entry.config_path.partition("/")
        content: Any = {"name": name} if group != "exp" else {}
        source = f"{group}={name}"
    else:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False) or {}
        if not isinstance(content, dict):
            raise CommandError(f"{path}: expected keys with their values, and found a list")
    content = {name: value for name, value in content.items() if name != "defaults"}
    if dotted := next((name for name in content if "." in str(name)), None):
        section, _, below = dotted.partition(".")
        raise CommandError(f"{path}: {dotted}: expected '{section}:' with '{below}:' indented below it")
    for name in reversed((entry.package or "").split(".") if entry.package else []):
        content = {name: content}
    for group in ("env", "agent"):
        section = content.get(group, {})
        if not isinstance(section, dict) or not all(isinstance(key, str) for key in content):
            raise CommandError(f"{path}: {group}: expected keys with their values, under '# @package _global_'")
    return _File(entry.config_path, source, content)


def _check_file(file: _File, sources: Sources) -> None:
    """Raise for misplaced keys, and for sections of agents or profiles that do not exist."""
    for choices, values in file.parts():
        for name in sorted({"exp", "profile"} & values.keys()):
            raise CommandError(
                f"{file.source}: {name}: expected '# @package _global_' as its first line, if it holds keys of a "
                f"run; {name}= itself is chosen on the command line"
            )
        for group, _, name in (choice.partition("/") for choice in choices):
            if name not in {*sources.choices(group), *(registry.list_agents() if group == "agent" else ())}:
                raise UnknownName(f"{file.source}: {group}", name, sources.choices(group))


def _check_choice(override: Override, sources: Sources) -> None:
    """Raise for an unknown choice, and for a recipe without ``@package _global_``."""
    group, name = override.key_or_group, override.value()
    if name not in sources.choices(group):
        if group == "env" and re.search(r"-v\d+$", str(name)):
            raise CommandError(f"env={name}: expected gym for an id of Gymnasium; nearest: env=gym env.id={name}")
        raise UnknownName(group, str(name), sources.choices(group))
    path = sources.find(f"{group}/{name}")
    if path:
        with _one_line():
            text = path.read_bytes().decode(errors="replace")
        if "\ufffd" in text or text.startswith("\ufeff"):  # such a mark would hide the first line
            raise CommandError(f"{path}: expected UTF-8 without a byte order mark")
        if group == "exp" and not re.search(r"^#\s*@package\s+_global_\s*$", text, re.MULTILINE):
            raise CommandError(f"{path}: expected '# @package _global_' as its first line")
        with _one_line():
            try:
                OmegaConf.load(path)  # Hydra's own error would not name the file
            except OmegaConfBaseException as error:
                raise CommandError(f"{path}: {str(error).splitlines()[0]}") from None


def _check_keys(file: _File, known: Mapping[str, Key]) -> None:
    """Raise for an unknown key in a file, and for a value in place of a section."""
    for _, values in file.parts():
        for path, value in flat(values):
            if path in Start.model_fields:
                raise CommandError(f"{file.source}: {path}: expected on the command line alone, as {path}={value}")
            try:
                _check_path(path, value, known)
            except CommandError as error:
                raise CommandError(f"{file.source}: {error}") from None


def _check_path(path: str, value: Any, known: Mapping[str, Key]) -> None:
    parts = path.split(".")
    above = (known.get(".".join(parts[:depth])) for depth in range(1, len(parts)))
    if path not in known and not any(key and key.is_open for key in above):
        raise UnknownKey(path, [*known.values(), *keys_of(Start)])
    # It would replace the section, and a key below it would begin an empty one.
    if path in known and known[path].is_section and not isinstance(value, dict):
        raise InvalidOption(path, value, expectation(known[path].schema))


def check_key(override: Override, known: Mapping[str, Key]) -> None:
    """Raise for an unknown key on the command line, and for a value in place of a section."""
    _check_path(override.key_or_group, override.value(), known)
    if override.package:
        raise CommandError(f"{override.input_line!r}: expected key=value, without @{override.package}")


def _profile(asked: Any) -> str:
    """Return the profile that ``auto`` means: that of the accelerator if one is asked for, else the machine's."""
    if asked in ("cpu", "cuda", "gpu"):
        return "cpu" if asked == "cpu" else "gpu"
    if (host.gpu_count() or host.driver_error()) and host.gpu_problem():
        warn(f"profile=cpu although there is a GPU: {host.gpu_problem()}")
    return "cpu" if host.gpu_problem() else "gpu"


def _add_dry_run(merged: Merged, agent: type[AgentConfig]) -> None:
    content = OmegaConf.to_container(OmegaConf.load(CONFIGS / "dry_run.yaml"))
    with as_command_errors(ValueError):
        if "episode_length" not in envs.task_options(merged.data["env"]["name"]):
            del content["env"]["options"]
    content["agent"] = agent.dry_run
    merged.add(content, "dry_run.yaml")


def _suggest_default(error: InvalidOption, known: Mapping[str, Key]) -> None:
    """Name the key's default as the nearest value, if there is no other."""
    default = known[error.key].schema.get("default") if error.key in known else None
    if error.nearest is None and default != error.value and not isinstance(default, dict):
        error.nearest = default


def _run_dir(config: Config, choices: Mapping[str, str]) -> str:
    env = [choices["env"], *([re.sub(r"[^\w.-]", "_", config.env.id)] if config.env.id else [])]
    varied = choices["randomization"]
    randomized = [] if not config.randomization else ["randomized" if varied == "none" else varied]
    recipe = dict.fromkeys([choices["agent"], config.exp])  # one name if both are the same
    return "/".join(["dry_runs" if config.dry_run else "logs", *env, *randomized, *recipe, f"seed_{config.seed}"])


@contextmanager
def _stored(sources: Sources) -> Iterator[None]:
    """Let Hydra find environments, agents and recipes that have no file."""
    store = ConfigStore.instance()
    names = [(group, name) for group in ("env", "agent", "exp") for name in sources.without_file(group)]
    try:
        for group, name in names:
            is_recipe = group == "exp"
            node = {"defaults": [{"override /agent": name}]} if is_recipe else {"name": name}
            store.store(name, node, group, package="_global_" if is_recipe else None)
        yield
    finally:  # Hydra would take an entry for the schema of a later file with its name
        for group, name in names:
            store.repo[group].pop(f"{name}.yaml", None)


@contextmanager
def _one_line(sources: Sources | None = None) -> Iterator[None]:
    """Turn the errors of Hydra, OmegaConf and YAML into one line."""
    expected = "expected a list such as '- override /agent: dreamer_v3' under the defaults of a recipe"
    try:
        yield
    except RecursionError:
        raise CommandError(f"a recipe builds on itself: {expected}") from None
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        if sources and (missing := re.search(r"You must specify '(\w+)'", str(error))):
            group = missing[1]
            example = {"env": "franka_pick"}.get(group, "dreamer_v3")
            recipe = ", or '- override /agent: dreamer_v3' under the defaults of the recipe"
            raise CommandError(
                f"{group}= is missing: expected one of {', '.join(sources.choices(group))}; for example "
                f"{group}={example}{recipe if group == 'agent' else ''}"
            ) from None
        if sources and (lost := re.search(r"In '([^']+)': Could not \w+ '(\w+)/([^']+)'", str(error))):
            where = "" if lost[1] == "config" else f"{lost[1]}.yaml: "
            raise UnknownName(f"{where}{lost[2]}", lost[3], sources.choices(lost[2])) from None
        if twice := re.search(r"Multiple values for (\w+)\.", str(error)):
            raise CommandError(
                f"{twice[1]} is chosen twice: expected '- override /{twice[1]}: <name>' in the file that changes it"
            ) from None
        raise CommandError(str(error) if isinstance(error, yaml.YAMLError) else str(error).split("\n\n")[0]) from None
    except (ValueError, TypeError, AssertionError) as error:
        raise CommandError(f"{error}: {expected}") from None


def explain(composed: Composed) -> str:
    """Return every value of a configuration as a line ``key: value``, with its source."""
    lines = []
    for key, value in flat(to_data(composed.config)):
        source = next((found for path, found in composed.sources.items() if f"{path}.".startswith(f"{key}.")), "")
        lines.append(f"{key}: {format_value(value)}" + (f"  # {source}" if source else ""))
    return "\n".join(lines)
