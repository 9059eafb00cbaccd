"""Between two log points nothing reads a device tensor on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.loop import Every, LoopState, train

Forbid = Callable[[], AbstractContextManager[None]]
KINDS = {
    "camera and vector": {"cameras": ("front",)},
    "vector": {},
    "discrete": {"actions": spaces.Discrete(3)},
    "several discrete": {"actions": spaces.MultiDiscrete([2, 3], start=[0, -1])},
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "if": lambda x: 1 if x.any() else 0,
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "numpy": lambda x: x.numpy(),
    "np.asarray": lambda x: np.asarray(x),
    "tolist": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),
    "boolean mask": lambda x: x[x > 0],
    "assignment through a mask": lambda x: x.__setitem__(x > 0, torch.zeros(3)),
    "where with one argument": lambda x: torch.where(x > 0),
    "equal": lambda x: torch.equal(x, x + 1),
    "unique": lambda x: x.unique(),
    "list index": lambda x: [10, 20, 30][x.argmax()],
    "range": lambda x: range(x.argmax()),
}


@pytest.mark.parametrize("read", READS)
def test_the_detector_detects(read: str, no_host_reads: Forbid, host_read: type[Exception]) -> None:
    with pytest.raises(host_read), no_host_reads():
        READS[read](torch.tensor([3.0, 1.0, 2.0]))


def test_the_detector_lets_device_work_and_host_to_device_copies_pass(no_host_reads: Forbid) -> None:
    with no_host_reads():
        x = torch.tensor([3.0, 1.0], requires_grad=True)
        (x.square().sum() + F.one_hot(torch.tensor([1]), 2).sum() + torch.quantile(x, 0.5)).backward()
        torch.tensor([1, 2]).to(torch.device("cpu"), non_blocking=True)
        x.float().to(torch.float64)
    assert x.grad.tolist() == [6.5, 2.5]


def test_the_detector_sees_into_the_backward_pass(no_host_reads: Forbid, host_read: type[Exception]) -> None:
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (2 if gradient.sum() > 0 else 1)

    x = torch.ones(2, requires_grad=True)
    with pytest.raises(host_read), no_host_reads():
        Reads.apply(x).sum().backward()


def test_the_detector_is_gone_afterwards(no_host_reads: Forbid) -> None:
    with no_host_reads():
        pass
    assert torch.tensor([2.0]).item() == 2.0
    assert torch.tensor([2.0]).nonzero().tolist() == [[0]]


@pytest.mark.parametrize("kind", KINDS)
def test_acting_adding_counting_and_updating_read_nothing(
    kind: str, make_agent: Callable[..., DreamerV3], play: Callable[..., Any], no_host_reads: Forbid
) -> None:
    """On a first update, which serves fresh sequences, on later ones, and after the ring has wrapped."""
    agent = make_agent(replay_size=3 * 20, **KINDS[kind])
    player = agent.player(3)
    steps = play(agent, 15, player=player)
    for round_ in range(3):
        with no_host_reads():
            for step in steps[:9]:
                step.action = player.act(step.obs, step.is_first)
                step.extras = player.extras
                agent.add(step)
            agent.updates_due(45 + 27 * (round_ + 1))
            agent.update()
            agent.update()
            agent.counters(100, 2)
        assert agent.replay.added > 20


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_has_static_shapes(kind: str, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]) -> None:
    """The same operators on the same shapes for any data, as a captured graph needs."""
    agent = make_agent(**KINDS[kind])

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            flat = [x for a in args for x in (a if isinstance(a, list | tuple) else (a,))]
            shapes = tuple(tuple(x.shape) for x in flat if isinstance(x, Tensor))
            self.calls.append((func.name(), shapes))
            return func(*args, **(kwargs or {}))

    recorded = []
    for round_, ends in enumerate(((), {(3, 0), (5, 1), (6, 2)}, {(9, 2)})):
        play(agent, 15, last=ends, terminal=ends, seed=round_)
        agent.replay.fresh.clear()  # the few host integers of fresh sequences are copied to the device outside a graph
        agent.update()
        agent.replay.fresh.clear()
        with Recorder() as recorder:
            agent.update()
        recorded.append(recorder.calls)
    assert len(recorded[0]) > 500
    assert recorded[0] == recorded[1] == recorded[2]


@pytest.mark.parametrize("kind", ["camera and vector", "several discrete"])
def test_the_loop_reads_nothing_between_hooks(
    kind: str,
    make_agent: Callable[..., DreamerV3],
    drifting_worlds: Callable[..., VectorEnv],
    collector: Any,
    no_host_reads: Forbid,
    all_finite: Callable[..., bool],
) -> None:
    agent = make_agent(replay_ratio=0.2, learning_starts=30, **KINDS[kind])
    envs = drifting_worlds(agent)
    state = LoopState.begin(agent, envs, seed=0)
    logged = []

    # A hook reads, as a log point does: the detector is lifted around it, by running the loop from hook to hook.
    log = Every(15, lambda state: logged.append(state.policy_steps))
    for stop in range(15, 91, 15):
        with no_host_reads():
            train(agent, envs, state, total_steps=stop, observer=collector, hooks=[log])
        assert all(map(all_finite, collector.metrics))
    assert logged == [15, 30, 45, 60, 75, 90]
    assert state.gradient_steps == len(collector.metrics) == 12


def test_the_loop_test_would_catch_an_agent_that_reads(
    make_agent: Callable[..., DreamerV3],
    drifting_worlds: Callable[..., VectorEnv],
    collector: Any,
    no_host_reads: Forbid,
    host_read: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = make_agent(replay_ratio=0.5)
    envs = drifting_worlds(agent)
    state = LoopState.begin(agent, envs, seed=0)
    update = agent.update
    monkeypatch.setattr(agent, "update", lambda: {name: value.item() for name, value in update().items()})
    with pytest.raises(host_read), no_host_reads():
        train(agent, envs, state, total_steps=60, observer=collector)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_loop_does_not_synchronise_a_gpu(
    make_agent: Callable[..., DreamerV3], drifting_worlds: Callable[..., VectorEnv], collector: Any
) -> None:
    agent = make_agent(cameras=("front",), device="cuda", replay_ratio=0.5)
    envs = drifting_worlds(agent)
    state = LoopState.begin(agent, envs, seed=0)
    train(agent, envs, state, total_steps=60, observer=collector)
    assert state.gradient_steps > 0
    try:
        torch.cuda.set_sync_debug_mode("error")
        train(agent, envs, state, total_steps=90, observer=collector)
        agent.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")
