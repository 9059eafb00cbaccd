"""Conversion of an environment's spaces to ours: frames brought to one size, vectors, actions."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from PIL import Image

from sheeplike.agents.spaces import ObservationKeys
from sheeplike.envs import InvalidOption
from sheeplike.envs.gym.observations import Images, Observer, choose_frames, parts_of, translate
from sheeplike.envs.gym.options import GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv
from sheeplike.options import build


class Any_(gymnasium.Env):
    """Samples its observations."""

    def __init__(self, observations: spaces.Space, actions: spaces.Space | None = None, **rendering: Any) -> None:
        self.observation_space = observations
        self.action_space = actions or spaces.Discrete(2)
        self.metadata = {"render_modes": ["rgb_array"] * bool(rendering)}
        self.rendering, self.taken = rendering, []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.last = self.observation_space.sample()
        return self.last, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.taken.append(action)
        self.last = self.observation_space.sample()
        return self.last, 0.0, False, False, {}

    def render(self) -> Any:
        return self.rendering["frame"]


def make(observations: spaces.Space, actions: spaces.Space | None = None, **options: Any) -> tuple[GymVectorEnv, list]:
    made: list[Any_] = []
    frame = options.pop("frame", None)

    def one(render_mode: str | None) -> Any_:
        made.append(Any_(observations, actions, **({} if frame is None else {"frame": frame})))
        return made[-1]

    num_envs = options.pop("num_envs", 1)
    settings = build(GymOptions, {"id": "any", "episode_length": 9} | options)
    return GymVectorEnv(one, settings, num_envs=num_envs, image_size=32), made


def box(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    low, high = (0, 255) if dtype == np.uint8 else (-1, 1)
    return spaces.Box(low, high, shape, dtype)


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        (box(4), {"state": 4}),
        (box(2, 3, dtype=np.float64), {"state": 6}),
        (spaces.Box(-1, 1, (), np.float32), {"state": 1}),
        (spaces.Discrete(5, start=2), {"state": 5}),
        (spaces.MultiDiscrete([2, 3]), {"state": 5}),
        (spaces.MultiBinary(3), {"state": 3}),
        (spaces.Tuple([spaces.Discrete(2), box(3)]), {"0": 2, "1": 3, "state": 5}),
        (spaces.Dict(b=box(2), a=box(3), words=spaces.Text(9)), {"a": 3, "b": 2, "state": 5}),
        (spaces.Dict(deep=spaces.Dict(x=box(2), y=spaces.Discrete(3))), {"deep/x": 2, "deep/y": 3, "state": 5}),
        (spaces.Dict(state=box(2), other=box(3)), {"other": 3, "state": 2}),  # the name is taken
        (spaces.Dict(x=box(1), many=spaces.Sequence(box(2))), {"state": 1, "x": 1}),
        (box(7, 7, 3, dtype=np.uint8), {"state": 147}),  # too small to be a picture
        (box(20, 20, 3, dtype=np.uint8), {"pixels/observation": (32, 32, 3)}),
        (box(40, 20, dtype=np.uint8), {"pixels/observation": (32, 32, 1)}),
        (box(3, 40, 40, dtype=np.uint8), {"pixels/observation": (32, 32, 3)}),  # channels first
        (box(84, 84, 4, dtype=np.uint8), {"pixels/observation": (32, 32, 4)}),
        (
            spaces.Dict(cam=box(32, 32, 3, dtype=np.uint8), wrist=box(16, 16, 1, dtype=np.uint8), q=box(2)),
            {"pixels/cam": (32, 32, 3), "pixels/wrist": (32, 32, 1), "q": 2, "state": 2},
        ),
    ],
)
def test_observations(space: spaces.Space, expected: dict[str, Any]) -> None:
    env, _ = make(space, num_envs=2)
    shapes = {key: value if isinstance(value, tuple) else (value,) for key, value in expected.items()}
    assert {key: one.shape for key, one in env.single_observation_space.items()} == shapes
    obs, _ = env.reset(seed=0)
    obs2, *_ = env.step(torch.zeros(2, dtype=torch.int64))
    for seen in (obs, obs2):
        assert {key: tuple(value.shape) for key, value in seen.items()} == {k: (2, *s) for k, s in shapes.items()}
    ObservationKeys(env.single_observation_space, ["*"])  # agents can have all of them


def test_values_arrive_where_they_belong() -> None:
    space = spaces.Dict(z=spaces.Discrete(4, start=-1), a=spaces.Tuple([box(2), spaces.MultiBinary(2)]))
    env, made = make(space)
    obs, _ = env.reset(seed=0)
    last = made[-1].last
    one_hot = np.eye(4)[last["z"] + 1]
    assert obs["z"][0].tolist() == one_hot.tolist()
    assert np.allclose(obs["a/0"][0], last["a"][0])
    assert obs["a/1"][0].tolist() == last["a"][1].tolist()
    assert torch.equal(obs["state"], torch.cat([obs["a/0"], obs["a/1"], obs["z"]], -1))


@pytest.mark.parametrize(
    ("space", "value"),
    [(spaces.Discrete(5), -1), (spaces.MultiDiscrete([2, 3]), [0, 3]), (spaces.MultiBinary(2), [1, 2])],
    ids=str,
)
def test_numbers_outside_their_space_are_refused(space: spaces.Space, value: Any) -> None:
    observe = Observer(space, GymOptions(id="t", frames="none"), (32, 32))
    assert observe(space.sample(), lambda: None, first=True)
    with pytest.raises(ValueError, match=r"expected"):
        observe(value, lambda: None, first=True)


def test_a_channels_first_image_is_turned() -> None:
    env, made = make(box(3, 32, 32, dtype=np.uint8))
    obs, _ = env.reset(seed=0)
    assert torch.equal(obs["pixels/observation"][0], torch.from_numpy(made[-1].last).permute(1, 2, 0))


def test_frames_come_from_where_they_are_asked_for() -> None:
    picture, vector = box(32, 32, 3, dtype=np.uint8), box(3)
    frame = np.full((64, 64, 3), 7, np.uint8)
    cases = [
        (picture, "auto", {"pixels/observation"}),
        (picture, "none", None),
        (picture, "render", {"pixels/render"}),
        (vector, "auto", {"pixels/render", "state"}),
        (vector, "none", {"state"}),
    ]
    for space, frames, keys in cases:
        if keys is None:
            with pytest.raises(ValueError, match="frames=render"):
                make(space, frames=frames, frame=frame)
            continue
        env, _ = make(space, frames=frames, frame=frame)
        assert set(env.single_observation_space) == keys
        assert {int(v[0, 0, 0, 0]) for k, v in env.reset()[0].items() if k == "pixels/render"} <= {7}
    assert set(make(vector)[0].single_observation_space) == {"state"}  # it cannot render


def test_frames_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match=r"frames='observation'.*nearest: render"):
        choose_frames("observation", Any_(box(3), frame=None))
    with pytest.raises(ValueError, match=r"frames='render'.*rgb_array"):
        choose_frames("render", Any_(box(3)))
    silent = Any_(box(3))
    silent.metadata = {"render_modes": None}
    assert choose_frames("auto", silent) == "none"


def test_a_frame_that_is_none_is_an_error_of_the_environment() -> None:
    env, _ = make(box(3), frames="render", frame=np.zeros((4, 4, 3)), max_restarts=0)
    with pytest.raises(RuntimeError, match=r"render\(\).*float64 \(4, 4, 3\).*uint8 \(H, W, 3\)"):
        env.reset()


def test_what_has_no_fixed_size_is_left_out_aloud_and_texts_silently(capsys: pytest.CaptureFixture[str]) -> None:
    space = spaces.Dict(x=box(1), many=spaces.Sequence(box(2)), mission=spaces.Text(9))
    assert [part.name for part in parts_of(space)[2]] == ["many", "mission"]
    make(space)
    assert capsys.readouterr().err.splitlines() == [
        "sheeplike: any: the observation many is left out: it has no fixed size"
    ]


@pytest.mark.parametrize(
    ("space", "expected", "pairs"),
    [
        (spaces.Discrete(3), spaces.Discrete(3), [(2, 2)]),
        (spaces.Discrete(3, start=-1), spaces.Discrete(3), [(0, -1), (2, 1)]),
        (spaces.MultiDiscrete([3, 2]), spaces.MultiDiscrete([3, 2]), [([2, 1], [2, 1])]),
        (spaces.MultiDiscrete([3, 2], start=[1, 4]), spaces.MultiDiscrete([3, 2]), [([2, 0], [3, 4])]),
        (
            spaces.MultiDiscrete([[2, 3], [4, 5]]),
            spaces.MultiDiscrete([2, 3, 4, 5]),
            [([1, 2, 3, 4], [[1, 2], [3, 4]])],
        ),
        (spaces.MultiBinary(3), spaces.MultiDiscrete([2, 2, 2]), [([1, 0, 1], [1, 0, 1])]),
        (box(2), box(2), [([-0.5, 1.0], [-0.5, 1.0]), ([-3.0, 3.0], [-1, 1])]),
        (
            spaces.Box(np.array([0, -2]), np.array([10, 2]), dtype=np.float64),
            box(2),
            [([-1, -1], [0, -2]), ([0, 0], [5, 0]), ([1, 1], [10, 2]), ([2, 0.5], [10, 1])],
        ),
        (spaces.Box(0, 1, (2, 2), np.float32), box(4), [([-1, 0, 1, 0], [[0, 0.5], [1, 0.5]])]),
        (spaces.Box(0, 4, (1,), np.int32), box(1), [([-1], [0]), ([0.4], [3]), ([1], [4])]),
        (spaces.Box(0, 1, (2,), bool), box(2), [([-0.4, 0.4], [False, True])]),
    ],
)
def test_actions(space: spaces.Space, expected: spaces.Space, pairs: list[tuple[Any, Any]]) -> None:
    outside, to_env = translate(space)
    assert outside == expected
    for action, wanted in pairs:
        dtype = np.float32 if isinstance(space, spaces.Box) else np.int64
        taken = to_env(np.asarray(action, dtype))
        assert space.contains(taken), taken
        assert np.asarray(taken).tolist() == np.asarray(wanted).tolist()


def test_rounding_never_leaves_the_bounds() -> None:
    low, high = np.float32(-0.1), np.float32(0.3)
    space = spaces.Box(low, high, (1,), np.float32)
    _, to_env = translate(space)
    for action in np.linspace(-1, 1, 1001, dtype=np.float32):
        assert space.contains(to_env(action[None]))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-np.inf, np.inf, (2,)), r"-1 .* 1"),
        (spaces.Dict(a=spaces.Discrete(2)), r"Discrete, MultiDiscrete, MultiBinary.*Box"),
    ],
)
def test_other_actions_are_refused(space: spaces.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(box(3), space)


def test_actions_reach_every_world() -> None:
    env, made = make(box(3), spaces.MultiDiscrete([3, 4]), num_envs=2)
    assert env.action_space.shape == (2, 2)
    env.reset()
    env.step(torch.tensor([[2, 3], [0, 1]]))
    assert [one.taken[0].tolist() for one in made[-2:]] == [[2, 3], [0, 1]]
    env, made = make(box(3), spaces.Box(0, 10, (2,), np.float64), num_envs=2)
    env.reset()
    env.step(torch.tensor([[-1.0, 0.0], [1.0, 9.0]]))
    assert [one.taken[0].tolist() for one in made[-2:]] == [[0, 5], [10, 10]]


# --- frames ----------------------------------------------------------------------------------------------------------


def images(size: tuple[int, int] = (64, 64), **options: Any) -> Images:
    return Images(build(GymOptions, {"id": "any", **options}), size)


def frame(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


@pytest.mark.parametrize("resize", ["auto", "pad"])
def test_what_fits_is_padded_in_the_middle_and_stays_crisp(resize: str) -> None:
    tiles = frame(56, 56)
    image = images(resize=resize)(tiles, first=True)
    assert image.shape == (64, 64, 3)
    assert np.array_equal(image[4:60, 4:60], tiles)
    assert image.sum() == tiles.sum()  # black around it
    small = frame(20, 30)
    doubled = images()(small, first=True)
    assert np.array_equal(doubled[12:52, 2:62], small.repeat(2, 0).repeat(2, 1))
    assert np.array_equal(images((64, 48))(frame(64, 48), first=True), frame(64, 48))


def test_what_does_not_fit_is_refused_by_pad_and_averaged_otherwise() -> None:
    large = frame(128, 192)
    with pytest.raises(InvalidOption, match=r"resize=pad.*128x192.*nearest: resize=area"):
        images(resize="pad")(large, first=True)
    mean = large.reshape(64, 2, 64, 3, 3).mean((1, 3))
    for resize in ("auto", "area"):
        assert np.abs(images(resize=resize)(large, first=True) - mean).max() <= 1  # rounded twice
    nearest = images(resize="nearest")(large, first=True)
    assert {tuple(pixel) for pixel in nearest.reshape(-1, 3)} <= {tuple(pixel) for pixel in large.reshape(-1, 3)}


def test_bilinear_is_what_the_authors_of_dreamer_use() -> None:
    screen = frame(210, 160)
    expected = np.asarray(Image.fromarray(screen).resize((64, 64), Image.BILINEAR))
    assert np.array_equal(images(resize="bilinear")(screen, first=True), expected)
    grey = images(resize="bilinear", grayscale=True)
    assert grey.channels(3) == 1
    weighted = (expected * np.array([0.299, 0.587, 1 - (0.299 + 0.587)])).sum(-1)
    assert np.abs(grey(screen, first=True)[..., 0] - weighted).max() <= 1


@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_any_number_of_channels(channels: int) -> None:
    large = frame(128, 128, channels)
    image = images(grayscale=True)(large, first=True)
    assert image.shape == (64, 64, channels)
    assert np.abs(image - large.reshape(64, 2, 64, 2, channels).mean((1, 3))).max() <= 1


def test_frames_of_changing_size() -> None:
    maker = images()
    for height, width in ((56, 56), (130, 70), (56, 56), (8, 100)):
        assert maker(frame(height, width), first=False).shape == (64, 64, 3)


def test_stacks() -> None:
    maker = images((16, 16), grayscale=True, frame_stack=3)
    assert maker.channels(3) == 3
    grey = [
        maker(np.full((16, 16, 3), value, np.uint8), first=value == 40)[0, 0].tolist() for value in (10, 20, 40, 50)
    ]
    expected = [[10, 10, 10], [10, 10, 20], [40, 40, 40], [40, 40, 50]]
    assert np.abs(np.array(grey) - expected).max() <= 1


@pytest.mark.parametrize(
    "entries",
    [
        {"a/b": spaces.Box(0, 1, (2,)), "a": spaces.Dict({"b": spaces.Box(0, 1, (2,))})},
        {"pixels/cam": spaces.Box(0, 1, (2,)), "cam": spaces.Box(0, 255, (32, 32, 3), np.uint8)},
    ],
)
def test_names_that_would_hide_one_another_are_refused(entries) -> None:
    options = GymOptions(id="e", frames="observation" if "cam" in entries else "none")
    with pytest.raises(ValueError, match="observation space"):
        Observer(spaces.Dict(entries), options, (48, 48))
