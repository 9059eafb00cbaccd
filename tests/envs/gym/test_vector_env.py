"""The vector environment, on an environment of which every number is known."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import sheeplike.envs
from sheeplike.envs import InvalidOption
from sheeplike.envs.gym.options import AtariOptions, GymOptions
from sheeplike.envs.gym.vector_env import GymVectorEnv, send
from sheeplike.envs.gym.world import derive_seed
from sheeplike.options import build


class Counter(gymnasium.Env):
    """Counts its steps, terminates after ``length`` of them, pays what the action says, and shows all that.

    The image's first pixel is the count; the vector holds the count, the seed of the stream and the episode in it.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012, as Gymnasium has it

    def __init__(self, length: int = 5, render_mode: str | None = None) -> None:
        self.length, self.render_mode = length, render_mode
        self.observation_space = spaces.Dict(
            image=spaces.Box(0, 255, (16, 16, 3), np.uint8), numbers=spaces.Box(-np.inf, np.inf, (3,), np.float64)
        )
        self.action_space = spaces.Discrete(3, start=5)
        self.count, self.stream, self.episode = 0, -1, 0
        self.taken: list[int] = []

    def _seen(self) -> dict[str, np.ndarray]:
        image = np.full((16, 16, 3), 10 * self.count, np.uint8)
        return {"image": image, "numbers": np.array([self.count, self.stream % 2**20, self.episode], np.float64)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode = 0 if seed is not None else self.episode + 1
        self.stream, self.count = self.stream if seed is None else seed, 0
        return self._seen(), {"noise": "as environments have it"}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        self.count += 1
        self.taken.append(int(action))
        terminated = self.count >= self.length
        return self._seen(), float(action), terminated, False, {"is_success": terminated, "odd": np.zeros(self.count)}


ARGUMENTS = ("image_size", "device", "action_repeat", "seed")


def worlds(num_envs: int = 2, *, length: int = 5, **options: Any) -> GymVectorEnv:
    own = {"image_size": 16} | {name: options.pop(name) for name in ARGUMENTS if name in options}
    settings = build(GymOptions, {"id": "Counter", "episode_length": 100} | options)
    return GymVectorEnv(lambda render_mode: Counter(length), settings, num_envs=num_envs, **own)


def act(*actions: int) -> torch.Tensor:
    return torch.tensor(actions)


def test_what_it_is() -> None:
    env = worlds(3, action_repeat=2, episode_length=7)
    assert isinstance(env, gymnasium.vector.VectorEnv)
    assert (env.name, env.num_envs, env.device, env.closed) == ("Counter", 3, torch.device("cpu"), False)
    assert env.episode_length == 4  # 7 steps, two by two
    assert env.metadata == {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 10.0}
    assert env.single_action_space == spaces.Discrete(3)
    assert {key: (space.shape, space.dtype) for key, space in env.single_observation_space.items()} == {
        "numbers": ((3,), np.float32),
        "pixels/image": ((16, 16, 3), np.uint8),
        "state": ((3,), np.float32),
    }
    obs, _ = env.reset()
    for key, space in env.observation_space.items():
        assert space.contains(obs[key].numpy()), key
    env.close()
    assert env.closed
    with pytest.raises(RuntimeError):
        env.step(act(0, 0, 0))


def test_next_step_reset_to_the_letter() -> None:
    env = worlds(1, length=3)
    rows = []
    obs, info = env.reset(seed=0)
    outputs = [(obs, torch.zeros(1), torch.zeros(1), torch.zeros(1), info)]
    outputs += [env.step(act(action)) for action in (0, 1, 2, 2, 0)]
    for obs, reward, terminated, truncated, info in outputs:
        episode = info["episode"]
        numbers = [obs["numbers"][0, 0], obs["pixels/image"][0, 0, 0, 0], reward, terminated, truncated]
        rows.append(
            [float(x) for x in [*numbers, episode["return"], episode["length"], episode["success"].nan_to_num()]]
        )
    assert rows == [
        # count, pixel, reward, terminated, truncated, return, length, success
        [0, 0, 0, 0, 0, 0, 0, 0],
        [1, 10, 5, 0, 0, 5, 1, 0],
        [2, 20, 6, 0, 0, 11, 2, 0],
        [3, 30, 7, 1, 0, 18, 3, 1],  # the true last frame
        [0, 0, 0, 0, 0, 0, 0, 0],  # its action was ignored
        [1, 10, 5, 0, 0, 5, 1, 0],
    ]


def test_info_has_the_same_keys_and_dtypes_at_every_call() -> None:
    env = worlds(2, length=2)
    for _, info in [env.reset(seed=0), *(env.step(act(0, 0))[::4] for _ in range(3))]:
        assert info.keys() == {"success", "reward_terms", "episode", "nonfinite", "restarted"}
        assert info["reward_terms"] == info["episode"]["reward_terms"] == {}
        kinds = {key: value.dtype for key, value in info["episode"].items() if key != "reward_terms"}
        assert kinds == {"return": torch.float32, "length": torch.int32, "success": torch.float32}
        for key in ("nonfinite", "restarted"):
            assert (info[key].dtype, info[key].shape) == (torch.bool, (2,))


def test_a_held_action_sums_rewards_and_stops_where_the_episode_ends() -> None:
    env = worlds(1, length=5, action_repeat=3)
    env.reset(seed=0)
    obs, reward, terminated, _, info = env.step(act(1))
    assert (obs["numbers"][0, 0], reward, terminated) == (3, 18, False)
    obs, reward, terminated, _, info = env.step(act(2))
    assert (obs["numbers"][0, 0], reward, terminated) == (5, 14, True)  # two steps were left
    assert (info["episode"]["length"], info["episode"]["return"]) == (2, 32)  # policy steps


@pytest.mark.parametrize(
    ("limit", "repeat", "counts"), [(2, 1, [1, 2]), (4, 3, [3, 4]), (5, 1, [1, 2, 3, 4, 5]), (9, 2, [2, 4, 5])]
)
def test_the_time_limit_truncates_and_a_termination_comes_first(limit: int, repeat: int, counts: list[int]) -> None:
    env = worlds(1, length=5, episode_length=limit, action_repeat=repeat)
    env.reset(seed=0)
    seen = []
    while not seen or not (seen[-1][1] or seen[-1][2]):
        obs, _, terminated, truncated, _ = env.step(act(0))
        seen.append((int(obs["numbers"][0, 0]), bool(terminated), bool(truncated)))
    assert [count for count, *_ in seen] == counts
    assert seen[-1][1:] == (limit >= 5, limit < 5)
    assert len(seen) <= env.episode_length


def test_frames_are_stacked_oldest_first_and_an_episode_begins_with_its_first() -> None:
    env = worlds(1, length=3, frame_stack=3)
    assert env.single_observation_space["pixels/image"].shape == (16, 16, 9)
    seen = [env.reset(seed=0)[0], *(env.step(act(0))[0] for _ in range(5))]
    stacks = [obs["pixels/image"][0, 3, 4].tolist()[::3] for obs in seen]
    assert stacks == [[0, 0, 0], [0, 0, 10], [0, 10, 20], [10, 20, 30], [0, 0, 0], [0, 0, 10]]


def test_what_was_given_out_is_never_written_again() -> None:
    env = worlds(2, frame_stack=2)
    given = [env.reset(seed=0)[0], *(env.step(act(0, 1))[0] for _ in range(3))]
    before = [{key: value.clone() for key, value in obs.items()} for obs in given]
    for _ in range(4):
        env.step(act(2, 2))
    for obs, copy in zip(given, before, strict=True):
        for key, value in obs.items():
            assert torch.equal(value, copy[key])


def test_seeds_are_each_worlds_own_whatever_the_number_of_worlds() -> None:
    streams = {}
    for num_envs in (2, 5):
        env = worlds(num_envs)
        streams[num_envs] = env.reset(seed=7)[0]["numbers"][:, 1].tolist()
    assert len(set(streams[5])) == 5
    assert streams[5][:2] == streams[2] == [derive_seed(7, world, 0) % 2**20 for world in range(2)]
    other = worlds(2).reset(seed=8)[0]["numbers"][:, 1].tolist()
    assert not set(other) & set(streams[5])


def test_later_resets_go_on_in_each_worlds_stream() -> None:
    env = worlds(2, length=2, seed=3)
    first = env.reset()[0]["numbers"]
    assert first[:, 1].tolist() == worlds(2).reset(seed=3)[0]["numbers"][:, 1].tolist()
    again = env.reset()[0]["numbers"]
    assert torch.equal(again[:, 1], first[:, 1])
    assert again[:, 2].tolist() == [1, 1]
    for _ in range(3):
        obs, *_ = env.step(act(0, 0))
    assert obs["numbers"][:, 2].tolist() == [2, 2]
    assert env.reset(seed=3)[0]["numbers"][:, 2].tolist() == [0, 0]


def test_rewards_can_be_signs() -> None:
    env = worlds(1, clip_rewards=True)
    env.reset(seed=0)
    assert env.step(act(2))[1].tolist() == [1.0]


def test_the_brighter_of_the_last_two_frames() -> None:
    class Blinking(Counter):
        def _seen(self) -> dict[str, np.ndarray]:
            seen = super()._seen()
            seen["image"] = np.full((16, 16, 3), (50, 200, 90, 10, 30)[self.count % 5], np.uint8)
            return seen

    def pixels(action_repeat: int, options: type[GymOptions] = AtariOptions) -> list[int]:
        env = GymVectorEnv(
            lambda render_mode: Blinking(99),
            options(id="b", episode_length=9),
            num_envs=1,
            image_size=16,
            action_repeat=action_repeat,
        )
        return [int(obs["pixels/image"][0, 0, 0, 0]) for obs in (env.reset(seed=0)[0], env.step(act(0))[0])]

    assert pixels(3, GymOptions) == [50, 10]
    assert pixels(4) == [50, 30]
    assert pixels(3) == [50, 90]
    assert pixels(1) == [50, 200]


@pytest.mark.parametrize("actions", [torch.zeros(2), torch.zeros(3, dtype=torch.int64)])
def test_actions_of_another_kind_are_refused(actions: torch.Tensor) -> None:
    env = worlds(2)
    with pytest.raises(RuntimeError):
        env.step(act(0, 0))
    env.reset()
    with pytest.raises(ValueError, match=r"torch\.int64"):
        env.step(actions)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 0}, "num_envs=0"),
        ({"action_repeat": True}, r"action_repeat=True"),
        ({"image_size": (8, 8, 3)}, r"image_size=\(8, 8, 3\)"),
        ({"seed": -1}, r"seed=-1"),
        ({"device": "gpu"}, r"device='gpu'"),
        ({"frames": "rendr"}, r"frames=rendr.*auto, observation, render, none.*nearest: .*render"),
        ({"resize": "crop"}, r"resize=crop"),
        ({"vectorization": "thread"}, r"vectorization=thread"),
        ({"frame_stack": 0}, r"frame_stack=0.*nearest: .*1"),
        ({"max_restarts": -1}, r"max_restarts=-1"),
        ({"episode_length": 2.5}, r"episode_length=2.5.*1000000000.*null"),
        (
            {"episode_length": None},
            r"Counter.*nearest: .*000",
        ),
    ],
)
def test_bad_values_are_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        worlds(**{"num_envs": 2, **options})
    assert "\n" not in str(error.value)


def test_a_limit_that_the_environment_has_itself() -> None:
    class Limited(Counter):
        max_steps = 3

    env = GymVectorEnv(lambda render_mode: Limited(9), GymOptions(id="l"), num_envs=1)
    assert env.episode_length == 3
    assert sheeplike.envs.make("gym", id="CartPole-v1", num_envs=1, frames="none").episode_length == 500
    assert sheeplike.envs.make("gym", id="CartPole-v1", num_envs=1, episode_length=24).episode_length == 24


def test_worlds_in_processes_of_their_own_do_the_same() -> None:
    def run(vectorization: str) -> list[torch.Tensor]:
        env = sheeplike.envs.make(
            "gym", id="CartPole-v1", num_envs=3, frames="none", episode_length=9, vectorization=vectorization, seed=5
        )
        obs, info = env.reset()
        out = [obs["state"]]
        for step in range(25):
            obs, reward, terminated, truncated, info = env.step(torch.tensor([step % 2, 0, 1]))
            out += [obs["state"], reward, terminated, truncated, *(info["episode"][k] for k in ("return", "length"))]
        env.close()
        return out

    one, other = run("sync"), run("async")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert sum(bool(x.any()) for x in one[4::6]) > 0  # episodes were truncated


@pytest.mark.parametrize(
    ("told", "success"),
    [
        (True, 1),
        (1.0, 1),
        (np.array([1, 2]), 1),
        (0.3, 0),
        (np.nan, 0),
        (0, 0),
        (np.array([]), None),
        (None, None),
        ("no", None),
        ({"a": 1}, None),
    ],
    ids=str,
)
def test_what_counts_as_a_success(told: Any, success: float | None) -> None:
    class Tells(Counter):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return *super().step(action)[:4], {"success": told}

    env = GymVectorEnv(lambda render_mode: Tells(9), GymOptions(id="t", episode_length=9), num_envs=1)
    env.reset()
    (found,) = env.step(torch.zeros(1, dtype=torch.int64))[4]["success"].tolist()
    assert np.isnan(found) if success is None else found == success


def test_a_success_lasts_while_an_action_is_held() -> None:
    class Tells(Counter):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            found = super().step(action)
            return *found[:4], {"is_success": self.count == 1}

    env = GymVectorEnv(lambda render_mode: Tells(9), GymOptions(id="t", episode_length=9), num_envs=1, action_repeat=3)
    env.reset()
    assert env.step(torch.zeros(1, dtype=torch.int64))[4]["success"].tolist() == [1.0]


def test_an_environment_that_says_nothing_of_success_has_none() -> None:
    """One that speaks of it only where it is reached has it from then on, in all worlds and episodes."""

    class Tells(Counter):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return *super().step(action)[:4], {"is_success": True} if action == 7 else {}

    env = GymVectorEnv(lambda render_mode: Tells(2), GymOptions(id="t", episode_length=2), num_envs=2)
    seen = [
        env.reset()[1],
        *(env.step(torch.tensor([action, 0]))[4] for action in (0, 2, 0, 0)),
    ]  # 2 is the 7 of its own
    assert [info["episode"]["success"].nan_to_num(9).tolist() for info in seen] == [
        [9, 9],
        [9, 9],
        [1, 0],
        [0, 0],
        [0, 0],
    ]


def test_an_environment_that_is_not_there() -> None:
    with pytest.raises(InvalidOption, match=r"id=CartPol-v1.*<module>:<id>.*nearest: .*CartPole-v1"):
        sheeplike.envs.make("gym", id="CartPol-v1", num_envs=1)
    with pytest.raises(ValueError, match="id=null"):
        sheeplike.envs.make("gym", num_envs=1)
    with pytest.raises(ValueError, match=r"cameras=\[a\].*null"):
        sheeplike.envs.make("gym", id="CartPole-v1", num_envs=1, cameras=["a"])


def test_ids_with_a_module_and_without_a_version() -> None:
    made = sheeplike.envs.make("gym", id="minigrid:MiniGrid-Empty-5x5-v0", num_envs=1, frames="none")
    assert set(made.single_observation_space) == {"direction", "image", "state"}  # symbols are no picture
    assert made.single_observation_space["image"].shape == (147,)
    assert sheeplike.envs.make("gym", id="CartPole", num_envs=1, frames="none").episode_length == 500


@pytest.mark.parametrize(
    ("name", "message"),
    [("render_mode", "images"), ("max_episode_steps", r"env.options.episode_length")],
)
def test_arguments_that_are_not_the_users(name: str, message: str) -> None:
    with pytest.raises(InvalidOption, match=r"^arguments="):
        sheeplike.envs.make("gym", id="CartPole-v1", num_envs=1, arguments={name: 3})


def test_arguments_of_the_environment() -> None:
    env = sheeplike.envs.make(
        "gym", id="FrozenLake-v1", num_envs=2, frames="none", arguments={"map_name": "8x8", "is_slippery": False}
    )
    obs, _ = env.reset(seed=0)
    assert obs["state"].shape == (2, 64)
    assert obs["state"].argmax(-1).tolist() == [0, 0]
    obs, *_ = env.step(torch.tensor([2, 1]))  # right, down
    assert obs["state"].argmax(-1).tolist() == [1, 8]
    assert obs["state"].sum(-1).tolist() == [1, 1]


# --- to the device ---------------------------------------------------------------------------------------------------

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SHAPES = {
    "frames": ((3, 5, 7, 3), np.uint8),
    "flags": ((3,), np.bool_),
    "vector": ((3, 2), np.float32),
    "count": ((3,), np.int32),
}


def needs_gpu(test):
    return pytest.mark.gpu(NO_GPU(test))


def arrays(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 200, shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_what_is_sent_arrives_and_stays(device: str) -> None:
    """Many steps in flight, from memory that is written again at once: no tensor changes afterwards."""
    owner = arrays(0)
    sent = []
    for seed in range(50):
        for name, value in arrays(seed).items():
            owner[name][...] = value
        sent.append({name: send(value, torch.device(device)) for name, value in owner.items()})
    for seed, tensors in enumerate(sent):
        for name, value in arrays(seed).items():
            assert tensors[name].device.type == device
            assert tensors[name].cpu().numpy().dtype == value.dtype
            assert np.array_equal(tensors[name].cpu().numpy(), value), name


@needs_gpu
def test_worlds_on_a_gpu_see_what_they_see_on_a_cpu() -> None:
    def run(device: str) -> list[torch.Tensor]:
        env = sheeplike.envs.make("minigrid", num_envs=3, device=device, episode_length=5)
        obs, info = env.reset(seed=2)
        out = [*obs.values()]
        for step in range(12):
            obs, reward, *_, info = env.step(torch.full((3,), step % 3, device=device))
            out += [*obs.values(), reward, info["episode"]["return"], info["episode"]["length"]]
        env.close()
        return [value.cpu() for value in out]

    assert all(torch.equal(a, b) for a, b in zip(run("cpu"), run("cuda"), strict=True))


@pytest.mark.parametrize("told", [{}, *({"render_fps": rate} for rate in (-5, 0, math.nan, math.inf, 1e-9, "x"))])
def test_a_frame_rate_that_is_none_is_that_of_an_environment_that_says_nothing(
    told: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Counter, "metadata", told)
    env = worlds()
    assert env.metadata["render_fps"] == 30
    env.close()


def test_an_environment_need_not_know_of_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(Counter):
        def __init__(self) -> None:
            super().__init__()

    monkeypatch.setitem(gymnasium.registry, "Plain-v0", gymnasium.envs.registration.EnvSpec("Plain-v0", Plain))
    for frames in ("observation", "none"):
        made = sheeplike.envs.make("gym", id="Plain-v0", num_envs=1, frames=frames, episode_length=9, image_size=16)
        assert made.reset()[0]["numbers"][0, 0] == 0
        made.close()
