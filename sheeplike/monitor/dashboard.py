"""TensorBoard beyond single curves: charts of curves that belong together, and the table that compares runs.

The charts stand under *Custom Scalars*, the table under *HParams*. TensorBoard merges equal charts of all runs, so a
chart is the same for every agent, and finds its curves by regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Chart(NamedTuple):
    """One chart."""

    tags: tuple[str, ...]  # regular expressions, matched from a tag's beginning; for a margin mean, low and high
    needs: str = ""  # the chart is left out unless one of the agent's metrics matches
    margin: bool = False  # draws the band between low and high


CATEGORIES = {
    "Compare": {
        "return in training": Chart(("rollout/return_mean$",)),
        "return in evaluation, 95 %": Chart(("eval/return_mean", "eval/return_lo", "eval/return_hi"), margin=True),
        "success in evaluation, 95 %": Chart(("eval/success_rate", "eval/success_lo", "eval/success_hi"), margin=True),
        "policy steps per second": Chart(("time/env_sps$",)),
    },
    "World model": {
        "losses of predictions": Chart(("loss/pixels/", "loss/.*state$", "loss/reward$", "loss/continue$"), "wm/"),
        "KL divergence": Chart(("wm/kl$", "loss/dyn$", "loss/rep$"), "wm/kl"),
        "entropy of the latents": Chart(("wm/prior_entropy$", "wm/posterior_entropy$"), "wm/prior_entropy"),
        "PSNR of reconstructed images, dB (higher is better)": Chart(("wm/psnr/",), "wm/psnr/"),
        "open-loop image error": Chart(("wm/open_loop_mse@",), "wm/psnr/"),
        "read off the latents, R^2": Chart(("probe/r2/",), "probe/r2/"),
    },
    "Policy": {
        "losses": Chart(("loss/policy$", "loss/value$", "loss/replay_value$"), "loss/policy"),
        "entropy": Chart(("actor/entropy$",), "actor/entropy"),
        "value": Chart(("critic/value$", "critic/slow_value$", "actor/imagined_return$"), "critic/value"),
        "PPO": Chart(("ppo/",), "ppo/"),
    },
    "Health": {
        "gradient norms": Chart(("grad_norm/",), "grad_norm/"),
        "not finite": Chart(("health/",)),
        "learning rate": Chart(("opt/learning_rate$",), "opt/learning_rate"),
    },
}

OUTCOMES = ("eval/return_mean", "eval/success_rate", "rollout/return_mean", "time/env_sps")


def layout(metrics: Iterable[str]) -> dict[str, dict[str, list[Any]]]:
    """Return the charts for an agent that writes ``metrics``, in the form of torch's ``custom_scalars``."""
    metrics = list(metrics)
    chosen: dict[str, dict[str, list[Any]]] = {}
    for category, charts in CATEGORIES.items():
        for title, chart in charts.items():
            if not chart.needs or any(re.match(chart.needs, name) for name in metrics):
                kind = "Margin" if chart.margin else "Multiline"
                chosen.setdefault(category, {})[title] = [kind, list(chart.tags)]
    return chosen


def table_entry(columns: Mapping[str, type], values: Mapping[str, float | str]) -> list[Any]:
    """Return the three summaries that enter a run into the table; its outcomes are the last values of its own curves.

    ``SummaryWriter.add_hparams`` would write a second run below this one, and declare the columns of this run alone,
    while TensorBoard takes those of one run for all.
    """
    from torch.utils.tensorboard.summary import hparams

    experiment, _, _ = hparams({name: kind() for name, kind in columns.items()}, dict.fromkeys(OUTCOMES, 0.0))
    _, start, end = hparams(dict(values), {})
    return [experiment, start, end]
