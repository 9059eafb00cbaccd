"""The page, the numbers and the events of an analysis."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sheeplike.analysis.runs import RunError, find_runs
from sheeplike.inspection import report
from sheeplike.inspection.dissect import Findings, Strip
from sheeplike.inspection.probes import LinearProbe
from sheeplike.inspection.report import NUMBERS, PAGE, conclude, scalars, summarize, write
from sheeplike.trained.playing import finite

ABOUT = {"run": "<b>mine</b>", "step": 640}


def numbers(*, probes: bool) -> dict[str, Any]:
    line = {
        "mse": [0.1, 0.2],
        "copy_last_mse": [0.1, 0.3],
        "reconstruction_mse": 0.05,
        "reconstruction_psnr": 13.0,
        "mse@1": 0.1,
        "psnr@1": 10.0,
    }
    open_loop = {"context": 5, "starts": 9, "steps": [1, 2], "count": [9, 8], "pixels/<$x>": line}
    bins = {"expected": [0.0, 1.0], "happened": [0.1, 0.9], "count": [5, 4], "error": 0.1}
    effects = {"parts": ["0", "1", "deter"]} | {name: [0.0, 1e-3, 1.0] for name in ("pixels", "reward", "value", "kl")}
    one = {
        "episodes": {"episodes": 4, "steps": 40, "return_mean": 1.0, "length_mean": 10.0, "terminated": 0.0},
        "open_loop": open_loop | {"reward": {"absolute_error": [0.1, 0.2]}},
        "reward": {"log_likelihood": -1.0, "count": {"zero": 9}, "calibration": bins},
        "continue": {"log_likelihood": -0.1, "best": -0.1, "calibration": bins},
        "surprise": {"first_step": 9.0, "mean": 1.0, "p50": 1.0, "over_time": [9.0, 1.0, 1.0]},
        "groups": {"kl": [0.0, 0.2], "top_class_share": [1.0, 0.5], "usage_entropy": [0.0, 0.7]}
        | {"unsurprising": [0], "constant": [0], "dead": [0]},
        "likelihood": {"dimensions": 3, "variance": 0.5} | {f"per_step_iwae_{k}": -9.0 for k in (1, 16, 64)},
        "effects": effects,
    }
    found: dict[str, Any] = {name: {"policy": part, "random": part} for name, part in one.items()}
    found["notes"] = [] if probes else ["No probes: the environment has no <i>."]
    if probes:
        linear = {"r2": [-7.0, None, 0.9], "rmse": [3.0, 0.0, 0.0114], "r2_median": 0.45}
        seen = {"rows": 9, "linear": linear, "mlp": linear}
        imagined = seen | {"linear": linear | {"r2": [-8.0, None, 0.3], "rmse": [3.0, 0.0, 0.0226], "r2_median": 0.15}}
        found["probes"] = {"target": "privileged_state", "predicted": True, "constant": [1]}
        found["probes"] |= {"names": ["entry 0", "entry 1", "<$x> y"], "positions": [2]}
        found["probes"]["policy"] = {"0": {"seen": seen}, "5": {"imagined": imagined, "seen": seen}}
        found["probes"]["random"] = {"0": {"seen": seen}}
        found["probes"]["groups"] = {"0": [-3.0, None, 0.1], "deter": [0.2, None, 0.9]}
    return found


def trusted() -> dict[str, Any]:
    """Numbers of :func:`sheeplike.inspection.trust.measure`, of two changes: one costs nothing, the other a half."""
    drift = {name: {"pixels/<$x>": [0.1, 0.2], "reward": [0.0, 0.1]} for name in ("dream", "wind")}
    drift |= {"unchanged": {"pixels/<$x>": [0.0, 0.0]}, "fog": {"pixels/<$x>": [0.1, 0.3]}}
    drift |= {"night": {"pixels/<$x>": [0.1, math.nan]}}
    means = {"dream": 9.0, "unchanged": 10.0, "wind": 9.9, "fog": 5.0}
    changes = {
        name: {"return": mean, "return_interval": [mean - 0.1, mean + 0.1]}
        | {"lost": 10 - mean, "lost_interval": [10 - mean - 0.1, 10 - mean + 0.1]}
        for name, mean in means.items()
    }
    alarms = {"unchanged": {"share": 0.0}, "wind": {"share": 0.9, "delay": 7}, "fog": {"share": 0.2, "delay": 30}}
    gap = {"dreamt": 3.0, "real": 1.0, "gap": 2.0, "interval": [1.5, 2.5], "exploited": True}
    return {
        "starts": 4,
        "context": 5,
        "steps": 2,
        "drift": drift,
        "changes": changes,
        "ranking": {"policies": ["a", "b"], "dreamt": [0.0, 1.0], "real": [0.1, 0.9], "agreement": 1.0},
        "exploitability": gap,
        "alarm": {"threshold": 9.0} | alarms,
    }


def strips() -> list[Strip]:
    frames = torch.randint(256, (2, 8, 8, 3), dtype=torch.uint8)
    return [Strip("worst of 4 episodes", "<$x>", [1, 50], frames, 255 - frames)]


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "draw", lambda numbers: {})


class Page(HTMLParser):
    """Everything that a page refers to, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.text, self.tags, self.cells = "", [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text += data
        self.cells += [data] * (self.tags[-1] in ("td", "th"))


@pytest.mark.parametrize("probes", [True, False])
def test_a_page_needs_no_other_file_and_takes_no_name_at_its_word(tmp_path: Path, probes: bool) -> None:
    files = write(tmp_path / "place", Findings(numbers(probes=probes), strips()), ABOUT)
    assert files == [tmp_path / "place" / PAGE, tmp_path / "place" / NUMBERS]
    page = Page(files[0].read_text())
    assert len(page.sources) == (8 if probes else 6)
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert not {"script", "link", "b", "i", "$x"} & set(page.tags)
    assert "<b>mine</b>" in page.text
    assert "<$x>" in page.text
    assert ("entries 1." in page.text) == ("was trained to predict it" in page.text) == probes
    assert ("has no <i>." in page.text) != probes
    assert "(policy: 5; random: 5)" in page.text
    if probes:
        assert {"R², seen", "RMSE, imagined +5", "RMSE, seen +5", "11.4 mm", "22.6 mm", "3"} <= set(page.cells)
        assert page.cells.index("<$x> y") < page.cells.index("entry 0"), "best known first"
        assert "entry 1" not in page.cells, "it is constant"
    assert not any("_" in cell for cell in page.cells), "words, not keys"
    text = files[0].read_text()
    assert text.index("<li>") < text.index("<table>") < text.index("<img"), "the sentences come first"
    assert "width=device-width" in files[0].read_text()
    assert "color-scheme: light dark" in files[0].read_text()


@pytest.mark.usefixtures("undrawn")
def test_the_record_is_json_that_holds_every_number(tmp_path: Path) -> None:
    found = numbers(probes=True)
    write(tmp_path, Findings(found, strips()), ABOUT)
    text = (tmp_path / NUMBERS).read_text()
    assert json.loads(text) == found | {"about": ABOUT}
    found["surprise"]["policy"]["mean"] = math.inf
    write(tmp_path, Findings(found, strips()), ABOUT)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads((tmp_path / NUMBERS).read_text(), parse_constant=refuse)["surprise"]["policy"]["mean"] is None


def test_tensorboard_has_the_scalars_and_the_pictures_of_the_last_analysis_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(report, "draw", lambda numbers: {})
        write(tmp_path, Findings(numbers(probes=False), []), ABOUT)
    write(tmp_path, Findings(numbers(probes=True), strips()), ABOUT)
    assert len(list(tmp_path.glob("events.*"))) == 1
    events = EventAccumulator(str(tmp_path), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    (point,) = events.Scalars("analyze/open_loop/policy/pixels/<$x>/psnr@1")
    assert (point.step, point.value) == (640, 10.0)
    errors = events.Scalars("analyze_curves/open_loop/policy/pixels/<$x>/mse")
    assert [(point.step, round(point.value, 3)) for point in errors] == [(1, 0.1), (2, 0.2)]
    assert [point.step for point in events.Scalars("analyze_curves/surprise/policy")][:2] == [0, 1]
    names = events.Tags()["images"]
    assert len(names) == 8
    assert all(events.Images(name)[0].encoded_image_string.startswith(b"\x89PNG") for name in names)
    picture = events.Images("analyze/surprise")[0]
    assert (picture.width, picture.height) == (1125, 480)


@pytest.mark.usefixtures("undrawn")
def test_an_analysis_is_no_run_to_compare(tmp_path: Path) -> None:
    write(tmp_path / "logs/demo/mine/analyze/step_000000000640", Findings(numbers(probes=False), []), ABOUT)
    with pytest.raises(RunError, match="runs"):
        find_runs([tmp_path / "logs"])


def test_single_numbers_by_path() -> None:
    assert scalars({"a": {"b": 1, "c": [1, 2], "d": {"e": 0.5}}, "f": "x"}) == {"a/b": 1.0, "a/d/e": 0.5}


@pytest.mark.usefixtures("undrawn")
def test_differences_are_not_rounded_away(tmp_path: Path) -> None:
    found = numbers(probes=False)
    found["likelihood"]["policy"] |= {"per_step_iwae_16": -63714.7, "per_step_iwae_64": -63709.9, "dimensions": 16}
    page = Page(write(tmp_path, Findings(found, strips()), ABOUT)[0].read_text())
    assert {"-63,714.7", "-63,709.9", "16"} <= set(page.cells)


def test_what_the_terminal_shows() -> None:
    shown = summarize(numbers(probes=True))
    assert shown["dead groups"] == "policy: 0\nrandom: 0"
    assert shown["error of pixels/<$x>"].startswith("policy: 0.05 seen, 0.1 after 1")
    assert shown["linear probes"].split("\n")[1] == "random: median R² 0.45 seen"
    without = summarize(numbers(probes=False))
    assert "linear probes" not in without
    assert without["notes"] == "No probes: the environment has no <i>."
    assert shown["in short"].replace("\n ", "").split("\n") == conclude(numbers(probes=True))
    width = max(map(len, shown)) + 4
    assert all(width + len(line) <= 120 for text in shown.values() for line in text.splitlines())


def test_conclusions_follow_the_numbers() -> None:
    found = numbers(probes=True)
    ahead, known, reward, end, groups = conclude(found)
    assert "at 1 of 2 steps" in ahead, "a still picture is as good after one step"
    assert "<$x> y 11.4 mm and 22.6 mm" in known
    assert "1.00" in reward
    assert "0.90" in reward
    assert "0%" in end
    assert "10%" in end
    assert "0, of 2" in groups
    found["open_loop"]["policy"]["pixels/<$x>"] = found["open_loop"]["policy"]["pixels/<$x>"] | {"mse": [0.05, 0.2]}
    found["groups"]["policy"] = found["groups"]["policy"] | {"dead": []}
    same = found["probes"]["policy"]["5"]
    same["seen"] = same["seen"] | {"linear": same["seen"]["linear"] | {"rmse": [3.0, 0.0, 0.0057]}}
    assert "<$x> y 5.7 mm and 22.6 mm" in conclude(found)[1], "both of the same steps"
    found["probes"]["policy"]["0"]["seen"]["linear"]["r2"][2] = 0.5
    ahead, known, *_, groups = conclude(found)
    assert "never" in ahead
    assert "mm" not in known
    assert "<$x> y (R² 0.50)" in known
    assert "none, of 2" in groups
    found["probes"]["positions"] = []
    assert "of 2 entries" in conclude(found)[1]
    assert len(conclude(numbers(probes=False))) == 4


def test_forks_are_told_and_shown(tmp_path: Path) -> None:
    found = numbers(probes=False) | {"trust": trusted()}
    lines = conclude(found)[3:-1]
    assert [name in lines[1] for name in ("policy", "3", "2.5")] == 3 * [True]
    assert [name in lines[2] for name in ("fog", "night", "wind", "unchanged")] == [True, True, False, False]
    assert ("fog" in lines[3], "wind" in lines[3]) == (True, False), "wind costs a hundredth of the return"
    found["trust"]["alarm"]["fog"]["share"] = 0.8
    found["trust"]["exploitability"]["exploited"] = False
    changed = conclude(found)[3:-1]
    assert [old == new for old, new in zip(lines, changed, strict=True)] == [True, False, True, False]
    write(tmp_path, Findings(found), ABOUT)
    text = (tmp_path / PAGE).read_text()
    assert text.count("5 (4.9 to 5.1)") == 2, "left and lost"
    assert json.loads((tmp_path / NUMBERS).read_text())["trust"] == finite(found["trust"])


def test_entries_stand_by_their_names_best_known_first() -> None:
    for figure in (report._probes(numbers(probes=True)), report._probe_groups(numbers(probes=True))):
        names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert names == [r"<\$x> y", "entry 0"]
    figure = report._probes(numbers(probes=True))
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.90", "0.30", "0.90", "< 0", "< 0", "< 0"]


def test_the_scale_of_effects_is_that_of_all_kinds() -> None:
    found = numbers(probes=False)
    found["effects"]["random"] = {name: [0] * 3 for name in found["effects"]["random"]}
    axis = report._effects(found).axes[0]
    assert axis.yaxis.get_transform().linthresh == pytest.approx(np.median([0, 1e-3, 1, 0, 0, 0]).clip(1e-9))


@pytest.mark.usefixtures("undrawn")
def test_the_linear_probe_is_kept(tmp_path: Path) -> None:
    probe = LinearProbe(torch.randn(5, 3).T.contiguous().T, torch.randn(3), torch.ones(3))
    write(tmp_path, Findings(numbers(probes=True), [], probe), ABOUT)
    kept = load_file(tmp_path / "linear_probe.safetensors")
    assert {name: value.tolist() for name, value in kept.items()} == {
        name: value.tolist() for name, value in vars(probe).items()
    }
