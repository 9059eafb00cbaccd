"""Rollout of an on-policy agent: the last few steps of every world, each stored once.

A trajectory of ``length`` steps needs one more step, whose value bootstraps the last one; that step is also the first
of the next trajectory. Frames are stacked when they are read, so that none is stored twice::

    slot      0 … history-1   history                         …            history + length
    holds     older frames    first step of the trajectory    …            bootstrap step

Shape letters: ``L`` slots, ``N`` worlds, ``B`` batch, ``H W C`` image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sheeplike.memory.replay import Spec


class Rollout:
    """Trajectories of ``length`` steps of every world.

    Args:
        spec: key to (shape of one step in one world, dtype); ``is_first``, bool, must be among them.
        history: older frames that a stack of frames needs.
    """

    def __init__(
        self, spec: Spec, *, num_envs: int, length: int, device: torch.device | str = "cpu", history: int = 0
    ) -> None:
        self.length, self.history, self.num_envs = length, history, num_envs
        slots = history + length + 1
        self.storage = {
            key: torch.zeros(slots, num_envs, *shape, dtype=dtype, device=device)
            for key, (shape, dtype) in spec.items()
        }
        # Steps since the episode began, at most `history`.
        self.age = torch.zeros(slots, num_envs, dtype=torch.int64, device=device)
        self.steps = 0

    @property
    def full(self) -> bool:
        """True if the trajectory and its bootstrap step are complete."""
        return self.steps == self.length + 1

    @property
    def newest(self) -> int:
        """Slot of the step added last."""
        return self.history + self.steps - 1

    def add(self, step: Mapping[str, Tensor]) -> None:
        """Store one step of all worlds, key to ``(N, ...)``."""
        assert not self.full, "the rollout is complete: restart() first"
        slot = self.newest + 1
        for key, ring in self.storage.items():
            ring[slot].copy_(step[key])
        if self.steps:
            older = (self.age[slot - 1] + 1).clamp(max=self.history)
            self.age[slot] = torch.where(step["is_first"], 0, older)
        else:
            self.age[slot] = 0  # older frames are unknown
        self.steps += 1

    def restart(self) -> None:
        """Begin the next trajectory with the step that bootstrapped this one."""
        kept = self.history + 1
        for ring in (*self.storage.values(), self.age):
            ring[:kept] = ring[-kept:].clone() if kept > self.length else ring[-kept:]
        self.steps = 1

    def trajectory(self, key: str) -> Tensor:
        """Return a view ``(length + 1, N, ...)`` of a complete trajectory and its bootstrap step."""
        return self.storage[key][self.history :]

    def stack(self, key: str, slot: Tensor, env: Tensor, shift: Tensor | None = None) -> Tensor:
        """Stack frames with those before them, oldest first, as ``(B, H, W, (history + 1) * C)``.

        Where an episode is younger than the stack, its first frame is repeated.

        Args:
            slot, env: ``(B,)`` int64.
            shift: ``(B, 2)`` rows and columns by which each image is moved; its edge fills the gap.
        """
        ring, age = self.storage[key], self.age[slot, env]
        sources = [slot - age.clamp(max=back) for back in reversed(range(self.history + 1))]
        if shift is None:
            return torch.cat([ring[source, env] for source in sources], -1)
        height, width = ring.shape[2:4]
        rows = (torch.arange(height, device=ring.device) + shift[:, :1]).clamp(0, height - 1)[:, :, None]
        columns = (torch.arange(width, device=ring.device) + shift[:, 1:]).clamp(0, width - 1)[:, None, :]
        where = env[:, None, None]
        return torch.cat([ring[source[:, None, None], where, rows, columns] for source in sources], -1)

    def state_dict(self) -> dict[str, Any]:
        return {"storage": dict(self.storage), "age": self.age, "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state_dict`; ValueError if it has other shapes or lacks a key."""
        for key, ring in self.storage.items():
            if key not in state["storage"]:
                raise ValueError(f"rollout {key!r} is missing: expected {', '.join(self.storage)}")
            if state["storage"][key].shape != ring.shape:
                found, expected = tuple(state["storage"][key].shape), tuple(ring.shape)
                raise ValueError(f"rollout {key!r} has shape {found}: expected {expected}")
            ring.copy_(state["storage"][key])
        self.age.copy_(state["age"].clamp(0, self.history))  # a stack reaches back no further
        self.steps = int(state["steps"])
        if self.steps not in range(self.length + 2):
            raise ValueError(f"the rollout holds {self.steps} steps: expected 0 to {self.length + 1}")
