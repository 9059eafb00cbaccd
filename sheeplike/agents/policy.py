"""Networks that act, apart from what learns, and the player that keeps their state.

Shape letters: ``N`` worlds, ``A`` action, ``K`` discrete actions at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from gymnasium import spaces
from torch import Tensor, nn

from sheeplike.agents.config import AgentConfig
from sheeplike.nn.compilation import Compilation


class PolicyNetworks(nn.Module):
    """What acts: networks with the observations that they take. It has no optimizer and no memory, and learns nothing.

    A subclass writes :meth:`act`, and :meth:`initial` if it has a memory of the episode; see ``howto/add_an_agent.md``.

    Args:
        space: observations of one world.
        config: options of the agent.
        observations: keys that :meth:`act` needs.
        only_for_learning: keys that give the networks their shapes beside these, such as what only a value sees.
        device: where the networks are.
        autocast: makes the context of mixed precision, such as ``fabric.autocast``.

    Attributes:
        observations, only_for_learning: key to space, sorted.
        compiled: how players are made fast; an agent that learns may put another one here.
    """

    def __init__(
        self,
        space: spaces.Dict,
        config: AgentConfig,
        observations: Iterable[str],
        only_for_learning: Iterable[str] = (),
        *,
        device: torch.device | str = "cpu",
        autocast: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        super().__init__()
        self.space, self.config, self.device, self.autocast = space, config, torch.device(device), autocast
        self.observations = {key: space[key] for key in sorted(observations)}
        self.only_for_learning = {key: space[key] for key in sorted(only_for_learning) if key not in self.observations}
        self.compiled = Compilation("off", self.device)

    def initial(self, num_envs: int) -> dict[str, Tensor]:
        """State of a player before its first step: name to ``(N, ...)``."""
        return {}

    def act(
        self, state: dict[str, Tensor], obs: dict[str, Tensor], is_first: Tensor, *, sample: bool = True
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Choose actions after seeing ``obs (N, ...)``; a pure function.

        Args:
            state: of :meth:`initial`, or that the last step returned.
            obs: of :meth:`select`.
            is_first: ``(N,)`` bool; these worlds begin an episode.
            sample: False takes the mode of the policy.

        Returns:
            The next state; actions as the environment takes them, ``(N, A)`` float32, ``(N,)`` or ``(N, K)`` int64; and
            what an agent's ``add`` needs of the step, name to ``(N, ...)``.
        """
        raise NotImplementedError

    def select(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Observations that :meth:`act` takes, in a fixed order."""
        return {key: obs[key] for key in self.observations}

    def player(self, num_envs: int) -> Player:
        """Make a player for ``N`` worlds; it shares these networks and nothing else."""
        return Player(self, num_envs)


class Player:
    """Acts in ``N`` worlds with a state of its own.

    Attributes:
        extras: what an agent's ``add`` needs of the last step.
    """

    def __init__(self, networks: PolicyNetworks, num_envs: int) -> None:
        self.networks, self.state, self.extras = networks, networks.initial(num_envs), {}
        # One for the policy's mode and one for a sample of it.
        acts = [partial(networks.act, sample=sample) for sample in (False, True)]
        self.steps = [networks.compiled.shared_step((num_envs, n), act) for n, act in enumerate(acts)]

    @torch.no_grad()
    def act(self, obs: Mapping[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        """Choose actions after seeing ``obs (N, ...)``; see :meth:`PolicyNetworks.act`."""
        self.state, action, self.extras = self.steps[sample](self.state, self.networks.select(obs), is_first)
        return action

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.state)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.state = {name: torch.empty_like(value).copy_(state[name]) for name, value in self.state.items()}
