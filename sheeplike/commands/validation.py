"""From plain data to a checked :class:`~sheeplike.commands.schema.Config`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar, get_args, get_origin

from sheeplike.commands import kinds
from sheeplike.commands.errors import CommandError, InvalidValue, as_command_errors, nearest, show, unknown
from sheeplike.commands.schema import Config, Key, Rule, all_keys, defaults_of, keys_of
from sheeplike.envs import (
    InvalidOption,
    Unusable,
    check,
    list_envs,
    list_ids,
    simulated,
    takes_id,
    task_options,
)
from sheeplike.envs.mjx.randomization.spec import InvalidLine, parse
from sheeplike.envs.registry import RENDERING

# How the names of observations begin that are rendered.
IMAGES = ("pixels/", "depth/", "segmentation/")
T = TypeVar("T")
SPOKEN = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}


def validate(data: dict[str, Any]) -> Config:
    """The configuration that ``data``, nested dictionaries of plain values, describes.

    ``learning_starts``, ``eval.num_envs`` and ``fabric.accelerator=gpu`` come back as the values that they stand for.

    Raises:
        InvalidValue: a value of the wrong type, out of its range, or that does not go with the others.
        CommandError: a key that is missing or unknown.
    """
    if isinstance(data.get("agent"), dict):
        kinds.find(data["agent"].get("name"))  # only an agent of another package itself knows its keys
    config = from_data(Config, data)
    with as_command_errors(ValueError):
        _check_task(config)
        _check_randomization(config)
        _check_rendering(config)
        config = kinds.kind_of(config.agent).check(config)
    return replace(
        config,
        eval=replace(config.eval, num_envs=_evaluation_worlds(config)),
        fabric=replace(
            config.fabric, accelerator={"gpu": "cuda"}.get(config.fabric.accelerator, config.fabric.accelerator)
        ),
    )


def from_data(cls: type[T], data: dict[str, Any]) -> T:
    """A dataclass whose fields are keys with rules, as in :mod:`~sheeplike.commands.schema`, from plain data.

    Raises:
        InvalidValue: a value of the wrong type or out of its range.
    """
    return cls(**_section(keys_of(cls), data, ""))


def unknown_key(path: str, kind: str = "") -> CommandError:
    """The error for a key that does not exist, with the nearest that does.

    Args:
        kind: the variant of the section that has no such key, as ``ppo`` of ``agent``.
    """
    known = list(all_keys())
    if any(item.path == path for item in known):
        section = path.partition(".")[0]
        (variants,) = (item.sections for item in known if item.path == section)
        match = nearest(last_name(path), [item.name for item in keys_of(variants[kind])])
        hint = f"nearest: {section}.{match}; " if match else ""
        return CommandError(f"{path}: {kind} has no such key; {hint}python -m sheeplike train --help lists every key")
    last = last_name(path)
    same_name = [item.path for item in known if item.name == last]
    match = nearest(path, same_name) or next(iter(same_name), None) or nearest(path, [item.path for item in known])
    if match is None:
        by_name = {item.name: item.path for item in reversed(known)}
        match = by_name.get(nearest(last, by_name) or "")
    hint = f"nearest: {match}; " if match else ""
    return CommandError(f"unknown key {path!r}: {hint}python -m sheeplike train --help lists every key")


def last_name(path: str) -> str:
    """The key without the sections that it is in."""
    return path.rpartition(".")[2]


def expectation(item: Key) -> str:
    """What a key takes, in words."""
    rule = item.rule
    if get_origin(item.type) is tuple:
        numbers = {int: "integers", float: "numbers"}.get(get_args(item.type)[0])
        names = f"of {', '.join(rule.choices)}" if rule.choices else "names"
        many = "" if rule.empty else "one or more "
        least = "" if rule.at_least is None else f" of at least {rule.at_least}"
        text = f"a list of {many}{f'{numbers}{least}' if numbers else names}"
    elif item.section:
        text = "a section"
    elif item.type is bool:
        text = "true or false"
    elif item.type is str:
        text = f"one of {', '.join(rule.choices)}" if rule.choices else "a text"
    else:
        limits = {"of at least": rule.at_least, "above": rule.above, "at most": rule.at_most, "below": rule.below}
        words = " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)
        if rule.at_least is not None and rule.at_most is not None:
            words = f"from {rule.at_least} to {rule.at_most}"
        text = f"{'a number' if item.type is float else 'an integer'} {words}".rstrip()
        text += "" if rule.multiple_of is None else f", a multiple of {rule.multiple_of}"
        text += ", or two of them" * _takes_pair(item) + ", or that of each camera by name" * _takes_names(item)
    return text + ", or null" * item.nullable


def _section(keys: list[Key], data: Any, path: str) -> dict[str, Any]:
    """The checked values of a section, which must have exactly these keys."""
    names = [item.name for item in keys]
    if not isinstance(data, dict):
        raise InvalidValue(path, data, f"a section with the keys {', '.join(names)}")
    for name in data:
        if name not in names:
            raise unknown_key(f"{path}.{name}" if path else str(name), str(data.get("name")))
    for item in keys:
        if item.name not in data:
            raise CommandError(f"{item.path} is missing: expected {expectation(item)}")
    return {item.name: _value(item, data[item.name]) for item in keys}


def _value(item: Key, value: Any) -> Any:
    if value is None and item.nullable:
        return None
    if item.sections:
        kind = _kind(item, value)
        value = _merged(defaults_of(kind), value)
        return kind(**_section(keys_of(kind, f"{item.path}."), value, item.path))
    if item.section and not item.rule.open:
        return _section(item.below(), value, item.path)
    if item.section:
        if not isinstance(value, dict):
            raise InvalidValue(item.path, value, "a section of names and values, such as {name: 1}")
        return dict(value)
    if get_origin(item.type) is tuple:
        kind = get_args(item.type)[0]
        listed = value if isinstance(value, list | tuple) else [value]
        checked = [_scalar(kind, item.rule, one) if kind is not str or isinstance(one, str) else None for one in listed]
        if (not listed and not item.rule.empty) or None in checked:
            close = [_nearest(kind, item.rule, one) for one in listed] if item.rule.choices else [None]
            raise InvalidValue(item.path, value, expectation(item), None if None in close or not close else close)
        return tuple(checked)
    if _takes_names(item) and isinstance(value, dict):
        return _by_name(item, value)
    kind = int if _takes_pair(item) else item.type
    if _takes_pair(item) and isinstance(value, list) and len(value) == 2:
        pair = tuple(_scalar(kind, item.rule, side) for side in value)
        if None in pair:
            raise InvalidValue(item.path, value, expectation(item), [_nearest(kind, item.rule, side) for side in value])
        return pair
    checked = _scalar(kind, item.rule, value)
    if checked is None:
        raise InvalidValue(item.path, value, expectation(item), _nearest(kind, item.rule, value))
    return checked


def _by_name(item: Key, value: dict[Any, Any]) -> dict[str, Any]:
    """The value of a key that may have one for each of several names."""
    checked = {}
    for name, one in value.items():
        try:
            checked[str(name)] = _value(item._replace(type=int | tuple[int, int], nullable=False), one)
        except InvalidValue as error:
            close = None if error.nearest is None else {**value, name: error.nearest}
            raise InvalidValue(item.path, value, expectation(item), close) from None
    if not checked:
        raise InvalidValue(item.path, value, expectation(item))
    return checked


def _merged(defaults: dict[str, Any], data: Any) -> Any:
    """``data``, and where it says nothing, ``defaults``."""
    if not isinstance(data, dict):
        return data
    below = {name: _merged(defaults[name], data[name]) for name in data if isinstance(defaults.get(name), dict)}
    return defaults | data | below


def _kind(item: Key, value: Any) -> type:
    """Which of the classes that can describe a section describes this one."""
    if len(item.sections) == 1:
        return next(iter(item.sections.values()))
    name = value.get("name") if isinstance(value, dict) else None
    if name not in item.sections:
        names = list(item.sections)
        raise InvalidValue(f"{item.path}.name", name, f"one of {', '.join(names)}", nearest(str(name), names))
    return item.sections[name]


def _takes_pair(item: Key) -> bool:
    return tuple[int, int] in get_args(item.type)


def _takes_names(item: Key) -> bool:
    return any(get_origin(kind) is dict for kind in get_args(item.type))


def _scalar(kind: type, rule: Rule, value: Any) -> Any:
    """``value`` as a ``kind``, or None where it is none or breaks the rule."""
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is str:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)  # run_dir=2026
        return value if isinstance(value, str) and value and (not rule.choices or value in rule.choices) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    if kind is int and value != int(value):  # 1e6 is an integer too
        return None
    return kind(value) if _within(rule, value) else None


def _within(rule: Rule, value: float) -> bool:
    return (
        (rule.at_least is None or value >= rule.at_least)
        and (rule.above is None or value > rule.above)
        and (rule.at_most is None or value <= rule.at_most)
        and (rule.below is None or value < rule.below)
        and (rule.multiple_of is None or value % rule.multiple_of == 0)
    )


def _nearest(kind: type, rule: Rule, value: Any) -> Any:
    """The valid value nearest to an invalid one; None where there is no such thing, as for a number above 0."""
    if kind is bool:
        word = str(value).lower()
        return SPOKEN.get(word, {"true": True, "false": False}.get(nearest(word, ("true", "false")) or ""))
    if kind is str:
        return nearest(str(value), rule.choices)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    step = rule.multiple_of or 1
    value = value if rule.at_least is None else max(value, rule.at_least)
    value = value if rule.at_most is None else min(value, rule.at_most)
    value = math.floor(value / step + 0.5) * step if kind is int else value
    return value if _within(rule, value) else None


def _check_task(config: Config) -> None:
    """The task must exist and have the options; their values are the task's own business, except for their types."""
    name, options = config.env.name, config.env.options
    if name not in list_envs():
        raise InvalidValue("env.name", name, f"one of {', '.join(list_envs())}", nearest(name, list_envs()))
    if takes_id(name) != (config.env.id is not None):
        ids = ", ".join(list_ids(name)) or "such as CartPole-v1"
        expected = f"which of {name}: {ids}" if takes_id(name) else f"null: {name} is not a family"
        raise InvalidValue("env.id", config.env.id, expected)
    known = task_options(name)
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of {name}", str(option), known)
        kind = type(known[option])
        if kind in (bool, int, float, str) and _scalar(kind, Rule(""), value) is None:
            expected = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[kind]
            raise InvalidValue(f"env.options.{option}", value, expected, known[option])
    if takes_id(name):
        with as_command_errors(InvalidOption, Unusable):
            check(name, id=config.env.id, options=options)


def _check_randomization(config: Config) -> None:
    """What the lines say by themselves; whether the scene has what they name is found out when it is built."""
    if config.randomization and not simulated(config.env.name):
        expected = f"nothing: {config.env.name} is not simulated here"
        raise InvalidValue("randomization", list(config.randomization), expected, "none")
    if config.eval.nominal and not simulated(config.env.name):
        raise InvalidValue("eval.nominal", True, f"false: {config.env.name} is not simulated here", False)
    try:
        parse(config.randomization)
    except InvalidLine as error:
        raise CommandError(str(error)) from None


def _check_rendering(config: Config) -> None:
    """What is rendered must be there to be rendered, and what is observed must be rendered."""
    env, agent = config.env, config.agent
    if not simulated(env.name):
        for option, default in RENDERING.items():
            if getattr(env, option) != default:
                expected = f"{show(default)}, since {env.name} renders its images itself"
                raise InvalidValue(f"env.{option}", getattr(env, option), expected, default)
    sizes, cameras = env.image_size, env.cameras
    if isinstance(sizes, dict):
        if not simulated(env.name):
            raise InvalidValue("env.image_size", sizes, f"one size, since {env.name} renders its images itself")
        if cameras is not None and set(cameras) != set(sizes):
            expected = f"a size for each of env.cameras={show(cameras)}, and for no other"
            raise InvalidValue("env.image_size", sizes, expected)
    if env.renderer == "none":
        for option in ("depth", "segmentation", "shadows", "textures"):
            if getattr(env, option):
                raise InvalidValue(f"env.{option}", True, "false, since env.renderer=none renders nothing", False)
        for key in ("observations", "value_observations"):
            patterns = getattr(agent, key, None) or ()
            if any(pattern.startswith(IMAGES) for pattern in patterns):
                expected = "vectors alone, since env.renderer=none renders no images"
                rest = [pattern for pattern in patterns if not pattern.startswith(IMAGES)]
                raise InvalidValue(f"agent.{key}", patterns, expected, rest or ["state"])
    if env.renderer == "madrona" and isinstance(sizes, dict) and len(set(sizes.values())) > 1:
        raise InvalidValue("env.image_size", sizes, "one size, since env.renderer=madrona has one for all cameras")


def _evaluation_worlds(config: Config) -> int:
    settings = config.eval
    if config.env.renderer == "madrona" and settings.every is not None:
        if settings.num_envs not in (None, config.env.num_envs):
            expected = f"env.num_envs={config.env.num_envs}, since env.renderer=madrona draws training and evaluation"
            raise InvalidValue("eval.num_envs", settings.num_envs, expected, config.env.num_envs)
        return config.env.num_envs
    if settings.num_envs is None:
        return min(settings.episodes, config.env.num_envs)
    if settings.num_envs > settings.episodes:
        raise InvalidValue(
            "eval.num_envs", settings.num_envs, f"at most eval.episodes={settings.episodes}", settings.episodes
        )
    return settings.num_envs
