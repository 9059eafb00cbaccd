"""One recorded episode, its checks, and streams of episodes for a replay.

Time alignment is that of :class:`~sheeplike.agents.agent.Step`: ``action[t]`` was chosen after seeing ``obs[t]``, and
``reward[t]`` was given for arriving there. Letter ``T``: the last step, so that arrays have ``T + 1`` entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np

from sheeplike.options import CommandError

RANGE = 1e-3  # an action may exceed its limits by this much, which is cut


@dataclass
class Episode:
    """Arrays of one episode, ``(T + 1, ...)`` each.

    Attributes:
        obs: observation to array; images uint8 ``(T + 1, H, W, C)``, vectors float32 ``(T + 1, D)``.
        action: as the environment takes it; the last one is ignored.
        reward: float32; the first is 0, unless the file begins in the middle of an episode.
        terminal: the episode ended by itself, not by a limit of time.
        source: file and number of the episode, for messages.
        info: further facts, such as ``success``.
    """

    obs: dict[str, np.ndarray]
    action: np.ndarray
    reward: np.ndarray
    terminal: bool
    source: str = ""
    info: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def total(self) -> float:
        """Sum of the rewards."""
        return float(self.reward.sum(dtype=np.float64))


def fit(
    episode: Episode, spaces: Mapping[str, gymnasium.Space], actions: gymnasium.Space, keys: Mapping[str, str]
) -> Episode:
    """Return an episode with the observations ``spaces`` alone, in their types and with valid actions.

    Args:
        keys: observation to its name in the file, where the names differ; the only image needs none.

    Raises:
        CommandError: something is missing, or has another size or range.
    """
    steps, obs = len(episode), {}
    if steps < 2:
        raise _refuse(episode, "reward", f"{steps} step(s)", "at least 2 steps in an episode")
    images = [key for key, space in spaces.items() if space.dtype == np.uint8]
    # A file of another project may call its only image by another name; cameras of this one are told apart by theirs.
    recorded = [name for name, value in episode.obs.items() if value.ndim == 4 and not name.startswith("pixels/")]
    for key, space in spaces.items():
        name = keys.get(key, key)
        if name not in episode.obs and [key] == images and len(recorded) == 1 and key not in keys:
            name = recorded[0]
        if name not in episode.obs:
            there = ", ".join(sorted(episode.obs)) or "none"
            raise _refuse(episode, name, f"observations {there}", name, f"data.keys={{{key}:<name in the file>}}")
        value, nearest = episode.obs[name], ""
        if value.ndim == 4:
            if value.shape[1] < min(value.shape[2:]):  # channels first
                value = value.transpose(0, 2, 3, 1)
            height, width = value.shape[1:3]
            nearest = f"env.image_size={height if height == width else f'[{height},{width}]'}"
        elif value.ndim == 1:
            value = value[:, None]
        if value.shape != (steps, *space.shape):
            raise _refuse(episode, name, value.shape, (steps, *space.shape), nearest)
        if space.dtype == np.uint8 and value.dtype != np.uint8:
            raise _refuse(episode, name, value.dtype, "uint8, from 0 to 255")
        obs[key] = _finite(episode, name, value, space.dtype)
    reward = _finite(episode, "reward", episode.reward, np.float32)
    return replace(episode, obs=obs, action=_fit_action(episode, actions), reward=reward)


def _refuse(episode: Episode, key: str, found: object, expected: object, nearest: str = "") -> CommandError:
    hint = f"; nearest: {nearest}" if nearest else ""
    return CommandError(f"{episode.source}: {key}: found {found}, expected {expected}{hint}")


def _finite(episode: Episode, key: str, value: np.ndarray, dtype: np.dtype | type) -> np.ndarray:
    if value.dtype.kind not in "fiub":
        raise _refuse(episode, key, value.dtype, "numbers")
    with np.errstate(over="ignore"):  # a float64 may be too large
        value = np.ascontiguousarray(value, dtype)
    if not np.isfinite(value).all():
        raise _refuse(episode, key, "NaN or infinity", f"finite numbers of {np.dtype(dtype)}")
    return value


def _fit_action(episode: Episode, space: gymnasium.Space) -> np.ndarray:
    """Return valid actions; the last, which is ignored, is neutral."""
    action, steps = episode.action, len(episode)
    if isinstance(space, gymnasium.spaces.Box):
        action = action[:, None] if action.ndim == 1 else action
        if action.shape != (steps, *space.shape):
            raise _refuse(episode, "action", action.shape, (steps, *space.shape))
        used = _finite(episode, "action", action[:-1], np.float32)
        if (used < space.low - RANGE).any() or (used > space.high + RANGE).any():
            limits = f"from {space.low.min():g} to {space.high.max():g}"
            raise _refuse(episode, "action", f"values from {used.min():.4g} to {used.max():.4g}", f"values {limits}")
        return np.append(np.clip(used, space.low, space.high), np.zeros_like(used[:1]), axis=0)
    one_hot = action.shape == (steps, getattr(space, "n", 0)) and np.isin(action, (0, 1)).all()
    if one_hot and (action[:-1].sum(1) == 1).all():
        action = action.argmax(1)
    if action.size != steps * math.prod(space.shape) or action.dtype.kind not in "iu":
        raise _refuse(episode, "action", f"{action.dtype} {action.shape}", f"whole numbers {(steps, *space.shape)}")
    used = action[:-1].reshape(steps - 1, *space.shape).astype(np.int64)
    if not all(one in space for one in used):
        raise _refuse(episode, "action", f"values from {used.min()} to {used.max()}", space)
    return np.append(used, np.full((1, *space.shape), space.start), axis=0)


def deal(episodes: Sequence[Episode], columns: int) -> Iterator[dict[str, Any]]:
    """Yield the steps of one stream of all episodes, cut into ``columns`` pieces that run side by side.

    The pieces are equally long and cover the stream; fewer than ``columns`` steps occur twice, since it may not divide.
    A piece may begin and end in the middle of an episode; ``is_first`` marks its first step.

    Yields:
        ``obs``, ``action``, ``reward``, ``is_first``, ``is_last``, ``is_terminal``, each ``(columns, ...)``.
    """
    lengths = [len(episode) for episode in episodes]
    obs = {key: np.concatenate([episode.obs[key] for episode in episodes]) for key in episodes[0].obs}
    action, reward = (np.concatenate([getattr(one, name) for one in episodes]) for name in ("action", "reward"))
    last = np.concatenate([np.arange(length) == length - 1 for length in lengths])
    first, terminal = np.roll(last, 1), last & np.repeat([episode.terminal for episode in episodes], lengths)
    reward = np.where(first, 0, reward).astype(np.float32)
    length = -(-len(last) // columns)
    begins = np.minimum(np.arange(columns) * length, len(last) - length)
    for time in range(length):
        now = begins + time
        yield {
            "obs": {key: value[now] for key, value in obs.items()},
            "action": action[now],
            "reward": reward[now],
            "is_first": first[now] | (time == 0),
            "is_last": last[now],
            "is_terminal": terminal[now],
        }
