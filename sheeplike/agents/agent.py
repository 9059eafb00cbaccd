"""What the interaction loop asks of an agent, and the counter that decides when learning is due.

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
        action: what the player chose after ``obs``, as the environment received it; before that, its last one.
        reward: ``(N,)`` float32, for arriving at ``obs``.
        is_first, is_last, is_terminal: ``(N,)`` bool.
        extras: what the player wants stored beside the step (latents, log-probabilities, values).
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
        """Return the next step: what the environments answered when ``action`` was taken in this one."""
        return Step(obs, action, reward, self.is_last, terminated | truncated, terminated)


class Prediction(NamedTuple):
    """What a model foresaw for one camera, beside what happened.

    Attributes:
        truth, model: ``(T, B, H, W, C)`` uint8.
        context: steps that the model was shown before it had to imagine.
    """

    truth: Tensor
    model: Tensor
    context: int


class Dream(NamedTuple):
    """How a model thinks that the agent's own policy goes on from what it has seen, for one camera.

    Attributes:
        seen: ``(C, B, H, W, C)`` uint8, what happened last.
        model: ``(I, B, H, W, C)`` uint8, what it imagines after that.
        traces: name to ``(I, B)`` float32, what it expects on the way.
    """

    seen: Tensor
    model: Tensor
    traces: dict[str, Tensor]


class Player(Protocol):
    """Acts in ``N`` worlds with a state of its own; ``extras`` are what :meth:`Agent.add` needs of the last step."""

    extras: dict[str, Tensor]

    def act(self, obs: dict[str, Tensor], is_first: Tensor, *, sample: bool = True) -> Tensor:
        """Actions of all worlds, ``(N, A)`` float32, ``(N,)`` or ``(N, K)`` int64. ``sample=False`` takes the mode."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Agent(Protocol):
    """Learns from the steps that it is given.

    A class that derives from this one must write ``add``, ``updates_due``, ``update``, ``state_dict`` and
    ``load_state_dict``; the others have defaults. Only ``report``, ``dream``, ``warm_up`` and ``last_batch`` may wait
    for the device.

    Attributes:
        networks_class: makes ``networks``, as ``networks_class(observation_space, action_space, config, *, device,
            autocast, seed)``; commands that let a trained agent act make nothing else.
        networks: what acts and what is exported, a :class:`~sheeplike.agents.policy.PolicyNetworks`.
        skipped_in_a_row: 0-dim int64 device tensor, updated in place: updates skipped since the last one whose losses
            and gradients were finite. Part of the state.
        skipped_total: 0-dim int64 device tensor, updated in place: all updates ever skipped. Part of the state.
        generator: chooses what an update learns from; acting and sampled latents draw from torch's own generator.
    """

    networks_class: ClassVar[Callable[..., nn.Module]]
    networks: nn.Module
    skipped_in_a_row: Tensor
    skipped_total: Tensor
    generator: torch.Generator

    def player(self, num_envs: int) -> Player:
        """A fresh player; training and evaluation never share one."""
        return self.networks.player(num_envs)

    def add(self, step: Step) -> None:
        """Store one step of all training worlds."""

    def updates_due(self, policy_steps: int) -> int:
        """How many calls of :meth:`update` are due after ``policy_steps`` policy steps in all."""

    def update(self) -> dict[str, Tensor]:
        """One gradient update; metrics are 0-dim device tensors.

        Where the loss or the norm of the gradients is not finite, the update is skipped: nothing that lasts changes but
        the counters, and what is drawn next. ``health/skipped_update`` is 1 then; ``health/nonfinite_loss`` says
        whether it was the loss.
        """

    def last_batch(self) -> dict[str, Tensor]:
        """What the last update learned from, to be saved when updates stay non-finite; empty before the first."""
        return {}

    def describe(self) -> dict[str, str]:
        """What the agent sees and is and how it learns, name to text, for the start of a run."""
        networks = self.networks
        count = sum(p.numel() for p in networks.parameters())
        return {
            "sees": describe_sight(networks.space, networks.observations),
            "agent": f"{networks.config.name}: {count:,} parameters",
        }

    def report(self) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
        """Metrics too expensive for every update, and predictions to look at, by camera; both may be empty."""
        return {}, {}

    def dream(self) -> dict[str, Dream]:
        """What it imagines of its own future, by camera; may be empty."""
        return {}

    def counters(self, policy_steps: int, gradient_steps: int) -> dict[str, float]:
        """Metrics that the host knows without asking the device."""
        return {}

    def warm_up(self) -> None:
        """Compile the update on what is in memory, changing nothing."""

    @property
    def history(self) -> Any:
        """The ``memory.SequenceReplay`` of which a checkpoint writes only the new steps; None where memory is small."""
        return None

    def state_dict(self, *, replay: bool = True, history: bool = True) -> dict[str, Any]:
        """Everything that a continuation needs.

        Args:
            replay: with what it has seen.
            history: with the steps of :attr:`history`. Without them, tensors may be the agent's own, which change as it
                goes on.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, into an agent that has seen nothing yet.

        After a state without history, every step of :attr:`history` has to be put back before the agent goes on.
        """


class Ratio:
    """How many gradient steps are due, at ``ratio`` gradient steps per policy step after ``start``.

    The fraction that is left over is carried to the next call, so that the ratio is met exactly in the long run. Only
    policy steps since the last call are counted: a ratio that is changed between two runs takes effect from then on,
    without a burst of updates to catch up.

    Args:
        ratio: gradient steps per policy step, above 0.
        start: policy steps before which nothing is due (``learning_starts``).

    Raises:
        ValueError: ``ratio`` is not above 0.
    """

    def __init__(self, ratio: float, start: int = 0) -> None:
        if not ratio > 0:
            raise ValueError(f"replay_ratio {ratio}: expected a number above 0")
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
        """Owe nothing for the steps up to ``policy_steps``: there was nothing to learn from yet."""
        self.counted = max(self.counted, policy_steps)

    def state_dict(self) -> dict[str, float]:
        return {"counted": self.counted, "carry": self.carry}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.counted, self.carry = max(int(state["counted"]), self.start), float(state["carry"])
        if not 0 <= self.carry < 1:
            raise ValueError(f"the ratio carries {self.carry}: expected less than one gradient step")


def describe_observations(space: spaces.Dict, keys: Iterable[str]) -> str:
    """Names and shapes, for people to read."""
    return ", ".join(f"{key} {'x'.join(map(str, space[key].shape))}" for key in keys)


def describe_sight(space: spaces.Dict, keys: Collection[str]) -> str:
    """What an agent sees of a space, and what it does not, for people to read."""
    unseen = ", ".join(sorted(space.spaces.keys() - set(keys)))
    return describe_observations(space, keys) + (f" (not seen: {unseen})" if unseen else "")


@contextmanager
def own_randomness(device: torch.device | str, seed: int | None = None) -> Iterator[None]:
    """Draw from ``seed``, if one is given, and restore torch's random state on exit."""
    with torch.random.fork_rng(devices=[device] if torch.device(device).type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield
