"""Categoricals with unimix, KL, straight-through gradients, bounded normal, Bernoulli; expected values in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sheeplike.nn.distributions import (
    Bernoulli,
    BoundedNormal,
    OneHotCategorical,
    _masked_cumulative,
    categorical_kl,
    symexp,
    symlog,
)


def mixed_probs(logits: np.ndarray, unimix: float) -> np.ndarray:
    """Softmax in float64, mixed with a uniform distribution."""
    weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return (1 - unimix) * weights / weights.sum(-1, keepdims=True) + unimix / logits.shape[-1]


def random_logits(*shape: int, seed: int = 0) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def confident(classes: int, winner: int, logit: float = 20.0) -> torch.Tensor:
    logits = torch.zeros(1, 1, classes)
    logits[..., winner] = logit
    return logits


@pytest.mark.parametrize("unimix", [0.0, 0.01, 0.3])
def test_unimix_is_inside_probabilities_log_prob_and_entropy(unimix: float) -> None:
    logits = random_logits(4, 6)
    probs = mixed_probs(logits, unimix)
    dist = OneHotCategorical(torch.tensor(logits), unimix)
    one_hot = torch.eye(6)[torch.tensor([0, 5, 2, 3])]
    np.testing.assert_allclose(dist.probs, probs, rtol=1e-5)
    np.testing.assert_allclose(dist.log_prob(one_hot), np.log(probs)[range(4), [0, 5, 2, 3]], rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), -(probs * np.log(probs)).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(dist.mode(), np.eye(6)[probs.argmax(-1)])


def test_kl_of_a_confident_disagreement_is_8_nats_with_unimix_and_20_without() -> None:
    a, b = confident(32, 0), confident(32, 1)
    # By hand: p = 0.99 * e^20 / (e^20 + 31) + 0.01 / 32 on the winner, q on every other; KL = (p - q) ln(p / q).
    share = math.exp(20) / (math.exp(20) + 31)
    p = 0.99 * share + 0.01 / 32
    q = 0.99 * math.exp(-20) * share + 0.01 / 32
    expected = (p - q) * math.log(p / q)
    assert expected == pytest.approx(7.98, abs=0.005)
    mixed = categorical_kl(OneHotCategorical(a, 0.01), OneHotCategorical(b, 0.01))
    plain = categorical_kl(OneHotCategorical(a), OneHotCategorical(b))
    assert float(mixed) == pytest.approx(expected, rel=1e-5)
    assert float(plain) == pytest.approx(20.0, abs=0.01)


def test_kl_is_summed_over_the_groups_and_matches_float64() -> None:
    x, y = random_logits(2, 5, 32, 4, seed=1), random_logits(2, 5, 32, 4, seed=2)
    p, q = mixed_probs(x, 0.01), mixed_probs(y, 0.01)
    expected = np.array(
        [
            [sum((p[i, j, s] * np.log(p[i, j, s] / q[i, j, s])).sum() for s in range(32)) for j in range(5)]
            for i in (0, 1)
        ]
    )
    kl = categorical_kl(OneHotCategorical(torch.tensor(x), 0.01), OneHotCategorical(torch.tensor(y), 0.01))
    assert kl.shape == (2, 5)
    np.testing.assert_allclose(kl, expected, rtol=1e-5)


@pytest.mark.parametrize("unimix", [0.0, 0.01])
def test_straight_through_gradient_is_that_of_the_probabilities_without_bias_or_variance(unimix: float) -> None:
    values, probe = random_logits(1, 8, seed=3), random_logits(8, seed=4).astype(np.float64)
    # d/dx_j sum_i w_i p_i of the mixture is (1 - unimix) s_j (w_j - sum_i w_i s_i), with s the plain softmax.
    soft = mixed_probs(values, 0.0)[0]
    expected = (1 - unimix) * soft * (probe - (probe * soft).sum())
    torch.manual_seed(0)
    drawn = set()
    for _ in range(200):
        logits = torch.tensor(values, requires_grad=True)
        sample = OneHotCategorical(logits, unimix).sample()
        drawn.add(int(sample.argmax()))
        (sample * torch.tensor(probe)).sum().backward()
        np.testing.assert_allclose(logits.grad[0], expected, rtol=1e-4, atol=1e-6)
    assert len(drawn) > 1, "the probe must have seen different classes"


def test_samples_are_exactly_one_hot() -> None:
    torch.manual_seed(0)
    sample = OneHotCategorical(torch.tensor(random_logits(1000, 5)), 0.01).sample()
    assert torch.equal(sample.sort(-1).values, torch.eye(5)[4].expand(1000, 5))


@pytest.mark.parametrize(
    ("logits", "unimix"),
    [([0.0, 1.0, -1.0, 2.0, 0.5, -3.0], 0.01), ([1000.0, 0.0, 0.0, 0.0, 0.0, 0.0], 0.06)],
    ids=["spread", "only the unimix reaches five of the classes"],
)
def test_sample_frequencies_match_the_mixed_probabilities(logits: list[float], unimix: float) -> None:
    torch.manual_seed(0)
    draws = 200_000
    dist = OneHotCategorical(torch.tensor(logits).expand(draws, 6), unimix)
    counts = np.bincount(dist.sample_index().numpy(), minlength=6)
    expected = draws * mixed_probs(np.array(logits), unimix)
    # 99.99 % quantile of chi-square with 5 degrees of freedom
    assert ((counts - expected) ** 2 / expected).sum() < 25.7


def test_everything_is_float32_whatever_the_precision_of_the_logits() -> None:
    logits = torch.tensor(random_logits(3, 8)).bfloat16()
    dist = OneHotCategorical(logits, 0.01)
    expected = mixed_probs(logits.double().numpy(), 0.01)
    assert dist.probs.dtype == dist.log_probs.dtype == dist.sample().dtype == torch.float32
    np.testing.assert_allclose(dist.probs, expected, rtol=1e-5)
    normal = BoundedNormal(torch.randn(3, 4).bfloat16())
    assert normal.mean.dtype == normal.std.dtype == normal.sample().dtype == torch.float32
    assert Bernoulli(torch.zeros(3, 1).bfloat16()).prob().dtype == torch.float32


@pytest.mark.parametrize(
    ("raw", "std"),
    # 0.9 * sigmoid(raw + 2) + 0.1, worked out with sigmoid(2) = 0.88079708 and sigmoid(1) = 0.73105858
    [(0.0, 0.892717372), (-2.0, 0.55), (-1.0, 0.757952722), (60.0, 1.0), (-60.0, 0.1)],
)
def test_bounded_normal_standard_deviation(raw: float, std: float) -> None:
    dist = BoundedNormal(torch.tensor([[0.0, raw]]))
    assert float(dist.std) == pytest.approx(std, abs=1e-6)


def test_bounded_normal_mean_log_prob_and_entropy() -> None:
    raw = random_logits(5, 6, seed=5)
    action = 2 * random_logits(5, 3, seed=6)
    mean = np.tanh(raw[:, :3].astype(np.float64))
    std = 0.9 / (1 + np.exp(-(raw[:, 3:].astype(np.float64) + 2))) + 0.1
    density = np.exp(-((action - mean) ** 2) / (2 * std**2)) / np.sqrt(2 * np.pi * std**2)
    dist = BoundedNormal(torch.tensor(raw))
    np.testing.assert_allclose(dist.mode(), mean, rtol=1e-5)
    np.testing.assert_allclose(dist.log_prob(torch.tensor(action)), np.log(density.prod(-1)), rtol=1e-4)
    np.testing.assert_allclose(dist.entropy(), 0.5 * np.log(2 * np.pi * np.e * std**2).sum(-1), rtol=1e-5)


def test_bounded_normal_samples_are_not_clipped_and_carry_no_gradient() -> None:
    torch.manual_seed(0)
    raw = torch.tensor([3.0, 0.0]).repeat(100_000, 1).requires_grad_()
    sample = BoundedNormal(raw).sample()
    assert not sample.requires_grad
    # Mean tanh(3), deviation 0.8927: the share above 1 is that of the Gaussian tail.
    beyond = (1 - math.tanh(3)) / 0.892717372
    expected = 0.5 * math.erfc(beyond / math.sqrt(2))
    assert float((sample > 1).float().mean()) == pytest.approx(expected, abs=0.006)
    assert float(sample.std()) == pytest.approx(0.892717372, rel=0.01)


def test_bernoulli_is_a_cross_entropy_against_a_soft_target() -> None:
    logit, target = random_logits(7, 1, seed=7), np.array([0.0, 1.0, 0.997, 0.5, 0.2, 1.0, 0.0])
    prob = 1 / (1 + np.exp(-logit[:, 0].astype(np.float64)))
    dist = Bernoulli(torch.tensor(logit))
    np.testing.assert_allclose(dist.prob(), prob, rtol=1e-5)
    expected = -(target * np.log(prob) + (1 - target) * np.log(1 - prob))
    np.testing.assert_allclose(dist.loss(torch.tensor(target)), expected, rtol=1e-4)


def test_symlog_and_symexp_are_inverse_and_odd() -> None:
    x = np.array([-1e5, -3.0, -0.5, 0.0, 0.5, 3.0, 1e5])
    expected = np.sign(x) * np.log(np.abs(x) + 1)
    np.testing.assert_allclose(symlog(torch.tensor(x)), expected, rtol=1e-12)
    np.testing.assert_allclose(symexp(torch.tensor(expected)), x, rtol=1e-9)


def test_cumulative_sums_without_a_cumsum_are_the_same() -> None:
    probs = OneHotCategorical(torch.from_numpy(random_logits(50, 32, 16))).probs
    torch.testing.assert_close(_masked_cumulative(probs), probs.cumsum(-1), rtol=1e-6, atol=1e-6)
