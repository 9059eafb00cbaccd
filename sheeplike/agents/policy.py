"""Networks that act, and the player that keeps their state for ``N`` worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType

import torch
from gymnasium import spaces
from torch import Tensor, nn

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.config import AgentConfig
from sheeplike.nn.compilation import Compilation


class PolicyNetworks(nn.Module):
    """Networks that act: no optimizer, no memory. See ``howto/add_an_agent.md``.

    Attributes:
        space, actions: observations and actions of one world.
        config: options of the agent.
        observations: what :meth:`act` needs, key to space, sorted.
        only_for_learning: observations that :meth:`act` does not need, such as inputs of the value alone.
        device: device of the networks.
        autocast: maker of the context of mixed precision, such as ``fabric.autocast``.
        compiled: compilation of players; a learner may replace it.
    """

    only_for_learning: Mapping[str, spaces.Space] = MappingProxyType({})
    observations: Mapping[str, spaces.Space]

    def __init__(
        self,
        space: spaces.Dict,
        actions: spaces.Space,
        config: AgentConfig,
        *,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager] = nullcontext,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.space, self.actions, self.config = space, actions, config
        self.device, self.autocast = torch.device(device), autocast
        self.compiled = Compilation("off", self.device)
        with own_randomness(self.device, seed):
            self.build()
            self.to(self.device)

    def build(self) -> None:
        """Set ``observations`` and make the networks, as attributes.

        Raises:
            ValueError: the options do not suit the spaces.
        """
        raise NotImplementedError

    def initial(self, num_envs: int) -> dict[str, Tensor]:
        """Return the state before the first step, name to ``(N, ...)``."""
        return {}

    def act(
        self, state: dict[str, Tensor], obs: dict[str, Tensor], is_first: Tensor, *, sample: bool = True
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Choose actions after seeing ``obs (N, ...)``; a pure function, called without gradients.

        Args:
            obs: observations of :meth:`select`.
            is_first: ``(N,)`` bool, where an episode begins.
            sample: False takes the mode of the policy.

        Returns:
            The next state; actions as the environment takes them; extras of the :class:`~sheeplike.agents.agent.Step`.
        """
        raise NotImplementedError

    def select(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the observations that :meth:`act` takes, in a fixed order."""
        return {key: obs[key] for key in self.observations}

    def player(self, num_envs: int, act: Callable | None = None) -> Player:
        """Return a player for ``N`` worlds; it shares these networks and nothing else.

        Args:
            act: method in place of :meth:`act`.
        """
        return Player(self, num_envs, self.act if act is None else act)


class Player:
    """Actor in ``N`` worlds; ``extras`` belong to the last step."""

    def __init__(self, networks: PolicyNetworks, num_envs: int, act: Callable) -> None:
        self.networks, self.state, self.extras = networks, networks.initial(num_envs), {}
        make = networks.compiled.shared_step
        self.steps = {
            sample: make((num_envs, sample, act.__name__), partial(act, sample=sample)) for sample in (False, True)
        }

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        seen = self.networks.select(obs)
        for key, value in seen.items():  # images of another dtype would be scaled differently
            if (value.dtype == torch.uint8) != (self.networks.space[key].dtype == "uint8"):
                raise TypeError(f"{key}: {value.dtype}, expected torch.{self.networks.space[key].dtype}")
        self.state, action, self.extras = self.steps[sample](self.state, seen, is_first)
        return action

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.state = {name: torch.empty_like(value).copy_(state[name]) for name, value in self.state.items()}
