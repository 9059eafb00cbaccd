"""What to change when memory or disk is too small for a run."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from sheeplike.commands import schema
from sheeplike.commands.errors import CommandError, show
from sheeplike.commands.kinds import kind_of
from sheeplike.commands.kinds.kind import Choices, halved
from sheeplike.commands.memory import estimate, in_words, on_disk, resized
from sheeplike.commands.schema import Config
from sheeplike.commands.validation import validate

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|can(?:'t|not) allocate memory|not enough memory|failed to allocate|ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
_OF_THE_WORLDS = re.compile(r"RESOURCE_EXHAUSTED|warp", re.IGNORECASE)
ROOM = 0.9  # of what is free: the rest goes to what no estimate knows of


@contextmanager
def explained(config: Config, worlds: VectorEnv | None = None) -> Iterator[None]:
    """Where memory is short inside, say what the run takes and what would help.

    Args:
        worlds: what is observed in them, where that is known.

    Raises:
        CommandError: instead of whatever said that memory is short.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise CommandError(f"{reason}; {memory_advice(config, error, **spaces_of(worlds))}") from error


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether ``error``, or what caused it, says that memory is short: of torch, JAX, Warp, NumPy or Python."""
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(error, OSError) and error.errno == 12:  # ENOMEM
            return True
        # JAX's and torch's own kinds of errors are this one; Warp raises it as it is.
        if isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def memory_advice(
    config: Config,
    error: BaseException | None = None,
    *,
    space: spaces.Dict | None = None,
    actions: spaces.Space | None = None,
    free: int | None = None,
) -> str:
    """What the run takes, and the settings that would help most, in one line.

    Args:
        error: of the simulation or of the learner.
        space, actions: see :func:`~sheeplike.commands.memory.estimate`.
        free: bytes that the device has left, where that is known.
    """
    now = estimate(config, space, actions)
    memory, batch = kind_of(config.agent).in_words(config)
    own = f"what {config.agent.name} takes is not known"
    if now.learner:
        own = (
            f"expected are {in_words(now.learner)} for parameters and optimizer, {in_words(now.memory)} for {memory}, "
            f"about {in_words(now.batch)} for {batch}"
        )
    taken = f"{own}, {in_words(now.worlds)} for the frames of {config.env.num_envs} worlds and their physics"
    room = "" if free is None else f"; {in_words(free)} are free"
    helping: list[tuple[int, str]] = []
    for choices in _smaller(config):
        first = None
        for text, changed in choices:
            smaller = _changed(config, changed)
            if smaller is None:
                break
            left = estimate(smaller, resized(space, smaller), actions).total
            first = first or (now.total - left, text)
            if free is None or left <= ROOM * free:
                first = now.total - left, text  # that alone will do; where nothing will, the first step
                break
        if first and first[0] > 0:
            helping.append(first)
    helping.sort(key=lambda entry: -entry[0])
    if _OF_THE_WORLDS.search(str(error)):  # whose physics takes what no estimate knows of
        helping.sort(key=lambda entry: not entry[1].startswith("env.num_envs="))
    settings = ", ".join(f"{text} ({in_words(saved)} less)" for saved, text in helping[:3])
    return f"out of memory: {taken}{room}; what helps most: {settings or 'a smaller task'}"


def disk_advice(
    config: Config,
    *,
    space: spaces.Dict | None = None,
    actions: spaces.Space | None = None,
    free: int | None = None,
    held: int = 0,
) -> str | None:
    """A warning, in one line, where the checkpoints of a run may not fit on the disk; None where they do.

    Args:
        space, actions: see :func:`~sheeplike.commands.memory.estimate`.
        free: bytes; None: what the disk of ``run_dir`` has left.
        held: bytes of the checkpoints that are there already and will be replaced.
    """
    if free is None:
        place = Path(config.run_dir or ".").expanduser().absolute()
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    needed, have = on_disk(config, space, actions), free + held
    if needed <= have:
        return None
    checkpoint = config.checkpoint
    options: list[tuple[str, Config | None]] = []
    if checkpoint.replay:
        options.append(("checkpoint.replay=false", _with(config, replay=False)))
    if checkpoint.keep_last > 1:
        options.append(("checkpoint.keep_last=1", _with(config, keep_last=1)))
    if checkpoint.keep_best > 0:
        options.append(("checkpoint.keep_best=0", _with(config, keep_best=0)))
    for choices in kind_of(config.agent).smaller_on_disk(config) if checkpoint.replay else ():
        for text, changed in choices:
            smaller = _changed(config, changed)
            if smaller is None:
                break
            options.append((text, smaller))
            if on_disk(smaller, space, actions) <= have:
                break
    saved: dict[str, tuple[int, str]] = {}
    for text, smaller in options:
        less = needed - on_disk(smaller, space, actions)
        if less > 0:
            saved[text.partition("=")[0]] = less, text  # of the halvings, the last
    helping = ", ".join(f"{text} ({in_words(less)} less)" for less, text in sorted(saved.values(), key=lambda e: -e[0]))
    return (
        f"the checkpoints in {config.run_dir} may take {in_words(needed)}, and {in_words(have)} are free; what helps: "
        f"{helping or 'another run_dir'}"
    )


def spaces_of(worlds: VectorEnv | None) -> dict[str, spaces.Space]:
    """What :func:`~sheeplike.commands.memory.estimate` is told of the worlds, as far as there are any."""
    return {} if worlds is None else {"space": worlds.single_observation_space, "actions": worlds.single_action_space}


def _smaller(config: Config) -> Iterator[Choices]:
    """For each setting that takes memory its smaller values, from large to small: as typed, and as data."""
    yield halved("env.num_envs", config.env.num_envs)
    yield _smaller_images(config.env)
    yield from kind_of(config.agent).smaller(config)


def _smaller_images(env: schema.Env) -> Choices:
    if env.renderer == "none":
        return
    for less in range(16, 256, 16):
        sizes = env.image_size
        by_name = isinstance(sizes, dict)
        value = {name: _less(size, less) for name, size in sizes.items()} if by_name else _less(sizes, less)
        yield f"env.image_size={show(value)}", {"env.image_size": value}


def _less(size: int | tuple[int, int], less: int) -> int | list[int]:
    return size - less if isinstance(size, int) else [side - less for side in size]


def _changed(config: Config, changed: Mapping[str, object]) -> Config | None:
    """The configuration with other values, or None where they do not go with the rest."""
    data = json.loads(json.dumps(asdict(config)))
    for key, value in changed.items():
        section = data
        *sections, name = key.split(".")
        for part in sections:
            section = section[part]
        section[name] = value
    try:
        return validate(data)
    except CommandError:
        return None


def _with(config: Config, **changed: object) -> Config:
    return replace(config, checkpoint=replace(config.checkpoint, **changed))
