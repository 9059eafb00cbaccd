"""Real worlds and a real agent in the loop: what each holds of the other's memory, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
import warp

import sheeplike.envs
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.envs.mjx.vector_env import MjxVectorEnv
from sheeplike.loop import LoopState, train

WORLDS = 3
SETTLED = 10  # iterations after which buffers have found their places
MEASURED = 15
UPDATES = 1 / WORLDS  # per policy step: one in every iteration


def make_worlds(device: str) -> MjxVectorEnv:
    return sheeplike.envs.make("cartpole_balance", num_envs=WORLDS, image_size=48, episode_length=9, device=device)


@pytest.fixture(scope="module")
def worlds() -> MjxVectorEnv:
    return make_worlds("cpu")


def begin(
    make_agent: Callable[..., DreamerV3], collector: Any, envs: MjxVectorEnv, **options: Any
) -> tuple[DreamerV3, LoopState]:
    """An agent that has begun to learn, after ``SETTLED`` iterations in these worlds."""
    agent = make_agent(
        cameras=("fixed",), vectors={}, actions=1, num_envs=WORLDS, replay_ratio=UPDATES, device=envs.device, **options
    )
    state = LoopState.begin(agent, envs, seed=0)
    go_on(agent, envs, state, collector, SETTLED)
    assert state.gradient_steps > 0
    return agent, state


def go_on(agent: DreamerV3, envs: MjxVectorEnv, state: LoopState, collector: Any, iterations: int) -> None:
    train(agent, envs, state, total_steps=state.policy_steps + iterations * WORLDS, observer=collector)


@contextmanager
def count_captures() -> Iterator[SimpleNamespace]:
    """Counts the CUDA graphs that Warp captures in this process; not those that JAX has begun, for its own.

    Warp captures anew for buffers at other addresses, which costs more than the launches did, and it is XLA that
    chooses the addresses. Wait for the device before leaving: a capture is counted when the call is made, not when it
    is dispatched.
    """
    captures, begin = SimpleNamespace(count=0), warp.capture_begin

    def counted(*args: Any, external: bool = False, **options: Any) -> Any:
        captures.count += not external
        return begin(*args, external=external, **options)

    warp.capture_begin = counted  # through which every capture goes, looked up at each call
    try:
        yield captures
    finally:
        warp.capture_begin = begin


def test_every_capture_is_counted_and_no_replay() -> None:
    values = warp.zeros(4, dtype=float, device="cpu")
    with count_captures() as captures:
        with warp.ScopedCapture(device="cpu") as capture:
            values.fill_(2.0)
        values.zero_()
        warp.capture_launch(capture.graph)
    assert captures.count == 1
    assert (values.numpy() == 2).all(), "a capture that is counted is a capture all the same"


def addresses(envs: MjxVectorEnv) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(envs._state) if leaf.size]


def test_the_state_stays_where_it_is_while_the_agent_holds_what_it_delivers(
    make_agent: Callable[..., DreamerV3], worlds: MjxVectorEnv, collector: Any, no_host_reads: Callable[[], Any]
) -> None:
    """Over several episodes, updates and a ring that wraps, with every step kept alive by the observer."""
    agent, state = begin(make_agent, collector, worlds, replay_size=WORLDS * 20)
    before, learned = addresses(worlds), state.gradient_steps
    assert len(set(before)) == len(before)
    for _ in range(MEASURED):
        with no_host_reads():
            go_on(agent, worlds, state, collector, 1)
        assert addresses(worlds) == before
        delivered = [*state.step.obs.values(), state.step.reward]
        assert set(before).isdisjoint(tensor.data_ptr() for tensor in delivered)
    assert agent.replay.added > agent.replay.length
    assert state.gradient_steps - learned == MEASURED
    assert worlds.simulator.compilations == 1


def test_an_agent_that_holds_the_state_itself_would_be_noticed(
    make_agent: Callable[..., DreamerV3], worlds: MjxVectorEnv, collector: Any
) -> None:
    """A tensor that views a part of the state moves that part: the test above can fail."""
    agent, state = begin(make_agent, collector, worlds)
    before = addresses(worlds)
    held = torch.from_dlpack(worlds._state.data.qpos)
    go_on(agent, worlds, state, collector, 1)
    assert addresses(worlds) != before
    assert held.isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_warp_captures_no_graph_once_the_loop_has_settled(make_agent: Callable[..., DreamerV3], collector: Any) -> None:
    envs = make_worlds("cuda")
    agent, state = begin(make_agent, collector, envs)
    forgetful = SimpleNamespace(stepped=lambda step, info: None, learned=lambda metrics: None)
    go_on(agent, envs, state, forgetful, 100)
    before = addresses(envs)
    with count_captures() as captures:
        go_on(agent, envs, state, forgetful, 200)
        state.step.reward.sum().item()
    assert captures.count == 0
    assert addresses(envs) == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_loop_does_not_wait_for_the_worlds(make_agent: Callable[..., DreamerV3], collector: Any) -> None:
    envs = make_worlds("cuda")
    agent, state = begin(make_agent, collector, envs)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        go_on(agent, envs, state, collector, MEASURED)
    finally:
        torch.cuda.set_sync_debug_mode("default")
