"""Several categoricals of different sizes as one distribution, against float64 and torch.distributions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import distributions as reference

from sheeplike.nn.distributions import JointCategorical, OneHotCategorical, categorical

CLASSES = (2, 4, 3)


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor(2 * np.random.default_rng(seed).standard_normal((*shape, sum(CLASSES))), dtype=torch.float32)


def one_hots(*indices: int) -> torch.Tensor:
    return torch.cat([torch.eye(n)[index] for n, index in zip(CLASSES, indices, strict=True)])


def test_log_probability_and_entropy_are_sums_over_the_choices() -> None:
    logits = random_logits(50)
    dist = JointCategorical(logits, CLASSES)
    parts = [reference.OneHotCategorical(logits=part.double()) for part in logits.split(CLASSES, -1)]
    drawn = [part.sample() for part in parts]
    expected = sum(part.log_prob(one) for part, one in zip(parts, drawn, strict=True))
    found = dist.log_prob(torch.cat(drawn, -1).float())
    assert found.shape == dist.entropy().shape == (50,)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(dist.entropy(), sum(part.entropy() for part in parts), rtol=1e-5)


def test_known_numbers() -> None:
    """Probabilities 3/4, 1/4; 1/2, 1/4, 1/8, 1/8; and three of 1/3."""
    logits = torch.tensor([[3.0, 1, 4, 2, 1, 1, 5, 5, 5]]).log()
    dist = JointCategorical(logits, CLASSES)
    assert dist.log_prob(one_hots(1, 2, 0)[None]).item() == pytest.approx(math.log(1 / 4 * 1 / 8 * 1 / 3), rel=1e-6)
    two = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert dist.entropy().item() == pytest.approx(two + 1.75 * math.log(2) + math.log(3), rel=1e-6)
    assert dist.mode()[0, :6].tolist() == [1, 0, 1, 0, 0, 0]


def test_each_choice_is_mixed_with_a_uniform_one_of_its_own_size() -> None:
    logits = torch.tensor([[50.0, 0, 50, 0, 0, 0, 0, 0, 50]])
    dist = JointCategorical(logits, CLASSES, 0.12)
    likely = (0.88 + 0.06) * (0.88 + 0.03) * (0.88 + 0.04)
    assert dist.log_prob(one_hots(0, 0, 2)[None]).item() == pytest.approx(math.log(likely), rel=1e-5)
    unlikely = 0.06 * 0.03 * 0.04
    assert dist.log_prob(one_hots(1, 3, 1)[None]).item() == pytest.approx(math.log(unlikely), rel=1e-5)


def test_samples_have_the_probabilities_and_the_choices_are_independent() -> None:
    torch.manual_seed(0)
    count, logits = 200_000, random_logits(seed=3)
    drawn = JointCategorical(logits.expand(count, -1), CLASSES).sample()
    probs = torch.cat([part.softmax(-1) for part in logits.split(CLASSES, -1)])
    error = 5 * torch.sqrt(probs * (1 - probs) / count)
    assert bool(((drawn.mean(0) - probs).abs() < error).all())
    assert all(bool((part.sum(-1) == 1).all()) for part in drawn.split(CLASSES, -1))
    first, second, third = drawn.split(CLASSES, -1)
    for one, other in ((first, second), (second, third), (first, third)):
        together = one.T @ other / count
        np.testing.assert_allclose(together, one.mean(0)[:, None] * other.mean(0), atol=5 * 0.5 / math.sqrt(count))


@pytest.mark.parametrize("unimix", [0.0, 0.1])
def test_samples_pass_the_gradient_of_their_own_probabilities(unimix: float) -> None:
    torch.manual_seed(0)
    logits = random_logits(7).requires_grad_()
    weight = torch.randn(7, sum(CLASSES))
    (found,) = torch.autograd.grad((JointCategorical(logits, CLASSES, unimix).sample() * weight).sum(), logits)
    # The probabilities' Jacobian p_i (d_ij - p_j), block by block.
    blocks = []
    for part, w in zip(logits.detach().double().split(CLASSES, -1), weight.double().split(CLASSES, -1), strict=True):
        p = part.softmax(-1)
        blocks.append((1 - unimix) * p * (w - (p * w).sum(-1, keepdim=True)))
    np.testing.assert_allclose(found, torch.cat(blocks, -1), rtol=1e-4, atol=1e-6)


def test_gradient_of_the_log_probability_is_what_was_drawn_less_what_was_likely() -> None:
    logits = random_logits(3).requires_grad_()
    action = torch.stack([one_hots(0, 1, 2), one_hots(1, 3, 0), one_hots(1, 0, 1)])
    (found,) = torch.autograd.grad(JointCategorical(logits, CLASSES).log_prob(action).sum(), logits)
    probs = torch.cat([part.softmax(-1) for part in logits.detach().double().split(CLASSES, -1)], -1)
    np.testing.assert_allclose(found, action - probs, atol=1e-6)


def test_one_choice_is_a_plain_categorical_and_shares_its_numbers() -> None:
    logits = random_logits(5)
    assert isinstance(categorical(logits, (9,)), OneHotCategorical)
    assert isinstance(categorical(logits, CLASSES), JointCategorical)
    torch.manual_seed(1)
    expected = OneHotCategorical(logits, 0.01)
    sample = expected.sample()
    torch.manual_seed(1)
    found = JointCategorical(logits, (9,), 0.01)
    assert torch.equal(found.sample(), sample)
    assert torch.equal(found.log_prob(sample), expected.log_prob(sample))
    assert torch.equal(found.entropy(), expected.entropy())
    assert torch.equal(found.mode(), expected.mode())


def test_leading_axes_and_half_precision() -> None:
    dist = JointCategorical(random_logits(2, 3).bfloat16(), CLASSES, 0.01)
    sample = dist.sample()
    assert sample.shape == dist.mode().shape == (2, 3, 9)
    assert {x.dtype for x in (sample, dist.mode(), dist.log_prob(sample), dist.entropy())} == {torch.float32}
    assert dist.log_prob(sample).shape == dist.entropy().shape == (2, 3)
