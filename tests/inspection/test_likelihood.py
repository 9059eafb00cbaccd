"""The importance-weighted bound, against a model whose likelihood is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from sheeplike.inspection.likelihood import iwae_bound

NOISE = 0.7  # x = z + noise, z standard normal: p(x) is normal of variance 1 + NOISE**2


def weights(x: Tensor, samples: int, shift: float, widen: float) -> Tensor:
    """Log-weights ``(samples, len(x))`` of a proposal beside the exact posterior, which it is with 0 and 1."""
    variance = NOISE**2 / (1 + NOISE**2)
    proposal = Normal(x / (1 + NOISE**2) + shift, math.sqrt(variance) * widen)
    z = proposal.sample((samples,))
    return Normal(0.0, 1.0).log_prob(z) + Normal(z, NOISE).log_prob(x) - proposal.log_prob(z)


@pytest.fixture
def observed() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    return x, Normal(0.0, math.sqrt(1 + NOISE**2)).log_prob(x)


def test_with_the_exact_posterior_every_sample_says_the_likelihood(observed: tuple[Tensor, Tensor]) -> None:
    x, exact = observed
    found = weights(x, 64, shift=0.0, widen=1.0)
    torch.testing.assert_close(found, exact.expand(64, -1), atol=1e-6, rtol=0)
    for samples in (1, 16, 64):
        torch.testing.assert_close(iwae_bound(found, samples), exact, atol=1e-6, rtol=0)


def test_beside_it_the_bound_rises_from_below_with_the_samples(observed: tuple[Tensor, Tensor]) -> None:
    x, exact = observed
    found = weights(x, 64 * 500, shift=0.5, widen=1.3)
    bounds = torch.stack([iwae_bound(found, samples).mean() for samples in (1, 4, 16, 64)])
    assert bool((bounds.diff() > 0.002).all()), bounds
    assert bounds[-1] < exact.mean() + 0.003
    assert bounds[-1] > exact.mean() - 0.02
    assert bounds[0] < exact.mean() - 0.2


def test_one_sample_is_the_mean_and_all_of_them_the_log_of_the_mean() -> None:
    found = torch.randn(6, 2, dtype=torch.float64)
    torch.testing.assert_close(iwae_bound(found, 1), found.mean(0))
    torch.testing.assert_close(iwae_bound(found), found.exp().mean(0).log())
    pairs = found.exp().unflatten(0, (3, 2)).mean(1).log().mean(0)
    torch.testing.assert_close(iwae_bound(found, 2), pairs)
    assert bool(iwae_bound(found - 1e5).isfinite().all())


@pytest.mark.parametrize("samples", [0, 7])
def test_more_samples_than_there_are(samples: int) -> None:
    with pytest.raises(AssertionError):
        iwae_bound(torch.zeros(6, 1), samples)
