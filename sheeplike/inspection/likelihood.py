"""Importance-weighted bounds on the log-likelihood of observations under the world model.

Source: Burda et al., "Importance weighted autoencoders" (2016). With one sample the bound is the evidence lower bound;
it rises with the number of samples ``K`` towards the log-likelihood of the model.

The decoder counts as a Gaussian of variance 1 / (2 * ``loss_scales.reconstruction``): up to a constant, which is
included here, its negative log-density is the training loss, a scaled sum of squared errors. Densities are over
observations as they are learnt: images in [0, 1], depth as d / (1 + d), vectors as their symlog. The numbers therefore
compare only models of the same observations, image size and scale.

Shape letters: ``K`` samples, ``E`` episodes, ``T`` steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.inspection.episodes import Episodes
from sheeplike.inspection.model import States, TrainedModel

SAMPLES = (1, 16, 64)


def iwae_bound(log_weights: Tensor, samples: int | None = None) -> Tensor:
    """Return a lower bound ``(...)`` on the log-likelihood in nats from log-weights ``(K, ...)``.

    Args:
        log_weights: ``log p(x, z_k) - log q(z_k | x)`` of samples of the proposal.
        samples: size of the disjoint groups that the bound is a mean over; None: a single group of all.
    """
    count = len(log_weights) if samples is None else samples
    assert 1 <= count <= len(log_weights), (count, len(log_weights))
    groups = log_weights[: len(log_weights) // count * count].unflatten(0, (-1, count))
    return (groups.logsumexp(1) - math.log(count)).mean(0)


def variance(model: TrainedModel) -> float:
    """Return the variance of the decoder's Gaussian; infinite if observations are not learnt."""
    scale = model.networks.config.loss_scales.reconstruction
    return 1 / (2 * scale) if scale and model.world.reconstructs else math.inf


def log_likelihood(model: TrainedModel, states: States, obs: dict[str, Tensor]) -> Tensor:
    """Return ``log p(o_t | h_t, z_t)`` ``(...)`` in nats of the observations in states ``(...)``, on the CPU."""
    width, lead = variance(model), len(states.lead)

    def of_some(some: States, *seen: Tensor) -> Tensor:
        predicted, found = model.predict(some), torch.zeros((), device=model.device)
        for key, value in zip(model.observations, seen, strict=True):
            error = (predicted[key] - model.decoder_target(key, value)).flatten(1)
            constant = 0.5 * math.log(2 * math.pi * width) * error.shape[1]
            found = found - error.square().sum(1) / (2 * width) - constant
        return found

    flat = states.reshape(states.lead.numel())
    seen = (obs[key].flatten(0, lead - 1) for key in model.observations)
    return model.in_batches(of_some, flat, *seen).reshape(states.lead)


def log_weights(model: TrainedModel, states: States, obs: dict[str, Tensor]) -> Tensor:
    """Return ``log p(o_t | h_t, z_t) + log p(z_t | h_t) - log q(z_t | h_t, o_t)`` of states ``(...)`` from ``q``."""

    def ratio(some: States) -> Tensor:
        posterior, prior = (model.rssm.distribution(logits) for logits in (some.logits, model.prior(some)))
        return (prior.log_prob(some.stoch) - posterior.log_prob(some.stoch)).sum(-1)

    flat = states.reshape(states.lead.numel())
    return log_likelihood(model, states, obs) + model.in_batches(ratio, flat).reshape(states.lead)


def bounds(
    model: TrainedModel, episodes: Episodes, states: States, *, steps: int = 64, seed: int = 0
) -> dict[str, float | int]:
    """Return bounds, each with :data:`SAMPLES` samples, on the log-likelihood of an observation given a sampled past.

    Args:
        states: posterior states ``(E, T)`` of the episodes.
        steps: number of random observations that the bound is a mean over.
    """
    most, dimensions = max(SAMPLES), sum(math.prod(space.shape) for space in model.observations.values())
    found: dict[str, float | int] = {"dimensions": dimensions}
    if math.isinf(variance(model)):
        return found
    found["variance"] = variance(model)
    with own_randomness(model.device):
        torch.manual_seed(seed)
        valid = episodes.valid.nonzero()
        rows, times = valid[torch.randperm(len(valid))[:steps]].unbind(1)
        here = states[rows, times].map(lambda x: x.expand(most, *x.shape))
        drawn = model.rssm.distribution(here.logits).sample()
        here = States(here.latent._replace(stoch=drawn), here.logits)
        seen = {key: episodes.obs[key][rows, times] for key in model.observations}
        seen = {key: value.expand(most, *value.shape) for key, value in seen.items()}
        per_step = log_weights(model, here, seen)  # (K, steps)
        found |= {f"per_step_iwae_{k}": iwae_bound(per_step, k).mean().item() for k in SAMPLES}
        found["per_step_nll"] = -found["per_step_iwae_1"]
        found["per_step_nll_per_dimension"] = found["per_step_nll"] / dimensions
        found["per_step_observations"] = len(rows)
    return found
