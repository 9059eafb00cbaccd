"""A trained world model, to be looked into: what it sees, dreams and expects.

::

    model = sheeplike.load("demo:franka_pick")
    states = model.observe(frames, actions)                 # what it believes at each step of an episode
    dream = model.imagine(states[-1], steps=50)             # how it thinks that its own policy goes on
    frames, reward, cont, value = model.decode(dream)       # what it expects to see and to get there

Time is that of a :class:`~sheeplike.agents.agent.Step`: ``actions[t]`` is chosen after seeing ``frames[t]``. Methods
take any leading axes, ``...``; those of a sequence end with time, ``T``. Nothing has a gradient; what is drawn comes
from a ``seed``, or from torch's own generator where that is None.

Shape letters: ``T`` time, ``I`` imagined steps, ``D`` deter, ``S K`` stoch groups x classes, ``F = D + S*K`` features,
``A`` action as the model sees it, ``H W C`` image, ``V`` variants of one state, ``G`` parts of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.agents.agent import Agent, own_randomness
from sheeplike.agents.dreamer_v3.agent import DreamerV3
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.nn.cnn import from_unit, to_pixels, to_unit
from sheeplike.nn.distributions import Bernoulli, OneHotCategorical, TwoHot, categorical_kl, symexp, symlog
from sheeplike.options import CommandError, nearest
from sheeplike.trained.exported import load_agent

Frames = Tensor | np.ndarray | Mapping[str, Any]
BATCH_NUMBERS = 2**22  # in a batch of states, with all that is seen and predicted there
MOST_PSNR = 120.0  # dB, of pictures that are equal
DETER = "deter"  # the recurrent part of the state, beside the groups of the categorical one


@dataclass(frozen=True)
class States:
    """States of the world model; indices and slices pick from the leading axes, as ``states[-1]``, ``states[..., -1]``.

    Attributes:
        deter: ``(..., D)`` float32, the recurrent part.
        stoch: ``(..., S, K)`` float32, one class of each group is 1.
        logits: ``(..., S, K)`` float32, of the distribution that ``stoch`` was drawn from: the posterior where the
            state was observed, the prior where it was imagined.
    """

    deter: Tensor
    stoch: Tensor
    logits: Tensor

    def __getitem__(self, index: Any) -> States:
        index = index if isinstance(index, tuple) else (index,)
        masks = [i.dim() if isinstance(i, Tensor) and i.dtype == torch.bool else 1 for i in index]
        used = sum(axes for axes, i in zip(masks, index, strict=True) if i is not Ellipsis and i is not None)
        if used > len(self.lead):
            raise IndexError(f"{used} indices of states {tuple(self.lead)}: expected at most {len(self.lead)}")
        whole = (slice(None),) * (len(self.lead) - used)
        index = tuple(part for i in index for part in (whole if i is Ellipsis else (i,)))
        return self.map(lambda x: x[index])

    def __len__(self) -> int:
        if not self.lead:
            raise TypeError("one state has no length")
        return self.lead[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> States:
        return States(function(self.deter), function(self.stoch), function(self.logits))

    @property
    def lead(self) -> torch.Size:
        """The leading axes."""
        return self.deter.shape[:-1]

    @property
    def features(self) -> Tensor:
        """``(..., F)``: what reward, value and the policy are computed from."""
        return Latent(self.deter, self.stoch).features

    @property
    def latent(self) -> Latent:
        """As the agent has it, with one leading axis ``(B, ...)``."""
        return Latent(self.deter.reshape(-1, self.deter.shape[-1]), self.stoch.reshape(-1, *self.stoch.shape[-2:]))


class Expected(NamedTuple):
    """What the model expects in states ``(...)``.

    Attributes:
        frames: observation to ``(..., H, W, C)`` uint8, or float32 in metres for depth; vectors ``(..., N)`` float32.
            Targets, which it predicts without seeing them, are among them.
        reward: ``(...)`` for arriving there.
        cont: ``(...)`` probability that the episode goes on.
        value: ``(...)`` expected discounted sum of later rewards.
    """

    frames: dict[str, Tensor]
    reward: Tensor
    cont: Tensor
    value: Tensor


class Effects(NamedTuple):
    """What changes when a part of the state is replaced by that of another state; means over the states, ``(G,)``.

    Attributes:
        parts: number of each group, or ``"deter"``.
        pixels: squared error of the pixels in [0, 1], over all cameras.
        reward, value: absolute difference.
        kl: nats, of what is expected at the next step.
    """

    parts: list[int | str]
    pixels: Tensor
    reward: Tensor
    value: Tensor
    kl: Tensor


def load(place: Any, *, checkpoint: str = "last", device: torch.device | str = "cpu") -> TrainedModel:
    """The world model of a run, of an export, or ``demo:<name>``, which comes with the program.

    Needs neither the task nor JAX.

    Args:
        checkpoint: of a run: ``last``, ``best`` or its policy steps.

    Raises:
        CommandError: there is no such agent, it is damaged, or it has no world model.
    """
    return TrainedModel(load_agent(place, checkpoint=checkpoint, device=device))


class TrainedModel:
    """A trained world model with its policy and value.

    Args:
        agent: a :class:`~sheeplike.agents.dreamer_v3.agent.DreamerV3`.

    Attributes:
        observations: what it sees, key to space.
        cameras: keys of the images that it predicts.
        deter, groups, classes: ``D``, ``S`` and ``K``.
        batch_size: states that are computed together, so that they fit into memory.

    Raises:
        CommandError: the agent has no world model.
    """

    def __init__(self, agent: Agent) -> None:
        if not isinstance(agent, DreamerV3):
            name = getattr(getattr(agent, "config", None), "name", type(agent).__name__)
            raise CommandError(f"{name} has no world model: expected a run of dreamer_v3")
        self.agent, self.device, self.codec = agent, agent.device, agent.codec
        self.world, self.actor_critic = agent.world_model.eval(), agent.actor_critic.eval()
        self.rssm = self.world.rssm
        self.observations = dict(agent.keys.spaces)
        self.cameras = list(self.world.decoder.keys.images)
        self.deter, self.groups, self.classes = self.rssm.deter, self.rssm.stoch, self.rssm.classes
        spaces = {**self.world.decoder.keys.spaces, **self.observations}
        numbers = sum(math.prod(space.shape) for space in spaces.values()) + self.deter + self.groups * self.classes
        self.batch_size = max(BATCH_NUMBERS // numbers, 1)

    # --- following what happened ------------------------------------------------------------------------------------

    def observe(self, frames: Frames, actions: Any, is_first: Any = None, *, seed: int | None = None) -> States:
        """What the model believes at each step, having seen everything up to it.

        Args:
            frames: observation to ``(..., T, ...)``; one camera alone needs no name.
            actions: ``(..., T, …)`` as the environment takes them, each chosen after the frame of its step.
            is_first: ``(..., T)`` bool, where an episode begins, beside the first step, which always does.

        Returns:
            Posterior states ``(..., T)``.

        Raises:
            ValueError: a shape, dtype or name is not the model's.
        """
        obs, lead = self._frames(frames, steps=True)
        action = self._actions(actions, lead)
        first = torch.zeros(lead, dtype=torch.bool, device=self.device)
        first[..., 0] = True
        if is_first is not None:
            first |= self._tensor(is_first).bool().reshape(lead)
        # The model is told the action that led to a step.
        before = torch.cat([torch.zeros_like(action[..., :1, :]), action[..., :-1, :]], -2)
        length = lead[-1]
        flat = {key: value.reshape(-1, length, *value.shape[len(lead) :]) for key, value in obs.items()}
        before, first = before.reshape(-1, length, action.shape[-1]), first.reshape(-1, length)
        with self._computing(seed):
            seen, logits = self.world.observe(self.rssm.initial(len(first), self.device), before, flat, first)
        return States(seen.deter, seen.stoch, logits).map(lambda x: x.reshape(*lead, *x.shape[2:]))

    def observe_step(self, state: States | None, action: Any, frames: Frames, *, seed: int | None = None) -> States:
        """The next state ``(...)``, after an action and the frame that it led to.

        Args:
            state: that the action was chosen in; None: the frame begins an episode, and there is no action.
        """
        obs, lead = self._frames(frames, steps=False)
        count = lead.numel()
        flat = {key: value.reshape(count, 1, *value.shape[len(lead) :]) for key, value in obs.items()}
        first = torch.full((count, 1), state is None, device=self.device)
        with self._computing(seed):
            if state is not None and state.lead != lead:
                raise ValueError(f"frames of {tuple(lead)} beside states {tuple(state.lead)}: expected as many of both")
            if state is None:
                latent, before = self.rssm.initial(count, self.device), torch.zeros(count, 1, self.codec.width)
            else:
                latent, before = state.latent, self._actions(action, lead).reshape(count, 1, -1)
            seen, logits = self.world.observe(latent, before.to(self.device), flat, first)
        return States(seen.deter, seen.stoch, logits).map(lambda x: x.reshape(*lead, *x.shape[2:]))

    def surprise(
        self, frames: Frames, actions: Any, is_first: Any = None, *, per_group: bool = False, seed: int | None = None
    ) -> Tensor:
        """How far what was seen differs from what was expected: KL of posterior to prior, in nats.

        Returns:
            ``(..., T)``, or ``(..., T, S)`` with ``per_group``. The first step of an episode is always a surprise.
        """
        return self.kl(self.observe(frames, actions, is_first, seed=seed), per_group=per_group)

    def kl(self, states: States, *, per_group: bool = False) -> Tensor:
        """KL of the distribution that states ``(...)`` were drawn from to the prior: of imagined ones it is 0."""
        return self._divergence(states.logits, self.prior(states), per_group)

    def probabilities(self, states: States) -> Tensor:
        """``(..., S, K)``: of the classes, where states ``(...)`` were drawn."""
        return self.rssm.distribution(states.logits.float()).probs

    # --- dreaming ---------------------------------------------------------------------------------------------------

    def imagine(
        self,
        start: States,
        actions: Any = None,
        *,
        steps: int | None = None,
        seed: int | None = None,
        most_likely: bool = False,
    ) -> States:
        """What the model expects to follow ``start (...)``.

        Args:
            actions: ``(..., I, …)`` as the environment takes them; or a function of the states ``(...)`` that returns
                those of one step; None: the agent's own policy chooses.
            steps: ``I``; of given actions it is their number.
            most_likely: of each group take the most likely class, instead of drawing one.

        Returns:
            Imagined states ``(..., I)``, the first of them one step after ``start``.

        Raises:
            ValueError: actions are not the model's, or ``steps`` is missing or not above 0.
        """
        lead = start.lead
        given = None if actions is None or callable(actions) else self._actions(actions, lead, more=True)
        steps = None if steps is None else operator.index(steps)
        if given is None and (steps is None or steps <= 0):
            raise ValueError(f"steps={steps}: expected a number above 0, how many to imagine")
        if given is not None and not given.shape[-2]:
            raise ValueError("no actions: expected at least one step of them")
        if given is not None and steps not in (None, given.shape[-2]):
            raise ValueError(f"steps={steps} beside {given.shape[-2]} actions: expected one of the two")
        found, state = [], start
        with self._computing(seed):
            for t in range(steps if given is None else given.shape[-2]):
                if given is not None:
                    action = given[..., t, :]
                elif actions is None:
                    action = self._policy(state).sample()
                else:
                    action = self._actions(actions(state), lead)
                state = self._advance(state, action, most_likely)
                found.append(state)
        return stack(found, len(lead))

    def act(self, states: States, *, sample: bool = True, seed: int | None = None) -> Tensor:
        """The action ``(..., …)`` that the agent's policy chooses in each state, as the environment takes it."""
        with self._computing(seed):
            policy = self._policy(states)
            action = policy.sample() if sample else policy.mode()
        return self.to_env(action)

    def to_env(self, action: Tensor) -> Tensor:
        """Actions ``(..., A)`` as the environment takes them."""
        made = self.codec.to_env(action.reshape(-1, action.shape[-1]))
        return made.reshape(*action.shape[:-1], *made.shape[1:])

    # --- what a state means -----------------------------------------------------------------------------------------

    def decode(self, states: States) -> Expected:
        """What the model expects to see and to get in states ``(...)``."""
        frames = {key: self._shown(key, value) for key, value in self.predict(states).items()}
        return Expected(frames, self.reward(states).pred(), self.continue_prob(states), self._value(states))

    def predict(self, states: States) -> dict[str, Tensor]:
        """Observations ``(...)`` as the decoder learns them, by key: :meth:`decoder_target` says in which units."""
        latent, parts = states.latent, []
        with self._computing(None):
            for start in range(0, max(len(latent.deter), 1), self.batch_size):
                rows = slice(start, start + self.batch_size)
                parts.append(self.world.decoder(latent.map(lambda x, rows=rows: x[rows])))
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return {key: value.reshape(*states.lead, *value.shape[1:]) for key, value in joined.items()}

    def reward(self, states: States) -> TwoHot:
        """Distribution over the reward ``(...)`` for arriving in states."""
        with self._computing(None):
            return self.world.reward(states.features)

    def cont(self, states: States) -> Bernoulli:
        """Distribution of going on ``(...)`` as it is learnt, the horizon's ``1 - 1/horizon`` included."""
        with self._computing(None):
            return self.world.cont(states.features)

    def continue_prob(self, states: States) -> Tensor:
        """Probability ``(...)`` that the episode goes on, without the horizon."""
        with self._computing(None):
            return self.world.continue_prob(states.features)

    def prior(self, states: States) -> Tensor:
        """Logits ``(..., S, K)`` of what the groups are expected to hold, from the recurrent part alone."""
        with self._computing(None):
            return self.rssm.prior(states.deter).float()

    def decoder_target(self, key: str, observed: Any) -> Tensor:
        """An observation ``(...)`` as the decoder learns it, in the units of :meth:`predict`: images in [0, 1],
        vectors in symlog space, targets whitened before."""
        value = self._tensor(observed)
        if key in self.cameras:
            return to_unit(value)
        if key in self.world.whitened:
            value = self.world.norms[self.world.whitened.index(key)](value)
        return symlog(value.float())

    def traverse(
        self,
        state: States,
        direction: Tensor | None = None,
        *,
        amounts: Sequence[float] | None = None,
        group: int | None = None,
        classes: Iterable[int] | None = None,
    ) -> States:
        """Variants ``(V,)`` of one state, to be decoded or dreamt on from.

        Args:
            direction: ``(F,)`` in the space of :attr:`States.features`. What the groups hold is then no longer one
                class each. The least change that a linear probe with weights ``w (F,)`` reads as one unit is
                ``w / w.square().sum()``.
            amounts: multiples of the direction, one variant each; None: -2 to 2.
            group: instead: one variant for each of ``classes`` of this group; None: all that it has.

        Raises:
            ValueError: not one state, neither or both of direction and group, or there is no such group or class.
        """
        if state.lead:
            raise ValueError(f"states {tuple(state.lead)}: expected one, such as states[-1]")
        if (direction is None) == (group is None):
            raise ValueError("expected a direction or a group")
        if (group is None and classes is not None) or (direction is None and amounts is not None):
            raise ValueError("expected classes of a group, or amounts of a direction")
        if direction is not None:
            amounts = (-2, -1, 0, 1, 2) if amounts is None else amounts
            direction = self._tensor(direction).float()
            if direction.shape != state.features.shape:
                raise ValueError(f"direction {tuple(direction.shape)}: expected {tuple(state.features.shape)}")
            moved = state.features + torch.as_tensor(amounts, device=self.device)[:, None] * direction
            stoch = moved[:, self.deter :].unflatten(-1, (self.groups, self.classes))
            return States(moved[:, : self.deter], stoch, state.logits.expand_as(stoch))
        variants = [
            self.set_classes(state, {group: one}) for one in (range(self.classes) if classes is None else classes)
        ]
        return stack(variants, 0)

    def set_classes(self, states: States, classes: Mapping[int, int]) -> States:
        """States ``(...)`` with given classes in some groups.

        Raises:
            ValueError: there is no such group or class.
        """
        stoch = states.stoch.clone()
        for group, one in classes.items():
            for name, value, count in (("group", group, self.groups), ("class", one, self.classes)):
                if not 0 <= value < count:
                    raise ValueError(f"{name} {value}: expected 0 to {count - 1}")
            stoch[..., group, :] = F.one_hot(torch.tensor(one, device=self.device), self.classes).float()
        return States(states.deter, stoch, states.logits)

    def ablate(self, states: States, groups: Iterable[int | str] | None = None, *, seed: int = 0) -> Effects:
        """How much each part of the state matters: it gets that of another of ``states (N,)``, drawn at random.

        So what is replaced stays plausible in itself, and a part that never changes has no effect.

        Args:
            groups: numbers, and ``"deter"`` for the recurrent part; None: all of them.

        Raises:
            ValueError: fewer than two states, or there is no such group.
        """
        if len(states.lead) != 1 or len(states) < 2:
            raise ValueError(f"states {tuple(states.lead)}: expected (N,), at least two")
        parts = [*range(self.groups), DETER] if groups is None else list(groups)
        if not parts:
            raise ValueError(f"groups=[]: expected 0 to {self.groups - 1}, or {DETER!r}")
        for part in parts:
            if part != DETER and not (isinstance(part, int) and 0 <= part < self.groups):
                raise ValueError(f"group {part!r}: expected 0 to {self.groups - 1}, or {DETER!r}")
        # By at least one place round, so that no state gets its own.
        shift = torch.randint(1, len(states), (1,), generator=torch.Generator().manual_seed(seed)).item()
        other = states.map(lambda x: x.roll(shift, 0))
        seen, follows = self.predict(states), self._next_prior(states)
        reward, value = self.reward(states).pred(), self._value(states)
        rows = []
        for part in parts:
            stoch = states.stoch.clone()
            if part != DETER:
                stoch[:, part] = other.stoch[:, part]
            changed = States(other.deter if part == DETER else states.deter, stoch, states.logits)
            found = self.predict(changed)
            pixels = [(found[camera] - seen[camera]).square().mean() for camera in self.cameras]
            effects = [
                torch.stack(pixels).mean() if pixels else torch.zeros((), device=self.device),
                (self.reward(changed).pred() - reward).abs().mean(),
                (self._value(changed) - value).abs().mean(),
                self._divergence(follows, self._next_prior(changed), per_group=False).mean(),
            ]
            rows.append(torch.stack(effects))
        return Effects(parts, *torch.stack(rows, 1))

    def in_batches(self, function: Callable[..., Tensor], *rows: States | Tensor, states: int = 1) -> Tensor:
        """``function`` of ``rows``, ``(M, ...)`` each and in step with one another, a batch at a time.

        Args:
            states: that one row stands for.

        Returns:
            ``(M, ...)``, on the CPU.
        """
        size = max(self.batch_size // states, 1)
        starts = range(0, len(rows[0]), size)
        return torch.cat([function(*(one[start : start + size] for one in rows)).cpu() for start in starts])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _advance(self, state: States, action: Tensor, most_likely: bool) -> States:
        """One imagined step: states ``(...)`` and actions ``(..., A)``. The same draws as :meth:`RSSM.imagine`."""
        action = action.reshape(-1, action.shape[-1])
        deter = self.rssm.advance(state.latent, self.rssm.embed_action(action))
        logits = self.rssm.prior(deter).float()
        distribution = self.rssm.distribution(logits)
        stoch = distribution.mode() if most_likely else distribution.sample()
        return States(deter, stoch, logits).map(lambda x: x.reshape(*state.lead, *x.shape[1:]))

    def _next_prior(self, states: States) -> Tensor:
        """Logits of what is expected one step later, after the policy's most likely action."""
        with self._computing(None):
            action = self._policy(states).mode()
            return self.rssm.prior(self.rssm.advance(states.latent, self.rssm.embed_action(action))).float()

    def _value(self, states: States) -> Tensor:
        with self._computing(None):
            return self.actor_critic.value(states.features).pred()

    def _policy(self, states: States) -> Any:
        return self.actor_critic.policy(states.features)

    def _divergence(self, first: Tensor, second: Tensor, per_group: bool) -> Tensor:
        one, other = self.rssm.distribution(first), self.rssm.distribution(second)
        return group_kl(one, other) if per_group else categorical_kl(one, other)

    def _shown(self, key: str, predicted: Tensor) -> Tensor:
        if key in self.cameras:
            if self.world.decoder.keys.dtype(key) == torch.uint8:
                return to_pixels(predicted)
            return from_unit(predicted)
        vector = symexp(predicted)
        return self.world.norms[self.world.whitened.index(key)].invert(vector) if key in self.world.whitened else vector

    @contextmanager
    def _computing(self, seed: int | None) -> Any:
        randomness: AbstractContextManager = nullcontext() if seed is None else own_randomness(self.device)
        with torch.no_grad(), self.agent.autocast(), self.agent.compiled.paused(), randomness:
            if seed is not None:
                torch.manual_seed(seed)
            yield

    def _tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(value).to(self.device)

    def _frames(self, frames: Frames, *, steps: bool) -> tuple[dict[str, Tensor], torch.Size]:
        """Observations by key, and their leading axes.

        Raises:
            ValueError: one is missing, or of another shape or dtype.
        """
        if not isinstance(frames, Mapping):
            if len(self.observations) > 1:
                raise ValueError(f"the model sees {', '.join(self.observations)}: expected a tensor for each, by name")
            frames = dict.fromkeys(self.observations, frames)
        obs, lead = {}, None
        for key, space in self.observations.items():
            if key not in frames:
                near = nearest(key, frames)
                raise ValueError(f"{key} is missing: expected {', '.join(self.observations)}; nearest here: {near}")
            value = self._tensor(frames[key])
            shape, found = value.shape[value.dim() - len(space.shape) :], value.shape[: value.dim() - len(space.shape)]
            wanted = self.agent.keys.dtype(key)
            if tuple(shape) != space.shape or value.dtype != wanted or (steps and not found):
                axes = "..., T, " if steps else "..., "
                expected = f"{str(wanted).removeprefix('torch.')} ({axes}{', '.join(map(str, space.shape))})"
                got = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
                raise ValueError(f"{key}: {got}; expected {expected}")
            if lead is not None and found != lead:
                raise ValueError(f"{key}: leading axes {tuple(found)}, of another observation {tuple(lead)}")
            obs[key], lead = value, found
        return obs, lead

    def _actions(self, actions: Any, lead: torch.Size, *, more: bool = False) -> Tensor:
        """Actions as the model sees them, ``(*lead, A)``; with ``more``, ``(*lead, I, A)``.

        Raises:
            ValueError: another shape or number.
        """
        value, own = self._tensor(actions), self.codec.space.shape
        found = value.shape[: value.dim() - len(own)]
        if value.shape[value.dim() - len(own) :] != own or (found[:-1] if more else found) != lead:
            axes = ", ".join(map(str, [*lead, *(["I"] if more else []), *own]))
            raise ValueError(f"actions {tuple(value.shape)}: expected ({axes})")
        if not torch.isfinite(value.float()).all():
            raise ValueError("actions: expected finite numbers")
        if self.codec.discrete:
            if value.is_floating_point():
                raise ValueError(f"actions of {value.dtype}: expected integers, those of {self.codec.space}")
            low = torch.as_tensor(self.codec.starts, device=self.device)
            index = value.reshape(-1, len(self.codec.classes)) - low
            if bool(((index < 0) | (index >= torch.as_tensor(self.codec.classes, device=self.device))).any()):
                raise ValueError(f"actions: expected those of {self.codec.space}")
        flat = value.reshape(-1, *own)
        return self.codec.from_env(flat if self.codec.discrete else flat.float()).reshape(*found, self.codec.width)


def stack(states: Sequence[States], axis: int) -> States:
    """States ``(...)`` side by side along a new leading axis."""
    return States(*(torch.stack([getattr(one, name) for one in states], axis) for name in ("deter", "stoch", "logits")))


def group_kl(one: OneHotCategorical, other: OneHotCategorical) -> Tensor:
    """KL of each group, ``(..., S)`` in nats."""
    return (one.probs * (one.log_probs - other.log_probs)).sum(-1)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error of values in [0, 1], at most :data:`MOST_PSNR`."""
    return min(-10 * math.log10(mse), MOST_PSNR) if mse else MOST_PSNR
