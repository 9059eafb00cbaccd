"""What is looked at before worlds are made: the environment itself, and the numbers that everybody gives."""

import sys
from contextlib import suppress

import gymnasium
import numpy as np
from gymnasium import spaces

from sheeplike.envs.errors import InvalidOption, Unusable
from sheeplike.envs.gym.observations import choose_frames, parts_of
from sheeplike.envs.gym.world import MakeEnv, first_line

UNKNOWN_FPS = 30.0


def look_at(make: MakeEnv, name: str, frames: str, episode_length: int | None) -> tuple[str, int, float]:
    """Of an environment that is made for it: where frames come from, the steps of an episode, and steps a second.

    Raises:
        Unusable: it cannot be made.
        ValueError: it has no such frames, or no limit of its own and none is given.
    """
    try:
        env = make(render_mode=None)
    except (gymnasium.error.Error, ImportError) as error:
        raise Unusable(f"{name}: {first_line(error)}") from error
    try:
        left_out = [part for part in parts_of(env.observation_space).others if not isinstance(part.space, spaces.Text)]
        for part in left_out:
            tell(f"{name}: the observation {part.name or part.space} is left out: it has no fixed size")
        chosen = choose_frames(frames, env.observation_space, list(env.metadata.get("render_modes", [])))
        return chosen, episode_length or _own_limit(env, name), float(env.metadata.get("render_fps") or UNKNOWN_FPS)
    finally:
        env.close()


def _own_limit(env: gymnasium.Env, name: str) -> int:
    """Steps of an episode by the environment's own account.

    Raises:
        InvalidOption: it gives none, and an evaluation of it might never end.
    """
    found = [env.spec.max_episode_steps if env.spec else None]
    found += [getattr(env.unwrapped, attribute, None) for attribute in ("max_steps", "max_episode_steps")]
    for limit in found:
        if isinstance(limit, int | np.integer) and limit > 0:
            return int(limit)
    raise InvalidOption("episode_length", None, f"a number of steps, since {name} has no limit of its own", 1000)


def positive(name: str, value: int) -> int:
    """Returns the value.

    Raises:
        ValueError: not a positive int.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive int, such as {16 if name == 'num_envs' else 1}")
    return value


def tell(text: str) -> None:
    """Print a line on stderr; a reader that has gone away does not end the run."""
    with suppress(OSError, ValueError):
        print(f"sheeplike: {text}", file=sys.stderr, flush=True)
