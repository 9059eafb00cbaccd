"""A trained world model taken apart with numbers: what it predicts, how far, how surely, and where it keeps what.

Everything is measured on episodes that it was not trained on. The results are plain numbers, nested by name.

Shape letters: ``E`` episodes, ``T`` steps of the longest, ``P`` starts of open-loop predictions, ``I`` imagined steps,
``S`` groups, ``K`` classes, ``F`` features, ``N`` entries of a vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.inspection import likelihood, probes
from sheeplike.inspection.episodes import FEWEST, Episodes
from sheeplike.inspection.model import DETER, States, TrainedModel, combine, psnr

AHEAD = (1, 5, 15, 50)  # imagined steps whose errors are told apart
HORIZON = max(AHEAD)
CONTEXT = 5  # steps that the model has seen, at least, when it begins to imagine
STARTS, LEAST_STARTS = 256, 8  # open-loop predictions, at most, and of a mean at least
BINS = 10  # of a calibration
DEAD_KL = 0.01  # nats, below which a group says nothing that the recurrent state does not
SAME_CLASS = 0.99  # share of the steps at which a constant group's likeliest class is one and the same
ABLATED = 256  # states
FILM = (1, 2, 5, 10, 15, 25, 50)  # steps ahead that a film strip shows
PRIVILEGED_STATE = "privileged_state"
LEAST_ROWS = 30  # imagined states that a probe is tested on: an R^2 of fewer says little
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Strip:
    """An open-loop prediction to look at: ``ahead`` steps beside what happened, ``(I, H, W, C)`` uint8."""

    title: str
    camera: str
    ahead: list[int]
    truth: Tensor
    model: Tensor


@dataclass
class Findings:
    """What was found.

    Attributes:
        numbers: by part, such as ``surprise``, and within it by kind of episodes. ``notes`` are sentences: what could
            not be measured, and why.
        strips: film strips of the best, the median and the worst episode, of the first kind.
        linear: the linear probe of ``privileged_state``, or None where there is no such vector.
    """

    numbers: Numbers = field(default_factory=dict)
    strips: list[Strip] = field(default_factory=list)
    linear: probes.LinearProbe | None = None


@dataclass(frozen=True)
class OpenLoop:
    """Predictions from recorded actions alone, from ``P`` places in the episodes.

    Attributes:
        rows, times: ``(P,)`` int64, episode and step of the last observation that was seen.
        valid: ``(P, I)`` bool: the episode was not over yet.
        errors: observation to ``(P, I)``, mean squared error in the units in which it is learnt.
        still: observation to ``(P, I)``, that of predicting no change at all.
        reward: ``(P, I)`` absolute error of the expected reward.
        kept: imagined steps to states ``(P,)``, for those in :data:`AHEAD` and :data:`FILM`.
    """

    rows: Tensor
    times: Tensor
    valid: Tensor
    errors: dict[str, Tensor]
    still: dict[str, Tensor]
    reward: Tensor
    kept: dict[int, States]


def dissect(model: TrainedModel, played: Mapping[str, Episodes], *, seed: int = 0) -> Findings:
    """Take the model apart on episodes of several kinds, such as ``policy`` and ``random``, the first most closely.

    Raises:
        ValueError: fewer than four episodes of a kind.
    """
    for kind, episodes in played.items():
        if len(episodes) < FEWEST:
            problem = f"{len(episodes)} episodes of kind {kind}: expected at least {FEWEST}"
            raise ValueError(f"{problem}, to fit on some of them")
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
    found.numbers["notes"] = notes(model, played)
    kind = next(iter(played))
    found.strips = film_strips(model, played[kind], states[kind], seed=seed)
    return found


def observe(model: TrainedModel, episodes: Episodes, *, seed: int = 0) -> States:
    """Posterior states ``(E, T)``, on the model's device."""
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
    """What is missing among the numbers, a sentence each."""
    found = []
    if not all(PRIVILEGED_STATE in episodes.obs for episodes in played.values()):
        found.append(f"No probes: the environment has no {PRIVILEGED_STATE}.")
    if math.isinf(likelihood.variance(model)):
        found.append("No likelihood: the model does not learn to predict observations.")
    for kind, episodes in played.items():
        longest, context = int(episodes.lengths.max()), context_of(episodes)
        if longest < likelihood.WINDOW:
            limit = f"the longest of the episodes has {longest} steps, a window {likelihood.WINDOW}"
            found.append(f"No bound of windows ({kind}): {limit}.")
        if context < CONTEXT:
            found.append(f"Open loop ({kind}): no episode is longer than {CONTEXT} steps, so that {context} are seen.")
        elif left_out := int((episodes.lengths <= CONTEXT).sum()):
            found.append(f"Open loop ({kind}): {left_out} episodes of at most {CONTEXT} steps are left out.")
    return found


def describe_episodes(episodes: Episodes) -> Numbers:
    """How the episodes went."""
    ended = episodes.is_terminal[torch.arange(len(episodes)), episodes.lengths - 1]
    return {
        "episodes": len(episodes),
        "steps": int(episodes.lengths.sum()),
        "return_mean": episodes.returns.mean().item(),
        "length_mean": (episodes.lengths.float() - 1).mean().item(),
        "terminated": ended.float().mean().item(),
    }


# --- how far it sees ------------------------------------------------------------------------------------------------


def open_loop(model: TrainedModel, episodes: Episodes, states: States, *, seed: int = 0) -> OpenLoop:
    """Imagine :data:`HORIZON` steps with the recorded actions, from places drawn from all that were played.

    Drawn, not evenly spaced: episodes may have a rhythm, which would come back in the errors by steps ahead.
    """
    first = context_of(episodes) - 1
    places = (episodes.valid[:, 1:] & (torch.arange(episodes.steps - 1) >= first)).nonzero()
    chosen = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:STARTS].sort().values
    return _imagine(model, episodes, states, *places[chosen].unbind(1), seed=seed)


def _imagine(
    model: TrainedModel, episodes: Episodes, states: States, rows: Tensor, times: Tensor, *, seed: int
) -> OpenLoop:
    state = states[rows, times]
    names = list(model.world.decoder.keys.spaces)
    errors: dict[str, list[Tensor]] = {key: [] for key in names}
    still: dict[str, list[Tensor]] = {key: [] for key in names}
    known = {key: model.decoder_target(key, episodes.obs[key][rows, times]) for key in names}
    valid, reward, kept = [], [], {}
    with own_randomness(model.device):
        torch.manual_seed(seed)
        for step in range(1, HORIZON + 1):
            now = (times + step).minimum(episodes.lengths[rows] - 1)
            action = episodes.action[rows, (times + step - 1).minimum(now)]
            state = model.imagine(state, action[:, None])[:, 0]
            kept |= {step: state} if step in (*AHEAD, *FILM) else {}
            predicted = model.predict(state)
            for key in names:
                truth = model.decoder_target(key, episodes.obs[key][rows, now])
                errors[key].append((predicted[key] - truth).square().flatten(1).mean(1).cpu())
                still[key].append((known[key] - truth).square().flatten(1).mean(1).cpu())
            reward.append((model.reward(state).pred().cpu() - episodes.reward[rows, now]).abs())
            valid.append(times + step < episodes.lengths[rows])
    together = {name: torch.stack(parts, 1) for name, parts in (("valid", valid), ("reward", reward))}
    stacked = ({key: torch.stack(parts, 1) for key, parts in kind.items()} for kind in (errors, still))
    return OpenLoop(rows, times, together["valid"], *stacked, together["reward"], kept)


def context_of(episodes: Episodes) -> int:
    """Steps that are seen at least: :data:`CONTEXT`, and fewer only where no episode goes on after so many."""
    return min(CONTEXT, int(episodes.lengths.max()) - 1)


def summarize_open_loop(model: TrainedModel, episodes: Episodes, states: States, ahead: OpenLoop) -> Numbers:
    """Mean errors by steps ahead, beside those of seeing and those of a prediction that nothing changes.

    Of a camera the error is of pixels in [0, 1], and ``psnr`` in dB with it. ``breaks_at`` is the step ahead
    from which on the dream is no better than a still picture; it is left out where that never happens. Steps that fewer
    than :data:`LEAST_STARTS` predictions came to are left out.
    """
    counts = ahead.valid.sum(0)
    steps = [step for step in range(1, HORIZON + 1) if counts[step - 1] >= min(LEAST_STARTS, len(ahead.rows))]
    seen = {key: value.item() for key, value in _reconstruction(model, episodes, states).items()}
    found: Numbers = {"context": context_of(episodes), "starts": len(ahead.rows)}
    found |= {"steps": steps, "count": [int(counts[step - 1]) for step in steps]}
    for key, error in ahead.errors.items():
        mean, idle = (_mean_over(values, ahead.valid) for values in (error, ahead.still[key]))
        one: Numbers = {"mse": mean[: len(steps)], "copy_last_mse": idle[: len(steps)], "reconstruction_mse": seen[key]}
        worse = [model_error >= still for model_error, still in zip(one["mse"], one["copy_last_mse"], strict=True)]
        last_good = max((n for n, is_worse in enumerate(worse) if not is_worse), default=-1)
        if last_good + 1 < len(worse):
            one["breaks_at"] = steps[last_good + 1]
        at = {step: one["mse"][step - 1] for step in AHEAD if step in steps}
        one |= {f"mse@{step}": value for step, value in at.items()}
        if key in model.cameras:
            one |= {f"psnr@{step}": psnr(value) for step, value in at.items()} | {
                "reconstruction_psnr": psnr(seen[key])
            }
        found[key] = one
    found["reward"] = {"absolute_error": _mean_over(ahead.reward, ahead.valid)[: len(steps)]}
    return found


def _reconstruction(model: TrainedModel, episodes: Episodes, states: States) -> dict[str, Tensor]:
    """Mean squared error of each observation while it is seen, 0-dim."""
    names = list(model.world.decoder.keys.spaces)

    def errors(rows: Tensor, times: Tensor) -> Tensor:
        predicted = model.predict(states[rows, times])
        known = {key: model.decoder_target(key, episodes.obs[key][rows, times]) for key in names}
        return torch.stack([(predicted[key] - known[key]).square().flatten(1).mean(1) for key in names], 1)

    means = model.in_batches(errors, *episodes.valid.nonzero().unbind(1)).mean(0)
    return dict(zip(names, means, strict=True))


def film_strips(model: TrainedModel, episodes: Episodes, states: States, *, seed: int = 0) -> list[Strip]:
    """Of each camera the best, the median and the worst episode, by the error of its first open-loop prediction.

    They are chosen among the first :data:`STARTS` episodes that go on after the context.
    """
    context = context_of(episodes)
    rows = (episodes.lengths > context).nonzero()[:STARTS, 0]
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
            painted = model.predict(combine([whole.kept[step][chosen] for step in steps], torch.stack))[camera]
            truth = model.decoder_target(camera, episodes.obs[camera][row, context - 1 + torch.tensor(steps)])
            shown = ((x.cpu() * 255).round().clamp(0, 255).to(torch.uint8) for x in (truth, painted))
            error = f"mean squared error {mean[chosen].item():.2g} over {int(whole.valid[chosen].sum())} steps"
            label = f"{title} of {len(order)} episodes (number {row}), {error}"
            strips.append(Strip(label, camera.removeprefix("pixels/"), steps, *shown))
    return strips


# --- how sure it is -------------------------------------------------------------------------------------------------


def reward_prediction(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """Log-likelihood in nats by the sign of the reward, and whether what is expected is what comes on average.

    The likelihood is that of the training loss: the negative cross entropy to the two bins beside the reward.
    """
    states, reward = _flat(episodes, states), episodes.reward[episodes.valid]

    def judged(some: States, came: Tensor) -> Tensor:
        head = model.reward(some)
        return torch.stack([-head.loss(came.to(model.device)), head.pred()], 1)

    log_likelihood, expected = model.in_batches(judged, states, reward).unbind(1)
    found: Numbers = {"log_likelihood": log_likelihood.mean().item(), "count": {}, "log_likelihood_by_sign": {}}
    for sign, name in ((-1, "negative"), (0, "zero"), (1, "positive")):
        chosen = reward.sign() == sign
        found["count"][name] = int(chosen.sum())
        if bool(chosen.any()):
            found["log_likelihood_by_sign"][name] = log_likelihood[chosen].mean().item()
    found["absolute_error"] = (expected - reward).abs().mean().item()
    variance = reward.var(correction=0)
    if variance > 1e-12:
        found["r2"] = (1 - (expected - reward).square().mean() / variance).item()
    return found | {"calibration": calibration(expected, reward)}


def continue_prediction(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """Log-likelihood in nats of how episodes go on, and whether they end as often as the model says.

    The head learns ``(1 - terminal) * (1 - 1/horizon)``, and its likelihood is that of this target. ``best`` is the
    likelihood of a head that says exactly the target; it is below 0, since the target is not always 0 or 1. The
    calibration is of the probabilities without the horizon.
    """
    states, ended = _flat(episodes, states), episodes.is_terminal[episodes.valid]
    target = (1 - ended.float()) * (1 - 1 / model.world.horizon)

    def judged(some: States, learnt: Tensor) -> Tensor:
        return torch.stack([-model.cont(some).loss(learnt.to(model.device)), 1 - model.continue_prob(some)], 1)

    log_likelihood, ends = model.in_batches(judged, states, target).unbind(1)
    best = (target * target.clamp_min(1e-12).log() + (1 - target) * (1 - target).clamp_min(1e-12).log()).mean()
    found: Numbers = {"log_likelihood": log_likelihood.mean().item(), "best": best.item(), "count": {}, "by_end": {}}
    for name, chosen in (("goes_on", ~ended), ("ends", ended)):
        found["count"][name] = int(chosen.sum())
        if bool(chosen.any()):
            found["by_end"][name] = log_likelihood[chosen].mean().item()
    return found | {"calibration": calibration(ends, ended.float(), edges=(0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99))}


def calibration(expected: Tensor, happened: Tensor, edges: tuple[float, ...] | None = None) -> Numbers:
    """Of steps with about the same expectation, its mean and what happened on average.

    Args:
        expected, happened: ``(M,)``.
        edges: between two bins; None: bins of equally many steps each.

    Returns:
        ``expected``, ``happened``, ``count`` of each bin that is not empty, and ``error``, the mean distance of the two
        weighted by the counts.
    """
    if edges is None:
        cuts = torch.quantile(expected.double(), torch.linspace(0, 1, BINS + 1, dtype=torch.float64)[1:-1]).unique()
    else:
        cuts = torch.tensor(edges, dtype=torch.float64)
    place = torch.bucketize(expected.double(), cuts)
    found: Numbers = {"expected": [], "happened": [], "count": []}
    for index in place.unique():
        chosen = place == index
        found["expected"].append(expected[chosen].mean().item())
        found["happened"].append(happened[chosen].mean().item())
        found["count"].append(int(chosen.sum()))
    pairs = zip(found["expected"], found["happened"], found["count"], strict=True)
    return found | {"error": sum(n * abs(a - b) for a, b, n in pairs) / len(expected)}


def surprise(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """KL of posterior to prior in nats: over the time of an episode, and by how much one step differs from another.

    The first step of an episode stands apart: nothing could be expected of it.
    """
    kl = torch.zeros(episodes.valid.shape)
    kl[episodes.valid] = model.in_batches(model.kl, _flat(episodes, states))
    later = episodes.valid.clone()
    later[:, 0] = False
    values = kl[later].double()
    counts = episodes.valid.sum(0)
    shown = int((counts >= max(len(episodes) // 4, 1)).sum())
    return {
        "first_step": kl[:, 0].mean().item(),
        "mean": values.mean().item(),
        **{f"p{q}": torch.quantile(values, q / 100).item() for q in (5, 50, 95, 99)},
        "over_time": [(kl[:, t][episodes.valid[:, t]]).mean().item() for t in range(shown)],
    }


# --- where it keeps what --------------------------------------------------------------------------------------------


def groups(model: TrainedModel, episodes: Episodes, states: States) -> Numbers:
    """What each categorical group says: its KL to the prior in nats, and which of its classes occur.

    *unsurprising*: its KL is below :data:`DEAD_KL`: it can be told from the recurrent state. *constant*: its likeliest
    class is the same at :data:`SAME_CLASS` of the steps. *dead*: both. The first step of an episode is left out.
    """
    later = episodes.valid.clone()
    later[:, 0] = False
    states = states[later]
    kl = model.in_batches(lambda some: model.kl(some, per_group=True), states).mean(0)
    likeliest = states.logits.argmax(-1)
    share = torch.nn.functional.one_hot(likeliest, model.classes).float().mean(0).cpu()  # (S, K)
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
    """What changes where one part of the state is that of another step: :meth:`TrainedModel.ablate`."""
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
    """Read every entry of ``privileged_state`` off the latents, where they were observed and where they were imagined.

    One linear probe and one MLP learn from posterior states of the training episodes of all kinds, and are tested on
    the other episodes of each kind. Imagined states are read with the same probes: what they say there is what the
    dream holds, in the code that observed states have. Beside them are the posterior states of the very same steps.

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
            if int(chosen.sum()) >= LEAST_ROWS:
                rows, times = one.rows[chosen], one.times[chosen] + step
                truth = played[kind].obs[PRIVILEGED_STATE][rows, times]
                pair = {"imagined": one.kept[step][chosen], "seen": states[kind][rows, times]}
                found[kind][str(step)] = {
                    name: _scores(linear, mlp, some.features.cpu(), truth, spread) for name, some in pair.items()
                }
    return linear, found


def probe_groups(
    model: TrainedModel, played: Mapping[str, Episodes], states: Mapping[str, States], *, seed: int
) -> Numbers:
    """How much of each entry one part of the state tells alone: R^2 of linear probes on it, ``{part: (N,)}``.

    Fitted and tested on the episodes of the first kind; null where an entry is constant.
    """
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
    """Of each probe by entry the R^2, null where the entry is constant, and the error in the entry's own units.

    ``r2_clipped_mean`` is the mean over the entries that are not constant, where an R^2 below 0 counts as 0.
    """
    found: Numbers = {"rows": len(target)}
    for name, one in (("linear", linear), ("mlp", mlp)):
        read = one.predict(features)
        scores = probes.r_squared(read, target, spread)
        found[name] = {"r2": scores, "rmse": probes.rmse(read, target)}
        if known := [max(score, 0.0) for score in scores if score is not None]:
            found[name]["r2_clipped_mean"] = sum(known) / len(known)
    return found


def _rows_of(
    played: Mapping[str, Episodes], states: Mapping[str, States], chosen: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``(M, F)``, targets ``(M, N)`` and the episode ``(M,)`` of every step of some episodes."""
    features, targets, numbers, before = [], [], [], 0
    for kind, rows in chosen.items():
        valid = played[kind].valid[rows]
        features.append(states[kind][rows][valid].features.cpu())
        targets.append(played[kind].obs[PRIVILEGED_STATE][rows][valid])
        numbers.append((rows[:, None] + before).expand_as(valid)[valid])
        before += len(played[kind])
    return torch.cat(features), torch.cat(targets), torch.cat(numbers)


def _flat(episodes: Episodes, states: States) -> States:
    """States of the steps that were played, ``(M,)``."""
    return states[episodes.valid]


def _mean_over(values: Tensor, valid: Tensor) -> list[float]:
    """Means of the valid ``(P, I)`` values, ``(I,)``."""
    return (torch.where(valid, values, 0.0).sum(0) / valid.sum(0).clamp_min(1)).tolist()
