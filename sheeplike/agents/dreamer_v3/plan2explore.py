"""Plan2Explore: a second behaviour that seeks what the world model cannot predict yet.

Source: Sekar et al. (2020), "Planning to Explore via Self-Supervised World Models"; ``expl.py`` in the first version of
``danijar/dreamerv3``. An ensemble predicts the next ``stoch`` from features and action. Its disagreement is the reward
of an explorer, which learns in imagination beside the task's behaviour. The explorer acts in training. Evaluations play
the task's behaviour, although it has never acted.

Shape letters: ``E`` members, ``B`` batch, ``T`` sequence, ``I`` imagined steps, ``F`` features, ``A`` action, ``S K``
stoch groups x classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sheeplike.agents.dreamer_v3.actor_critic import ActorCritic, imagination_loss
from sheeplike.agents.dreamer_v3.agent import DreamerV3
from sheeplike.agents.dreamer_v3.config import CONTEXT, Plan2ExploreConfig
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.policy import Player
from sheeplike.nn.layers import init_truncated_normal_


class Ensemble(nn.Module):
    """``E`` networks that predict the same from the same input ``(B, inputs)``, with one batched product per layer.

    They differ in their first weights alone.
    """

    def __init__(self, members: int, inputs: int, units: int, outputs: int, layers: int = 2) -> None:
        super().__init__()
        widths = [inputs, *[units] * layers, outputs]
        shapes = [(members, *shape) for shape in pairwise(widths)]
        self.weights = nn.ParameterList(init_truncated_normal_(torch.empty(shape), shape[1]) for shape in shapes)
        self.biases = nn.ParameterList(torch.zeros(members, 1, shape[2]) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions ``(E, B, outputs)``, float32."""
        x = x.expand(len(self.weights[0]), *x.shape)
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = x if number == 0 else F.silu(F.rms_norm(x.float(), x.shape[-1:], eps=1e-4).to(x.dtype))
            x = torch.bmm(x, weight.to(x.dtype)) + bias.to(x.dtype)
        return x.float()

    def disagreement(self, x: Tensor) -> Tensor:
        """Return the standard deviation ``(...)`` of the predictions for ``x (..., inputs)``, mean over outputs."""
        return self(x.flatten(0, -2)).std(0).mean(-1).unflatten(0, x.shape[:-1])


class Plan2ExploreNetworks(DreamerNetworks):
    """Networks of DreamerV3, an explorer's policy and value, and the ensemble."""

    config: Plan2ExploreConfig
    explorer: ActorCritic
    ensemble: Ensemble

    @property
    def behaviours(self) -> dict[str, ActorCritic]:
        return {"task": self.actor_critic, "explore": self.explorer}

    def make_modules(self) -> dict[str, nn.Module]:
        modules = super().make_modules()
        rssm = modules["world_model"].rssm
        explorer = ActorCritic(rssm.features, self.codec, self.config, unit=0.01)  # disagreement becomes small
        # Narrow members also differ where they have seen much: an error of their own, which hides what is new.
        sizes = rssm.features + self.codec.width, max(self.config.widths.units, 256), rssm.stoch * rssm.classes
        # Share of the bonus in the explorer's advantage, on the device: it changes from step to step.
        self.register_buffer("share", torch.tensor(self.config.explore_scale), persistent=False)
        return modules | {"explorer": explorer, "ensemble": Ensemble(self.config.members, *sizes)}

    def explore(
        self, state: Mapping[str, Tensor], obs: Mapping[str, Tensor], is_first: Tensor, *, sample: bool = True
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Act as the explorer, with arguments and results of :meth:`act`."""
        return self.act(state, obs, is_first, sample=sample, behaviour="explore")


class Plan2Explore(DreamerV3):
    """DreamerV3 that collects with an explorer, which learns by REINFORCE. Arguments are those of DreamerV3."""

    networks_class: ClassVar[type[DreamerNetworks]] = Plan2ExploreNetworks
    config: Plan2ExploreConfig
    networks: Plan2ExploreNetworks

    def _compile(self, mode: str) -> None:
        super()._compile(mode)
        self.compiled.methods(self.networks.explorer, "imagine_step")
        self.compiled.methods(self, "explorer_losses")

    def player(self, num_envs: int, *, explore: bool = False) -> Player:
        return self.networks.player(num_envs, self.networks.explore if explore else None)

    def update(self) -> dict[str, Tensor]:
        self.networks.share.fill_(self.config.share_at(self.ratio.counted))
        return super().update()

    def losses(self, data: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], Latent]:
        losses, metrics, posterior = super().losses(data)
        states = posterior.detach()  # neither ensemble nor explorer shapes them
        action, first = data["action"][:, CONTEXT:-1], data["is_first"][:, CONTEXT + 1 :]
        predicted = self.networks.ensemble(_inputs(states.features[:, :-1], action).flatten(0, 1))
        error = (predicted - states.stoch[:, 1:].flatten(-2).flatten(0, 1)).square().sum(-1).sum(0)
        losses["ensemble"] = error.unflatten(0, first.shape) * ~first  # an action does not lead into the next episode
        starts = states.map(lambda x: x.flatten(0, 1))
        imagined = self.networks.explorer.imagine(self.world_model.rssm, starts, self.config.imagination_length)
        explored, info = self.explorer_losses(*imagined)
        return losses | explored, metrics | info, posterior

    def explorer_losses(self, features: Tensor, actions: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return losses of the explorer's policy and value by name, and metrics.

        The policy follows two advantages, each divided by the scale of its returns: of the bonus, by a critic of its
        own, and of the reward, by the task's critic.

        Args:
            features, actions: imagined, ``(B * T, I + 1, F)`` and ``(B * T, I + 1, A)``.
        """
        explorer, task, world = self.networks.explorer, self.actor_critic, self.world_model
        options = {"return_lambda": self.config.return_lambda, "entropy_scale": self.config.entropy_scale}
        with torch.no_grad():
            bonus = self.networks.ensemble.disagreement(_inputs(features[:, :-1], actions[:, :-1]))
            bonus = F.pad(bonus, (1, 0))  # for arriving at the next state
            reward, cont = self.imagined_reward(features, actions), world.cont(features).prob()
            value, slow = task.value(features), explorer.slow_value(features)
        policy = explorer.policy(features)
        found, _, about = imagination_loss(
            actions, bonus, cont, policy, explorer.value(features), slow, explorer.return_scale, **options
        )
        by_task, *_ = imagination_loss(
            actions, reward, cont, policy, value, value, task.return_scale, update_scale=False, **options
        )
        share = self.networks.share
        mixed = share * found["policy"] + (1 - share) * by_task["policy"]
        losses = {"explorer_policy": mixed, "explorer_value": found["value"]}
        shown = ("actor/entropy", "actor/imagined_return", "actor/return_scale", "critic/value")
        metrics = {f"explorer/{name.partition('/')[2]}": about[name] for name in shown}
        return losses, metrics | {"explorer/bonus": bonus[:, 1:].mean(), "explorer/share": share.clone()}


def _inputs(features: Tensor, action: Tensor) -> Tensor:
    """Return inputs of the ensemble, with actions as the recurrent model takes them."""
    return torch.cat([features, action.clamp(-1, 1)], -1)
