"""Interface between the interaction loop and an agent.

Time alignment of a :class:`Step` (``T`` is the last step of an episode)::

    step t        0     1     2    ...   T        T+1 (next episode)
    obs           o0    o1    o2         oT       o0'
    action        a0    a1    a2         ignored  a0'      chosen after seeing obs[t]
    reward        0     r1    r2         rT       0        for arriving at obs[t]
    is_first      1     0     0          0        1
    is_last       0     0     0          1        0        terminated or truncated
    is_terminal   0     0     0          1 or 0   0        terminated only
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from gymnasium import spaces
from torch import Tensor, nn


@dataclass
class Step:
    """One time step of all ``N`` worlds, on the agent's device.

    Attributes:
        obs: key to ``(N, ...)``; ``pixels/<camera>`` uint8 and ``depth/<camera>`` float32, NHWC; vectors float32.
        action: as the environment takes it, chosen after ``obs``; until then the previous one.
        reward: ``(N,)`` float32, for arriving at ``obs``.
        is_first, is_last, is_terminal: ``(N,)`` bool.
        extras: outputs of the networks that are stored with the step (latents, log-probabilities, values).
    """

    obs: dict[str, Tensor]
    action: Tensor
    reward: Tensor
    is_first: Tensor
    is_last: Tensor
    is_terminal: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    def following(
        self, action: Tensor, obs: dict[str, Tensor], reward: Tensor, terminated: Tensor, truncated: Tensor
    ) -> Step:
        """Return the next step: the environments' answer to ``action`` taken in this one."""
        return Step(obs, action, reward, self.is_last, terminated | truncated, terminated)


class Prediction(NamedTuple):
    """Truth and open-loop prediction of a camera, ``(T, B, H, W, C)`` uint8, after ``context`` observed steps."""

    truth: Tensor
    model: Tensor
    context: int


class Dream(NamedTuple):
    """Imagined future of one camera under the agent's own policy.

    Attributes:
        seen: ``(C, B, H, W, C)`` uint8, what happened last.
        model: ``(I, B, H, W, C)`` uint8, what is imagined after that.
        traces: name to ``(I, B)`` float32, such as the expected reward.
    """

    seen: Tensor
    model: Tensor
    traces: dict[str, Tensor]


class Player(Protocol):
    """Actor in ``N`` worlds with its own state; ``extras`` go into the :class:`Step`."""

    extras: dict[str, Tensor]

    def act(self, obs: dict[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        """Return actions, ``(N, A)`` float32, ``(N,)`` or ``(N, K)`` int64; ``sample=False``: the mode."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Agent(Protocol):
    """A learner.

    A class that derives from this one must write ``add``, ``updates_due``, ``update``, ``state_dict`` and
    ``load_state_dict``; the others have defaults. Only ``report``, ``dream``, ``warm_up`` and ``last_batch`` may wait
    for the device.

    Attributes:
        networks_class: builds ``networks``; a trained agent needs nothing else to act. Called as
            ``networks_class(observation_space, action_space, config, *, device, autocast, seed)``.
        shared_state: entries of ``state_dict`` that are the same on all ranks, and stored once.
        world_state: entries of ``state_dict`` that are tensors ``(N, ...)``, and are dealt with the worlds.
        networks: a :class:`~sheeplike.agents.policy.PolicyNetworks`.
        skipped_in_a_row, skipped_total: 0-dim int64 device tensors, updated in place: updates skipped since the last
            finite one, and ever; saved by ``state_dict``.
        observed: names of the observations that an agent with a replay stores.
        generator: draws minibatches; acting and sampled latents draw from torch's own generator.
    """

    networks_class: ClassVar[Callable[..., nn.Module]]
    shared_state: ClassVar[tuple[str, ...]] = ("modules", "optimizer", "probes")
    world_state: ClassVar[tuple[str, ...]] = ()
    networks: nn.Module
    skipped_in_a_row: Tensor
    skipped_total: Tensor
    generator: torch.Generator
    observed: Collection[str]

    def player(self, num_envs: int, *, explore: bool = False) -> Player:
        """Return a fresh player; training and evaluation never share one.

        Args:
            explore: for training; an agent may collect with another policy than the one that is evaluated.
        """
        return self.networks.player(num_envs)

    def add(self, step: Step) -> None:
        """Store one step of all training worlds."""

    def add_recorded(self, steps: Iterable[Step], num_envs: int, length: int, share: float | None) -> None:
        """Store recorded steps, whose ``extras`` are empty, for learning.

        Args:
            num_envs: worlds of each step; those of training with ``share=None``.
            length: number of the steps.
            share: part of every batch that is to come from these steps; None: they are the oldest of the memory.
        """
        raise NotImplementedError

    def hold_out(self, steps: Iterable[Step], num_envs: int, length: int) -> None:
        """Store recorded steps for :meth:`validate`."""

    def validate(self) -> dict[str, Tensor]:
        """Return metrics on the steps of :meth:`hold_out`, 0-dim device tensors."""
        return {}

    def begin_with(self, state: dict[str, Any]) -> None:
        """Take networks and memory from :meth:`state_dict` of another run; the steps of :attr:`history` may follow."""
        raise NotImplementedError

    def updates_due(self, policy_steps: int) -> int:
        """Return the number of updates due after ``policy_steps`` policy steps in all."""

    def update(self) -> dict[str, Tensor]:
        """Make one gradient update; return metrics, 0-dim device tensors.

        An update with a non-finite loss or gradient norm is skipped: only counters and random generators change. Its
        ``health/skipped_update`` is 1, and its ``health/nonfinite_loss`` too if the loss was non-finite.
        """

    def last_batch(self) -> dict[str, Tensor]:
        """Return the batch of the last update, which is saved when updates stay non-finite."""
        return {}

    def describe(self) -> dict[str, str]:
        """Return lines for the banner of a run, name to text: observations, size, schedule of learning."""
        networks = self.networks
        count = sum(p.numel() for p in networks.parameters())
        return {
            "sees": describe_sight(networks.space, networks.observations),
            "agent": f"{networks.config.name}: {count:,} parameters",
        }

    def report(self) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
        """Return metrics too expensive for every update, and predictions by camera; both may be empty."""
        return {}, {}

    def dream(self) -> dict[str, Dream]:
        """Return imagined futures by camera."""
        return {}

    def counters(self, policy_steps: int, gradient_steps: int) -> dict[str, float]:
        """Return metrics known to the host without asking the device."""
        return {}

    def warm_up(self) -> None:
        """Compile the update on what is in memory, changing nothing."""

    @property
    def history(self) -> Any:
        """A replay so large that checkpoints only append to it; None: memory is in ``state_dict``."""
        return None

    def state_dict(self, *, replay: bool = True, history: bool = True) -> dict[str, Any]:
        """Return everything that a resumed run needs.

        Args:
            replay: include the memory.
            history: include the steps of :attr:`history`. The agent may change the returned tensors later.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict` in a new agent; the steps of :attr:`history` may follow."""


class Ratio:
    """Counter of gradient steps due, at ``ratio`` per policy step after ``start``.

    The fraction left over is carried, so the ratio is exact in the long run. A ratio that a resume changes holds from
    then on, without a burst of updates.
    """

    def __init__(self, ratio: float, start: int = 0) -> None:
        assert ratio > 0, ratio
        self.ratio, self.start = ratio, start
        self.counted = start
        self.carry = 0.0

    def __call__(self, policy_steps: int) -> int:
        if policy_steps <= self.counted:
            return 0
        self.carry += (policy_steps - self.counted) * self.ratio
        self.counted = policy_steps
        due = int(self.carry)
        self.carry -= due
        return due

    def skip(self, policy_steps: int) -> None:
        """Owe no gradient steps for the policy steps up to ``policy_steps``."""
        self.counted = max(self.counted, policy_steps)

    def state_dict(self) -> dict[str, float]:
        return {"counted": self.counted, "carry": self.carry}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.counted, self.carry = max(int(state["counted"]), self.start), float(state["carry"])
        if not 0 <= self.carry < 1:
            raise ValueError(f"the ratio carries {self.carry}: expected less than one gradient step")


def describe_observations(space: spaces.Dict, keys: Iterable[str]) -> str:
    """Return names and shapes as text."""
    return ", ".join(f"{key} {'x'.join(map(str, space[key].shape))}" for key in keys)


def describe_sight(space: spaces.Dict, keys: Collection[str]) -> str:
    """Return the observations among ``keys``, and the names of all others, as text."""
    unseen = ", ".join(sorted(space.spaces.keys() - set(keys)))
    return describe_observations(space, keys) + (f" (not seen: {unseen})" if unseen else "")


@contextmanager
def own_randomness(device: torch.device | str, seed: int | None = None) -> Iterator[None]:
    """Draw from ``seed``, if given, and restore torch's random state on exit."""
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield
