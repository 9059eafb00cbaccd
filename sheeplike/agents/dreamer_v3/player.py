"""Acting with a memory of one latent state for each world."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sheeplike.agents.dreamer_v3.experience import compact
from sheeplike.agents.dreamer_v3.rssm import Latent

if TYPE_CHECKING:
    from sheeplike.agents.dreamer_v3.agent import DreamerV3


class DreamerPlayer:
    """Follows ``N`` worlds with the agent's model and samples its policy.

    Attributes:
        extras: latents of the last :meth:`act`, as the replay stores them.
    """

    def __init__(self, agent: DreamerV3, num_envs: int) -> None:
        self.agent = agent
        # One for the policy's mode and one for a sample of it.
        act = [partial(agent.act, sample=sample) for sample in (False, True)]
        self.steps = [agent.compiled.shared_step((num_envs, n), step) for n, step in enumerate(act)]
        self.latent = agent.world_model.rssm.initial(num_envs, agent.device)
        self.action = torch.zeros(num_envs, agent.codec.width, device=agent.device)
        self.extras = compact(self.latent)

    def act(self, obs: Mapping[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        """Actions after seeing ``obs (N, ...)``; worlds with ``is_first (N,)`` begin from the zero state.

        The authors evaluate with ``sample=True`` too; ``False`` takes the mode of the policy.
        """
        seen = {key: obs[key] for key in self.agent.keys.spaces}
        self.latent, self.action = self.steps[sample](self.latent, self.action, seen, is_first)
        self.extras = compact(self.latent)
        return self.agent.codec.to_env(self.action)

    def state_dict(self) -> dict[str, Tensor]:
        return {"deter": self.latent.deter, "stoch": self.latent.stoch, "action": self.action}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        device = self.agent.device
        self.latent = Latent(state["deter"].to(device), state["stoch"].to(device))
        self.action = state["action"].to(device)
