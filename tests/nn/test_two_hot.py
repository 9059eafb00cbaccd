"""The symexp two-hot distribution of reward and value, against float64 built bin by bin."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sheeplike.nn.distributions import TwoHot, TwoHotBins


def exact_bins() -> np.ndarray:
    """255 values: ``-(e^x - 1)`` for x from 20 down to 0 in 127 equal steps, then their mirror images."""
    negative = [-(math.exp(20 - 20 * k / 127) - 1) for k in range(127)]
    return np.array([*negative, 0.0, *(-x for x in reversed(negative))])


def two_hot(target: float, bins: np.ndarray) -> np.ndarray:
    """Weights on the two bins around ``target``, linear in the raw space of the bins; all on the end bin beyond it."""
    weights = np.zeros(len(bins))
    if target <= bins[0] or target >= bins[-1]:
        weights[0 if target < 0 else -1] = 1
        return weights
    for k in range(len(bins) - 1):
        if bins[k] <= target < bins[k + 1]:
            weights[k + 1] = (target - bins[k]) / (bins[k + 1] - bins[k])
            weights[k] = 1 - weights[k + 1]
    return weights


def test_bins_are_symexp_spaced_and_exactly_symmetric() -> None:
    bins = TwoHotBins().values
    assert bins.dtype == torch.float32
    assert bins.shape == (255,)
    assert torch.equal(bins, -bins.flip(0))
    assert float(bins[127]) == 0.0
    assert bool((bins.diff() > 0).all())
    assert float(bins[-1]) == pytest.approx(4.85165e8, rel=1e-5)
    np.testing.assert_allclose(bins, exact_bins(), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("shape", [(255,), (7, 255), (16, 64, 255), (1023, 255)])
@pytest.mark.parametrize("constant", [0.0, -3.7, 11.3])
def test_equal_logits_predict_exactly_zero(shape: tuple[int, ...], constant: float) -> None:
    pred = TwoHotBins()(torch.full(shape, constant)).pred()
    assert pred.shape == shape[:-1]
    assert torch.equal(pred, torch.zeros(shape[:-1]))


def test_any_symmetric_distribution_predicts_exactly_zero() -> None:
    half = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    logits = torch.cat([half, half[:, :-1].flip(-1)], -1)
    assert torch.equal(TwoHotBins()(logits).pred(), torch.zeros(50))


def test_prediction_is_the_mean_in_raw_space() -> None:
    rng = np.random.default_rng(0)
    bins = TwoHotBins().values.double().numpy()
    # Mass around small values only: with bins of 1e8 in play, float32 could not resolve the mean.
    logits = np.where(np.abs(bins) < 50, rng.standard_normal((20, 255)), -60).astype(np.float32)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(-1, keepdims=True)
    np.testing.assert_allclose(TwoHotBins()(torch.tensor(logits)).pred(), (probs * bins).sum(-1), rtol=1e-4, atol=1e-4)


TARGETS = [0.0, 1e-3, -1e-3, 0.5, 1.0, -7.3, 123.4, -5e4, 3e8, 4.85e8, -4.85e8, 1e12, -1e12]


def test_loss_is_the_cross_entropy_with_weights_linear_in_raw_space() -> None:
    bins = TwoHotBins().values.double().numpy()
    logits = np.random.default_rng(1).standard_normal((len(TARGETS), 255)).astype(np.float32) * 2
    log_probs = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    expected = [-(two_hot(t, bins) * row).sum() for t, row in zip(TARGETS, log_probs, strict=True)]
    loss = TwoHotBins()(torch.tensor(logits)).loss(torch.tensor(TARGETS))
    np.testing.assert_allclose(loss, expected, rtol=1e-4)


def test_halfway_between_two_large_bins_both_weigh_a_half() -> None:
    """Interpolation in symlog space would put 0.54 on the upper bin here."""
    head = TwoHotBins()
    target = (head.values[200] + head.values[201]) / 2
    logits = torch.zeros(1, 255, requires_grad=True)
    head(logits).loss(target[None]).sum().backward()
    weights = 1 / 255 - logits.grad[0]  # the gradient of a cross entropy is softmax - target
    assert float(weights[200]) == pytest.approx(0.5, abs=1e-4)
    assert float(weights[201]) == pytest.approx(0.5, abs=1e-4)
    assert float(weights.abs().sum()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("target", [0.0, 0.3, -2.5, 99.0, -31415.9, 2.7e6])
def test_target_weights_reproduce_the_target(target: float) -> None:
    head = TwoHotBins()
    logits = torch.zeros(1, 255, requires_grad=True)
    head(logits).loss(torch.tensor([target])).sum().backward()
    weights = (1 / 255 - logits.grad[0].double()).numpy()
    weights[np.abs(weights) < 1e-6] = 0  # float32 noise of the gradient, times bins of 1e8, would drown the sum
    assert (weights * head.values.double().numpy()).sum() == pytest.approx(target, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("target", "index"), [(1e9, -1), (float("inf"), -1), (-1e9, 0), (float("-inf"), 0)])
def test_targets_beyond_the_range_use_the_end_bin_alone(target: float, index: int) -> None:
    logits = torch.randn(1, 255, generator=torch.Generator().manual_seed(0))
    loss = TwoHotBins()(logits).loss(torch.tensor([target]))
    assert float(loss) == pytest.approx(-float(logits[0].log_softmax(-1)[index]), rel=1e-5)


def test_target_carries_no_gradient() -> None:
    target = torch.tensor([1.5], requires_grad=True)
    logits = torch.zeros(1, 255, requires_grad=True)
    TwoHotBins()(logits).loss(target).sum().backward()
    assert target.grad is None


def test_bfloat16_logits_are_worked_out_in_float32() -> None:
    logits = torch.randn(4, 255, generator=torch.Generator().manual_seed(0)).bfloat16()
    dist: TwoHot = TwoHotBins()(logits)
    assert dist.log_probs.dtype == dist.pred().dtype == torch.float32
    exact = logits.double() - logits.double().logsumexp(-1, keepdim=True)
    np.testing.assert_allclose(dist.log_probs, exact, atol=1e-5)
    assert torch.equal(TwoHotBins()(torch.zeros(3, 255).bfloat16()).pred(), torch.zeros(3))


@pytest.mark.parametrize("unit", [1.0, 0.1])
def test_the_smooth_mean_has_the_value_of_the_mean_and_no_gradient_of_far_bins(unit: float) -> None:
    head = TwoHotBins(unit=unit)
    centre = 150  # a prediction of about 34 units
    near = -(torch.arange(255.0) - centre).square()
    noise = 0.01 * torch.randn(255, generator=torch.Generator().manual_seed(0))

    def gradients(logits: torch.Tensor) -> list[torch.Tensor]:
        logits = logits.requires_grad_()
        dist = head(logits)
        assert torch.equal(dist.smooth_pred(), dist.pred())
        means = dist.pred(), dist.smooth_pred()
        return [torch.autograd.grad(mean, logits, retain_graph=True)[0] for mean in means]

    plain, smooth = gradients(near)
    assert float(torch.cosine_similarity(plain, smooth, 0)) > 0.99
    plain, smooth = gradients(noise)
    assert float(plain.norm()) > 1e6 * unit
    assert float(smooth.norm()) < 10 * unit
