"""One step of one world as the rollout holds it, and how it is read."""

from __future__ import annotations

import torch
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo.losses import COMPUTED, STORED
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.memory import Rollout
from sheeplike.memory.replay import Spec

SHIFT = 4  # pixels by which augmentation moves an image at most
# No observation may have one of these names: they stand beside the observations in the rollout or in a batch.
RESERVED = ("reward", "is_first", "is_last", "is_terminal", "shift", *STORED, *COMPUTED, "envs", "times")


def rollout_spec(keys: ObservationKeys, codec: ActionCodec, *, augment: bool = False) -> Spec:
    """Return shape and dtype of each key of one step of one world."""
    flags = {name: ((), torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    numbers = {name: ((), torch.float32) for name in ("reward", "log_prob", "value")}
    shift = {"shift": ((len(keys.images), 2), torch.int8)} if augment else {}
    return {**keys.stored(), **flags, **numbers, "raw_action": ((codec.width,), torch.float32), **shift}


def encode_step(step: Step, keys: ObservationKeys) -> dict[str, Tensor]:
    """Return a step as the rollout takes it, but for shifts."""
    flags = {"is_first": step.is_first, "is_last": step.is_last, "is_terminal": step.is_terminal}
    return {**{key: step.obs[key] for key in keys.spaces}, **flags, "reward": step.reward, **step.extras}


def draw_shift(num_envs: int, cameras: int, generator: torch.Generator) -> Tensor:
    """Draw one shift for each world's next trajectory and camera: ``(N, cameras, 2)`` int8."""
    shift = torch.randint(-SHIFT, SHIFT + 1, (num_envs, cameras, 2), generator=generator, device=generator.device)
    return shift.to(torch.int8)


def observations(rollout: Rollout, keys: ObservationKeys, slot: Tensor, env: Tensor) -> dict[str, Tensor]:
    """Return inputs of the networks at steps ``(B,)``: images stacked and, if augmented, moved; vectors."""
    shift = rollout.storage["shift"][slot, env].long() if "shift" in rollout.storage else None
    images = {
        key: rollout.stack(key, slot, env, None if shift is None else shift[:, camera])
        for camera, key in enumerate(keys.images)
    }
    return images | {key: rollout.storage[key][slot, env] for key in keys.vectors}
