"""From plain data to a checked :class:`~sheeplike.commands.schema.Config`."""

from __future__ import annotations

import math
from dataclasses import is_dataclass, replace
from typing import Any, get_args, get_origin

from sheeplike.commands.errors import CommandError, InvalidValue, nearest, unknown
from sheeplike.commands.schema import Config, Key, Rule, all_keys, keys_of
from sheeplike.envs import list_envs, task_options

# How the agent uses its memory: one stored step comes before each trained sequence, and the write head takes one.
CONTEXT, WRITE_HEAD = 1, 1
SPOKEN = {"yes": True, "on": True, "1": True, "no": False, "off": False, "0": False}


def validate(data: dict[str, Any]) -> Config:
    """The configuration that ``data``, nested dictionaries of plain values, describes.

    ``learning_starts``, ``eval.num_envs`` and ``fabric.accelerator=gpu`` come back as the values that they stand for.

    Raises:
        InvalidValue: a value of the wrong type, out of its range, or that does not go with the others.
        CommandError: a key that is missing or unknown.
    """
    config = Config(**_section(keys_of(Config), data, ""))
    _check_task(config)
    _check_replay(config)
    starts = _learning_starts(config)
    return replace(
        config,
        learning_starts=starts,
        eval=replace(config.eval, num_envs=_evaluation_worlds(config)),
        fabric=replace(
            config.fabric, accelerator={"gpu": "cuda"}.get(config.fabric.accelerator, config.fabric.accelerator)
        ),
    )


def unknown_key(path: str) -> CommandError:
    """The error for a key that does not exist, with the nearest that does."""
    known = list(all_keys())
    last = path.rpartition(".")[2]
    same_name = [item.path for item in known if item.name == last]
    match = nearest(path, same_name) or next(iter(same_name), None) or nearest(path, [item.path for item in known])
    if match is None:
        by_name = {item.name: item.path for item in reversed(known)}
        match = by_name.get(nearest(last, by_name) or "")
    hint = f"nearest: {match}; " if match else ""
    return CommandError(f"unknown key {path!r}: {hint}python -m sheeplike train --help lists every key")


def expectation(item: Key) -> str:
    """What a key takes, in words."""
    rule = item.rule
    if get_origin(item.type) is tuple:
        text = "a list of one or more names"
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
        text += ", or two of them" * _takes_pair(item)
    return text + ", or null" * item.nullable


def _section(keys: list[Key], data: Any, path: str) -> dict[str, Any]:
    """The checked values of a section, which must have exactly these keys."""
    names = [item.name for item in keys]
    if not isinstance(data, dict):
        raise InvalidValue(path, data, f"a section with the keys {', '.join(names)}")
    for name in data:
        if name not in names:
            raise unknown_key(f"{path}.{name}" if path else str(name))
    for item in keys:
        if item.name not in data:
            raise CommandError(f"{item.path} is missing: expected {expectation(item)}")
    return {item.name: _value(item, data[item.name]) for item in keys}


def _value(item: Key, value: Any) -> Any:
    if value is None and item.nullable:
        return None
    if is_dataclass(item.type):
        return item.type(**_section(item.below(), value, item.path))
    if item.section and not item.rule.open:
        return _section(item.below(), value, item.path)
    if item.section:
        if not isinstance(value, dict):
            raise InvalidValue(item.path, value, "a section of names and values, such as {name: 1}")
        return dict(value)
    if get_origin(item.type) is tuple:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidValue(item.path, value, expectation(item))
        return tuple(texts)
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


def _takes_pair(item: Key) -> bool:
    return tuple[int, int] in get_args(item.type)


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
    known = task_options(name)
    for option, value in options.items():
        if option not in known:
            raise unknown(f"option of {name}", str(option), known)
        kind = type(known[option])
        if kind in (bool, int, float, str) and _scalar(kind, Rule(""), value) is None:
            expected = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}[kind]
            raise InvalidValue(f"env.options.{option}", value, expected, known[option])


def _check_replay(config: Config) -> None:
    """A sequence must fit into each world's part of the replay memory."""
    agent, worlds = config.agent, config.env.num_envs
    needed = worlds * (agent.batch_length + CONTEXT + WRITE_HEAD)
    if agent.replay_size < needed:
        steps = agent.replay_size // worlds
        longest = steps - CONTEXT - WRITE_HEAD
        raise InvalidValue(
            "agent.batch_length",
            agent.batch_length,
            f"at most {longest}, since agent.replay_size={agent.replay_size} keeps {steps} steps of each of the "
            f"{worlds} worlds; or agent.replay_size={needed}"
            if longest >= 2
            else f"a replay that holds a sequence of each of the {worlds} worlds: agent.replay_size={needed}",
            longest if longest >= 2 else None,
        )


def _learning_starts(config: Config) -> int:
    """When the first gradient step can be made; the run must be long enough to make it."""
    agent, worlds = config.agent, config.env.num_envs
    smallest = max(
        worlds * (agent.batch_length + CONTEXT), min(agent.batch_size * agent.batch_length, agent.replay_size)
    )
    starts = smallest if config.learning_starts is None else config.learning_starts
    if starts < smallest:
        raise InvalidValue(
            "learning_starts",
            starts,
            f"at least {smallest}, when the replay holds one batch of {agent.batch_size} x {agent.batch_length} steps, "
            f"and each of the {worlds} worlds a sequence of it and the step before",
            smallest,
        )
    first = starts + math.ceil(1 / config.agent.replay_ratio)
    if config.total_steps < first:
        raise InvalidValue(
            "total_steps",
            config.total_steps,
            f"at least {first}, where the first gradient step comes (learning_starts={starts})",
            first,
        )
    return starts


def _evaluation_worlds(config: Config) -> int:
    settings = config.eval
    if settings.num_envs is None:
        return min(settings.episodes, config.env.num_envs)
    if settings.num_envs > settings.episodes:
        raise InvalidValue(
            "eval.num_envs", settings.num_envs, f"at most eval.episodes={settings.episodes}", settings.episodes
        )
    return settings.num_envs
