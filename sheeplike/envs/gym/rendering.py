"""How environments render on a machine without a screen."""

import ctypes.util
import os
import sys

from sheeplike.envs.errors import Unusable

LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}


def choose_backend(*, required: bool) -> None:
    """Set ``MUJOCO_GL`` where nobody has and there is no screen: ``egl``, or else ``osmesa``.

    The libraries read it when they are first imported, or when they first render.

    Args:
        required: that there is one; an environment that does not render can do without.

    Raises:
        Unusable: there is none.
    """
    if sys.platform != "linux":
        return
    if os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        return
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # of pygame, which would look for a screen and complain
    if os.environ.get("MUJOCO_GL"):
        return
    for backend, library in LIBRARIES.items():
        if ctypes.util.find_library(library):
            os.environ["MUJOCO_GL"] = backend
            return
    if required:
        raise Unusable(
            "there is no screen, and neither libEGL nor libOSMesa to render without one: expected one of them (on "
            "Debian and Ubuntu: apt-get install libegl1, or libosmesa6)"
        )
