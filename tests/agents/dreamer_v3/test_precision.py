"""Mixed precision: bfloat16 in the products, float32 where it matters, and everything still learns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sheeplike.agents.dreamer_v3 import DreamerV3, actor_critic

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


class Casts(TorchDispatchMode):
    """Number of casts to bfloat16 of tensors of each shape."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[torch.Size] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16:
            self.shapes[args[0].shape] += 1
        return function(*args, **(kwargs or {}))


def test_imagination_casts_each_weight_once_and_changes_no_bit(
    make_agent: Callable[..., DreamerV3], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = make_agent(cameras=("front",))
    critic, rssm = agent.actor_critic, agent.world_model.rssm
    matrices = {p.shape for module in (rssm, critic.policy) for p in module.parameters() if p.dim() > 1}

    def dream(length: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(0)
        # The cache would hide the casts, as it does not in compiled code.
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return critic.imagine(rssm, rssm.initial(3, torch.device("cpu")), length)

    def imagine(length: int) -> tuple[tuple[torch.Tensor, ...], int]:
        with Casts() as casts:
            return dream(length), sum(casts.shapes[shape] for shape in matrices)

    found, count = imagine(4)
    assert imagine(8)[1] == count > 0
    step = critic.imagine_step
    monkeypatch.setattr(critic, "imagine_step", torch.compile(step, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, dream(4), strict=True))
    monkeypatch.setattr(critic, "imagine_step", step)
    monkeypatch.setattr(actor_critic, "cast_weights", lambda module, device: {})
    plain, more = imagine(4)
    assert more > count
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
