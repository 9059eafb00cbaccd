"""Options of DreamerV3: the numbers of the authors' code (``danijar/dreamerv3``), unless a line says otherwise."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from sheeplike.agents.config import AgentConfig
from sheeplike.options import HEADLINE, INCIDENTAL, RESUMABLE, InvalidOption, Options

CONTEXT = 1  # replayed steps before each training sequence; the last one's stored latent initialises the RSSM
WRITE_HEAD = 1  # steps at the write head that no sequence may span: it would join old and new steps


class Size(Options):
    """Widths of the model."""

    deter: int = Field(ge=8, le=2**16, multiple_of=8, description="width of the recurrent state")
    hidden: int = Field(ge=1, le=2**16, description="width of the recurrent model's hidden layers")
    classes: int = Field(ge=2, le=256, description="classes of each of the 32 categorical latents")
    depth: int = Field(ge=2, le=1024, multiple_of=2, description="base channels of the convolutions")
    units: int = Field(ge=1, le=2**16, description="width of the encoder's, decoder's and heads' layers")


SIZES = {
    "1m": Size(deter=512, hidden=64, classes=4, depth=4, units=64),
    "12m": Size(deter=2048, hidden=256, classes=16, depth=16, units=256),
    "25m": Size(deter=3072, hidden=384, classes=24, depth=24, units=384),
    "50m": Size(deter=4096, hidden=512, classes=32, depth=32, units=512),
    "100m": Size(deter=6144, hidden=768, classes=48, depth=48, units=768),
    "200m": Size(deter=8192, hidden=1024, classes=64, depth=64, units=1024),
    "400m": Size(deter=12288, hidden=1536, classes=96, depth=96, units=1536),
}


class LossScales(Options):
    """Weight of each loss; ``reconstruction`` weighs every observation, targets included."""

    reconstruction: float = Field(1.0, ge=0, le=1e6, description="prediction of each observation")
    barlow: float = Field(0.05, ge=0, le=1e6, description="redundancy reduction, with representation=barlow")
    reward: float = Field(1.0, ge=0, le=1e6, description="prediction of the reward")
    continue_: float = Field(1.0, ge=0, le=1e6, alias="continue", description="prediction of the end of an episode")
    dyn: float = Field(1.0, ge=0, le=1e6, description="KL divergence that moves the prior to the posterior")
    rep: float = Field(0.1, ge=0, le=1e6, description="KL divergence that moves the posterior to the prior")
    policy: float = Field(1.0, ge=0, le=1e6, description="loss of the actor")
    value: float = Field(1.0, ge=0, le=1e6, description="critic on imagined states")
    replay_value: float = Field(0.3, ge=0, le=1e6, description="critic on replayed states")


class DreamerV3Config(AgentConfig):
    """Options of :class:`~sheeplike.agents.dreamer_v3.agent.DreamerV3`."""

    name: Annotated[Literal["dreamer_v3"], HEADLINE] = Field("dreamer_v3", description="the algorithm")
    from_: str | None = Field(
        None,
        alias="from",
        description="directory of a run, such as one of plan2explore, whose networks and replay this run begins with",
    )
    targets: tuple[str, ...] = Field(
        (),
        description="glob patterns of observations that the model predicts but does not see, such as privileged_state; "
        "they shape its latents",
    )
    probes: Annotated[tuple[str, ...], INCIDENTAL] = Field(
        (),
        description="glob patterns of vectors that probes learn to read from the latents, such as privileged_state; "
        "this does not change what the agent learns",
    )
    representation: Literal["reconstruction", "barlow"] = Field(
        "reconstruction",
        description="what shapes the latents beside rewards, ends and targets: decoding what the model sees, or "
        "correlating with the encoder's output (R2-Dreamer)",
    )
    actor_gradient: Literal["reinforce", "dynamics", "both"] = Field(
        "reinforce",
        description="gradient of the actor: of its log-probabilities, of returns through the model, or 0.9 and 0.1",
    )
    decoder: bool = Field(
        True,
        description="false, with representation=barlow: no images are decoded, so there are no videos of the model",
    )
    size: Annotated[Literal["1m", "12m", "25m", "50m", "100m", "200m", "400m"] | Size, HEADLINE] = Field(
        "12m", description="preset, or the widths of the model"
    )  # the authors' default is 200m
    replay_ratio: Annotated[float, HEADLINE] = Field(
        0.0625, gt=1e-9, le=1000, description="gradient steps per policy step after learning_starts"
    )
    # 0.0625 x 16 x 64: each step is trained on 64 times. The authors' default is 32 times, for 5 million steps.
    learning_starts: int | None = Field(
        None, ge=0, description="policy steps before the first gradient step; null: when the replay holds a batch"
    )
    replay_size: int = Field(500_000, ge=1, le=10**12, description="policy steps kept for replay, over all worlds")
    replay_device: Annotated[Literal["auto", "device", "cpu", "disk"], RESUMABLE, INCIDENTAL] = Field(
        "auto", description="place of the replay: the learner's device (auto), the host's memory, or a file by the run"
    )
    sampling: Literal["uniform", "episode"] = Field(
        "uniform", description="drawn equally often: each start of a sequence; or each episode, its ends as its middle"
    )
    batch_size: Annotated[int, HEADLINE] = Field(16, ge=1, le=2**16, description="sequences per gradient step")
    batch_length: Annotated[int, HEADLINE] = Field(64, ge=2, le=2**16, description="time steps per sequence")
    learning_rate: Annotated[float, HEADLINE] = Field(4e-5, gt=0, le=1, description="step size after the warm-up")
    warmup: int = Field(1000, ge=0, le=10**12, description="gradient steps over which the learning rate rises from 0")
    beta1: float = Field(0.9, ge=0, lt=1, description="decay of the momentum")
    beta2: float = Field(0.999, ge=0, lt=1, description="decay of the average squared gradient")
    eps: float = Field(1e-20, ge=1e-30, le=1, description="added to the root of the average squared gradient")
    agc: float = Field(0.3, gt=0, le=1e6, description="maximum gradient norm, relative to the parameter's norm")
    unimix: float = Field(0.01, ge=0, lt=1, description="share of a uniform distribution in the latents")
    policy_unimix: float = Field(
        0.0, ge=0, lt=1, description="share of a uniform distribution in a discrete policy; the paper has 0.01"
    )  # the authors configure 0.01 too, but do not apply it (danijar/dreamerv3 issue 219)
    free_nats: float = Field(1.0, ge=0, le=1e6, description="nats of KL divergence that cost nothing")
    imagination_length: int = Field(15, ge=1, le=1000, description="imagined time steps")
    horizon: Annotated[float, HEADLINE] = Field(
        333.0, gt=1, description="discount horizon in time steps: 1 / (1 - discount)"
    )
    reward_scaling: float = Field(
        1.0, ge=1e-6, le=1e6, description="factor of rewards in learning; rewards and values are logged without it"
    )
    return_lambda: float = Field(0.95, ge=0, le=1, description="lambda of the lambda-returns")
    entropy_scale: Annotated[float, HEADLINE] = Field(3e-4, ge=0, le=1e6, description="weight of the policy's entropy")
    slow_critic_rate: float = Field(
        0.02, gt=0, le=1, description="share of the critic in the slow critic's moving average, per gradient step"
    )
    loss_scales: LossScales = Field(LossScales(), description="weight of each loss")

    dry_run: ClassVar[dict[str, Any]] = {
        "size": "1m",
        "replay_ratio": 0.0625,
        "replay_size": 1024,
        "batch_size": 4,
        "batch_length": 8,
    }
    collecting: ClassVar[str] = "filling the replay"
    memory_options: ClassVar[tuple[str, ...]] = ("replay_size", "batch_size", "batch_length", "imagination_length")
    has_world_model: ClassVar[bool] = True
    has_replay: ClassVar[bool] = True

    @property
    def widths(self) -> Size:
        return SIZES[self.size] if isinstance(self.size, str) else self.size

    @property
    def train_ratio(self) -> float:
        """Replayed time steps per policy step, as the authors count."""
        return self.replay_ratio * self.batch_size * self.batch_length

    def check(self, *, num_envs: int, total_steps: int) -> Self:
        """Fill in ``learning_starts``; check that the replay can hold a sequence and that the run makes an update."""
        if not self.decoder and self.representation == "reconstruction":
            raise InvalidOption("agent.decoder", False, "true, beside agent.representation=reconstruction", True)
        needed = num_envs * (self.batch_length + CONTEXT + WRITE_HEAD)
        if self.replay_size < needed:
            expected = f"at least {needed}, to hold {self.batch_length} steps in a row of each of the {num_envs} worlds"
            raise InvalidOption("agent.replay_size", self.replay_size, expected, needed)
        smallest = self._smallest_replay(num_envs)
        starts = self.first_update(num_envs)
        if starts < smallest:
            expected = f"at least {smallest}, to replay a batch, and a sequence of each of the {num_envs} worlds"
            raise InvalidOption("agent.learning_starts", starts, expected, smallest)
        first = starts + math.ceil(1 / self.replay_ratio)
        if total_steps < first:
            expected = f"at least {first}, where the first gradient step comes (agent.learning_starts={starts})"
            raise InvalidOption("total_steps", total_steps, expected, first)
        return self.replace(learning_starts=starts)

    def divide(self, ranks: int, num_envs: int) -> Self:
        if self.from_ is not None:
            raise InvalidOption("fabric.devices", ranks, "1, beside agent.from", 1)
        if self.batch_size % ranks:
            nearest = max(round(self.batch_size / ranks), 1) * ranks
            raise InvalidOption("agent.batch_size", self.batch_size, f"a multiple of the {ranks} ranks", nearest)
        return self.replace(batch_size=self.batch_size // ranks, replay_size=self.replay_size // ranks)

    def multiply(self, ranks: int) -> Self:
        starts = None if self.learning_starts is None else self.learning_starts * ranks
        sizes = {"batch_size": self.batch_size * ranks, "replay_size": self.replay_size * ranks}
        # Each policy step is replayed as often: the batch is larger, so there are fewer updates for as many steps.
        return self.replace(**sizes, learning_starts=starts, replay_ratio=self.replay_ratio / ranks)

    def first_update(self, num_envs: int) -> int:
        return self._smallest_replay(num_envs) if self.learning_starts is None else self.learning_starts

    def updates(self, start: int, stop: int, num_envs: int) -> int:
        return int(max(stop - max(self.first_update(num_envs), start), 0) * self.replay_ratio)

    def _smallest_replay(self, num_envs: int) -> int:
        """Return the policy steps after which the replay can serve a batch."""
        return max(num_envs * (self.batch_length + CONTEXT), min(self.batch_size * self.batch_length, self.replay_size))


class ExplorerScales(LossScales):
    """Weight of each loss of Plan2Explore."""

    replay_value: float = Field(
        0.0, ge=0, le=1e6, description="critic on replayed states, which are the explorer's and not the task's"
    )
    ensemble: float = Field(1.0, ge=0, le=1e6, description="predictions of the next latent")
    explorer_policy: float = Field(1.0, ge=0, le=1e6, description="loss of the explorer's actor")
    explorer_value: float = Field(1.0, ge=0, le=1e6, description="critic of the explorer's bonus")


class Plan2ExploreConfig(DreamerV3Config):
    """Options of :class:`~sheeplike.agents.dreamer_v3.plan2explore.Plan2Explore`."""

    name: Annotated[Literal["plan2explore"], HEADLINE] = Field("plan2explore", description="the algorithm")
    explore_scale: Annotated[float, HEADLINE] = Field(
        1.0, ge=0, le=1, description="share of the bonus in the explorer's advantage; the rest is the task's reward"
    )
    explore_steps: int | None = Field(
        None, ge=1, le=10**12, description="policy steps over which explore_scale falls to 0; null: it stays"
    )
    members: int = Field(8, ge=2, le=64, description="networks whose disagreement is the bonus")
    loss_scales: ExplorerScales = Field(ExplorerScales(), description="weight of each loss")

    def share_at(self, policy_steps: int) -> float:
        """Return the share of the bonus after ``policy_steps``."""
        if self.explore_steps is None:
            return self.explore_scale
        return self.explore_scale * max(1 - policy_steps / self.explore_steps, 0.0)

    def divide(self, ranks: int, num_envs: int) -> Self:
        raise InvalidOption("fabric.devices", ranks, f"1, since {self.name} learns on one device", 1)
