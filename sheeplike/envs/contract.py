"""Contract of vector environments: the arguments that every one takes, and the attributes that every one has.

Importing this module imports neither torch nor gymnasium.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sheeplike.options import CommandError

if TYPE_CHECKING:
    import torch

ImageSize = int | Sequence[int]  # pixels a side, or `(height, width)`
ATTRIBUTES = ("name", "device", "episode_length", "single_action_space", "action_space", "observation_space")
METHODS = ("reset", "step", "state_dict", "load_state_dict")
IMAGES = {"pixels": ("uint8", 3), "depth": ("float32", 3), "segmentation": ("int32", 3)}


class OptionalMembers:
    """Defaults of optional members; :func:`check_vector_env` gives them to an environment that lacks them.

    Attributes:
        exact_resume: after ``load_state_dict`` the environment continues exactly as the saved one would have.
        counters: numbers of the run so far, by metric.
        variation: draws of each line of randomization for each world, (N, ...) tensors by name of line.
        simulator: the :class:`~sheeplike.envs.mjx.simulator.Simulator` of an environment that is simulated here.
        positions: slices of ``privileged_state`` that are positions in metres, by name; ``entries``: its other slices.
        first_env: number of the first world among those of all ranks, if a world draws from the seed and its number.
        action_names: one name for each entry of the action, or for each choice of a single discrete one.
        native_actions: space into which ``step`` translates actions, if it is another one.
    """

    exact_resume: bool = True
    counters: Mapping[str, float] = MappingProxyType({})
    variation: Mapping[str, torch.Tensor] = MappingProxyType({})
    simulator: Any = None
    first_env: int | None = None
    positions: Mapping[str, slice] = MappingProxyType({})
    entries: Mapping[str, slice] = MappingProxyType({})
    action_names: Sequence[str] = ()
    native_actions: Any = None

    def film(self) -> dict[str, torch.Tensor]:
        """Return frames of the first worlds for videos alone, by camera: uint8 (n, H, W, 3)."""
        return {}


class Unusable(ValueError):
    """The environment cannot be used on this machine, since something that it needs is missing."""


class GaveUp(CommandError, RuntimeError):
    """The environment has failed too often; the text says how."""

    status = 70  # EX_SOFTWARE of sysexits.h


def resolve_image_size(image_size: ImageSize) -> tuple[int, int]:
    """Turn ``64`` or ``(48, 64)`` into ``(height, width)``; raise ``ValueError`` for anything else."""
    one = isinstance(image_size, int)
    pair = (image_size, image_size) if one else tuple(image_size) if isinstance(image_size, Sequence) else ()
    if len(pair) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in pair):
        raise ValueError(f"image_size={image_size!r}: expected a positive int or (height, width), such as (48, 64)")
    return pair


def check_seed(seed: int) -> int:
    """Return the seed; raise ``ValueError`` unless it is an int in [0, 2**32)."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: expected an int in [0, 2**32), such as 0")
    return seed


def check_positive(name: str, value: int, example: int) -> int:
    """Return the value of an argument; raise ``ValueError`` unless it is a positive int."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: expected a positive int, such as {example}")
    return value


def resolve_device(device: torch.device | str) -> torch.device:
    """Return the torch device with its index; raise ``ValueError`` where torch has no such device."""
    import torch

    try:
        resolved = torch.device(device)
    except RuntimeError:
        resolved = None
    if resolved is None or resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: expected 'cpu', 'cuda' or 'cuda:<index>'")
    if resolved.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}: torch finds no CUDA device here; expected 'cpu'")
    return torch.device("cuda", torch.cuda.current_device() if resolved.index is None else resolved.index)


def check_actions(env: Any, actions: torch.Tensor, dtype: torch.dtype, *, begun: bool) -> None:
    """Check the actions given to ``step``; ``begun``: there was a reset."""
    if not begun:
        raise RuntimeError("step() of a closed environment" if env.closed else "step() before the first reset()")
    given, expected = (actions.dtype, tuple(actions.shape), actions.device), (dtype, env.action_space.shape, env.device)
    if given != expected:
        raise ValueError(f"actions are {given}: expected {expected}")


def check_vector_env(env: Any, *, num_envs: int) -> None:
    """Check an environment of another package before its first step, and fill in :class:`OptionalMembers`.

    Raises ``ValueError`` for the first thing that it lacks, in one line; see ``howto/add_an_environment.md``.
    """
    import gymnasium
    from gymnasium import spaces
    from gymnasium.vector import AutoresetMode

    if not isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError(f"is a {type(env).__name__}: expected a gymnasium.vector.VectorEnv")
    for attribute in (*ATTRIBUTES, *METHODS):
        if not hasattr(env, attribute):
            raise ValueError(f"has no {attribute}{'()' if attribute in METHODS else ''}")
    if env.num_envs != num_envs:
        raise ValueError(f"has num_envs={env.num_envs}: expected {num_envs}, as it was told")
    mode = env.metadata.get("autoreset_mode")
    if mode != AutoresetMode.NEXT_STEP:
        raise ValueError(f"has metadata['autoreset_mode']={mode}: expected AutoresetMode.NEXT_STEP")
    if "render_fps" not in env.metadata:
        raise ValueError("has no metadata['render_fps']: expected control steps per second")
    space = env.single_observation_space
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"observes {space}: expected a flat Dict, such as of 'pixels/front' and 'state'")
    for key, one in space.items():
        dtype, axes = IMAGES.get(key.partition("/")[0], ("float32", 1))
        if not isinstance(one, spaces.Box) or one.dtype != dtype or len(one.shape) != axes:
            raise ValueError(f"observes {key!r} as {one}: expected a Box of {dtype} with {axes} axes")
    defaults = OptionalMembers()
    for name in vars(OptionalMembers):
        if not (name.startswith("_") or hasattr(env, name)):
            setattr(env, name, getattr(defaults, name))
