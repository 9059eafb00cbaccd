"""Directories of runs and their experiments; files that are damaged, or none at all."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from sheeplike.agents import registry
from sheeplike.analysis.runs import ANALYSIS_FILE, find_runs, read_run
from sheeplike.config.saved import resumable_keys
from sheeplike.config.schema import all_keys
from sheeplike.options import marked

RETURN = "eval/return_mean"
RUN = Path("dreamer_v3/dreamer_v3/seed_0")
RANDOMIZATION = Path(__file__).parents[2] / "configs/randomization"


def test_other_settings_are_another_group(compared, trained, record, begin):
    trained({0: [1], 1: [2]})
    for seed in (0, 1):
        place = Path(f"logs/franka_pick/ratio/seed_{seed}")
        record(begin(place, seed=seed, agent__replay_ratio=0.5, total_steps=7), [3])
    rows = compared("logs").rows
    config = yaml.safe_load(Path("logs/franka_pick/dreamer_v3/dreamer_v3/seed_0/config.yaml").read_text())
    usual = config["agent"]["replay_ratio"]
    assert set(rows) == {f"dreamer_v3, replay_ratio={usual}", "dreamer_v3, replay_ratio=0.5"}
    assert {row["seeds"] for row in rows.values()} == {"2"}


@pytest.mark.parametrize("begun", ["logs/before/seed_{}", "logs/before/seed_0"])
def test_seeds_that_began_with_earlier_runs_are_one_group(compared, trained, record, begin, begun):
    trained({0: [1], 1: [2]})
    for seed in (0, 1):
        place = Path(f"logs/franka_pick/explored/seed_{seed}")
        record(begin(place, seed=seed, **{"agent__from": begun.format(seed)}), [3])
    rows = compared("logs").rows
    assert set(rows) == {"dreamer_v3, from=null", "dreamer_v3, from=logs/before"}
    assert {row["seeds"] for row in rows.values()} == {"2"}


def test_sizes_are_named_as_they_were_typed(compared, trained, record, begin):
    trained({0: [1]})
    record(begin(Path("logs/franka_pick/big/seed_0"), seed=0, agent__size="12m"), [3])
    assert set(compared("logs").rows) == {"dreamer_v3, size=1m", "dreamer_v3, size=12m"}
    record(begin(Path("logs/franka_pick/odd/seed_0"), seed=0, agent__size={"deter": 512, "units": 64}), [3])
    assert "dreamer_v3, deter=512, units=64" in compared("logs").rows


def test_csv_is_read_back_with_any_name(compared, trained, record, begin, points):
    trained({0: [1]})
    record(begin(Path("logs/franka_pick/x"), seed=0, agent__observations=["pixels/*", "state"]), [3])
    compared("logs", "out=here")
    assert {row["group"] for row in points("here/eval_return_mean_by_steps.csv")} == {
        "dreamer_v3, observations=[pixels/*]",
        "dreamer_v3, observations=[pixels/*,state]",
    }


def test_options_of_the_task_are_in_the_names_of_all(compared, trained):
    trained({0: [1]}, env__options={"episode_length": 50}, env__action_repeat=1)
    logs = trained({0: [1]}, agent="ppo", env__options={"episode_length": 60}, env__action_repeat=4)
    assert set(compared(str(logs)).rows) == {
        "dreamer_v3, action_repeat=1, episode_length=50",
        "ppo, action_repeat=4, episode_length=60",
    }


def test_sizes_of_images_are_one_setting_and_not_one_for_each_camera(compared, trained):
    trained({0: [1]})
    logs = trained({0: [1]}, agent="ppo", env__image_size={"front": 64, "wrist": [48, 64]})
    assert set(compared(str(logs)).rows) == {"dreamer_v3, image_size=48", "ppo, image_size={front:64,wrist:[48,64]}"}


def test_what_may_change_on_resuming_does_not_make_another_group():
    incidental = marked(all_keys(*registry.built_in()), "incidental")
    ranks = {"fabric.devices", "fabric.num_nodes"}  # whose curves are compared
    assert resumable_keys() - {"eval"} - ranks <= incidental


@pytest.mark.parametrize(("key", "value", "groups"), [("every", 7, 1), ("episodes", 3, 1), ("sample", False, 2)])
def test_how_actions_are_chosen_in_evaluation_makes_another_group(compared, trained, record, begin, key, value, groups):
    logs = trained({0: [1]})
    record(begin(Path("logs/franka_pick/other"), seed=1, **{f"eval__{key}": value}), [3])
    assert len(compared(str(logs), "logs").rows) == groups


def test_what_agents_see_is_shown_where_it_differs(compared, trained):
    trained({0: [1]})
    logs = trained({0: [1]}, agent="ppo", agent__observations=["state"])
    assert set(compared(str(logs)).rows) == {"dreamer_v3, observations=[pixels/*]", "ppo, observations=[state]"}


def test_recipes_of_randomization_are_shown_in_a_few_words(compared, trained, record, begin):
    lines = yaml.safe_load((RANDOMIZATION / "franka_vision.yaml").read_text())
    trained({0: [1]})
    logs = trained({0: [1]}, agent="ppo", randomization=lines)
    first, second, *others = lines
    label = f"ppo, randomization={first}+{second}+{len(others)} more"
    assert set(compared(str(logs)).rows) == {"dreamer_v3, randomization=none", label}
    # Where that is not enough to tell them apart: the numbers.
    wider = {**lines, second: {**lines[second], "distribution": {"uniform": [0.0, 1.0]}}}
    record(begin(logs / "wider/seed_0", agent="ppo", seed=0, randomization=wider), [1])
    _, *rows = sorted(compared(str(logs)).rows)
    assert rows == [
        f"{label}, randomization.{second}.distribution.uniform=[0.0,1.0]",
        f"{label}, randomization.{second}.distribution.uniform=[0.8,1.0]",
    ]


def test_agents_in_worlds_that_differ_in_one_number_are_told_apart(compared, trained, record, begin):
    lines = yaml.safe_load((RANDOMIZATION / "franka_physics.yaml").read_text())
    wider = {**lines, "gravity": {**lines["gravity"], "distribution": {"uniform": [0.5, 1.5]}, "shared": None}}
    trained({0: [1]}, randomization=lines)
    logs = trained({0: [1]}, agent="ppo", randomization=wider)
    record(begin(logs / "fast/seed_0", agent="ppo", seed=0, randomization=wider, agent__learning_rate=0.1), [1])
    first, *others = sorted(compared(str(logs)).rows)
    assert first == "dreamer_v3, randomization.gravity.distribution.uniform=[0.95,1.05]"
    assert all("gravity.distribution.uniform=[0.5,1.5]" in label for label in others)


def test_a_key_that_is_null_is_not_one_that_lacks(compared, trained, record, begin):
    lines = yaml.safe_load((RANDOMIZATION / "franka_physics.yaml").read_text())
    logs = trained({0: [1]}, randomization=lines)
    same = {**lines, "box_mass": {**lines["box_mass"], "shared": None}}
    record(begin(logs / "null/seed_1", seed=1, randomization=same), [1])
    assert len(compared(str(logs)).rows) == 2


def test_lines_of_randomization_in_another_order_are_another_experiment(compared, trained, record, begin):
    lines = yaml.safe_load((RANDOMIZATION / "franka_physics.yaml").read_text())
    logs = trained({0: [1]}, randomization=lines)
    record(begin(logs / "reversed/seed_1", seed=1, randomization=dict(reversed(lines.items()))), [1])
    assert len(compared(str(logs)).rows) == 2


@pytest.mark.parametrize("longer", ["first", "second"])
def test_the_longer_run_of_a_seed_is_kept(compared, record, begin, longer):
    for place, value in (("first", 1), ("second", 2)):
        record(begin(Path("logs") / place, seed=0), [value] * (3 if place == longer else 2))
    record(begin(Path("logs/third"), seed=1), [7])
    result = compared("logs")
    assert result.rows["dreamer_v3"]["seeds"] == "2"
    paths = f"logs/{longer}, logs/third"
    assert f"- dreamer_v3: {paths}\n" in result.output
    (line,) = (line for line in result.output.splitlines() if "Left out" in line)
    for part in ("seed 0 of dreamer_v3", "logs/first", "logs/second"):
        assert part in line


def test_a_run_that_is_named_twice_counts_once(compared, trained, tmp_path):
    logs = trained({0: [1], 1: [2]})
    result = compared(str(logs), "logs", str(logs.absolute() / "dreamer_v3/dreamer_v3/seed_1"))
    assert result.rows["dreamer_v3"]["seeds"] == "2"


def test_what_is_below_a_run_is_no_run(compared, trained, record, begin):
    logs = trained({0: [1]})
    below = logs / "dreamer_v3/dreamer_v3/seed_0/checkpoints/step_1"
    record(begin(below, seed=1), [2])
    assert compared(str(logs)).rows["dreamer_v3"]["seeds"] == "1"


def test_several_directories(compared, two_agents):
    result = compared("logs/franka_pick/ppo", "logs/franka_pick/dreamer_v3/dreamer_v3/seed_2")
    assert {name: row["seeds"] for name, row in result.rows.items()} == {"dreamer_v3": "1", "ppo": "4"}
    assert Path("logs/franka_pick/ppo/compare").is_dir()


def test_dry_runs_are_left_out(compared, refused, trained, record, begin):
    record(begin(Path("logs/dry_run/franka_pick/dreamer_v3/dreamer_v3/seed_0"), dry_run=True), [1])
    assert "seed_0" in refused("logs")
    trained({3: [1]})
    result = compared("logs")
    assert "- Left out: logs/dry_run/franka_pick/dreamer_v3/dreamer_v3/seed_0: a dry run" in result.output
    assert result.rows["dreamer_v3"]["seeds"] == "1"


def test_the_line_that_is_being_written_is_ignored(compared, trained):
    logs = trained({0: [1, 2]})
    file = logs / "dreamer_v3/dreamer_v3/seed_0/metrics.jsonl"
    line = json.dumps({"step": 3000, "gradient_steps": 1, "seconds": 30.0, RETURN: 99.0})
    for cut in (1, 9, len(line) - 1):
        with file.open("r+") as text:
            complete = text.read()
            text.write(line[:cut])
        assert compared(str(logs)).rows["dreamer_v3"]["best"] == "2"
        file.write_text(complete)
    file.write_text(complete + line + "\n")
    assert compared(str(logs)).rows["dreamer_v3"]["best"] == "99"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_is_no_file_is_not_read(refused, trained, name, kind):
    file = trained({0: [1]}) / RUN / name
    file.rename("elsewhere")
    if kind == "link":
        file.symlink_to(Path("elsewhere").absolute())
    else:
        os.mkfifo(file)
    line = refused("logs")
    assert str(file) in line
    assert ("a link" if kind == "link" else "no regular file") in line


def test_a_configuration_that_is_too_large_is_refused(refused, trained):
    file = trained({0: [1]}) / RUN / "config.yaml"
    with file.open("a") as text:
        text.write("# " + "x" * 2**20)
    assert "65,536" in refused("logs")


def test_a_configuration_that_multiplies_is_none_of_ours(refused, trained):
    file = trained({0: [1]}) / RUN / "config.yaml"
    with file.open("a") as text:
        text.write("a0: &a0 {x: 1}\n")
        for level in range(1, 40):
            text.write(f"a{level}: &a{level} {{x: *a{level - 1}, y: *a{level - 1}}}\n")
    assert refused("logs").names("config.yaml", "metrics.jsonl")


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1e308", "-1.7e308", "1e999", "NaN", "true"])
def test_a_number_that_no_curve_can_show_is_left_out(compared, trained, number):
    file = trained({0: [1, 2]}) / RUN / "metrics.jsonl"
    with file.open("a") as rows:
        rows.write(f'{{"step": 3000, "seconds": 30, "eval/return_mean": {number}}}\n')
    result = compared("logs")
    assert result.rows["dreamer_v3"]["best"] == "2"
    assert "not finite or too large, left out: 1" in result.output


@pytest.mark.parametrize(
    "row",
    [
        "nonsense",
        "null",
        "[1]",
        '{"seconds": 3}',
        '{"step": null, "seconds": 3}',
        '{"step": true, "seconds": 3}',
        '{"step": "240", "seconds": 3}',
        '{"step": -5, "seconds": 3}',
        '{"step": 0.5, "seconds": 3}',
        '{"step": 1e30, "seconds": 3}',
        '{"step": 1, "seconds": false}',
        f'{{"step": 1{"0" * 400}, "seconds": 1}}',
        '{"step": NaN, "seconds": 1}',
        '{"step": 1e999, "seconds": 1}',
        '{"step": 1, "seconds": NaN}',
        '{"step": 1, "seconds": -Infinity}',
        "[" * 10**5,
    ],
)
def test_damaged_rows(refused, trained, row):
    file = trained({0: [1, 2]}) / RUN / "metrics.jsonl"
    file.write_text(f"{row}\n{file.read_text()}")
    assert "JSON" in refused("logs")


@pytest.mark.parametrize("config", [None, "", "[", "exp: 3", "exp: a\nagent: b\nenv: c", "!!python/name:os.system ''"])
def test_metrics_without_a_configuration(refused, trained, config):
    logs = trained({0: [1, 2]})
    file = logs / "dreamer_v3/dreamer_v3/seed_0/config.yaml"
    file.unlink()
    if config is not None:
        file.write_text(config)
    assert refused(str(logs)).names("config.yaml", "metrics.jsonl")


def test_settings_of_one_name_in_two_sections_are_both_in_the_label(compared, trained, record, begin):
    logs = trained({0: [1]}, agent__targets=[])
    scales = {"actor": {"weight": 1}, "critic": {"weight": 2}}
    record(begin(logs / "other/seed_0", seed=0, agent__targets=scales), [1])
    assert "dreamer_v3, agent.targets.actor.weight=1, agent.targets.critic.weight=2" in compared(str(logs)).rows


def test_settings_that_print_alike_are_groups_of_their_own(compared, trained, record, begin):
    logs = trained({0: [1]}, agent__targets=5)
    for name, value in (("text", "5"), ("other", 6)):
        record(begin(logs / name / "seed_0", seed=0, agent__targets=value), [2])
    assert len(compared(str(logs)).rows) == 3


def test_a_clock_that_was_set_back_does_not_turn_the_curve_back(trained):
    file = trained({0: [1]}) / RUN / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}, "seconds": {s}, "{RETURN}": 1}}\n' for step, s in ((1, 9), (2, 4))))
    assert list(read_run(file.parent, {RETURN}).curves[RETURN].seconds) == [9, 9]


def test_scalars_as_other_tools_write_them(compared):
    """TensorFlow 2 and JAX tools such as Brax write a scalar as a tensor."""
    writer = EventFileWriter("runs/brax")
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    for step in (10, 20):
        tensor = make_tensor_proto(np.float32(step / 4))
        summary = Summary(value=[Summary.Value(tag="eval/return_mean", tensor=tensor, metadata=metadata)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()
    assert compared("runs").rows["brax (TensorBoard)"]["best"] == "5"


def test_a_run_beside_the_file_of_an_analysis_is_a_run(tmp_path, begin, record):
    run = record(begin(tmp_path / "logs/mine"), [1.0])
    (run / ANALYSIS_FILE).write_text("{}")
    assert find_runs([tmp_path / "logs"]) == [run]
