"""One play: the real simulator and dreams of it, step by step, driven by the same actions.

Every step is kept as a :class:`Moment`, so that the play can go back to any of them and continue there::

    moments   0     1     2    ...  now   ...  last
              |                     |          cut off when the play goes on from ``now``
              first frame           shown

The real side is one environment, which the model follows with its posterior. A dream is a state of the model without
observations: it begins as the posterior, and each action leads to a state drawn from the prior.

A session does not know the web server, and is used by one thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from torch import Tensor

from sheeplike.agents.spaces import ActionCodec
from sheeplike.data.episodes import Episode
from sheeplike.data.writing import NpzWriter
from sheeplike.inspection.dream.overlay import Places, Points
from sheeplike.inspection.dream.recording import MOST_SEED, PLACED, Recording
from sheeplike.inspection.model import States, TrainedModel, combine
from sheeplike.inspection.trust import WINDOW
from sheeplike.monitor.video import to_colour
from sheeplike.nn.cnn import to_unit
from sheeplike.options import CommandError, InvalidOption

Source = Literal["keys", "policy", "sample", "recorded"]
Driver = Literal["same", "policy", "random"]
GAIN = 8  # of the picture of what forced classes change
CROWD = 8  # dreams with other noise
RARELY = 4  # a scene is rendered every so many steps while the play cannot keep its rate
MAX_MOMENTS, MAX_BYTES = 4000, 2**30  # limits of the memory of a play; the oldest moments are dropped
NO_IMAGES = "the model decodes no images: expected agent.decoder=true and pixels/* or depth/* in agent.observations"


@dataclass(frozen=True)
class Settings:
    """Settings of the dreams, valid from a moment on."""

    drivers: tuple[Driver, ...] = ("same",)  # sources of each dream's actions
    forced: Mapping[int, int] = field(default_factory=dict)  # group to class, held in the first dream
    branched: int | None = None  # step at which the second dream began, if there is one
    salt: int = 0  # differs between branches, so that each has its own noise


@dataclass(eq=False)
class Moment:
    """One step of the play.

    Attributes:
        seen: camera to ``(1, H, W, C)``, of the real side, as are reward, ``is_first`` and so on.
        posterior: ``(1,)``, given all observations up to here.
        dreams: ``(n,)``, before classes are forced.
        env: the real side's state; None if it cannot be saved.
        film: pictures of the real side that the agent does not see, as ``pictures``.
        truth: ``privileged_state (1, N)``; None if the environment has none.
        episode, age: number of the episode, and of the step in it.
        blind: steps since the dreams were last set to the posterior.
        looks: pictures of the episode that this posterior had been given.
        by_hand: for each dream, names of what was changed in it since then.
        crowd: ``(CROWD,)``, the first dream with other noise; None if it is not shown.
        twin: ``(1,)``, the first dream without forced classes and with the same noise; None where none is forced.
        action: ``(1, ...)`` as the environment takes it, chosen here; None if not chosen yet.
        placed: positions ``(3,)`` of what was dragged in the simulator before that action.
        numbers: content of the strips, see :data:`STRIPS`; and ``alarm``, 1 while surprise is above the threshold.
        pictures, points: of the real side, then of each dream: camera to uint8 ``(H, W, 3)``, and to labelled points.
        extras: other pictures, by name.
        effect: mean change of the first dream's pixels by forced classes, of 255.
        recent: surprise at the steps of the episode before this one, without the first; at most as many as count.
        obs: all that the environment showed, while demonstrations are recorded.
        recorded: file of the episode that ended here; or the reason why it was not recorded, if it was to be.
    """

    seen: dict[str, Tensor]
    reward: float
    is_first: bool
    is_last: bool
    is_terminal: bool
    success: bool
    posterior: States
    dreams: States
    settings: Settings
    env: dict[str, Tensor] | None
    film: dict[str, np.ndarray]
    truth: Tensor | None
    episode: int = 1
    age: int = 0
    blind: int = 0
    looks: int = 1
    by_hand: tuple[frozenset[str], ...] = (frozenset(),)
    crowd: States | None = None
    twin: States | None = None
    action: Tensor | None = None
    placed: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: dict[str, list[float]] = field(default_factory=dict)
    pictures: list[dict[str, np.ndarray]] = field(default_factory=list)
    points: list[Points] = field(default_factory=list)
    extras: dict[str, np.ndarray] = field(default_factory=dict)
    effect: float = 0.0
    recent: tuple[float, ...] = ()
    obs: dict[str, np.ndarray] = field(default_factory=dict)
    recorded: Path | str | None = None


STRIPS = {
    "reward": "for arriving at the step; blue: given by the simulator, orange: dreamt",
    "value": "expected discounted sum of later rewards; blue: from the real frames, orange: from the dream",
    "continue": "predicted probability that the episode goes on; blue: from the real frames, orange: from the dream",
    "surprise": "KL of what was seen to what was expected, nats; red: the mean of five steps is above all those "
    "of the episodes that were played before the page opened",
    "error": "squared difference of the two frames, in [0, 1]",
}
"""Numbers of a moment, for the real side and each dream; ``surprise`` is of the first alone, ``error`` of dreams."""
RECORDED = {"real": ("value", "continue", "surprise"), "dream": ("reward", "value", "continue", "error")}


class Session:
    """The real simulator, one environment, and a model's dreams of it; ``places`` are drawn and can be dragged.

    Args:
        demos: makes the writer of the episodes that :meth:`teach` records.

    Attributes:
        taught: file of each recorded episode to its success.
        source: source of the actions.
        now: the moment that is shown, from which the play goes on.
        version: grows whenever moments are cut off or replaced.
        alarm: surprise, as a mean over :data:`~sheeplike.inspection.trust.WINDOW` steps, above which it is an alarm.
        exact: True if the real side can go back.
        filmed: True if the environment has a picture for people; it is rendered if ``scene``, and rarely if ``late``.

    Raises:
        CommandError: the model shows no images, or is of another environment.
    """

    def __init__(
        self,
        envs: VectorEnv,
        model: TrainedModel,
        *,
        seed: int = 0,
        places: Places | None = None,
        demos: Callable[[], NpzWriter] | None = None,
    ) -> None:
        self.envs, self.model, self.places = envs, model, places
        self._demos, self._writer = demos, None
        self.teaching, self.taught = False, {}
        check(envs, model)
        self._camera, self.scene, self.late = ThreadPoolExecutor(1, "scene"), True, False
        self._placed: dict[str, np.ndarray] = {}
        self._given: deque[Tensor] = deque(maxlen=2)  # two, so that a key pressed for less than a step counts too
        self._pressed = self.neutral()
        self.alarm = math.inf
        self.exact: bool = envs.exact_resume
        self.source: Source = "policy"
        self.version = 0
        self.start(seed)
        self.filmed = self.scene = bool(self.here.film)

    # --- commands ---------------------------------------------------------------------------------------------------

    def start(self, seed: int | None = None) -> None:
        """Start both sides anew, from a seed; None: the next one."""
        self.seed = (self.seed + 1) % (MOST_SEED + 1) if seed is None else seed
        self.version += 1
        self.recording: Recording | None = None
        if self.source == "recorded":
            self.source = "policy"
        self._branches = 0
        self._dropped: list[tuple[Tensor, Mapping[str, np.ndarray]]] = []  # of moments that are not in memory
        self._placed = {}
        self.moments = [self._arrive(0, self.envs.reset(seed=self.seed)[0])]
        self.first = self.now = 0

    def tick(self, *, newest: bool = False) -> None:
        """Take one step of both sides, from the moment shown; ``newest`` drops all given actions but the newest."""
        dreamt = self.here
        self._cut_off()
        if newest:
            self._given = deque([*self._given][-1:], maxlen=2)
        before = self.moments[-1]  # a real side that cannot go back continues from its newest moment
        action, placed = self._choose(before), self._placed
        if self.source == "recorded":
            placed = self.recording.placed(self.last)
        if placed and not before.is_last:  # a reset comes after the last step
            self.envs.load_state_dict(self.places.moved(before.env, placed))
        self._placed = {}
        try:
            obs, reward, terminated, truncated, info = self.envs.step(action)
            outcome = float(reward), bool(terminated), bool(truncated), bool(info.get("success", 0) == 1)
            moment = self._arrive(self.last + 1, obs, *outcome, action=action, before=before, dreamt=dreamt)
        except Exception:
            if self.exact:  # both sides stay where they were
                self.envs.load_state_dict(before.env)
            raise
        before.action, before.placed = action, placed
        self.moments.append(moment)
        while len(self.moments) > min(MAX_MOMENTS, max(MAX_BYTES // size(moment), 2)):
            gone = self.moments.pop(0)
            self._dropped.append((gone.action, gone.placed))
            self.first += 1
        self.now = self.last
        if self.teaching and moment.is_last:
            self._keep_demonstration()

    def teach(self) -> str:
        """Record the real side's whole episodes from the next one on, or no longer; return a remark."""
        if self._demos is None:
            raise CommandError("episodes cannot be recorded here")
        self._writer = self._writer or self._demos()
        self.teaching = not self.teaching
        if not self.teaching:
            return f"{len(self.taught)} recorded in {self._writer.place}; the unfinished episode is not"
        return f"whole episodes go to {self._writer.place}"

    def _ended(self) -> tuple[list[Moment], str]:
        """Return the moments of the episode up to now, and the reason if it cannot be recorded."""
        first = self.now - self.here.age
        moments = self.moments[max(first - self.first, 0) : self.now - self.first + 1]
        if first < self.first or not all(moment.obs for moment in moments):
            return moments, "Record was off when it began"
        return moments, "something was moved with the mouse" if any(moment.placed for moment in moments) else ""

    def _keep_demonstration(self) -> None:
        """Write the episode that has just ended, unless a part is missing or something was dragged in it."""
        moments, obstacle = self._ended()
        if obstacle:
            self.here.recorded = obstacle
            return
        obs = {key: np.stack([moment.obs[key] for moment in moments]) for key in self.here.obs}
        actions = torch.cat([*(moment.action for moment in moments[:-1]), self.neutral()])
        reward = np.array([0.0, *(moment.reward for moment in moments[1:])], np.float32)
        facts = {"policy": "page", "success": self.here.success}
        episode = Episode(obs, actions.cpu().numpy(), reward, self.here.is_terminal, info=facts)
        self.here.recorded = self._writer.add(episode)
        self.taught[self.here.recorded] = self.here.success

    def act(self, action: Any) -> None:
        """Set the action of ``source="keys"``, from now on."""
        given, codec = self._checked(action, ()), self.model.codec
        if not codec.discrete and (given.abs() > 1).any():
            nearest = given[0].clamp(-1, 1).tolist()
            raise InvalidOption("action", action, f"{codec.width} numbers from -1 to 1", nearest)
        self._given.append(given)

    def neutral(self) -> Tensor:
        """Return the action zero, or the first of discrete ones, ``(1, ...)``."""
        space, codec = self.envs.single_action_space, self.model.codec
        if codec.discrete:
            first = torch.as_tensor(codec.starts, dtype=torch.int64, device=self.envs.device)
            return first.reshape(1, *space.shape)
        return torch.zeros(1, *space.shape, device=self.envs.device)

    def choose(self, source: Source) -> None:
        """Set the source of the actions; a recorded episode is begun by :meth:`replay`."""
        self.source, self._pressed = source, self.neutral()
        self._given.clear()

    def drive(self, dream: int, driver: Driver) -> None:
        """Set the source of a dream's actions: those of the real side, its own policy, or chance."""
        drivers = list(self.here.settings.drivers)
        if dream >= len(drivers):
            raise InvalidOption("dream", dream, f"at most {len(drivers) - 1}; branch makes a second", len(drivers) - 1)
        drivers[dream] = driver
        self._change({"drivers": tuple(drivers)})

    def branch(self) -> None:
        """Split the dream into two futures, the second with noise of its own; a second call ends that one."""
        first = self.here.settings.drivers[:1]
        if len(self.here.dreams) > 1:
            alone = {"drivers": first, "branched": None}
            self._change(alone, dreams=self.here.dreams[:1], by_hand=self.here.by_hand[:1])
            return
        self._branches += 1
        settings = {"drivers": (*first, "same"), "branched": self.now, "salt": self._branches}
        self._change(settings, dreams=repeat(self.here.dreams, 2), by_hand=2 * self.here.by_hand)

    def spread(self) -> None:
        """Show :data:`CROWD` dreams with other noise, from the first dream as it is now; a second call ends them."""
        self._change(crowd=repeat(self.here.dreams, CROWD) if self.here.crowd is None else None)

    def check_reality(self) -> None:
        """Set the dreams to the posterior of the real side."""
        here = self.here
        self._change(**_awake(here.posterior, len(here.dreams), here), blind=0, looks=here.age + 1)

    def show_scene(self) -> None:
        """Render the picture for people from now on, or no longer."""
        self.scene = not self.scene
        if self.now == self.last:
            self._change(film=picture(self.envs.film()) if self.scene else {})

    def drag(self, panel: int, name: str, camera: str, x: float, y: float) -> str | None:
        """Drag a thing to a pixel: of the simulator, at its next step; of a dream, at once. Return a remark or None."""
        places, here = self.places, self.here
        movable = places.movable if places and self.exact else []
        if name not in movable:
            raise InvalidOption("name", name, f"one of {', '.join(movable) or 'none'}")
        if not panel and self.source == "recorded":
            raise CommandError("a recorded episode is played as it was: choose another actor to move things")
        if panel > len(here.dreams):
            raise InvalidOption("panel", panel, f"at most {len(here.dreams)}", len(here.dreams))
        if not places.project(here.truth, [name])[0].get(camera):
            raise InvalidOption("camera", camera, "one that shows it")
        if not panel:
            place = here.truth[0, places.positions[name]].cpu().double().numpy()
            self._placed = {name: places.aim(name, camera, x, y, place)}
            return None
        start, end = here.dreams[panel - 1 : panel], here.dreams[panel:]
        believed = places.read(start, self.model.decode(start))[0, places.positions[name]].cpu().double().numpy()
        changed, remark = places.dreamt(self.model, start, name, places.aim(name, camera, x, y, believed))
        self._change(dreams=combine([here.dreams[: panel - 1], changed, end]), by_hand=self._by_hand(panel, name))
        return remark

    def go_to(self, step: int) -> str | None:
        """Show a moment, from which the play goes on; return a remark on it or None."""
        if not self.first <= step <= self.last:
            nearest = min(max(step, self.first), self.last)
            raise InvalidOption("step", step, f"from {self.first} to {self.last}", nearest)
        self.now = step
        if step < self.last and not self.exact:
            name = self.envs.name
            return f"{name} cannot be saved: the dream goes on from step {step}, the real side from {self.last}"
        return None

    def force(self, group: int, one: int | None) -> None:
        """Hold a class in a group of the first dream; None releases it."""
        for name, value, count in (("group", group, self.model.groups), ("class", one, self.model.classes)):
            if value is not None and not 0 <= value < count:
                raise InvalidOption(name, value, f"from 0 to {count - 1}", min(max(value, 0), count - 1))
        forced = {key: held for key, held in self.here.settings.forced.items() if key != group}
        forced |= {} if one is None else {group: one}
        twin = (self.here.twin or self.here.dreams[:1]) if forced else None
        self._change({"forced": forced}, twin=twin, by_hand=self._by_hand(1, "classes"))

    def release(self) -> None:
        """Release all held classes."""
        self._change({"forced": {}}, twin=None)

    def replay(self, recording: Recording) -> None:
        """Start from the seed of a recorded episode, and play its actions again."""
        try:
            actions = self._checked(recording.actions, recording.actions.shape[:1])
        except InvalidOption as error:
            expected = f"expected those of {self.envs.name}, {error.expected}"
            raise CommandError(f"{recording.name}: actions {recording.actions.shape[1:]}; {expected}") from None
        if recording.moves.keys() - (self.places.movable if self.places else []):
            raise CommandError(f"{recording.name}: something was dragged that cannot be dragged here")
        self.start(recording.seed)
        actions = actions if self.model.codec.discrete else actions.clamp(-1, 1)
        self.source, self.recording = "recorded", replace(recording, actions=actions)

    # --- views ------------------------------------------------------------------------------------------------------

    @property
    def here(self) -> Moment:
        """The shown moment."""
        return self.moments[self.now - self.first]

    @property
    def last(self) -> int:
        """Number of the newest moment."""
        return self.first + len(self.moments) - 1

    @property
    def action(self) -> list[float] | list[int] | int:
        """Action that led to the shown moment, as it was executed; neutral at the first."""
        before = self.moments[self.now - self.first - 1] if self.now > self.first else None
        return (self.neutral() if before is None else before.action)[0].tolist()

    def strip(self, start: int) -> dict[str, list[Any]]:
        """Return the ``numbers`` of the moments from ``start`` on, and where an episode ``begins`` or ``ends``."""
        start = max(start, self.first)
        moments = [*enumerate(self.moments[start - self.first :], start)]
        begins = [step for step, moment in moments if moment.is_first]
        ends = [(step, ending(moment)) for step, moment in moments if moment.is_last]
        return {"numbers": [moment.numbers for _, moment in moments], "begins": begins, "ends": ends}

    @property
    def ends(self) -> list[str]:
        """Remarks on the episode's end, for the real side and each dream; empty if it goes on."""
        here = self.here
        return [ending(here), *("expects the end" if prob < 0.5 else "" for prob in here.numbers["continue"][1:])]

    @property
    def whole(self) -> bool:
        """True if the present episode can be recorded so far."""
        return not self._ended()[1]

    @property
    def handles(self) -> Points:
        """The real places of what can be dragged, in the pictures of the simulator."""
        movable = self.places.movable if self.places and self.exact else []
        return self.places.project(self.here.truth, movable)[0] if movable else {}

    @property
    def expected(self) -> np.ndarray:
        """Probabilities ``(S, K)`` of the first dream's classes, before one was drawn."""
        dreams = replace(self.here.dreams, logits=self.model.prior(self.here.dreams))
        return self.model.probabilities(dreams)[0].cpu().numpy()

    @property
    def classes(self) -> tuple[np.ndarray, np.ndarray]:
        """Classes ``(S,)`` of the real side, and of the first dream, drawn or forced."""
        sides = self.here.posterior, self._held(self.here)
        return tuple(states.stoch[0].argmax(-1).cpu().numpy() for states in sides)

    @property
    def films(self) -> list[np.ndarray | None]:
        """The picture for people at each moment."""
        return [next(iter(moment.film.values()), None) for moment in self.moments]

    def episode(self) -> dict[str, np.ndarray]:
        """Collect the play, as :mod:`~sheeplike.inspection.dream.recording` writes it."""
        moments = self.moments
        chosen = [*self._dropped, *((moment.action, moment.placed) for moment in moments[:-1])]
        actions = [action.cpu().numpy() for action, _ in chosen] or [self.neutral()[:0].cpu().numpy()]
        arrays = {"seed": np.array(self.seed), "begin": np.array(self.first), "action": np.concatenate(actions)}
        for name in {name for _, placed in chosen for name in placed}:
            arrays[f"{PLACED}{name}"] = np.array([placed.get(name, 3 * [np.nan]) for _, placed in chosen], np.float32)
        arrays["dream/blind"] = np.array([moment.blind for moment in moments])
        for name, dtype in (("reward", np.float32), ("is_first", bool), ("is_last", bool), ("is_terminal", bool)):
            arrays[name] = np.array([getattr(moment, name) for moment in moments], dtype)
        for n, side in enumerate(("real", "dream")):
            for key in self.model.cameras:
                arrays[f"{side}/{key}"] = np.stack([moment.pictures[n][key] for moment in moments])
            for name in RECORDED[side]:
                found = [moment.numbers[name][0 if name == "error" else n] for moment in moments]
                arrays[f"{side}/{name}"] = np.array(found, np.float32)
        return arrays

    # --- inside -----------------------------------------------------------------------------------------------------

    def _arrive(
        self,
        step: int,
        obs: Mapping[str, Tensor],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
        success: bool = False,
        *,
        action: Tensor | None = None,
        before: Moment | None = None,
        dreamt: Moment | None = None,
    ) -> Moment:
        """Make the first moment, or the one after an action in ``before`` (real side) and ``dreamt`` (dreams)."""
        model, began = self.model, before is None or before.is_last
        env = self.envs.state_dict() if self.exact else None
        # It is rendered while the model computes.
        film = self._camera.submit(self.envs.film) if self.scene and not (self.late and step % RARELY) else None
        observed = {key: obs[key].to(model.device) for key in model.observations}
        state = None if began else before.posterior
        posterior = model.observe_step(state, action, observed, seed=self._noise(step, 0))
        count, settings = (len(dreamt.dreams), dreamt.settings) if dreamt else (1, Settings())
        # The dreams begin with a new episode too.
        dreams = _awake(posterior, count, dreamt) if began else self._dream(dreamt, action, step)
        if not began:
            dreams |= {"age": before.age + 1, "blind": dreamt.blind + 1, "looks": dreamt.looks}
            dreams["recent"] = () if before.is_first else (*before.recent, *before.numbers["surprise"])[1 - WINDOW :]
        # The images are copied: the environment may use its memory again.
        seen = {key: obs[key].clone().to(model.device) for key in model.cameras}
        truth = obs["privileged_state"].clone() if self.places else None
        ends = terminated or truncated, terminated, success
        shown = picture(film.result()) if film else before.film if self.scene else {}
        shared = {"settings": settings, "env": env, "film": shown, "truth": truth}
        shared["obs"] = {key: value[0].cpu().numpy().copy() for key, value in obs.items()} if self.teaching else {}
        number = before.episode + began if before else 1
        return self._decode(Moment(seen, reward, began, *ends, posterior, episode=number, **shared, **dreams))

    def _choose(self, here: Moment) -> Tensor:
        """Choose the next action of the real side, ``(1, ...)``."""
        if self.source == "keys":
            self._pressed = self._given.popleft() if self._given else self._pressed
            return self._pressed
        if self.source == "recorded":
            if self.last >= len(self.recording.actions):
                raise CommandError("the saved play is over")
            return self.recording.actions[self.last][None]
        return self.model.act(here.posterior, sample=self.source == "sample", seed=self._noise(self.last + 1, 1))

    def _dream(self, before: Moment, action: Tensor, step: int) -> dict[str, Any]:
        """Return the dreams ``(n,)``, and what belongs to them, one step later."""
        settings, start = before.settings, self._held(before)
        dreams = {"dreams": self._imagine(start, settings, action, step, 9), "by_hand": before.by_hand}
        if before.twin:  # the same draws, as the first of as many dreams
            dreams["twin"] = self._imagine(combine([before.twin, start[1:]]), settings, action, step, 9)[:1]
        if before.crowd:
            crowd, like = self.model.set_classes(before.crowd, settings.forced), CROWD * settings.drivers[:1]
            dreams["crowd"] = self._imagine(crowd, replace(settings, drivers=like), action, step, 10)
        return dreams

    def _imagine(self, start: States, settings: Settings, action: Tensor, step: int, use: int) -> States:
        """Return states ``(n,)`` one step later, each with the action of its driver."""
        actions, salt, space = [], settings.salt, self.envs.single_action_space
        for n, driver in enumerate(settings.drivers):
            if driver == "policy":
                actions.append(self.model.act(start[n : n + 1], sample=False))
            elif driver == "random":
                space.seed(self._noise(step, 2 + n, salt))
                actions.append(torch.as_tensor(np.asarray(space.sample()), device=self.envs.device)[None])
            else:
                actions.append(action)
        chosen = torch.cat(actions)[:, None].to(self.model.device)
        return self.model.imagine(start, chosen, seed=self._noise(step, use, salt)).map(lambda x: x[:, 0])

    def _by_hand(self, panel: int, name: str) -> tuple[frozenset[str], ...]:
        """Return the names of what was changed in each dream, one more in that of a panel."""
        return tuple(names | ({name} if n == panel else set()) for n, names in enumerate(self.here.by_hand, 1))

    def _held(self, moment: Moment) -> States:
        """Return the dreams ``(n,)``, with the classes that are held in the first."""
        if not moment.settings.forced:
            return moment.dreams
        return combine([self.model.set_classes(moment.dreams[:1], moment.settings.forced), moment.dreams[1:]])

    def _change(self, settings: Mapping[str, Any] | None = None, **fields: Any) -> None:
        """Replace settings of the dreams, or other fields, at the present moment."""
        self._cut_off()
        here = self.here
        changed = replace(here, settings=replace(here.settings, **settings or {}), **fields)
        self.moments[self.now - self.first] = self._decode(changed)
        self.version += 1

    def _cut_off(self) -> None:
        """Remove the moments after the present one, if the real side can go back to it."""
        if self.now < self.last and self.exact:
            self.envs.load_state_dict(self.here.env)
            for moment in self.moments[self.now - self.first + 1 :]:
                if moment.recorded in self.taught:  # an end that is taken back did not happen
                    moment.recorded.unlink(missing_ok=True)
                    del self.taught[moment.recorded]
            del self.moments[self.now - self.first + 1 :]
            self.version += 1

    def _decode(self, moment: Moment) -> Moment:
        model, states = self.model, combine([moment.posterior, self._held(moment)])
        found = model.decode(states)
        errors = sum(
            (to_unit(found.frames[key][1:]) - to_unit(moment.seen[key])).square().flatten(1).mean(1)
            for key in model.cameras
        ) / len(model.cameras)
        recent = [*moment.recent, *model.kl(moment.posterior).tolist()]
        moment.numbers = {
            "alarm": [float(len(recent) == WINDOW and sum(recent) > WINDOW * self.alarm)],
            "reward": [moment.reward, *found.reward[1:].tolist()],
            "value": found.value.tolist(),
            "continue": found.cont.tolist(),
            "surprise": recent[-1:],
            "error": errors.tolist(),
        }
        moment.pictures = [moment.film | picture(moment.seen)]
        for n in range(1, len(states)):
            moment.pictures.append(picture({key: found.frames[key][n : n + 1] for key in model.cameras}))
        moment.points = [{} for _ in moment.pictures]
        if self.places:
            moment.points = self.places.project(self.places.read(states, found), self.places.positions)
        moment.extras = self._extras(moment)
        return moment

    def _extras(self, moment: Moment) -> dict[str, np.ndarray]:
        """Return the first camera of the dreams with other noise, and the effect of forced classes, :data:`GAIN` x."""
        extras, camera = {}, self.model.cameras[0]
        if moment.crowd:
            frames = self.model.decode(moment.crowd).frames[camera]
            extras = {f"noise {n + 1}": picture({camera: frames[n : n + 1]})[camera] for n in range(CROWD)}
        if moment.twin:
            unforced = picture({camera: self.model.decode(moment.twin).frames[camera]})[camera].astype(int)
            difference = np.abs(moment.pictures[1][camera] - unforced)
            moment.effect = float(difference.mean())
            extras["effect"] = (GAIN * difference).clip(max=255).astype(np.uint8)
        return extras

    def _checked(self, given: Any, lead: tuple[int, ...]) -> Tensor:
        """Return valid actions ``(*lead, ...)`` with one leading axis; continuous ones may be out of range."""
        space, codec = self.envs.single_action_space, self.model.codec
        expected = f"{codec.width} numbers from -1 to 1" if not codec.discrete else str(space)
        try:
            actions = np.asarray(given, np.float64)
        except (TypeError, ValueError, OverflowError):
            raise InvalidOption("action", given, expected) from None
        if actions.shape != (*lead, *space.shape) or not np.isfinite(actions).all():
            raise InvalidOption("action", given, expected)
        if codec.discrete:
            low = np.asarray(codec.starts).reshape(space.shape)
            possible = np.clip(np.round(actions), low, low + np.asarray(codec.classes).reshape(space.shape) - 1)
            if not np.array_equal(possible, actions):
                raise InvalidOption("action", given, expected, possible.astype(int).tolist())
        dtype = torch.int64 if codec.discrete else torch.float32
        return torch.as_tensor(actions, device=self.envs.device).to(dtype).reshape(-1, *space.shape)

    def _noise(self, step: int, use: int, salt: int = 0) -> int:
        """Derive a seed for the draws of a step, so that the same play draws the same numbers."""
        return int(np.random.SeedSequence((self.seed, step, use, salt)).generate_state(1)[0])


def check(envs: VectorEnv, model: TrainedModel) -> None:
    """Raise a CommandError if a model cannot be played beside an environment."""
    if not model.cameras:
        raise CommandError(NO_IMAGES)
    known, spaces = model.world.decoder.keys.spaces | model.observations, envs.single_observation_space.spaces
    for key in (*model.observations, *model.cameras):
        wanted, shown = (f"{one.dtype} {one.shape}" if one else "nothing" for one in (known[key], spaces.get(key)))
        if shown != wanted:
            raise CommandError(f"{envs.name}: {key} is {shown}: expected {wanted}, as the model was trained")
    taken, codec = ActionCodec(envs.single_action_space), model.codec
    if (taken.classes, taken.starts, taken.width) != (codec.classes, codec.starts, codec.width):
        expected = f"expected {codec.space}, as the model was trained"
        raise CommandError(f"{envs.name} takes {envs.single_action_space}: {expected}")


def picture(frames: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Convert frames ``(1, H, W, C)`` to uint8 ``(H, W, 3)``; depth to grey, dark where it is near."""
    shown = {}
    for key, frame in frames.items():
        frame = frame if frame.dtype == torch.uint8 else (to_unit(frame) * 255).to(torch.uint8)
        shown[key] = np.ascontiguousarray(to_colour(frame[0]).cpu().numpy())
    return shown


def ending(moment: Moment) -> str:
    """Return how the episode ended at a moment; empty if it goes on."""
    if not moment.is_last:
        return ""
    how = "success" if moment.success else "ended" if moment.is_terminal else "time is up"
    remark = f"; not recorded: {moment.recorded}" if isinstance(moment.recorded, str) else ""
    return f"episode {moment.episode}: {how} after {moment.age} steps{remark}"


def repeat(states: States, count: int) -> States:
    """Repeat states ``(1,)`` to ``(count,)``."""
    return states[:1].map(lambda x: x.expand(count, *x.shape[1:]).clone())


def _awake(posterior: States, count: int, before: Moment | None) -> dict[str, Any]:
    """Return ``count`` dreams that begin at the posterior, and the crowd and the twin if ``before`` has them."""
    found: dict[str, Any] = {"dreams": repeat(posterior, count), "by_hand": count * (frozenset(),)}
    if before and before.crowd:
        found["crowd"] = repeat(posterior, CROWD)
    return found | ({"twin": posterior} if before and before.twin else {})


def size(moment: Moment) -> int:
    """Bytes of a moment in memory."""
    states = [one for one in (moment.posterior, moment.dreams, moment.crowd, moment.twin) if one]
    arrays = [array for one in states for array in (*one.latent, one.logits)]
    arrays += [frame for side in (*moment.pictures, moment.extras) for frame in side.values()]
    return sum(array.nbytes for array in (*arrays, *moment.seen.values(), *(moment.env or {}).values()))
