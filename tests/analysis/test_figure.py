"""Curves, labels and legend of the figure."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from sheeplike.analysis.comparison import Comparison, compare
from sheeplike.analysis.figure import draw, encode
from sheeplike.analysis.runs import find_runs, group_runs, read_run

RETURN = "eval/return_mean"


def measured(x: str = "steps", threshold: float | None = None) -> Comparison:
    groups, _ = group_runs([read_run(path, {RETURN}) for path in find_runs([Path("logs")])], RETURN)
    return compare(groups, metric=RETURN, x=x, threshold=threshold)


def drawn(x: str = "steps", threshold: float | None = None) -> Axes:
    return draw(measured(x, threshold), "the title").axes[0]


def test_lines_and_bands(trained):
    trained({0: [1, 2, 3], 1: [2, 3, 4], 2: [3, 9]})
    trained({0: [1, 2, 3], 1: [2, 3, 4]}, agent="ppo")
    axes = drawn(threshold=2.5)
    assert len(axes.collections) == 1, "a band for the three seeds, none for the two"
    thick = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    names = {"dreamer_v3 (3 seeds)", "ppo (2 seeds: no interval)"}
    assert set(thick) == names | {"threshold 2.5", "equal budget"}
    dreamer = thick["dreamer_v3 (3 seeds)"]
    assert list(dreamer.get_xdata()) == [1000, 2000], "it stops where the first seed stops"
    assert list(dreamer.get_ydata()) == pytest.approx([2, 14 / 3])
    thin = [line for line in axes.lines if len(line.get_xdata()) > 1 and line.get_linewidth() < 1]
    assert sorted(len(line.get_xdata()) for line in thin if line.get_color() == dreamer.get_color()) == [2, 3, 3]
    assert list(thick["threshold 2.5"].get_ydata()) == [2.5, 2.5]
    assert list(thick["equal budget"].get_xdata()) == [2000, 2000]
    assert (axes.get_xlabel(), axes.get_title("left")) == ("policy steps", "the title")
    assert RETURN in axes.get_ylabel()


def test_runs_that_take_no_policy_step_count_gradient_steps(trained):
    trained({0: [1, 2], 1: [2, 3]}, data__updates=2000)
    assert drawn(threshold=1).get_xlabel() == "gradient steps"
    trained({0: [1, 2]}, agent="ppo")
    assert drawn().get_xlabel() == "gradient steps or policy steps"
    assert drawn("time").get_xlabel() == "minutes of training"


def test_every_curve_is_whole_without_an_equal_budget(trained):
    trained({0: [1, 2, 3], 1: [2, 3, 4], 2: [3, 9, 9]})
    trained({0: [1, 2], 1: [2, 3], 2: [5]}, agent="ppo", every=5000)
    axes = drawn()
    assert not any(line.get_label() == "equal budget" for line in axes.lines)
    whole = sorted(tuple(line.get_xdata()) for line in axes.lines if line.get_linewidth() < 1)
    assert whole == sorted([(1000, 2000, 3000)] * 3 + [(5000, 10_000)] * 2 + [(5000,)])
    (single,) = (line for line in axes.lines if len(line.get_xdata()) == 1 and line.get_linewidth() < 1)
    assert single.get_marker() == ".", "a line of one point shows nothing"


def test_minutes(trained):
    trained({0: [1, 2, 3]}, every=6000, speed=10)
    axes = drawn(x="time")
    assert axes.get_xlabel() == "minutes of training"
    (line,) = (line for line in axes.lines if not line.get_label().startswith("_"))
    assert list(line.get_xdata()) == [10, 20, 30]


def test_curves_between_evaluations_are_straight(trained):
    trained({0: [0, 10]}, every=1000)
    trained({1: [0, 0, 20, 20]}, every=500)
    (group,) = measured().groups
    assert list(group.x) == [1000, 1500, 2000]
    assert list(group.mean) == [0, 12.5, 15]


def test_a_curve_of_many_points_is_thinned(trained):
    trained({seed: np.linspace(0, 1, 500) for seed in range(3)})
    (group,) = measured().groups
    assert len(group.x) == 200
    assert (group.x[0], group.x[-1]) == (1000, 500_000)


def test_a_long_legend_leaves_room_for_the_plot(begin, record):
    for name in map("a_recipe_with_a_name_as_long_as_half_of_the_figure_{}".format, range(30)):
        record(begin(Path("logs") / name, exp=name, seed=1), [1, 2])
    figure = draw(measured(), "the title")
    figure.draw_without_rendering()
    assert figure.legends[0].get_window_extent().y1 <= figure.axes[0].get_window_extent().y0


def test_a_long_label_stays_in_the_figure(begin, record):
    for name in ("a_short_one", "a_setting=with_its_value " * 6):
        record(begin(Path("logs") / name.strip(), exp=name, seed=1), [1, 2])
    figure = draw(measured(), "the title")
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert 0 <= legend.x0 < legend.x1 <= figure.bbox.x1


def test_signs_that_would_be_a_formula_are_signs(trained, begin, record, recwarn):
    logs = trained({0: [1, 2]})
    record(begin(logs / "x", exp="$\\frac{$", seed=1), [1, 2])
    record(begin(logs / "y", exp="$x$ \u4f60", seed=1), [1, 2])
    figure = draw(measured(), "$\\frac{$")
    assert encode(figure, "svg")
    assert {text.get_text().partition(" (")[0] for text in figure.legends[0].texts} >= {"dreamer_v3/\\$x\\$ \u4f60"}
    assert not recwarn.list
