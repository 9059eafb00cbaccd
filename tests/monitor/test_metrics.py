"""Metrics stay on the device until they are read; means are those of the values that were added."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer

READS = ("item", "cpu", "numpy", "tolist", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__array__")


class NoSync(TorchDispatchMode):
    """Fails on operations that would wait for a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket._qualified_op_name
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal"), name
        return function(*args, **(kwargs or {}))


@pytest.fixture
def no_sync(monkeypatch):
    """A context in which reading a tensor on the host raises."""

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read on the host")

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with NoSync():
        yield
    monkeypatch.undo()


def tensors(**values):
    return {name: torch.tensor(value) for name, value in values.items()}


def step(episode_return, *, ended, length=5, success=False, nonfinite=False, reward=1.0, terms=None):
    """Arguments of ``EpisodeStatistics.add`` for two worlds; a pair is one value per world."""

    def pair(value, dtype):
        return torch.tensor(value if isinstance(value, tuple) else (value, value), dtype=dtype)

    info = {
        "episode": {
            "return": pair(episode_return, torch.float32),
            "length": pair(length, torch.int32),
            "success": pair(success, torch.bool),
            "reward_terms": {name: pair(value, torch.float32) for name, value in (terms or {}).items()},
        },
        "nonfinite": pair(nonfinite, torch.bool),
    }
    terminated = pair(ended, torch.bool)
    return pair(reward, torch.float32), terminated, torch.zeros_like(terminated), info


# MetricBuffer


def test_the_guard_itself_catches_a_read(no_sync):
    value = torch.tensor(1.0)
    with pytest.raises(AssertionError, match="host"):
        value.item()
    with pytest.raises(AssertionError, match="host"):
        bool(value > 0)
    with pytest.raises(AssertionError, match="_local_scalar_dense"):
        torch.ops.aten._local_scalar_dense(value)


def test_adding_metrics_reads_nothing(no_sync):
    buffer = MetricBuffer()
    for _ in range(3):
        buffer.add(tensors(a=1.0, b=math.nan))


def test_adding_metrics_works_where_there_is_nothing_to_read():
    buffer = MetricBuffer()
    for _ in range(2):
        buffer.add({"loss/dyn": torch.zeros((), device="meta")})


def test_means_over_calls_with_different_names_and_dtypes():
    buffer = MetricBuffer()
    buffer.add({"a": torch.tensor(1.0), "n": torch.tensor(3)})
    buffer.add({"a": torch.tensor(2.0, dtype=torch.bfloat16), "n": torch.tensor(5)})
    buffer.add({"a": torch.tensor(6.0)})
    assert buffer.take().read() == {"a": 3.0, "n": 4.0}
    assert buffer.take().read() == {}


def test_nan_is_left_out_of_sum_and_count():
    buffer = MetricBuffer()
    for value in (1.0, math.nan, 3.0):
        buffer.add(tensors(sometimes=value, never=math.nan))
    means = buffer.take().read()
    assert means["sometimes"] == 2.0
    assert math.isnan(means["never"])


def test_an_infinite_loss_shows():
    buffer = MetricBuffer()
    buffer.add(tensors(a=math.inf))
    assert buffer.take().read() == {"a": math.inf}


def test_values_are_copied_when_added():
    buffer, static = MetricBuffer(), torch.tensor(1.0)
    buffer.add({"a": static})
    static.fill_(100)
    buffer.add({"a": static})
    static.fill_(-1)
    assert buffer.take().read() == {"a": 50.5}


def test_a_value_may_require_grad():
    buffer = MetricBuffer()
    buffer.add({"a": torch.tensor(2.0, requires_grad=True) * 3})
    assert buffer.take().read() == {"a": 6.0}


def test_many_small_values_do_not_drown():
    buffer = MetricBuffer()
    buffer.add(tensors(a=1e8))
    for _ in range(1000):
        buffer.add(tensors(a=1.0))
    assert buffer.take().read()["a"] == pytest.approx((1e8 + 1000) / 1001, rel=1e-12)


def test_reading_copies_once(monkeypatch):
    buffer = MetricBuffer()
    buffer.add(tensors(a=1.0, b=2.0))
    buffer.add(tensors(c=3.0))
    real, copies = torch.Tensor.tolist, []
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: copies.append(t) or real(t))
    assert buffer.take().read() == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert len(copies) == 1


@pytest.mark.parametrize("value", [1.0, torch.zeros(2)])
def test_a_metric_that_is_no_scalar_tensor_is_refused(value):
    with pytest.raises(AssertionError, match="loss"):
        MetricBuffer().add({"loss": value})


def test_a_restored_buffer_continues():
    first, whole = MetricBuffer(), MetricBuffer()
    for value in (1.0, 2.0):
        first.add(tensors(a=value))
        whole.add(tensors(a=value))
    state = first.state_dict()
    first.add(tensors(a=99.0))  # must not reach the state
    second = MetricBuffer()
    second.load_state_dict(state)
    for buffer in (second, whole):
        buffer.add(tensors(a=9.0))
        buffer.add(tensors(b=1.0))
    assert second.take().read() == whole.take().read() == {"a": 4.0, "b": 1.0}


# EpisodeStatistics


def test_adding_steps_reads_nothing(no_sync):
    statistics = EpisodeStatistics(2, "cpu")
    for _ in range(3):
        statistics.add(*step((1.0, 2.0), ended=(True, False), terms={"reach": 0.5}))


def test_means_are_over_ended_episodes_only():
    statistics = EpisodeStatistics(2, "cpu")
    terms = {"reach": (0.5, 7.0), "lift": (0.25, 7.0)}
    statistics.add(*step((10.0, 99.0), length=(4, 77), success=(True, True), ended=(True, False), terms=terms))
    terms = {"reach": (7.0, 1.5), "lift": (7.0, 0.75)}
    statistics.add(*step((99.0, 20.0), length=(77, 8), success=(True, False), ended=(False, True), terms=terms))
    assert statistics.take().read() == {
        "rollout/episodes": 2.0,
        "health/nonfinite_worlds": 0.0,
        "rollout/reward_mean": 1.0,
        "rollout/return_mean": 15.0,
        "rollout/length_mean": 6.0,
        "rollout/success_rate": 0.5,
        "reward_terms/reach": 1.0,
        "reward_terms/lift": 0.5,
    }


def test_there_is_no_rate_of_a_success_that_nothing_defines():
    statistics = EpisodeStatistics(2, "cpu")
    *moved, info = step(1.0, ended=True)
    info["episode"]["success"] = torch.full((2,), torch.nan)
    statistics.add(*moved, info)
    assert {name for name in statistics.take().read() if name.startswith("rollout/")} == {
        f"rollout/{what}" for what in ("episodes", "reward_mean", "return_mean", "length_mean")
    }


def test_truncation_ends_an_episode_too():
    statistics = EpisodeStatistics(2, "cpu")
    reward, none, _, info = step((3.0, 5.0), ended=False)
    statistics.add(reward, none, torch.tensor([True, True]), info)
    assert statistics.take().read()["rollout/return_mean"] == 4.0


def test_an_episode_that_was_cut_does_not_count():
    statistics = EpisodeStatistics(2, "cpu")
    reward, none, ended, info = step((3.0, 5.0), ended=False)
    statistics.add(reward, none, ~ended, info | {"restarted": torch.tensor([False, True])})
    values = statistics.take().read()
    assert (values["rollout/episodes"], values["rollout/return_mean"]) == (1.0, 3.0)


def test_means_are_absent_when_no_episode_ended_and_start_anew_after_they_are_taken():
    statistics = EpisodeStatistics(2, "cpu")
    empty = {"rollout/episodes": 0.0, "health/nonfinite_worlds": 0.0}
    assert statistics.take().read() == empty
    statistics.add(*step(1.0, ended=False, reward=(1.0, 2.0)))
    assert statistics.take().read() == {**empty, "rollout/reward_mean": 1.5}
    statistics.add(*step(8.0, ended=True, terms={"reach": 2.0}))
    assert statistics.take().read()["reward_terms/reach"] == 2.0
    assert statistics.take().read() == empty


def test_a_nan_in_a_running_world_stays_out_of_the_means_and_is_counted():
    statistics = EpisodeStatistics(2, "cpu")
    statistics.add(*step((4.0, math.nan), ended=(True, False), nonfinite=(False, True)))
    values = statistics.take().read()
    assert values["rollout/return_mean"] == 4.0
    assert values["health/nonfinite_worlds"] == 1.0


def test_restored_statistics_continue():
    first = EpisodeStatistics(2, "cpu")
    first.add(*step(2.0, ended=True, terms={"reach": 1.0}))
    second = EpisodeStatistics(2, "cpu")
    second.load_state_dict(first.state_dict())
    for statistics in (first, second):
        statistics.add(*step(4.0, ended=True, terms={"reach": 2.0}))
    values = second.take().read()
    assert values == first.take().read()
    assert (values["rollout/return_mean"], values["reward_terms/reach"]) == (3.0, 1.5)


def test_wrong_worlds_and_changing_terms_are_refused():
    statistics = EpisodeStatistics(3, "cpu")
    with pytest.raises(AssertionError):
        statistics.add(*step(1.0, ended=True))
    statistics = EpisodeStatistics(2, "cpu")
    statistics.add(*step(1.0, ended=True, terms={"reach": 1.0}))
    with pytest.raises(AssertionError):
        statistics.add(*step(1.0, ended=True, terms={"lift": 1.0}))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_adding_does_not_synchronise():
    buffer, statistics = MetricBuffer(), EpisodeStatistics(2, "cuda")
    with torch.device("cuda"):
        arguments = step(1.0, ended=True, terms={"reach": 1.0})
    loss = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            buffer.add({"loss": loss})
            statistics.add(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert buffer.take().read() == {"loss": 1.0}
    assert statistics.take().read()["rollout/episodes"] == 4.0


# What has been taken, and not yet read


def test_taking_reads_nothing_and_what_is_added_later_is_not_in_it(monkeypatch):
    buffer, statistics = MetricBuffer(), EpisodeStatistics(2, "cpu")
    buffer.add(tensors(loss=1.0))
    statistics.add(*step((2.0, 4.0), ended=(True, True)))

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read on the host")

    with monkeypatch.context() as patch:
        for name in READS:
            patch.setattr(torch.Tensor, name, refuse)
        with NoSync():
            taken = [buffer.take(), statistics.take()]
            buffer.add(tensors(loss=7.0))
            statistics.add(*step((8.0, 8.0), ended=(True, False)))
    assert taken[0].read() == {"loss": 1.0}
    assert taken[1].read()["rollout/return_mean"] == 3.0
    assert buffer.take().read() == {"loss": 7.0}
    assert statistics.take().read()["rollout/episodes"] == 1.0
    assert buffer.take().read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_taking_from_a_gpu_does_not_wait_for_it():
    buffer = MetricBuffer()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    try:
        torch.cuda.set_sync_debug_mode("error")
        buffer.add({"loss": torch.ones((), device="cuda")})
        taken = buffer.take()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not taken._copied.query(), "the device is still busy"
    assert taken.read() == {"loss": 1.0}
