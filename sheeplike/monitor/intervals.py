"""Confidence intervals of an evaluation. Standard library and NumPy only; small samples are the rule here."""

from __future__ import annotations

import math

import numpy as np


def mean_interval(values: np.ndarray, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """Percentile-bootstrap interval of the mean of ``values (E,)``; the same values give the same interval."""
    values = np.asarray(values, np.float64)
    rng = np.random.default_rng(seed)
    means = rng.choice(values, (draws, values.size)).mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def wilson_interval(successes: int, trials: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a success rate: sensible at 0 % and 100 %, where the normal one has no width."""
    rate, z2 = successes / trials, z * z
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)
