"""Camera frames of all worlds in one batch, straight to uint8.

The simulator knows only the :class:`Renderer` protocol, behind which there are three: MJX-Warp's ray caster, Madrona
for those who have it, and none at all.
"""

from collections.abc import Mapping, Sequence

import mujoco

from sheeplike.envs.contract import ImageSize
from sheeplike.envs.mjx.rendering.madrona import MadronaRenderer
from sheeplike.envs.mjx.rendering.protocol import Frames, NoRenderer, Renderer
from sheeplike.envs.mjx.rendering.warp import WarpRenderer
from sheeplike.options import one_of

__all__ = [
    "RENDERERS",
    "Frames",
    "ImageSize",
    "MadronaRenderer",
    "NoRenderer",
    "Renderer",
    "WarpRenderer",
    "make_renderer",
]

RENDERERS = ("warp", "madrona", "none")


def make_renderer(
    name: str,
    model: mujoco.MjModel,
    *,
    num_envs: int,
    image_size: ImageSize | Mapping[str, ImageSize] = 64,
    cameras: Sequence[str] | None = None,
    depth: bool = False,
    segmentation: bool = False,
    shadows: bool = False,
    textures: bool = False,
    device: str = "cpu",
) -> Renderer:
    """The renderer of a name.

    Args:
        name: ``"warp"``, ``"madrona"`` or ``"none"``, which takes ``image_size`` and ``cameras`` and ignores them.
        model, num_envs, image_size, cameras, depth, segmentation, shadows, textures, device: see
            :class:`~sheeplike.envs.mjx.rendering.warp.WarpRenderer`.

    Raises:
        ValueError: there is no such renderer, or it cannot do what is asked.
    """
    if name not in RENDERERS:
        raise ValueError(f"renderer={name!r}: expected {one_of(name, RENDERERS)}")
    flags = {"depth": depth, "segmentation": segmentation, "shadows": shadows, "textures": textures}
    if name == "none":
        for option in (option for option, value in flags.items() if value):
            raise ValueError(f"{option}=True: expected False, since renderer='none' renders nothing")
        return NoRenderer(num_envs)
    kind = WarpRenderer if name == "warp" else MadronaRenderer
    return kind(model, num_envs=num_envs, image_size=image_size, cameras=cameras, device=device, **flags)
