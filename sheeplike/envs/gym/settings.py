"""Which values the options of a Gymnasium environment take; checked without importing anything."""

from collections.abc import Mapping

from sheeplike.envs.errors import InvalidOption
from sheeplike.names import nearest

CHOICES = {
    "vectorization": ("sync", "async"),
    "frames": ("auto", "observation", "render", "none"),
    "resize": ("auto", "pad", "area", "bilinear", "nearest"),
}
LEAST = {
    "episode_length": 1,
    "frame_stack": 1,
    "max_restarts": 0,
    "tile_size": 2,
    "camera": 0,
    "shadow_map": 0,
    "noops": 0,
}
"""Least values of whole numbers."""
OPTIONAL = frozenset({"episode_length", "tile_size", "camera", "shadow_map", "arguments"})
"""Options that may be null."""


def check_options(options: Mapping[str, object]) -> None:
    """Refuse values that no Gymnasium environment can serve.

    Raises:
        InvalidOption: one of them.
    """
    for name, value in options.items():
        if value is None and name in OPTIONAL:
            continue
        if name in CHOICES and value not in CHOICES[name]:
            raise InvalidOption(name, value, f"one of {', '.join(CHOICES[name])}", nearest(value, CHOICES[name]))
        if name in LEAST and (isinstance(value, bool) or not isinstance(value, int) or value < LEAST[name]):
            close = LEAST[name] if isinstance(value, int) else None
            null = ", or null" * (name in OPTIONAL)
            raise InvalidOption(name, value, f"a whole number of at least {LEAST[name]}{null}", close)
        if name == "arguments" and not (isinstance(value, Mapping) and all(isinstance(key, str) for key in value)):
            raise InvalidOption(name, value, "names and values for gymnasium.make, such as {continuous: true}")
