"""Learning behaviour in imagination: policy, value, slow value and their losses.

Source: DreamerV3 (Hafner et al., 2025), "Critic learning" and "Actor learning"; ``danijar/dreamerv3`` ``agent.py``:
``imag_loss``, ``repl_loss``, ``lambda_return``. The losses are pure functions of distributions and tensors.

Shape letters: ``B`` sequences or imagined rollouts, ``T`` steps of a sequence, ``I`` imagined steps, ``A`` action,
``F`` features. States run from 0 to ``I``, so ``I + 1`` of them; the last only bootstraps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from sheeplike.agents.dreamer_v3.config import DreamerV3Config
from sheeplike.agents.dreamer_v3.rssm import RSSM, Latent, cast_weights
from sheeplike.agents.dreamer_v3.world_model import TwoHotHead
from sheeplike.agents.spaces import ActionCodec
from sheeplike.nn.distributions import BoundedNormal, JointCategorical, OneHotCategorical, TwoHot, categorical
from sheeplike.nn.layers import MLP, Linear
from sheeplike.nn.normalizers import PercentileScale

ActionDistribution = BoundedNormal | OneHotCategorical | JointCategorical


class Policy(nn.Module):
    """Features ``(..., F)`` to an action distribution; nearly uniform at initialisation (output scale 0.01)."""

    def __init__(self, inputs: int, codec: ActionCodec, units: int, *, layers: int = 3, unimix: float) -> None:
        super().__init__()
        self.classes, self.unimix = codec.classes, unimix
        self.net = MLP(inputs, units, layers)
        # Mean and deviation are separate layers because gradients are clipped per tensor.
        self.heads = nn.ModuleList(Linear(units, codec.width, scale=0.01) for _ in range(1 if codec.discrete else 2))

    def forward(self, features: Tensor) -> ActionDistribution:
        hidden = self.net(features)
        out = torch.cat([head(hidden) for head in self.heads], -1)
        return categorical(out, self.classes, self.unimix) if self.classes else BoundedNormal(out)


class ActorCritic(nn.Module):
    """Policy, value, slow value and the scale of returns.

    Args:
        unit: of the rewards, by default that of ``reward_scaling``; returns are divided by at least as much.
    """

    def __init__(self, features: int, codec: ActionCodec, config: DreamerV3Config, unit: float | None = None) -> None:
        super().__init__()
        units, unit = config.widths.units, 1 / config.reward_scaling if unit is None else unit
        self.policy = Policy(features, codec, units, unimix=config.policy_unimix)
        self.value = TwoHotHead(features, units, layers=3, unit=unit)
        # It starts with the same weights. It regularises the fast critic and is no target network.
        self.slow_value = TwoHotHead(features, units, layers=3, unit=unit).requires_grad_(False)
        self.slow_value.load_state_dict(self.value.state_dict())
        self.return_scale = PercentileScale(limit=unit)

    def imagine(self, rssm: RSSM, start: Latent, length: int, policy: Policy | None = None) -> tuple[Tensor, Tensor]:
        """Roll the policy out in the model from ``start (B, ...)``.

        Args:
            policy: takes the gradient through features and actions; None: there is none.

        Returns:
            Features ``(B, length + 1, F)`` and actions ``(B, length + 1, A)``; the last action is never scored.
        """
        with torch.set_grad_enabled(policy is not None and torch.is_grad_enabled()):
            weights: tuple[Mapping[str, Tensor], ...] = ({}, {})
            if policy is None:
                policy, device = self.policy, start.deter.device.type
                if torch.is_autocast_enabled(device):
                    weights = cast_weights(rssm, device), cast_weights(policy, device)
            latent = start.detach()
            action = policy(latent.features).rsample()
            features, actions = [latent.features], [action]
            for _ in range(length):
                latent, feature, action = self.imagine_step(rssm, policy, weights, latent, action)
                features.append(feature)
                actions.append(action)
            return torch.stack(features, 1), torch.stack(actions, 1)

    def imagine_step(
        self, rssm: RSSM, policy: Policy, weights: tuple[Mapping[str, Tensor], ...], latent: Latent, action: Tensor
    ) -> tuple[Latent, Tensor, Tensor]:
        """Return the next latent, its features ``(B, F)`` and the action chosen there.

        Args:
            weights: tensors by name that replace those of the model, and those of the policy.
        """
        latent = _call(rssm, weights[0], latent, action)
        # An actor sees features without gradient, as in every version of Dreamer.
        return latent, latent.features, _call(policy, weights[1], latent.features.detach()).rsample()


def _call(module: nn.Module, weights: Mapping[str, Tensor], *inputs: Any) -> Any:
    """Call a module, with other weights if there are any; eagerly ``functional_call`` costs half a millisecond."""
    return functional_call(module, dict(weights), inputs) if weights else module(*inputs)


def lambda_return(
    last: Tensor, terminal: Tensor, reward: Tensor, bootstrap: Tensor, discount: float, return_lambda: float
) -> Tensor:
    """Return TD(lambda) returns ``(B, T)`` of states ``0 .. T-1`` from ``(B, T + 1)`` inputs.

    The return of step ``t`` uses reward, termination and bootstrap of step ``t + 1``: rewards are for arriving. At a
    truncated step (``last`` without ``terminal``) the average over longer returns stops and the bootstrap stands in for
    the rest; at a terminal step nothing follows.

    Args:
        last: 1 where an episode ends, by termination or truncation.
        terminal: 1 where it terminates, or the probability of that.
        bootstrap: value of each state.
    """
    assert last.shape == terminal.shape == reward.shape == bootstrap.shape
    live = (1 - terminal.float())[:, 1:] * discount
    keep = (1 - last.float())[:, 1:] * return_lambda
    # ret[t] = known[t] + follow[t] * ret[t + 1] for all t at once: each pass doubles the steps that ret[t] sums up.
    known = reward[:, 1:] + (1 - keep) * live * bootstrap[:, 1:]
    ret = torch.cat([known, bootstrap[:, -1:]], 1)
    follow = F.pad(live * keep, (0, 1))
    for summed in [2**i for i in range(known.shape[1].bit_length())]:
        ret = ret + follow * F.pad(ret[:, summed:], (0, summed))
        follow = follow * F.pad(follow[:, summed:], (0, summed))
    return ret[:, :-1]


def imagination_loss(
    action: Tensor,
    reward: Tensor,
    cont: Tensor,
    policy: ActionDistribution,
    value: TwoHot,
    slow_value: TwoHot,
    scale: PercentileScale | None,
    *,
    return_lambda: float,
    entropy_scale: float,
    slow_scale: float = 1.0,
    update_scale: bool = True,
    reinforced: ActionDistribution | None = None,
    through: TwoHot | None = None,
    dynamics: float = 0.0,
) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Return actor and critic losses on imagined rollouts.

    Args:
        action: ``(B, I + 1, A)`` as sampled.
        reward, cont: ``(B, I + 1)`` predictions for every state, the first included: mean reward, and probability that
            the episode goes on times the discount of the horizon, so the discount here is 1.
        policy, value, slow_value: distributions over the ``(B, I + 1)`` states.
        scale: range of returns; updated here. None: the range will be that of all ranks, and is not known yet.
        update_scale: False leaves the range as it is.
        reinforced: without a scale, ``policy`` from a copy of its parameters, which takes the gradient of REINFORCE.
        through: ``value`` with the gradient of the imagined features, as ``reward`` and ``cont`` then have it too.
        dynamics: share of that gradient, of the advantage; the rest is REINFORCE (Hafner et al., 2021, "Mastering Atari
            with discrete world models", its ``actor_grad_mix``; the advantage as in DreamerV3's first version).

    Returns:
        Losses ``policy`` and ``value``, each ``(B, I)``; returns ``(B, I)``; 0-dim metrics. Without a scale, the loss
        ``reinforce`` still has to be divided by it, ``policy`` holds the entropy alone, and the metric ``returns``
        ``(2, B, I)`` stacks returns and errors, the arguments of :func:`return_metrics`.
    """
    val, slow = value.pred(), slow_value.pred().detach()
    weight = torch.cumprod(cont, 1).detach()
    # Targets bootstrap the fast value; the slow one only regularises.
    ret = lambda_return(torch.zeros_like(cont), 1 - cont, reward, val, 1.0, return_lambda).detach()
    error, weight, losses = ret - val[:, :-1].detach(), weight[:, :-1], {}
    scored = policy if reinforced is None else reinforced
    log_prob, entropy = scored.log_prob(action.detach())[:, :-1], policy.entropy()[:, :-1]
    advantage = None
    if through is not None:
        bootstrap = through.smooth_pred()
        advantage = lambda_return(torch.zeros_like(cont), 1 - cont, reward, bootstrap, 1.0, return_lambda)
        advantage = dynamics * (advantage - bootstrap[:, :-1])
    # REINFORCE for discrete and continuous actions alike.
    if scale is None:
        # The gradient is linear in the scale, so it can be divided once the returns of all ranks are known.
        score = log_prob * error
        losses["reinforce"] = -weight * (score if advantage is None else advantage + (1 - dynamics) * score)
        losses["policy"] = -weight * (entropy_scale * entropy)
        about_returns = {"returns": torch.stack([ret, error])}
    else:
        spread = scale.update(ret) if update_scale else scale.current()
        score = log_prob * (error / spread)
        score = score if advantage is None else advantage / spread + (1 - dynamics) * score
        losses["policy"] = -weight * (score + entropy_scale * entropy)
        about_returns = return_metrics(ret, error, spread)
    padded = torch.cat([ret, torch.zeros_like(ret[:, -1:])], 1)
    losses["value"] = weight * (value.loss(padded) + slow_scale * value.loss(slow))[:, :-1]
    metrics = about_returns | {
        "actor/entropy": entropy.mean(),
        "critic/value": val.mean(),
        "critic/slow_value": slow.mean(),
        "wm/imagined_reward": reward.mean(),
        "wm/imagined_continue": cont.mean(),
    }
    return losses, ret, {k: v.detach() for k, v in metrics.items()}


def return_metrics(returns: Tensor, error: Tensor, spread: Tensor) -> dict[str, Tensor]:
    """Return 0-dim metrics of imagined ``returns``, what the critic missed of them, and their scale."""
    return {
        "actor/advantage_std": (error / spread).std(),
        "actor/return_scale": spread,
        "actor/imagined_return": returns.mean(),
        "critic/explained_variance": 1 - error.var() / returns.var().clamp_min(1e-8 * spread.square()),
    }


def replay_value_loss(
    last: Tensor,
    terminal: Tensor,
    reward: Tensor,
    bootstrap: Tensor,
    value: TwoHot,
    slow_value: TwoHot,
    *,
    horizon: float,
    return_lambda: float,
    slow_scale: float = 1.0,
) -> Tensor:
    """Return the critic loss on replayed sequences, ``(B, T - 1)``; its gradient reaches the world model.

    Rewards and endings are the real ones, without the horizon, so the discount is ``1 - 1/horizon``.
    ``bootstrap (B, T)`` are the imagined returns that start at each replayed state.
    """
    slow = slow_value.pred().detach()
    ret = lambda_return(last, terminal, reward, bootstrap, 1 - 1 / horizon, return_lambda).detach()
    padded = torch.cat([ret, torch.zeros_like(ret[:, -1:])], 1)
    weight = 1 - last.float()
    return (weight * (value.loss(padded) + slow_scale * value.loss(slow)))[:, :-1]
