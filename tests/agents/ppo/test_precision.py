"""Mixed precision: bfloat16 in the products, float32 in what is stored, in losses and in gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gymnasium import spaces

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO, Vision
from sheeplike.nn.linear import Linear

KINDS = {
    "camera and state": {"cameras": ("front",), "augment": True, "frame_stack": 2},
    "camera, spatial softmax": {
        "cameras": ("front",),
        "vectors": {},
        "vision": Vision(layout="nature", head="spatial_softmax"),
    },
    "clipped normal": {"distribution": "clipped_normal", "value_clip": 0.2},
    "discrete": {"actions": spaces.Discrete(3), "cameras": ("front",), "vision": Vision(normalise_channels=True)},
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def mixed(make_ppo: Callable[..., PPO], device: str, **options: Any) -> PPO:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return make_ppo(device=device, autocast=partial(torch.autocast, device, torch.bfloat16), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_bfloat16_and_everything_kept_is_float32(
    kind: str, device: str, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = mixed(make_ppo, device, **KINDS[kind])
    products: dict[type, set[torch.dtype]] = {torch.nn.Conv2d: set(), Linear: set()}
    for module in agent.networks.modules():
        if type(module) in products:
            module.register_forward_hook(lambda module, inputs, output: products[type(module)].add(output.dtype))
    steps = fill(agent, last={(3, 0)})
    for step in steps:
        assert {x.dtype for x in step.extras.values()} == {torch.float32}
        assert step.action.dtype == (torch.int64 if agent.codec.discrete else torch.float32)
    for _ in range(agent.updates_due(0)):
        for name, value in agent.update().items():
            assert value.dtype == torch.float32, name
            assert bool(value.isfinite()), name
    for name, p in agent.networks.named_parameters():
        assert p.dtype == p.grad.dtype == torch.float32
        assert bool(p.grad.any()), name
    assert products[Linear] == {torch.float32}
    assert products[torch.nn.Conv2d] == ({torch.bfloat16} if agent.keys.images else set())


@pytest.mark.parametrize("device", DEVICES)
def test_values_are_not_rounded(device: str, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> None:
    """Advantages are differences of values: near 70, bfloat16 knows halves only."""
    agent = mixed(make_ppo, device, cameras=("front",))
    with torch.no_grad():
        agent.networks.value_head[-1].weight.zero_()
        agent.networks.value_head[-1].bias.fill_(70.1)
    values = torch.cat([step.extras["value"] for step in fill(agent)])
    assert torch.equal(values, torch.full_like(values, 70.1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_ratios_start_near_one(
    kind: str, device: str, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Acting and learning round alike, though their batches differ in size."""
    agent = mixed(make_ppo, device, **KINDS[kind], minibatches=1)
    fill(agent)
    metrics = agent.update()
    assert metrics["ppo/approx_kl"].item() == pytest.approx(0, abs=1e-4)
    assert metrics["ppo/clip_fraction"] == 0
