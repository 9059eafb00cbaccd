"""Verdicts of a comparison, and the files that it writes."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from sheeplike.analysis.comparison import compact, number

SUCCESS = "eval/success_rate"


def test_files_and_table(compared, two_agents, read_table):
    result = compared(str(two_agents), "threshold=31.5")
    out = two_agents / "compare"
    names = [f"eval_return_mean_by_steps.{kind}" for kind in ("png", "svg", "csv", "md")]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    assert result.output.splitlines()[-4:] == [str(out / name) for name in names]
    rows = result.rows
    assert list(rows) == ["dreamer_v3", "ppo"]
    dreamer = rows["dreamer_v3"]
    assert dreamer["seeds"] == "4"
    assert dreamer["final eval/return_mean"].startswith("41.5 [40, 43")
    assert dreamer["best"] == "41.5"
    # Each seed's area is (10 + 2 * (20 + s) + 2 * (30 + s) + 40 + s) / 6, and s is 1 and 2 in the middle half.
    assert dreamer["area under the curve"].startswith(f"{(150 + 5 * 1.5) / 6:.3g} [")
    assert dreamer["policy steps to 31.5"] == "3.5k (4 of 4)"
    assert dreamer["training time to 31.5"] == "35 s (4 of 4)"
    assert rows["ppo"]["policy steps to 31.5"] == "not reached (0 of 4)"
    assert "dreamer_v3 is better than ppo: P(dreamer_v3 > ppo) = 1.00, permutation" in result.output
    assert "p = 0.029" in result.output
    assert "Compared from 1k policy steps to 4k policy steps." in result.output
    written = (out / names[3]).read_text()
    assert read_table(written) == rows
    assert f"]({names[0]})" in written


def test_one_seed_that_fails_does_not_move_the_result(compared, trained):
    logs = trained({seed: [value] for seed, value in enumerate((-500, 10, 12, 14))})
    (row,) = compared(str(logs)).rows.values()
    assert row["final eval/return_mean"].startswith("11 [-")
    assert row["area under the curve"].startswith("11 [-")


def test_csv_has_every_point(compared, two_agents, points):
    compared(str(two_agents), "out=here")
    rows = points("here/eval_return_mean_by_steps.csv")
    assert len(rows) == 2 * 4 * 4
    assert rows[0] == {"group": "dreamer_v3", "seed": "0", "step": "1000", "seconds": "10.0", "value": "10.0"}
    assert rows[-1] == {"group": "ppo", "seed": "3", "step": "4000", "seconds": "4.0", "value": "11.0"}


def test_images_are_pictures(compared, two_agents):
    compared(str(two_agents), "out=here", "threshold=20")
    picture = Image.open("here/eval_return_mean_by_steps.png").convert("RGB")
    assert picture.width >= 1000
    colours = {colour for _, colour in picture.getcolors(picture.width * picture.height)}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= colours, "both agents' lines"
    svg = Path("here/eval_return_mean_by_steps.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_the_same_runs_give_the_same_bytes(compared, two_agents):
    for out in ("one", "two"):
        compared(str(two_agents), f"out={out}", "threshold=20")
    for path in Path("one").iterdir():
        assert path.read_bytes() == (Path("two") / path.name).read_bytes(), path.name


def test_dreamer_is_compared_at_the_time_that_both_have(compared, trained):
    trained({seed: [10, 20, 30, 40] for seed in range(3)}, speed=100)
    logs = trained({seed: [5] * 25 for seed in range(3)}, agent="ppo", speed=1000)
    result = compared(str(logs), "x=time", "threshold=20")
    assert sorted(path.suffix for path in (logs / "compare").glob("eval_return_mean_by_time.*")) == [
        ".csv",
        ".md",
        ".png",
        ".svg",
    ]
    rows = result.rows
    assert rows["dreamer_v3"]["final eval/return_mean"].startswith("20 ["), "the evaluation at 20 s, not that at 40 s"
    assert rows["dreamer_v3"]["training time to 20"] == "20 s (3 of 3)"
    assert "Compared from 10 s to 25 s, where logs/franka_pick/ppo/ppo/seed_0 ends." in result.output


def test_runs_that_do_not_overlap(refused, two_agents):
    line = refused(str(two_agents), "x=time")
    assert "ppo/seed_0 ends at 4 s" in line
    assert "begins at 10 s: expected runs that overlap in training time" in line


def test_few_seeds_have_no_interval(compared, trained):
    trained({seed: [1, 2, 3] for seed in range(2)})
    logs = trained({7: [4, 5, 6]}, agent="ppo")
    result = compared(str(logs))
    rows = result.rows
    assert rows["dreamer_v3"]["final eval/return_mean"] == "3 (2 seeds: no interval)"
    assert rows["ppo"]["area under the curve"] == "5 (1 seed: no interval)"
    assert (
        "Not enough seeds to say which of ppo and dreamer_v3 is better: 1 and 2, expected at least 3" in result.output
    )
    assert "P(ppo > dreamer_v3) = 1.00, no interval" in result.output


def test_three_seeds_are_not_called_sure(compared, trained):
    trained({seed: [10 + seed] for seed in range(3)})
    result = compared(str(trained({seed: [seed] for seed in range(3)}, agent="ppo")))
    assert "dreamer_v3 looks better than ppo, but more seeds are needed" in result.output
    assert "= 1.00, permutation test p = 0.1" in result.output


def test_no_clear_difference(compared, trained):
    trained({seed: [value] for seed, value in enumerate((1, 4, 6, 8))})
    result = compared(str(trained(dict(enumerate([[2], [3], [5], [7]])), agent="ppo")))
    assert "No clear difference between dreamer_v3 and ppo: P(dreamer_v3 > ppo) = 0.56 [" in result.output


def test_a_loss_is_higher_not_better(compared, two_agents):
    result = compared(str(two_agents), "metric=loss/dyn")
    assert "better" not in result.output


def test_one_experiment(compared, trained):
    result = compared(str(trained({0: [1, 2]})))
    assert "One experiment: nothing to compare it with." in result.output
    assert "P(dreamer" not in result.output


@pytest.mark.parametrize(
    ("curves", "cell"),
    [
        ([[0, 5, 5], [5, 5, 5], [0, 0, 5]], "2k (3 of 3)"),
        ([[0, 5, 5], [0, 0, 0], [0, 0, 5]], "3k (2 of 3)"),
        ([[0, 5, 5], [0, 0, 0], [0, 0, 0]], "not reached (1 of 3)"),
        ([[0, 5, 5], [0, 0, 0]], "not reached (1 of 2)"),
        ([[0, 5, 5], [5, 0, 0]], "1.5k (2 of 2)"),
        # The second seed stopped after 1k policy steps: it might have been there at 2k.
        ([[0, 5, 5], [0], [0, 0, 5]], "at most 3k (2 of 3)"),
    ],
)
def test_median_time_to_a_threshold(compared, trained, curves, cell):
    result = compared(str(trained(dict(enumerate(curves)))), "threshold=5")
    assert result.rows["dreamer_v3"]["policy steps to 5"] == cell


def test_success_is_pooled_over_episodes(compared, trained):
    trained({seed: [1, 2] for seed in range(3)}, success_rate=[0.1, 0.9])
    logs = trained({seed: [1, 2] for seed in range(3)}, agent="ppo")
    rows = compared(str(logs)).rows
    assert rows["dreamer_v3"]["success"] == "90% [80%, 95%] of 60 episodes"
    assert rows["ppo"]["success"] == "not counted"
    logs = trained({seed: [1, 2] for seed in range(3)}, env="cartpole_balance")
    assert "success" not in compared(str(logs)).rows["dreamer_v3"]


def test_a_threshold_on_success(compared, trained):
    logs = trained({seed: [1, 2] for seed in range(3)}, success_rate=[0.1, 0.9])
    result = compared(str(logs), f"metric={SUCCESS}", "threshold=0.9")
    assert result.rows["dreamer_v3"]["policy steps to 0.9"] == "2k (3 of 3)"
    assert (logs / "compare/eval_success_rate_by_steps.png").stat().st_size > 10_000


def test_values_that_are_not_finite_are_counted(compared, trained):
    result = compared(str(trained({0: [1, math.nan, 3]})))
    assert "seed_0: values of eval/return_mean that are not finite or too large, left out: 1." in result.output


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (500, "500"), (120_000, "120k"), (999_999, "1M"), (1.25e6, "1.25M"), (3e9, "3G")],
)
def test_ticks(value, text):
    assert compact(value) == text
    assert [number(v) for v in (0.9123, 999.7, -12_345)] == ["0.912", "1,000", "-12,345"]
