"""The world model: encoder, recurrent state-space model, decoder, reward and continue heads, and their losses.

Source: DreamerV3 (Hafner et al., 2025), "World model learning"; ``danijar/dreamerv3`` ``agent.py`` and ``rssm.py``.

Shape letters: ``B`` batch, ``T`` time, ``A`` action, ``F`` features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from sheeplike.agents.agent import Prediction, own_randomness
from sheeplike.agents.dreamer_v3.config import DreamerV3Config
from sheeplike.agents.dreamer_v3.rssm import RSSM, Latent, stack_latents
from sheeplike.agents.dreamer_v3.storage import ModelKeys
from sheeplike.nn.cnn import to_pixels, to_unit
from sheeplike.nn.distributions import Bernoulli, TwoHot, TwoHotBins, categorical_kl, symlog
from sheeplike.nn.layers import MLP, Linear
from sheeplike.nn.normalizers import RunningNorm
from sheeplike.nn.vision import ImageDecoder, ImageEncoder
from sheeplike.ranks import ALONE, Ranks


class Encoder(nn.Module):
    """Observations ``(B, ...)`` to an embedding ``(B, outputs)``."""

    def __init__(self, keys: ModelKeys, *, depth: int, units: int, layers: int = 3) -> None:
        super().__init__()
        self.keys = keys
        self.outputs = 0
        if keys.vectors:
            self.mlp = MLP(sum(map(keys.width, keys.vectors)), units, layers)
            self.outputs += units
        for images in keys.sizes:
            cnn = ImageEncoder(images.height, images.width, sum(images.channels.values()), depth)
            self.add_module(images.name, cnn)
            self.outputs += cnn.outputs

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        parts = []
        if self.keys.vectors:
            parts.append(self.mlp(torch.cat([symlog(obs[key].float()) for key in self.keys.vectors], -1)))
        parts += [getattr(self, images.name)(images.read(obs)) for images in self.keys.sizes]
        return torch.cat(parts, -1)


class Decoder(nn.Module):
    """Latents to predicted observations: images in [0, 1], vectors in symlog space."""

    def __init__(
        self, keys: ModelKeys, *, deter: int, stoch: int, depth: int, units: int, blocks: int = 8, layers: int = 3
    ) -> None:
        super().__init__()
        self.keys = keys
        if keys.vectors:
            self.mlp = MLP(deter + stoch, units, layers)
            self.heads = nn.ModuleList(Linear(units, keys.width(key)) for key in keys.vectors)
        for images in keys.sizes:
            channels, size = sum(images.channels.values()), {"depth": depth, "units": units, "blocks": blocks}
            self.add_module(images.name, ImageDecoder(deter, stoch, images.height, images.width, channels, **size))

    def forward(self, latent: Latent, *, shaping: bool = True) -> dict[str, Tensor]:
        """Return images ``(B, H, W, C)`` and vectors ``(B, D)``, float32, by key.

        Args:
            shaping: the latents get the gradient of images too.
        """
        out: dict[str, Tensor] = {}
        if self.keys.vectors:
            hidden = self.mlp(latent.features)
            out |= {key: head(hidden).float() for key, head in zip(self.keys.vectors, self.heads, strict=True)}
        latent = latent if shaping else latent.detach()
        for images in self.keys.sizes:
            image = getattr(self, images.name)(latent.deter, latent.stoch.flatten(-2))
            out |= dict(zip(images.channels, image.split(list(images.channels.values()), -1), strict=True))
        return out

    def losses(self, predicted: Mapping[str, Tensor], obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return squared errors ``(B,)`` by key, *summed* over pixels and channels, or over the vector."""
        losses = {}
        for key in self.keys.images:
            losses[key] = (predicted[key] - to_unit(obs[key])).square().sum((-3, -2, -1))
        for key in self.keys.vectors:
            losses[key] = (predicted[key] - symlog(obs[key].float())).square().sum(-1)
        return losses


class TwoHotHead(nn.Module):
    """Features ``(..., F)`` to a symexp two-hot distribution that predicts exactly 0.0 at initialisation.

    Args:
        unit: of what is predicted; the bins are as fine as if it were 1.
    """

    def __init__(self, inputs: int, units: int, layers: int, unit: float = 1.0, bins: int = 255) -> None:
        super().__init__()
        self.net = nn.Sequential(MLP(inputs, units, layers), Linear(units, bins, scale=0.0))
        self.bins = TwoHotBins(bins, unit)

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
    """Encoder, recurrent model, decoder and heads.

    Args:
        keys: observations that it sees.
        predicted: observations that it predicts; None: those that it sees. Vectors that it predicts without seeing them
            are whitened, since their units differ: a millimetre may matter as much as a radian.
        actions: width of the action.
        config: options of the agent. Its ``horizon`` is folded into the continue target, ``1 - 1/horizon``, so that
            imagination needs no other discount.
        encoder: in place of :class:`Encoder`, with its attributes ``keys`` and ``outputs``.
    """

    def __init__(
        self,
        keys: ModelKeys,
        actions: int,
        config: DreamerV3Config,
        *,
        predicted: ModelKeys | None = None,
        encoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.horizon, size = config.horizon, config.widths
        predicted = keys if predicted is None else predicted
        self.whitened = [key for key in predicted.vectors if key not in keys.spaces]
        self.norms = nn.ModuleList(RunningNorm(predicted.width(key)) for key in self.whitened)
        self.encoder = Encoder(keys, depth=size.depth, units=size.units) if encoder is None else encoder
        self.rssm = RSSM(
            self.encoder.outputs,
            actions,
            deter=size.deter,
            hidden=size.hidden,
            classes=size.classes,
            unimix=config.unimix,
            free_nats=config.free_nats,
        )
        flat = self.rssm.stoch * size.classes
        self.reconstructs = config.representation == "reconstruction"
        # A decoder of images that shapes nothing takes no random numbers from the networks behind it.
        with nullcontext() if self.reconstructs else own_randomness("cpu"):
            self.decoder = Decoder(predicted, deter=size.deter, stoch=flat, depth=size.depth, units=size.units)
        if not self.reconstructs:
            self.projector = Linear(self.rssm.features, self.encoder.outputs)
        self.reward = TwoHotHead(self.rssm.features, size.units, layers=1, unit=1 / config.reward_scaling)
        self.cont = ContinueHead(self.rssm.features, size.units)

    def observe(
        self, latent: Latent, action: Tensor, obs: Mapping[str, Tensor], is_first: Tensor
    ) -> tuple[Latent, Tensor, Tensor]:
        """Encode observations ``(B, T, ...)`` and infer the latents.

        Returns:
            States and logits of :meth:`RSSM.observe`, and the encoded observations ``(B, T, E)``.
        """
        embed = self.encoder({key: obs[key].flatten(0, 1) for key in self.encoder.keys.spaces})
        embed = embed.unflatten(0, is_first.shape)
        return *self.rssm.observe(latent, action, embed, is_first), embed

    def continue_prob(self, features: Tensor) -> Tensor:
        """Return the probability ``(...)`` that the episode goes on, without the horizon."""
        return (self.cont(features).prob() / (1 - 1 / self.horizon)).clamp(max=1)

    def update_norms(self, obs: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
        """Update the whitening of targets with ``obs (N, ...)`` of all ranks."""
        for key, norm in zip(self.whitened, self.norms, strict=True):
            norm.update(obs[key], ranks)

    def losses(
        self, posterior: Latent, logits: Tensor, batch: Mapping[str, Tensor], embed: Tensor | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return losses by name, ``(B, T)`` each, ``barlow`` 0-dim, and 0-dim metrics.

        Args:
            posterior: states ``(B, T, ...)`` with gradient.
            logits: posterior logits ``(B, T, S, K)``.
            batch: ``(B, T, ...)`` observations, ``reward`` float32, ``is_terminal`` bool.
            embed: encoded observations ``(B, T, E)``; without reconstruction.
        """
        rssm = self.rssm
        seen, foreseen = rssm.distribution(logits), rssm.distribution(rssm.prior(posterior.deter))
        dyn, rep = rssm.kl(seen, foreseen)
        kl = categorical_kl(seen.detach(), foreseen.detach())
        flat = posterior.map(lambda x: x.flatten(0, 1))
        lead = batch["reward"].shape
        obs = {key: batch[key].flatten(0, 1) for key in self.decoder.keys.spaces}
        obs |= {key: norm(obs[key]) for key, norm in zip(self.whitened, self.norms, strict=True)}
        predicted = self.decoder(flat, shaping=self.reconstructs)
        losses = {key: loss.unflatten(0, lead) for key, loss in self.decoder.losses(predicted, obs).items()}
        reward = self.reward(posterior.features)
        # Only termination is learned as an end: a truncated episode would have gone on.
        goes_on = (1 - batch["is_terminal"].float()) * (1 - 1 / self.horizon)
        losses |= {
            "reward": reward.loss(batch["reward"]),
            "continue": self.cont(posterior.features).loss(goes_on),
            "dyn": dyn,
            "rep": rep,
        }
        if not self.reconstructs:
            losses["barlow"] = barlow_loss(self.projector(flat.features), embed.detach().flatten(0, 1))
        metrics = {
            "wm/kl": kl.mean(),
            "wm/posterior_entropy": seen.detach().entropy().sum(-1).mean(),
            "wm/prior_entropy": foreseen.detach().entropy().sum(-1).mean(),
            "wm/reward_error": (reward.pred() - batch["reward"]).abs().mean(),
        }
        # By sign of the reward: rare rewards vanish in the overall mean. NaN if the batch has none; averages skip it.
        likelihood, signs = -losses["reward"].detach(), batch["reward"].sign()
        for sign, name in enumerate(("negative", "zero", "positive"), start=-1):
            chosen = torch.where(signs == sign, likelihood, math.nan)
            metrics[f"wm/reward_log_likelihood/{name}"] = chosen.nanmean()
        for key in self.decoder.keys.images:
            mse = losses[key].mean() / batch[key][0, 0].numel()
            metrics[f"wm/psnr/{key.removeprefix('pixels/')}"] = -10 * mse.log10()
        for key in self.whitened:
            # Explained variance of targets that the encoder never sees: 1 perfect, 0 no better than the mean.
            truth = symlog(obs[key])
            spread = (truth - truth.mean(0)).square().sum(-1).mean()
            metrics[f"wm/explained_variance/{key}"] = 1 - losses[key].mean() / spread.clamp_min(1e-8)
        return losses, {key: value.detach() for key, value in metrics.items()}


def barlow_loss(projected: Tensor, target: Tensor, redundancy: float = 5e-4) -> Tensor:
    """Return how far the correlations of two batches of vectors ``(B, E)`` over ``B`` are from the unit matrix.

    Source: Barlow Twins (Zbontar et al., 2021), as R2-Dreamer (arXiv 2603.18202) has it between latents and the
    encoder's output, from which no gradient comes.

    Args:
        redundancy: weight of the correlations of different entries.
    """
    x, y = ((z - z.mean(0)) / (z.std(0) + 1e-8) for z in (projected.float(), target.float()))
    correlation = x.T @ y / len(x)
    same = correlation.diagonal()
    return (same - 1).square().sum() + redundancy * (correlation.square().sum() - same.square().sum())


def open_loop(
    world: WorldModel, start: Latent, action: Tensor, batch: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
    """Observe the first half of each sequence, then predict the second from its actions alone.

    Source: ``danijar/dreamerv3`` ``agent.py``: ``report``.

    Args:
        start: latent before the first step, ``(B, ...)``.
        action: ``(B, T, A)``, the action that led to each step.
        batch: observations and ``is_first``, ``(B, T, ...)``.

    Returns:
        Mean squared errors of pixels ``K`` steps into the imagined half, ``wm/open_loop_mse@K/<camera>``, and
        the images of both halves by camera.
    """
    length = action.shape[1]
    context = max(length // 2, 1)
    shown = {key: batch[key][:, :context] for key in (*world.encoder.keys.spaces, "is_first")}
    seen, *_ = world.observe(start, action[:, :context], shown, shown["is_first"])
    latent = seen.map(lambda x: x[:, -1])
    states = [seen.map(lambda x, t=t: x[:, t]) for t in range(context)]
    for t in range(context, length):
        # An episode may end inside the imagined half; is_first tells the model, as the environment would.
        first = batch["is_first"][:, t]
        latent = world.rssm.imagine(latent.reset(first), torch.where(first[:, None], 0.0, action[:, t]))
        states.append(latent)
    predicted = world.decoder(stack_latents(states).map(lambda x: x.flatten(0, 1)))
    metrics: dict[str, Tensor] = {}
    predictions: dict[str, Prediction] = {}
    for key in world.decoder.keys.images:
        model = predicted[key].unflatten(0, (-1, length))
        truth = batch[key]
        error = (model - to_unit(truth)).square().mean((0, 2, 3, 4))  # (T,)
        name = key.removeprefix("pixels/")
        for ahead in (1, 5, 15, 30):
            if context + ahead <= length:
                metrics[f"wm/open_loop_mse@{ahead}/{name}"] = error[context + ahead - 1]
        shown = truth if truth.dtype == torch.uint8 else to_pixels(to_unit(truth))
        predictions[name] = Prediction(shown.transpose(0, 1), to_pixels(model).transpose(0, 1), context)
    return metrics, predictions
