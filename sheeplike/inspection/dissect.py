"""Measurements of a trained world model: predictions, their range and calibration, and the content of its latents.

Everything is measured on episodes that the model was not trained on. The results are plain numbers, nested by name.

Shape letters: ``E`` episodes, ``T`` steps of the longest, ``P`` starts of open-loop predictions, ``I`` imagined steps,
``S`` groups, ``K`` classes, ``F`` features, ``N`` entries of a vector.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.inspection import likelihood, probes
from sheeplike.inspection.episodes import MIN_EPISODES, Episodes
from sheeplike.inspection.model import DETER, States, TrainedModel, combine, psnr

AHEAD = (1, 5, 15, 50)  # errors and probes are listed after so many imagined steps
HORIZON = max(AHEAD)
CONTEXT = 5  # minimum number of observed steps before the model imagines
MAX_STARTS, MIN_STARTS = 256, 8  # numbers of open-loop predictions: in all, and in a mean
BINS = 10
DEAD_KL = 0.01  # nats; below it, a group tells nothing that the recurrent state does not
SAME_CLASS = 0.99  # share of the steps at which a constant group has the same likeliest class
ABLATED = 256  # states whose parts are replaced
FILM = (1, 2, 5, 10, 15, 25, 50)  # imagined steps that a film strip shows
PRIVILEGED_STATE = "privileged_state"
MIN_ROWS = 30  # minimum number of imagined states that a probe is tested on
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Strip:
    """An open-loop prediction as pictures ``(I, H, W, C)`` uint8, ``ahead`` steps after the last observation."""

    title: str
    camera: str
    ahead: list[int]
    truth: Tensor
    model: Tensor


@dataclass
class Findings:
    """Results of :func:`dissect`."""

    numbers: Numbers = field(default_factory=dict)  # nested: part, such as ``surprise``, and kind of episodes
    strips: list[Strip] = field(default_factory=list)  # the best, the median and the worst episode of the first kind
    linear: probes.LinearProbe | None = None  # of ``privileged_state``, if the environment has it


@dataclass(frozen=True)
class OpenLoop:
    """Predictions from recorded actions alone, starting at ``P`` steps of the episodes."""

    rows: Tensor  # (P,) int64, episode of the last observation
    times: Tensor  # (P,) int64, its step
    valid: Tensor  # (P, I) bool: the episode was not over yet
    errors: dict[str, Tensor]  # observation to (P, I), mean squared error in the units of the decoder
    still: dict[str, Tensor]  # observation to (P, I), the error of predicting no change
    reward: Tensor  # (P, I) absolute error of the expected reward
    states: dict[int, States]  # imagined steps to states (P,), for those in AHEAD and FILM


def dissect(
    model: TrainedModel,
    played: Mapping[str, Episodes],
    *,
    positions: Mapping[str, slice] | None = None,
    entries: Mapping[str, slice] | None = None,
    seed: int = 0,
) -> Findings:
    """Measure the model on episodes of several kinds, such as ``policy`` and ``random``.

    Film strips, and probes of single parts of the state, are made for the first kind alone. ``positions``, in metres,
    and other ``entries`` are those of the environment: slices of ``privileged_state`` by name.
    """
    counts = {kind: len(episodes) for kind, episodes in played.items()}
    assert min(counts.values()) >= MIN_EPISODES, counts
    found = Findings()
    states = {kind: observe(model, episodes, seed=seed) for kind, episodes in played.items()}
    ahead = {kind: open_loop(model, played[kind], states[kind], seed=seed) for kind in played}
    parts: dict[str, Any] = {
        "episodes": lambda kind: describe_episodes(played[kind]),
        "open_loop": lambda kind: summarize_open_loop(model, played[kind], states[kind], ahead[kind]),
        "reward": lambda kind: reward_prediction(model, played[kind], states[kind]),
        "continue": lambda kind: continue_prediction(model, played[kind], states[kind]),
        "surprise": lambda kind: surprise(model, played[kind], states[kind]),
        "groups": lambda kind: groups(model, played[kind], states[kind]),
        "likelihood": lambda kind: likelihood.bounds(model, played[kind], states[kind], seed=seed),
        "effects": lambda kind: effects(model, played[kind], states[kind], seed=seed),
    }
    found.numbers = {name: {kind: measure(kind) for kind in played} for name, measure in parts.items()}
    if all(PRIVILEGED_STATE in episodes.obs for episodes in played.values()):
        found.linear, found.numbers["probes"] = probe(model, played, states, ahead, seed=seed)
        found.numbers["probes"]["groups"] = probe_groups(model, played, states, seed=seed)
        names = [f"entry {entry}" for entry in range(len(found.linear.bias))]
        places, others = (
            {name: range(len(names))[where] for name, where in (named or {}).items()} for named in (positions, entries)
        )
        for name, place in (others | places).items():
            for entry, axis in zip(place, "xyz" if name in places else range(1, len(place) + 1), strict=False):
                names[entry] = re.sub("(?=,|$)", f" {axis}", name, count=1) if len(place) > 1 else name
        found.numbers["probes"] |= {"names": names, "positions": sorted(n for place in places.values() for n in place)}
    found.numbers["notes"] = notes(model, played)
    kind = next(iter(played))
    found.strips = film_strips(model, played[kind], states[kind], seed=seed)
    return found


def observe(model: TrainedModel, episodes: Episodes, *, seed: int = 0) -> States:
    """Return posterior states ``(E, T)``, on the model's device."""
    batch = max(model.batch_size // episodes.steps, 1)
    parts = []
    with own_randomness(model.device):
        torch.manual_seed(seed)
        for start in range(0, len(episodes), batch):
            rows = slice(start, start + batch)
            seen = {key: episodes.obs[key][rows] for key in model.observations}
            parts.append(model.observe(seen, episodes.action[rows]))
    return combine(parts)


def notes(model: TrainedModel, played: Mapping[str, Episodes]) -> list[str]:
    """List what could not be measured and why, one sentence each."""
    found = []
    if not all(PRIVILEGED_STATE in episodes.obs for episodes in played.values()):
        found.append(f"No probes: the environment has no {PRIVILEGED_STATE}.")
    if math.isinf(likelihood.variance(model)):
        found.append("No likelihood: the model does not learn to predict observations.")
    for kind, episodes in played.items():
        context = context_of(episodes)
        if context < CONTEXT:
            found.append(f"Open loop ({kind}): no episode is longer than {CONTEXT} steps; {context} are observed.")
        elif left_out := int((episodes.lengths <= CONTEXT).sum()):
            found.append(f"Open loop ({kind}): episodes of at most {CONTEXT} steps, left out: {left_out}.")
    return found


def describe_episodes(episodes: Episodes) -> Numbers:
    """Summarise returns, lengths and ends."""
    ended = episodes.is_terminal[torch.arange(len(episodes)), episodes.lengths - 1]
    return {
        "episodes": len(episodes),
        "steps": int(episodes.lengths.sum()),
        "return_mean": episodes.returns.mean().item(),
        "length_mean": (episodes.lengths.float() - 1).mean().item(),
        "terminated": ended.float().mean().item(),
    }


# --- predictions ------------------------------------------------------------------------------------------------------


def open_loop(model: TrainedModel, episodes: Episodes, states: States, *, seed: int = 0) -> OpenLoop:
    """Imagine :data:`HORIZON` steps with the recorded actions, from random steps of the episodes."""
    # Evenly spaced steps might coincide with a rhythm of the episodes.
    first = context_of(episodes) - 1
    places = (episodes.valid[:, 1:] & (torch.arange(episodes.steps - 1) >= first)).nonzero()
    chosen = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:MAX_STARTS].sort().values
    return _imagine(model, episodes, states, *places[chosen].unbind(1), seed=seed)


def _imagine(
    model: TrainedModel, episodes: Episodes, states: States, rows: Tensor, times: Tensor, *, seed: int
) -> OpenLoop:
    state, last = states[rows, times], episodes.lengths[rows] - 1
    valid = times[:, None] + torch.arange(1, HORIZON + 1) <= last[:, None]
    known = {key: model.decoder_target(key, episodes.obs[key][rows, times]) for key in model.world.decoder.keys.spaces}
    errors, still = ({key: torch.zeros(valid.shape) for key in known} for _ in range(2))
    reward, imagined = torch.zeros(valid.shape), {}
    with own_randomness(model.device):
        torch.manual_seed(seed)
        for step in range(1, HORIZON + 1):
            now = (times + step).minimum(last)
            action = episodes.action[rows, (times + step - 1).minimum(now)]
            state = model.imagine(state, action[:, None])[:, 0]
            imagined |= {step: state} if step in (*AHEAD, *FILM) else {}
            predicted = model.predict(state)
            for key in known:
                truth = model.decoder_target(key, episodes.obs[key][rows, now])
                errors[key][:, step - 1] = (predicted[key] - truth).square().flatten(1).mean(1)
                still[key][:, step - 1] = (known[key] - truth).square().flatten(1).mean(1)
            reward[:, step - 1] = (model.reward(state).pred().cpu() - episodes.reward[rows, now]).abs()
    return OpenLoop(rows, times, valid, errors, still, reward, imagined)


def context_of(episodes: Episodes) -> int:
    """Return the number of observed steps: :data:`CONTEXT`, or fewer if no episode is that long."""
    return min(CONTEXT, int(episodes.lengths.max()) - 1)


def summarize_open_loop(model: TrainedModel, episodes: Episodes, states: States, ahead: OpenLoop) -> Numbers:
    """Average errors by steps ahead, beside those of reconstructions and those of predicting no change.

    Errors of a camera are of pixels in [0, 1]; its ``psnr`` is in dB. From the step ``breaks_at`` on, if there is one,
    the dream is no better than a still picture. Steps with fewer than :data:`MIN_STARTS` predictions are left out.
    """
    counts = ahead.valid.sum(0)
    steps = [step for step in range(1, HORIZON + 1) if counts[step - 1] >= min(MIN_STARTS, len(ahead.rows))]
    seen = {key: value.item() for key, value in _reconstruction(model, episodes, states).items()}
    found: Numbers = {"context": context_of(episodes), "starts": len(ahead.rows)}
    found |= {"steps": steps, "count": [int(counts[step - 1]) for step in steps]}
    for key, error in ahead.errors.items():
        mean, idle = (_mean_over(values, ahead.valid) for values in (error, ahead.still[key]))
        one: Numbers = {"mse": mean[: len(steps)], "copy_last_mse": idle[: len(steps)], "reconstruction_mse": seen[key]}
        good = [step for step, error, still in zip(steps, mean, idle, strict=False) if error < still]
        if broken := [step for step in steps if step > max(good, default=0)]:
            one["breaks_at"] = broken[0]
        at = {step: one["mse"][step - 1] for step in AHEAD if step in steps}
        one |= {f"mse@{step}": value for step, value in at.items()}
        if key in model.cameras:
            one |= {f"psnr@{step}": psnr(value) for step, value in at.items()}
            one["reconstruction_psnr"] = psnr(seen[key])
        found[key] = one
    found["reward"] = {"absolute_error": _mean_over(ahead.reward, ahead.valid)[: len(steps)]}
    return found


def _reconstruction(model: TrainedModel, episodes: Episodes, states: States) -> dict[str, Tensor]:
    """Return the mean squared error of each reconstruction, 0-dim."""
    names = list(model.world.decoder.keys.spaces)

    def errors(rows: Tensor, times: Tensor) -> Tensor:
        predicted = model.predict(states[rows, times])
        known = {key: model.decoder_target(key, episodes.obs[key][rows, times]) for key in names}
        return torch.stack([(predicted[key] - known[key]).square().flatten(1).mean(1) for key in names], 1)

    return dict(zip(names, model.in_batches(errors, *episodes.valid.nonzero().unbind(1)).mean(0), strict=True))


def film_strips(model: TrainedModel, episodes: Episodes, states: States, *, seed: int = 0) -> list[Strip]:
    """Show the best, the median and the worst episode per camera, by the error of the prediction from its start."""
    context = context_of(episodes)
    rows = (episodes.lengths > context).nonzero()[:MAX_STARTS, 0]
    times = torch.full_like(rows, context - 1)
    whole = _imagine(model, episodes, states, rows, times, seed=seed)
    strips = []
    for camera in model.cameras:
        mean = torch.where(whole.valid, whole.errors[camera], 0.0).sum(1) / whole.valid.sum(1)
        order = mean.argsort()
        for title, place in (("best", 0), ("median", len(order) // 2), ("worst", len(order) - 1)):
            chosen = int(order[place])
            row = int(rows[chosen])
            steps = [step for step in FILM if whole.valid[chosen, step - 1]]
            painted = model.predict(combine([whole.states[step][chosen] for step in steps], torch.stack))[camera]
            truth = model.decoder_target(camera, episodes.obs[camera][row, context - 1 + torch.tensor(steps)])
            shown = ((x.cpu() * 255).round().clamp(0, 255).to(torch.uint8) for x in (truth, painted))
            error = f"mean squared error {mean[chosen].item():.2g} over {int(whole.valid[chosen].sum())} steps"
            label = f"{title} of {len(order)} episodes (number {row}), {error}"
            strips.append(Strip(label, camera.removeprefix("pixels/"), steps, *shown))
    return strips


# --- calibration ------------------------------------------------------------------------------------------------------


def reward_prediction(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """Measure the log-likelihood of rewards in nats, also by their sign, and the calibration.

    The likelihood is that of the training loss: the negative cross entropy to the two bins beside the reward.
    """
    states, reward = states[episodes.valid], episodes.reward[episodes.valid]

    def scores(some: States, came: Tensor) -> Tensor:
        head = model.reward(some)
        return torch.stack([-head.loss(came.to(model.device)), head.pred()], 1)

    log_likelihood, expected = model.in_batches(scores, states, reward).unbind(1)
    signs = {"negative": reward < 0, "zero": reward == 0, "positive": reward > 0}
    found: Numbers = {"log_likelihood": log_likelihood.mean().item()}
    found |= _by_part("log_likelihood_by_sign", log_likelihood, signs)
    found["absolute_error"] = (expected - reward).abs().mean().item()
    variance = reward.var(correction=0)
    if variance > 1e-12:
        found["r2"] = (1 - (expected - reward).square().mean() / variance).item()
    return found | {"calibration": calibration(expected, reward)}


def continue_prediction(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """Measure the log-likelihood in nats of the continue head's target, and the calibration of ends.

    The target is ``(1 - terminal) * (1 - 1/horizon)``. ``best`` is the likelihood of a head that predicts it exactly,
    below 0 since the target is not always 0 or 1. The calibration is of the probabilities without the horizon.
    """
    states, ended = states[episodes.valid], episodes.is_terminal[episodes.valid]
    target = (1 - ended.float()) * (1 - 1 / model.world.horizon)

    def scores(some: States, learnt: Tensor) -> Tensor:
        return torch.stack([-model.cont(some).loss(learnt.to(model.device)), 1 - model.continue_prob(some)], 1)

    log_likelihood, ends = model.in_batches(scores, states, target).unbind(1)
    best = (target * target.clamp_min(1e-12).log() + (1 - target) * (1 - target).clamp_min(1e-12).log()).mean()
    return {
        "log_likelihood": log_likelihood.mean().item(),
        "best": best.item(),
        **_by_part("by_end", log_likelihood, {"goes_on": ~ended, "ends": ended}),
        "calibration": calibration(ends, ended.float(), edges=(0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)),
    }


def _by_part(name: str, values: Tensor, parts: Mapping[str, Tensor]) -> Numbers:
    """Count and average values in parts of the steps."""
    means = {part: values[chosen].mean().item() for part, chosen in parts.items() if chosen.any()}
    return {"count": {part: int(chosen.sum()) for part, chosen in parts.items()}, name: means}


def calibration(expected: Tensor, happened: Tensor, edges: tuple[float, ...] | None = None) -> Numbers:
    """Compare the means of ``expected (M,)`` and ``happened (M,)`` in bins of similar expectation.

    Args:
        edges: between two bins; None: bins of equally many steps each.

    Returns:
        ``expected``, ``happened``, ``count`` of each bin, and ``error``, the mean distance weighted by the counts.
    """
    if edges is None:
        cuts = torch.quantile(expected.double(), torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]).unique()
    else:
        cuts = torch.tensor(edges, dtype=torch.float64)
    place = torch.bucketize(expected.double(), cuts)
    count = torch.bincount(place)
    used = count > 0
    sums = (torch.bincount(place, values.double())[used] for values in (expected, happened))
    means = {name: one / count[used] for name, one in zip(("expected", "happened"), sums, strict=True)}
    error = (count[used] * (means["expected"] - means["happened"]).abs()).sum() / len(expected)
    return {name: one.tolist() for name, one in (means | {"count": count[used], "error": error}).items()}


def surprise(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """Measure the KL of posterior to prior in nats, by the step of the episode, and its quantiles without the first."""
    kl = torch.zeros(episodes.valid.shape)
    kl[episodes.valid] = model.in_batches(model.kl, states[episodes.valid])
    values = kl[episodes.valid & (torch.arange(episodes.steps) > 0)].double()
    counts = episodes.valid.sum(0)
    shown = int((counts >= max(len(episodes) // 4, 1)).sum())
    return {
        "first_step": kl[:, 0].mean().item(),
        "mean": values.mean().item(),
        **{f"p{q}": torch.quantile(values, q / 100).item() for q in (5, 50, 95, 99)},
        "over_time": [(kl[:, t][episodes.valid[:, t]]).mean().item() for t in range(shown)],
    }


# --- content of the latents -------------------------------------------------------------------------------------------


def groups(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """Measure each categorical group's KL to the prior in nats, and the use of its classes, without first steps.

    *unsurprising*: its KL is below :data:`DEAD_KL`. *constant*: its likeliest class is the same at :data:`SAME_CLASS`
    of the steps. *dead*: both.
    """
    states = states[episodes.valid & (torch.arange(episodes.steps) > 0)]
    kl = model.in_batches(lambda some: model.kl(some, per_group=True), states).mean(0)
    share = torch.nn.functional.one_hot(states.logits.argmax(-1), model.classes).float().mean(0).cpu()  # (S, K)
    entropy = -(share * share.clamp_min(1e-12).log()).sum(-1)
    quiet, still = kl < DEAD_KL, share.amax(-1) >= SAME_CLASS
    return {
        "kl": kl.tolist(),
        "top_class_share": share.amax(-1).tolist(),
        "usage_entropy": entropy.tolist(),
        "unsurprising": quiet.nonzero()[:, 0].tolist(),
        "constant": still.nonzero()[:, 0].tolist(),
        "dead": (quiet & still).nonzero()[:, 0].tolist(),
    }


def effects(model: TrainedModel, episodes: Episodes, states: States, *, seed: int = 0) -> Numbers:
    """Run :meth:`TrainedModel.ablate` on states of random steps."""
    valid = episodes.valid.nonzero()
    rows, times = valid[torch.randperm(len(valid), generator=torch.Generator().manual_seed(seed))[:ABLATED]].unbind(1)
    found = model.ablate(states[rows, times], seed=seed)
    numbers = {name: getattr(found, name).tolist() for name in ("pixels", "reward", "value", "kl")}
    return {"parts": [str(part) for part in found.parts], **numbers}


def probe(
    model: TrainedModel,
    played: Mapping[str, Episodes],
    states: Mapping[str, States],
    ahead: Mapping[str, OpenLoop],
    *,
    seed: int,
) -> tuple[probes.LinearProbe, Numbers]:
    """Predict every entry of ``privileged_state`` from observed and from imagined latents.

    A linear probe and an MLP learn from posterior states of the training episodes of all kinds, and are tested on the
    other episodes of each kind: on all posterior states, and on imagined ones beside the posterior of the same steps.

    Returns:
        The linear probe; and by kind and steps ahead, ``0`` for all steps, the scores of ``seen`` and ``imagined``
        states. ``predicted``: the model was trained to predict the vector.
    """
    splits = {kind: probes.split(len(episodes), seed=seed) for kind, episodes in played.items()}
    features, target, episode = _rows_of(played, states, {kind: fit for kind, (fit, _) in splits.items()})
    linear = probes.fit_linear(features, target, episode, seed=seed)
    mlp = probes.fit_mlp(features, target, episode, seed=seed)
    spread = target.std(0, correction=0)
    found: Numbers = {"target": PRIVILEGED_STATE, "predicted": PRIVILEGED_STATE in model.world.decoder.keys.spaces}
    found["constant"] = probes.constant(target).nonzero()[:, 0].tolist()
    for kind, (_, held_out) in splits.items():
        features, target, _ = _rows_of(played, states, {kind: held_out})
        found[kind] = {"0": {"seen": _scores(linear, mlp, features, target, spread)}}
        one = ahead[kind]
        for step in AHEAD:
            chosen = torch.isin(one.rows, held_out) & one.valid[:, step - 1]
            if int(chosen.sum()) >= MIN_ROWS:
                rows, times = one.rows[chosen], one.times[chosen] + step
                truth = played[kind].obs[PRIVILEGED_STATE][rows, times]
                pair = {"imagined": one.states[step][chosen], "seen": states[kind][rows, times]}
                found[kind][str(step)] = {
                    name: _scores(linear, mlp, some.features.cpu(), truth, spread) for name, some in pair.items()
                }
    return linear, found


def probe_groups(
    model: TrainedModel, played: Mapping[str, Episodes], states: Mapping[str, States], *, seed: int
) -> Numbers:
    """Return R^2 ``{part: (N,)}`` of linear probes on one part of the state alone, on episodes of the first kind."""
    kind = next(iter(played))
    fit, held_out = probes.split(len(played[kind]), seed=seed)
    features, target, episode = _rows_of(played, states, {kind: fit})
    tested, truth, _ = _rows_of(played, states, {kind: held_out})
    spans = {
        str(g): slice(model.deter + g * model.classes, model.deter + (g + 1) * model.classes)
        for g in range(model.groups)
    }
    spans |= {DETER: slice(0, model.deter), "stoch": slice(model.deter, None)}
    found = {}
    for part, span in spans.items():
        fitted = probes.fit_linear(features[:, span], target, episode, seed=seed)
        found[part] = probes.r_squared(fitted.predict(tested[:, span]), truth, target.std(0, correction=0))
    return found


def _scores(
    linear: probes.LinearProbe, mlp: probes.MLPProbe, features: Tensor, target: Tensor, spread: Tensor
) -> Numbers:
    """Score each probe: by entry R^2 and RMSE; the median R^2 of the entries that vary."""
    found: Numbers = {"rows": len(target)}
    for name, one in (("linear", linear), ("mlp", mlp)):
        read = one.predict(features)
        scores = probes.r_squared(read, target, spread)
        found[name] = {"r2": scores, "rmse": probes.rmse(read, target)}
        if known := [score for score in scores if score is not None]:
            found[name]["r2_median"] = statistics.median(known)
    return found


def _rows_of(
    played: Mapping[str, Episodes], states: Mapping[str, States], chosen: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features ``(M, F)``, targets ``(M, N)`` and the episode ``(M,)`` of every step of some episodes."""
    features, targets, numbers, before = [], [], [], 0
    for kind, rows in chosen.items():
        valid = played[kind].valid[rows]
        features.append(states[kind][rows][valid].features.cpu())
        targets.append(played[kind].obs[PRIVILEGED_STATE][rows][valid])
        numbers.append((rows[:, None] + before).expand_as(valid)[valid])
        before += len(played[kind])
    return torch.cat(features), torch.cat(targets), torch.cat(numbers)


def _mean_over(values: Tensor, valid: Tensor) -> list[float]:
    """Average the valid ones of ``(P, I)`` values, to ``(I,)``."""
    return (torch.where(valid, values, 0.0).sum(0) / valid.sum(0).clamp_min(1)).tolist()
