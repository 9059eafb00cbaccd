"""A policy as one ONNX file: observations, recurrent state and noise in, action and next state out.

Preprocessing, normalizers, the choice of discrete actions and the scaling of continuous ones are inside. Draws are
inputs, so that a player's noise is its own, and the same noise gives the same actions as PyTorch::

    observations/<key>  state/<name>  is_first  noise/<n>   ->   action  next/<name>

Everything has a leading axis of one world. :mod:`sheeplike.player` plays the file.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import mujoco
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sheeplike.agents.policy import PolicyNetworks
from sheeplike.options import CommandError
from sheeplike.player import FORMAT
from sheeplike.terminal import first_sentence

_CAMERA_MODES = ("fixed", "track", "trackcom", "targetbody", "targetbodycom")  # mjtCamLight


class GivenNoise(TorchFunctionMode):
    """Context in which draws come from ``noise``, in order; None: from torch's generator.

    It knows the functions by which the distributions of :mod:`sheeplike.nn.distributions` draw.

    Attributes:
        drawn: kind, ``uniform`` in [0, 1) or ``normal``, and shape of each draw so far.
    """

    def __init__(self, noise: list[Tensor] | None = None) -> None:
        super().__init__()
        self.noise, self.drawn = noise, []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kinds = {torch.rand: "uniform", torch.randn_like: "normal"}
        if func not in kinds or self.noise is None:
            value = func(*args, **(kwargs or {}))
        else:
            value = self.noise[len(self.drawn)]
        if func in kinds:
            self.drawn.append((kinds[func], tuple(value.shape)))
        return value


class Acting(nn.Module):
    """One step of a policy in one world; ``actions`` is the space in which the environment takes its action."""

    def __init__(self, networks: PolicyNetworks, actions: gymnasium.Space, *, sample: bool) -> None:
        super().__init__()
        self.networks, self.actions, self.sample = networks, actions, sample

    def forward(
        self, obs: dict[str, Tensor], state: dict[str, Tensor], is_first: Tensor, noise: list[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with GivenNoise(noise):
            following, action, _ = self.networks.act(state, obs, is_first, sample=self.sample)
        return to_native(action, self.actions, self.networks.actions), {name: following[name] for name in state}


def to_native(action: Tensor, actions: gymnasium.Space, ours: gymnasium.Space) -> Tensor:
    """Translate actions ``(N, …)`` of the space ``ours`` into those of ``actions``, as the environment does itself."""
    if actions is ours:
        return action
    if isinstance(actions, spaces.Discrete):
        return action + int(actions.start)
    action = action.reshape(-1, *actions.shape)
    if isinstance(actions, spaces.MultiBinary):
        return action
    if isinstance(actions, spaces.MultiDiscrete):
        return action + torch.as_tensor(actions.start)
    low, high = (torch.as_tensor(bound, dtype=torch.float64) for bound in (actions.low, actions.high))
    scaled = low + (action.clamp(-1, 1).double() + 1) * ((high - low) / 2)
    scaled = torch.minimum(torch.maximum(scaled, low), high)  # the sum may round beyond a bound
    return scaled.float() if np.issubdtype(actions.dtype, np.floating) else scaled.round().long()


def example(networks: PolicyNetworks) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Return observations of zeros, the state before the first step, and ``is_first``, for one world."""
    shapes = {key: (space.shape, getattr(torch, str(space.dtype))) for key, space in networks.observations.items()}
    obs = {key: torch.zeros(1, *shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
    # PPO stacks the images of its value too.
    state = {name: value for name, value in networks.initial(1).items() if name in obs or name not in networks.space}
    return obs, state, torch.ones(1, dtype=torch.bool)


def convert(
    networks: PolicyNetworks, facts: Mapping[str, Any], *, actions: gymnasium.Space | None = None, sample: bool
) -> bytes:
    """Return the content of an ONNX file, with ``facts`` and the description of inputs and outputs as its metadata.

    Args:
        actions: space in which the environment takes actions; None: that in which the policy acts.
        sample: draw actions; False: take the most likely ones. DreamerV3 draws its latents in both cases.

    Raises:
        CommandError: the networks cannot be written as ONNX.
    """
    actions = networks.actions if actions is None else actions
    obs, state, is_first = example(networks)
    with GivenNoise() as noted, torch.no_grad():
        networks.act(state, obs, is_first, sample=sample)
    draws = [torch.zeros(shape) for _, shape in noted.drawn]
    inputs = [f"observations/{key}" for key in obs] + [f"state/{name}" for name in state]
    inputs += ["is_first", *(f"noise/{number}" for number in range(len(draws)))]
    outputs = ["action", *(f"next/{name}" for name in state)]
    acting = Acting(networks, actions, sample=sample).eval()
    for name in ("torch.onnx", "torch.export"):  # they report on what is not needed here
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                acting,
                (obs, state, is_first, draws),
                input_names=inputs,
                output_names=outputs,
                dynamo=True,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise CommandError(f"this agent cannot be written as ONNX: {first_sentence(reason)}") from error
    described = {
        "format": FORMAT,
        "observations": {key: _describe(value[0]) for key, value in obs.items()},
        "state": {name: _describe(value) for name, value in state.items()},
        "noise": [{"kind": kind, "shape": shape} for kind, shape in noted.drawn],
        "action": describe_actions(actions),
        "sampled": sample,
    }
    for call in program.exported_program.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(call.target, "tags", ()):
            raise CommandError(f"this agent draws by {call.target}: expected torch.rand or torch.randn_like")
    for node in program.model.graph.all_nodes():
        node.metadata_props.clear()  # they name files of this machine
    program.model.metadata_props["sheeplike"] = json.dumps({**described, **facts})
    return program.model_proto.SerializeToString()


def describe_actions(space: gymnasium.Space) -> dict[str, Any]:
    """Describe an action space: shape and dtype of the player's action, and its bounds, or first and last choice."""
    if isinstance(space, spaces.Box):
        low, high, whole = space.low, space.high, not np.issubdtype(space.dtype, np.floating)
    else:
        binary, discrete = isinstance(space, spaces.MultiBinary), isinstance(space, spaces.Discrete)
        low = np.zeros(space.shape, np.int64) if binary else np.asarray(space.start)
        high, whole = low + (1 if binary else (space.n if discrete else space.nvec) - 1), True
    bounds = {"low": low.tolist(), "high": high.tolist()}
    return {"shape": list(low.shape), "dtype": "int64" if whole else "float32", **bounds}


def describe_task(envs: VectorEnv, networks: PolicyNetworks) -> dict[str, Any]:
    """Describe a policy's world: ``rate`` in steps per second if known, names of actions, and the cameras it sees."""
    kinds = [key.split("/", 1) for key in networks.observations if key.startswith(("pixels/", "depth/"))]
    names = sorted({name for _, name in kinds})
    cameras = describe_cameras(envs.simulator.task.model, names) if envs.simulator else {}
    # What Gymnasium's environments state is the rate of their films.
    rate = envs.metadata["render_fps"] if envs.simulator else None
    return {"rate": rate, "action_names": list(envs.action_names), "cameras": cameras}


def describe_cameras(model: mujoco.MjModel, names: list[str]) -> dict[str, dict[str, Any]]:
    """Describe cameras of a scene as MuJoCo does, which look along their -z axis, with y upwards.

    ``position`` in metres and ``quaternion`` (w first) are in the frame of ``body``; ``fov_y`` is in degrees. A camera
    whose ``mode`` is not ``fixed`` follows its body, or looks at one, as MuJoCo's ``mode`` of that name says.
    """
    return {
        name: {
            "body": model.body(int(model.cam_bodyid[camera])).name,
            "mode": _CAMERA_MODES[int(model.cam_mode[camera])],
            "position": model.cam_pos[camera].tolist(),
            "quaternion": model.cam_quat[camera].tolist(),
            "fov_y": float(model.cam_fovy[camera]),
        }
        for name in names
        for camera in [model.camera(name).id]
    }


def _describe(value: Tensor) -> dict[str, Any]:
    return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
