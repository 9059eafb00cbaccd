"""Small agents, experience to feed them, and a detector of reads of device tensors on the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sheeplike.agents.agent import Agent, Player, Step
from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config, Size
from sheeplike.agents.ppo import PPO, PPOConfig
from sheeplike.nn.distributions import OneHotCategorical

IMAGE = 48
TINY = Size(deter=64, hidden=16, classes=4, depth=2, units=16)
RUN = {"num_envs", "device", "compile", "autocast", "seed"}  # arguments of an agent's constructor; the rest is options


def observation_space(cameras: Collection[str] | dict[str, tuple[int, ...]], vectors: dict[str, int]) -> spaces.Dict:
    """Cameras by name, or name to shape; vectors, name to width."""
    shapes = cameras if isinstance(cameras, dict) else dict.fromkeys(cameras, (IMAGE, IMAGE, 3))
    return spaces.Dict(
        {f"pixels/{name}": spaces.Box(0, 255, shape, np.uint8) for name, shape in shapes.items()}
        | {name: spaces.Box(-np.inf, np.inf, (width,), np.float32) for name, width in vectors.items()}
    )


@pytest.fixture(scope="session")
def all_finite() -> Callable[[dict[str, Tensor]], bool]:
    """Whether an update's metrics are finite, where they are defined: there may be no reward of some sign."""

    def check(metrics: dict[str, Tensor]) -> bool:
        return all(bool(value.isfinite()) for name, value in metrics.items() if "/reward_log_likelihood/" not in name)

    return check


@pytest.fixture(scope="session")
def make_space() -> Callable[..., spaces.Dict]:
    """Builds an observation space: :func:`observation_space`."""
    return observation_space


@pytest.fixture(scope="session")
def make_agent() -> Callable[..., DreamerV3]:
    """Builds an agent of a few thousand parameters; keywords override."""

    def make(
        *,
        cameras: Collection[str] = (),
        vectors: dict[str, int] | None = None,
        actions: gymnasium.spaces.Space | int = 2,
        **options: Any,
    ) -> DreamerV3:
        space = observation_space(cameras, {"state": 5} if vectors is None else vectors)
        actions = spaces.Box(-1, 1, (actions,), np.float32) if isinstance(actions, int) else actions
        run = {"num_envs": 3} | {name: options.pop(name) for name in RUN & options.keys()}
        defaults = {"size": TINY, "observations": ("*",), "batch_size": 4, "batch_length": 6, "learning_starts": 0}
        defaults |= {"replay_size": 3 * 60, "imagination_length": 3, "warmup": 0}
        return DreamerV3(space, actions, DreamerV3Config(**(defaults | options)), **run)

    return make


@pytest.fixture(scope="session")
def play() -> Callable[..., list[Step]]:
    """Lets an agent act on random observations and store the steps; returns them.

    ``last`` and ``terminal`` hold (step, world) pairs; the step after an ending begins an episode. ``begin`` ``(N,)``
    says where the first step does, to go on from an earlier call; None: everywhere.
    """

    def run(
        agent: Agent,
        steps: int,
        *,
        last: Collection[tuple[int, int]] = (),
        terminal: Collection[tuple[int, int]] = (),
        seed: int = 0,
        player: Player | None = None,
        begin: Tensor | None = None,
    ) -> list[Step]:
        generator = torch.Generator().manual_seed(seed)
        worlds = range(agent.num_envs)
        player = player or agent.player(agent.num_envs)
        ended = torch.ones(agent.num_envs, dtype=torch.bool, device=agent.device) if begin is None else begin
        played = []
        for t in range(steps):
            obs = {}
            for key, space in getattr(agent, "stored", agent.keys).spaces.items():
                shape = (agent.num_envs, *space.shape)
                image = space.dtype == np.uint8
                obs[key] = (
                    torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
                    if image
                    else torch.randn(shape, generator=generator)
                )
            device = agent.device
            obs = {key: value.to(device) for key, value in obs.items()}
            is_terminal = torch.tensor([(t, n) in terminal for n in worlds], device=device)
            is_last = torch.tensor([(t, n) in last for n in worlds], device=device) | is_terminal
            reward = torch.randn(agent.num_envs, generator=generator).round().to(device) * ~ended  # of all signs
            action = player.act(obs, ended)
            step = Step(obs, action, reward, ended, is_last, is_terminal, dict(player.extras))
            agent.add(step)
            played.append(step)
            ended = is_last
        return played

    return run


@pytest.fixture(scope="session")
def make_ppo(make_space: Callable[..., spaces.Dict]) -> Callable[..., PPO]:
    """Builds an agent of a few thousand parameters that sees everything; keywords override."""

    def make(
        *,
        cameras: Collection[str] = (),
        vectors: dict[str, int] | None = None,
        actions: gymnasium.spaces.Space | int = 2,
        **options: Any,
    ) -> PPO:
        space = make_space(cameras, {"state": 5} if vectors is None else vectors)
        actions = spaces.Box(-1, 1, (actions,), np.float32) if isinstance(actions, int) else actions
        run = {"num_envs": 3} | {name: options.pop(name) for name in RUN & options.keys()}
        defaults = {"observations": ("*",), "rollout_length": 8, "minibatches": 4, "epochs": 2}
        defaults |= {"policy_layers": (16,), "value_layers": (16,)}
        return PPO(space, actions, PPOConfig(**(defaults | options)), **run)

    return make


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


class Drift(VectorEnv):
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


@pytest.fixture
def randomised() -> Callable[[torch.nn.Module], None]:
    """Gives every parameter noise, so that zero-initialised outputs pass gradients and biases count."""

    def randomise(module: torch.nn.Module, spread: float = 0.1, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(spread * torch.randn(p.shape, generator=generator))

    return randomise


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
    """What it raises."""
    return HostRead
