"""Report of :mod:`~sheeplike.inspection.dissect`: figures, a page that shows them, and TensorBoard's events."""

from __future__ import annotations

import base64
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import numpy as np
import safetensors.torch
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

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
STYLE = {"font.size": 11, "axes.titlesize": 11, "legend.frameon": False}
WIDTH = 120  # columns of a line in the terminal
COST = 0.1  # share of the return from which on the report says that a change costs some
KNOWN = 0.9  # R^2 from which on the report calls a position known
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
    makers += [draw_trust] if "trust" in numbers else []
    makers += [_probes, _probe_groups] if "probes" in numbers and _best_first(numbers) else []
    with matplotlib.rc_context(STYLE):
        return {make.__name__.removeprefix("draw").removeprefix("_"): encode(make(numbers), "png") for make in makers}


def draw_strip(strip: Strip) -> bytes:
    """Draw observations above imagined ones above their difference, one column per step."""
    truth, model = (to_colour(frames).numpy().astype(int) for frames in (strip.truth, strip.model))
    rows = [truth, model, (model - truth + 255) // 2]
    # Transparent, with words that can be read on white and on black: inverted colours would be other pictures.
    figure = Figure(figsize=(1.1 * len(strip.ahead) + 0.9, 3.7), layout="constrained", facecolor="none")
    words = {"fontsize": 11, "color": "0.5"}
    axes = figure.subplots(3, len(strip.ahead), squeeze=False)
    for row, (name, frames) in enumerate(zip(("seen", "imagined", "difference"), rows, strict=True)):
        for column, ahead in enumerate(strip.ahead):
            axis = axes[row, column]
            axis.imshow(frames[column].astype(np.uint8), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(f"+{ahead}", **words)
        axes[row, 0].set_ylabel(name, **words)
    return encode(figure, "png")


def _kinds(numbers: Numbers) -> Iterable[tuple[str, str]]:
    return zip(numbers["episodes"], COLOURS, strict=False)


def _tidy(axis: Axes, x: str, y: str, title: str = "") -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.set_title(title, loc="left")
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)


def _open_loop(numbers: Numbers) -> Figure:
    found = numbers["open_loop"]
    names = [key for key, one in next(iter(found.values())).items() if isinstance(one, Mapping)]
    figure, labelled = Figure(figsize=(8, 2.3 * len(names) + 1), layout="constrained"), {}
    for axis, name in zip(figure.subplots(len(names), 1, squeeze=False, sharex=True)[:, 0], names, strict=True):
        for kind, color in _kinds(numbers):
            one, steps = found[kind][name], found[kind]["steps"]
            lines = {kind: (one.get("mse", one.get("absolute_error")), "-")}
            if "copy_last_mse" in one:
                lines[f"{kind}, nothing changes"] = one["copy_last_mse"], (0, (7, 3))
                lines[f"{kind}, while seen"] = [one["reconstruction_mse"]] * len(steps), (0, (1, 2))
            for label, (values, style) in lines.items():
                (labelled[label],) = axis.plot(steps, values, color=color, linestyle=style, linewidth=1.8)
        _tidy(axis, "", "absolute error" if name == "reward" else "squared error", plain(name))
        axis.set_ylim(bottom=0)
    axis.set_xlabel("imagined steps")
    figure.legend(labelled.values(), labelled, loc="outside upper center", ncols=len(found))
    return figure


def _surprise(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axis = figure.add_subplot()
    for kind, color in _kinds(numbers):
        axis.plot(numbers["surprise"][kind]["over_time"], color=color, label=kind)
    _tidy(axis, "step of the episode", "KL of posterior to prior, nats")
    axis.set_ylim(bottom=0)
    axis.legend()
    return figure


def _calibration(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    titles = {"reward": "reward", "continue": "probability of the end"}
    for axis, (name, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        ends: list[float] = []
        for (kind, color), mark in zip(_kinds(numbers), ("o-", "s--"), strict=False):
            one = numbers[name][kind]["calibration"]
            axis.plot(one["expected"], one["happened"], mark, color=color, label=kind, markersize=6, linewidth=1)
            ends += [*one["expected"], *one["happened"]]
        axis.plot([min(ends), max(ends)], [min(ends), max(ends)], color="0.5", linewidth=0.8, zorder=0)
        _tidy(axis, "expected", "happened, on average", title)
        axis.legend()
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
    figure.legend(loc="outside upper center", ncols=2)
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
        axis.set_xticks(range(len(parts)), [*parts[:-1], f"\n{parts[-1]}"], fontsize=9)
        _tidy(axis, "", label)
    axis.set_xlabel("part of the state that is replaced")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def _probes(numbers: Numbers) -> Figure:
    found, kinds = numbers["probes"], list(numbers["episodes"])
    figure = Figure(figsize=(9, 0.25 * len(_best_first(numbers)) + 1.2), layout="constrained")
    for axis, kind in zip(figure.subplots(1, len(kinds), squeeze=False, sharey=True)[0], kinds, strict=True):
        columns = {ahead: pair.get("imagined", pair["seen"])["linear"]["r2"] for ahead, pair in found[kind].items()}
        columns = {f"+{ahead}" if ahead != "0" else "seen": values for ahead, values in columns.items()}
        _heat(axis, columns | {"MLP,\nseen": found[kind]["0"]["seen"]["mlp"]["r2"]}, numbers, written=True)
        axis.set_title(f"{kind}, R²")
    return figure


def _probe_groups(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(9, 0.2 * len(_best_first(numbers)) + 1.2), layout="constrained")
    axis = figure.add_subplot()
    image = _heat(axis, numbers["probes"]["groups"], numbers)
    axis.tick_params("x", labelsize=9, rotation=90)
    axis.set_xlabel("part of the state")
    figure.colorbar(image, ax=axis, label="R² of a linear probe on this part alone")
    return figure


def draw_trust(numbers: Numbers) -> Figure:
    """Draw what forks of the simulator showed: ``numbers`` has ``trust``."""
    found = numbers["trust"]
    figure = Figure(figsize=(12, 9), layout="constrained")
    drift, changes, ranking, alarms = figure.subplots(2, 2).flat
    camera = next((key for key in found["drift"]["dream"] if key != "reward"), "reward")
    curves = [name for name in found["drift"] if name != "unchanged"]  # which is 0
    for name, color in zip(curves, COLOURS, strict=False):
        values = np.array(found["drift"][name][camera], float)  # None, as JSON has it, becomes NaN
        width = 3 if name == "dream" else 1.5
        drift.plot(range(1, found["steps"] + 1), values, color=color, label=name, linewidth=width)
    error = "absolute error" if camera == "reward" else "squared error"
    _tidy(drift, "steps after the fork", error, f"{plain(camera)}: drift from the unchanged simulator")
    drift.set_yscale("log")
    drift.set_ylim(bottom=np.nanmin(np.array(found["drift"]["dream"][camera], float)) / 100)
    drift.legend(fontsize=9)
    names = list(found["changes"])
    means = np.array([one["return"] for one in found["changes"].values()])
    ends = np.array([one["return_interval"] for one in found["changes"].values()])
    bars = {"xerr": np.abs(ends.T - means), "color": [COLOURS[0 if name == "dream" else 1] for name in names]}
    changes.barh(names, means, ecolor="0.3", **bars)
    changes.invert_yaxis()
    _tidy(changes, "return after the fork", "", "the policy in changed simulators")
    shown = found["ranking"]
    both = [*shown["dreamt"], *shown["real"]]
    ranking.plot([min(both), max(both)], [min(both), max(both)], color="0.5", linewidth=0.8, zorder=0)
    ranking.plot(shown["dreamt"], shown["real"], "o", color=COLOURS[0])
    for name, *place in zip(shown["policies"], shown["dreamt"], shown["real"], strict=True):
        ranking.annotate(name, place, fontsize=9, xytext=(5, -10), textcoords="offset points")
    _tidy(ranking, "dreamt return", "real return", f"policies, in agreement: tau {shown['agreement']:.2f}")
    alarms.barh(names[1:], [found["alarm"][name]["share"] for name in names[1:]], color=COLOURS[1])
    alarms.invert_yaxis()
    _tidy(alarms, "share of episodes with an alarm", "", "alarms")
    alarms.set_xlim(0, 1)
    return figure


def _heat(
    axis: Axes, columns: Mapping[str, Sequence[float | None]], numbers: Numbers, *, written: bool = False
) -> AxesImage:
    """Show R^2 by entry, best known first, and by column; an entry that is constant there leaves a gap."""
    rows = _best_first(numbers)
    table = np.array([[scores[n] for scores in columns.values()] for n in rows], float)
    axis.set_xticks(range(len(columns)), columns)
    axis.set_yticks(range(len(rows)), [plain(numbers["probes"]["names"][n]) for n in rows], fontsize=9)
    for (row, column), score in np.ndenumerate(table):
        if written and not np.isnan(score):
            style = {"ha": "center", "va": "center", "fontsize": 9, "color": "white" if score > 0.6 else "black"}
            axis.text(column, row, f"{score:.2f}" if score >= 0 else "< 0", **style)
    shades = {"norm": PowerNorm(1 if written else 0.5, 0, 1), "cmap": "Blues"}
    return axis.imshow(table.clip(0), aspect="auto", interpolation="nearest", **shades)


def _best_first(numbers: Numbers) -> list[int]:
    """Return the entries that vary, best known to the linear probe first, on seen states of the first kind."""
    found = numbers["probes"]
    scores = found[next(iter(numbers["episodes"]))]["0"]["seen"]["linear"]["r2"]
    return sorted((n for n, score in enumerate(scores) if score is not None), key=lambda n: -scores[n])


# --- the page -------------------------------------------------------------------------------------------------------


def page(numbers: Numbers, figures: Mapping[str, bytes], strips: Mapping[str, bytes], about: Mapping[str, Any]) -> str:
    """Make one HTML file that needs no other."""
    kinds = list(numbers["episodes"])
    parts = ("episodes", "surprise", "reward", "continue", "likelihood")
    tables = {part: {kind: scalars(numbers[part][kind]) for kind in kinds} for part in parts}
    errors = [(f"{kind}, {key}", one) for kind in kinds for key, one in numbers["open_loop"][kind].items()]
    tables["open_loop"] = {name: scalars(one) for name, one in errors if isinstance(one, Mapping) and "mse" in one}
    if "trust" in numbers:
        tables |= _trust_tables(numbers["trust"])
    if "probes" in numbers:
        for kind in kinds:
            tables[kind] = {name: scalars(one) for name, one in _probe_columns(numbers["probes"][kind])}
            tables[f"{kind}, entry"] = _probe_entries(numbers, kind)
    pictures = {name: base64.b64encode(png).decode() for name, png in (figures | strips).items()}
    text = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    template = jinja2.Template(text, autoescape=True, trim_blocks=True)
    known = {"numbers": numbers, "tables": tables, "pictures": pictures, "strips": strips, "about": about}
    return template.render(known, kinds=kinds, short=conclude(numbers), DEAD_KL=DEAD_KL, NUMBERS=NUMBERS)


def _trust_tables(found: Numbers) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the table of changes: column, row, value."""
    changes: dict[str, Any] = {}
    for name, one in found["changes"].items():
        for key, label in {"return": "return", "lost": "return lost", "success": "success"}.items():
            interval = one.get(f"{key}_interval")
            if interval:
                changes.setdefault(label, {})[name] = f"{one[key]:.3g} ({interval[0]:.3g} to {interval[1]:.3g})"
        for key, label in {"share": "share with an alarm", "delay": "steps until it, median"}.items():
            changes.setdefault(label, {})[name] = found["alarm"].get(name, {}).get(key)
    return {"changes": changes}


def _probe_columns(found: Numbers) -> Iterable[tuple[str, Numbers]]:
    """Name the scores of one kind of episodes."""
    for ahead, pair in found.items():
        for name, one in pair.items():
            yield name if ahead == "0" else f"{name} +{ahead}", one


def _probe_entries(numbers: Numbers, kind: str) -> dict[str, dict[str, float | str]]:
    """List scores by entry, best known first: R^2 of seen states, RMSE for all steps ahead, and those of the MLP."""
    found = numbers["probes"]
    scores = dict(_probe_columns(found[kind]))
    columns = {"R², seen": scores["seen"]["linear"]["r2"], "MLP: R², seen": scores["seen"]["mlp"]["r2"]}
    errors = {f"RMSE, {name}": one["linear"]["rmse"] for name, one in scores.items()}
    errors["MLP: RMSE, seen"] = scores["seen"]["mlp"]["rmse"]
    rows = {n: found["names"][n] for n in _best_first(numbers)}
    table: dict[str, Any] = {name: {rows[n]: values[n] for n in rows} for name, values in columns.items()}
    return table | {name: {rows[n]: _measure(found, n, of[n]) for n in rows} for name, of in errors.items()}


def _measure(found: Numbers, entry: int, value: float) -> str:
    """Write an error in millimetres if the entry is a position, else in its own unit."""
    return f"{1000 * value:.1f} mm" if entry in found["positions"] else f"{value:.3g}"


# --- in words -------------------------------------------------------------------------------------------------------


def _listed(items: Iterable[Any]) -> str:
    return ", ".join(map(str, items)) or "none"


def conclude(numbers: Numbers) -> list[str]:
    """Say in a few sentences what the numbers of the first kind of episodes mean."""
    kind = next(iter(numbers["episodes"]))
    of = {name: found[kind] for name, found in numbers.items() if isinstance(found, Mapping) and kind in found}
    said, steps = [], of["open_loop"]["steps"]
    for key, one in of["open_loop"].items():
        if steps and isinstance(one, Mapping) and "reconstruction_psnr" in one:
            pairs = list(zip(one["mse"], one["copy_last_mse"], strict=True))
            worse = sum(error >= still for error, still in pairs)
            often = f"at {worse} of {len(steps)} steps" if worse else "never"
            ahead = max(step for step in AHEAD if step <= min(steps[-1], 15))
            text = f"up to {steps[-1]} steps ahead the dream is {often} worse than a picture that stands still"
            errors = "its squared error is {:.2g}, that of the still picture {:.2g}".format(*pairs[ahead - 1])
            said.append(f"{key}: {text}; after {ahead} {errors}.")
    if "probes" in of:
        said.append(_say_what_is_known(numbers, of["probes"]))
    expected, came = (of["reward"]["calibration"][name][-1] for name in ("expected", "happened"))
    said.append(f"Reward, where it expects most: {expected:.2f} a step expected on average, {came:.2f} received.")
    bins = [of["continue"]["calibration"][name] for name in ("expected", "happened", "count")]
    expected, came, count = max(zip(*bins, strict=True), key=lambda row: abs(row[0] - row[1]) * row[2])
    text = f"expected at {expected:.0%}, it came at {came:.0%} of {count} steps"
    said.append(f"End of the episode, where it is furthest off: {text}, of {sum(bins[2]):,} in all.")
    said += _say_what_to_trust(numbers["trust"]) if "trust" in numbers else []
    dead, count = of["groups"]["dead"], len(of["groups"]["kl"])
    text = f"{of['surprise']['mean']:.1f} nats a step, {of['surprise']['first_step']:.1f} at the first"
    return [*said, f"Dead groups: {_listed(dead)}, of {count}. Surprise: {text}."]


def _say_what_is_known(numbers: Numbers, scores: Numbers) -> str:
    found, entries, r2 = numbers["probes"], _best_first(numbers), scores["0"]["seen"]["linear"]["r2"]
    places = [n for n in entries if n in found["positions"]]
    known = [n for n in places or entries if r2[n] >= KNOWN]
    if not places:
        return f"{found['target']}: of {len(entries)} entries that vary, {len(known)} have an R² of {KNOWN} or more."
    ahead = max((ahead for ahead in scores if int(ahead) <= 15), key=int)
    rmse = [scores[ahead][name]["linear"]["rmse"] for name in ("seen", "imagined") if name in scores[ahead]]
    text = [f"{found['names'][n]} {' and '.join(_measure(found, n, one[n]) for one in rmse)}" for n in known]
    doubt = [f"{found['names'][n]} (R² {r2[n]:.2f})" for n in places if n not in known]
    when = f", of the same steps seen and imagined {ahead} steps ahead" if ahead != "0" else ""
    return f"Error of a linear probe of positions{when}: {_listed(text)}; hardly known: {_listed(doubt)}."


def _say_what_to_trust(found: Numbers) -> Iterable[str]:
    """Say what forks of the simulator tell of the model."""
    shown, drift = found["ranking"], found["drift"]
    yield f"Policies ranked in the dream and in the simulator agree with tau {shown['agreement']:.2f}."
    own = found["exploitability"]
    verdict = "exploits the dream" if own["exploited"] else "does not exploit the dream"
    gap = "{gap:.3g}, 95 % interval {interval[0]:.3g} to {interval[1]:.3g}".format(**own)
    yield f"The policy {verdict}: dreamt {own['dreamt']:.3g}, real {own['real']:.3g}, difference {gap}."
    camera = next((key for key in drift["dream"] if key != "reward"), "reward")
    last = max(step for step, error in enumerate(drift["dream"][camera][:15]) if error == error)  # not NaN
    # NaN, not below the dream's drift, are simulators whose episodes have all ended.
    far = [name for name, one in drift.items() if not one[camera][last] <= drift["dream"][camera][last]]
    yield f"After {last + 1} steps farther from the real one than the dream, or ended: {_listed(far)}."
    enough = COST * abs(found["changes"]["unchanged"]["return"])
    worse = [name for name, one in found["changes"].items() if name != "dream" and one["lost_interval"][0] > enough]
    noticed = [name for name in worse if found["alarm"][name]["share"] > 0.5]
    missed = [name for name in worse if name not in noticed]
    text = f"with an alarm in most episodes {_listed(noticed)}; without {_listed(missed)}"
    yield f"Changes that cost a tenth of the return or more: {text}."


def summarize(numbers: Numbers) -> dict[str, str]:
    """Return the main numbers for the terminal, name to text."""
    lines: dict[str, list[str]] = {"in short": conclude(numbers)}
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
            scores = {name: one["linear"] for name, one in _probe_columns(numbers["probes"][kind])}
            medians = (f"{one['r2_median']:.2f} {name}" for name, one in scores.items() if "r2_median" in one)
            lines.setdefault("linear probes", []).append(f"{kind}: median R² {', '.join(medians)}")
    if numbers["notes"]:
        lines["notes"] = list(numbers["notes"])
    room = {"width": WIDTH - max(map(len, lines)) - 4, "subsequent_indent": "  "}
    return {name: "\n".join("\n".join(textwrap.wrap(text, **room)) for text in texts) for name, texts in lines.items()}
