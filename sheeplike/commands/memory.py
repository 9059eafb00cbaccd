"""What a run will take of memory and disk."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from gymnasium import spaces

from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic as DreamerActorCritic
from sheeplike.agents.dreamer_v3.agent import CONTEXT, LATENTS
from sheeplike.agents.dreamer_v3.experience import replay_spec
from sheeplike.agents.dreamer_v3.observations import ModelKeys
from sheeplike.agents.dreamer_v3.sizes import Size
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.agents.ppo.experience import rollout_spec
from sheeplike.agents.ppo.networks import ActorCritic, Vision
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.commands import schema
from sheeplike.commands.schema import Config
from sheeplike.memory import Rollout, SequenceReplay
from sheeplike.nn.cnn import LAYOUTS
from sheeplike.nn.vision import STAGES

MIXED, FULL = 2, 4  # bytes of a number
# Bytes of a pixel as the renderer packs it: colours, depth, and what it shows.
PACKED = {"uint8": 4, "float32": 4, "int32": 8}


@dataclass(frozen=True)
class MemoryEstimate:
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


def estimate(config: Config, space: spaces.Dict | None = None, actions: spaces.Space | None = None) -> MemoryEstimate:
    """What a run takes.

    Args:
        space, actions: of one world; None: one camera per name in ``env.cameras``, and eight numbers.
    """
    space = _assumed(config) if space is None else space
    codec = ActionCodec(spaces.Box(-1, 1, (8,), np.float32) if actions is None else actions)
    tell = _ppo if isinstance(config.agent, schema.PPO) else _dreamer
    # As the renderer packs them, and as they are delivered.
    pixels = sum(
        math.prod(one.shape[:2]) * (PACKED[one.dtype.name] + one.shape[2] * one.dtype.itemsize)
        for one in _images(space)
    )
    return tell(config, space, codec, (config.env.num_envs + (config.eval.num_envs or 0)) * pixels)


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
    size, keys = widths(a), ModelKeys(space, a.observations)
    world = WorldModel(
        keys,
        codec.width,
        size,
        unimix=a.unimix,
        free_nats=a.kl_free_nats,
        horizon=a.horizon,
        predicted=keys.with_targets(space, a.targets),
    )
    return torch.nn.ModuleList([world, DreamerActorCritic(world.rssm.features, codec, size.units)])


def _dreamer(config: Config, space: spaces.Dict, codec: ActionCodec, worlds: int) -> MemoryEstimate:
    a, seen = config.agent, ModelKeys(space, config.agent.observations)
    keys = seen.with_targets(space, a.targets)
    parameters = count_parameters(config, space, codec)
    spec = replay_spec(keys, codec, widths(a))
    latents = {name: spec[name] for name in LATENTS}
    steps = a.batch_size * (a.batch_length + CONTEXT)
    number = MIXED if config.fabric.precision == "bf16-mixed" else FULL
    # Of each stage the convolution's output, and a quarter of it thrice: pooled, normalised, activated; and once more
    # in the decoder. Of each image the bytes, the floats, its prediction and the error.
    maps = sum(
        images.height * images.width // 4**n * a.size.depth * m
        for images in (*seen.sizes, *keys.sizes)
        for n, m in enumerate(STAGES)
    )
    frames = sum(math.prod(keys.spaces[key].shape) * (keys.dtype(key).itemsize + 3 * FULL) for key in keys.images)
    images = steps * (frames + maps * 1.75 * number)
    features = a.size.deter + 32 * a.size.classes
    recurrent = steps * (6 * a.size.deter + 4 * 32 * a.size.classes + 8 * a.size.hidden) * FULL
    # From each step on, the features of every imagined one, and the layers of policy, value, reward and the rest.
    imagined = steps * (a.imagination_length + 1) * (2 * features * FULL + 3 * 3 * 3 * a.size.units * number)
    return MemoryEstimate(
        learner=parameters * 4 * FULL,
        memory=SequenceReplay.footprint(spec, config.env.num_envs, a.replay_size),
        batch=int(images + recurrent + imagined),
        worlds=worlds,
        saved=parameters * 3 * FULL,
        renewed=SequenceReplay.footprint(latents, config.env.num_envs, a.replay_size),
    )


def _ppo(config: Config, space: spaces.Dict, codec: ActionCodec, worlds: int) -> MemoryEstimate:
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
    return MemoryEstimate(
        learner=parameters * 4 * FULL,
        memory=memory,
        batch=int(minibatch(config) * (per_step * networks + dense)),
        worlds=worlds,
        saved=parameters * 3 * FULL,
        renewed=memory,
    )


def on_disk(config: Config, space: spaces.Dict | None, actions: spaces.Space | None) -> int:
    """Bytes of all checkpoints at most: those that are kept, and the one being written beside them."""
    c = config.checkpoint
    kept = c.keep_last + c.keep_best
    now = estimate(config, space, actions)
    # What was seen never changes, so the checkpoints share it.
    return (kept + 1) * (now.saved + now.renewed * c.replay) + (now.memory - now.renewed) * c.replay


def _assumed(config: Config) -> spaces.Dict:
    """Observations as the configuration lets expect them: a run that cannot build its worlds has no others."""
    env, patterns = config.env, list(config.agent.observations)
    for more in ("value_observations", "targets"):
        patterns += getattr(config.agent, more, None) or ()
    cameras = env.cameras or (tuple(env.image_size) if isinstance(env.image_size, dict) else ("camera",))
    keys = {f"pixels/{name}" for name in cameras if env.renderer != "none"} | {"state"}
    keys |= {pattern for pattern in patterns if not set("*?[") & set(pattern)}
    seen = [key.removeprefix("pixels/") for key in keys if key.startswith("pixels/")]
    keys |= {f"{kind}/{name}" for kind in ("depth", "segmentation") if getattr(env, kind) for name in seen}
    unmet = [pattern for pattern in patterns if not any(fnmatchcase(key, pattern) for key in keys)]
    keys |= {re.sub(r"[*?\[\]]", "x", pattern) for pattern in unmet if pattern[0] not in "*?["}
    found: dict[str, spaces.Space] = {}
    for key in sorted(keys):
        kind, _, camera = key.partition("/")
        if kind in _KINDS:
            low, high, channels, dtype = _KINDS[kind]
            found[key] = spaces.Box(low, high, (*_shape(config, camera), channels), dtype)
        else:
            found[key] = spaces.Box(-np.inf, np.inf, (32,), np.float32)
    return spaces.Dict(found)


def resized(space: spaces.Dict | None, config: Config) -> spaces.Dict | None:
    """The same observations with images of the sizes that the configuration has."""
    if space is None:
        return None
    return spaces.Dict(
        {
            key: spaces.Box(
                one.low.min(), one.high.max(), (*_shape(config, key.partition("/")[2]), one.shape[2]), one.dtype
            )
            if len(one.shape) == 3
            else one
            for key, one in space.items()
        }
    )


_KINDS = {
    "pixels": (0, 255, 3, np.uint8),
    "depth": (0, np.inf, 1, np.float32),
    "segmentation": (-1, 2**16, 1, np.int32),
}


def _images(space: spaces.Dict) -> list[spaces.Box]:
    return [one for one in space.values() if isinstance(one, spaces.Box) and len(one.shape) == 3]


def _shape(config: Config, camera: str) -> tuple[int, int]:
    """``(height, width)`` of a camera's images; the largest there are of one whose name only the task knows."""
    sizes = config.env.image_size
    if isinstance(sizes, dict):
        size = sizes.get(camera) or max(
            sizes.values(), key=lambda one: one**2 if isinstance(one, int) else one[0] * one[1]
        )
    else:
        size = sizes
    return (size, size) if isinstance(size, int) else tuple(size)


def minibatch(config: Config) -> int:
    return config.env.num_envs * config.agent.rollout_length // config.agent.minibatches


def widths(agent: schema.DreamerV3) -> Size:
    """The size of the model, without its name."""
    return Size(**{name: value for name, value in asdict(agent.size).items() if name != "name"})


def in_words(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.0f} MiB"
