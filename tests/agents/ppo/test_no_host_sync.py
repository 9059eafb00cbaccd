"""Between two log points nothing reads a device tensor on the host. The detector is tested beside DreamerV3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO
from sheeplike.loop import LoopState, train

Forbid = Callable[[], AbstractContextManager[None]]
KINDS = {
    "stacked camera and vector, augmented": {
        "cameras": ("front",),
        "frame_stack": 3,
        "augment": True,
        "kl_control": "early_stop",
    },
    "vector, clipped normal": {"distribution": "clipped_normal", "value_clip": 0.2, "kl_control": "adaptive_lr"},
    "discrete, shared": {"actions": spaces.Discrete(3), "shared_trunk": True},
    "several discrete": {"actions": spaces.MultiDiscrete([2, 3], start=[0, -1])},
}


@pytest.mark.parametrize("kind", KINDS)
def test_acting_adding_counting_and_updating_read_nothing(
    kind: str, make_ppo: Callable[..., PPO], play: Callable[..., list[Step]], no_host_reads: Forbid
) -> None:
    """Over three rollouts, so that every branch of an update is taken."""
    agent = make_ppo(**KINDS[kind])
    steps = play(make_ppo(**KINDS[kind]), 9, last={(3, 0)}, terminal={(6, 1)})
    player = agent.player(3)
    updates = 0
    with no_host_reads():
        for t in range(25):
            step = steps[t % 9]
            step.action = player.act(step.obs, step.is_first)
            step.extras = player.extras
            agent.add(step)
            for _ in range(agent.updates_due(3 * t)):
                agent.update()
                updates += 1
        agent.counters(75, updates)
    assert updates == 24


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_has_static_shapes(kind: str, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> None:
    """The same operators on the same shapes for any data, as a captured graph needs."""
    agent = make_ppo(**KINDS[kind])

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            flat = [x for a in args for x in (a if isinstance(a, list | tuple) else (a,))]
            self.calls.append((func.name(), tuple(tuple(x.shape) for x in flat if isinstance(x, Tensor))))
            return func(*args, **(kwargs or {}))

    recorded, player, steps = [], agent.player(3), None
    for round_, ends in enumerate(((), {(3, 0), (5, 1), (6, 2)}, {(t, n) for t in range(0, 8, 2) for n in range(3)})):
        steps = fill(agent, last=ends, terminal=ends, seed=round_, player=player, after=steps)
        agent.update()
        with Recorder() as recorder:
            agent.update()
        recorded.append(recorder.calls)
        for _ in range(6):
            agent.update()
    assert len(recorded[0]) > 100
    assert recorded[0] == recorded[1] == recorded[2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_reads_nothing(
    kind: str,
    make_ppo: Callable[..., PPO],
    drifting_worlds: Callable[..., VectorEnv],
    collector: Any,
    no_host_reads: Forbid,
) -> None:
    agent = make_ppo(**KINDS[kind])
    envs = drifting_worlds(agent)
    state = LoopState.begin(agent, envs, seed=0)
    with no_host_reads():
        train(agent, envs, state, total_steps=3 * 17, observer=collector)
    assert state.gradient_steps == len(collector.metrics) == 16
    assert all(bool(value.isfinite()) for metrics in collector.metrics for value in metrics.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_does_not_synchronise_a_gpu(
    kind: str, make_ppo: Callable[..., PPO], drifting_worlds: Callable[..., VectorEnv], collector: Any
) -> None:
    agent = make_ppo(**KINDS[kind], device="cuda")
    envs = drifting_worlds(agent)
    state = LoopState.begin(agent, envs, seed=0)
    train(agent, envs, state, total_steps=3 * 9, observer=collector)
    try:
        torch.cuda.set_sync_debug_mode("error")
        train(agent, envs, state, total_steps=3 * 17, observer=collector)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert state.gradient_steps == 16
