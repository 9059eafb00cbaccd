"""Policy and value networks: a CNN for each camera, vectors beside them, a multi-layer perceptron on top.

Shape letters: ``N`` worlds, ``B`` batch, ``H W C`` image, ``D`` vector, ``A`` action, ``F`` features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from sheeplike.agents.policy import PolicyNetworks
from sheeplike.agents.ppo.config import PPOConfig
from sheeplike.agents.spaces import ActionCodec, ObservationKeys
from sheeplike.nn.cnn import ACTIVATIONS, CNN, orthogonal_
from sheeplike.nn.distributions import JointCategorical, Normal, OneHotCategorical, TanhNormal, categorical
from sheeplike.nn.linear import Linear
from sheeplike.nn.normalizers import RunningNorm
from sheeplike.ranks import ALONE, Ranks

Distribution = Normal | OneHotCategorical | JointCategorical


class Trunk(nn.Module):
    """Observations, images ``(B, H, W, C)`` and vectors ``(B, D)``, to features ``(B, outputs)``."""

    def __init__(self, keys: ObservationKeys, config: PPOConfig) -> None:
        super().__init__()
        vision, options = config.vision, config.vision.model_dump(exclude={"shared"})
        self.keys = keys
        shapes = {key: keys.spaces[key].shape for key in keys.images}
        if vision.shared and len(set(shapes.values())) > 1:
            raise ValueError(f"a CNN shared by cameras of shapes {shapes}: expected one shape; nearest: shared=false")
        self.names: dict[str, str] = {}
        self.cnns = nn.ModuleDict()
        self.outputs = sum(map(keys.width, keys.vectors))
        for key, (height, width, channels) in shapes.items():
            name = "shared" if vision.shared else _module_name(key)
            if name not in self.cnns:
                self.cnns[name] = CNN(height, width, channels * config.frame_stack, **options)
            self.names[key] = name
            self.outputs += self.cnns[name].outputs
        self.norms = nn.ModuleDict({_module_name(key): RunningNorm(keys.width(key)) for key in keys.vectors})
        orthogonal_(self.cnns)

    def forward(self, obs: Mapping[str, Tensor]) -> Tensor:
        parts = [self.cnns[self.names[key]](obs[key]) for key in self.keys.images]
        parts += [self.norms[_module_name(key)](obs[key]) for key in self.keys.vectors]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)  # cat copies even one part

    def update_norms(self, vectors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
        """Update the whitening with vectors ``(B, D)`` that all ranks have seen."""
        for key in self.keys.vectors:
            self.norms[_module_name(key)].update(vectors[key], ranks)


def _module_name(key: str) -> str:
    """Return a key as the name of a module, which holds no dot and is no method of ModuleDict."""
    name = key.replace(".", "//")
    return f"//{name}" if hasattr(nn.ModuleDict(), name) else name


class MLP(nn.Sequential):
    """Hidden layers and a linear output: ``(B, inputs)`` to ``(B, outputs)``.

    Args:
        initialisation: ``orthogonal``, with a gain of the square root of 2, or ``lecun_uniform``, with a variance of
            one over the inputs.
        gain: gain of the last layer's weights, which are orthogonal.
    """

    def __init__(
        self, inputs: int, hidden: Sequence[int], outputs: int, *, activation: str, initialisation: str, gain: float
    ) -> None:
        widths = [inputs, *hidden]
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(widths):
            layers += [Linear(wide, narrow), ACTIVATIONS[activation]()]
        super().__init__(*layers, Linear(widths[-1], outputs))
        orthogonal_(self)  # zero biases too
        if initialisation == "lecun_uniform":
            for layer in layers[::2]:
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="linear")
        nn.init.orthogonal_(self[-1].weight, gain)


class PPONetworks(PolicyNetworks):
    """Policy and value, with trunks of their own or a shared one.

    Attributes:
        policy_keys: inputs of the policy.
        keys: inputs of both.
    """

    config: PPOConfig

    def build(self) -> None:
        config = self.config
        self.policy_keys = ObservationKeys(self.space, config.observations)
        value_keys = ObservationKeys(self.space, config.value_observations or config.observations)
        self.keys = ObservationKeys(self.space, sorted({*self.policy_keys.spaces, *value_keys.spaces}))
        self.observations = self.policy_keys.spaces
        self.only_for_learning = {k: self.space[k] for k in self.keys.spaces if k not in self.observations}
        self.codec = ActionCodec(self.actions)
        self.distribution = choose_distribution(config.distribution, self.codec)
        if config.shared_trunk and self.policy_keys.spaces.keys() != value_keys.spaces.keys():
            raise ValueError(
                f"a trunk shared by a policy that sees {', '.join(self.policy_keys.spaces)} and a value that sees "
                f"{', '.join(value_keys.spaces)}: expected the same observations; nearest: shared_trunk=false"
            )
        self.policy_trunk = Trunk(self.policy_keys, config)
        self.value_trunk = self.policy_trunk if config.shared_trunk else Trunk(value_keys, config)
        outputs = self.codec.width * (2 if self.distribution == "tanh_normal" else 1)
        mlp = partial(MLP, activation=config.activation, initialisation=config.initialisation)
        # With a small gain the policy begins nearly the same everywhere: exploration comes from the deviation.
        self.policy_head = mlp(self.policy_trunk.outputs, config.policy_layers, outputs, gain=config.policy_gain)
        # A random value would outweigh small rewards, and the policy would follow its errors.
        self.value_head = mlp(self.value_trunk.outputs, config.value_layers, 1, gain=0.0)
        if self.distribution == "clipped_normal":  # its deviation does not depend on the observation
            self.log_std = nn.Parameter(torch.zeros(self.codec.width))

    def initial(self, num_envs: int) -> dict[str, Tensor]:
        """Return the last frames of each camera, ``(N, stack, H, W, C)``; nothing if none are stacked."""
        stack = self.config.frame_stack
        return {
            key: torch.zeros(num_envs, stack, *shape, dtype=dtype, device=self.device)
            for key, (shape, dtype) in self.keys.stored().items()
            if stack > 1 and key in self.keys.images
        }

    def select(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # Inputs of the value alone may be missing, as a privileged state is on a robot.
        complete = self.keys.spaces.keys() <= obs.keys()
        return {key: obs[key] for key in (self.keys if complete else self.policy_keys).spaces}

    @torch.no_grad()
    def act(
        self, state: dict[str, Tensor], obs: dict[str, Tensor], is_first: Tensor, *, sample: bool = True
    ) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
        """Stack frames and choose.

        The extras are ``raw_action (N, A)``, drawn before any squashing, ``log_prob (N,)`` and ``value (N,)``, which is
        missing if ``obs`` lacks an input of the value.
        """
        stacks = {key: push_frame(state[key], obs[key], is_first) for key in state if key in obs}
        seen = obs | {key: frames.permute(0, 2, 3, 1, 4).flatten(-2) for key, frames in stacks.items()}
        with self.autocast():
            policy, value = self(seen)
        raw_action = policy.sample() if sample else policy.mode()
        extras = {"raw_action": raw_action, "log_prob": policy.log_prob(raw_action)}
        extras |= {} if value is None else {"value": value}
        return {key: stacks.get(key, state[key]) for key in state}, self.to_env(raw_action), extras

    def forward(self, obs: Mapping[str, Tensor]) -> tuple[Distribution, Tensor | None]:
        """Return the action distribution ``(B, A)`` and the value ``(B,)`` float32, None if its inputs are missing.

        The heads compute in float32 under autocast too: advantages are differences of values, and bfloat16 numbers near
        100 are 0.5 apart.
        """
        seen = features = self.policy_trunk(obs)
        complete = obs.keys() == self.keys.spaces.keys()
        if complete and self.value_trunk is not self.policy_trunk:
            seen = self.value_trunk(obs)
        with torch.autocast(features.device.type, enabled=False):
            policy = self.to_distribution(self.policy_head(features.float()))
            return policy, self.value_head(seen.float()).squeeze(-1) if complete else None

    def to_distribution(self, out: Tensor) -> Distribution:
        if self.distribution == "categorical":
            return categorical(out, self.codec.classes)
        return TanhNormal(out) if self.distribution == "tanh_normal" else Normal(out, self.log_std.exp())

    def to_env(self, action: Tensor) -> Tensor:
        """Return what the distribution drew, ``(N, A)``, as the environment takes it."""
        return action.tanh() if self.distribution == "tanh_normal" else self.codec.to_env(action)

    def update_norms(self, vectors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> None:
        self.policy_trunk.update_norms(vectors, ranks)
        if self.value_trunk is not self.policy_trunk:
            self.value_trunk.update_norms(vectors, ranks)


def push_frame(frames: Tensor, frame: Tensor, is_first: Tensor) -> Tensor:
    """Replace the oldest of ``frames (N, stack, ...)`` by ``frame``, or all of them where an episode begins."""
    frame = frame.unsqueeze(1)
    return torch.where(is_first.view(-1, 1, 1, 1, 1), frame, torch.cat([frames[:, 1:], frame], 1))


def choose_distribution(name: str, codec: ActionCodec) -> str:
    """Return the distribution that ``name`` means for these actions."""
    suited = ("categorical",) if codec.discrete else ("tanh_normal", "clipped_normal")
    if name == "auto":
        return suited[0]
    if name not in suited:
        kind = "discrete" if codec.discrete else "continuous"
        raise ValueError(
            f"agent.distribution={name}: expected {' or '.join(suited)} for {kind} actions; nearest: {suited[0]}"
        )
    return name
