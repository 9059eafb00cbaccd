"""Statistics against SciPy, against values worked out by hand, and against what they promise of random numbers."""

import math

import numpy as np
import pytest
from scipy import stats

from sheeplike.monitor.intervals import (
    area_under_curve,
    first_reached,
    improvement_interval,
    iqm,
    iqm_interval,
    mean_interval,
    permutation_test,
    probability_of_improvement,
    stratified_bootstrap,
    wilson_interval,
)


def column(*values: float) -> np.ndarray:
    return np.array(values, float)[:, None]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 35])
def test_iqm_is_scipys_trimmed_mean(count):
    scores = np.random.default_rng(count).normal(size=(count, 5))
    assert iqm(scores) == pytest.approx(stats.trim_mean(scores, 0.25, axis=None))
    np.testing.assert_allclose(iqm(scores, 0), stats.trim_mean(scores, 0.25, axis=0))
    np.testing.assert_allclose(iqm(scores, 1), stats.trim_mean(scores, 0.25, axis=1))


def test_iqm_by_hand():
    assert iqm([100, 2, 1, 3]) == 2.5
    assert iqm([1, 2, 9]) == 4, "of fewer than four, the mean"


def test_bootstrap_draws_runs_within_each_task():
    scores = np.array([[0.0, 100.0], [1.0, 200.0], [2.0, 300.0]])
    draws = stratified_bootstrap(scores, lambda drawn, axis: drawn.min(axis), draws=500)
    assert set(draws) == {0, 1, 2}, "always three scores of the first task"
    both = stratified_bootstrap(scores, lambda drawn, axis: drawn[:, 0] * 1000 + drawn[:, 1], draws=500)
    assert len(set(both)) == 9, "the tasks' runs are drawn independently"


def test_bootstrap_draws_a_curve_as_a_whole():
    curves = np.array([[[1.0, 10.0, 100.0]], [[2.0, 20.0, 200.0]], [[4.0, 40.0, 400.0]]])
    draws = stratified_bootstrap(curves, draws=50)
    assert draws.shape == (50, 3)
    np.testing.assert_allclose(draws * [100, 10, 1], np.repeat(draws[:, 2:], 3, 1))
    assert np.ptp(draws[:, 0]) > 0


def test_bootstrap_is_repeatable():
    scores = np.random.default_rng(0).normal(size=(6, 3))
    np.testing.assert_array_equal(stratified_bootstrap(scores), stratified_bootstrap(scores))
    assert (stratified_bootstrap(scores, seed=1) != stratified_bootstrap(scores)).any()
    assert improvement_interval(scores, scores + 0.3) == improvement_interval(scores, scores + 0.3)
    assert mean_interval(scores[:, 0]) == mean_interval(scores[:, 0])


def test_interval_of_the_iqm_holds_the_truth_about_as_often_as_documented():
    rng = np.random.default_rng(0)

    def coverage(runs: int) -> float:
        intervals = [iqm_interval(rng.normal(7, 2, (runs, 1)), draws=400, seed=trial) for trial in range(400)]
        return np.mean([low <= 7 <= high for low, high in intervals])

    assert coverage(20) == pytest.approx(0.94, abs=0.04)
    assert coverage(3) == pytest.approx(0.75, abs=0.06)


def test_width_of_the_interval_is_that_of_theory():
    # Of n normal scores, the variance of the mean without a quarter at either end tends to 1.19 / n.
    low, high = iqm_interval(np.random.default_rng(0).normal(size=(2000, 1)))
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(1.19 / 2000), rel=0.15)


def test_probability_of_improvement_by_hand():
    assert probability_of_improvement(column(3, 4), column(1, 2)) == 1
    assert probability_of_improvement(column(1, 2), column(3, 4)) == 0
    assert probability_of_improvement(column(1, 2), column(1, 2)) == 0.5, "a tie counts half"
    assert probability_of_improvement(column(1, 3), column(2)) == 0.5
    assert probability_of_improvement(column(2, 3, 4), column(1, 3)) == pytest.approx(4.5 / 6)
    two_tasks = probability_of_improvement([[3, 1], [4, 2]], [[1, 3], [2, 4], [0, 5]])
    assert two_tasks == 0.5, "sure in one task, hopeless in the other"


def test_probability_of_improvement_is_mann_whitneys_u():
    rng = np.random.default_rng(0)
    for _ in range(20):
        x, y = rng.integers(0, 6, rng.integers(1, 7)), rng.integers(0, 6, rng.integers(1, 7))
        u = stats.mannwhitneyu(x, y, method="asymptotic").statistic
        assert probability_of_improvement(x[:, None], y[:, None]) == pytest.approx(u / (len(x) * len(y)))


def test_interval_of_the_probability_of_improvement():
    assert improvement_interval(column(4, 5, 6), column(1, 2, 3)) == (1, 1)
    for x, y in ((column(1, 3, 5, 7), column(4)), (column(4), column(1, 3, 5, 7))):
        low, high = improvement_interval(x, y)
        assert low < 0.3 < 0.7 < high, "both sides are drawn anew"
    low, high = improvement_interval(column(1, 4, 6, 8), column(2, 3, 5, 7))
    assert 0 <= low < 0.5 < high <= 1
    rng = np.random.default_rng(0)
    low, high = improvement_interval(rng.normal(1, 1, (200, 1)), rng.normal(0, 1, (200, 1)))
    truth = stats.norm.cdf(1 / math.sqrt(2))
    assert low < truth < high
    assert 0.04 < high - low < 0.14


def test_permutation_test_is_exact():
    assert permutation_test([4, 5, 6], [1, 2, 3]) == pytest.approx(2 / 20)
    assert permutation_test([1, 2, 3], [4, 5, 6, 7]) == pytest.approx(2 / 35)
    assert permutation_test([1, 1], [1, 1]) == 1
    rng = np.random.default_rng(0)
    for _ in range(10):
        x, y = rng.integers(0, 5, 4), rng.integers(1, 6, 3)
        centre = len(x) * len(y) / 2

        def distance(a, b, centre=centre):
            return abs((np.subtract.outer(a, b) > 0).sum() + (np.subtract.outer(a, b) == 0).sum() / 2 - centre)

        expected = stats.permutation_test((x, y), distance, alternative="greater", n_resamples=np.inf)
        assert permutation_test(x, y) == pytest.approx(expected.pvalue)


def test_permutation_test_of_many_runs_is_sampled():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0.6, 1, 20), rng.normal(0, 1, 20)
    assert permutation_test(x, y) == pytest.approx(stats.mannwhitneyu(x, y).pvalue, abs=0.01)
    assert permutation_test(x, y) == permutation_test(x, y)
    assert 0 < permutation_test(x + 100, y) < 0.001


def test_area_under_curve():
    x, y = np.array([10.0, 20.0, 40.0]), np.array([0.0, 1.0, 1.0])
    assert area_under_curve(x, y, 10, 40) == pytest.approx((5 + 20) / 30)
    assert area_under_curve(x, y, 10, 20) == 0.5
    assert area_under_curve(x, y, 15, 25) == pytest.approx((0.75 * 5 + 5) / 10), "ends between two points"
    assert area_under_curve(x, y, 15, 15) == 0.5
    assert area_under_curve(x * 7, y, 70, 280) == pytest.approx(area_under_curve(x, y, 10, 40)), "the unit is that of y"


def test_first_reached():
    x, y = np.array([10.0, 20.0, 30.0]), np.array([0.1, 0.9, 0.2])
    assert first_reached(x, y, 0.5) == 20, "a measured place, not one between two"
    assert first_reached(x, y, 0.9) == 20
    assert first_reached(x, y, 0.91) == math.inf


def test_wilson_interval_is_scipys():
    for successes, trials in ((0, 10), (3, 16), (16, 16), (41, 80)):
        expected = stats.binomtest(successes, trials).proportion_ci(method="wilson")
        np.testing.assert_allclose(wilson_interval(successes, trials), expected, atol=1e-6)
