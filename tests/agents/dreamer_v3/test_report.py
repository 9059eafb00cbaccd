"""Open-loop prediction: the first half is observed, the second imagined from actions alone. And dreams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sheeplike.agents.agent import Prediction
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3.agent import frames_before
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.world_model import open_loop

pytestmark = pytest.mark.usefixtures("argmax_sampling")
LENGTH, CONTEXT = 12, 6


@pytest.fixture
def agent(make_agent: Callable[..., DreamerV3], play: Callable[..., Any], randomised: Callable[..., None]) -> DreamerV3:
    agent = make_agent(cameras=("front", "wrist"), batch_length=LENGTH)
    randomised(agent.networks, 0.3)
    play(agent, 30)
    return agent


def predict(
    agent: DreamerV3, change: Callable[[dict[str, Tensor]], None] = lambda batch: None
) -> tuple[dict[str, Tensor], Prediction]:
    generator = torch.Generator().manual_seed(0)
    start = Latent(torch.randn(3, 64, generator=generator), torch.eye(4)[torch.zeros(3, 32, dtype=torch.int64)])
    batch = {"state": torch.randn(3, LENGTH, 5, generator=generator), "action": torch.randn(3, LENGTH, 2)}
    batch["action"] = torch.randn(3, LENGTH, 2, generator=generator)
    batch["is_first"] = torch.zeros(3, LENGTH, dtype=torch.bool)
    for camera in ("front", "wrist"):
        shape = (3, LENGTH, 48, 48, 3)
        batch[f"pixels/{camera}"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    change(batch)
    with torch.no_grad():
        metrics, predictions = open_loop(agent.world_model, start, batch["action"], batch)
    assert torch.equal(predictions["wrist"].truth, batch["pixels/wrist"].transpose(0, 1))
    return metrics, predictions["front"]


def differing_steps(one: Prediction, other: Prediction) -> list[int]:
    return [t for t in range(LENGTH) if not torch.equal(one.model[t], other.model[t])]


def test_shapes_types_and_context(agent: DreamerV3) -> None:
    metrics, prediction = predict(agent)
    assert prediction.context == CONTEXT
    assert prediction.truth.shape == prediction.model.shape == (LENGTH, 3, 48, 48, 3)
    assert prediction.model.dtype == torch.uint8
    expected = {f"wm/open_loop_mse@{ahead}/{camera}" for ahead in (1, 5) for camera in ("front", "wrist")}
    assert set(metrics) == expected
    for ahead in (1, 5):
        step = CONTEXT + ahead - 1
        error = (prediction.model[step].double() - prediction.truth[step].double()) / 255
        assert metrics[f"wm/open_loop_mse@{ahead}/front"].item() == pytest.approx(
            error.square().mean().item(), abs=4e-3
        )


@pytest.mark.parametrize("step", [0, 3, 5])
def test_observed_steps_count_from_when_they_are_seen(agent: DreamerV3, step: int) -> None:
    def change(batch: dict[str, Tensor]) -> None:
        batch["pixels/front"][:, step] = 255 - batch["pixels/front"][:, step]

    assert differing_steps(predict(agent)[1], predict(agent, change)[1])[0] == step


@pytest.mark.parametrize("step", range(CONTEXT, LENGTH))
def test_observations_of_the_imagined_half_are_not_seen(agent: DreamerV3, step: int) -> None:
    def change(batch: dict[str, Tensor]) -> None:
        batch["pixels/front"][:, step], batch["state"][:, step] = 0, 9.0

    assert differing_steps(predict(agent)[1], predict(agent, change)[1]) == []


@pytest.mark.parametrize("step", [2, CONTEXT, 9, LENGTH - 1])
def test_the_action_that_led_to_a_step_counts_from_that_step(agent: DreamerV3, step: int) -> None:
    def change(batch: dict[str, Tensor]) -> None:
        batch["action"][:, step] = -batch["action"][:, step]

    assert differing_steps(predict(agent)[1], predict(agent, change)[1])[0] == step


@pytest.mark.parametrize("step", [3, 8])
def test_an_episode_that_begins_in_either_half_forgets_what_was_before(agent: DreamerV3, step: int) -> None:
    def begin(batch: dict[str, Tensor]) -> None:
        batch["is_first"][:, step] = True

    def begin_after_another_past(batch: dict[str, Tensor]) -> None:
        begin(batch)
        batch["action"][:, : step + 1] = 0.3
        batch["pixels/front"][:, : min(step, CONTEXT)] = 77

    different = differing_steps(predict(agent, begin)[1], predict(agent, begin_after_another_past)[1])
    assert different == list(range(step))


def test_report_covers_every_camera_and_needs_a_sequence(
    agent: DreamerV3, make_agent: Callable[..., DreamerV3]
) -> None:
    _, predictions = agent.report()
    assert set(predictions) == {"front", "wrist"}
    assert predictions["front"].truth.shape == (LENGTH, 4, 48, 48, 3)
    assert make_agent().report() == ({}, {})


def test_a_dream_is_what_the_policy_imagines_from_the_end_of_a_sequence(agent: DreamerV3) -> None:
    """The same sequences as the report's; decoded and judged step by step here."""
    films = agent.dream()
    assert set(films) == {"front", "wrist"}
    seen, model, traces = films["wrist"]
    assert (seen.shape, model.shape) == ((5, 4, 48, 48, 3), (50, 4, 48, 48, 3))
    assert seen.dtype == model.dtype == torch.uint8
    state = agent.replay.generator.get_state(), agent.replay.fresh.copy()
    data = agent.replay.sample(4).data
    agent.replay.generator.set_state(state[0])
    agent.replay.fresh = state[1]
    batch = {key: value[:, 1:] for key, value in data.items()}
    steps = frames_before(batch["is_first"], batch["is_last"])
    for row in range(4):
        assert torch.equal(seen[:, row], batch["pixels/wrist"][row, steps[row]])
    world, critic = agent.world_model, agent.actor_critic
    before = torch.get_rng_state()
    with torch.no_grad():
        posterior, *_ = world.observe(agent.context(data), data["action"][:, :-1], batch, batch["is_first"])
        latent = posterior.map(lambda x: x[range(4), steps[:, -1]])
        for t in range(50):
            latent = world.rssm.imagine(latent, critic.policy(latent.features).sample())
            painted = (world.decoder(latent)["pixels/wrist"] * 255).clamp(0, 255).to(torch.uint8)
            assert (painted.int() - model[t].int()).abs().max() <= 1, t
            torch.testing.assert_close(traces["reward"][t], world.reward(latent.features).pred(), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(traces["value"][t], critic.value(latent.features).pred(), rtol=1e-4, atol=1e-5)
            goes_on = world.cont(latent.features).prob() / (1 - 1 / agent.config.horizon)
            torch.testing.assert_close(traces["continue"][t], goes_on.clamp(max=1))
    torch.set_rng_state(before)
    again = agent.dream()["wrist"]
    assert torch.equal(again.model, model)
    assert torch.equal(torch.get_rng_state(), before)


def test_dreams_begin_in_episodes_that_go_on_and_show_no_other_episode() -> None:
    is_first, is_last = torch.zeros(2, 4, 8, dtype=torch.bool)
    is_last[1, 7] = True  # ends: from the step before
    is_last[2, 4], is_first[2, 5] = True, True  # another episode before
    is_last[3, 5], is_first[3, 6], is_last[3, 6:] = True, True, True
    assert frames_before(is_first, is_last).tolist() == [
        [3, 4, 5, 6, 7],
        [2, 3, 4, 5, 6],
        [5, 5, 5, 6, 7],
        [0, 1, 2, 3, 4],
    ]


def test_dreams_need_a_sequence_and_a_camera(make_agent: Callable[..., DreamerV3], play: Callable[..., Any]) -> None:
    assert make_agent(cameras=("front",)).dream() == {}
    blind = make_agent()
    play(blind, 30)
    assert blind.dream() == {}
