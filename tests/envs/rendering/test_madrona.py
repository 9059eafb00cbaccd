"""What is asked of Madrona, of a double that notes it: the real one is built from source and needs a GPU.

The double has the interface of ``madrona_mjx.renderer.BatchRenderer`` and draws from the fields that it reads.
"""

import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sheeplike.envs
from sheeplike.envs.mjx.rendering import MadronaRenderer, WarpRenderer, madrona
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick

TASK = FrankaPick()
MODEL = TASK.model
HAND = MODEL.body("hand").id


class Double:
    """Shows in each pixel's bytes the number of the camera, its place in the scene and the height of the hand in cm."""

    built: "list[Double]"

    def __init__(self, m, gpu_id, num_worlds, batch_render_view_width, batch_render_view_height, **options):
        self.m, self.gpu_id, self.num_worlds = m, gpu_id, num_worlds
        self.size, self.options = (batch_render_view_height, batch_render_view_width), options
        Double.built.append(self)

    def init(self, state, model):
        self.look = {name: (value.shape, value.dtype) for name, value in vars(model).items()}
        return jnp.zeros((), bool), *self._draw(state)

    def render(self, token, state):
        assert token.shape == ()
        return token, *self._draw(state)

    def _draw(self, state):
        assert state.geom_xpos.shape == (self.m.geom_type.size, 3)
        assert state.cam_xmat.shape == (self.m.ncam, 3, 3)
        ids = jnp.asarray(self.options["enabled_cameras"])
        hand = jnp.broadcast_to(100 * state.geom_xpos[jnp.argmax(self.m.geom_bodyid == HAND), 2], ids.shape)
        rgba = jnp.stack([ids, 100 * state.cam_xpos[ids, 2], hand, jnp.full(ids.shape, 255)], -1)
        full = (len(ids), *self.size)
        rgba = jnp.broadcast_to(jnp.round(rgba).astype(jnp.uint8)[:, None, None], (*full, 4))
        return rgba, jnp.broadcast_to(state.cam_xpos[ids, 2][:, None, None, None], (*full, 1))


@pytest.fixture
def installed(monkeypatch):
    package, module = ModuleType("madrona_mjx"), ModuleType("madrona_mjx.renderer")
    module.BatchRenderer = Double
    monkeypatch.setitem(sys.modules, "madrona_mjx", package)
    monkeypatch.setitem(sys.modules, "madrona_mjx.renderer", module)
    monkeypatch.setattr(madrona, "_process", {})
    monkeypatch.setattr(Double, "built", [], raising=False)


def make(**options) -> MadronaRenderer:
    return MadronaRenderer(MODEL, **{"num_envs": 3, "image_size": (4, 6), "device": "cuda:1", **options})


def simulate(renderer, **options) -> Simulator:
    return Simulator(TASK, renderer, num_envs=3, device=jax.devices("cpu")[0], **options)


@pytest.mark.usefixtures("installed")
def test_training_and_evaluation_share_one_renderer_that_draws_things_where_they_are():
    options = {"cameras": ["wrist", "front"], "depth": True}
    renderer = make(**options)
    warp = WarpRenderer(MODEL, num_envs=3, image_size=(4, 6), **options)
    assert renderer.spaces == warp.spaces
    simulator = simulate(renderer)
    worlds = simulator.start(0)
    again = make(**options)
    again.open()
    (double,) = Double.built
    assert (double.num_worlds, double.size, double.gpu_id) == (3, (4, 6), 1)
    assert list(double.options["enabled_cameras"]) == sorted(MODEL.camera(name).id for name in ("front", "wrist"))
    assert set(vars(double.m)) == set(madrona.SCENE_FIELDS)
    assert double.look["geom_rgba"] == ((MODEL.ngeom, 4), np.float32)  # of one world, under a vmap
    assert not np.any(double.m.mat_texid >= 0), "textures are drawn where they are asked for"
    actions = np.float32([[0, 1, 1], [0, -1, 1], [1, 0, 1]])
    for _ in range(3):
        *worlds, out = simulator.step(*worlds, actions)
    data = worlds[1].data
    heights = 100 * np.asarray(data.geom_xpos[:, int(np.argmax(MODEL.geom_bodyid == HAND)), 2])
    assert len({*heights}) == 3
    for name in ("front", "wrist"):
        camera = MODEL.camera(name).id
        pixels, depth = (np.asarray(out.frames[f"{kind}/{name}"]) for kind in ("pixels", "depth"))
        place = np.asarray(data.cam_xpos[:, camera, 2])
        assert (pixels.shape, pixels.dtype) == ((3, 4, 6, 3), np.uint8)
        shown = np.stack([np.full(3, camera), 100 * place, heights], -1)
        np.testing.assert_allclose(pixels[:, 2, 3].astype(float), shown, atol=1)
        np.testing.assert_allclose(depth[:, 1, 2, 0], place, rtol=1e-5)
    for other in ({"num_envs": 2}, {"image_size": 8}, {"cameras": ["front"]}, {"shadows": True}):
        with pytest.raises(ValueError, match=r"one scene per process: expected .*, got "):
            make(**options | other)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device='cpu': renderer='madrona' needs a GPU; nearest: renderer=warp"),
        ({"segmentation": True}, "segmentation=True: renderer='madrona' has none"),
        ({"cameras": ["front", "wrist"], "image_size": {"front": 4, "wrist": 8}}, "renderer='madrona' has one size"),
        ({"cameras": ["back"]}, "camera 'back' does not exist"),
    ],
)
def test_what_madrona_lacks_is_refused_and_nothing_reserved(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    assert not madrona._process


@pytest.mark.usefixtures("installed")
def test_what_is_uploaded_once_cannot_vary_and_poses_may():
    renderer = make()
    renderer.vary(["cam_pos", "body_mass"])
    for field in ("geom_rgba", "light_dir", "cam_fovy", "mat_rgba"):
        with pytest.raises(ValueError, match=f"variation of '{field}': renderer='madrona' uploads it once"):
            renderer.vary(["cam_pos", field])


def test_without_madrona_that_is_said():
    with pytest.raises(ValueError, match=r"built from source \(https://.*\), cannot be imported .*=warp$") as error:
        sheeplike.envs.make("cartpole_balance", num_envs=2, renderer="madrona")
    assert "\n" not in str(error.value)
