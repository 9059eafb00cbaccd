"""Intervals of an evaluation."""

from math import nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from sheeplike.loop import Evaluation
from sheeplike.ranks import Ranks
from sheeplike.run import evaluation
from sheeplike.run.evaluation import mean_interval, summarize, wilson_interval


def test_interval_of_the_mean():
    values = np.random.default_rng(0).normal(3, 2, 400)
    low, high = mean_interval(values)
    assert (low + high) / 2 == pytest.approx(values.mean(), abs=0.02)
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.05)
    assert mean_interval(values) == (low, high), "the same values give the same interval"
    assert mean_interval(np.float32([5])) == (5, 5)


def test_wilson_interval_is_scipys():
    for successes, trials in ((0, 10), (3, 16), (16, 16), (41, 80)):
        expected = stats.binomtest(successes, trials).proportion_ci(method="wilson")
        np.testing.assert_allclose(wilson_interval(successes, trials), expected, atol=1e-6)


@pytest.mark.parametrize(("success", "rate"), [([nan, nan], None), ([nan, 1.0], 0.5), ([False, True], 0.5)])
def test_success_is_summarized_where_there_is_any(success, rate):
    numbers = torch.ones(2), torch.ones(2, dtype=torch.int32), torch.tensor(success)
    metrics = summarize(Evaluation(*numbers, {}, {}))
    assert metrics.get("eval/success_rate") == rate
    assert ("eval/success_lo" in metrics) == ("eval/success_hi" in metrics) == (rate is not None)


def test_no_two_rounds_of_ranks_play_the_same_episodes(monkeypatch):
    """Worlds without numbers draw from the seed of a round, and world ``i`` often from that seed plus ``i``."""
    asked = {}
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **options: asked.update(options))
    envs = SimpleNamespace(num_envs=8, first_env=None, device=torch.device("cpu"))
    drawn = []
    for rank in range(2):
        evaluation.play(None, envs, episodes=32, ranks=Ranks(rank, 2))
        rounds = [asked["seed"] + start * asked["ranks"] for start in range(0, 32, envs.num_envs)]
        drawn += [seed + world for seed in rounds for world in range(envs.num_envs)]
    assert len(set(drawn)) == 64
