"""Coverage of compare's interval of a success rate: ``python tests/benchmarks/coverage.py [experiments=2000]``.

Seeds have success rates of a beta distribution, and each is measured over some episodes. The table says in how many
simulated experiments a 95 % interval holds the mean of that distribution, and how wide it is in the mean, in points.
"""

from __future__ import annotations

import sys

import numpy as np

from sheeplike.analysis.comparison import markdown_table
from sheeplike.analysis.statistics import success_interval
from sheeplike.run.evaluation import wilson_interval

RATES = {
    "Beta(2, 1), mean 67 %": (2, 1),
    "Beta(8, 2), mean 80 %": (8, 2),
    "Beta(50, 10), mean 83 %": (50, 10),
    "Beta(30, 1), mean 97 %": (30, 1),
    "Beta(0.5, 0.5), mean 50 %": (0.5, 0.5),
}
SEEDS, EPISODES = (3, 5, 10), (16, 32, 100)
RESAMPLES = 1000


def from_seeds(successes: np.ndarray, episodes: int, _: np.random.Generator) -> tuple[float, float]:
    """The interval that ``compare`` shows."""
    return success_interval(successes / episodes, np.full(len(successes), float(episodes)))


def bootstrap(successes: np.ndarray, episodes: int, rng: np.random.Generator) -> tuple[float, float]:
    """Percentiles of means of seeds drawn with replacement, and then of their episodes."""
    drawn = rng.choice(successes, (RESAMPLES, len(successes)))
    return tuple(np.quantile(rng.binomial(episodes, drawn / episodes).mean(-1) / episodes, (0.025, 0.975)))


def pooled(successes: np.ndarray, episodes: int, _: np.random.Generator) -> tuple[float, float]:
    """Wilson's interval of all episodes, as if one agent had played them."""
    return wilson_interval(int(successes.sum()), episodes * len(successes))


METHODS = {"from seeds (compare)": from_seeds, "hierarchical bootstrap": bootstrap, "pooled episodes": pooled}


def main(experiments: int) -> None:
    rng = np.random.default_rng(0)
    rows = [["rates of seeds", "seeds", "episodes each", *METHODS]]
    for name, (a, b) in RATES.items():
        mean = a / (a + b)
        for seeds in SEEDS:
            for episodes in EPISODES:
                successes = rng.binomial(episodes, rng.beta(a, b, (experiments, seeds)))
                cells = []
                for method in METHODS.values():
                    low, high = np.array([method(one, episodes, rng) for one in successes]).T
                    cells.append(f"{np.mean((low <= mean) & (mean <= high)):.0%}, {100 * np.mean(high - low):.0f} wide")
                rows.append([name, str(seeds), str(episodes), *cells])
    print(
        f"{experiments:,} experiments each; a cell's coverage has a standard error of at most "
        f"{50 / experiments**0.5:.1f} points.\n"
    )
    print(markdown_table(rows))


if __name__ == "__main__":
    options = dict(argument.split("=") for argument in sys.argv[1:])
    main(int(options.get("experiments", 2000)))
