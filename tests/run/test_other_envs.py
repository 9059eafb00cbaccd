"""Whole runs in worlds unlike those of the simulator: several discrete actions, and cameras of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

import sheeplike
from sheeplike import envs
from sheeplike.__main__ import main
from sheeplike.monitor.logger import RunLogger
from sheeplike.trained.exported import load_agent

CAMERAS = {"pixels/colour": (64, 48, 3), "pixels/grey": (48, 48, 1), "pixels/stack": (48, 48, 4)}
DEPTH = {"depth/colour": (64, 48, 1)}
VECTORS = {"state": 3, "privileged_state": 2}
ACTIONS: dict[str, gymnasium.spaces.Space] = {
    "several": spaces.MultiDiscrete([2, 3], start=[0, -1]),
    "one": spaces.Discrete(3, start=1),
}


class Odd(VectorEnv):
    """Noise on every camera; the reward is the first action. All that it is, is in its state."""

    name = "odd"

    def __init__(
        self, num_envs: int, device: Any, image_size: Any, action_repeat: int, seed: int, episode_length: int, kind: str
    ) -> None:
        self.num_envs, self.device, self.episode_length = num_envs, torch.device(device), episode_length
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": 10.0}
        self.single_action_space = ACTIONS[kind]
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.single_observation_space = spaces.Dict(
            {key: spaces.Box(0, 255, shape, np.uint8) for key, shape in CAMERAS.items()}
            | {key: spaces.Box(0, np.inf, shape, np.float32) for key, shape in DEPTH.items()}
            | {key: spaces.Box(-np.inf, np.inf, (width,), np.float32) for key, width in VECTORS.items()}
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if seed is not None:
            self.generator.manual_seed(seed)
        self.time, self.total = torch.zeros(self.num_envs, dtype=torch.int32), torch.zeros(self.num_envs)
        self.over = self.time > 0
        return self._see(), self._info(torch.zeros(self.num_envs))

    def _see(self) -> dict[str, Tensor]:
        n, g = self.num_envs, self.generator
        seen = {k: torch.randint(256, (n, *shape), dtype=torch.uint8, generator=g) for k, shape in CAMERAS.items()}
        seen |= {key: 5 * torch.rand(n, *shape, generator=g) for key, shape in DEPTH.items()}
        return seen | {key: torch.randn(n, width, generator=g) for key, width in VECTORS.items()}

    def _info(self, reward: Tensor) -> dict[str, Any]:
        no = torch.zeros(self.num_envs, dtype=torch.bool)
        episode = {"return": self.total, "length": self.time, "success": no, "reward_terms": {"first": self.total}}
        return {"success": no, "reward_terms": {"first": reward}, "episode": episode, "nonfinite": no}

    def step(self, action: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        assert all(self.single_action_space.contains(one) for one in action.numpy())
        reward = torch.where(self.over, 0.0, action.reshape(self.num_envs, -1)[:, 0].float())
        self.time = torch.where(self.over, 0, self.time + 1)
        self.total = torch.where(self.over, 0.0, self.total + reward)
        self.over = self.time >= self.episode_length
        return self._see(), reward, torch.zeros_like(self.over), self.over, self._info(reward)

    def state_dict(self) -> dict[str, Tensor]:
        held = {"time": self.time, "total": self.total, "over": self.over, "generator": self.generator.get_state()}
        return {name: value.clone() for name, value in held.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.time, self.total, self.over = (state[name].clone() for name in ("time", "total", "over"))
        self.generator.set_state(state["generator"])


def _odd(
    *,
    num_envs: int,
    device: Any = "cpu",
    image_size: Any = 48,
    action_repeat: int = 1,
    seed: int = 0,
    episode_length: int = 24,
    kind: str = "several",
) -> Odd:
    return Odd(num_envs, device, image_size, action_repeat, seed, episode_length, kind)


JOBS = {
    "dreamer_v3": ["agent.observations=['pixels/*','depth/*',state]", "agent.targets=[privileged_state]"],
    "ppo": [
        "agent.observations=[pixels/grey,pixels/stack,'depth/*',state]",
        "agent.value_observations=['*']",
        "agent.frame_stack=2",
        "agent.augment=true",
    ],
}
# Not to be had when the exported agent acts.
UNSEEN = {"dreamer_v3": {"privileged_state"}, "ppo": {"privileged_state", "pixels/colour"}}


@pytest.fixture
def videos(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Size]:
    """The worlds under a name of their own, and the videos of a run: name to shape."""
    monkeypatch.setitem(envs.registry.BUILT_IN, "odd", _odd)
    shot: dict[str, torch.Size] = {}
    monkeypatch.setattr(RunLogger, "log_video", lambda _, name, video, **__: shot.update({name: video.shape}))
    return shot


def newest(run_dir: Path) -> dict[str, Any]:
    return sheeplike.checkpoint.load_latest(run_dir / "checkpoints")[1]["agent"]["modules"]


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        pytest.param("dreamer_v3", "several", marks=pytest.mark.slow),
        pytest.param("dreamer_v3", "one", marks=pytest.mark.slow),
        ("ppo", "several"),
        pytest.param("ppo", "one", marks=pytest.mark.slow),
    ],
)
def test_a_run_its_videos_its_continuation_and_its_export(
    agent: str, kind: str, videos: dict[str, torch.Size], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [f"exp={agent}", "env=odd", f"env.options.kind={kind}", *JOBS[agent], "dry_run=true"]
    common += ["logger=[]", "total_steps=96", "checkpoint.every=48", "eval.every=96", "video_every=96"]
    with sheeplike.init(*common, f"run_dir={tmp_path / 'straight'}") as run:
        run.iterate()
    banner = capsys.readouterr().out
    assert "pixels/stack 48x48x4" in banner
    rows = [json.loads(line) for line in (tmp_path / "straight/metrics.jsonl").read_text().splitlines()]
    undefined = {name for row in rows for name, value in row.items() if value is None}
    assert undefined <= {f"wm/reward_log_likelihood/{sign}" for sign in ("positive", "zero", "negative")}
    expected = {f"eval/{key.removeprefix('pixels/')}" for key in CAMERAS}
    if agent == "dreamer_v3":
        assert "privileged_state 2" in banner
        kinds = ("open_loop", "dream")
        expected |= {f"{kind}/{key.removeprefix('pixels/')}" for kind in kinds for key in CAMERAS | DEPTH}
        assert {"loss/privileged_state", "wm/explained_variance/privileged_state"} <= {name for r in rows for name in r}
    assert videos.keys() == expected
    assert {shape[-1] for shape in videos.values()} == {3}

    # Stopped in the middle, it goes on to the same numbers.
    with sheeplike.init(*common, f"run_dir={tmp_path / 'stopped'}") as run:
        run.iterate(24)
        run.save()
    with sheeplike.init(f"resume={tmp_path / 'stopped'}") as run:
        run.iterate()
    straight, stopped = newest(tmp_path / "straight"), newest(tmp_path / "stopped")
    for name, tensor in straight.items():
        assert torch.equal(stopped[name], tensor), name

    # And is exported, to act where some of it is not to be had.
    main(["export", f"run={tmp_path / 'straight'}", f"to={tmp_path / 'export'}"])
    loaded = load_agent(tmp_path / "export")
    assert json.loads((tmp_path / "export/model.json").read_text())["only_for_learning"].keys() == UNSEEN[agent]
    expected_weights = loaded.state_dict()
    assert all(torch.equal(expected_weights[name], tensor) for name, tensor in straight.items())
    odd = _odd(num_envs=3, kind=kind)
    obs, _ = odd.reset(seed=3)
    player, first = loaded.player(num_envs=3), torch.ones(3, dtype=torch.bool)
    for _ in range(3):
        action = player.act({key: value for key, value in obs.items() if key not in UNSEEN[agent]}, first)
        obs, *_ = odd.step(action)
        first = torch.zeros_like(first)
