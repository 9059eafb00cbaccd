"""The world model: encoder, recurrent state-space model, decoder, reward and continue heads, and their losses.

Source: DreamerV3 (Hafner et al., 2025), "World model learning"; ``danijar/dreamerv3`` ``agent.py``.

Shape letters: ``B`` batch, ``T`` time, ``A`` action, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from sheeplike.agents.dreamer_v3.observations import Decoder, Encoder, ModelKeys
from sheeplike.agents.dreamer_v3.rssm import RSSM, Latent
from sheeplike.agents.dreamer_v3.sizes import Size
from sheeplike.nn.distributions import Bernoulli, TwoHot, TwoHotBins, categorical_kl, symlog
from sheeplike.nn.layers import MLP, Linear


class TwoHotHead(nn.Module):
    """Features ``(..., F)`` to a symexp two-hot distribution that predicts exactly 0.0 at initialisation."""

    def __init__(self, inputs: int, units: int, layers: int, bins: int = 255) -> None:
        super().__init__()
        self.net = nn.Sequential(MLP(inputs, units, layers), Linear(units, bins, scale=0.0))
        self.bins = TwoHotBins(bins)

    def forward(self, features: Tensor) -> TwoHot:
        return self.bins(self.net(features))


class ContinueHead(nn.Module):
    """Features ``(..., F)`` to the probability that the episode goes on, the discount included."""

    def __init__(self, inputs: int, units: int, layers: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(MLP(inputs, units, layers), Linear(units, 1))

    def forward(self, features: Tensor) -> Bernoulli:
        return Bernoulli(self.net(features))


class WorldModel(nn.Module):
    """Everything that predicts what the environment does.

    Args:
        keys: the observations that it sees.
        predicted: those that it predicts; None: the same. What it predicts without seeing it is a target: its loss
            shapes the latent state, as that of any other observation does, and nobody needs it for acting.
        actions: width of the action.
        size: widths of the networks.
        horizon: effective planning horizon in steps. It is folded into the continue target, ``1 - 1/horizon``, so
            that imagination needs no other discount.
    """

    def __init__(
        self,
        keys: ModelKeys,
        actions: int,
        size: Size,
        *,
        stoch: int = 32,
        blocks: int = 8,
        unimix: float = 0.01,
        free_nats: float = 1.0,
        horizon: float = 333.0,
        predicted: ModelKeys | None = None,
    ) -> None:
        super().__init__()
        self.horizon = horizon
        predicted = keys if predicted is None else predicted
        self.targets = [key for key in predicted.spaces if key not in keys.spaces]
        self.encoder = Encoder(keys, depth=size.depth, units=size.units)
        self.rssm = RSSM(
            self.encoder.outputs,
            actions,
            deter=size.deter,
            hidden=size.hidden,
            classes=size.classes,
            stoch=stoch,
            blocks=blocks,
            unimix=unimix,
            free_nats=free_nats,
        )
        flat = stoch * size.classes
        widths = {"depth": size.depth, "units": size.units, "blocks": blocks}
        self.decoder = Decoder(predicted, deter=size.deter, stoch=flat, **widths)
        self.reward = TwoHotHead(self.rssm.features, size.units, layers=1)
        self.cont = ContinueHead(self.rssm.features, size.units)

    def observe(
        self, latent: Latent, action: Tensor, obs: Mapping[str, Tensor], is_first: Tensor
    ) -> tuple[Latent, Tensor]:
        """Encode observations ``(B, T, ...)`` and follow them; see :meth:`RSSM.observe`."""
        embed = self.encoder({key: obs[key].flatten(0, 1) for key in self.encoder.keys.spaces})
        return self.rssm.observe(latent, action, embed.unflatten(0, is_first.shape), is_first)

    def losses(
        self, posterior: Latent, logits: Tensor, batch: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Losses and metrics of one batch of sequences.

        Args:
            posterior: states ``(B, T, ...)`` with gradient.
            logits: posterior logits ``(B, T, S, K)``.
            batch: ``(B, T, ...)`` observations, ``reward`` float32, ``is_terminal`` bool.

        Returns:
            Losses ``(B, T)`` by name: one per observation key, ``reward``, ``continue``, ``dyn``, ``rep``; and 0-dim
            metrics.
        """
        rssm = self.rssm
        prior = rssm.prior(posterior.deter).float()
        dyn, rep = rssm.kl(logits, prior)
        kl = categorical_kl(rssm.distribution(logits.detach()), rssm.distribution(prior.detach()))
        flat = posterior.map(lambda x: x.flatten(0, 1))
        lead = batch["reward"].shape
        obs = {key: batch[key].flatten(0, 1) for key in self.decoder.keys.spaces}
        predicted = self.decoder(flat)
        losses = {key: loss.unflatten(0, lead) for key, loss in self.decoder.losses(predicted, obs).items()}
        reward = self.reward(posterior.features)
        # Only termination ends the future: a truncated episode would have gone on.
        goes_on = (1 - batch["is_terminal"].float()) * (1 - 1 / self.horizon)
        losses |= {
            "reward": reward.loss(batch["reward"]),
            "continue": self.cont(posterior.features).loss(goes_on),
            "dyn": dyn,
            "rep": rep,
        }
        metrics = {
            "wm/kl": kl.mean(),
            "wm/posterior_entropy": rssm.distribution(logits).entropy().sum(-1).mean(),
            "wm/prior_entropy": rssm.distribution(prior).entropy().sum(-1).mean(),
            "wm/reward_error": (reward.pred() - batch["reward"]).abs().mean(),
        }
        for key in self.decoder.keys.images:
            mse = losses[key].mean() / batch[key][0, 0].numel()
            metrics[f"wm/psnr/{key.removeprefix('pixels/')}"] = -10 * mse.log10()
        for key in (key for key in self.targets if key in self.decoder.keys.vectors):
            # How much the latent knows of what nobody showed it: 1 is all of it, 0 no more than its mean.
            truth = symlog(obs[key])
            spread = (truth - truth.mean(0)).square().sum(-1).mean()
            metrics[f"wm/explained_variance/{key}"] = 1 - losses[key].mean() / spread.clamp_min(1e-8)
        return losses, {key: value.detach() for key, value in metrics.items()}
