"""Mixed precision: bfloat16 in the products, float32 where it matters, and everything still learns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from sheeplike.agents.dreamer_v3 import DreamerV3

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def mixed(make_agent: Callable[..., DreamerV3], device: str) -> DreamerV3:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return make_agent(cameras=("front",), device=device, autocast=partial(torch.autocast, device, torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_every_trainable_parameter_gets_a_gradient_under_autocast(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object], device: str
) -> None:
    """Imagination uses the policy without gradient first; a cast that is cached there must not cut the one after."""
    agent = mixed(make_agent, device)
    play(agent, 20)
    for _ in range(3):
        metrics = agent.update()
    for name, p in agent.networks.named_parameters():
        if p.requires_grad:
            assert p.dtype == p.grad.dtype == torch.float32
            assert bool(p.grad.any()), name
            assert bool(p.grad.isfinite().all()), name
    assert all(bool(value.isfinite()) for value in metrics.values())


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_bfloat16_and_states_and_losses_are_float32(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object], device: str
) -> None:
    agent = mixed(make_agent, device)
    play(agent, 20)
    products = []
    layer = agent.world_model.rssm.posterior_net[1]
    layer.register_forward_hook(lambda module, inputs, output: products.append(output.dtype))
    data = agent.replay.sample(4).data
    with agent.autocast():
        losses, _, posterior = agent.losses(data)
    assert {loss.dtype for loss in losses.values()} == {torch.float32}
    assert posterior.deter.dtype == posterior.stoch.dtype == torch.float32
    assert set(products) == {torch.bfloat16}


@pytest.mark.gpu
def test_a_checkpoint_from_the_cpu_goes_on_on_the_gpu(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    agent = make_agent()
    play(agent, 20)
    agent.update()
    resumed = make_agent(device="cuda")
    resumed.load_state_dict(agent.state_dict())
    states = resumed.optimizer.state.values()
    assert {tensor.device.type for state in states for tensor in state.values()} == {"cuda"}
    assert all(bool(value.isfinite()) for value in resumed.update().values())
