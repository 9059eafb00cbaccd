"""Distributions of actions, judged by torch.distributions and by numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch import distributions as reference

from sheeplike.nn.distributions import Normal, OneHotCategorical, TanhNormal

EXTREMES = [-1e4, -300.0, -20.0, 0.0, 20.0, 300.0, 1e4]


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.tensor(scale * np.random.default_rng(seed).standard_normal(shape))


def parameters(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation that the outputs of a network mean, in float64."""
    mean, std = raw.double()[..., : raw.shape[-1] // 2], raw.double()[..., raw.shape[-1] // 2 :]
    return mean, torch.log1p(torch.exp(std)) + 0.001


# --- the normal squashed by tanh --------------------------------------------------------------------------------------


def test_tanh_normal_density_is_that_of_a_transformed_normal() -> None:
    raw, drawn = numbers(200, 6, seed=1), numbers(200, 3, seed=2, scale=1.5)
    mean, std = parameters(raw)
    squashed = reference.TransformedDistribution(reference.Normal(mean, std), reference.TanhTransform())
    expected = squashed.log_prob(drawn.tanh()).sum(-1)
    found = TanhNormal(raw.float()).log_prob(drawn.float())
    assert found.shape == (200,)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.0), (1.0, -1.0), (-0.5, 1.5)])
def test_tanh_normal_density_of_the_action_integrates_to_one(mean: float, std: float) -> None:
    # Midpoints of a fine grid over the actions, (-1, 1).
    actions = (torch.arange(400_000).double() + 0.5) / 200_000 - 1
    density = TanhNormal(torch.tensor([[mean, std]])).log_prob(torch.atanh(actions).unsqueeze(-1)).exp()
    assert density.sum().item() / 200_000 == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(
    # softplus(raw) + 0.001, worked out with log 2 = 0.69314718 and log(1 + e) = 1.31326169
    ("raw", "std"),
    [(0.0, 0.69414718), (1.0, 1.31426169), (-1.0, 0.31426169), (-100.0, 0.001), (100.0, 100.001)],
)
def test_tanh_normal_reads_the_mean_first_and_then_the_deviation(raw: float, std: float) -> None:
    dist = TanhNormal(torch.tensor([[3.0, -4.0, raw, 0.0]]))
    assert dist.mode().tolist() == dist.mean.tolist() == [[3.0, -4.0]]
    assert dist.std[0].tolist() == pytest.approx([std, 0.69414718], rel=1e-6)


def test_tanh_normal_samples_come_before_the_squashing_and_carry_no_gradient() -> None:
    torch.manual_seed(0)
    raw = torch.tensor([2.0, 0.5]).repeat(200_000, 1).requires_grad_()
    sample = TanhNormal(raw).sample()
    assert not sample.requires_grad
    std = math.log1p(math.exp(0.5)) + 0.001
    assert sample.mean().item() == pytest.approx(2.0, abs=4 * std / math.sqrt(200_000))
    assert sample.std().item() == pytest.approx(std, rel=0.01)
    assert sample.max() > 3, "not squashed"


def exact_entropy(mean: float, std: float) -> float:
    x = np.linspace(mean - 12 * std, mean + 12 * std, 400_001)
    density = np.exp(-0.5 * ((x - mean) / std) ** 2) / (std * math.sqrt(2 * math.pi))
    slope = np.log1p(-(np.tanh(np.clip(x, -17, 17)) ** 2))
    return 0.5 * math.log(2 * math.pi * math.e * std**2) + float(np.sum(density * slope) * (x[1] - x[0]))


@pytest.mark.parametrize(("mean", "raw"), [(0.0, 0.0), (0.7, -1.5), (-1.5, 0.5)])
def test_tanh_normal_entropy_and_its_gradient_are_unbiased(mean: float, raw: float) -> None:
    torch.manual_seed(0)
    draws = 200_000
    out = torch.tensor([mean, raw]).repeat(draws, 1).requires_grad_()
    estimate = TanhNormal(out).entropy()
    assert estimate.shape == (draws,)

    def exact(mean: float, raw: float) -> float:
        return exact_entropy(mean, math.log1p(math.exp(raw)) + 0.001)

    def within_error(found: Tensor, expected: float) -> bool:
        return abs(found.mean().item() - expected) < 4 * found.std().item() / math.sqrt(draws) + 1e-4

    assert within_error(estimate.detach(), exact(mean, raw))
    (gradient,) = torch.autograd.grad(estimate.sum(), out)
    h = 1e-4
    assert within_error(gradient[:, 0], (exact(mean + h, raw) - exact(mean - h, raw)) / (2 * h))
    assert within_error(gradient[:, 1], (exact(mean, raw + h) - exact(mean, raw - h)) / (2 * h))


def test_tanh_normal_sums_over_actions() -> None:
    torch.manual_seed(0)
    row = torch.tensor([0.3, -0.8, 0.2, -1.0])
    estimate = TanhNormal(row.repeat(200_000, 1)).entropy().mean().item()
    stds = [math.log1p(math.exp(x)) + 0.001 for x in (0.2, -1.0)]
    assert estimate == pytest.approx(exact_entropy(0.3, stds[0]) + exact_entropy(-0.8, stds[1]), abs=0.01)


def test_tanh_normal_stays_finite_with_finite_gradients_at_the_extremes() -> None:
    """Saturated actions, where ``log(1 - tanh(x)^2)`` and ``atanh`` would not."""
    torch.manual_seed(0)
    grid = torch.cartesian_prod(torch.tensor(EXTREMES), torch.tensor(EXTREMES), torch.tensor(EXTREMES))
    raw, drawn = grid[:, :2].clone().requires_grad_(), grid[:, 2:].clone().requires_grad_()
    dist = TanhNormal(raw)
    for value in (dist.log_prob(drawn), dist.entropy(), dist.log_prob(dist.sample())):
        assert bool(value.isfinite().all())
        for gradient in torch.autograd.grad(value.sum(), (raw, drawn), allow_unused=True, retain_graph=True):
            assert gradient is None or bool(gradient.isfinite().all())


def test_tanh_normal_density_of_saturated_actions_is_exact() -> None:
    """At x = 40, tanh(x) is 1 in any float: log p(x) - log(4 exp(-2 x)) by hand."""
    found = TanhNormal(torch.tensor([[39.0, 0.0]])).log_prob(torch.tensor([[40.0]]))
    std = math.log(2) + 0.001
    normal = -0.5 / std**2 - math.log(std) - 0.5 * math.log(2 * math.pi)
    assert found.item() == pytest.approx(normal - math.log(4) + 80, rel=1e-6)


# --- normal and categorical -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50, 3), (3,)], ids=["deviation per state", "one deviation"])
def test_normal_is_torchs(shape: tuple[int, ...]) -> None:
    mean, std, action = numbers(50, 3), numbers(*shape, seed=1).exp(), numbers(50, 3, seed=2, scale=3)
    expected = reference.Independent(reference.Normal(mean, std.expand(50, 3)), 1)
    dist = Normal(mean.float(), std.float())
    np.testing.assert_allclose(dist.log_prob(action.float()), expected.log_prob(action), rtol=1e-4)
    np.testing.assert_allclose(dist.entropy(), expected.entropy(), rtol=1e-5)
    assert dist.std.shape == (50, 3)
    assert torch.equal(dist.mode(), mean.float())


def test_normal_samples_have_its_moments_and_no_gradient() -> None:
    torch.manual_seed(0)
    mean, std = torch.tensor([[5.0, -2.0]]).repeat(100_000, 1).requires_grad_(), torch.tensor([0.5, 3.0])
    sample = Normal(mean, std).sample()
    assert not sample.requires_grad
    np.testing.assert_allclose(sample.mean(0), [5.0, -2.0], atol=0.04)
    np.testing.assert_allclose(sample.std(0), [0.5, 3.0], rtol=0.01)


def test_categorical_is_torchs() -> None:
    logits = numbers(50, 4, scale=2)
    expected = reference.OneHotCategorical(logits=logits)
    action = expected.sample()
    dist = OneHotCategorical(logits.float())
    np.testing.assert_allclose(dist.log_prob(action.float()), expected.log_prob(action), rtol=1e-4)
    np.testing.assert_allclose(dist.entropy(), expected.entropy(), rtol=1e-4)
    assert torch.equal(dist.mode().argmax(-1), logits.argmax(-1))


def test_categorical_stays_finite_with_finite_gradients_at_the_extremes() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], requires_grad=True)
    dist = OneHotCategorical(logits)
    for value in (dist.log_prob(torch.tensor([[0.0, 1.0, 0.0]])), dist.entropy()):
        assert bool(value.isfinite().all())
        (gradient,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("kind", [TanhNormal, lambda raw: Normal(raw, raw.exp()), OneHotCategorical])
def test_half_precision_in_single_precision_out(kind: type) -> None:
    dist = kind(torch.randn(5, 4).bfloat16())
    sample = dist.sample()
    assert {x.dtype for x in (sample, dist.mode(), dist.log_prob(sample), dist.entropy())} == {torch.float32}
