"""A trained world model for inspection: it observes, dreams and predicts.

::

    model = sheeplike.load("demo:franka_pick")
    states = model.observe(frames, actions)                 # the state at each step of an episode
    dream = model.imagine(states[10], steps=50)             # the future under the agent's own policy
    frames, reward, cont, value = model.decode(dream)       # the predictions there

Time is that of a :class:`~sheeplike.agents.agent.Step`: ``actions[t]`` is chosen after seeing ``frames[t]``. Methods
take any leading axes, ``...``; those of a sequence end with time, ``T``. Results have no gradient. Random numbers come
from a ``seed``, or from torch's own generator if that is None.

Shape letters: ``T`` time, ``I`` imagined steps, ``D`` deter, ``S K`` stoch groups x classes, ``F = D + S*K`` features,
``A`` action as the model sees it, ``H W C`` image, ``V`` variants of one state, ``G`` parts of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.agents.dreamer_v3.rssm import Latent, stack_latents
from sheeplike.agents.policy import PolicyNetworks
from sheeplike.nn.cnn import from_unit, to_pixels, to_unit
from sheeplike.nn.distributions import Bernoulli, TwoHot, categorical_kl, symexp, symlog
from sheeplike.options import CommandError, nearest
from sheeplike.trained.exported import load_agent

Frames = Tensor | np.ndarray | Mapping[str, Any]
BATCH_NUMBERS = 2**22  # limit on the numbers in a batch of states, with their observations and predictions
DETER = "deter"  # the recurrent part of the state, beside the groups of the categorical one


@dataclass(frozen=True)
class States:
    """States of the world model; an index, as in ``states[-1]`` or ``states[..., -1]``, selects from the leading axes.

    Attributes:
        latent: ``deter (..., D)`` and ``stoch (..., S, K)``, float32.
        logits: ``(..., S, K)`` float32, of the distribution that ``stoch`` was drawn from: the posterior of an
            observed state, the prior of an imagined one.
    """

    latent: Latent
    logits: Tensor

    def __getitem__(self, index: Any) -> States:
        chosen = torch.arange(self.lead.numel(), device=self.deter.device).reshape(self.lead)[index]
        return self.reshape(-1).map(lambda x: x[chosen])

    def __len__(self) -> int:
        if not self.lead:
            raise TypeError("one state has no length")
        return self.lead[0]

    def map(self, function: Callable[[Tensor], Tensor]) -> States:
        return States(self.latent.map(function), function(self.logits))

    def reshape(self, *lead: int) -> States:
        """Return the same states with other leading axes."""
        return self.map(lambda x: x.reshape(*lead, *x.shape[len(self.lead) :]))

    @property
    def lead(self) -> torch.Size:
        """The leading axes."""
        return self.deter.shape[:-1]

    @property
    def deter(self) -> Tensor:
        """``(..., D)``, the recurrent part."""
        return self.latent.deter

    @property
    def stoch(self) -> Tensor:
        """``(..., S, K)``, where one class of each group is 1."""
        return self.latent.stoch

    @property
    def features(self) -> Tensor:
        """``(..., F)``, the input of the heads and the policy."""
        return self.latent.features


def combine(states: Sequence[States], function: Callable[..., Tensor] = torch.cat) -> States:
    """Join states along their first axis by ``torch.cat``, or along a new one by ``torch.stack``."""
    deter, stoch, logits = zip(*((*one.latent, one.logits) for one in states), strict=True)
    return States(Latent(function(deter), function(stoch)), function(logits))


class Expected(NamedTuple):
    """Predictions in states ``(...)``.

    Attributes:
        frames: observation or target to ``(..., H, W, C)`` uint8, or float32 in metres for depth; vectors ``(..., N)``
            float32.
        reward: ``(...)`` for arriving there.
        cont: ``(...)`` probability that the episode goes on.
        value: ``(...)`` expected discounted sum of later rewards.
    """

    frames: dict[str, Tensor]
    reward: Tensor
    cont: Tensor
    value: Tensor


class Effects(NamedTuple):
    """Mean changes over the states when a part of each is replaced by that of another state, ``(G,)``.

    Attributes:
        parts: number of each group, or ``"deter"``.
        pixels: squared error of the pixels in [0, 1], over all cameras.
        reward, value: absolute difference.
        kl: nats, of the prior at the next step.
    """

    parts: list[int | str]
    pixels: Tensor
    reward: Tensor
    value: Tensor
    kl: Tensor


def load(place: Any, *, checkpoint: str = "last", device: torch.device | str = "cpu") -> TrainedModel:
    """Load the world model of a run, of an export, or of a demo, ``demo:<name>``; needs neither the task nor JAX.

    Args:
        checkpoint: of a run: ``last``, ``best`` or its policy steps.

    Raises:
        CommandError: there is no such agent, it is damaged, or it has no world model.
    """
    return TrainedModel(load_agent(place, checkpoint=checkpoint, device=device))


class TrainedModel:
    """A trained world model with its policy and value.

    Args:
        networks: of a :class:`~sheeplike.agents.dreamer_v3.agent.DreamerV3`.

    Attributes:
        observations: the model's inputs, key to space.
        cameras: keys of the images that it predicts.
        deter, groups, classes: ``D``, ``S`` and ``K``.
        batch_size: states that fit into memory together.

    Raises:
        CommandError: the agent has no world model.
    """

    def __init__(self, networks: PolicyNetworks) -> None:
        if not isinstance(networks, DreamerNetworks):
            raise CommandError(f"{networks.config.name} has no world model: expected a run of dreamer_v3")
        self.networks, self.device, self.codec = networks, networks.device, networks.codec
        self.world, self.actor_critic = networks.world_model.eval(), networks.actor_critic.eval()
        self.rssm = self.world.rssm
        self.observations = dict(networks.observations)
        self.cameras = list(self.world.decoder.keys.images)
        self.deter, self.groups, self.classes = self.rssm.deter, self.rssm.stoch, self.rssm.classes
        spaces = {**self.world.decoder.keys.spaces, **self.observations}
        numbers = sum(math.prod(space.shape) for space in spaces.values()) + self.deter + self.groups * self.classes
        self.batch_size = max(BATCH_NUMBERS // numbers, 1)

    # --- observing --------------------------------------------------------------------------------------------------

    def observe(self, frames: Frames, actions: Any, is_first: Any = None, *, seed: int | None = None) -> States:
        """Return the posterior states ``(..., T)`` of episodes, each given all observations up to its step.

        Args:
            frames: observation to ``(..., T, ...)``; a single camera needs no name.
            actions: ``(..., T, …)`` as the environment takes them, each chosen after the frame of its step.
            is_first: ``(..., T)`` bool, beginnings of episodes beside the first step.
        """
        obs, lead = self._frames(frames, steps=True)
        action = self._actions(actions, lead)
        first = torch.zeros(lead) if is_first is None else self._tensor(is_first).reshape(lead)
        first = first.to(self.device, torch.bool, copy=True)
        first[..., 0] = True
        # The model takes the action that led to a step.
        before = torch.cat([torch.zeros_like(action[..., :1, :]), action[..., :-1, :]], -2)
        return self._observe(None, before, obs, first, seed)

    def observe_step(self, state: States | None, action: Any, frames: Frames, *, seed: int | None = None) -> States:
        """Return the next posterior state ``(...)``, after an action and the resulting frame.

        Args:
            state: in which the action was chosen; None: the frame begins an episode, and the action is ignored.
        """
        obs, lead = self._frames(frames, steps=False)
        assert state is None or state.lead == lead, (state.lead, lead)
        before = torch.zeros(*lead, self.codec.width) if state is None else self._actions(action, lead)
        first = torch.full((*lead, 1), state is None, device=self.device)
        obs = {key: value.unsqueeze(len(lead)) for key, value in obs.items()}
        return self._observe(state, before.unsqueeze(-2).to(self.device), obs, first, seed)[..., 0]

    def surprise(
        self, frames: Frames, actions: Any, is_first: Any = None, *, per_group: bool = False, seed: int | None = None
    ) -> Tensor:
        """Return the KL of posterior to prior in nats ``(..., T)``, or ``(..., T, S)`` with ``per_group``.

        It measures how far observations differ from predictions; it is always large at the first step.
        """
        return self.kl(self.observe(frames, actions, is_first, seed=seed), per_group=per_group)

    def kl(self, states: States, *, per_group: bool = False) -> Tensor:
        """Return the KL ``(...)`` in nats of the states' own distribution to the prior; 0 for imagined states."""
        return self._divergence(states.logits, self.prior(states), per_group)

    def probabilities(self, states: States) -> Tensor:
        """Return the probabilities ``(..., S, K)`` of the classes that states ``(...)`` were drawn from."""
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
        """Return imagined states ``(..., I)``, the first of them one step after ``start (...)``.

        Args:
            actions: ``(..., I, …)`` as the environment takes them; or a function of the states ``(...)`` that returns
                those of one step; None: the agent's own policy chooses.
            steps: ``I``, unless actions are given.
            most_likely: take the most likely class of each group, instead of drawing one.
        """
        lead = start.lead
        given = None if actions is None or callable(actions) else self._actions(actions, lead, more=True)
        count = steps if given is None else given.shape[-2]
        if not count or count < 0 or steps not in (None, count):
            raise ValueError(f"steps={steps}, {count} actions: expected actions, or steps above 0")
        latent, found = start.reshape(lead.numel()).latent, []
        with self._computing(seed):
            for t in range(count):
                if given is not None:
                    action = given[..., t, :]
                elif actions is None:
                    action = self.actor_critic.policy(latent.features).sample()
                else:
                    action = self._actions(actions(self._imagined(latent).reshape(*lead)), lead)
                latent = self.rssm.imagine(latent, action.reshape(lead.numel(), -1), sample=not most_likely)
                found.append(latent)
            return self._imagined(stack_latents(found)).reshape(*lead, count)

    def act(self, states: States, *, sample: bool = True, seed: int | None = None) -> Tensor:
        """Return the action ``(..., …)`` that the policy chooses in each state, as the environment takes it."""
        with self._computing(seed):
            policy = self.actor_critic.policy(states.features)
            action = policy.sample() if sample else policy.mode()
        return self.to_env(action)

    def to_env(self, action: Tensor) -> Tensor:
        """Return actions ``(..., A)`` as the environment takes them."""
        made = self.codec.to_env(action.reshape(-1, action.shape[-1]))
        return made.reshape(*action.shape[:-1], *made.shape[1:])

    # --- predicting -------------------------------------------------------------------------------------------------

    def decode(self, states: States) -> Expected:
        """Return the observations, rewards and so on that the model expects in states ``(...)``."""
        frames = {key: self._shown(key, value) for key, value in self.predict(states).items()}
        return Expected(frames, self.reward(states).pred(), self.continue_prob(states), self._value(states))

    def predict(self, states: States) -> dict[str, Tensor]:
        """Return observations ``(...)`` by key as the decoder learns them, in the units of :meth:`decoder_target`."""
        flat, parts = states.reshape(states.lead.numel()), []
        with self._computing():
            for start in range(0, max(len(flat), 1), self.batch_size):
                parts.append(self.world.decoder(flat[start : start + self.batch_size].latent))
        joined = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
        return {key: value.reshape(*states.lead, *value.shape[1:]) for key, value in joined.items()}

    def reward(self, states: States) -> TwoHot:
        """Distribution of the reward ``(...)`` for arriving in states."""
        with self._computing():
            return self.world.reward(states.features)

    def cont(self, states: States) -> Bernoulli:
        """Distribution of the learnt continuation ``(...)``, which includes the factor ``1 - 1/horizon``."""
        with self._computing():
            return self.world.cont(states.features)

    def continue_prob(self, states: States) -> Tensor:
        """Probability ``(...)`` that the episode goes on, without that factor."""
        with self._computing():
            return self.world.continue_prob(states.features)

    def prior(self, states: States) -> Tensor:
        """Logits ``(..., S, K)`` of the groups given the recurrent part alone."""
        with self._computing():
            return self.rssm.prior(states.deter).float()

    def decoder_target(self, key: str, observed: Any) -> Tensor:
        """Return observations as the decoder learns them: images in [0, 1], vectors as symlog, targets whitened."""
        value = self._tensor(observed)
        if key in self.cameras:
            return to_unit(value)
        if key in self.world.whitened:
            value = self.world.norms[self.world.whitened.index(key)](value)
        return symlog(value.float())

    # --- intervening ------------------------------------------------------------------------------------------------

    def traverse(
        self,
        state: States,
        direction: Tensor | None = None,
        *,
        amounts: Sequence[float] | None = None,
        group: int | None = None,
        classes: Iterable[int] | None = None,
    ) -> States:
        """Return variants ``(V,)`` of one state, to be decoded or dreamt on from.

        Args:
            direction: ``(F,)`` in the space of :attr:`States.features`. Groups then no longer hold one class each.
                The least change that a linear probe with weights ``w (F,)`` reads as one unit is
                ``w / w.square().sum()``.
            amounts: multiples of the direction, one variant each; None: -2 to 2.
            group: instead of a direction: one variant for each of ``classes`` of this group; None: all that it has.
        """
        assert not state.lead, f"states {tuple(state.lead)}: expected one, such as states[-1]"
        assert (direction is None) != (group is None), "expected a direction or a group"
        assert (classes if group is None else amounts) is None, "expected amounts of a direction, or classes of a group"
        if group is not None:
            chosen = range(self.classes) if classes is None else classes
            return combine([self.set_classes(state, {group: one}) for one in chosen], torch.stack)
        direction = self._tensor(direction).float()
        assert direction.shape == state.features.shape, (direction.shape, state.features.shape)
        amounts = torch.as_tensor((-2, -1, 0, 1, 2) if amounts is None else amounts, device=self.device)
        latent = self.rssm.split(state.features + amounts[:, None] * direction)
        return States(latent, state.logits.expand_as(latent.stoch))

    def set_classes(self, states: States, classes: Mapping[int, int]) -> States:
        """Return states ``(...)`` with given classes in some groups."""
        stoch = states.stoch.clone()
        for group, one in classes.items():
            assert group in range(self.groups), f"group {group}: expected 0 to {self.groups - 1}"
            assert one in range(self.classes), f"class {one}: expected 0 to {self.classes - 1}"
            stoch[..., group, :] = F.one_hot(torch.tensor(one, device=self.device), self.classes).float()
        return States(Latent(states.deter, stoch), states.logits)

    def ablate(self, states: States, groups: Iterable[int | str] | None = None, *, seed: int = 0) -> Effects:
        """Replace each part of ``states (N,)`` by that of another of them, at random, and measure the effects.

        Args:
            groups: numbers of groups, and ``"deter"`` for the recurrent part; None: all parts.
        """
        assert len(states.lead) == 1 < len(states), f"states {tuple(states.lead)}: expected (N,), at least two"
        parts = [*range(self.groups), DETER] if groups is None else list(groups)
        assert set() < set(parts) <= {*range(self.groups), DETER}, parts
        # A shift by at least one place, so that no state gets its own part.
        shift = torch.randint(1, len(states), (1,), generator=torch.Generator().manual_seed(seed)).item()
        other = states.map(lambda x: x.roll(shift, 0))
        seen, follows = self.predict(states), self._next_prior(states)
        reward, value = self.reward(states).pred(), self._value(states)
        rows = []
        for part in parts:
            stoch = states.stoch.clone()
            if part != DETER:
                stoch[:, part] = other.stoch[:, part]
            changed = States(Latent(other.deter if part == DETER else states.deter, stoch), states.logits)
            found = self.predict(changed)
            pixels = [(found[camera] - seen[camera]).square().mean() for camera in self.cameras]
            effects = [
                torch.stack(pixels).mean() if pixels else torch.zeros((), device=self.device),
                (self.reward(changed).pred() - reward).abs().mean(),
                (self._value(changed) - value).abs().mean(),
                self._divergence(follows, self._next_prior(changed)).mean(),
            ]
            rows.append(torch.stack(effects))
        return Effects(parts, *torch.stack(rows, 1))

    def in_batches(self, function: Callable[..., Tensor], *rows: States | Tensor) -> Tensor:
        """Apply a function to batches of ``rows``, ``(M, ...)`` each; returns ``(M, ...)`` on the CPU."""
        size = self.batch_size
        starts = range(0, len(rows[0]), size)
        return torch.cat([function(*(one[start : start + size] for one in rows)).cpu() for start in starts])

    # --- private ----------------------------------------------------------------------------------------------------

    def _observe(
        self, state: States | None, before: Tensor, obs: dict[str, Tensor], is_first: Tensor, seed: int | None
    ) -> States:
        """Follow sequences ``(..., T)`` from a state, given the action that led to each step."""
        lead = is_first.shape
        count = lead[:-1].numel()
        start = self.rssm.initial(count, self.device) if state is None else state.reshape(count).latent
        flat = {key: value.reshape(count, *value.shape[len(lead) - 1 :]) for key, value in obs.items()}
        with self._computing(seed):
            steps = before.reshape(count, lead[-1], -1), flat, is_first.reshape(count, -1)
            return States(*self.world.observe(start, *steps)[:2]).reshape(*lead)

    def _imagined(self, latent: Latent) -> States:
        return States(latent, self.rssm.prior(latent.deter).float())

    def _next_prior(self, states: States) -> Tensor:
        """Return the prior's logits one step later, after the policy's most likely action; states ``(N,)``."""
        with self._computing():
            action = self.actor_critic.policy(states.features).mode()
            return self.rssm.prior(self.rssm.advance(states.latent, self.rssm.embed_action(action))).float()

    def _value(self, states: States) -> Tensor:
        with self._computing():
            return self.actor_critic.value(states.features).pred()

    def _divergence(self, first: Tensor, second: Tensor, per_group: bool = False) -> Tensor:
        one, other = self.rssm.distribution(first), self.rssm.distribution(second)
        return (one.probs * (one.log_probs - other.log_probs)).sum(-1) if per_group else categorical_kl(one, other)

    def _shown(self, key: str, predicted: Tensor) -> Tensor:
        if key in self.cameras:
            return (to_pixels if self.world.decoder.keys.dtype(key) == torch.uint8 else from_unit)(predicted)
        vector = symexp(predicted)
        return self.world.norms[self.world.whitened.index(key)].invert(vector) if key in self.world.whitened else vector

    @contextmanager
    def _computing(self, seed: int | None = None) -> Iterator[None]:
        randomness: AbstractContextManager = nullcontext() if seed is None else own_randomness(self.device)
        with torch.no_grad(), self.networks.autocast(), self.networks.compiled.paused(), randomness:
            if seed is not None:
                torch.manual_seed(seed)
            yield

    def _tensor(self, value: Any) -> Tensor:
        return torch.as_tensor(value).to(self.device)

    def _frames(self, frames: Frames, *, steps: bool) -> tuple[dict[str, Tensor], torch.Size]:
        """Return checked observations by key, and their leading axes."""
        if not isinstance(frames, Mapping):
            frames = {next(iter(self.observations)): frames}
        obs, lead = {}, None
        for key, space in self.observations.items():
            if key not in frames:
                expected = f"expected {', '.join(self.observations)}; nearest here: {nearest(key, frames)}"
                raise ValueError(f"{key} is missing: {expected}")
            value, dtype = self._tensor(frames[key]), self.networks.keys.dtype(key)
            axes = max(value.dim() - len(space.shape), 0)
            found = value.shape[:axes]
            lead = found if lead is None else lead
            if value.shape[axes:] != space.shape or value.dtype != dtype or found != lead or (steps and not found):
                expected = f"{dtype} ({'..., T' if steps else '...'}, {', '.join(map(str, space.shape))})"
                raise ValueError(f"{key}: {value.dtype} {tuple(value.shape)}; expected {expected}, as many of each")
            obs[key] = value
        return obs, lead

    def _actions(self, actions: Any, lead: torch.Size, *, more: bool = False) -> Tensor:
        """Return checked actions as the model sees them, ``(*lead, A)``; with ``more``, ``(*lead, I, A)``."""
        value, space = self._tensor(actions), self.codec.space
        axes = len(lead) + more
        if value.shape[axes:] != space.shape or value.shape[: len(lead)] != lead or value.dim() < axes:
            expected = ", ".join(map(str, [*lead, *(["I"] if more else []), *space.shape]))
            raise ValueError(f"actions {tuple(value.shape)}: expected ({expected})")
        valid = torch.isfinite(value.float()).all()
        if self.codec.discrete:
            low, count = (torch.as_tensor(one, device=self.device) for one in (self.codec.starts, self.codec.classes))
            index = value.reshape(-1, len(count)) - low
            valid = valid and not value.is_floating_point() and ((index >= 0) & (index < count)).all()
        if not valid:
            raise ValueError(f"actions of {value.dtype}: expected finite ones of {space}")
        flat = value.reshape(-1, *space.shape)
        flat = self.codec.from_env(flat if self.codec.discrete else flat.float())
        return flat.reshape(*value.shape[:axes], self.codec.width)


def psnr(mse: float) -> float:
    """Peak signal-to-noise ratio in dB of a mean squared error of values in [0, 1], at most 120."""
    return -10 * math.log10(max(mse, 1e-12))
