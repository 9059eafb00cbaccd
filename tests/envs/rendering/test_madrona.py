"""What is asked of Madrona, of a double that notes it: the real one is built from source and needs a GPU.

The double has the interface of ``madrona_mjx.renderer.BatchRenderer``, draws from exactly the fields that it reads,
and insists, as it does, on being mapped over all of its worlds.
"""

import sys
from types import ModuleType, SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

import sheeplike.envs
from sheeplike.envs.mjx.rendering import MadronaRenderer, WarpRenderer, madrona
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.envs.mjx.task import Outcome

SCENE = """
<mujoco>
  <asset>
    <texture name="board" type="2d" builtin="checker" width="8" height="8"/>
    <material name="board" texture="board"/>
  </asset>
  <worldbody>
    <light type="directional" castshadow="true"/>
    <camera name="a" pos="0 0 6"/>
    <geom name="floor" type="plane" size="0 0 1" material="board" contype="0"/>
    <body name="lift">
      <joint type="slide" axis="0 0 1"/>
      <camera name="b" pos="0 0 1"/>
      <geom name="ball" size="0.1" rgba="1 0 0 1"/>
      <camera name="c" pos="0 0 2"/>
    </body>
  </worldbody>
</mujoco>
"""
MODEL = mujoco.MjModel.from_xml_string(SCENE)


class Double:
    """Shows in each pixel's bytes the number of the camera, ten times its height, and ten times that of the ball."""

    built: "list[Double]"

    def __init__(
        self,
        m,
        gpu_id,
        num_worlds,
        batch_render_view_width,
        batch_render_view_height,
        enabled_geom_groups=None,
        enabled_cameras=None,
        add_cam_debug_geo=False,
        use_rasterizer=False,
        viz_gpu_hdls=None,
    ):
        self.m, self.gpu_id, self.num_worlds = m, gpu_id, num_worlds
        self.size = batch_render_view_height, batch_render_view_width
        self.groups, self.cameras = list(enabled_geom_groups), list(enabled_cameras)
        self.calls = []
        Double.built.append(self)

    def init(self, state, model):
        self.calls.append("init")
        self.look = {name: value.shape for name, value in vars(model).items()}
        jax.debug.callback(lambda shadow: setattr(self, "shadow", shadow), model.light_castshadow)
        return jnp.zeros((), bool), *self._draw(state)

    def render(self, token, state):
        assert token.shape == ()
        self.calls.append("render")
        return token, *self._draw(state)

    def _draw(self, state):
        assert state.geom_xpos.shape == (self.m.geom_type.size, 3)
        assert state.xquat.shape[1:] == (4,)
        assert state.cam_xmat.shape == (self.m.ncam, 3, 3)
        ids = jnp.asarray(self.cameras)
        heights = 10 * state.cam_xpos[ids, 2]
        ball = jnp.broadcast_to(10 * state.geom_xpos[1, 2], ids.shape)
        rgba = jnp.stack([ids, heights, ball, jnp.full(ids.shape, 255)], -1)
        full = (len(self.cameras), *self.size)
        rgba = jnp.broadcast_to(jnp.round(rgba).astype(jnp.uint8)[:, None, None], (*full, 4))
        return rgba, jnp.broadcast_to(state.cam_xpos[ids, 2][:, None, None, None], (*full, 1))


@pytest.fixture(autouse=True)
def _another_process(monkeypatch):
    """One in which nothing has been drawn."""
    monkeypatch.setattr(madrona, "_in_use", None)
    monkeypatch.setattr(Double, "built", [], raising=False)


@pytest.fixture
def installed(monkeypatch):
    package, module = ModuleType("madrona_mjx"), ModuleType("madrona_mjx.renderer")
    module.BatchRenderer = Double
    monkeypatch.setitem(sys.modules, "madrona_mjx", package)
    monkeypatch.setitem(sys.modules, "madrona_mjx.renderer", module)


def make(**options) -> MadronaRenderer:
    return MadronaRenderer(MODEL, **{"num_envs": 3, "image_size": (4, 6), "device": "cuda:0", **options})


class Lift:
    name = "lift"
    episode_length, substeps = 4, 1
    contacts_per_world, constraints_per_world = 1, 4

    def __init__(self):
        self.model = MODEL
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, key, data):
        return data.replace(qpos=jax.random.uniform(key, (1,), minval=1.0, maxval=9.0)), ()

    def control(self, data, memory, action):
        return data, memory

    def evaluate(self, data, memory, action):
        return Outcome(data.qpos[0], jnp.zeros((), bool), jnp.zeros((), bool), {"height": data.qpos[0]}, memory)

    def observe(self, data, memory):
        return {"state": data.qpos}


def simulate(renderer, **options) -> Simulator:
    return Simulator(Lift(), renderer, num_envs=3, device=jax.devices("cpu")[0], **options)


@pytest.mark.usefixtures("installed")
def test_frames_are_drawn_once_per_step_and_from_where_things_are():
    renderer = make(cameras=["c", "a"], depth=True)
    assert {name: space.shape for name, space in renderer.spaces.items()} == {
        "pixels/c": (4, 6, 3),
        "depth/c": (4, 6, 1),
        "pixels/a": (4, 6, 3),
        "depth/a": (4, 6, 1),
    }
    simulator = simulate(renderer)
    worlds = simulator.start(0)
    (double,) = Double.built
    assert (double.num_worlds, double.size, double.gpu_id, double.groups) == (3, (4, 6), 0, [0, 1, 2])
    assert double.cameras == [0, 2]  # as the scene has them
    assert double.calls == ["init"]
    for _ in range(6):
        *worlds, out = simulator.step(*worlds, np.zeros((3, 1), np.float32))
        height = np.asarray(out.vectors["state"][:, 0])
        assert len(set(height)) == 3
        for camera, number, metres in (("a", 0, np.full(3, 6.0)), ("c", 2, height + 2)):
            pixels, depth = (np.asarray(out.frames[f"{kind}/{camera}"]) for kind in ("pixels", "depth"))
            assert (pixels.dtype, pixels.shape) == (np.uint8, (3, 4, 6, 3))
            assert (depth.dtype, depth.shape) == (np.float32, (3, 4, 6, 1))
            shown = np.stack([np.full(3, number), np.round(10 * metres), np.round(10 * height)], -1)
            np.testing.assert_allclose(pixels[:, 2, 3].astype(float), shown, atol=1)
            np.testing.assert_allclose(depth[:, 1, 2, 0], metres, rtol=1e-5)
    assert double.calls == ["init", "render"]  # traced once each
    assert simulator.compilations == 1


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("on", [False, True])
def test_what_madrona_reads_is_handed_over_and_nothing_else(on):
    renderer = make(shadows=on, textures=on)
    renderer.open()
    renderer.open()
    (double,) = Double.built
    assert set(vars(double.m)) == set(madrona.MODEL_FIELDS)
    real = [name for name, value in vars(double.m).items() if getattr(value, "dtype", None) == np.float64]
    assert real == []
    assert (double.m.mat_texid == MODEL.mat_texid).all() == on
    assert (double.m.mat_texid >= 0).any() == on
    assert set(double.look) == {*madrona.LOOK_FIELDS, "light_directional"}
    assert double.look["geom_rgba"] == (2, 4)  # of one world, under a vmap
    jax.effects_barrier()
    assert bool(double.shadow.any()) == on
    assert double.calls == ["init"]


@pytest.mark.usefixtures("installed")
def test_training_and_evaluation_share_the_one_renderer():
    first, second = make(), make()
    for renderer in (second, first):
        renderer.open()
    assert len(Double.built) == 1
    for options, message in (
        ({"num_envs": 2}, r"num_envs=2: renderer='madrona' draws with num_envs=3 in this process"),
        ({"image_size": 8}, r"size=\(8, 8\): renderer='madrona' draws with size=\(4, 6\)"),
        ({"cameras": ["b"]}, r"cameras=\('b',\): renderer='madrona' draws with cameras=\('a', 'b', 'c'\)"),
        ({"shadows": True}, r"shadows=True: "),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
    with pytest.raises(ValueError, match="draws another scene in this process"):
        MadronaRenderer(mujoco.MjModel.from_xml_string(SCENE.replace("0.1", "0.2")), num_envs=3, image_size=(4, 6))


@pytest.mark.usefixtures("installed")
def test_it_is_mapped_once_over_all_worlds():
    renderer = make()
    renderer.open()
    count = MODEL.ngeom, MODEL.nbody, MODEL.ncam

    def draw(*batch):
        geoms, bodies, cameras = count
        shapes = (geoms, 3), (bodies, 4), (cameras, 3), (cameras, 3, 3)
        return [jnp.ones((*batch, *shape)) for shape in shapes]

    rgba, depth = jax.jit(jax.vmap(lambda *world: renderer._draw(madrona.World(*world))))(*draw(3))
    assert rgba.shape == (3, 3, 4, 6, 4)
    assert depth.shape == (3, 3, 4, 6, 1)
    # A field that no world changes is the same in all.
    geoms, *others = draw(3)
    some = jax.vmap(lambda *world: renderer._draw(madrona.World(*world)), in_axes=(0, None, 0, 0))
    assert some(geoms, draw()[1], *others[1:])[0].shape == (3, 3, 4, 6, 4)
    with pytest.raises(ValueError, match="draws 3 worlds at once: got 2"):
        jax.vmap(lambda *world: renderer._draw(madrona.World(*world)))(*draw(2))
    with pytest.raises(ValueError, match="mapped twice: expected one vmap"):
        jax.vmap(jax.vmap(lambda *world: renderer._draw(madrona.World(*world))))(*draw(2, 3))
    with pytest.raises(Exception, match="expected to be under a vmap"):
        jax.block_until_ready(jax.jit(lambda *world: renderer._draw(madrona.World(*world)))(*draw()))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "device='cpu': renderer='madrona' needs a GPU; nearest: renderer=warp"),
        ({"segmentation": True}, "segmentation=True: renderer='madrona' has none"),
        ({"image_size": {"a": 4, "b": 4, "c": 8}}, "renderer='madrona' has one size for all cameras"),
        ({"cameras": ["d"]}, "camera 'd' does not exist"),
    ],
)
def test_what_madrona_lacks_is_refused_and_nothing_reserved(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
    assert madrona._in_use is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("field", ["geom_rgba", "light_dir", "cam_fovy", "mat_rgba"])
def test_what_is_uploaded_once_cannot_vary(field):
    with pytest.raises(ValueError, match=f"variation of '{field}': renderer='madrona' uploads it once"):
        simulate(make(), variation=lambda key: {field: jnp.asarray(getattr(MODEL, field), jnp.float32)})


@pytest.mark.usefixtures("installed")
def test_poses_may_vary():
    def nearer(key):
        return {"cam_pos": jnp.asarray(MODEL.cam_pos, jnp.float32).at[0, 2].set(jax.random.uniform(key, maxval=9.0))}

    simulator = simulate(make(depth=True), variation=nearer)
    variation, _, out = simulator.step(*simulator.start(0), np.zeros((3, 1), np.float32))
    np.testing.assert_allclose(out.frames["depth/a"][:, 0, 0, 0], variation.model["cam_pos"][:, 0, 2], rtol=1e-6)


def test_without_madrona_that_is_said():
    with pytest.raises(ValueError, match=r"madrona_mjx is not installed: it is built from source, https://.*=warp$"):
        sheeplike.envs.make("cartpole_balance", num_envs=2, renderer="madrona")


def test_a_madrona_for_another_jax_is_told_from_none(monkeypatch):
    def fail(name):
        raise ModuleNotFoundError("No module named 'jaxlib.hlo_helpers'", name="jaxlib.hlo_helpers")

    monkeypatch.setattr(madrona, "importlib", SimpleNamespace(import_module=fail))
    with pytest.raises(ValueError, match=r"cannot be imported beside JAX \d.*: No module named 'jaxlib.hlo_helpers'"):
        make()


@pytest.mark.usefixtures("installed")
def test_names_and_types_are_those_of_warp():
    options = {"num_envs": 3, "image_size": (4, 6), "depth": True}
    assert make(depth=True).spaces == WarpRenderer(MODEL, **options).spaces
