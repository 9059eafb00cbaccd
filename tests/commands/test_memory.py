"""What a run is told when memory or disk is short: what it takes, and what to change."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from sheeplike.agents.dreamer_v3.experience import replay_spec
from sheeplike.agents.dreamer_v3.observations import ModelKeys

from sheeplike.agents.spaces import ActionCodec
from sheeplike.commands import memory
from sheeplike.commands.advice import disk_advice, is_out_of_memory, memory_advice
from sheeplike.commands.agents import make_agent
from sheeplike.commands.config import load
from sheeplike.commands.errors import as_command_errors
from sheeplike.commands.kinds import kind_of
from sheeplike.commands.memory import count_parameters, estimate
from sheeplike.commands.schema import Config
from sheeplike.commands.sources import Sources
from sheeplike.memory import SequenceReplay

ACTIONS = spaces.Box(-1, 1, (4,), np.float32)
DREAMER = ("exp=dreamer_v3", "env=franka_pick", "profile=gpu")
PPO = ("exp=ppo", "env=franka_pick", "profile=gpu")
TWO = (*PPO, "env.cameras=[front,wrist]", "env.image_size={front:128,wrist:[64,96]}", "env.segmentation=true")
GIB = 2**30


def configured(*arguments: str) -> Config:
    return load(arguments, Sources())


def space(config: Config) -> spaces.Dict:
    side = config.env.image_size
    images = {f"pixels/{name}": spaces.Box(0, 255, (side, side, 3), np.uint8) for name in ("front", "wrist")}
    return spaces.Dict(images | {"state": spaces.Box(-np.inf, np.inf, (10,), np.float32)})


# Errors


def raised(function) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        function()
    return caught.value


def of_the_replay() -> None:
    SequenceReplay(
        {"is_first": ((), torch.bool), "is_last": ((), torch.bool), "pixels": ((2**30,), torch.uint8)},
        num_envs=1,
        size=2**20,
        sequence=4,
    )


def behind_another() -> None:
    with as_command_errors(RuntimeError):
        torch.empty(2**50, dtype=torch.uint8)


def without_a_cause() -> None:
    try:
        torch.empty(2**50, dtype=torch.uint8)
    except RuntimeError:
        raise KeyError("while cleaning up")  # noqa: B904


@pytest.mark.parametrize(
    "function",
    [lambda: torch.empty(2**50), lambda: np.empty(2**50), of_the_replay, behind_another, without_a_cause],
    ids=["torch", "numpy", "replay", "CommandError", "context"],
)
def test_what_says_that_memory_is_short(function) -> None:
    assert is_out_of_memory(raised(function))


def test_jax_says_it_too() -> None:
    code = (
        "import jax, jax.numpy as jnp\n"
        "from sheeplike.commands.advice import is_out_of_memory\n"
        "try:\n    jnp.zeros(2**46, jnp.uint8).block_until_ready()\n"
        "except Exception as error:\n    print(type(error).__name__, is_out_of_memory(error), str(error)[:18])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("True RESOURCE_EXHAUSTED"), done.stdout + done.stderr[-500:]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("Failed to allocate 1073741824 bytes on device 'cuda:0'"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("OSError: [Errno 12] Cannot allocate memory"),
    ],
)
def test_what_other_devices_say(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), OSError(28, ""), None],
)
def test_what_says_something_else(error: Exception | None) -> None:
    assert not is_out_of_memory(error)


# What a run takes


@pytest.mark.parametrize(
    "arguments",
    [
        (*DREAMER, "agent/size=1m", "agent.observations=['*']"),
        (*DREAMER, "agent/size=1m", "agent.observations=[pixels/front]", "agent.targets=[state,pixels/wrist]"),
        (*PPO, "agent.value_observations=['*']", "agent.frame_stack=3"),
        (*PPO, "agent.observations=[state]", "agent.shared_trunk=true"),
    ],
)
def test_parameters_memory_and_checkpoint_are_those_of_the_agent(arguments: tuple[str, ...]) -> None:
    config = configured(
        *arguments, "env.num_envs=8", "agent.replay_size=2000" if "exp=ppo" not in arguments else "seed=0"
    )
    worlds = SimpleNamespace(num_envs=8, single_observation_space=space(config), single_action_space=ACTIONS)
    config = replace(config, compile="off")
    agent = make_agent(config, worlds, SimpleNamespace(device=torch.device("cpu"), autocast=None))
    expected = estimate(config, space(config), ACTIONS)
    networks = getattr(agent, "networks", None) or agent.modules
    trained = [p for p in networks.parameters() if p.requires_grad]
    kind, codec = kind_of(config.agent), ActionCodec(ACTIONS)
    counted = count_parameters(lambda: kind.networks(config, space(config), codec))
    assert counted == sum(p.numel() for p in trained)
    assert expected.learner == 4 * sum(p.nbytes for p in trained)
    held = agent.rollout if hasattr(agent, "rollout") else agent.replay
    stored = sum(ring.nbytes for ring in held.storage.values()) + (held.age.nbytes if hasattr(held, "age") else 0)
    assert expected.memory == stored


def test_without_worlds_it_is_told_from_the_configuration_alone() -> None:
    config = configured(*DREAMER, "env.cameras=[front,wrist]", "agent.observations=['pixels/*',state,'priv*']")
    assert estimate(config).memory == SequenceReplay.footprint(
        replay_spec(
            ModelKeys(memory._assumed(config), ["pixels/*", "state", "priv*"]),
            ActionCodec(spaces.Box(-1, 1, (8,))),
            _size(config),
        ),
        512,
        500_000,
    )


def test_each_camera_takes_what_its_size_is() -> None:
    """Packed and delivered: 4 + 3 bytes of colours, 4 + 4 of depth and 8 + 4 of ids for each pixel."""
    config = configured(*TWO, "env.depth=true", "env.num_envs=8", "agent.minibatches=2", "eval.num_envs=4")
    assumed = memory._assumed(config)
    assert {key: one.shape for key, one in assumed.items() if len(one.shape) == 3} == {
        "depth/front": (128, 128, 1),
        "depth/wrist": (64, 96, 1),
        "pixels/front": (128, 128, 3),
        "pixels/wrist": (64, 96, 3),
        "segmentation/front": (128, 128, 1),
        "segmentation/wrist": (64, 96, 1),
    }
    assert estimate(config).worlds == (8 + 4) * (128 * 128 + 64 * 96) * (7 + 8 + 12)
    smaller = replace(config, env=replace(config.env, image_size={"front": 64, "wrist": 48}))
    shapes = {key: one.shape[:2] for key, one in memory.resized(assumed, smaller).items() if len(one.shape) == 3}
    assert shapes == {key: (64, 64) if key.endswith("front") else (48, 48) for key in shapes}


def test_without_a_renderer_there_are_no_frames() -> None:
    config = configured(*PPO, "env.renderer=none", "agent.observations=[state]")
    assert estimate(config).worlds == 0
    text = memory_advice(config, torch.OutOfMemoryError("CUDA out of memory"))
    assert "image_size" not in text


def _size(config: Config):
    from sheeplike.agents.dreamer_v3 import Size

    return Size(**{name: value for name, value in asdict(config.agent.size).items() if name != "name"})


# Advice


def settings(text: str) -> list[tuple[str, str]]:
    return re.findall(r"([\w./]+)=(\{[^}]*\}|\[[^]]*\]|[^ ,]+) \(", text.partition("helps")[2])


@pytest.mark.parametrize("job", [DREAMER, PPO, (*DREAMER, "agent/size=200m", "env.image_size=[64,96]"), TWO])
def test_what_is_proposed_is_valid_and_takes_less_the_first_the_least(job: tuple[str, ...]) -> None:
    config = configured(*job)
    now = estimate(config)
    text = memory_advice(config, torch.OutOfMemoryError("CUDA out of memory"))
    assert "\n" not in text
    proposed = settings(text)
    assert len(proposed) == len({key for key, _ in proposed}) == 3
    left = [estimate(configured(*job, f"{key}={value}")).total for key, value in proposed]
    assert left == sorted(left)
    assert left[-1] < now.total
    for number in (now.learner, now.memory, now.batch, now.worlds):
        assert memory.in_words(number) in text


def test_what_alone_would_do_is_proposed() -> None:
    config = configured(*DREAMER)
    free = estimate(config).total // 2
    text = memory_advice(config, MemoryError(), free=free)
    assert f"; {free / GIB:.1f} GiB are free; what helps most: agent.replay_size=125000 (" in text
    assert estimate(configured(*DREAMER, "agent.replay_size=125000")).total <= 0.9 * free
    assert estimate(configured(*DREAMER, "agent.replay_size=250000")).total > 0.9 * free


def test_what_the_simulation_lacks_fewer_worlds_give() -> None:
    config = configured(*DREAMER)
    assert settings(memory_advice(config, RuntimeError("RESOURCE_EXHAUSTED: 3 GiB")))[0] == ("env.num_envs", "256")
    assert settings(memory_advice(config, MemoryError()))[0][0] == "agent.replay_size"


def test_a_replay_is_not_made_smaller_than_a_sequence_of_each_world() -> None:
    config = configured(*DREAMER, "env.num_envs=16", "agent.replay_size=1056")
    assert "agent.replay_size" not in dict(settings(memory_advice(config, free=0)))


# The disk


def test_a_run_whose_checkpoints_fit_says_nothing(tmp_path) -> None:
    config = configured(*DREAMER, f"run_dir={tmp_path}/not/there/yet")
    needed = memory.on_disk(config, None, None)
    assert disk_advice(config, free=needed) is None
    assert disk_advice(config, free=needed - 1) is not None
    assert disk_advice(config, free=0, held=needed) is None
    assert disk_advice(configured("exp=dreamer_v3", "env=cartpole_balance", "dry_run=true")) is None


def test_the_disk_of_the_run_is_asked(tmp_path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr("shutil.disk_usage", lambda place: asked.append(place) or SimpleNamespace(free=0))
    assert disk_advice(configured(*DREAMER, f"run_dir={tmp_path}/not/there/yet"))
    assert asked == [tmp_path]


def test_what_makes_the_checkpoints_fit_is_proposed(tmp_path) -> None:
    config = configured(*DREAMER, f"run_dir={tmp_path}/run")
    needed = memory.on_disk(config, None, None)
    text = disk_advice(config, free=needed // 3)
    assert "\n" not in text
    assert f"the checkpoints in {tmp_path}/run may take {needed / GIB:.1f} GiB" in text
    proposed = settings(text)
    assert [key for key, _ in proposed][:2] == ["checkpoint.replay", "agent.replay_size"]
    left = [memory.on_disk(configured(*DREAMER, f"{key}={value}"), None, None) for key, value in proposed]
    assert left == sorted(left)
    assert left[0] < left[1] <= needed // 3
    assert left[-1] < needed


def test_checkpoints_share_what_was_seen_but_not_the_latents() -> None:
    """Three at once at most: the newest, the best, and the one being written."""
    config = configured(*DREAMER, "checkpoint.keep_last=1")
    now = estimate(config)
    assert memory.on_disk(config, None, None) == 3 * (now.saved + now.renewed) + now.memory - now.renewed
    assert 0 < now.renewed < now.memory
    small = configured(*DREAMER, "checkpoint.keep_last=1", "checkpoint.replay=false")
    assert memory.on_disk(small, None, None) == 3 * now.saved
    rollout = configured(*PPO, "checkpoint.keep_last=1")
    assert memory.on_disk(rollout, None, None) == 3 * (estimate(rollout).saved + estimate(rollout).memory)
