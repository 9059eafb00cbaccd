"""Figures of the pages are drawn again from the evidence in the repository."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image

from sheeplike.__main__ import main
from sheeplike.analysis.figure import encode
from sheeplike.inspection import report

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "howto" / "runs"
FIGURES = {
    "learn_cartpole": ("steps", ["cartpole_balance/dreamer_v3"], ["threshold=100"]),
    "compare_by_steps": ("steps", ["cartpole_balance"], ["scale=log", "threshold=100"]),
    "compare_by_time": ("time", ["cartpole_balance"], ["threshold=100"]),
    "learn_from_data": (
        "steps",
        [f"learn_from_data/{name}" for name in ("nothing", "demonstrations", "by_hand")],
        ["metric=eval/success_rate", "threshold=0.9"],
    ),
    "learn_offline": ("steps", ["learn_from_data/offline"], []),
    "learn_offline_nll": ("steps", ["learn_from_data/offline"], ["metric=held_out/nll"]),
    "learn_to_pick": (
        "steps",
        ["learn_to_pick"],
        ["metric=eval/success_rate", "threshold=0.9", "scale=log"],
    ),
    "learn_swingup": ("steps", ["learn_swingup"], ["scale=log"]),
    "variants_cartpole": ("steps", ["cartpole_balance/dreamer_v3", "variants"], ["threshold=100"]),
    "one_and_two_ranks": ("steps", ["cartpole_balance", "cartpole_balance_two_ranks"], ["scale=log"]),
}
for figure, task in (("published_swingup", "cartpole_swingup_state"), ("published_walker", "walker_stand")):
    place = f"published_scores/{task}"
    label = "reference_label=authors, size 12m, ratio 512, April 2024"
    published = [f"reference={RUNS / place}_authors.csv", label, "reference_frames=2"]
    FIGURES[figure] = ("steps", [place], ["metric=rollout/return_mean", *published])


@pytest.mark.parametrize("name", FIGURES)
def test_the_evidence_draws_the_figure(name: str, tmp_path: Path) -> None:
    x, runs, others = FIGURES[name]
    main(["compare", *(str(RUNS / run) for run in runs), f"x={x}", f"out={tmp_path}", *others])
    alike(next(tmp_path.glob("*.png")), name)


@pytest.mark.parametrize("name", ["pick", "balance"])
def test_the_evidence_draws_what_forks_showed(name: str) -> None:
    found = json.loads((RUNS / f"trust/{name}.json").read_text(encoding="utf-8"))
    with matplotlib.rc_context(report.STYLE):
        alike(io.BytesIO(encode(report.draw_trust({"trust": found}), "png")), f"trust_{name}")


@pytest.mark.parametrize("name", ["explore_grid", "sim_to_sim_pick", "sim_to_sim_balance"])
def test_its_program_draws_the_figure(name: str, tmp_path: Path) -> None:
    programs, drawn = ROOT / "tests/benchmarks", tmp_path / f"{name}.png"
    if name == "explore_grid":
        command = [programs / "explore_grid.py", "draw", RUNS / name, drawn]
    else:
        shutil.copy(RUNS / f"{name}.json", tmp_path)
        command = [programs / "sim_to_sim.py", tmp_path / f"{name}.json"]
    subprocess.run([sys.executable, *command], check=True, cwd=ROOT)
    alike(drawn, name)


def alike(drawn: Path | io.BytesIO, name: str) -> None:
    now, shown = (
        np.asarray(Image.open(picture).convert("RGB"), float) for picture in (drawn, ROOT / "howto" / f"{name}.png")
    )
    assert now.shape == shown.shape
    assert np.abs(now - shown).mean() < 1
