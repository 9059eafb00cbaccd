"""Report of :mod:`~sheeplike.inspection.dissect`: figures, a page that shows them, and TensorBoard's events."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import safetensors.torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from sheeplike.analysis.figure import COLOURS, encode, plain
from sheeplike.analysis.runs import ANALYSIS_FILE
from sheeplike.files import EVENTS, write_atomically
from sheeplike.inspection.dissect import AHEAD, DEAD_KL, Findings, Strip
from sheeplike.inspection.likelihood import SAMPLES
from sheeplike.monitor.logger import EventFile
from sheeplike.monitor.video import to_colour
from sheeplike.trained.playing import finite

NUMBERS, PAGE, PROBE = ANALYSIS_FILE, "analysis.html", "linear_probe.safetensors"
TAG = "analyze"  # prefix in TensorBoard
Numbers = Mapping[str, Any]


def write(place: Path, found: Findings, about: Mapping[str, Any]) -> list[Path]:
    """Write the numbers as JSON, the page, the linear probe and TensorBoard's events into a directory.

    The probe is a safetensors file: ``weights (F, N)`` and ``bias (N,)`` of ``features @ weights + bias``, and
    ``alpha (N,)``, the penalties.

    Args:
        place: the directory, which may be new; earlier files are replaced.
        about: facts about the analysis by name, including ``step``, the x-axis in TensorBoard.

    Returns:
        The files to show to the user.
    """
    figures = draw(found.numbers)
    strips = {f"{strip.camera}: {strip.title}": draw_strip(strip) for strip in found.strips}
    place.mkdir(parents=True, exist_ok=True)
    record = json.dumps(finite({"about": dict(about)} | found.numbers), indent=1, allow_nan=False)
    write_atomically(place / NUMBERS, record + "\n")
    write_atomically(place / PAGE, page(found.numbers, figures, strips, about))
    if found.linear is not None:
        tensors = {name: value.contiguous() for name, value in vars(found.linear).items()}
        write_atomically(place / PROBE, safetensors.torch.save(tensors))
    for old in place.glob(f"{EVENTS}*"):
        old.unlink()
    events = EventFile(place)
    events.add_scalars({f"{TAG}/{name}": value for name, value in scalars(found.numbers).items()}, about["step"])
    for name, values in curves(found.numbers).items():
        for step, value in enumerate(values, 1 if "/open_loop/" in name else 0):
            events.add_scalars({name: value}, step)
    for name, png in (figures | strips).items():
        events.add_image(f"{TAG}/{name}", png, about["step"])
    events.close()
    return [place / PAGE, place / NUMBERS]


def scalars(numbers: Numbers, prefix: str = "") -> dict[str, float]:
    """Flatten nested numbers, by path; lists are left out."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    return found


def curves(numbers: Numbers) -> dict[str, list[float]]:
    """Return errors over imagined steps and surprise over the steps of an episode, by TensorBoard's tag."""
    found = {}
    for kind, parts in numbers["open_loop"].items():
        for key, one in parts.items():
            lists = one.items() if isinstance(one, Mapping) else ()
            tag = f"{TAG}_curves/open_loop/{kind}/{key}"
            found |= {f"{tag}/{name}": values for name, values in lists if isinstance(values, list)}
    for kind, one in numbers["surprise"].items():
        found[f"{TAG}_curves/surprise/{kind}"] = one["over_time"]
    return found


# --- figures --------------------------------------------------------------------------------------------------------


def draw(numbers: Numbers) -> dict[str, bytes]:
    """Draw the figures, as PNG by name."""
    makers = [_open_loop, _surprise, _calibration, _groups, _effects]
    makers += [_probes, _probe_groups] if "probes" in numbers else []
    return {make.__name__.removeprefix("_"): encode(make(numbers), "png") for make in makers}


def draw_strip(strip: Strip) -> bytes:
    """Draw observations above imagined ones above their difference, one column per step."""
    truth, model = (to_colour(frames).numpy().astype(int) for frames in (strip.truth, strip.model))
    rows = [truth, model, (model - truth + 255) // 2]
    figure = Figure(figsize=(1.1 * len(strip.ahead) + 0.9, 3.7), layout="constrained")
    axes = figure.subplots(3, len(strip.ahead), squeeze=False)
    for row, (name, frames) in enumerate(zip(("seen", "imagined", "error"), rows, strict=True)):
        for column, ahead in enumerate(strip.ahead):
            axis = axes[row, column]
            axis.imshow(frames[column].astype(np.uint8), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(f"+{ahead}", fontsize=9)
        axes[row, 0].set_ylabel(name, fontsize=9)
    return encode(figure, "png")


def _kinds(numbers: Numbers) -> Iterable[tuple[str, str]]:
    """Pair each kind of episodes with a colour."""
    return zip(numbers["episodes"], COLOURS, strict=False)


def _tidy(axis: Axes, x: str, y: str, title: str = "") -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title, fontsize=10, loc="left")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _open_loop(numbers: Numbers) -> Figure:
    found = numbers["open_loop"]
    names = [key for key, one in next(iter(found.values())).items() if isinstance(one, Mapping)]
    figure = Figure(figsize=(4.2 * len(names), 3.4), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for kind, color in _kinds(numbers):
            one, steps = found[kind][name], found[kind]["steps"]
            axis.plot(steps, one.get("mse", one.get("absolute_error")), color=color, label=kind)
            if "copy_last_mse" in one:
                axis.plot(steps, one["copy_last_mse"], ":", color=color, label=f"{kind}, nothing changes")
                style = {"color": color, "linewidth": 0.8, "linestyle": "--"}
                axis.axhline(one["reconstruction_mse"], label=f"{kind}, while seen", **style)
        _tidy(axis, "imagined steps", "absolute error" if name == "reward" else "mean squared error", plain(name))
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7, frameon=False)
    return figure


def _surprise(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axis = figure.add_subplot()
    for kind, color in _kinds(numbers):
        axis.plot(numbers["surprise"][kind]["over_time"], color=color, label=kind)
    _tidy(axis, "step of the episode", "KL of posterior to prior, nats")
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False)
    return figure


def _calibration(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    titles = {"reward": "reward", "continue": "end of the episode"}
    for axis, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        ends: list[float] = []
        for kind, color in _kinds(numbers):
            one = numbers[name][kind]["calibration"]
            axis.plot(one["expected"], one["happened"], "o-", color=color, label=kind, markersize=4, linewidth=1)
            ends += [*one["expected"], *one["happened"]]
        axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.5", linewidth=0.8, zorder=0)
        _tidy(axis, "expected", "happened, on average", title)
        axis.legend(frameon=False, fontsize=8)
    return figure


def _groups(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    for shift, (kind, color) in enumerate(_kinds(numbers)):
        one = numbers["groups"][kind]
        at = np.arange(len(one["kl"])) + 0.4 * shift - 0.2
        upper.bar(at, one["kl"], 0.38, color=color, label=kind)
        lower.bar(at, one["usage_entropy"], 0.38, color=color)
    upper.axhline(DEAD_KL, color="0.4", linewidth=0.8, linestyle=":")
    _tidy(upper, "", "KL to the prior, nats")
    _tidy(lower, "group", "entropy of its\nlikeliest class, nats")
    upper.legend(frameon=False)
    return figure


def _effects(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    names = {"pixels": "pixels, squared", "reward": "reward", "value": "value", "kl": "next step, nats"}
    for axis, (name, label) in zip(figure.subplots(4, 1, sharex=True), names.items(), strict=True):
        for shift, (kind, color) in enumerate(_kinds(numbers)):
            values = numbers["effects"][kind][name]
            axis.bar(np.arange(len(values)) + 0.4 * shift - 0.2, values, 0.38, color=color, label=kind)
        everything = [value for one in numbers["effects"].values() for value in one[name]]
        axis.set_yscale("symlog", linthresh=max(np.median(everything), 1e-9))
        parts = next(iter(numbers["effects"].values()))["parts"]
        axis.set_xticks(range(len(parts)), parts, fontsize=7)
        _tidy(axis, "", label)
    axis.set_xlabel("part of the state that is replaced")
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def _probes(numbers: Numbers) -> Figure:
    found = numbers["probes"]
    kinds = list(_kinds(numbers))
    colors = dict(zip(("0", *map(str, AHEAD)), COLOURS, strict=False))
    figure, labelled = Figure(figsize=(9, 2.6 * len(kinds)), layout="constrained"), {}
    for axis, (kind, _) in zip(figure.subplots(len(kinds), 1, squeeze=False)[:, 0], kinds, strict=True):
        for ahead, pair in found[kind].items():
            one = pair.get("imagined", pair["seen"])
            label = {"0": "seen", "1": "imagined, 1 step"}.get(ahead, f"imagined, {ahead} steps")
            for name, probe, mark in (("linear", "linear", "o"), ("MLP", "mlp", "x"))[: 1 + (ahead == "0")]:
                scores = _shown(one[probe]["r2"])
                (line,) = axis.plot(scores, mark, color=colors[ahead], markersize=4, label=f"{label}, {name}")
                labelled[line.get_label()] = line
        axis.set_ylim(-0.1, 1.02)
        _tidy(axis, f"entry of {found['target']}", "R²", f"{kind}; below 0 is drawn at -0.05")
    figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _probe_groups(numbers: Numbers) -> Figure:
    found = numbers["probes"]["groups"]
    table = np.array([_shown(scores) for scores in found.values()]).clip(0)
    figure = Figure(figsize=(9, 0.2 * len(found) + 1.5), layout="constrained")
    axis = figure.add_subplot()
    image = axis.imshow(table, aspect="auto", norm=PowerNorm(0.5, 0, 1), cmap="viridis", interpolation="nearest")
    axis.set_yticks(range(len(found)), list(found), fontsize=7)
    axis.set_xlabel(f"entry of {numbers['probes']['target']}")
    axis.set_ylabel("part of the state")
    figure.colorbar(image, ax=axis, label="R² of a linear probe on this part alone")
    return figure


def _shown(scores: Sequence[float | None]) -> np.ndarray:
    """Prepare R^2 for a figure: constant entries become gaps, and values far below 0 stay visible."""
    return np.array([np.nan if score is None else max(score, -0.05) for score in scores])


# --- the page -------------------------------------------------------------------------------------------------------


def page(numbers: Numbers, figures: Mapping[str, bytes], strips: Mapping[str, bytes], about: Mapping[str, Any]) -> str:
    """Make one HTML file that needs no other."""
    kinds = list(numbers["episodes"])
    parts = ("episodes", "surprise", "reward", "continue", "likelihood")
    tables = {part: {kind: scalars(numbers[part][kind]) for kind in kinds} for part in parts}
    errors = [(kind, *entry) for kind in kinds for entry in numbers["open_loop"][kind].items()]
    tables["open_loop"] = {f"{kind}, {key}": scalars(one) for kind, key, one in errors if isinstance(one, Mapping)}
    if "probes" in numbers:
        for kind in kinds:
            tables[kind] = {name: scalars(one) for name, one in _probe_columns(numbers["probes"][kind])}
            tables[f"{kind}, entry"] = _probe_entries(numbers["probes"][kind])
    pictures = {name: base64.b64encode(png).decode() for name, png in (figures | strips).items()}
    text = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    template = jinja2.Template(text, autoescape=True, trim_blocks=True)
    known = {"numbers": numbers, "tables": tables, "pictures": pictures, "strips": strips, "about": about}
    return template.render(known, kinds=kinds, DEAD_KL=DEAD_KL, NUMBERS=NUMBERS)


def _probe_columns(found: Numbers) -> Iterable[tuple[str, Numbers]]:
    """Name the scores of one kind of episodes."""
    for ahead, pair in found.items():
        for name, one in pair.items():
            yield name if ahead == "0" else f"{name} +{ahead}", one


def _probe_entries(found: Numbers) -> dict[str, dict[str, float]]:
    """List scores by entry: R^2 of the linear probe for all steps ahead, the others for seen states alone."""
    columns = {f"R², {name}": one["linear"]["r2"] for name, one in _probe_columns(found)}
    seen = found["0"]["seen"]
    columns |= {"RMSE, seen": seen["linear"]["rmse"], "MLP: R², seen": seen["mlp"]["r2"]}
    columns["MLP: RMSE, seen"] = seen["mlp"]["rmse"]
    return {name: {str(n): value for n, value in enumerate(values)} for name, values in columns.items()}


def _listed(items: Sequence[Any]) -> str:
    return ", ".join(map(str, items)) or "none"


def summarize(numbers: Numbers) -> dict[str, str]:
    """Return the main numbers for the terminal, name to text."""
    lines: dict[str, list[str]] = {}
    for kind in numbers["episodes"]:
        one = numbers["episodes"][kind]
        of = {name: numbers[name][kind] for name in ("open_loop", "surprise", "groups", "likelihood")}
        lines.setdefault("episodes", []).append(f"{kind}: {one['episodes']}, return {one['return_mean']:#.4g}")
        for key, values in of["open_loop"].items():
            if isinstance(values, Mapping) and "mse" in values:
                ahead = ", ".join(f"{values[name]:.3g} after {name[4:]}" for name in values if name.startswith("mse@"))
                text = f"{kind}: {values['reconstruction_mse']:.3g} seen, {ahead}"
                lines.setdefault(f"error of {key}", []).append(text)
        lines.setdefault("surprise", []).append(f"{kind}: {of['surprise']['mean']:.3g} nats a step")
        lines.setdefault("dead groups", []).append(f"{kind}: {_listed(of['groups']['dead'])}")
        if "variance" in of["likelihood"]:
            bound = ", ".join(f"{of['likelihood'][f'per_step_iwae_{k}']:.5g}" for k in SAMPLES)
            lines.setdefault("log-likelihood", []).append(f"{kind}: {bound} nats with {_listed(SAMPLES)} samples")
        if "probes" in numbers:
            target = numbers["probes"]["target"]
            if numbers["probes"]["predicted"]:
                target += ", which it was trained to predict"
            scores = {name: one["linear"] for name, one in _probe_columns(numbers["probes"][kind])}
            means = (f"{one['r2_clipped_mean']:.2f} {name}" for name, one in scores.items() if "r2_clipped_mean" in one)
            lines.setdefault(f"linear probes of {target}", []).append(f"{kind}: mean R² {', '.join(means)}")
    if numbers["notes"]:
        lines["notes"] = list(numbers["notes"])
    return {name: "\n".join(texts) for name, texts in lines.items()}
