"""One play: the real simulator and dreams of it, step by step, driven by the same actions.

Every step is kept as a :class:`Moment`, so that one can look back, and go on from any of them::

    moments   0     1     2    ...  now   ...  last
              |                     |          what was played; it is cut off when the play goes on from ``now``
              first frame           what is shown

The real side is one world; the model follows it and believes what its posterior says. A dream is a state of the model
that sees nothing: it begins as what is believed, and each action leads to a state drawn from the prior.

Nothing here knows of the web. A session is used by one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.spaces import ActionCodec
from sheeplike.analysis.dream.recording import Recording
from sheeplike.analysis.model import Expected, States, TrainedModel
from sheeplike.monitor.video import to_colour
from sheeplike.nn.cnn import to_unit
from sheeplike.options import CommandError, InvalidOption

Source = Literal["keys", "policy", "sample", "recorded"]
Driver = Literal["same", "policy", "random"]
Point = tuple[str, float, float]
Points = Callable[[States], Mapping[str, Sequence[Point]]]
"""Labelled points ``(label, x, y)`` by camera, in pixels of its frame from the top left corner, of states ``()``."""

MOST_STEPS = 4000  # moments kept; the oldest go first
BATCH = 64  # moments decoded at once
MOST_SEED = 2**31 - 1
MOST_PSNR = 99.0  # dB, of pictures that are equal
NO_IMAGES = "the model shows no images: expected pixels/* or depth/* in agent.observations or agent.targets"
DREAMS = ("dream", "dream B")


@dataclass(eq=False)
class Moment:
    """One step of the play.

    Attributes:
        seen: observation to ``(1, ...)``, of the real side.
        reward: for arriving here, of the real side.
        is_first, is_last, is_terminal: of the real side's episode.
        belief: ``(1,)``, what the model believes, having seen all up to here.
        dreams: ``(n,)``, of each dream.
        drivers: of each dream.
        env: the real side's state, or None where it cannot be saved.
        numbers: what the strips show; see :data:`STRIPS`.
        action: ``(1, ...)`` as the environment takes it, chosen here; None: nothing was, yet.
    """

    seen: dict[str, Tensor]
    reward: float
    is_first: bool
    is_last: bool
    is_terminal: bool
    belief: States
    dreams: States
    drivers: tuple[Driver, ...]
    env: dict[str, Tensor] | None
    numbers: dict[str, list[float]] = field(default_factory=dict)
    action: Tensor | None = None


STRIPS = {
    "reward": "for arriving at the step",
    "value": "expected discounted sum of later rewards",
    "continue": "probability that the episode goes on",
    "surprise": "KL of what was seen to what was expected, nats",
    "error": "squared difference of the two pictures, in [0, 1]",
}
"""Numbers of a moment: of the real side, of each dream; ``surprise`` has the first alone, ``error`` lacks it."""


@dataclass(frozen=True)
class Panel:
    """One side as it is shown.

    Attributes:
        frames: camera to uint8 ``(H, W, 3)``.
        points: camera to labelled points over its frame.
        driver: of a dream, who chooses its actions.
        end: what to say of the end of an episode, or nothing.
    """

    name: str
    frames: dict[str, np.ndarray]
    points: dict[str, list[Point]]
    driver: Driver | None
    end: str


@dataclass(frozen=True)
class View:
    """What there is to see now.

    Attributes:
        step, last: the moment shown, and the newest.
        first: the oldest that is kept.
        panels: the real side, then the dreams.
        psnr: of each dream's pictures to the real ones, dB.
        expected: ``(S, K)``, probabilities of the first dream's classes.
        drawn: ``(S,)``, those that were drawn, or are forced.
        believed: ``(S,)``, those of the real side.
    """

    step: int
    last: int
    first: int
    panels: list[Panel]
    psnr: list[float]
    expected: np.ndarray
    drawn: np.ndarray
    believed: np.ndarray


class Session:
    """The real simulator and dreams of it.

    Args:
        envs: one world.
        model: that it is dreamt with.
        seed: of the first start.
        points: what to draw over the frames, or None.

    Attributes:
        source: who chooses the actions.
        forced: group to class, held in the first dream.
        now: the moment that is shown, and that the play goes on from.
        version: grows when moments were cut off or replaced.
        exact: whether the real side can go back.

    Raises:
        CommandError: the model shows no images, or is of another environment.
    """

    def __init__(self, envs: VectorEnv, model: TrainedModel, *, seed: int = 0, points: Points | None = None) -> None:
        self.envs, self.model, self.points = envs, model, points
        check(envs, model)
        self._given: deque[Tensor] = deque(maxlen=2)  # two: a key that was down for less than a step counts too
        self._pressed = self.neutral()
        self.exact: bool = getattr(envs, "exact_resume", False)
        self.source: Source = "policy"
        self.salt = 0  # of the noise; a branch draws anew
        self.forced: dict[int, int] = {}
        self.version = 0
        self._last_decoded: tuple[Moment, dict[int, int], Expected] | None = None
        self.start(seed)

    # --- what one can do --------------------------------------------------------------------------------------------

    def start(self, seed: int | None = None) -> None:
        """A new start of both sides, from a seed; None: the next one."""
        self.seed = (self.seed + 1) % (MOST_SEED + 1) if seed is None else seed
        self.forced, self.version, self.salt = {}, self.version + 1, 0  # before anything is drawn
        obs, _ = self.envs.reset(seed=self.seed)
        seen = self._kept(obs)
        belief = self.model.follow(None, None, self._observed(seen), seed=self._noise(0, 0))
        self.mark: int | None = None
        self.recording: Recording | None = None
        if self.source == "recorded":
            self.source = "policy"
        self.first = self.now = 0
        first = Moment(seen, 0.0, True, False, False, belief, belief, ("same",), self._saved())
        self.moments = [self._judged(first)]

    def tick(self) -> None:
        """One step of both sides, from the moment shown."""
        past = self.now < self.last
        dreamt = self.here
        if past and self.exact:
            self.envs.load_state_dict(self.here.env)
            del self.moments[self.now - self.first + 1 :]
            self.version += 1
        before = self.moments[-1]  # of a real side that cannot go back, the newest
        action = self._choose(before)
        before.action = action
        obs, reward, terminated, truncated, _ = self.envs.step(action)
        seen, step, began = self._kept(obs), self.last + 1, before.is_last
        followed = (None, None) if began else (before.belief, action)
        belief = self.model.follow(*followed, self._observed(seen), seed=self._noise(step, 0))
        # The dreams begin with a new episode too.
        dreams = repeat(belief, len(dreamt.drivers)) if began else self._dream(dreamt, action, step)
        moment = Moment(
            seen,
            float(reward),
            began,
            bool(terminated | truncated),
            bool(terminated),
            belief,
            dreams,
            dreamt.drivers,
            self._saved(),
        )
        self.moments.append(moment)
        if len(self.moments) > MOST_STEPS:
            del self.moments[0]
            self.first += 1
        self.now = self.last
        self._judged(moment)

    def act(self, action: Any) -> None:
        """The action of ``source="keys"``, from now on.

        Raises:
            InvalidOption: it is none of the environment's.
        """
        space, codec = self.envs.single_action_space, self.model.codec
        expected = f"{codec.width} numbers from -1 to 1" if not codec.discrete else str(space)
        try:
            given = np.asarray(action, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidOption("action", action, expected) from None
        if given.shape != space.shape or not np.isfinite(given).all():
            raise InvalidOption("action", action, expected)
        low = np.asarray(codec.starts if codec.discrete else -1.0)
        high = low + np.asarray(codec.classes) - 1 if codec.discrete else np.asarray(1.0)
        if codec.discrete and not space.shape:
            low, high = low[0], high[0]
        nearest = np.clip(np.round(given) if codec.discrete else given, low, high)
        if not np.array_equal(nearest, given):
            raise InvalidOption("action", action, expected, nearest.astype(int if codec.discrete else float).tolist())
        dtype = torch.int64 if codec.discrete else torch.float32
        self._given.append(torch.as_tensor(given, device=self.envs.device).to(dtype)[None])

    def neutral(self) -> Tensor:
        """``(1, ...)``: no action where there is such a thing, or else the first."""
        space, codec = self.envs.single_action_space, self.model.codec
        if codec.discrete:
            first = torch.as_tensor(codec.starts, dtype=torch.int64, device=self.envs.device)
            return first.reshape(1, *space.shape)
        return torch.zeros(1, *space.shape, device=self.envs.device)

    def choose(self, source: Source) -> None:
        """Who chooses the actions; a recorded episode is begun by :meth:`replay`."""
        self.source, self._pressed = source, self.neutral()
        self._given.clear()

    def drive(self, dream: int, driver: Driver) -> None:
        """Who chooses the actions of a dream: those of the real side, its own policy, or chance.

        Raises:
            InvalidOption: there is no such dream.
        """
        drivers = list(self.here.drivers)
        if dream >= len(drivers):
            raise InvalidOption("dream", dream, f"at most {len(drivers) - 1}; branch makes a second", len(drivers) - 1)
        drivers[dream] = driver
        self.here.drivers = tuple(drivers)

    def branch(self) -> None:
        """Two futures of the present dream, with noise of their own; a second call ends the second."""
        here = self.here
        if len(here.drivers) > 1:
            self._replace(here, dreams=here.dreams[:1], drivers=here.drivers[:1])
            return
        self.salt += 1
        self.mark = self.now
        self._replace(here, dreams=repeat(here.dreams, 2), drivers=(here.drivers[0], "same"))

    def check_reality(self) -> None:
        """The dreams become what is believed now, having seen the real side."""
        self._replace(self.here, dreams=repeat(self.here.belief, len(self.here.drivers)))

    def go_to(self, step: int) -> str | None:
        """Look at a moment, and go on from there; returns what to say about it.

        Raises:
            InvalidOption: it is not kept.
        """
        if not self.first <= step <= self.last:
            nearest = min(max(step, self.first), self.last)
            raise InvalidOption("step", step, f"from {self.first} to {self.last}", nearest)
        self.now = step
        if step < self.last and not self.exact:
            name = self.envs.name
            return f"{name} cannot be saved: the dream goes on from step {step}, the real side from {self.last}"
        return None

    def force(self, group: int, one: int | None) -> None:
        """Hold a class in a group of the first dream; None releases it.

        Raises:
            InvalidOption: there is no such group or class.
        """
        for name, value, count in (("group", group, self.model.groups), ("class", one, self.model.classes)):
            if value is not None and not 0 <= value < count:
                raise InvalidOption(name, value, f"from 0 to {count - 1}", min(max(value, 0), count - 1))
        self.forced.pop(group, None)
        if one is not None:
            self.forced[group] = one
        self._replace(self.here)

    def release(self) -> None:
        """Let go of all classes that are held."""
        self.forced = {}
        self._replace(self.here)

    def replay(self, recording: Recording) -> None:
        """A new start from the seed of a recorded episode, whose actions are played again.

        Raises:
            CommandError: its actions are of another environment.
        """
        shape = self.envs.single_action_space.shape
        if recording.actions.shape[1:] != shape:
            raise CommandError(
                f"{recording.name}: actions {recording.actions.shape[1:]}; expected those of {self.envs.name}, {shape}"
            )
        self.start(recording.seed)
        self.source, self.recording = "recorded", recording

    # --- what there is to see ---------------------------------------------------------------------------------------

    @property
    def here(self) -> Moment:
        """The moment that is shown."""
        return self.moments[self.now - self.first]

    @property
    def last(self) -> int:
        """The newest moment."""
        return self.first + len(self.moments) - 1

    @property
    def finished(self) -> bool:
        """Whether a recorded episode has no further action."""
        step = self.now if self.exact else self.last
        return self.recording is not None and self.source == "recorded" and step >= len(self.recording.actions)

    @property
    def action(self) -> list[float] | list[int] | int:
        """That led to the moment shown; at the first one, none."""
        before = self.moments[self.now - self.first - 1] if self.now > self.first else None
        return (self.neutral() if before is None else before.action)[0].tolist()

    def strip(self, start: int) -> dict[str, list[Any]]:
        """``numbers`` of the moments from ``start`` on, and which of them ``begins`` an episode."""
        moments = self.moments[max(start - self.first, 0) :]
        begins = [self.last + 1 - len(moments) + n for n, moment in enumerate(moments) if moment.is_first]
        return {"numbers": [moment.numbers for moment in moments], "begins": begins}

    def view(self) -> View:
        """What there is to see at the present moment."""
        here, model = self.here, self.model
        shown = self._held(here.dreams)
        frames = self._decoded(here).frames
        real = {key: here.seen[key][0] for key in model.cameras}
        end = "the episode has ended" if here.is_terminal else "the episode was cut" if here.is_last else ""
        panels = [Panel("real", picture(real), self._points(here.belief), None, end)]
        for n, driver in enumerate(here.drivers):
            dreamt = {key: frames[key][1 + n] for key in model.cameras}
            end = "expects the end" if here.numbers["continue"][1 + n] < 0.5 else ""
            panels.append(Panel(DREAMS[n], picture(dreamt), self._points(shown[n : n + 1]), driver, end))
        return View(
            self.now,
            self.last,
            self.first,
            panels,
            [psnr(error) for error in here.numbers["error"]],
            model.probabilities(here.dreams[:1])[0].cpu().numpy(),
            shown.stoch[0].argmax(-1).cpu().numpy(),
            here.belief.stoch[0].argmax(-1).cpu().numpy(),
        )

    def episode(self) -> dict[str, np.ndarray]:
        """All that was played, as :mod:`~sheeplike.analysis.dream.recording` writes it; without what is held."""
        moments, cameras = self.moments, self.model.cameras
        arrays = {
            "seed": np.array(self.seed),
            "begin": np.array(self.first),
            "action": np.concatenate([moment.action.cpu().numpy() for moment in moments[:-1]] or [self._none()]),
            "reward": np.array([moment.reward for moment in moments], np.float32),
        }
        for flag in ("is_first", "is_last", "is_terminal"):
            arrays[flag] = np.array([getattr(moment, flag) for moment in moments])
        for name in ("value", "continue", "surprise", "error"):
            arrays[name] = np.array([moment.numbers[name][0] for moment in moments], np.float32)
        seen = [picture({key: moment.seen[key][0] for key in cameras}) for moment in moments]
        dreamt = []
        for some in (moments[n : n + BATCH] for n in range(0, len(moments), BATCH)):
            frames = self.model.decode(join([moment.dreams[:1] for moment in some])).frames
            dreamt += [picture({key: frames[key][n] for key in cameras}) for n in range(len(some))]
        for key in cameras:
            arrays[f"real/{key}"] = np.stack([frames[key] for frames in seen])
            arrays[f"dream/{key}"] = np.stack([frames[key] for frames in dreamt])
        return arrays

    # --- inside -----------------------------------------------------------------------------------------------------

    def _choose(self, here: Moment) -> Tensor:
        """``(1, ...)``: the next action of the real side."""
        if self.source == "keys":
            self._pressed = self._given.popleft() if self._given else self._pressed
            return self._pressed
        if self.source == "recorded":
            recorded = self.recording.actions[min(self.last, len(self.recording.actions) - 1)]
            return torch.as_tensor(recorded, device=self.envs.device)[None]
        return self.model.act(here.belief, sample=self.source == "sample", seed=self._noise(self.last + 1, 1))

    def _dream(self, before: Moment, action: Tensor, step: int) -> States:
        """The dreams ``(n,)``, one step on."""
        start, actions = self._held(before.dreams), []
        for n, driver in enumerate(before.drivers):
            seed = self._noise(step, 2 + n)
            if driver == "policy":
                actions.append(self.model.act(start[n : n + 1], seed=seed))
            elif driver == "random":
                actions.append(self._random(seed))
            else:
                actions.append(action)
        chosen = torch.cat(actions)[:, None].to(self.model.device)
        return self.model.imagine(start, chosen, seed=self._noise(step, 9)).map(lambda x: x[:, 0])

    def _none(self) -> np.ndarray:
        """No actions, ``(0, ...)``."""
        return self.neutral()[:0].cpu().numpy()

    def _random(self, seed: int) -> Tensor:
        space = self.envs.single_action_space
        space.seed(seed)
        return torch.as_tensor(np.asarray(space.sample()), device=self.envs.device)[None]

    def _held(self, dreams: States) -> States:
        """With the classes that are held in the first dream."""
        if not self.forced:
            return dreams
        return join([self.model.force(dreams[:1], self.forced), dreams[1:]])

    def _replace(self, moment: Moment, **changed: Any) -> None:
        """The present moment with other dreams; what came after it is cut off when the play goes on."""
        self.moments[self.now - self.first] = self._judged(replace(moment, **changed))
        self.version += 1

    def _judged(self, moment: Moment) -> Moment:
        """Fill in what the strips show."""
        found = self._decoded(moment)
        cameras = self.model.cameras
        errors = sum(
            (to_unit(found.frames[key][1:]) - to_unit(moment.seen[key])).square().flatten(1).mean(1) for key in cameras
        ) / len(cameras)
        moment.numbers = {
            "reward": [moment.reward, *found.reward[1:].tolist()],
            "value": found.value.tolist(),
            "continue": found.cont.tolist(),
            "surprise": self.model.kl(moment.belief).tolist(),
            "error": errors.tolist(),
        }
        return moment

    def _decoded(self, moment: Moment) -> Expected:
        """What is expected where the real side is believed to be, and in each dream: ``(1 + n,)``; once computed."""
        forced = dict(self.forced)
        if self._last_decoded is None or self._last_decoded[:2] != (moment, forced):
            found = self.model.decode(join([moment.belief, self._held(moment.dreams)]))
            self._last_decoded = moment, forced, found
        return self._last_decoded[2]

    def _points(self, states: States) -> dict[str, list[Point]]:
        return {} if self.points is None else {key: list(found) for key, found in self.points(states[0]).items()}

    def _kept(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of what the model sees or shows: the environment may use its memory again."""
        keys = {*self.model.observations, *self.model.cameras}
        return {key: obs[key].clone().to(self.model.device) for key in sorted(keys)}

    def _observed(self, seen: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: seen[key] for key in self.model.observations}

    def _saved(self) -> dict[str, Tensor] | None:
        return self.envs.state_dict() if self.exact else None

    def _noise(self, step: int, use: int) -> int:
        """A seed for what is drawn at a step: the same play draws the same, a branch draws anew."""
        words = (self.seed, step, use, self.salt)
        return int(np.random.SeedSequence(words).generate_state(1)[0])


def check(envs: VectorEnv, model: TrainedModel) -> None:
    """Raise where a model cannot be played beside an environment.

    Raises:
        CommandError: it shows no images, or sees or does something else.
    """
    if not model.cameras:
        raise CommandError(NO_IMAGES)
    space = envs.single_observation_space
    for key, known in {**model.observations, **{key: None for key in model.cameras}}.items():
        wanted = known or model.world.decoder.keys.spaces[key]
        if key not in space.spaces:
            raise CommandError(f"{envs.name} shows no {key}: expected the environment that the model was trained in")
        if (space[key].shape, space[key].dtype) != (wanted.shape, wanted.dtype):
            raise CommandError(
                f"{envs.name} shows {key} as {space[key].dtype} {space[key].shape}: expected {wanted.dtype} "
                f"{wanted.shape}, as the model was trained"
            )
    actions, known = envs.single_action_space, model.codec.space
    taken, codec = ActionCodec(actions), model.codec
    if (taken.classes, taken.starts, taken.width) != (codec.classes, codec.starts, codec.width):
        raise CommandError(f"{envs.name} takes {actions}: expected {known}, as the model was trained")


def picture(frames: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Frames ``(H, W, C)`` as people see them: uint8 ``(H, W, 3)``; depth in grey, what is near dark."""
    shown = {}
    for key, frame in frames.items():
        frame = frame if frame.dtype == torch.uint8 else (to_unit(frame) * 255).to(torch.uint8)
        shown[key] = np.ascontiguousarray(to_colour(frame).cpu().numpy())
    return shown


def psnr(error: float) -> float:
    """Peak signal-to-noise ratio in dB, of a mean squared error of pixels in [0, 1]."""
    return MOST_PSNR if error <= 0 else min(-10 * math.log10(error), MOST_PSNR)


def repeat(states: States, count: int) -> States:
    """States ``(1,)`` as ``(count,)``."""
    return states[:1].map(lambda x: x.expand(count, *x.shape[1:]).clone())


def join(parts: Sequence[States]) -> States:
    """States one behind the other along the first axis."""
    return States(*(torch.cat([getattr(part, name) for part in parts]) for name in ("deter", "stoch", "logits")))
