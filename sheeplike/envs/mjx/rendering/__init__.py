"""Camera frames of all worlds in one batch, straight to uint8."""

from collections.abc import Mapping, Sequence

import mujoco

from sheeplike.envs.contract import ImageSize
from sheeplike.envs.mjx.rendering.renderer import NoRenderer, Renderer
from sheeplike.envs.mjx.rendering.warp import WarpRenderer
from sheeplike.options import one_of

RENDERERS = {"warp": WarpRenderer, "none": NoRenderer}

__all__ = ["RENDERERS", "NoRenderer", "Renderer", "WarpRenderer", "make_renderer"]


def make_renderer(
    name: str,
    model: mujoco.MjModel,
    *,
    num_envs: int,
    image_size: ImageSize | Mapping[str, ImageSize] = 64,
    cameras: Sequence[str] | None = None,
    device: str = "cpu",
    **looks: bool,
) -> Renderer:
    """The renderer of a name; ``"none"`` ignores ``image_size`` and ``cameras``.

    Args:
        looks: ``depth``, ``segmentation``, ``shadows`` and ``textures``, as all other arguments those of
            :class:`~sheeplike.envs.mjx.rendering.renderer.Renderer`.

    Raises:
        ValueError: there is no such renderer, or it cannot do what is asked.
    """
    if name not in RENDERERS:
        raise ValueError(f"renderer={name!r}: expected {one_of(name, RENDERERS)}")
    if name == "none":
        for option in (option for option, value in looks.items() if value):
            raise ValueError(f"{option}=True: expected False, since renderer='none' renders nothing")
        return NoRenderer(num_envs)
    return RENDERERS[name](model, num_envs=num_envs, image_size=image_size, cameras=cameras, device=device, **looks)
