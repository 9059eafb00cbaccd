"""Targets: vectors that the model predicts without seeing them."""

from __future__ import annotations

import copy
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

SPACE = spaces.Dict(
    {
        "state": spaces.Box(-np.inf, np.inf, (4,), np.float32),
        "privileged_state": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "pixels/wrist": spaces.Box(0, 255, (48, 48, 3), np.uint8),
    }
)
ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


def make(seed: int = 0, **options: Any) -> DreamerV3:
    defaults = {"size": Size(deter=64, hidden=16, classes=4, depth=2, units=16), "warmup": 0}
    defaults |= {"batch_size": 8, "batch_length": 6, "replay_size": 800, "imagination_length": 2}
    defaults |= {"observations": ("state",), "targets": ("priv*",), "learning_rate": 1e-3}
    return DreamerV3(SPACE, ACTIONS, DreamerV3Config(**(defaults | options)), num_envs=4, seed=seed)


def collect(agent: DreamerV3, steps: int, hidden: Callable[[Tensor], Tensor]) -> None:
    """Steps whose ``privileged_state`` is ``hidden(state)``; the player is not shown it."""
    player, generator, none = agent.player(4), torch.Generator().manual_seed(0), torch.zeros(4)
    for t in range(steps):
        state = 5 * torch.randn(4, 4, generator=generator)
        first = torch.full((4,), t == 0)
        seen = {"state": state}
        action = player.act(seen, first)
        wrist = torch.randint(256, (4, 48, 48, 3), dtype=torch.uint8, generator=generator)
        obs = seen | {"privileged_state": hidden(state), "pixels/wrist": wrist}
        agent.add(Step(obs, action, none, first, none > 0, none > 0, dict(player.extras)))


def test_a_target_is_stored_and_predicted_but_neither_seen_nor_asked_for_when_acting() -> None:
    agent = make(targets=("privileged_state", "pixels/wrist"))
    assert list(agent.keys.spaces) == ["state"]
    assert list(agent.networks.only_for_learning) == ["pixels/wrist", "privileged_state"]
    assert agent.world_model.encoder.outputs == 16, "the vector's alone"
    collect(agent, 20, lambda state: state[:, :2])
    assert {"state", "privileged_state", "pixels/wrist"} <= agent.replay.storage.keys()
    assert bool(agent.replay.storage["privileged_state"][:20].any())
    metrics = agent.update()
    assert {"loss/state", "loss/privileged_state", "loss/pixels/wrist"} <= metrics.keys()
    _, predictions = agent.report()
    assert predictions.keys() == {"wrist"}


def test_its_loss_is_that_of_an_observation_and_its_gradient_shapes_the_latent_state() -> None:
    agent = make(loss_scales={"reconstruction": 0.5})
    world, generator = agent.world_model, torch.Generator().manual_seed(1)
    world.update_norms({"privileged_state": 3 + 7 * torch.randn(50, 2, generator=generator)})
    deter = torch.randn(2, 3, 64, generator=generator, requires_grad=True)
    stoch = torch.eye(4)[torch.randint(4, (2, 3, 32), generator=generator)].requires_grad_()
    batch = {
        key: 9 * torch.randn(2, 3, SPACE[key].shape[0], generator=generator) for key in ("state", "privileged_state")
    }
    batch |= {"reward": torch.zeros(2, 3), "is_terminal": torch.zeros(2, 3, dtype=torch.bool)}
    losses, metrics = world.losses(Latent(deter, stoch), torch.zeros(2, 3, 32, 4), batch)
    with torch.no_grad():
        guess = world.decoder(Latent(deter, stoch).map(lambda x: x.flatten(0, 1)))["privileged_state"].double()
    truth = world.norms[0](batch["privileged_state"].flatten(0, 1)).double().numpy()
    squashed = np.sign(truth) * np.log(1 + np.abs(truth))
    expected = ((guess.numpy() - squashed) ** 2).sum(-1)
    np.testing.assert_allclose(losses["privileged_state"].detach().flatten(), expected, rtol=1e-4)
    variance = ((squashed - squashed.mean(0)) ** 2).sum(-1).mean()
    found = metrics["wm/explained_variance/privileged_state"].item()
    assert found == pytest.approx(1 - expected.mean() / variance, rel=1e-3)
    assert "wm/explained_variance/state" not in metrics
    reached = torch.autograd.grad(losses["privileged_state"].sum(), (deter, stoch))
    assert all(bool(gradient.any()) for gradient in reached)
    ones = {name: torch.ones(1) for name in agent.scales.keys() - {"reconstruction"}}
    _, total = agent.total(ones | {"state": torch.ones(1), "privileged_state": torch.tensor([10.0])})
    assert total.item() == pytest.approx(sum(agent.scales[name] for name in ones) + 0.5 * 11)


def test_a_target_weighs_the_same_in_metres_and_in_kilometres() -> None:
    """Whitened by all that was delivered, so that millimetres of a box are worth as much as radians of a joint."""
    losses = []
    for unit in (1e-3, 1.0):
        torch.manual_seed(3)
        agent = make()
        collect(agent, 30, lambda state, unit=unit: 4 * unit + unit * state[:, :2])
        losses.append([agent.update()["loss/privileged_state"].item() for _ in range(3)])
        assert agent.world_model.norms[0].count == 30 * 4
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
    assert min(losses[0]) > 0.3


def test_what_a_target_is_changes_nothing_that_the_encoder_says() -> None:
    agent = make()
    collect(agent, 20, lambda state: state[:, :2])
    data = agent.replay.sample(4).data
    torch.manual_seed(0)
    _, _, before = agent.losses(data)
    torch.manual_seed(0)
    _, _, after = agent.losses(data | {"privileged_state": data["privileged_state"] + 9})
    assert torch.equal(before.features, after.features)


@pytest.mark.slow
def test_the_latent_state_learns_what_can_be_known_and_not_what_cannot() -> None:
    learnt = {}
    for name, hidden in (("known", lambda state: state[:, :2]), ("noise", lambda state: 5 * torch.randn(4, 2))):
        torch.manual_seed(0)
        agent = make(learning_rate=3e-3, batch_size=16, replay_size=4000)
        collect(agent, 300, hidden)
        metrics = [agent.update() for _ in range(120)]
        late = [m["wm/explained_variance/privileged_state"] for m in metrics[-10:]]
        learnt[name] = float(torch.stack(late).mean())
    assert learnt["known"] > 0.5, learnt
    assert learnt["noise"] < 0.1, learnt


def test_without_targets_nothing_is_different() -> None:
    agents = [make(targets=()), make()]
    assert not agents[0].networks.only_for_learning
    assert agents[0].predicted is agents[0].keys
    assert "privileged_state" not in agents[0].replay.storage
    names = [set(agent.networks.state_dict()) for agent in agents]
    assert names[0] < names[1]
    parts = ("world_model.decoder.heads.", "world_model.norms.0.")
    assert all(name.startswith(parts) for name in names[1] - names[0])


def test_a_state_goes_on_bit_for_bit() -> None:
    agent, other = make(), make(seed=5)
    collect(agent, 30, lambda state: state[:, :2])
    agent.update()
    other.load_state_dict(copy.deepcopy(agent.state_dict()))
    found = []
    for one in (agent, other):
        torch.manual_seed(3)
        found.append([one.update() for _ in range(3)][-1])
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)  # there are zero rewards alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("stat",)}, r"'stat'.*nearest: state$"),
        ({"targets": ("*state",)}, "'state'"),
        ({"observations": ("*",)}, "'privileged_state'"),
    ],
)
def test_targets_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        make(**options)
    assert "\n" not in str(refusal.value)
