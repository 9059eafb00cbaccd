"""``env=gym`` and the recipes ``minigrid``, ``atari`` and ``dmc``: their options, and what they make of them.

Nothing heavy is imported before an environment is made.
"""

import functools
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sheeplike.envs.errors import InvalidOption, Unusable
from sheeplike.envs.gym import ids
from sheeplike.envs.gym.settings import check_options

if TYPE_CHECKING:
    import gymnasium
    import torch


def check(family: str, *, id: str, options: Mapping[str, object]) -> None:
    """What can be said against an environment before it is made, and before torch is loaded.

    Raises:
        Unusable: a package is missing.
        InvalidOption: no such environment, or a value that none can serve.
    """
    check_options(options)
    if family != "gym":
        ids.resolve(family, id)
        return
    module = id.rpartition(":")[0]
    if not module:
        from sheeplike.envs.gym.registered import find

        find(id)
        return
    try:
        found = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise Unusable(f"id={id!r}: there is no module {module}")


def gym(
    *,
    num_envs: int,
    device: "torch.device | str",
    image_size: int | tuple[int, int],
    action_repeat: int,
    seed: int,
    id: str,
    episode_length: int | None = None,
    frames: str = "auto",
    resize: str = "auto",
    grayscale: bool = False,
    frame_stack: int = 1,
    clip_rewards: bool = False,
    vectorization: str = "sync",
    max_restarts: int = 10,
    arguments: Mapping[str, Any] | None = None,
) -> "gymnasium.vector.VectorEnv":
    """Any registered environment; ``arguments`` are further ones of ``gymnasium.make``."""
    check_options({"arguments": arguments})
    from sheeplike.envs.gym.registered import find, maker
    from sheeplike.envs.gym.rendering import choose_backend
    from sheeplike.envs.gym.vector_env import GymVectorEnv

    choose_backend(required=False)
    spec = find(id)
    return GymVectorEnv(
        maker(spec, arguments),
        name=id,
        num_envs=num_envs,
        device=device,
        image_size=image_size,
        action_repeat=action_repeat,
        seed=seed,
        episode_length=episode_length or spec.max_episode_steps,
        frames=frames,
        resize=resize,
        grayscale=grayscale,
        frame_stack=frame_stack,
        clip_rewards=clip_rewards,
        vectorization=vectorization,
        max_restarts=max_restarts,
    )


def minigrid(
    *,
    num_envs: int,
    device: "torch.device | str",
    image_size: int | tuple[int, int],
    action_repeat: int,
    seed: int,
    id: str = "MiniGrid-Empty-5x5-v0",
    episode_length: int | None = None,
    tile_size: int | None = None,
    frame_stack: int = 1,
    vectorization: str = "sync",
    max_restarts: int = 10,
) -> "gymnasium.vector.VectorEnv":
    """MiniGrid from the agent's own view, ``tile_size`` pixels a cell, padded to the size of the image."""
    check_options({"tile_size": tile_size})
    id = ids.resolve("minigrid", id)
    import minigrid  # noqa: F401, registers its environments

    from sheeplike.envs.arguments import resolve_image_size
    from sheeplike.envs.gym.registered import find, maker
    from sheeplike.envs.gym.vector_env import GymVectorEnv

    size = resolve_image_size(image_size)
    return GymVectorEnv(
        functools.partial(_make_minigrid, maker(find(id)), tile_size, size),
        name=id,
        num_envs=num_envs,
        device=device,
        image_size=size,
        action_repeat=action_repeat,
        seed=seed,
        episode_length=episode_length,
        frames="observation",
        resize="pad",
        frame_stack=frame_stack,
        vectorization=vectorization,
        max_restarts=max_restarts,
    )


def atari(
    *,
    num_envs: int,
    device: "torch.device | str",
    image_size: int | tuple[int, int],
    action_repeat: int,
    seed: int,
    id: str = "ALE/Pong-v5",
    episode_length: int | None = None,
    sticky_actions: bool = False,
    all_actions: bool = False,
    noops: int = 30,
    terminal_on_life_loss: bool = False,
    clip_rewards: bool = False,
    grayscale: bool = False,
    frame_stack: int = 1,
    vectorization: str = "sync",
    max_restarts: int = 10,
) -> "gymnasium.vector.VectorEnv":
    """An Atari game frame by frame; ``episode_length`` counts frames. The defaults are Atari 100k's."""
    check_options({"noops": noops})
    id = ids.resolve("atari", id)
    import ale_py  # noqa: F401, registers its games

    from sheeplike.envs.gym.atari import FRAMES
    from sheeplike.envs.gym.registered import find, maker
    from sheeplike.envs.gym.vector_env import GymVectorEnv

    arguments = {
        "frameskip": 1,
        "repeat_action_probability": 0.25 if sticky_actions else 0.0,
        "full_action_space": all_actions,
        "max_num_frames_per_episode": None,  # the world counts
    }
    return GymVectorEnv(
        functools.partial(_make_atari, maker(find(id), arguments), noops, terminal_on_life_loss),
        name=id,
        num_envs=num_envs,
        device=device,
        image_size=image_size,
        action_repeat=action_repeat,
        seed=seed,
        episode_length=episode_length or FRAMES,
        frames="observation",
        resize="bilinear",
        grayscale=grayscale,
        frame_stack=frame_stack,
        pool_frames=True,
        clip_rewards=clip_rewards,
        vectorization=vectorization,
        max_restarts=max_restarts,
    )


def dmc(
    *,
    num_envs: int,
    device: "torch.device | str",
    image_size: int | tuple[int, int],
    action_repeat: int,
    seed: int,
    id: str = "walker-walk",
    episode_length: int | None = None,
    camera: int | None = None,
    shadow_map: int | None = None,
    frames: str = "render",
    frame_stack: int = 1,
    vectorization: str = "sync",
    max_restarts: int = 10,
) -> "gymnasium.vector.VectorEnv":
    """A task of the DeepMind Control suite; ``frames=none`` leaves its vectors."""
    check_options({"camera": camera, "shadow_map": shadow_map})
    id = ids.resolve("dmc", id)
    if frames not in ("render", "none"):
        raise InvalidOption("frames", frames, "render or none", "render")
    from sheeplike.envs.gym.rendering import choose_backend

    choose_backend(required=frames == "render")
    from sheeplike.envs.arguments import resolve_image_size
    from sheeplike.envs.gym.dmc import ControlSuite
    from sheeplike.envs.gym.vector_env import GymVectorEnv

    size = resolve_image_size(image_size)
    return GymVectorEnv(
        functools.partial(ControlSuite, id, image_size=size, camera=camera, shadow_map=shadow_map),
        name=id,
        num_envs=num_envs,
        device=device,
        image_size=size,
        action_repeat=action_repeat,
        seed=seed,
        episode_length=episode_length,
        frames=frames,
        frame_stack=frame_stack,
        vectorization=vectorization,
        max_restarts=max_restarts,
    )


def _make_minigrid(
    make: Any, tile: int | None, image_size: tuple[int, int], render_mode: str | None
) -> "gymnasium.Env":
    from sheeplike.envs.gym.minigrid import PartialView

    return PartialView(make(render_mode=render_mode), tile=tile, image_size=image_size)


def _make_atari(make: Any, noops: int, terminal_on_life_loss: bool, render_mode: str | None) -> "gymnasium.Env":
    from sheeplike.envs.gym.atari import Protocol

    return Protocol(make(render_mode=render_mode), noops=noops, terminal_on_life_loss=terminal_on_life_loss)
