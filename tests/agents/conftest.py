"""Experience to feed small agents, and a detector of reads of device tensors on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sheeplike.agents.agent import Agent, Player, Step
from sheeplike.agents.ppo import PPO
from sheeplike.envs.contract import OptionalMembers
from sheeplike.nn.distributions import OneHotCategorical


@pytest.fixture(scope="session")
def all_finite() -> Callable[[dict[str, Tensor]], bool]:
    def check(metrics: dict[str, Tensor]) -> bool:
        return all(bool(value.isfinite()) for name, value in metrics.items() if "/reward_log_likelihood/" not in name)

    return check


@pytest.fixture(scope="session")
def fill(play: Callable[..., list[Step]]) -> Callable[..., list[Step]]:
    """Plays until the agent's rollout is complete; returns the steps.

    ``after`` are the steps of the last call, to go on from; times in ``last`` and ``terminal`` count from this call.
    """

    def run(
        agent: PPO,
        *,
        last: Collection[tuple[int, int]] = (),
        terminal: Collection[tuple[int, int]] = (),
        seed: int = 0,
        player: Player | None = None,
        after: list[Step] | None = None,
    ) -> list[Step]:
        begin: Tensor | None = after[-1].is_last if after else None
        missing = agent.rollout.length + 1 - agent.rollout.steps
        return play(agent, missing, last=last, terminal=terminal, seed=seed, player=player, begin=begin)

    return run


class Drift(OptionalMembers, VectorEnv):
    """Worlds whose state drifts by the action; all on the device, next-step reset, episodes of different length."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, agent: Agent) -> None:
        self.num_envs, self.device = agent.num_envs, agent.device
        self.spaces = agent.keys.spaces
        self.limit = 4 + torch.arange(self.num_envs, device=self.device)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        self.time = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.over = self.time > 0
        return self.observe(self.time.float()), {}

    def observe(self, push: Tensor) -> dict[str, Tensor]:
        obs = {}
        for key, space in self.spaces.items():
            base = (self.time + push).view(-1, *[1] * len(space.shape)).expand(-1, *space.shape)
            obs[key] = (base * 9).to(torch.uint8) if space.dtype == np.uint8 else torch.sin(base.float())
        return obs

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        push = action.float() if action.ndim == 1 else action.float().clamp(-1, 1).mean(-1)
        self.time = torch.where(self.over, 0, self.time + 1)
        reward = torch.where(self.over, 0.0, push)
        ended = self.time >= self.limit
        terminated = ended & (self.time % 2 == 0)
        self.over = ended
        return self.observe(push), reward, terminated, ended & ~terminated, {}


class Collector:
    """Keeps what the loop reports, unread."""

    def __init__(self) -> None:
        self.steps, self.metrics = [], []

    def stepped(self, step: Any, info: dict[str, Any]) -> None:
        self.steps.append(step)

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.metrics.append(metrics)


@pytest.fixture
def drifting_worlds() -> type[Drift]:
    """Worlds for an agent: :class:`Drift`."""
    return Drift


@pytest.fixture
def collector() -> Collector:
    """An observer of the loop: :class:`Collector`."""
    return Collector()


@pytest.fixture
def argmax_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes categorical samples deterministic: the most probable class."""
    monkeypatch.setattr(OneHotCategorical, "sample_index", lambda self: self.probs.argmax(-1))


# --- reads of device tensors on the host -----------------------------------------------------------------------------


class HostRead(AssertionError):
    """The host waited for a tensor's value."""


# Operators whose result, or the shape of whose result, the host must read from the device.
READING_OPERATORS = {
    "_local_scalar_dense",
    "_unique2",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
INDEXING_OPERATORS = {"index", "index_put", "index_put_"}
READING_METHODS = ("item", "cpu", "numpy", "tolist", "__array__", "__bool__", "__float__", "__int__", "__index__")
READING_METHODS += ("nonzero", "__contains__")
# On a CPU alone, these check the values of their arguments; on an accelerator they leave that to device assertions
# (ATen: Onehot.cpp, Sorting.cpp), so what they read here is not a read there.
CHECKED_ON_CPU = ((F, "one_hot"), (torch, "quantile"))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        # An index that is a mask is turned into positions, and their number is read.
        masked = name in INDEXING_OPERATORS and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masked or name in READING_OPERATORS:
            raise HostRead(f"operator {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads_forbidden() -> Iterator[None]:
    """Raises :class:`HostRead` where the host reads a tensor's value or a shape that depends on values."""

    def refuse(name: str) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            raise HostRead(f"Tensor.{name}")

        return method

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A non-blocking copy from the host to the device is the one direction allowed; torch's own calls move nothing.
        inside_torch = "/torch/" in sys._getframe(1).f_code.co_filename
        to_device = any(isinstance(a, str | torch.device) for a in (*args, *kwargs.values()))
        if to_device and not kwargs.get("non_blocking") and not inside_torch:
            raise HostRead("Tensor.to(device), blocking")
        return original_to(self, *args, **kwargs)

    def unchecked(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    original_to = torch.Tensor.to
    with pytest.MonkeyPatch.context() as patch:
        for name in READING_METHODS:
            patch.setattr(torch.Tensor, name, refuse(name))
        patch.setattr(torch.Tensor, "to", moved)
        for module, name in CHECKED_ON_CPU:
            patch.setattr(module, name, unchecked(getattr(module, name)))
        with _Operators():
            yield


@pytest.fixture
def no_host_reads() -> Callable[[], Any]:
    """The context manager :func:`host_reads_forbidden`."""
    return host_reads_forbidden


@pytest.fixture
def host_read() -> type[HostRead]:
    return HostRead
