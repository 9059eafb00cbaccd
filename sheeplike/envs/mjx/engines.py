"""Physics engines and renderers by name. Importing this module imports neither JAX nor MuJoCo."""

from sheeplike.entry_points import Registry

PHYSICS = Registry(
    "physics",
    "sheeplike.physics",
    {
        "warp": "sheeplike.envs.mjx.physics.physics:WarpPhysics",
        "native": "sheeplike.envs.mjx.physics.native:NativePhysics",
    },
    what="physics",
    automatic=("auto",),
)
RENDERERS = Registry(
    "renderer",
    "sheeplike.renderers",
    {
        "warp": "sheeplike.envs.mjx.rendering.warp:WarpRenderer",
        "none": "sheeplike.envs.mjx.rendering.renderer:NoRenderer",
    },
    what="renderer",
)
