"""Which directories are runs, of which experiment, and how other tools' runs are read."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from sheeplike.commands.config import RESUMABLE
from sheeplike.commands.sources import CONFIGS
from sheeplike.monitor.runs import INCIDENTAL, read_run

RETURN = "eval/return_mean"


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


def test_a_preset_is_named_unless_it_was_changed(compared, trained, record, begin):
    trained({0: [1]})
    size = {"name": "12m", "deter": 2048, "hidden": 256, "classes": 16, "depth": 16, "units": 256}
    record(begin(Path("logs/franka_pick/big/seed_0"), seed=0, agent__size=size), [3])
    assert set(compared("logs").rows) == {"dreamer_v3, size=1m", "dreamer_v3, size=12m"}
    record(begin(Path("logs/franka_pick/odd/seed_0"), seed=0, agent__size=size | {"units": 64}), [3])
    labels = set(compared("logs").rows)
    assert len(labels) == 3
    assert sum("agent.size.name=12m" in label and "agent.size.units=64" in label for label in labels) == 1


def test_csv_is_read_back_with_any_name(compared, trained, record, begin, points):
    trained({0: [1]})
    record(begin(Path("logs/franka_pick/x"), seed=0, agent__observations=["pixels/*", "state"]), [3])
    compared("logs", "out=here")
    assert {row["group"] for row in points("here/eval_return_mean_by_steps.csv")} == {
        "dreamer_v3, observations=[pixels/*]",
        "dreamer_v3, observations=[pixels/*,state]",
    }


def test_options_of_the_task_are_in_the_names_of_all(compared, trained):
    trained({0: [1]}, env__options={"episode_length": 50})
    logs = trained({0: [1]}, agent="ppo", env__options={"episode_length": 60})
    assert set(compared(str(logs)).rows) == {
        "dreamer_v3, episode_length=50",
        "ppo, episode_length=60",
    }


def test_an_action_that_is_held_for_longer_is_told(compared, trained):
    trained({0: [1]}, env__action_repeat=1)
    logs = trained({0: [1]}, agent="ppo", env__action_repeat=4)
    result = compared(str(logs))
    assert set(result.rows) == {"dreamer_v3, action_repeat=1", "ppo, action_repeat=4"}
    assert "A policy step is 1 or 4 control steps" in result.output


def test_sizes_of_images_are_one_setting_and_not_one_for_each_camera(compared, trained):
    trained({0: [1]})
    logs = trained({0: [1]}, agent="ppo", env__image_size={"front": 64, "wrist": [48, 64]})
    assert set(compared(str(logs)).rows) == {"dreamer_v3, image_size=48", "ppo, image_size={front:64,wrist:[48,64]}"}


def test_a_run_that_is_older_than_keys_of_today_is_of_the_same_group(compared, trained, record, begin, aged):
    logs = trained({0: [1]})
    place = begin(Path("logs/franka_pick/older/seed_1"), seed=1)
    (place / "config.yaml").write_text(yaml.safe_dump(aged(yaml.safe_load((place / "config.yaml").read_text()))))
    record(place, [3])
    assert {name: row["seeds"] for name, row in compared(str(logs)).rows.items()} == {"dreamer_v3": "2"}
    record(begin(Path("logs/franka_pick/dark/seed_2"), seed=2, env__shadows=True), [3])
    assert set(compared(str(logs)).rows) == {"dreamer_v3, shadows=false", "dreamer_v3, shadows=true"}


def test_what_may_change_on_resuming_does_not_make_another_group():
    assert RESUMABLE - {"eval"} <= INCIDENTAL


@pytest.mark.parametrize(("key", "value", "groups"), [("every", 7, 1), ("episodes", 3, 1), ("sample", False, 2)])
def test_how_actions_are_chosen_in_evaluation_makes_another_group(compared, trained, record, begin, key, value, groups):
    logs = trained({0: [1]})
    record(begin(Path("logs/franka_pick/other"), seed=1, **{f"eval__{key}": value}), [3])
    assert len(compared(str(logs), "logs").rows) == groups


def test_what_agents_see_is_told_where_it_differs(compared, trained):
    trained({0: [1]})
    logs = trained({0: [1]}, agent="ppo", agent__observations=["state"])
    assert set(compared(str(logs)).rows) == {"dreamer_v3, observations=[pixels/*]", "ppo, observations=[state]"}


def test_recipes_of_randomization_are_told_in_a_few_words(compared, trained, record, begin):
    lines = yaml.safe_load((CONFIGS / "randomization" / "franka_vision.yaml").read_text())
    trained({0: [1]})
    logs = trained({0: [1]}, agent="ppo", randomization=lines)
    first, second, *others = lines
    told = f"ppo, randomization={first}+{second}+{len(others)} more"
    assert set(compared(str(logs)).rows) == {"dreamer_v3, randomization=none", told}
    # Where that is not enough to tell them apart: the numbers.
    wider = {**lines, second: {**lines[second], "distribution": {"uniform": [0.0, 1.0]}}}
    record(begin(logs / "wider/seed_0", agent="ppo", seed=0, randomization=wider), [1])
    _, *rows = sorted(compared(str(logs)).rows)
    assert rows == [
        f"{told}, {second}.distribution.uniform=[0.0,1.0]",
        f"{told}, {second}.distribution.uniform={str(lines[second]['distribution']['uniform']).replace(' ', '')}",
    ]


def test_agents_in_worlds_that_differ_in_one_number_are_told_apart(compared, trained, record, begin):
    lines = yaml.safe_load((CONFIGS / "randomization" / "franka_physics.yaml").read_text())
    wider = {**lines, "gravity": {**lines["gravity"], "distribution": {"uniform": [0.5, 1.5]}, "shared": None}}
    trained({0: [1]}, randomization=lines)
    logs = trained({0: [1]}, agent="ppo", randomization=wider)
    record(begin(logs / "fast/seed_0", agent="ppo", seed=0, randomization=wider, agent__learning_rate=0.1), [1])
    first, *others = sorted(compared(str(logs)).rows)
    assert first.startswith(
        "dreamer_v3, randomization=gravity+box_mass+6 more, gravity.distribution.uniform=[0.95,1.05]"
    )
    assert all("gravity.distribution.uniform=[0.5,1.5]" in label for label in others)


def test_a_key_that_is_null_is_not_one_that_lacks(compared, trained, record, begin):
    lines = yaml.safe_load((CONFIGS / "randomization" / "franka_physics.yaml").read_text())
    logs = trained({0: [1]}, randomization=lines)
    same = {**lines, "box_mass": {**lines["box_mass"], "shared": None}}
    record(begin(logs / "null/seed_1", seed=1, randomization=same), [1])
    assert len(compared(str(logs)).rows) == 2


def test_lines_of_randomization_in_another_order_are_another_experiment(compared, trained, record, begin):
    lines = yaml.safe_load((CONFIGS / "randomization" / "franka_physics.yaml").read_text())
    logs = trained({0: [1]}, randomization=lines)
    record(begin(logs / "reversed/seed_1", seed=1, randomization=dict(reversed(lines.items()))), [1])
    assert len(compared(str(logs)).rows) == 2


def test_another_tools_name_of_the_metric(compared, refused, trained):
    """The first of the names that a run has, and a note that it is another."""
    logs = trained({0: [1, 2]})
    writer = SummaryWriter(logs / "franka_pick__clean__1__1700000000")
    for step in (1000, 2000):
        writer.add_scalar("charts/episodic_return", step / 100, step)
    writer.close()
    assert "charts/episodic_return" in refused("compare", str(logs))
    result = compared(str(logs), "metric=eval/return_mean,charts/episodic_return", "scale=log")
    assert len(result.rows) == 2
    assert "charts/episodic_return stands for eval/return_mean" in result.output


def test_the_same_seed_twice(refused, trained, record, begin):
    trained({0: [1]})
    record(begin(Path("logs/franka_pick/copy"), seed=0), [3])
    line = refused("compare", "logs")
    assert "seed 0 of dreamer_v3 is there twice, in logs/franka_pick/copy and logs/franka_pick/dreamer_v3" in line


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
    assert "expected runs, and this is a dry run" in refused("compare", "logs")
    trained({3: [1]})
    result = compared("logs")
    assert "- 1 dry run left out." in result.output
    assert "logs/dry_run/franka_pick" not in result.output
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


def test_runs_of_other_tools(compared, record):
    for seed in range(3):
        for tool, value in (("ppo", 5.0), ("sac", 1.0)):
            record(Path(f"others/{tool}/seed_{seed}"), [value, value + seed], tensorboard=True)
            Path(f"others/{tool}/seed_{seed}/metrics.jsonl").unlink()
    result = compared("others")
    rows = result.rows
    assert list(rows) == ["ppo (TensorBoard)", "sac (TensorBoard)"]
    assert rows["ppo (TensorBoard)"]["final eval/return_mean"].startswith("6 [5, 7]")
    assert result.output.startswith("others: eval/return_mean by policy steps")


def test_beside_runs_of_our_own(compared, trained, points):
    trained({seed: [1, 2, 3] for seed in range(3)})
    for seed in (1, 2, 3):
        with SummaryWriter(f"logs/franka_pick/PPO_{seed}") as writer:
            for step in (1000, 2000, 3000):
                writer.add_scalar(RETURN, seed, step, walltime=1.7e9 + step / 10)
    result = compared("logs/franka_pick", "x=time", "threshold=1", "out=here")
    assert "3 of 6 runs do not say their task; taken to be franka_pick." in result.output
    assert result.rows["PPO (TensorBoard)"]["seeds"] == "3"
    rows = [row for row in points("here/eval_return_mean_by_time.csv") if row["seed"] == "3"]
    assert [float(row["seconds"]) - float(rows[0]["seconds"]) for row in rows] == [0, 100, 200]


def test_names_of_cleanrl(compared, refused, trained):
    for seed in (1, 2):
        with SummaryWriter(f"runs/franka_pick__ppo_continuous__{seed}__170000000{seed}") as writer:
            writer.add_scalar(RETURN, 3.0, 1000)
    trained({0: [1, 2]})
    result = compared("logs", "runs")
    assert result.rows["ppo_continuous (TensorBoard)"]["seeds"] == "2"
    with SummaryWriter("runs/Ant-v4__ppo__1__1700000000") as writer:
        writer.add_scalar(RETURN, 3.0, 1000)
    assert "found Ant-v4 (runs/Ant-v4__ppo__1__1700000000) and franka_pick (logs" in refused("compare", "logs", "runs")


def test_what_is_not_finite_in_tensorboard(compared, points):
    with SummaryWriter("runs/sac") as writer:
        for step, value in ((1, 2.0), (2, math.nan), (3, 3.0)):
            writer.add_scalar(RETURN, value, step)
    result = compared("runs", "out=here")
    assert "runs/sac: values of eval/return_mean that are not finite, left out: 1." in result.output
    assert [row["value"] for row in points("here/eval_return_mean_by_steps.csv")] == ["2.0", "3.0"]


def test_scalars_that_are_tensors(compared):
    writer = EventFileWriter("runs/brax")
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    for step in (10, 20):
        tensor = make_tensor_proto(np.float32(step / 4))
        summary = Summary(value=[Summary.Value(tag=RETURN, tensor=tensor, metadata=metadata)])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
    writer.close()
    assert compared("runs").rows["brax (TensorBoard)"]["best"] == "5"


@pytest.mark.parametrize(
    ("directory", "name", "seed"),
    [
        ("ppo/seed_3", "ppo", "3"),
        ("ppo/3", "ppo", "3"),
        ("ppo/run-3", "ppo", "3"),
        ("ppo/version_3", "ppo", "3"),
        ("all/PPO_12", "PPO", "12"),
        ("all/ppo_seed3", "ppo", "3"),
        ("all/Ant-v4", "Ant-v4", "none"),
        ("all/ppo2", "ppo2", "none"),
        ("all/a_1_2", "a_1", "2"),
    ],
)
def test_what_a_directory_says(directory, name, seed):
    with SummaryWriter(directory) as writer:
        writer.add_scalar(RETURN, 3.0, 1000)
    run = read_run(Path(directory), {RETURN})
    assert (run.name, run.seed, run.env) == (f"{name} (TensorBoard)", seed, None)


def test_the_same_name_in_two_places_is_two_groups(compared):
    for place in ("mine", "theirs"):
        with SummaryWriter(f"{place}/ppo/seed_0") as writer:
            writer.add_scalar(RETURN, 3.0, 1000)
    labels = set(compared("mine", "theirs").rows)
    assert labels == {"ppo (TensorBoard), directory=mine", "ppo (TensorBoard), directory=theirs"}
