"""Networks of DreamerV3: world model, policy and value.

Shape letters: ``N`` worlds, ``A`` action, ``D`` deter, ``S K`` stoch groups x classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic
from sheeplike.agents.dreamer_v3.config import DreamerV3Config
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.storage import ModelKeys, pack_latent
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.agents.policy import PolicyNetworks
from sheeplike.agents.spaces import ActionCodec


class DreamerNetworks(PolicyNetworks):
    """World model, policy and value; what a subclass adds is optimised, saved and exported with them.

    Attributes:
        keys: observations that the model sees.
        predicted: observations that it predicts: these and the targets. Without reconstruction, images and targets.
        known: observations that it sees or predicts.
    """

    config: DreamerV3Config
    world_model: WorldModel
    actor_critic: ActorCritic

    def build(self) -> None:
        self.keys = ModelKeys(self.space, self.config.observations)
        self.known = self.predicted = self.keys.with_targets(self.space, self.config.targets)
        self.observations = self.keys.spaces
        self.only_for_learning = {k: self.space[k] for k in self.known.spaces if k not in self.observations}
        if self.config.representation == "barlow":
            if shown := [key for key in self.only_for_learning if key in self.known.images]:
                raise ValueError(f"target {shown[0]!r}: expected vectors, or agent.representation=reconstruction")
            images = self.keys.images if self.config.decoder else []
            self.predicted = ModelKeys(self.space, [*self.only_for_learning, *images])
        self.codec = ActionCodec(self.actions)
        for name, module in self.make_modules().items():
            self.add_module(name, module)

    @property
    def behaviours(self) -> dict[str, ActorCritic]:
        """Return policies with their values by name; ``task`` is the one that is evaluated."""
        return {"task": self.actor_critic}

    def make_modules(self) -> dict[str, nn.Module]:
        """Return the networks by name."""
        world_model = WorldModel(self.keys, self.codec.width, self.config, predicted=self.predicted)
        actor_critic = ActorCritic(world_model.rssm.features, self.codec, self.config)
        return {"world_model": world_model, "actor_critic": actor_critic}

    def initial(self, num_envs: int) -> dict[str, Tensor]:
        latent = self.world_model.rssm.initial(num_envs, self.device)
        action = torch.zeros(num_envs, self.codec.width, device=self.device)
        return {"deter": latent.deter, "stoch": latent.stoch, "action": action}

    @torch.no_grad()
    def act(
        self,
        state: Mapping[str, Tensor],
        obs: Mapping[str, Tensor],
        is_first: Tensor,
        *,
        sample: bool = True,
        behaviour: str = "task",
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Update the latent with the observation and choose; the authors evaluate with ``sample=True`` too."""
        latent = Latent(state["deter"], state["stoch"])
        with self.autocast():
            latent, action = self._act(latent, state["action"], obs, is_first, sample, behaviour)
        state = {"deter": latent.deter, "stoch": latent.stoch, "action": action}
        return state, self.codec.to_env(action), pack_latent(latent)

    def _act(
        self, latent: Latent, action: Tensor, obs: Mapping[str, Tensor], is_first: Tensor, sample: bool, behaviour: str
    ) -> tuple[Latent, Tensor]:
        step = {key: value.unsqueeze(1) for key, value in obs.items()}
        latent, *_ = self.world_model.observe(latent, action.unsqueeze(1), step, is_first.unsqueeze(1))
        latent = latent.map(lambda x: x.squeeze(1))
        policy = self.behaviours[behaviour].policy(latent.features)
        return latent, policy.sample() if sample else policy.mode()
