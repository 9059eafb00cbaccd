"""Evidence for or against a trained world model: the simulator forked beside the dream.

All worlds are played to the same step and saved there. From that state the simulator goes on unchanged or with other
physics, colours and so on, and the model dreams on::

    reset -- context --+-- unchanged:  the policy acts, and its actions are recorded
                       +-- changed:    the same actions, or the policy
                       +-- dream:      the same actions, or the policy

Measures: drift by step and policies ranked in dream and simulator (after arXiv 2606.15032 and 2607.07196), dreams that
do not follow when the real return falls (arXiv 2607.05966), dreamt minus real returns, and surprise as an alarm.

Shape letters: ``N`` worlds, ``I`` steps after the fork.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mujoco
import torch
import torch.nn.functional as F
from gymnasium.vector import VectorEnv
from scipy import stats
from torch import Tensor

from sheeplike.agents.agent import own_randomness
from sheeplike.inspection.dissect import CONTEXT, HORIZON, Numbers
from sheeplike.inspection.episodes import random_actions
from sheeplike.inspection.model import States, TrainedModel
from sheeplike.nn.cnn import to_unit
from sheeplike.options import CommandError
from sheeplike.run.evaluation import EVALUATION_SEED, MAX_EPISODES, mean_interval, wilson_interval

LONGEST = 200  # steps after the fork that are played to tell outcomes and alarms
BLENDS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # shares of random actions in the policies that are ranked
WINDOW = 5  # steps over which the alarm averages surprise
EXPLOITABLE = 0.1  # share of the return by which a dream may exceed the simulator

Act = Callable[[States], Tensor]
Change = Mapping[str, Any]


def _scaled(field: str | list[str], low: float, high: float, **others: Any) -> dict[str, Any]:
    return {"field": field, "operation": "scale", "distribution": {"uniform": [low, high]}, **others}


_LINES = {
    "gravity": _scaled("opt.gravity", 0.5, 2.0, component=[2]),
    "friction": _scaled("geom_friction", 0.25, 4.0, component=[0], shared=["elements"]),
    "mass": _scaled(["body_mass", "body_inertia"], 0.25, 4.0, shared=["elements", "components"]),
    "damping": _scaled("dof_damping", 0.25, 4.0, shared=["elements"]),
    "colours": _scaled("geom_rgba", 0.2, 1.8, component=[0, 1, 2]),
    "brightness": _scaled("pixels", 0.5, 1.5, shared=["elements", "components"]),
    "camera": {"field": "cam_pos", "operation": "add", "distribution": {"uniform": [-0.05, 0.05]}},
    "delay": {"field": "action.delay", "operation": "set", "distribution": {"choice": [0, 1, 2, 3]}},
}
_PREFIX = "\U0010ffff"  # sorted after the names of all runs: draws stand in the order of names
_SEEN = ("colours", "brightness", "camera")  # lines that need a camera
_NEUTRAL = {name: 0.0 if name in ("camera", "delay") else 1.0 for name in _LINES}
DRIFTS = ("unchanged", "friction x 0.25", "mass x 4", "gravity x 2", "action 1 step late")
"""Changes whose frames are compared with the dream's."""
CHANGES: dict[str, Change] = {
    "unchanged": {},
    **{f"friction x {by:g}": {"friction": by} for by in (0.25, 0.5, 2.0, 4.0)},
    **{f"mass x {by:g}": {"mass": by} for by in (0.25, 4.0)},
    **{f"gravity x {by:g}": {"gravity": by} for by in (0.5, 2.0)},
    "damping x 4": {"damping": 4.0},
    "action 1 step late": {"delay": 1},
    "action 3 steps late": {"delay": 3},
    "brightness x 0.5": {"brightness": 0.5},
    "other colours": {"colours": None},  # drawn
    "camera up to 5 cm off": {"camera": None},
}


def lines(scene: mujoco.MjModel, cameras: Collection[str], own: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the lines of randomization that forked worlds need behind their ``own``, for a model with ``cameras``."""
    known = {name: line for name, line in _LINES.items() if cameras or name not in _SEEN}
    if any("action.delay" in line["field"] for line in own.values()):  # "unchanged" would take the run's delay away
        del known["delay"]
    names = sorted({key.partition("/")[2] for key in cameras})
    fixed = [name for name in names if scene.camera(name).mode == mujoco.mjtCamLight.mjCAMLIGHT_FIXED]
    if fixed:
        known["camera"] = known["camera"] | {"of": fixed}
    else:  # others follow their bodies, and cannot be moved
        known.pop("camera", None)
    return {_PREFIX + name: line for name, line in known.items()}


_VARIATION = "[0]"  # prefix, in the saved state of worlds, of what randomization has drawn


@dataclass(frozen=True)
class Rollout:
    """Steps after a fork, on the CPU, ``(N, I)`` each.

    Attributes:
        frames: camera to ``(N, I, H, W, C)``; empty where they were not asked for.
        action: ``(N, I, ...)`` as the environment takes it, which led to the step.
        weight: 1 until the episode has ended, then 0; of a dream the probability that it has not ended. Worlds whose
            episode ended before the fork have 0 throughout, and count nowhere.
        surprise: KL in nats of what was seen to what was expected; 0 in a dream.
        success: reached so far; NaN in a dream, and if the task defines none.
    """

    frames: dict[str, Tensor]
    action: Tensor
    reward: Tensor
    weight: Tensor
    surprise: Tensor
    success: Tensor

    @property
    def counted(self) -> Tensor:
        """``(N,)`` bool: the episode had not ended before the fork."""
        return self.weight[:, 0] > 0

    @property
    def returns(self) -> Tensor:
        """Sums of rewards of the worlds that are :attr:`counted`."""
        return (self.reward * self.weight).sum(1)[self.counted]


class Fork:
    """Worlds at one state, from which simulator and dream go on.

    Args:
        envs: worlds with ``added`` at the end of their randomization.
        added: names of these :func:`lines`.
        seed: of the worlds and of all draws; as of :func:`sheeplike.run.evaluation.play`.

    Attributes:
        start: posterior states ``(N,)`` at the fork.
        alive: ``(N,)``, 1 in worlds whose episode has not ended by then, else 0.

    Raises:
        CommandError: all episodes have ended before.
    """

    def __init__(self, model: TrainedModel, envs: VectorEnv, added: Collection[str], *, seed: int) -> None:
        self.model, self.envs, self.seed, self.added = model, envs, seed, added
        obs = self._reset({})
        torch.manual_seed(seed)
        state, self.alive = model.observe_step(None, None, obs), torch.ones(envs.num_envs)
        for _ in range(CONTEXT - 1):
            action = model.act(state)
            obs, _, terminated, truncated, _ = envs.step(action)
            state = model.observe_step(state, action, self._seen(obs))
            self.alive = self.alive * ~(terminated | truncated).cpu()
        if not self.alive.any():
            raise CommandError(f"trust=true: every episode ended within {CONTEXT} steps: expected longer ones")
        self.start, self._saved = state, envs.state_dict()

    def real(self, act: Act, steps: int, change: Change = MappingProxyType({}), *, frames: bool = False) -> Rollout:
        """Go on in the simulator, unchanged or changed; ``act`` gets the posterior states."""
        saved = dict(self._saved)
        if change:
            self._reset(change)
            saved |= {name: value for name, value in self.envs.state_dict().items() if name.startswith(_VARIATION)}
        self.envs.load_state_dict(saved)
        torch.manual_seed(self.seed + 1)
        state, weight, rows = self.start, self.alive, []
        for _ in range(steps):
            action = act(state)
            obs, reward, terminated, truncated, info = self.envs.step(action)
            state = self.model.observe_step(state, action, self._seen(obs))
            row = {"action": action, "reward": reward, "success": info["success"].float()}
            row |= {"surprise": self.model.kl(state)}
            row |= {key: obs[key] for key in self.model.cameras if frames}
            rows.append({name: value.cpu().clone() for name, value in row.items()} | {"weight": weight})
            weight = weight * ~(terminated | truncated).cpu()
        return self._joined(rows)

    def dream(self, act: Act, steps: int, *, frames: bool = False) -> Rollout:
        """Go on in the dream; ``act`` gets the imagined states."""
        torch.manual_seed(self.seed + 2)
        state, weight, rows = self.start, self.alive.to(self.model.device), []
        for _ in range(steps):
            action = act(state)
            state = self.model.imagine(state, action.unsqueeze(1))[:, 0]
            row = {"action": action, "reward": self.model.reward(state).pred(), "weight": weight}
            row |= {"surprise": torch.zeros_like(weight), "success": torch.full_like(weight, torch.nan)}
            shown = self.model.decode(state).frames if frames else {}
            row |= {key: shown[key] for key in self.model.cameras if frames}
            rows.append({name: value.cpu() for name, value in row.items()})
            weight = weight * self.model.continue_prob(state)
        return self._joined(rows)

    def blend(self, share: float) -> Act:
        """Return the policy with a share of random actions."""

        def act(state: States) -> Tensor:
            own, other = self.model.act(state), random_actions(self.envs)
            mask = torch.rand(len(own), device=own.device) < share
            return torch.where(mask.reshape(-1, *[1] * (own.dim() - 1)), other, own)

        return act

    def _reset(self, change: Change) -> dict[str, Tensor]:
        """Begin the episodes, always the same ones, with a change from their first step on."""
        chosen = {_PREFIX + name: value for name, value in (_NEUTRAL | dict(change)).items() if value is not None}
        values = {name: chosen[name] for name in self.added if name in chosen}
        obs, _ = self.envs.reset(seed=self.seed, options={"variation": values})
        return self._seen(obs)

    def _seen(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the model observes; draws of :func:`lines` at the end of vectors are cut off."""
        spaces = self.model.observations
        return {key: obs[key] if obs[key].dim() > 2 else obs[key][:, : spaces[key].shape[0]] for key in spaces}

    def _joined(self, rows: list[dict[str, Tensor]]) -> Rollout:
        joined = {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}
        frames = {key: joined.pop(key) for key in self.model.cameras if key in joined}
        return Rollout(frames, **joined)


@torch.no_grad()
def measure(model: TrainedModel, envs: VectorEnv, added: Collection[str], *, seed: int = 0) -> Numbers:
    """Measure how far a model can be trusted; the numbers are nested by name.

    Args:
        envs, added: as of :class:`Fork`.
        seed: as of :func:`sheeplike.run.evaluation.play`.
    """
    first = EVALUATION_SEED + seed * MAX_EPISODES
    long = min(LONGEST, max(envs.episode_length - (CONTEXT - 1), 1))
    short = min(HORIZON, long)
    with own_randomness(envs.device):
        others = Fork(model, envs, added, seed=first + envs.num_envs).real(model.act, long)
        fork = Fork(model, envs, added, seed=first)
        usual = fork.real(model.act, long, frames=True)
        known = {name: change for name, change in CHANGES.items() if {_PREFIX + key for key in change} <= {*added}}
        watched = {name: fork.real(model.act, long, change) for name, change in known.items() if change}
        same = {name: fork.real(_replay(usual), short, known[name], frames=True) for name in DRIFTS if name in known}
        dream, own = fork.dream(_replay(usual), short, frames=True), fork.dream(model.act, long)
        acts = {f"{share:.0%} random": fork.blend(share) for share in BLENDS}
        pairs = {name: (fork.dream(act, short), fork.real(act, short)) for name, act in acts.items()}
    return {
        "starts": int(usual.counted.sum()),
        "context": CONTEXT,
        "steps": short,
        "drift": {name: _drift(model, one, usual) for name, one in ({"dream": dream} | same).items()},
        "changes": {name: _outcome(one, usual) for name, one in ({"dream": own, "unchanged": usual} | watched).items()},
        "ranking": _ranking(pairs),
        "exploitability": _gap(own, usual),
        "alarm": _alarm(usual, others, watched),
    }


def _replay(one: Rollout) -> Act:
    actions = iter(one.action.unbind(1))
    return lambda state: next(actions).to(state.deter.device)


def _drift(model: TrainedModel, one: Rollout, usual: Rollout) -> Numbers:
    """Return errors by step, to the unchanged simulator: of pixels mean squared, of rewards absolute.

    Steps that no episode reaches on both sides are NaN.
    """
    steps = one.reward.shape[1]
    both = (one.weight > 0) & (usual.weight[:, :steps] > 0)
    errors = {"reward": (one.reward - usual.reward[:, :steps]).abs()}
    for key in model.cameras:
        difference = to_unit(one.frames[key]) - to_unit(usual.frames[key][:, :steps])
        errors[key] = difference.square().flatten(2).mean(2)
    return {key: (torch.where(both, error, 0.0).sum(0) / both.sum(0)).tolist() for key, error in errors.items()}


def _outcome(one: Rollout, usual: Rollout) -> Numbers:
    """Return mean return, its loss to the unchanged simulator, and success if the task has it, with 95 % intervals."""
    returns = one.returns
    found: Numbers = {"return": returns.mean().item(), "return_interval": list(mean_interval(returns.numpy()))}
    lost = usual.returns - returns
    found |= {"lost": lost.mean().item(), "lost_interval": list(mean_interval(lost.numpy()))}
    reached = (one.success * one.weight).amax(1)[one.counted]
    if not reached.isnan().any():
        found |= {"success": reached.mean().item()}
        found["success_interval"] = list(wilson_interval(int(reached.sum()), len(reached)))
    return found


def _ranking(pairs: Mapping[str, tuple[Rollout, Rollout]]) -> Numbers:
    """Compare mean returns of policies in the dream and in the simulator; ``agreement`` is Kendall's tau-b."""
    dreamt, real = ([pair[side].returns.mean().item() for pair in pairs.values()] for side in (0, 1))
    tau = float(stats.kendalltau(dreamt, real).statistic)
    agreement = 0.0 if math.isnan(tau) else tau  # all are equal on one side
    return {"policies": list(pairs), "dreamt": dreamt, "real": real, "agreement": agreement}


def _gap(dream: Rollout, real: Rollout) -> Numbers:
    """Compare the returns after the same states; positive gaps are promises that the simulator does not keep."""
    dreamt, got = dream.returns, real.returns
    low, high = mean_interval((dreamt - got).numpy())
    means = {"dreamt": dreamt.mean().item(), "real": got.mean().item()}
    size = max(map(abs, means.values()))
    found = {"gap": means["dreamt"] - means["real"], "interval": [low, high]}
    return means | found | {"exploited": low > EXPLOITABLE * size}


def _alarm(usual: Rollout, others: Rollout, watched: Mapping[str, Rollout]) -> Numbers:
    """Set the alarm at the largest surprise of untouched episodes; test it on others and after each change.

    Returns:
        Its ``threshold``, of the mean over :data:`WINDOW` steps, at which no episode of ``others`` gives an alarm; and
        by change the ``share`` of episodes with an alarm, and their median ``delay`` in steps.
    """
    threshold = smooth(others.surprise, others.weight > 0).max().item()
    found: Numbers = {"threshold": threshold}
    for name, one in ({"unchanged": usual} | dict(watched)).items():
        alarms = (smooth(one.surprise, one.weight > 0) > threshold)[one.counted]
        delays = (alarms.int().argmax(1) + WINDOW)[alarms.any(1)].tolist()
        delay = {"delay": statistics.median(delays)} if delays else {}
        found[name] = {"share": len(delays) / len(alarms)} | delay
    return found


def smooth(values: Tensor, valid: Tensor) -> Tensor:
    """Return means over the last :data:`WINDOW` of ``(N, I)`` steps, ``(N, I - WINDOW + 1)`` but at least one each.

    Steps that are not valid, or missing, count as 0.
    """
    missing = max(WINDOW - values.shape[1], 0)
    return F.pad(torch.where(valid, values, 0.0), (0, missing)).unfold(1, WINDOW, 1).mean(-1)
