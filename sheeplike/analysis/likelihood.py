"""How likely the world model finds what it observes: importance-weighted bounds on the log-likelihood.

Source: Burda et al., "Importance weighted autoencoders" (2016). With one sample the bound is the evidence lower bound;
it rises with the number of samples ``K`` towards the log-likelihood of the model.

The decoder is a Gaussian of fixed variance: the training loss, a sum of squared errors without a factor of one half, is
the negative log-density of variance 1/2, but for a constant, which is in these numbers. So they compare models that
predict the same observations at the same size, and say nothing beside a decoder with another likelihood.

Shape letters: ``K`` samples, ``E`` episodes, ``T`` steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.analysis.episodes import Episodes
from sheeplike.analysis.model import States, TrainedModel

SAMPLES = (1, 16, 64)
WINDOW = 16  # steps, from the beginning of an episode
BATCH = 1024  # states that are decoded at once


def iwae_bound(log_weights: Tensor, samples: int | None = None) -> Tensor:
    """Lower bound on the log-likelihood from log-weights ``(K, ...)`` of samples of the proposal: ``(...)`` nats.

    Args:
        log_weights: ``log p(x, z_k) - log q(z_k | x)``.
        samples: how many samples the bound uses; the mean over all disjoint groups of so many. None: all of them.

    Raises:
        ValueError: ``samples`` is not between 1 and ``K``.
    """
    count = len(log_weights) if samples is None else samples
    if not 1 <= count <= len(log_weights):
        raise ValueError(f"samples={samples}: expected 1 to {len(log_weights)}")
    groups = log_weights[: len(log_weights) // count * count].unflatten(0, (-1, count))
    return (groups.logsumexp(1) - math.log(count)).mean(0)


def log_likelihood(model: TrainedModel, states: States, obs: dict[str, Tensor]) -> Tensor:
    """``log p(o_t | h_t, z_t)`` ``(...)`` in nats of what the model sees, in states ``(...)``."""
    lead, total = states.lead, []
    flat = states.map(lambda x: x.flatten(0, len(lead) - 1))
    seen = {key: obs[key].flatten(0, len(lead) - 1) for key in model.observations}
    for start in range(0, len(flat), BATCH):
        predicted = model.predict(flat[start : start + BATCH])
        log_density = torch.zeros((), device=model.device)
        for key, value in seen.items():
            error = (predicted[key] - model.as_learnt(key, value[start : start + BATCH])).flatten(1)
            log_density = log_density - error.square().sum(1) - 0.5 * math.log(math.pi) * error.shape[1]
        total.append(log_density)
    return torch.cat(total).reshape(lead)


def log_weights(model: TrainedModel, states: States, obs: dict[str, Tensor]) -> Tensor:
    """``log p(o_t | h_t, z_t) + log p(z_t | h_t) - log q(z_t | h_t, o_t)`` ``(...)`` of states drawn from ``q``."""
    with torch.no_grad():
        posterior = model.rssm.distribution(states.logits)
        prior = model.rssm.distribution(model.prior(states))
        ratio = (prior.log_prob(states.stoch) - posterior.log_prob(states.stoch)).sum(-1)
    return log_likelihood(model, states, obs) + ratio


def bounds(
    model: TrainedModel, episodes: Episodes, states: States, *, steps: int = 64, windows: int = 8, seed: int = 0
) -> dict[str, float | int]:
    """Bounds on the log-likelihood of held-out episodes, in nats.

    Two of them, each with :data:`SAMPLES` samples. *Per step*: of one observation, given one sampled past ``h_t``.
    *Window*: of the first :data:`WINDOW` observations of an episode together, each sample a whole posterior sequence
    from the beginning on, whose log-weights are summed over time.

    Args:
        states: posterior states ``(E, T)`` of the episodes.
        steps: observations, drawn from all that were played, that the first is a mean over.
        windows: episodes that the second is a mean over: the first ones that are long enough.

    Returns:
        ``nll`` is the negative of the bound with one sample.
    """
    most, dimensions = max(SAMPLES), sum(math.prod(space.shape) for space in model.observations.values())
    found: dict[str, float | int] = {"dimensions": dimensions}
    with own_randomness(model.device), torch.no_grad():
        torch.manual_seed(seed)
        valid = episodes.valid.nonzero()
        rows, times = valid[torch.randperm(len(valid))[:steps]].unbind(1)
        here = states.map(lambda x: x[rows, times].expand(most, *x[rows, times].shape))
        here = States(here.deter, model.rssm.distribution(here.logits).sample(), here.logits)
        seen = {key: episodes.obs[key][rows, times] for key in model.observations}
        seen = {key: value.expand(most, *value.shape) for key, value in seen.items()}
        per_step = log_weights(model, here, seen)  # (K, steps)
        found |= _summary("per_step", per_step, dimensions)
        found["per_step_observations"] = len(rows)
        long = (episodes.lengths >= WINDOW).nonzero()[:windows, 0]
        sums = []
        for row in long.tolist():
            obs = {key: episodes.obs[key][row, :WINDOW] for key in model.observations}
            obs = {key: value.expand(most, *value.shape) for key, value in obs.items()}
            action = episodes.action[row, :WINDOW]
            sequences = model.observe(obs, action.expand(most, *action.shape))
            sums.append(log_weights(model, sequences, obs).sum(-1))
        if sums:
            found |= _summary("window", torch.stack(sums, 1), dimensions * WINDOW)
            found |= {"window_steps": WINDOW, "window_episodes": len(sums)}
    return found


def _summary(name: str, log_weights: Tensor, dimensions: int) -> dict[str, float]:
    """Means over the second axis of log-weights ``(K, ...)``."""
    found = {f"{name}_iwae_{k}": iwae_bound(log_weights, k).mean().item() for k in SAMPLES}
    found[f"{name}_nll"] = -found[f"{name}_iwae_1"]
    found[f"{name}_nll_per_dimension"] = found[f"{name}_nll"] / dimensions
    return found
