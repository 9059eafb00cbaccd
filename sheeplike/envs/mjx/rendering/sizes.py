"""How large the image of each camera is."""

from collections.abc import Mapping, Sequence

from sheeplike.envs.contract import ImageSize, resolve_image_size
from sheeplike.names import nearest


def resolve_image_sizes(
    image_size: ImageSize | Mapping[str, ImageSize], cameras: Sequence[str]
) -> dict[str, tuple[int, int]]:
    """``(height, width)`` of each camera, from one size for all or from one for each by name.

    Raises:
        ValueError: an impossible size, a camera without one, or one for a camera that is not rendered.
    """
    if not isinstance(image_size, Mapping):
        return dict.fromkeys(cameras, resolve_image_size(image_size))
    for name in image_size:
        if name not in cameras:
            raise ValueError(
                f"image_size has a size for camera {name!r}, which is not rendered: expected {', '.join(cameras)}; "
                f"nearest: {nearest(name, cameras)}"
            )
    missing = [name for name in cameras if name not in image_size]
    if missing:
        given = ", ".join(map(str, image_size)) or "none"
        raise ValueError(
            f"image_size has no size for camera {', '.join(missing)}: expected one for each that is rendered, and has "
            f"{given}; or fewer cameras"
        )
    return {name: resolve_image_size(image_size[name]) for name in cameras}
