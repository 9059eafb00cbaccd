"""Runs of other tools: TensorBoard's event files, and directories that say which agent and seed it was."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from sheeplike.analysis.runs import read_run

RETURN = "eval/return_mean"


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_events_that_are_no_file_are_not_read(refused, kind):
    with SummaryWriter("runs/sac") as writer:
        writer.add_scalar("eval/return_mean", 1.0, 1000)
    (file,) = Path("runs/sac").iterdir()
    odd = file.with_name("events.out.tfevents.9")
    if kind == "link":
        odd.symlink_to(file.absolute())
    else:
        os.mkfifo(odd)
    assert str(odd) in refused("runs")


def huge() -> TensorProto:
    tensor = make_tensor_proto(np.float32(1))
    tensor.tensor_shape.dim.add(size=10**12)
    return tensor


@pytest.mark.parametrize("tensor", [make_tensor_proto(np.arange(3.0)), TensorProto(dtype=999), huge(), None])
def test_a_run_with_an_odd_record_is_left_out(compared, tensor):
    """Values of another shape than a scalar's, of no type, of a size that is claimed; and bytes that are no event."""
    for seed in (0, 1):
        with SummaryWriter(f"runs/ppo/seed_{seed}") as writer:
            writer.add_scalar(RETURN, 3.0, 1000)
            if seed and tensor is None:
                writer._get_file_writer().event_writer._async_writer.write(b"\xff\xff\xff")
            elif seed:
                summary = Summary()
                value = summary.value.add(tag=RETURN, tensor=tensor)
                value.metadata.plugin_data.plugin_name = "scalars"
                writer._get_file_writer().add_summary(summary, 1000)
    result = compared("runs")
    (row,) = result.rows.values()
    assert row["seeds"] == "1"
    assert any("seed_1" in line and "Left out" in line for line in result.output.splitlines())


def test_another_tools_name_of_the_metric(compared, trained):
    """The first of the names that a run has, and a note that it is another."""
    logs = trained({0: [1, 2]})
    writer = SummaryWriter(logs / "franka_pick__clean__1__1700000000")
    for step in (1000, 2000):
        writer.add_scalar("charts/episodic_return", step / 100, step)
    writer.close()
    result = compared(str(logs))
    assert len(result.rows) == 1
    assert "charts/episodic_return" in result.output, "the line on what is left out names it"
    result = compared(str(logs), "metric=eval/return_mean,charts/episodic_return", "scale=log")
    assert len(result.rows) == 2
    assert "charts/episodic_return" in result.output


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
    assert refused("logs", "runs").names("Ant-v4 (runs/Ant-v4__ppo__1__1700000000)", "franka_pick (logs")


def test_a_gymnasium_task_is_the_same_in_both(compared, begin, record):
    record(begin(Path("logs/ours"), env="minigrid", agent="ppo"), [1, 2])
    with SummaryWriter("runs/MiniGrid-Empty-5x5-v0__ppo__1__1700000000") as writer:
        writer.add_scalar(RETURN, 3.0, 1000)
    assert compared("logs", "runs").rows.keys() == {"ppo", "ppo (TensorBoard)"}


def test_what_is_not_finite_in_tensorboard(compared, points):
    with SummaryWriter("runs/sac") as writer:
        for step, value in ((1, 2.0), (2, math.nan), (3, 3.0)):
            writer.add_scalar(RETURN, value, step)
    result = compared("runs", "out=here")
    assert "eval/return_mean" in result.output
    assert [row["value"] for row in points("here/eval_return_mean_by_steps.csv")] == ["2.0", "3.0"]


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
