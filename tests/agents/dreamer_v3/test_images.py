"""Cameras of several sizes, shapes and channels, and depth: one encoder and one decoder for each size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3 import DreamerV3, DreamerV3Config, Size
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.storage import ModelKeys
from sheeplike.agents.dreamer_v3.world_model import Decoder, Encoder

TINY = Size(deter=64, hidden=16, classes=4, depth=2, units=16)
# Two sizes, one of them not square; colours, grey, four grey frames; depth beside a camera of its size.
SPACE = spaces.Dict(
    {
        "pixels/front": spaces.Box(0, 255, (48, 64, 3), np.uint8),
        "pixels/grey": spaces.Box(0, 255, (48, 48, 1), np.uint8),
        "pixels/stack": spaces.Box(0, 255, (48, 48, 12), np.uint8),
        "depth/front": spaces.Box(0, np.inf, (48, 64, 1), np.float32),
        "state": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    }
)


def observe(batch: int, space: spaces.Dict = SPACE, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    seen = {}
    for key, one in space.items():
        if one.dtype == np.uint8:
            seen[key] = torch.randint(0, 256, (batch, *one.shape), dtype=torch.uint8, generator=generator)
        else:
            seen[key] = 3 * torch.rand(batch, *one.shape, generator=generator)
    return seen


def latents(batch: int) -> Latent:
    return Latent(torch.randn(batch, 64), torch.eye(4)[torch.randint(4, (batch, 32))])


def make(space: spaces.Dict = SPACE, **options: Any) -> DreamerV3:
    defaults = {"size": TINY, "observations": ("*",), "batch_size": 2, "batch_length": 5}
    defaults |= {"replay_size": 180, "imagination_length": 2, "warmup": 0, "learning_rate": 1e-3}
    return DreamerV3(space, spaces.Discrete(3), DreamerV3Config(**(defaults | options)), num_envs=3)


def collect(agent: DreamerV3, steps: int) -> None:
    player, nothing = agent.player(3), torch.zeros(3)
    for t in range(steps):
        obs, first = observe(3, SPACE, t), torch.full((3,), t % 6 == 0)
        action = player.act(obs, first)
        last = torch.full((3,), t % 6 == 5)
        agent.add(Step(obs, action, nothing, first, last, nothing > 0, dict(player.extras)))


def test_one_size_has_the_names_and_the_numbers_that_it_always_had() -> None:
    """Runs of before must load: the only networks of images are ``cnn``, and their channels are in sorted order."""
    space = spaces.Dict({f"pixels/{name}": spaces.Box(0, 255, (48, 48, 3), np.uint8) for name in ("b", "a")})
    keys = ModelKeys(space, ("*",))
    encoder = Encoder(keys, depth=2, units=16)
    decoder = Decoder(keys, deter=64, stoch=128, depth=2, units=16)
    assert {name.split(".")[0] for name in (*encoder.state_dict(), *decoder.state_dict())} == {"cnn"}
    obs, latent = observe(2, space), latents(2)
    assert torch.equal(encoder(obs), encoder.cnn(torch.cat([obs["pixels/a"], obs["pixels/b"]], -1)))
    painted = decoder.cnn(latent.deter, latent.stoch.flatten(-2))
    assert torch.equal(torch.cat([decoder(latent)[f"pixels/{name}"] for name in "ab"], -1), painted)


def test_each_size_is_read_by_an_encoder_of_its_own() -> None:
    keys = ModelKeys(SPACE, ("*",))
    encoder = Encoder(keys, depth=2, units=16)
    assert [(images.name, list(images.channels)) for images in keys.sizes] == [
        ("cnn_48x48", ["pixels/grey", "pixels/stack"]),
        ("cnn_48x64", ["depth/front", "pixels/front"]),
    ]
    seen: dict[str, Tensor] = {}
    for name in ("cnn_48x48", "cnn_48x64"):
        getattr(encoder, name).register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    obs = observe(2)
    embed = encoder(obs)
    assert embed.shape == (2, encoder.outputs) == (2, 16 + 8 * (3 * 3 + 3 * 4))
    assert torch.equal(seen["cnn_48x48"], torch.cat([obs["pixels/grey"], obs["pixels/stack"]], -1))
    assert seen["cnn_48x48"].dtype == torch.uint8
    # Depth and colours side by side are numbers from 0 to 1 already.
    depth = obs["depth/front"]
    expected = torch.cat([depth / (1 + depth), obs["pixels/front"] / 255], -1)
    torch.testing.assert_close(seen["cnn_48x64"], expected)
    # Each network sees its own images alone.
    for key, changed in (("pixels/grey", slice(16, 16 + 72)), ("depth/front", slice(16 + 72, None))):
        other = encoder(obs | {key: observe(2, seed=9)[key]})
        differs = (other != embed).any(0)
        assert bool(differs[changed].any())
        differs[changed] = False
        assert not bool(differs.any())


def test_each_size_is_painted_by_a_decoder_of_its_own_and_compared_with_what_was_seen() -> None:
    keys = ModelKeys(SPACE, ("*",))
    decoder = Decoder(keys, deter=64, stoch=128, depth=2, units=16)
    obs = observe(2)
    with torch.no_grad():
        predicted = decoder(latents(2))
        losses = decoder.losses(predicted, obs)
    assert predicted.keys() == losses.keys() == SPACE.spaces.keys()
    for key in keys.images:
        truth = obs[key].double().numpy()
        truth = truth / 255 if key.startswith("pixels") else truth / (1 + truth)
        assert predicted[key].shape == (2, *SPACE[key].shape)
        np.testing.assert_allclose(
            losses[key], ((predicted[key].double().numpy() - truth) ** 2).sum((1, 2, 3)), rtol=1e-4
        )


def test_an_agent_sees_learns_and_reports_all_of_it(
    no_host_reads: Callable[[], Any], all_finite: Callable[..., bool]
) -> None:
    agent = make()
    collect(agent, 20)
    assert agent.replay.storage["depth/front"].dtype == torch.float32
    assert torch.equal(agent.replay.storage["depth/front"][4], observe(3, SPACE, 4)["depth/front"])
    before = {name: p.clone() for name, p in agent.networks.named_parameters() if p.requires_grad}
    for _ in range(6):
        with no_host_reads():
            metrics = agent.update()
        assert all_finite(metrics)
    assert {f"loss/{key}" for key in SPACE} <= metrics.keys()
    assert {"wm/psnr/front", "wm/psnr/grey", "wm/psnr/stack", "wm/psnr/depth/front"} <= metrics.keys()
    for name, p in agent.networks.named_parameters():
        assert not p.requires_grad or bool((p != before[name]).any()), name
    _, predictions = agent.report()
    assert predictions.keys() == {"front", "grey", "stack", "depth/front"}
    for key, (truth, model, _) in predictions.items():
        assert truth.dtype == model.dtype == torch.uint8
        assert truth.shape == model.shape
        shown = SPACE[key if key.startswith("depth") else f"pixels/{key}"].shape
        assert truth.shape[2:] == shown


def test_depth_that_is_shown_is_the_depth_that_was_seen() -> None:
    agent = make(observations=("depth/front",))
    collect(agent, 20)
    _, predictions = agent.report()
    truth = predictions["depth/front"].truth
    depth = agent.replay.storage["depth/front"]
    assert set(truth.unique().tolist()) <= set((depth[:20] / (1 + depth[:20]) * 255).to(torch.uint8).unique().tolist())
    assert truth.max() < 255 * 0.76, "3 m are 0.75"


def test_a_size_that_is_there_twice_costs_channels_and_another_size_networks() -> None:
    def count(*shapes: tuple[int, ...]) -> int:
        space = spaces.Dict({f"pixels/{n}": spaces.Box(0, 255, shape, np.uint8) for n, shape in enumerate(shapes)})
        keys = ModelKeys(space, ("*",))
        parts = Encoder(keys, depth=2, units=16), Decoder(keys, deter=64, stoch=128, depth=2, units=16)
        return sum(p.numel() for part in parts for p in part.parameters())

    small, wide = (48, 48, 3), (48, 64, 3)
    assert count(small, wide) == count(small) + count(wide)
    assert count(small, small) - count(small) == 2 * (5 * 5 * 3 * 4) + 3


@pytest.mark.parametrize("channels", [1, 2, 4, 12])
def test_any_number_of_channels(channels: int) -> None:
    keys = ModelKeys(spaces.Dict({"pixels/a": spaces.Box(0, 255, (48, 64, channels), np.uint8)}), ("*",))
    encoder = Encoder(keys, depth=2, units=16)
    decoder = Decoder(keys, deter=64, stoch=128, depth=2, units=16)
    assert encoder(observe(2, spaces.Dict(keys.spaces))).shape == (2, 8 * 3 * 4)
    assert decoder(latents(2))["pixels/a"].shape == (2, 48, 64, channels)
