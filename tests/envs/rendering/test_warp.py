"""Frames of Warp's cameras, against MuJoCo's own ray casting, pixel by pixel."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest
import torch
from mujoco import mjx

import sheeplike.envs
from sheeplike.envs.mjx.options import SimulationOptions
from sheeplike.envs.mjx.rendering.warp import WarpRenderer
from sheeplike.envs.mjx.tasks.franka_pick import FrankaPick
from sheeplike.envs.mjx.vector_env import MjxVectorEnv

GROUPS = np.array([1, 1, 1, 0, 0, 0], np.uint8)


def cast(model: mujoco.MjModel, data: mujoco.MjData, camera: str, size: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """Planar depth in metres and geom ids, (H, W) each, along the ray through the middle of each pixel."""
    height, width = size
    index = model.camera(camera).id
    slope = np.tan(np.radians(model.cam_fovy[index]) / 2)
    x = (2 * (np.arange(width) + 0.5) / width - 1) * slope * width / height
    y = (1 - 2 * (np.arange(height) + 0.5) / height) * slope
    rays = np.stack([*np.meshgrid(x, y), np.full(size, -1.0)], -1) @ data.cam_xmat[index].reshape(3, 3).T
    depth, ids = np.zeros(size), np.full(size, -1)
    hit = np.zeros(1, np.int32)
    for row, column in np.ndindex(*size):
        # Rays reach one metre along the optical axis, so that distances are planar depths.
        distance = mujoco.mj_ray(model, data, data.cam_xpos[index], rays[row, column], GROUPS, 1, -1, hit)
        if hit[0] >= 0:
            depth[row, column], ids[row, column] = distance, hit[0]
    return depth, ids


def compare(model, data, camera, depth, ids, *, odd: int) -> None:
    """At most ``odd`` pixels, on edges, may show another geom; the others are as deep as they should be."""
    true_depth, true_ids = cast(model, data, camera, ids.shape)
    agree = ids == true_ids
    assert (~agree).sum() <= odd
    np.testing.assert_allclose(depth[agree], true_depth[agree], rtol=2e-4)
    # An edge shows one of its two sides.
    assert set(ids[~agree]) <= set(true_ids.ravel())


@pytest.fixture(scope="module")
def seeing():
    """Two cameras of two sizes, neither of them square, which see all that there is to see."""
    sizes = {"front": (36, 48), "wrist": (32, 24)}
    return sheeplike.envs.make(
        "franka_pick", num_envs=2, image_size=sizes, depth=True, segmentation=True, picked_probability=0.0
    )


def test_depth_and_segmentation_are_those_of_mujoco(seeing):
    assert {key: (space.shape, space.dtype.name) for key, space in seeing.single_observation_space.items()} == {
        "depth/front": ((36, 48, 1), "float32"),
        "depth/wrist": ((32, 24, 1), "float32"),
        "pixels/front": ((36, 48, 3), "uint8"),
        "pixels/wrist": ((32, 24, 3), "uint8"),
        "privileged_state": ((52,), "float32"),
        "segmentation/front": ((36, 48, 1), "int32"),
        "segmentation/wrist": ((32, 24, 1), "int32"),
        "state": ((22,), "float32"),
    }
    model = FrankaPick().model
    obs, _ = seeing.reset(seed=1)
    for time in range(16):
        if time % 15 == 0:
            for world in range(2):
                # The step's own inputs of the kinematics.
                data = mujoco.MjData(model)
                data.qpos[:] = seeing._state.data.qpos[world]
                data.mocap_pos[:] = seeing._state.data.mocap_pos[world]
                mujoco.mj_forward(model, data)
                for camera in ("front", "wrist"):
                    depth, ids = (obs[f"{kind}/{camera}"][world, ..., 0].numpy() for kind in ("depth", "segmentation"))
                    compare(model, data, camera, depth, ids, odd=8)
                    assert len(np.unique(ids)) >= 5
        obs, *_ = seeing.step(torch.tensor([[1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]]))
    space = seeing.observation_space
    assert all(space[key].contains(value.numpy()) for key, value in obs.items())
    assert seeing.simulator.compilations == 1


def test_a_camera_sees_the_same_beside_any_other(seeing):
    """Colours do not depend on what else is rendered, nor on the sizes of the others."""
    one = sheeplike.envs.make("franka_pick", num_envs=2, cameras=["wrist"], image_size=(32, 24), picked_probability=0.0)
    (alone, _), (beside, _) = one.reset(seed=3), seeing.reset(seed=3)
    assert list(alone) == ["pixels/wrist", "privileged_state", "state"]
    for _ in range(3):
        assert torch.equal(alone["pixels/wrist"], beside["pixels/wrist"])
        assert alone["pixels/wrist"].float().std() > 10
        (alone, *_), (beside, *_) = (env.step(torch.full((2, 3), 0.5)) for env in (one, seeing))


SCENE = """
<mujoco>
  <visual><headlight ambient="0.5 0.5 0.5" diffuse="0 0 0" specular="0 0 0"/></visual>
  <asset>
    <texture name="board" type="2d" builtin="checker" width="64" height="64" rgb1="1 1 1" rgb2="0.2 0.2 0.2"/>
    <material name="board" texture="board" texrepeat="1 1"/>
  </asset>
  <worldbody>
    <light type="directional" pos="0 0 9" dir="1 0 -1" diffuse="0.5 0.5 0.5" specular="0 0 0" castshadow="true"/>
    <camera name="above" pos="0 0 8" fovy="60"/>
    <camera name="aside" pos="0 -8 1" xyaxes="1 0 0 0 0 1" fovy="20"/>
    <geom name="floor" type="box" size="3 3 0.1" pos="0 0 -0.1" material="board"/>
    <geom name="hidden" type="box" size="9 9 0.1" pos="0 0 4" rgba="1 1 1 0"/>
    <geom name="collision" type="box" size="9 9 0.1" pos="0 0 5" group="3"/>
    <geom name="glass" type="box" size="0.4 0.4 0.1" pos="-2 -2 1" rgba="0 0 1 0.1"/>
    <body name="ball" pos="0 0 1"><freejoint/><geom name="ball" type="sphere" size="0.5" rgba="1 0 0 1"/></body>
  </worldbody>
</mujoco>
"""


def draw(scene: str, fovy: tuple[float, ...] = (), image_size=64, **options) -> dict[str, np.ndarray]:
    """Frames of a scene as it stands, from all its cameras; of as many worlds as there are lenses."""
    model = mujoco.MjModel.from_xml_string(scene)
    renderer = WarpRenderer(model, SimulationOptions(**options), num_envs=max(len(fovy), 1), image_size=image_size)
    if fovy:
        renderer.vary(["cam_fovy"])
    renderer.open()
    batch = mjx.put_model(model, impl="warp")
    data = mjx.make_data(model, impl="warp", naconmax=8, njmax=16)

    @jax.jit
    @jax.vmap
    def frames(lens, qpos):
        varied = batch.tree_replace({"cam_fovy": jnp.full_like(batch.cam_fovy, lens)}) if fovy else batch
        return renderer.render(varied, mjx.kinematics(varied, data.replace(qpos=qpos)))[0]

    return jax.device_get(frames(jnp.asarray(fovy or (0.0,)), jnp.tile(batch.qpos0, (renderer.num_envs, 1))))


def still(scene: str, fovy: float | None = None) -> tuple[mujoco.MjModel, mujoco.MjData]:
    model = mujoco.MjModel.from_xml_string(scene)
    if fovy is not None:
        model.cam_fovy[:] = fovy
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    return model, data


def test_depth_is_along_the_optical_axis_and_nothing_has_none():
    frames = draw(SCENE, image_size=(32, 48), depth=True, segmentation=True)
    depth, ids = frames["depth/above"][0, ..., 0], frames["segmentation/above"][0, ..., 0]
    model, data = still(SCENE)
    floor, nothing = ids == model.geom("floor").id, ids == -1
    # The camera looks straight down from 8 m: the whole floor is as far away, also where its rays are slanted.
    np.testing.assert_allclose(depth[floor], 8.0, rtol=1e-5)
    assert floor[7].any()
    # Beside the floor there is nothing: geoms without opacity and those of higher groups are not there.
    assert nothing[:, 0].all()
    assert (depth[nothing] == 0).all()
    assert depth[16, 24] == pytest.approx(6.5, abs=0.05)
    assert set(np.unique(ids)) == {-1, *(model.geom(name).id for name in ("floor", "glass", "ball"))}
    for camera in ("above", "aside"):
        compare(
            model,
            data,
            camera,
            frames[f"depth/{camera}"][0, ..., 0],
            frames[f"segmentation/{camera}"][0, ..., 0],
            odd=4,
        )


def pixel(image: np.ndarray, x: float, y: float, z: float = 0.0) -> np.ndarray:
    """The colour that the camera above shows at a place."""
    height, width, _ = image.shape
    scale = height / 2 / np.tan(np.radians(30)) / (8 - z)
    return image[int(height / 2 - y * scale), int(width / 2 + x * scale)].astype(float)


def test_shadows_fall_where_light_does_not_and_only_if_asked_for():
    plain, shadowed = (draw(SCENE, image_size=96, shadows=on)["pixels/above"][0] for on in (False, True))
    # Light comes in at 45 degrees: a ball 1 m above the floor darkens the place 1 m further on.
    lit, dark = pixel(plain, 1.0, 0.0), pixel(shadowed, 1.0, 0.0)
    assert (dark < 0.9 * lit).all()
    for place in ((-1.0, 0.0), (1.0, 1.5), (2.5, 0.0)):
        np.testing.assert_array_equal(pixel(plain, *place), pixel(shadowed, *place))
    assert 0.005 < (plain != shadowed).any(-1).mean() < 0.1


def test_textures_show_only_if_asked_for():
    plain, textured = (draw(SCENE, image_size=96, textures=on)["pixels/above"][0] for on in (False, True))
    corners = [(x, y) for x in (-1.2, 1.2) for y in (-1.2, 1.2)]
    floor, board = ([pixel(image, *corner) for corner in corners] for image in (plain, textured))
    np.testing.assert_allclose(floor, np.broadcast_to(floor[0], (4, 3)), atol=1)
    # One repeat over the floor: two light quarters and two dark ones, crosswise.
    light, dark = board[0], board[1]
    assert abs(light - dark).min() > 50
    np.testing.assert_array_equal(board[3], light)
    np.testing.assert_array_equal(board[2], dark)
    np.testing.assert_array_equal(pixel(plain, 0, 0, 1.5), pixel(textured, 0, 0, 1.5))


def test_lenses_may_differ_between_worlds():
    lenses = (40.0, 60.0, 75.0)
    frames = draw(SCENE, lenses, image_size=(24, 32), depth=True, segmentation=True)
    for world, lens in enumerate(lenses):
        model, data = still(SCENE, lens)
        images = (frames[f"{kind}/above"][world, ..., 0] for kind in ("depth", "segmentation"))
        compare(model, data, "above", *images, odd=4)
    assert len({np.sum(frames["segmentation/above"][world] == 0) for world in range(3)}) == 3
    # The nominal lens, as rays that were computed once have it, comes to the same.
    nominal = draw(SCENE, image_size=(24, 32), segmentation=True)["segmentation/above"][0]
    assert (nominal != frames["segmentation/above"][1]).sum() <= 2


def test_the_simulator_tells_which_fields_differ():
    lens = {"lens": {"field": "cam_fovy", "operation": "set", "distribution": {"uniform": [20.0, 60.0]}}}
    look = SimulationOptions(segmentation=True, cameras=("front",))
    env = MjxVectorEnv(FrankaPick(), num_envs=2, image_size=24, simulation=look, randomization=lens)
    obs, _ = env.reset(seed=0)
    fovy, model = np.asarray(env.varied_fields["cam_fovy"]), FrankaPick().model
    assert abs(fovy[0] - fovy[1]).max() > 1
    for world in range(2):
        model.cam_fovy[:] = fovy[world]
        data = mujoco.MjData(model)
        data.qpos[:] = env._state.data.qpos[world]
        data.mocap_pos[:] = env._state.data.mocap_pos[world]
        mujoco.mj_forward(model, data)
        _, ids = cast(model, data, "front", (24, 24))
        assert (obs["segmentation/front"][world, ..., 0].numpy() != ids).sum() <= 6


CLOTH = """
<mujoco>
  <worldbody>
    <camera name="above" pos="0 0 2"/>
    <geom name="floor" type="box" size="2 2 0.1" pos="0 0 -0.1"/>
    <flexcomp name="cloth" type="grid" count="4 4 1" spacing="0.2 0.2 0.2" pos="0 0 0.5" radius="0.01" dim="2"/>
  </worldbody>
</mujoco>
"""


def test_flexes_are_refused():
    cloth = mujoco.MjModel.from_xml_string(CLOTH)
    with pytest.raises(ValueError, match="flexes"):
        WarpRenderer(cloth, SimulationOptions(), num_envs=1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sees_what_a_cpu_sees(seeing):
    there = sheeplike.envs.make(
        "franka_pick",
        num_envs=2,
        device="cuda",
        image_size={"front": (36, 48), "wrist": (32, 24)},
        depth=True,
        segmentation=True,
        picked_probability=0.0,
    )
    (one, _), (other, _) = seeing.reset(seed=1), there.reset(seed=1)
    for camera in ("front", "wrist"):
        agree = one[f"segmentation/{camera}"] == other[f"segmentation/{camera}"].cpu()
        assert agree.float().mean() > 0.98
        depths = (env[f"depth/{camera}"].cpu()[agree] for env in (one, other))
        torch.testing.assert_close(*depths, rtol=1e-3, atol=1e-4)
        pixels = (env[f"pixels/{camera}"].cpu().float() for env in (one, other))
        assert torch.sub(*pixels).abs().median() <= 2
