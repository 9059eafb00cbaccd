"""Options of PPO.

The files of ``configs/env/`` have what was published for a task, those of ``configs/profile/`` what suits a machine.
"""

from __future__ import annotations

import itertools
import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from sheeplike.agents.config import AgentConfig
from sheeplike.options import HEADLINE, InvalidOption, Options

Width = Annotated[int, Field(ge=1, le=2**16)]
Activation = Literal["elu", "relu", "silu", "tanh"]


class Vision(Options):
    """Options of :class:`sheeplike.nn.cnn.CNN`."""

    layout: Literal["max_pool", "nature"] = Field("max_pool", description="layout of the convolutions")
    head: Literal["flatten", "average", "max", "spatial_softmax"] = Field(
        "flatten", description="vector from the last feature map: flatten keeps all, the others reduce each channel"
    )
    activation: Activation = Field("elu", description="activation after each convolution")
    normalise_channels: bool = Field(False, description="whiten each channel of each image, without parameters")
    shared: bool = Field(False, description="all cameras share one network")


class PPOConfig(AgentConfig):
    """Options of :class:`~sheeplike.agents.ppo.agent.PPO`."""

    name: Annotated[Literal["ppo"], HEADLINE] = Field("ppo", description="the algorithm")
    value_observations: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="glob patterns of what the value sees, such as privileged_state; null: what the policy sees",
    )
    frame_stack: int = Field(
        1, ge=1, le=16, description="images stacked into one (vectors are not); a single image shows no motion"
    )
    augment: bool = Field(False, description="move all images of a trajectory by a random few pixels")
    vision: Vision = Field(Vision(), description="encoder of images")
    policy_layers: tuple[Width, ...] = Field((128, 64), min_length=1, description="widths of the policy's layers")
    value_layers: tuple[Width, ...] = Field((128, 64), min_length=1, description="widths of the value's layers")
    activation: Activation = Field("silu", description="activation between the layers of policy and value")
    initialisation: Literal["orthogonal", "lecun_uniform"] = Field(
        "orthogonal", description="initial weights of policy and value; convolutions are always orthogonal"
    )
    policy_gain: float = Field(
        0.01, ge=0, description="gain of the initial, orthogonal weights of the policy's last layer"
    )
    shared_trunk: bool = Field(False, description="policy and value share their convolutions")
    distribution: Literal["auto", "tanh_normal", "clipped_normal", "categorical"] = Field(
        "auto", description="action distribution; auto: tanh_normal, or categorical where actions are discrete"
    )
    rollout_length: Annotated[int, HEADLINE] = Field(
        20, ge=1, le=2**20, description="steps of every world between two updates"
    )
    minibatches: Annotated[int, HEADLINE] = Field(
        8, ge=1, le=2**20, description="parts of a rollout, one gradient step each"
    )
    epochs: Annotated[int, HEADLINE] = Field(8, ge=1, le=1000, description="passes over a rollout")
    discount: Annotated[float, HEADLINE] = Field(0.99, ge=0, lt=1, description="discount factor")
    gae_lambda: Annotated[float, HEADLINE] = Field(0.95, ge=0, le=1, description="lambda of the advantage estimates")
    reward_scaling: float = Field(1.0, gt=0, le=1e6, description="factor of all rewards")
    learning_rate: Annotated[float, HEADLINE] = Field(1e-3, gt=0, le=1, description="step size of Adam")
    adam_eps: float = Field(1e-5, ge=1e-30, le=1, description="epsilon of Adam")
    max_grad_norm: float = Field(1.0, gt=0, le=1e6, description="maximum norm of all gradients together")
    clip: Annotated[float, HEADLINE] = Field(
        0.3, gt=0, le=1e6, description="clipping range of the ratio of probabilities, around 1"
    )
    value_clip: float | None = Field(None, gt=0, le=1e6, description="clipping range of a value's change; null: none")
    value_scale: float = Field(0.5, ge=0, le=1e6, description="weight of the value's loss")
    entropy_scale: Annotated[float, HEADLINE] = Field(0.01, ge=0, le=1e6, description="weight of the policy's entropy")
    normalise_advantage: bool = Field(True, description="scale advantages to mean 0 and deviation 1 in each minibatch")
    kl_control: Literal["none", "early_stop", "adaptive_lr"] = Field(
        "none",
        description="reaction to the KL divergence of an update: early_stop skips the rest of the updates on this "
        "rollout above 1.5 kl_target; adaptive_lr lowers the learning rate above 2 kl_target, and raises it below half "
        "of kl_target",
    )
    kl_target: float = Field(0.01, gt=0, le=1e6, description="KL divergence, in nats, that kl_control aims at")

    dry_run: ClassVar[dict[str, Any]] = {"rollout_length": 16, "minibatches": 2, "epochs": 2}
    collecting: ClassVar[str] = "collecting a rollout"
    memory_options: ClassVar[tuple[str, ...]] = ("rollout_length", "frame_stack")

    def check(self, *, num_envs: int, total_steps: int) -> Self:
        """Check that a rollout divides into minibatches, and that the run is long enough for one."""
        steps = num_envs * self.rollout_length
        factors = f"env.num_envs={num_envs} x agent.rollout_length={self.rollout_length}"
        self._check_minibatches(steps, f"the rollout's {steps} steps ({factors})")
        first = steps + num_envs
        if total_steps < first:
            expected = (
                f"at least {first}, for a rollout of {self.rollout_length} + 1 steps in each of {num_envs} worlds, or "
                "a smaller agent.rollout_length or env.num_envs"
            )
            raise InvalidOption("total_steps", total_steps, expected, first)
        return self

    def divide(self, ranks: int, num_envs: int) -> Self:
        steps = num_envs * self.rollout_length
        self._check_minibatches(steps, f"the {steps} steps of each of the {ranks} ranks' rollouts")
        return self

    def _check_minibatches(self, steps: int, what: str) -> None:
        if steps % self.minibatches:
            around = ((self.minibatches - distance, self.minibatches + distance) for distance in itertools.count(1))
            nearest = next(count for both in around for count in both if count > 0 and steps % count == 0)
            raise InvalidOption("agent.minibatches", self.minibatches, f"a divisor of {what}", nearest)

    def first_update(self, num_envs: int) -> int:
        return self.rollout_length * num_envs

    def updates(self, start: int, stop: int, num_envs: int) -> int:
        before, after = (max(math.ceil(steps / num_envs) - 1, 0) // self.rollout_length for steps in (start, stop))
        return (after - before) * self.epochs * self.minibatches
