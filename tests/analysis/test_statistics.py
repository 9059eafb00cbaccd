"""Statistics by hand, and against what they promise of random numbers."""

import math

import numpy as np
import pytest
from scipy import stats

from sheeplike.analysis.statistics import (
    area_under_curve,
    first_reached,
    improvement_interval,
    iqm,
    iqm_interval,
    permutation_test,
    probability_of_improvement,
    success_interval,
)


def scores(*values: float) -> np.ndarray:
    return np.array(values, float)


def test_iqm():
    assert iqm(scores(100, 2, 1, 3)) == 2.5
    assert iqm(scores(1, 2, 9)) == 4, "of fewer than four, the mean"
    assert list(iqm(np.array([[1, 10], [3, 50]]))) == [2, 30]


def test_interval_of_the_iqm_draws_a_curve_as_a_whole():
    curves = np.array([[1.0, 10.0, 100.0], [2.0, 20.0, 200.0], [4.0, 40.0, 400.0]])
    low, high = iqm_interval(curves)
    np.testing.assert_allclose(low * [100, 10, 1], low[2])
    np.testing.assert_allclose(high * [100, 10, 1], high[2])
    assert low[0] < high[0]
    np.testing.assert_array_equal(iqm_interval(curves), (low, high))


def test_interval_of_the_iqm_holds_the_truth_about_as_often_as_documented():
    rng = np.random.default_rng(0)

    def coverage(runs: int) -> float:
        low, high = iqm_interval(rng.normal(7, 2, (runs, 400)))
        return np.mean((low <= 7) & (high >= 7))

    assert coverage(20) == pytest.approx(0.94, abs=0.04)
    assert coverage(3) == pytest.approx(0.75, abs=0.06)


def test_width_of_the_interval_is_that_of_theory():
    # Of n normal scores, the variance of the mean without a quarter at either end tends to 1.19 / n.
    low, high = iqm_interval(np.random.default_rng(0).normal(size=2000))
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(1.19 / 2000), rel=0.15)


def test_probability_of_improvement():
    assert probability_of_improvement(scores(3, 4), scores(1, 2)) == 1
    assert probability_of_improvement(scores(1, 2), scores(3, 4)) == 0
    assert probability_of_improvement(scores(1, 2), scores(1, 2)) == 0.5, "a tie counts half"
    assert probability_of_improvement(scores(2, 3, 4), scores(1, 3)) == pytest.approx(4.5 / 6)


def test_interval_of_the_probability_of_improvement():
    assert improvement_interval(scores(4, 5, 6), scores(1, 2, 3)) == (1, 1)
    for x, y in ((scores(1, 3, 5, 7), scores(4, 4)), (scores(4, 4), scores(1, 3, 5, 7))):
        low, high = improvement_interval(x, y)
        assert low < 0.3 < 0.7 < high, "both sides are drawn anew"
    rng = np.random.default_rng(0)
    low, high = improvement_interval(rng.normal(1, 1, 200), rng.normal(0, 1, 200))
    assert low < stats.norm.cdf(1 / math.sqrt(2)) < high
    assert 0.04 < high - low < 0.14


def test_permutation_test():
    assert permutation_test(scores(4, 5, 6), scores(1, 2, 3)) == pytest.approx(2 / 20)
    assert permutation_test(scores(1, 2, 3), scores(4, 5, 6, 7)) == pytest.approx(2 / 35)
    assert permutation_test(scores(1, 1), scores(1, 1)) == 1
    # By hand: of the 10 ways to take two of 1 1 1 2 3, {2, 3} alone is farther from the middle than {1, 1}, of which
    # there are three.
    assert permutation_test(scores(2, 3), scores(1, 1, 1)) == pytest.approx(1 / 10)
    assert permutation_test(scores(1, 1), scores(1, 2, 3)) == pytest.approx(4 / 10)


def test_permutation_test_of_many_runs_is_sampled():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.6, 1, 20), rng.normal(0, 1, 20)
    assert permutation_test(x, y) == pytest.approx(stats.mannwhitneyu(x, y).pvalue, abs=0.01)
    assert permutation_test(x, y) == permutation_test(x, y)
    assert 0 < permutation_test(x + 100, y) < 0.001


def test_success_interval():
    wilson = stats.binomtest(54, 60).proportion_ci(method="wilson")
    assert success_interval(scores(0.9), scores(60)) == pytest.approx(wilson), "of one seed"
    for rate in (0, 1):
        low, high = success_interval(scores(rate, rate, rate), scores(16, 16, 16))
        assert 0 <= low < high <= 1, "seeds that agree are not certain"
        assert 0.1 < high - low < 0.3
    assert success_interval(scores(0, 1, 1), scores(9, 9, 9)) == success_interval(scores(0, 1, 1), scores(99, 99, 99))


def test_interval_of_success_holds_the_mean_of_seeds():
    rng = np.random.default_rng(0)
    for seeds, episodes in ((3, 16), (3, 100), (5, 100)):
        rates = rng.binomial(episodes, rng.beta(2, 1, (500, seeds))) / episodes
        intervals = [success_interval(one, np.full(seeds, float(episodes))) for one in rates]
        assert np.mean([low <= 2 / 3 <= high for low, high in intervals]) > 0.92


def test_area_under_curve():
    x, y = np.array([10.0, 20.0, 40.0]), np.array([0.0, 1.0, 1.0])
    assert area_under_curve(x, y, 10, 40) == pytest.approx((5 + 20) / 30)
    assert area_under_curve(x, y, 15, 25) == pytest.approx((0.75 * 5 + 5) / 10), "ends between two points"
    assert area_under_curve(x, y, 15, 15) == 0.5
    assert area_under_curve(x * 7, y, 70, 280) == pytest.approx(area_under_curve(x, y, 10, 40)), "the unit is that of y"


def test_first_reached():
    x, y = np.array([10.0, 20.0, 30.0]), np.array([0.1, 0.9, 0.2])
    assert first_reached(x, y, 0.5) == 20, "a measured place, not one between two"
    assert first_reached(x, y, 0.9) == 20
    assert first_reached(x, y, 0.91) == math.inf
