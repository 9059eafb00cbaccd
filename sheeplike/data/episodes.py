"""One recorded episode, its checks, and streams of episodes for a replay.

Time alignment is that of :class:`~sheeplike.agents.agent.Step`: ``action[t]`` was chosen after seeing ``obs[t]``, and
``reward[t]`` was given for arriving there. Letter ``T``: the last step, so that arrays have ``T + 1`` entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np

from sheeplike.options import CommandError

RANGE = 1e-3  # an action may exceed -1 and 1 by this much, which is cut


@dataclass
class Episode:
    """Arrays of one episode, ``(T + 1, ...)`` each.

    Attributes:
        obs: observation to array; images uint8 ``(T + 1, H, W, C)``, vectors float32 ``(T + 1, D)``.
        action: as the environment takes it; the last one is ignored.
        reward: float32; the first one is 0.
        terminal: the episode ended by itself, not by a limit of time.
        source: file and number of the episode, for messages.
        info: further facts, such as ``success``; ``cut``: the environment failed in it.
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
        keys: observation to its name in the file, where the names differ.

    Raises:
        CommandError: something is missing, or has another size or range.
    """

    def refuse(key: str, found: object, expected: object, hint: str = "") -> CommandError:
        return CommandError(f"{episode.source}: {key}: found {found}, expected {expected}{hint}")

    steps, obs = len(episode), {}
    if steps < 2:
        raise refuse("reward", f"{steps} step(s)", "at least 2 steps in an episode")
    for key, space in spaces.items():
        name = keys.get(key) or _name_of(key, space, episode.obs)
        if name not in episode.obs:
            there = ", ".join(sorted(episode.obs)) or "none"
            raise refuse(key, f"observations {there}", key, f"; nearest: data.keys={{{key}:<name in the file>}}")
        value = episode.obs[name]
        is_image = len(space.shape) == 3
        if is_image and value.ndim == 4 and value.shape[1] in (1, 3, 9) and value.shape[3] not in (1, 3):
            value = value.transpose(0, 2, 3, 1)  # channels first
        if value.shape != (steps, *space.shape):
            size = f"; nearest: env.image_size={_size(value)}" if is_image and value.ndim == 4 else ""
            raise refuse(name, value.shape, (steps, *space.shape), size)
        if space.dtype == np.uint8 and value.dtype != np.uint8:
            raise refuse(name, value.dtype, "uint8, from 0 to 255")
        if value.dtype.kind not in "fiub" or (value.dtype.kind == "f" and not np.isfinite(value).all()):
            raise refuse(name, value.dtype if value.dtype.kind not in "fiub" else "NaN or infinity", "finite numbers")
        obs[key] = np.ascontiguousarray(value, space.dtype)
    reward = np.asarray(episode.reward, np.float32)
    if not np.isfinite(reward).all():
        raise refuse("reward", "NaN or infinity", "finite numbers")
    return Episode(obs, _fit_action(episode.action, steps, actions, refuse), reward, episode.terminal, episode.source)


def _name_of(key: str, space: gymnasium.Space, obs: Mapping[str, np.ndarray]) -> str:
    """Return the name of an observation in a file: its own, or that of the only image there."""
    images = [name for name, value in obs.items() if value.ndim == 4]
    return images[0] if key not in obs and len(space.shape) == 3 and len(images) == 1 else key


def _size(image: np.ndarray) -> str:
    height, width = image.shape[1:3]
    return str(height) if height == width else f"[{height},{width}]"


def _fit_action(action: np.ndarray, steps: int, space: gymnasium.Space, refuse: Any) -> np.ndarray:
    if isinstance(space, gymnasium.spaces.Box):
        if action.shape != (steps, *space.shape):
            raise refuse("action", action.shape, (steps, *space.shape))
        used = action[:-1]
        if action.dtype.kind not in "fiu" or not np.isfinite(used).all():
            raise refuse("action", "NaN, infinity or no numbers", "finite numbers")
        if len(used) and np.abs(used).max() > 1 + RANGE:
            raise refuse("action", f"values from {used.min():.4g} to {used.max():.4g}", "values from -1 to 1")
        return np.append(np.clip(used, -1, 1), action[-1:] * 0, axis=0).astype(np.float32)
    choices = np.atleast_1d(getattr(space, "nvec", getattr(space, "n", 0)))
    if action.ndim == 2 and len(choices) == 1 and action.shape[1] == choices[0] > 1:  # one-hot vectors
        action = action.argmax(1)
    action = action.reshape(steps, -1) if action.size == steps * len(choices) else action
    if action.shape != (steps, len(choices)) or action.dtype.kind not in "iu":
        raise refuse("action", f"{action.dtype} {action.shape}", f"whole numbers ({steps}, {len(choices)})")
    action = action.astype(np.int64)
    action[-1] = np.broadcast_to(space.start, len(choices))
    low = np.broadcast_to(space.start, len(choices))
    if (action < low).any() or (action >= low + choices).any():
        raise refuse("action", f"values from {action.min()} to {action.max()}", f"choices {low} to {low + choices - 1}")
    return action if hasattr(space, "nvec") else action[:, 0]


def deal(episodes: Sequence[Episode], columns: int) -> Iterator[dict[str, Any]]:
    """Yield the steps of one stream of all episodes, cut into ``columns`` pieces that run side by side.

    The stream is cut into pieces of equal length, which overlap by a few steps if it cannot be divided. A piece may
    begin in the middle of an episode.

    Yields:
        ``obs``, ``action``, ``reward``, ``is_first``, ``is_last``, ``is_terminal``, each ``(columns, ...)``.
    """
    ends = np.cumsum([len(episode) for episode in episodes])
    total = int(ends[-1])
    length = -(-total // columns)
    begins = [min(piece * length, max(total - length, 0)) for piece in range(columns)]
    for time in range(length):
        places = []
        for begin in begins:
            which = int(np.searchsorted(ends, begin + time, side="right"))
            places.append((episodes[which], begin + time - int(ends[which]) + len(episodes[which])))
        last = np.array([t == len(episode) - 1 for episode, t in places])
        yield {
            "obs": {key: np.stack([episode.obs[key][t] for episode, t in places]) for key in episodes[0].obs},
            "action": np.stack([episode.action[t] for episode, t in places]),
            "reward": np.array([0.0 if t == 0 else episode.reward[t] for episode, t in places], np.float32),
            "is_first": np.array([t == 0 or time == 0 for _, t in places]),
            "is_last": last,
            "is_terminal": last & np.array([episode.terminal for episode, _ in places]),
        }
