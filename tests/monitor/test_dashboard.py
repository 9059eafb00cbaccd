"""Charts and the table of runs, read back as TensorBoard reads them."""

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata, plugin_data_pb2

from sheeplike.monitor.logger import CATEGORIES, OUTCOMES, EventFile, RunLogger, layout

WORLD_MODEL = [
    "loss/pixels/front",
    "loss/dyn",
    "loss/policy",
    "loss/total",
    "wm/kl",
    "wm/psnr/front",
    "wm/prior_entropy",
]
DREAMER = [*WORLD_MODEL, "actor/entropy", "critic/value", "grad_norm/actor", "opt/learning_rate"]
PPO = [
    "loss/policy",
    "loss/value",
    "ppo/approx_kl",
    "actor/entropy",
    "critic/value",
    "grad_norm/total",
    "opt/learning_rate",
]
COLUMNS = {"seed": float, "env.name": str, "agent.size": str, "agent.clip": float}
VALUES = {"seed": 3.0, "env.name": "cartpole_balance", "agent.size": "1m"}


@pytest.fixture
def written(tmp_path: Path) -> EventAccumulator:
    run = RunLogger(tmp_path / "run", [EventFile])
    run.log({"rollout/return_mean": 5.0}, step=32, gradient_steps=0, seconds=1)
    run.each(lambda sink: sink.add_hyperparameters(COLUMNS, VALUES))
    run.each(lambda sink: sink.add_charts(DREAMER))
    run.log({"eval/return_mean": 7.0}, step=64, gradient_steps=4, seconds=2)
    run.close()
    (file,) = (tmp_path / "run").rglob("events.out.tfevents.*")  # none in a directory below
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == []
    return EventAccumulator(str(file)).Reload()


def test_the_charts_are_in_the_event_file_of_the_run(written):
    found = layout_pb2.Layout.FromString(written.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in found.category] == ["Compare", "World model", "Policy", "Health"]
    charts = {chart.title: chart for category in found.category for chart in category.chart}
    (band,) = charts["return in evaluation, 95 %"].margin.series
    assert (band.value, band.lower, band.upper) == ("eval/return_mean", "eval/return_lo", "eval/return_hi")
    assert list(charts["KL divergence"].multiline.tag) == ["wm/kl$", "loss/dyn$", "loss/rep$"]
    assert "PSNR of reconstructed images, dB (higher is better)" in charts
    assert "PPO" not in charts


def test_the_table_of_runs_is_in_the_event_file_of_the_run(written):
    content = written.PluginTagToContent(metadata.PLUGIN_NAME)
    assert content.keys() == {metadata.EXPERIMENT_TAG, metadata.SESSION_START_INFO_TAG, metadata.SESSION_END_INFO_TAG}
    read = plugin_data_pb2.HParamsPluginData.FromString
    values = read(content[metadata.SESSION_START_INFO_TAG]).session_start_info.hparams
    assert {name: value.number_value or value.string_value for name, value in values.items()} == VALUES
    experiment = read(content[metadata.EXPERIMENT_TAG]).experiment
    assert [metric.name.tag for metric in experiment.metric_infos] == list(OUTCOMES)
    # Every run declares all columns, also those of another agent: TensorBoard asks one run for those of all.
    assert [column.name for column in experiment.hparam_infos] == list(COLUMNS)
    # They are the run's own curves: nothing is written in their name.
    assert [(point.step, point.value) for point in written.Scalars("eval/return_mean")] == [(64, 7.0)]
    assert set(written.Tags()["scalars"]) == {"rollout/return_mean", "eval/return_mean"}


def test_charts_of_another_agent():
    charts = layout(PPO)
    assert list(charts) == ["Compare", "Policy", "Health"]
    assert list(charts["Policy"]) == ["losses", "entropy", "value", "PPO"]
    assert charts["Compare"] == layout(DREAMER)["Compare"]


@pytest.mark.parametrize("names", [DREAMER, PPO])
def test_no_chart_is_empty(names):
    always = ["rollout/return_mean", "time/env_sps", "health/nonfinite_worlds", "wm/open_loop_mse@5/front"]
    always += [
        f"eval/{what}" for what in ("return_mean", "return_lo", "return_hi", "success_rate", "success_lo", "success_hi")
    ]
    for charts in layout(names).values():
        for title, (_, tags) in charts.items():
            assert any(re.match(tag, name) for tag in tags for name in [*names, *always]), title


def test_every_expression_is_valid():
    for charts in CATEGORIES.values():
        for chart in charts.values():
            assert [re.compile(text) for text in (*chart.tags, chart.needs)]
            assert len(chart.tags) == 3 or not chart.margin


def test_without_tensorboard_nothing_happens(tmp_path):
    run = RunLogger(tmp_path)
    run.each(lambda sink: sink.add_hyperparameters(COLUMNS, VALUES))
    run.each(lambda sink: sink.add_charts(PPO))
    run.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
