"""What a run will take of memory and disk, and what to change when that is too much."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces

from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic as DreamerActorCritic
from sheeplike.agents.dreamer_v3.agent import CONTEXT, replay_spec
from sheeplike.agents.dreamer_v3.observations import ModelKeys
from sheeplike.agents.dreamer_v3.sizes import SIZES, Size
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.agents.ppo.agent import rollout_spec
from sheeplike.agents.ppo.networks import ActorCritic, Vision
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.commands import schema
from sheeplike.commands.errors import CommandError
from sheeplike.commands.schema import Config
from sheeplike.commands.validation import validate
from sheeplike.memory import Rollout, SequenceReplay
from sheeplike.nn.cnn import LAYOUTS
from sheeplike.nn.vision import STAGES

_OUT_OF_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|out of memory|can't allocate memory|not enough memory|failed to allocate|ALLOC_FAILED"
    r"|cudaErrorMemoryAllocation",
    re.IGNORECASE,
)
_OF_THE_WORLDS = re.compile(r"RESOURCE_EXHAUSTED|warp", re.IGNORECASE)
MIXED, FULL = 2, 4  # bytes of a number
HALVINGS = 8  # at most, of a setting that is proposed
ROOM = 0.9  # of what is free: the rest goes to what no plan knows of


@dataclass(frozen=True)
class Plan:
    """Bytes that a run is expected to take; what the networks compute on the way is an estimate, the rest is exact.

    Attributes:
        learner: parameters, their gradients and the optimizer's two moments.
        memory: the replay or the rollout.
        batch: the frames of one gradient step, and what is kept of them for the gradient.
        worlds: the frames of all worlds; their physics comes on top.
        saved: what a checkpoint holds of the learner.
        renewed: what it holds of the memory and cannot share with the checkpoint before.
    """

    learner: int
    memory: int
    batch: int
    worlds: int
    saved: int
    renewed: int

    @property
    def total(self) -> int:
        return self.learner + self.memory + self.batch + self.worlds


def plan(config: Config, space: spaces.Dict | None = None, actions: spaces.Space | None = None) -> Plan:
    """What a run takes.

    Args:
        space, actions: of one world; None: one camera per name in ``env.cameras``, and eight numbers.
    """
    space = _assumed(config) if space is None else space
    codec = ActionCodec(spaces.Box(-1, 1, (8,), np.float32) if actions is None else actions)
    tell = _ppo if isinstance(config.agent, schema.PPO) else _dreamer
    # Packed by the renderer, and unpacked; and depth the same way.
    pixels = sum(math.prod(one.shape[:2]) * (4 + one.shape[2] * one.dtype.itemsize) for one in _images(space))
    return tell(config, space, codec, (config.env.num_envs + (config.eval.num_envs or 0)) * pixels)


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
        space, actions: see :func:`plan`.
        free: bytes that the device has left, where that is known.
    """
    now = plan(config, space, actions)
    agent = config.agent
    if isinstance(agent, schema.PPO):
        memory, batch = "the rollout", f"a minibatch of {_minibatch(config):,} steps"
    else:
        memory, batch = f"a replay of {agent.replay_size:,} policy steps", f"a batch of {agent.batch_size} sequences"
    taken = (
        f"expected are {_size(now.learner)} for parameters and optimizer, {_size(now.memory)} for {memory}, about "
        f"{_size(now.batch)} for {batch}, {_size(now.worlds)} for the frames of {config.env.num_envs} worlds and "
        "their physics"
    )
    room = "" if free is None else f"; {_size(free)} are free"
    helping: list[tuple[int, str]] = []
    for choices in _smaller(config):
        first = None
        for text, changed in choices:
            smaller = _changed(config, changed)
            if smaller is None:
                break
            left = plan(smaller, _resized(space, smaller), actions).total
            first = first or (now.total - left, text)
            if free is None or left <= ROOM * free:
                first = now.total - left, text  # that alone will do; where nothing will, the first step
                break
        if first and first[0] > 0:
            helping.append(first)
    helping.sort(key=lambda entry: -entry[0])
    if _OF_THE_WORLDS.search(str(error)):  # whose physics takes what no plan knows of
        helping.sort(key=lambda entry: not entry[1].startswith("env.num_envs="))
    settings = ", ".join(f"{text} ({_size(saved)} less)" for saved, text in helping[:3])
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
        space, actions: see :func:`plan`.
        free: bytes; None: what the disk of ``run_dir`` has left.
        held: bytes of the checkpoints that are there already and will be replaced.
    """
    if free is None:
        place = Path(config.run_dir or ".").expanduser().absolute()
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    needed, have = _on_disk(config, space, actions), free + held
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
    if isinstance(config.agent, schema.DreamerV3) and checkpoint.replay:
        for text, changed in _halved("agent.replay_size", config.agent.replay_size):
            smaller = _changed(config, changed)
            if smaller is None:
                break
            options.append((text, smaller))
            if _on_disk(smaller, space, actions) <= have:
                break
    saved: dict[str, tuple[int, str]] = {}
    for text, smaller in options:
        less = needed - _on_disk(smaller, space, actions)
        if less > 0:
            saved[text.partition("=")[0]] = less, text  # of the halvings, the last
    helping = ", ".join(f"{text} ({_size(less)} less)" for less, text in sorted(saved.values(), key=lambda e: -e[0]))
    return (
        f"the checkpoints in {config.run_dir} may take {_size(needed)}, and {_size(have)} are free; what helps: "
        f"{helping or 'another run_dir'}"
    )


def count_parameters(config: Config, space: spaces.Dict, codec: ActionCodec) -> int:
    """Numbers in the networks that gradients change; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in _networks(config, space, codec).parameters() if p.requires_grad)


def _networks(config: Config, space: spaces.Dict, codec: ActionCodec) -> torch.nn.Module:
    a = config.agent
    if isinstance(a, schema.PPO):
        names = ("distribution", "policy_layers", "value_layers", "shared_trunk", "activation")
        return ActorCritic(
            ObservationKeys(space, a.observations),
            ObservationKeys(space, a.value_observations or a.observations),
            codec,
            stack=a.frame_stack,
            vision=Vision(**asdict(a.vision)),
            **{name: getattr(a, name) for name in names},
        )
    size = _widths(a)
    world = WorldModel(
        ModelKeys(space, a.observations),
        codec.width,
        size,
        unimix=a.unimix,
        free_nats=a.kl_free_nats,
        horizon=a.horizon,
    )
    return torch.nn.ModuleList([world, DreamerActorCritic(world.rssm.features, codec, size.units)])


def _dreamer(config: Config, space: spaces.Dict, codec: ActionCodec, worlds: int) -> Plan:
    a, keys = config.agent, ModelKeys(space, config.agent.observations)
    parameters = count_parameters(config, space, codec)
    spec = replay_spec(keys, codec, _widths(a))
    latents = {name: spec[name] for name in ("deter", "stoch")}
    steps = a.batch_size * (a.batch_length + CONTEXT)
    channels = sum(keys.channels(key) for key in keys.images)
    pixels = math.prod(keys.image_size) if keys.image_size else 0
    number = MIXED if config.fabric.precision == "bf16-mixed" else FULL
    # Of each stage the convolution's output, and a quarter of it thrice: pooled, normalised, activated; and once more
    # in the decoder. Of each image the bytes, the floats, its prediction and the error.
    maps = sum(pixels // 4**n * a.size.depth * m for n, m in enumerate(STAGES))
    images = steps * (pixels * channels * (1 + 3 * FULL) + maps * 1.75 * 2 * number)
    features = a.size.deter + 32 * a.size.classes
    recurrent = steps * (6 * a.size.deter + 4 * 32 * a.size.classes + 8 * a.size.hidden) * FULL
    # From each step on, the features of every imagined one, and the layers of policy, value, reward and the rest.
    imagined = steps * (a.imagination_length + 1) * (2 * features * FULL + 3 * 3 * 3 * a.size.units * number)
    return Plan(
        learner=parameters * 4 * FULL,
        memory=SequenceReplay.footprint(spec, config.env.num_envs, a.replay_size),
        batch=int(images + recurrent + imagined),
        worlds=worlds,
        saved=parameters * 3 * FULL,
        renewed=SequenceReplay.footprint(latents, config.env.num_envs, a.replay_size),
    )


def _ppo(config: Config, space: spaces.Dict, codec: ActionCodec, worlds: int) -> Plan:
    a = config.agent
    keys = ObservationKeys(space, [*a.observations, *(a.value_observations or ())])
    parameters = count_parameters(config, space, codec)
    memory = Rollout.footprint(
        rollout_spec(keys, codec, augment=a.augment), config.env.num_envs, a.rollout_length, a.frame_stack - 1
    )
    number = MIXED if config.fabric.precision == "bf16-mixed" else FULL
    layout, per_step = LAYOUTS[a.vision.layout], 0.0
    for key in keys.images:
        pixels = math.prod(keys.spaces[key].shape[:2])
        per_step += pixels * keys.channels(key) * a.frame_stack * (1 + FULL)
        for channels, stride in zip(layout.channels, layout.strides, strict=True):
            pixels //= stride**2
            per_step += pixels * channels * 2 * number  # before and after the activation
            pixels //= 4 if layout.pool else 1
    networks = 1 if a.shared_trunk else 2
    dense = 2 * (sum(a.policy_layers) + sum(a.value_layers)) * number
    return Plan(
        learner=parameters * 4 * FULL,
        memory=memory,
        batch=int(_minibatch(config) * (per_step * networks + dense)),
        worlds=worlds,
        saved=parameters * 3 * FULL,
        renewed=memory,
    )


def _on_disk(config: Config, space: spaces.Dict | None, actions: spaces.Space | None) -> int:
    """Bytes of all checkpoints at most: those that are kept, and the one being written beside them."""
    c = config.checkpoint
    kept = c.keep_last + c.keep_best
    now = plan(config, space, actions)
    # What was seen never changes, so the checkpoints share it.
    return (kept + 1) * (now.saved + now.renewed * c.replay) + (now.memory - now.renewed) * c.replay


def _smaller(config: Config) -> Iterator[Iterator[tuple[str, dict[str, object]]]]:
    """For each setting that takes memory its smaller values, from large to small: as typed, and as data."""
    a, side = config.agent, config.env.image_size
    yield _halved("env.num_envs", config.env.num_envs)
    yield _smaller_images(side)
    if isinstance(a, schema.PPO):
        yield _halved("agent.rollout_length", a.rollout_length)
        yield _halved("agent.frame_stack", a.frame_stack)
        yield (
            (f"agent.minibatches={a.minibatches * 2**n}", {"agent.minibatches": a.minibatches * 2**n})
            for n in range(1, HALVINGS + 1)
        )
        return
    yield _halved("agent.replay_size", a.replay_size)
    yield _halved("agent.batch_size", a.batch_size)
    yield _halved("agent.batch_length", a.batch_length)
    yield _halved("agent.imagination_length", a.imagination_length)
    yield (
        (f"agent/size={name}", {"agent.size": {"name": name, **asdict(size)}})
        for name, size in reversed(SIZES.items())
        if size.deter < a.size.deter
    )


def _halved(key: str, value: int) -> Iterator[tuple[str, dict[str, object]]]:
    for n in range(1, HALVINGS + 1):
        if value >> n:
            yield f"{key}={value >> n}", {key: value >> n}


def _smaller_images(size: int | tuple[int, int]) -> Iterator[tuple[str, dict[str, object]]]:
    for less in range(16, 256, 16):
        value = size - less if isinstance(size, int) else [side - less for side in size]
        yield f"env.image_size={json.dumps(value, separators=(',', ':'))}", {"env.image_size": value}


def _changed(config: Config, changed: dict[str, object]) -> Config | None:
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


def _assumed(config: Config) -> spaces.Dict:
    """Observations as the configuration lets expect them: a run that cannot build its worlds has no others."""
    image, patterns = _shape(config.env.image_size), list(config.agent.observations)
    patterns += getattr(config.agent, "value_observations", None) or ()
    keys = {f"pixels/{name}" for name in config.env.cameras or ("camera",)} | {"state"}
    keys |= {pattern for pattern in patterns if not set("*?[") & set(pattern)}
    keys |= {f"depth/{key.removeprefix('pixels/')}" for key in keys if config.env.depth and key.startswith("pixels/")}
    keys |= {re.sub(r"[*?\[\]]", "x", pattern) for pattern in patterns if pattern[0] not in "*?["}
    found: dict[str, spaces.Space] = {}
    for key in sorted(keys):
        if key.startswith("pixels/"):
            found[key] = spaces.Box(0, 255, (*image, 3), np.uint8)
        elif key.startswith("depth/"):
            found[key] = spaces.Box(0, np.inf, (*image, 1), np.float32)
        else:
            found[key] = spaces.Box(-np.inf, np.inf, (32,), np.float32)
    return spaces.Dict(found)


def _resized(space: spaces.Dict | None, config: Config) -> spaces.Dict | None:
    """The same observations with images of another size."""
    if space is None:
        return None
    image = _shape(config.env.image_size)
    return spaces.Dict(
        {
            key: spaces.Box(one.low.min(), one.high.max(), (*image, one.shape[2]), one.dtype)
            if len(one.shape) == 3
            else one
            for key, one in space.items()
        }
    )


def _images(space: spaces.Dict) -> list[spaces.Box]:
    return [one for one in space.values() if len(one.shape) == 3]


def _shape(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _minibatch(config: Config) -> int:
    return config.env.num_envs * config.agent.rollout_length // config.agent.minibatches


def _widths(agent: schema.DreamerV3) -> Size:
    return Size(**{name: value for name, value in asdict(agent.size).items() if name != "name"})


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
