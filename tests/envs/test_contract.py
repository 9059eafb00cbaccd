"""Refusals of vector environments of other packages that lack something."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

import sheeplike.envs
from sheeplike.envs.contract import check_vector_env


class Worlds(gymnasium.vector.VectorEnv):
    name, device, episode_length, num_envs = "worlds", "cpu", 9, 2
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 10}  # noqa: RUF012, as Gymnasium has it
    single_action_space = action_space = observation_space = spaces.Discrete(2)
    single_observation_space = spaces.Dict({"state": spaces.Box(-1.0, 1.0, (3,), np.float32)})

    def state_dict(self): ...
    def load_state_dict(self, state): ...


def observing(**named: spaces.Space) -> spaces.Dict:
    return spaces.Dict({name.replace("__", "/"): space for name, space in named.items()})


def test_what_has_everything_is_let_through():
    worlds = Worlds()
    worlds.exact_resume = False
    check_vector_env(worlds, num_envs=2)
    assert (worlds.exact_resume, worlds.simulator, worlds.film(), dict(worlds.counters)) == (False, None, {}, {})
    made = sheeplike.envs.make("cartpole_balance", num_envs=2, image_size=16)
    check_vector_env(made, num_envs=2)
    made.close()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"episode_length": None}, "episode_length"),
        ({"state_dict": None}, r"state_dict\(\)"),
        ({"num_envs": 3}, "num_envs=3"),
        ({"metadata": {"render_fps": 10}}, r"autoreset_mode'.=None.*AutoresetMode.NEXT_STEP"),
        (
            {"metadata": {"autoreset_mode": AutoresetMode.SAME_STEP, "render_fps": 1}},
            r"AutoresetMode.NEXT_STEP",
        ),
        (
            {"metadata": {"autoreset_mode": AutoresetMode.NEXT_STEP}},
            r"metadata.'render_fps'.",
        ),
        ({"single_observation_space": spaces.Discrete(3)}, r"Discrete\(3\).*Dict"),
        (
            {"single_observation_space": observing(pixels__front=spaces.Box(0, 1, (9, 9, 3), np.float32))},
            r"'pixels/front'.*Box.*uint8",
        ),
        (
            {"single_observation_space": observing(state=spaces.Box(0, 1, (9, 2), np.float32))},
            r"'state'.*Box.*float32",
        ),
    ],
)
def test_what_is_missing(changed, reason):
    base, gone = dict(vars(Worlds)), [name for name, value in changed.items() if value is None]
    kept = {name: value for name, value in base.items() if name not in gone and not name.startswith("__")}
    made = type("Worlds", (gymnasium.vector.VectorEnv,), kept | {k: v for k, v in changed.items() if v is not None})()
    with pytest.raises(ValueError, match=reason):
        check_vector_env(made, num_envs=2)
    with pytest.raises(ValueError, match=r"gymnasium\.vector\.VectorEnv"):
        check_vector_env(3, num_envs=2)
