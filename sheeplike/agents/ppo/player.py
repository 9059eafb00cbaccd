"""Acting with a policy that has no memory but the last few frames."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sheeplike.agents.ppo.agent import PPO


class PPOPlayer:
    """Samples the policy in ``N`` worlds.

    Attributes:
        extras: of the last :meth:`act`: ``drawn`` ``(N, A)``, what the distribution drew, before any squashing;
            ``log_prob`` and ``value`` ``(N,)``. Without ``value``, and so not to be learnt from, where ``obs`` was
            without something that only the value sees.
    """

    def __init__(self, agent: PPO, num_envs: int) -> None:
        self.agent = agent
        # One for the policy's mode and one for a sample of it.
        act = [partial(agent.act, sample=sample) for sample in (False, True)]
        self.steps = [agent.compiled.shared_step((num_envs, n), step) for n, step in enumerate(act)]
        stack, stacked = agent.frame_stack, agent.keys.images if agent.frame_stack > 1 else []
        self.frames = {
            key: torch.zeros(num_envs, stack, *shape, dtype=dtype, device=agent.device)
            for key, (shape, dtype) in agent.keys.stored().items()
            if key in stacked
        }
        self.extras: dict[str, Tensor] = {}

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        """Actions after seeing ``obs (N, ...)``; ``sample=False`` takes the mode of the policy."""
        keys = self.agent.keys
        if not keys.spaces.keys() <= obs.keys():  # a robot has no privileged state, and the policy does not ask for it
            keys = self.agent.policy_keys
        seen = {key: self._stack(key, obs[key], is_first) for key in keys.images}
        seen |= {key: obs[key] for key in keys.vectors}
        self.extras, action = self.steps[sample](seen)
        return action

    def _stack(self, key: str, frame: Tensor, is_first: Tensor) -> Tensor:
        """The newest frames ``(N, H, W, stack * C)``, oldest first; an episode's first frame fills the whole stack."""
        if self.agent.frame_stack == 1:
            return frame
        older = torch.cat([self.frames[key][:, 1:], frame.unsqueeze(1)], 1)
        self.frames[key] = torch.where(is_first.view(-1, 1, 1, 1, 1), frame.unsqueeze(1), older)
        return self.frames[key].permute(0, 2, 3, 1, 4).flatten(-2)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.frames)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.frames = {key: value.to(self.agent.device) for key, value in state.items()}
