"""Parts that each loss trains: the placement of every stop-gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3

PARTS = {
    "encoder": "world_model.encoder.",
    "prior": "world_model.rssm.prior",
    "posterior": "world_model.rssm.posterior",
    "sequence": "world_model.rssm.",
    "decoder": "world_model.decoder.",
    "reward": "world_model.reward.",
    "continue": "world_model.cont.",
    "policy": "actor_critic.policy.",
    "slow value": "actor_critic.slow_value.",
    "value": "actor_critic.value.",
}
REPRESENTATION = {"encoder", "posterior", "sequence"}
REACHED = {
    "state": REPRESENTATION | {"decoder"},
    "pixels/front": REPRESENTATION | {"decoder"},
    "reward": REPRESENTATION | {"reward"},
    "continue": REPRESENTATION | {"continue"},
    "dyn": REPRESENTATION | {"prior"},  # the posterior's logits are stopped, but its samples lead to later states
    "rep": REPRESENTATION,
    "policy": {"policy"},
    "value": {"value"},
    "replay_value": REPRESENTATION | {"value"},
}


def part_of(name: str) -> str:
    return next(part for part, prefix in PARTS.items() if name.startswith(prefix))


def losses_of(agent: DreamerV3) -> dict[str, Tensor]:
    losses, _, _ = agent.losses(agent.replay.sample(agent.config.batch_size).data)
    return losses


@pytest.fixture(params=[2, spaces.Discrete(3)], ids=["continuous", "discrete"])
def agent(
    request: pytest.FixtureRequest,
    make_agent: Callable[..., DreamerV3],
    play: Callable[..., object],
    randomised: Callable[..., None],
) -> DreamerV3:
    torch.manual_seed(0)
    agent = make_agent(cameras=("front",), actions=request.param, free_nats=0.0)
    randomised(agent.networks, 0.05)
    play(agent, 20, last={(6, 0)}, terminal={(9, 1)})
    return agent


def test_each_loss_reaches_exactly_the_parts_it_may_train(agent: DreamerV3) -> None:
    """Above all: imagined policy and value losses leave the world model alone, replayed reward and value do not."""
    losses = losses_of(agent)
    assert losses.keys() == REACHED.keys()
    names, params = zip(*((n, p) for n, p in agent.networks.named_parameters() if p.requires_grad), strict=True)
    for loss, expected in REACHED.items():
        gradients = torch.autograd.grad(losses[loss].mean(), params, allow_unused=True, retain_graph=True)
        reached = {part_of(n) for n, g in zip(names, gradients, strict=True) if g is not None and bool(g.any())}
        assert reached == expected, loss


def test_the_slow_critic_gets_no_gradient_even_if_it_could(agent: DreamerV3) -> None:
    slow = list(agent.actor_critic.slow_value.requires_grad_(True).parameters())
    losses = losses_of(agent)
    gradients = torch.autograd.grad(sum(loss.mean() for loss in losses.values()), slow, allow_unused=True)
    assert gradients == (None,) * len(slow)


def test_every_trainable_parameter_gets_a_gradient_and_the_slow_critic_none(agent: DreamerV3) -> None:
    agent.update()
    for name, p in agent.networks.named_parameters():
        if part_of(name) == "slow value":
            assert p.grad is None
        else:
            assert bool(p.grad.any()), name
            assert bool(p.grad.isfinite().all()), name


def test_total_is_the_scaled_sum_of_the_means(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object]
) -> None:
    agent = make_agent(cameras=("front",))
    play(agent, 20)
    metrics = {name: float(value) for name, value in agent.update().items()}
    scales = {"state": 1, "pixels/front": 1, "reward": 1, "continue": 1, "dyn": 1, "rep": 0.1}
    scales |= {"policy": 1, "value": 1, "replay_value": 0.3}
    found = {name.removeprefix("loss/") for name in metrics if name.startswith("loss/")}
    assert found == {*scales, "total"}
    expected = sum(scale * metrics[f"loss/{name}"] for name, scale in scales.items())
    assert metrics["loss/total"] == pytest.approx(expected, rel=1e-5)


def test_loss_scales_can_be_changed_and_unknown_ones_are_refused(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object]
) -> None:
    only = dict.fromkeys(("reconstruction", "continue", "dyn", "rep", "policy", "value", "replay_value"), 0.0)
    agent = make_agent(loss_scales=only | {"reward": 7.0})
    play(agent, 20)
    metrics = agent.update()
    assert metrics["loss/total"].item() == pytest.approx(7 * metrics["loss/reward"].item(), rel=1e-5)
    with pytest.raises(ValueError, match=r"loss_scales\.rewards"):
        make_agent(loss_scales={"rewards": 1.0})


def test_losses_are_averaged_over_batch_and_time(
    make_agent: Callable[..., DreamerV3], play: Callable[..., object]
) -> None:
    agent = make_agent(cameras=("front",), batch_size=5, batch_length=4, imagination_length=3)
    play(agent, 20)
    losses = losses_of(agent)
    shapes = {name: tuple(loss.shape) for name, loss in losses.items()}
    world = dict.fromkeys(("state", "pixels/front", "reward", "continue", "dyn", "rep"), (5, 4))
    assert shapes == world | {"policy": (20, 3), "value": (20, 3), "replay_value": (5, 3)}
    captured = {}
    original = agent.losses

    def spy(data: dict[str, Tensor]) -> object:
        captured["losses"] = original(data)
        return captured["losses"]

    agent.losses = spy
    metrics = agent.update()
    for name, loss in captured["losses"][0].items():
        total = loss.detach().double().sum().item() / loss.numel()
        assert metrics[f"loss/{name}"].item() == pytest.approx(total, rel=1e-4, abs=1e-6)
