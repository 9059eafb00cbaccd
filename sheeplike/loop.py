"""The interaction loop and the evaluation, the same for every agent.

One iteration takes one step in every world, then as many gradient steps as are due::

    act ─► add ─► step the worlds ─► updates due? ─► learn ─► hooks (log, video, evaluate, save)

The worlds follow next-step reset: a step that ends an episode is delivered with its true last frame, the action chosen
on it is ignored, and the next step is the first of a new episode. ``sheeplike.agents.agent`` draws the time alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from gymnasium.vector import VectorEnv
from torch import Tensor
from torch.utils import _pytree as pytree

from sheeplike.agents.agent import Agent, Player, Step

LONGEST_VIDEO = 1_500  # frames of an evaluation's video, which are all in memory


@dataclass
class LoopState:
    """State of the loop between two iterations."""

    player: Player
    step: Step  # the current step of all worlds, whose action the next iteration chooses
    policy_steps: int = 0  # actions chosen, over all worlds; the unit of every interval and of the x-axis
    gradient_steps: int = 0
    due: int = 0  # gradient steps that a stop left undone; a resumed run makes them first

    @classmethod
    def begin(cls, agent: Agent, envs: VectorEnv, seed: int) -> LoopState:
        """Reset the worlds from ``seed``."""
        obs, _ = envs.reset(seed=seed)
        return cls(agent.player(envs.num_envs, explore=True), first_step(obs, envs.num_envs))


class Observer(Protocol):
    """Receiver of steps and metrics that must not wait for the device."""

    def stepped(self, step: Step, info: dict[str, Any]) -> None: ...
    def learned(self, metrics: dict[str, Tensor]) -> None: ...


@dataclass
class Every:
    """Hook that calls ``function(state)`` every ``interval`` policy steps."""

    interval: int
    function: Callable[[LoopState], None]
    done: int = 0

    def __call__(self, state: LoopState) -> None:
        if state.policy_steps // self.interval > self.done:
            self.done = state.policy_steps // self.interval
            self.function(state)


def train(
    agent: Agent,
    envs: VectorEnv,
    state: LoopState,
    *,
    total_steps: int,
    observer: Observer,
    hooks: Iterable[Every] = (),
    stop: Callable[[], bool] = lambda: False,
    ranks: int = 1,
    interact: bool = True,
) -> LoopState:
    """Interact and learn up to ``total_steps``, or until ``stop()``, called before every iteration and every update.

    With ``ranks``, processes that run this loop side by side, policy steps count over the worlds of all of them.
    Without ``interact`` each iteration is one update, and counts as one step.

    No device tensor is read on the host: between two hooks the loop only issues work.
    """
    hooks = list(hooks)
    while (state.policy_steps < total_steps or state.due) and not stop():
        if not state.due and not interact:
            state.policy_steps, state.due = state.policy_steps + 1, 1
        elif not state.due:
            # Act in every world, and add the observation and the action to memory.
            step = state.step
            step.action = state.player.act(step.obs, step.is_first)
            step.extras = state.player.extras
            agent.add(step)
            state.policy_steps += envs.num_envs * ranks

            # Worlds whose episode has ended (is_last) ignore the action and begin a new one.
            obs, reward, terminated, truncated, info = envs.step(step.action)
            state.step = step.following(step.action, obs, reward, terminated, truncated)
            observer.stepped(state.step, info)
            state.due = agent.updates_due(state.policy_steps)

        # Learn as often as the agent asks: by its replay ratio, or when its rollout is complete.
        while state.due and not stop():
            observer.learned(agent.update())
            state.gradient_steps += 1
            state.due -= 1

        if not state.due:
            for hook in hooks:
                hook(state)
    return state


class Evaluation(NamedTuple):
    """Results of ``E`` finished episodes."""

    returns: Tensor  # (E,) float32, sum of rewards
    lengths: Tensor  # (E,) int32, control steps
    success: Tensor  # (E,) bool, or float32 with NaN where it is undefined
    reward_terms: dict[str, Tensor]  # (E,) float32, sums
    frames: dict[str, Tensor]  # camera to (T, V, H, W, C) uint8 of the first V worlds; may be empty


@torch.no_grad()
def evaluate(
    agent: Agent, envs: VectorEnv, *, episodes: int, seed: int, sample: bool = True, video_envs: int = 0, ranks: int = 1
) -> Evaluation:
    """Play ``episodes`` whole episodes, each round with a fresh player.

    Each world plays exactly one episode a round, so that short episodes are not counted more often than long ones.
    The cut episode of a failed environment (``info["restarted"]``) is not counted; its next one is.
    """
    rounds: list[dict[str, Any]] = []
    videos: dict[str, list[Tensor]] = {}
    frames_left = LONGEST_VIDEO if video_envs else 0
    for start in range(0, episodes, envs.num_envs):
        player = agent.player(envs.num_envs)
        obs, info = envs.reset(seed=seed + start * ranks)
        step = first_step(obs, envs.num_envs)
        over = over_before = no = torch.zeros_like(step.is_last)
        final = info["episode"]
        while True:
            if start == 0 and frames_left:
                frames_left -= 1
                cameras = [key for key in step.obs if key.startswith("pixels/")]
                seen = {key.removeprefix("pixels/"): step.obs[key][:video_envs].clone() for key in cameras}
                for camera, frames in (seen | envs.film()).items():
                    before = videos.setdefault(camera, [])
                    ended = over_before[: len(frames)].view(-1, 1, 1, 1)  # a world keeps the last frame of its episode
                    before.append(torch.where(ended, before[-1], frames) if before else frames)
            if bool(over.all()):
                break
            action = player.act(step.obs, step.is_first, sample=sample)
            obs, reward, terminated, truncated, info = envs.step(action)
            step = step.following(action, obs, reward, terminated, truncated)
            whole = step.is_last & ~info.get("restarted", no)
            final = pytree.tree_map(partial(torch.where, whole & ~over), info["episode"], final)
            over_before, over = over, over | whole
        rounds.append(final)
    merged = pytree.tree_map(lambda *parts: torch.cat(parts)[:episodes].cpu(), *rounds)
    frames = {camera: torch.stack(images) for camera, images in videos.items()}
    return Evaluation(merged["return"], merged["length"], merged["success"], merged["reward_terms"], frames)


def first_step(obs: dict[str, Tensor], num_envs: int) -> Step:
    """Return the step that begins an episode in every world."""
    device = next(iter(obs.values())).device
    no = torch.zeros(num_envs, dtype=torch.bool, device=device)
    nothing = torch.zeros(num_envs, device=device)
    return Step(obs, nothing, nothing, is_first=~no, is_last=no, is_terminal=no)
