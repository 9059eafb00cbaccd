"""Evaluation, during training and by ``eval``: episodes, statistics and videos."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.utils import _pytree as pytree

from sheeplike.agents.agent import Agent, own_randomness
from sheeplike.config.schema import Config
from sheeplike.loop import Evaluation, evaluate
from sheeplike.monitor.video import enlarge, tile_envs
from sheeplike.ranks import ALONE, Ranks
from sheeplike.run.build import make_envs

EVALUATION_SEED = 2**31  # above every seed of a run: evaluation worlds are never training worlds
MAX_EPISODES = 2**16  # most episodes of an evaluation; also the distance between evaluation seeds
VIDEO_ENVS = 9  # most worlds in a video


def play(
    agent: Agent,
    envs: VectorEnv,
    *,
    episodes: int,
    sample: bool = True,
    video: bool = True,
    seed: int = 0,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Evaluate ``agent`` in separate ``envs``; the same arguments give the same episodes.

    Args:
        episodes: at most :data:`MAX_EPISODES`.
        sample: sample the policy, or take its mode.
        video: film the first worlds.
        seed: from 0 to 32,767; training uses 0. Two seeds share no worlds and no samples.
    """
    seed = EVALUATION_SEED + seed * MAX_EPISODES
    # Evaluation must not change the random numbers of training.
    with own_randomness(envs.device):
        torch.manual_seed(ranks.seed(seed))
        video_envs = min(envs.num_envs, VIDEO_ENVS) if video else 0
        if envs.first_env is None:  # worlds without numbers: other seeds for each rank
            seed += ranks.rank * envs.num_envs
        options = {"sample": sample, "video_envs": video_envs, "ranks": ranks.size}
        return evaluate(agent, envs, episodes=episodes, seed=seed, **options)


def summarize(result: Evaluation) -> dict[str, float]:
    """Return means and 95 % intervals as ``eval/*``: bootstrap for returns, Wilson for success, if there is any."""
    returns = result.returns.numpy()
    low, high = mean_interval(returns)
    terms = {f"eval/reward_terms/{name}": float(value.mean()) for name, value in result.reward_terms.items()}
    reached = result.success.double()
    if not reached.isnan().all():
        successes, trials = int(reached.nansum()), len(returns)
        success_low, success_high = wilson_interval(successes, trials)
        terms |= {
            "eval/success_rate": successes / trials,
            "eval/success_lo": success_low,
            "eval/success_hi": success_high,
        }
    return terms | {
        "eval/return_mean": float(returns.mean()),
        "eval/return_lo": low,
        "eval/return_hi": high,
        "eval/length_mean": float(result.lengths.float().mean()),
        "eval/episodes": float(len(returns)),
    }


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % percentile-bootstrap interval of the mean of ``values (E,)``, deterministically."""
    values = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).choice(values, (2000, values.size))
    low, high = np.quantile(drawn.mean(1), [(1 - 0.95) / 2, (1 + 0.95) / 2])
    return float(low), float(high)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % score interval of a success rate; it has a width at 0 % and 100 % too."""
    z = 1.959964  # SciPy has more digits, but takes a second to import
    rate, z2 = successes / trials, z * z
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def videos(result: Evaluation) -> dict[str, Tensor]:
    """Return one video per camera, uint8 ``(T, H, W, 3)``: the recorded environments side by side, enlarged."""
    found = {}
    for camera, frames in result.frames.items():
        columns = math.ceil(math.sqrt(frames.shape[1]))
        found[camera] = tile_envs(enlarge(frames), math.ceil(frames.shape[1] / columns), columns)
    return found


@dataclass
class Evaluator:
    """Evaluates an agent in separate environments, built at the first evaluation."""

    config: Config
    agent: Agent
    device: torch.device
    ranks: Ranks = ALONE
    envs: VectorEnv | None = None

    def __call__(self) -> Evaluation:
        """Run the evaluation that the configuration asks for; the episodes of all ranks count, the first is filmed."""
        asked = self.config.eval
        if self.envs is None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # shown when the training environments were built
                self.envs = make_envs(
                    self.config, asked.num_envs, self.device, randomize=asked.randomize, rank=self.ranks.rank
                )
        video, ranks = asked.video and self.ranks.first, self.ranks
        own = play(self.agent, self.envs, episodes=asked.episodes, sample=asked.sample, video=video, ranks=ranks)
        if ranks.size == 1:
            return own
        results = ranks.collect(own._replace(frames={}))
        joined = pytree.tree_map(lambda *parts: torch.cat(parts), *(tuple(result) for result in results))
        return Evaluation(*joined)._replace(frames=own.frames)

    def close(self) -> None:
        if self.envs is not None:
            self.envs.close()
