"""Verdicts of a comparison, and the files that it writes."""

import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from PIL import Image

from sheeplike.analysis.comparison import READING, compact, compare, number
from sheeplike.analysis.runs import group_runs, read_runs

RETURN, SUCCESS = "eval/return_mean", "eval/success_rate"


def verdict(result, better: str, worse: str) -> str:
    """The one line on a pair of agents, which holds the probability that one is above the other."""
    (line,) = (line for line in result.output.splitlines() if f"P({better} > {worse}) = " in line)
    return line


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
    assert dreamer["trained for"] == "4k steps, 40 s"
    assert dreamer["at equal budget, 4k"] == dreamer["final eval/return_mean"]
    # Each seed's mean height is (10 + 2 * (20 + s) + 2 * (30 + s) + 40 + s) / 6, and s is 1 and 2 in the middle half.
    assert dreamer["mean of the curve, 1k to 4k"].startswith(f"{(150 + 5 * 1.5) / 6:.3g} [")
    assert dreamer["policy steps to 31.5"] == "3.5k (4 of 4)"
    assert dreamer["training time to 31.5"] == "35 s (4 of 4)"
    assert rows["ppo"]["policy steps to 31.5"] == "not reached (0 of 4)"
    line = verdict(result, "dreamer_v3", "ppo")
    for fact in ("4k", "41.5", "9.5", "= 1.00", "p = 0.029"):
        assert fact in line
    written = (out / names[3]).read_text()
    assert read_table(written) == rows
    assert f"]({names[0]})" in written


def test_one_seed_that_fails_does_not_move_the_result(compared, trained):
    trained({0: [1]}, agent="ppo")
    logs = trained({seed: [value] for seed, value in enumerate((-500, 10, 12, 14))})
    row = compared(str(logs)).rows["dreamer_v3"]
    for column in ("final eval/return_mean", "at equal budget, 1k", "mean of the curve, 1k to 1k"):
        assert row[column].startswith("11 [-")


def test_csv_has_every_point(compared, two_agents, points):
    compared(str(two_agents), "out=here")
    rows = points("here/eval_return_mean_by_steps.csv")
    assert len(rows) == 2 * 4 * 4
    assert rows[0] == {"group": "dreamer_v3", "seed": "0", "step": "1000", "seconds": "10.0", "value": "10.0"}
    assert rows[-1] == {"group": "ppo", "seed": "3", "step": "4000", "seconds": "4.0", "value": "11.0"}


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\uff1d"])
def test_csv_has_no_formulas(compared, points, begin, record, sign):
    record(begin(Path("logs/a"), exp=f"{sign}HYPERLINK(1)", agent__name=f"{sign}cmd!A0", seed=f"{sign}1+1"), [1])
    compared("logs", "out=here")
    (row,) = points("here/eval_return_mean_by_steps.csv")
    assert row["group"] == f"'{sign}cmd!A0/{sign}HYPERLINK(1)"
    assert row["seed"] == f"'{sign}1+1"
    assert row["value"] == "1.0"


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


def test_each_agents_end_and_what_both_had_at_the_same_time(compared, trained):
    trained({seed: [10, 20, 30, 40] for seed in range(3)}, speed=100, success_rate=[0, 0, 0.5, 1])
    logs = trained({seed: [5] * 25 for seed in range(3)}, agent="ppo", speed=1000)
    result = compared(str(logs), "x=time", "threshold=20")
    assert sorted(path.suffix for path in (logs / "compare").glob("eval_return_mean_by_time.*")) == [
        ".csv",
        ".md",
        ".png",
        ".svg",
    ]
    rows = result.rows
    dreamer, ppo = rows["dreamer_v3"], rows["ppo"]
    assert (dreamer["trained for"], ppo["trained for"]) == ("4k steps, 40 s", "25k steps, 25 s")
    assert dreamer["final eval/return_mean"].startswith("40 ["), "its own end, which PPO did not train for"
    assert dreamer["best"] == "40"
    assert dreamer["final success rate"].startswith("100% [")
    assert dreamer["at equal budget, 25 s"].startswith("20 ["), "the evaluation at 20 s, not that at 40 s"
    assert ppo["at equal budget, 25 s"].startswith("5 [")
    # The line through 10 at 10 s, 20 at 20 s and 25 at 25 s.
    assert dreamer["mean of the curve, 10 s to 25 s"].startswith("17.5 [")
    assert dreamer["training time to 20"] == "20 s (3 of 3)"
    line = verdict(result, "dreamer_v3", "ppo")
    assert "25 s" in line
    assert "20" in line


def test_agents_without_an_equal_budget(compared, two_agents, points):
    """Every number of its own, every curve, and no verdict."""
    result = compared(str(two_agents), "x=time", "threshold=10")
    dreamer, ppo = result.rows["dreamer_v3"], result.rows["ppo"]
    assert dreamer["final eval/return_mean"].startswith("41.5 [")
    assert ppo["final eval/return_mean"].startswith("9.5 [")
    assert dreamer["training time to 10"] == "10 s (4 of 4)"
    assert not any("equal budget" in column or "mean of the curve" in column for column in dreamer)
    assert "P(dreamer_v3 > ppo) =" not in result.output
    (line,) = (line for line in result.output.splitlines() if "nearest: x=steps" in line)
    for fact in ("dreamer_v3", "ppo", "4 s", "10 s"):
        assert fact in line
    assert len(points(two_agents / "compare/eval_return_mean_by_time.csv")) == 2 * 4 * 4


def test_two_agents_of_three_with_an_equal_budget(compared, two_agents, record, begin):
    for seed in range(3):
        record(begin(two_agents / f"late/{seed}", seed=seed, agent__replay_ratio=0.5), [50, 60], every=10_000)
    result = compared(str(two_agents))
    (line,) = (line for line in result.output.splitlines() if "> ppo) = " in line)
    assert "4k" in line
    assert "replay_ratio=0.5" not in line
    late = [line for line in result.output.splitlines() if line.startswith("- ") and "10k" in line]
    assert len(late) == 2
    (line,) = (line for line in late if "ppo" not in line)
    assert "nearest" not in line


def test_seeds_without_a_common_range_have_no_mean_curve(compared, trained):
    trained({0: [1, 2]}, every=100)
    logs = trained({1: [3, 4]}, every=1000)
    (row,) = compared(str(logs)).rows.values()
    assert row["seeds"] == "2"
    assert row["trained for"] == "200 to 2k steps, 2 s to 20 s"
    found = compare(group_runs(read_runs([logs], [RETURN])[0], RETURN)[0], metric=RETURN)
    assert not found.groups[0].x.size
    assert len(found.notes) == 1
    assert "dreamer_v3" in found.notes[0]


def test_few_seeds_have_no_interval(compared, trained):
    trained({seed: [1, 2, 3] for seed in range(2)})
    logs = trained({7: [4, 5, 6]}, agent="ppo")
    result = compared(str(logs))
    rows = result.rows
    assert rows["dreamer_v3"]["final eval/return_mean"] == "3 (2 seeds: no interval)"
    assert rows["ppo"]["mean of the curve, 1k to 3k"] == "5 (1 seed: no interval)"
    line = verdict(result, "ppo", "dreamer_v3")
    for fact in ("= 1.00", "1 and 2", "3 each"):
        assert fact in line
    assert "p = " not in line


def test_each_degree_of_certainty_has_its_own_words(compared, trained, tmp_path, monkeypatch):
    cases = {
        "clear": ([10, 11, 12, 13], [0, 1, 2, 3], ["= 1.00", "p = 0.029"]),
        "three seeds": ([10, 11, 12], [0, 1, 2], ["11", "= 1.00", "p = 0.1"]),
        "alike": ([1, 4, 6, 8], [2, 3, 5, 7], ["= 0.56 ["]),
        "too few": ([10, 11], [0], ["= 1.00", "2 and 1", "3 each"]),
    }
    words = set()
    for case, (better, worse, facts) in cases.items():
        (tmp_path / case).mkdir()
        monkeypatch.chdir(tmp_path / case)
        trained({seed: [value] for seed, value in enumerate(better)})
        logs = trained({seed: [value] for seed, value in enumerate(worse)}, agent="ppo")
        line = verdict(compared(str(logs)), "dreamer_v3", "ppo")
        for fact in facts:
            assert fact in line
        words.add(re.sub(r"[^a-z ]+", "", line.partition("P(")[0]))
    assert len(words) == len(cases)


def test_a_loss_is_higher_not_better(compared, two_agents):
    result = compared(str(two_agents), "metric=loss/dyn")
    assert "best" not in result.rows["ppo"]
    assert result.rows["ppo"]["highest"] == "1"


def test_a_loss_named_like_a_score_is_a_loss(compared, two_agents, refused):
    for file in Path(two_agents).rglob("metrics.jsonl"):
        file.write_text(file.read_text().replace("loss/dyn", "held_out/reward"))
    result = compared(str(two_agents), "metric=held_out/reward")
    assert "best" not in result.rows["ppo"]
    assert " better " not in verdict(result, "dreamer_v3", "ppo")
    assert refused(str(two_agents), "metric=held_out/reward", "threshold=1").names("threshold=1.0")


def test_one_experiment(compared, trained):
    result = compared(str(trained({0: [1, 2]})))
    assert "P(dreamer" not in result.output


def test_notes_explain_only_what_is_shown(compared, trained):
    trained({0: [1, 2]})

    def explained(*options: str) -> list[str]:
        output = compared("logs", *options).output
        return [word for word, note in READING.items() if note in output]

    assert explained() == ["final"]
    assert explained("threshold=2") == ["final", "steps to"]
    trained({seed: [1, 2] for seed in range(3)}, agent="ppo", success_rate=[0.5, 1])
    assert explained() == ["final", "at equal budget", "P(", "success"]


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


def test_success_is_that_of_seeds(compared, trained):
    for seed, rate in enumerate((0.8, 0.9, 1.0)):
        trained({seed: [1, 2]}, success_rate=[0.1, rate])
    logs = trained({seed: [1, 2] for seed in range(3)}, agent="ppo")
    rows = compared(str(logs)).rows
    # By hand: the variance of the mean is 0.01 / 3, as of 27 episodes, and Student's t of 2 is 4.303.
    assert rows["dreamer_v3"]["final success rate"] == "90% [49%, 99%]"
    assert rows["ppo"]["final success rate"] == "not counted"
    logs = trained({seed: [1, 2] for seed in range(3)}, env="cartpole_balance")
    assert "final success rate" not in compared(str(logs)).rows["dreamer_v3"]


def test_success_of_one_or_two_seeds(compared, trained):
    trained({seed: [1] for seed in range(2)}, agent="ppo", success_rate=[0.9])
    logs = trained({0: [1]}, success_rate=[0.9])
    rows = compared(str(logs)).rows
    assert rows["dreamer_v3"]["final success rate"] == "90% [70%, 97%] of this seed's 20 episodes alone"
    assert rows["ppo"]["final success rate"] == "90% (2 seeds: no interval)"


@pytest.mark.parametrize(("rate", "episodes"), [(5, 20), (-1, 20), (0.5, 0), (0.5, -3)])
def test_a_success_rate_that_is_none(compared, record, begin, rate, episodes):
    record(begin(Path("logs/a")), [1], **{"success_rate": [rate], "episodes": [episodes]})
    assert "final success rate" not in compared("logs").rows["dreamer_v3"]


def test_a_threshold_on_success(compared, trained):
    logs = trained({seed: [1, 2] for seed in range(3)}, success_rate=[0.1, 0.9])
    result = compared(str(logs), f"metric={SUCCESS}", "threshold=0.9")
    assert result.rows["dreamer_v3"]["policy steps to 0.9"] == "2k (3 of 3)"
    assert result.rows["dreamer_v3"][f"final {SUCCESS}"].startswith("90% ["), "its interval is that of a rate"
    assert (logs / "compare/eval_success_rate_by_steps.png").stat().st_size > 10_000


def test_values_that_are_not_finite_are_counted(compared, trained):
    result = compared(str(trained({0: [1, math.nan, 3]})))
    (line,) = (line for line in result.output.splitlines() if "seed_0" in line and RETURN in line)
    assert re.findall(r"\d+", line.partition(RETURN)[2]) == ["1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.25, "0.25"), (500, "500"), (120_000, "120k"), (999_999, "1M"), (1.25e6, "1.25M"), (3e9, "3G")],
)
def test_ticks(value, text):
    assert compact(value) == text
    assert [number(v) for v in (0.9123, 999.7, -12_345)] == ["0.912", "1,000", "-12,345"]
