"""A world model taken apart: each number against what it says it is."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch

from sheeplike.agents.dreamer_v3 import DreamerV3Config, Size
from sheeplike.agents.dreamer_v3.networks import DreamerNetworks
from sheeplike.inspection import dissect as dissecting
from sheeplike.inspection.dissect import (
    PRIVILEGED_STATE,
    OpenLoop,
    calibration,
    dissect,
    film_strips,
    observe,
    open_loop,
    summarize_open_loop,
)
from sheeplike.inspection.episodes import Episodes
from sheeplike.inspection.likelihood import log_likelihood, log_weights
from sheeplike.inspection.model import States, TrainedModel
from sheeplike.inspection.probes import split

CAMERA, STEPS, EPISODES = "pixels/front", 40, 12
SPACE = gymnasium.spaces.Dict(
    {
        CAMERA: gymnasium.spaces.Box(0, 255, (48, 48, 3), np.uint8),
        "state": gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32),
        PRIVILEGED_STATE: gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32),
    }
)
ACTIONS = gymnasium.spaces.Box(-1, 1, (2,), np.float32)


def make_model() -> TrainedModel:
    config = DreamerV3Config(
        size=Size(deter=64, hidden=16, classes=4, depth=2, units=16),
        observations=("pixels/*", "state"),
        targets=(PRIVILEGED_STATE,),
        horizon=20,
    )
    networks = DreamerNetworks(SPACE, ACTIONS, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in networks.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    networks.world_model.update_norms({PRIVILEGED_STATE: 3 + 2 * torch.randn(100, 4, generator=generator)})
    return TrainedModel(networks)


@pytest.fixture
def model() -> TrainedModel:
    """A model of its own, which a test may change."""
    return make_model()


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    generator = torch.Generator().manual_seed(2)
    lengths = torch.tensor([STEPS, STEPS - 5, 20, STEPS] * (EPISODES // 4))
    image = torch.randint(256, (EPISODES, STEPS, 48, 48, 3), dtype=torch.uint8, generator=generator)
    state, hidden = (torch.randn(EPISODES, STEPS, n, generator=generator) for n in (3, 4))
    reward = torch.randint(-1, 2, (EPISODES, STEPS), generator=generator).float()
    terminal = torch.zeros(EPISODES, STEPS, dtype=torch.bool)
    terminal[2::4, 19:] = True
    action = 2 * torch.rand(EPISODES, STEPS, 2, generator=generator) - 1
    return Episodes({CAMERA: image, "state": state, PRIVILEGED_STATE: hidden}, action, reward, terminal, lengths)


@pytest.fixture(scope="module")
def states(episodes: Episodes) -> States:
    return observe(make_model(), episodes)


@pytest.fixture(scope="module")
def ahead(episodes: Episodes, states: States) -> OpenLoop:
    """Dreams from many steps of the episodes, which no test changes."""
    return open_loop(make_model(), episodes, states)


@pytest.fixture
def few_dreams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dissecting, "MAX_STARTS", 64)
    monkeypatch.setattr(dissecting, "ABLATED", 32)


@pytest.fixture
def short_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dissecting.probes, "fit_mlp", functools.partial(dissecting.probes.fit_mlp, steps=50))


@pytest.mark.usefixtures("few_dreams", "short_fits")
def test_everything_is_a_finite_number(model: TrainedModel, episodes: Episodes) -> None:
    still = replace(episodes, obs=episodes.obs | {PRIVILEGED_STATE: episodes.obs[PRIVILEGED_STATE].clone()})
    still.obs[PRIVILEGED_STATE][..., 1] = 0.25
    before = torch.get_rng_state()
    found = dissect(model, {"policy": still}, positions={"box": slice(2, 4)}, entries={"speed, m/s": slice(0, 2)})
    assert found.numbers["probes"]["names"] == ["speed 1, m/s", "speed 2, m/s", "box x", "box y"]
    assert found.numbers["probes"]["positions"] == [2, 3]
    assert torch.equal(torch.get_rng_state(), before)
    text = json.dumps(found.numbers, allow_nan=False)
    assert found.numbers["probes"]["constant"] == [1]
    assert found.numbers["probes"]["policy"]["0"]["seen"]["linear"]["r2"][1] is None
    assert json.loads(text) == found.numbers
    assert found.numbers["probes"]["predicted"] is True
    assert found.numbers["notes"] == []
    assert found.linear.weights.shape == (64 + 32 * 4, 4)
    assert [strip.title.partition(" ")[0] for strip in found.strips] == ["best", "median", "worst"]
    assert all(strip.truth.shape == strip.model.shape == (len(strip.ahead), 48, 48, 3) for strip in found.strips)


def test_too_few_episodes_to_split(model: TrainedModel, episodes: Episodes) -> None:
    few = Episodes(
        {k: v[:3] for k, v in episodes.obs.items()},
        *(getattr(episodes, n)[:3] for n in ("action", "reward", "is_terminal", "lengths")),
    )
    with pytest.raises(AssertionError):
        dissect(model, {"policy": few})


@pytest.mark.slow
def test_the_same_episodes_give_the_same_numbers(model: TrainedModel, episodes: Episodes, states: States) -> None:
    one, other = (open_loop(model, episodes, states) for _ in range(2))
    assert torch.equal(one.errors[CAMERA], other.errors[CAMERA])
    assert torch.equal(states.features, observe(model, episodes).features)


def test_open_loop_errors_are_those_of_dreams_with_the_recorded_actions(
    model: TrainedModel, episodes: Episodes, states: States
) -> None:
    row, time = torch.tensor([1]), torch.tensor([7])
    found = dissecting._imagine(model, episodes, states, row, time, seed=5)
    dream = model.imagine(states[1][7], episodes.action[1, 7:30], seed=5)
    predicted, expected_reward = model.predict(dream), model.reward(dream).pred()
    for step in (1, 5, 20):
        truth = episodes.obs[CAMERA][1, 7 + step].float() / 255
        expected = (predicted[CAMERA][step - 1] - truth).square().mean().item()
        assert found.errors[CAMERA][0, step - 1].item() == pytest.approx(expected, rel=1e-4)
        idle = (episodes.obs[CAMERA][1, 7].float() / 255 - truth).square().mean().item()
        assert found.still[CAMERA][0, step - 1].item() == pytest.approx(idle, rel=1e-4)
        reward = expected_reward[step - 1] - episodes.reward[1, 7 + step]
        assert found.reward[0, step - 1].item() == pytest.approx(abs(reward.item()), rel=1e-4)
    norm = model.world.norms[0](episodes.obs[PRIVILEGED_STATE][1, 12])
    error = (predicted[PRIVILEGED_STATE][4] - norm.sign() * norm.abs().log1p()).square().mean().item()
    assert found.errors[PRIVILEGED_STATE][0, 4].item() == pytest.approx(error, rel=1e-4)
    torch.testing.assert_close(found.states[15].features[0], dream.features[14])
    # The episode has 35 observations: 27 steps from the eighth on.
    assert found.valid[0].tolist() == [True] * 27 + [False] * 23


def test_means_by_steps_ahead(model: TrainedModel, episodes: Episodes, states: States, ahead: OpenLoop) -> None:
    assert int(ahead.times.min()) == 4
    assert len(set(zip(ahead.rows.tolist(), ahead.times.tolist(), strict=True))) == 256
    assert bool((ahead.times < episodes.lengths[ahead.rows] - 1).all())
    found = summarize_open_loop(model, episodes, states, ahead)
    assert found["count"] == [int((ahead.times + step < episodes.lengths[ahead.rows]).sum()) for step in found["steps"]]
    assert min(found["count"]) >= 8
    assert int(ahead.valid.sum(0)[found["steps"][-1]]) < 8
    chosen = ahead.errors["state"][ahead.valid[:, 14], 14]
    assert found["state"]["mse@15"] == pytest.approx(chosen.mean().item(), rel=1e-4)
    assert found[CAMERA]["psnr@15"] == pytest.approx(-10 * math.log10(found[CAMERA]["mse@15"]))
    assert "psnr@15" not in found["state"]
    predicted = model.predict(states)["state"] - model.decoder_target("state", episodes.obs["state"])
    assert found["state"]["reconstruction_mse"] == pytest.approx(
        predicted[episodes.valid].square().mean().item(), rel=1e-4
    )


@pytest.mark.parametrize(
    ("idle", "breaks"), [([9, 9, 9, 9], None), ([9, 1, 1, 1], 2), ([1, 9, 9, 1], 4), ([1, 1, 1, 1], 1)]
)
def test_where_a_dream_breaks(
    model: TrainedModel, episodes: Episodes, states: States, ahead: OpenLoop, idle: list[float], breaks: int | None
) -> None:
    still = torch.full_like(ahead.still["state"], 9.0)
    still[:, : len(idle)] = torch.tensor(idle, dtype=torch.float32)
    still[:, len(idle) :] = idle[-1]
    errors = torch.full_like(still, 3.0)
    ahead = replace(ahead, errors=ahead.errors | {"state": errors}, still=ahead.still | {"state": still})
    assert summarize_open_loop(model, episodes, states, ahead)["state"].get("breaks_at") == breaks


def test_rewards_by_their_sign(model: TrainedModel, episodes: Episodes, states: States) -> None:
    found = dissecting.reward_prediction(model, episodes, states)
    loss = model.reward(states).loss(episodes.reward)
    for name, sign in (("negative", -1), ("zero", 0), ("positive", 1)):
        chosen = (episodes.reward == sign) & episodes.valid
        assert found["count"][name] == int(chosen.sum())
        assert found["log_likelihood_by_sign"][name] == pytest.approx(-loss[chosen].mean().item(), rel=1e-4)
    assert found["log_likelihood"] == pytest.approx(-loss[episodes.valid].mean().item(), rel=1e-4)


def test_a_head_that_knows_how_episodes_go_on_reaches_the_best(
    model: TrainedModel, episodes: Episodes, states: States
) -> None:
    last = model.world.cont.net[1]
    with torch.no_grad():
        last.weight.zero_()
        last.bias.fill_(math.log(19))  # the probability 1 - 1/20
    endless = replace(episodes, is_terminal=torch.zeros_like(episodes.is_terminal))
    found = dissecting.continue_prediction(model, endless, states)
    assert found["log_likelihood"] == pytest.approx(found["best"], rel=1e-4)
    assert found["best"] == pytest.approx(0.95 * math.log(0.95) + 0.05 * math.log(0.05), rel=1e-4)
    assert found["calibration"]["error"] < 1e-4
    found = dissecting.continue_prediction(model, episodes, states)
    assert found["count"] == {"goes_on": int(episodes.valid.sum()) - 3, "ends": 3}
    assert found["by_end"]["ends"] == pytest.approx(math.log(0.05), rel=1e-4)
    assert found["log_likelihood"] < found["best"]


def test_calibration() -> None:
    expected = torch.rand(4000, generator=torch.Generator().manual_seed(0))
    happened = torch.bernoulli(expected, generator=torch.Generator().manual_seed(1))
    found = calibration(expected, happened)
    assert found["error"] < 0.04
    assert found["count"] == [400] * 10
    assert calibration(expected, expected + 0.25)["error"] == pytest.approx(0.25, abs=1e-5)
    found = calibration(torch.tensor([0.0, 0.2, 0.2, 1.0]), torch.tensor([0.0, 1.0, 0.0, 1.0]), edges=(0.1, 0.5))
    assert (found["count"], found["happened"]) == ([1, 2, 1], [0.0, 0.5, 1.0])
    assert calibration(torch.zeros(7), torch.ones(7))["count"] == [7]


def test_groups_that_say_nothing(model: TrainedModel, episodes: Episodes) -> None:
    """Group 3 always has one class; group 5 changes by chance, as the prior expects."""
    for net in (model.rssm.prior_net[-1], model.rssm.posterior_net[-1]):
        with torch.no_grad():
            for group in (3, 5):
                net.weight[4 * group : 4 * group + 4] = 0
            net.bias[12:16] = torch.tensor([0.0, 30, 0, 0])
            net.bias[20:24] = 0
    states = observe(model, episodes)
    # The likeliest of equal classes is always the first: what is constant is the distribution.
    found = dissecting.groups(model, episodes, states)
    assert found["dead"] == [3, 5]
    assert found["top_class_share"][3] == 1
    assert found["kl"][3] == pytest.approx(0, abs=1e-6)
    assert 3 in found["constant"]
    assert 3 in found["unsurprising"]
    kl = model.kl(states, per_group=True)[:, 1:][episodes.valid[:, 1:]].mean(0)
    np.testing.assert_allclose(found["kl"], kl, rtol=1e-4, atol=1e-6)


def test_surprise_leaves_the_first_step_out(model: TrainedModel, episodes: Episodes, states: States) -> None:
    found, kl = dissecting.surprise(model, episodes, states), model.kl(states)
    assert found["first_step"] == pytest.approx(kl[:, 0].mean().item(), rel=1e-4)
    assert found["mean"] == pytest.approx(kl[:, 1:][episodes.valid[:, 1:]].mean().item(), rel=1e-4)
    assert found["over_time"][19] == pytest.approx(kl[:, 19].mean().item(), rel=1e-4)
    assert found["over_time"][20] == pytest.approx(kl[episodes.lengths > 20, 20].mean().item(), rel=1e-4)


@pytest.mark.usefixtures("short_fits")
def test_probes_read_what_the_latents_hold_and_where(model: TrainedModel, episodes: Episodes, states: States) -> None:
    features = states.features
    hidden = torch.randn(EPISODES, STEPS, 4)
    hidden[..., 0] = features @ torch.randn(features.shape[-1], generator=torch.Generator().manual_seed(3))
    hidden[..., 1] = states.stoch[..., 7, 2]
    hidden[..., 2] = 0.5
    episodes = replace(episodes, obs=episodes.obs | {PRIVILEGED_STATE: hidden})
    played, all_states = {"policy": episodes}, {"policy": states}
    ahead = {"policy": open_loop(model, episodes, states)}
    linear, found = dissecting.probe(model, played, all_states, ahead, seed=0)
    seen = found["policy"]["0"]["seen"]
    scores = seen["linear"]["r2"]
    assert scores[0] > 0.99
    assert scores[1] > 0.95
    assert scores[2] is None
    assert scores[3] < 0.05
    assert seen["linear"]["r2_median"] == sorted([scores[0], scores[1], scores[3]])[1], "of those that vary"
    assert seen["linear"]["rmse"][2] == pytest.approx(0, abs=1e-4)
    # Imagined states are not those that were seen, and are read with the same probe.
    _, held_out = split(EPISODES)
    one = ahead["policy"]
    chosen = torch.isin(one.rows, held_out) & one.valid[:, 4]
    rows, times = one.rows[chosen], one.times[chosen] + 5
    truth = hidden[rows, times, 0]
    for name, same in (("imagined", one.states[5][chosen]), ("seen", states[rows, times])):
        pair = found["policy"]["5"][name]
        assert pair["rows"] == int(chosen.sum())
        error = (linear.predict(same.features)[:, 0] - truth).square().mean()
        assert pair["linear"]["r2"][0] == pytest.approx(1 - (error / truth.var(correction=0)).item(), rel=1e-3)
        assert pair["linear"]["rmse"][0] == pytest.approx(error.sqrt().item(), rel=1e-3)
    assert found["policy"]["5"]["seen"]["linear"]["r2"][0] > 0.99 > found["policy"]["5"]["imagined"]["linear"]["r2"][0]
    alone = dissecting.probe_groups(model, played, all_states, seed=0)
    assert alone["7"][1] > 0.99
    assert max(alone[str(group)][1] for group in range(32) if group != 7) < 0.5
    assert alone["stoch"][1] > 0.95


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_likelihood_of_an_observation_is_that_of_the_training_loss(
    model: TrainedModel, episodes: Episodes, states: States, scale: float
) -> None:
    config = model.networks.config
    model.networks.config = config.replace(loss_scales=config.loss_scales.replace(reconstruction=scale))
    some = states.map(lambda x: x[:2, :6])
    obs = {key: value[:2, :6] for key, value in episodes.obs.items()}
    flat = {key: value.flatten(0, 1) for key, value in obs.items()}
    losses = model.world.decoder.losses(model.world.decoder(some.reshape(-1).latent), flat)
    dimensions = 48 * 48 * 3 + 3
    loss = scale * (losses[CAMERA] + losses["state"]).detach()
    expected = -loss - 0.5 * math.log(math.pi / scale) * dimensions
    torch.testing.assert_close(log_likelihood(model, some, obs).flatten(), expected, rtol=1e-5, atol=1e-2)
    density = torch.distributions.Normal(torch.zeros(()), math.sqrt(1 / (2 * scale))).log_prob(torch.tensor(0.3))
    assert density.item() == pytest.approx(-scale * 0.3**2 - 0.5 * math.log(math.pi / scale), rel=1e-5)


def test_what_is_not_learnt_has_no_likelihood(model: TrainedModel, episodes: Episodes, states: States) -> None:
    config = model.networks.config
    model.networks.config = config.replace(loss_scales=config.loss_scales.replace(reconstruction=0.0))
    assert dissecting.likelihood.bounds(model, episodes, states) == {"dimensions": 48 * 48 * 3 + 3}
    assert dissecting.notes(model, {"policy": episodes})[0].startswith("No likelihood")


def test_weights_of_samples_are_below_the_likelihood_by_the_kl(
    model: TrainedModel, episodes: Episodes, states: States
) -> None:
    """On average over what the posterior says: exact for any model, and wrong for any other sign."""
    state, samples = states[0, 7], 4000
    many = state.map(lambda x: x.expand(samples, *x.shape))
    torch.manual_seed(0)
    many = States(many.latent._replace(stoch=model.rssm.distribution(many.logits).sample()), many.logits)
    obs = {key: episodes.obs[key][0, 7].expand(samples, *episodes.obs[key].shape[2:]) for key in model.observations}
    beyond = (log_weights(model, many, obs) - log_likelihood(model, many, obs)).double()
    kl, error = model.kl(state).item(), beyond.std().item() / math.sqrt(samples)
    assert kl > 20 * error
    assert beyond.mean().item() == pytest.approx(-kl, abs=4 * error)


def test_padding_behind_a_short_episode_changes_nothing(
    model: TrainedModel, episodes: Episodes, states: States
) -> None:
    image = episodes.obs[CAMERA].clone()
    image[2, 20:] = 255 - image[2, 20:]
    other = observe(model, replace(episodes, obs=episodes.obs | {CAMERA: image}))
    assert torch.equal(other.features[episodes.valid], states.features[episodes.valid])


@pytest.mark.usefixtures("few_dreams")
def test_one_short_episode_shortens_no_context(model: TrainedModel, episodes: Episodes) -> None:
    lengths = episodes.lengths.clone()
    lengths[3] = 3
    short = replace(episodes, lengths=lengths)
    states = observe(model, short)
    ahead = open_loop(model, short, states)
    assert int(ahead.times.min()) == 4
    assert 3 not in ahead.rows
    assert summarize_open_loop(model, short, states, ahead)["context"] == 5
    assert "11 episodes (number" in film_strips(model, short, states)[0].title
    (note,) = dissecting.notes(model, {"policy": short})
    assert all(part in note for part in ("(policy)", "5 steps", "left out: 1."))
    short = replace(episodes, lengths=lengths.clamp_max(4))
    ahead = open_loop(model, short, states)
    assert (int(ahead.times.min()), int(ahead.times.max())) == (2, 2)
    assert summarize_open_loop(model, short, states, ahead)["context"] == 3
    (no_context,) = dissecting.notes(model, {"policy": short})
    assert all(part in no_context for part in ("(policy)", "5 steps", " 3 "))


def test_a_film_strip_shows_the_dream_that_its_title_judges(
    model: TrainedModel, episodes: Episodes, states: States
) -> None:
    rows = torch.arange(EPISODES)
    whole = dissecting._imagine(model, episodes, states, rows, torch.full_like(rows, 4), seed=3)
    for strip in film_strips(model, episodes, states, seed=3):
        row = int(strip.title.partition("number ")[2].partition(")")[0])
        shown = ((strip.model.float() - strip.truth.float()) / 255).square().flatten(1).mean(1)
        expected = whole.errors[CAMERA][row, torch.tensor(strip.ahead) - 1]
        torch.testing.assert_close(shown, expected, rtol=2e-3, atol=0)
        mean = whole.errors[CAMERA][row, whole.valid[row]].mean().item()
        assert f"error {mean:.2g} over {int(whole.valid[row].sum())} steps" in strip.title


def test_no_probes_and_why(model: TrainedModel, episodes: Episodes, states: States) -> None:
    unknown = replace(episodes, obs={key: value for key, value in episodes.obs.items() if key != PRIVILEGED_STATE})
    assert dissecting.notes(model, {"policy": unknown}) == [f"No probes: the environment has no {PRIVILEGED_STATE}."]


def test_batches_are_bounded_and_change_nothing(
    model: TrainedModel, episodes: Episodes, states: States, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = dissecting.surprise(model, episodes, states), dissecting.groups(model, episodes, states)
    sizes = []
    kl = model.kl
    monkeypatch.setattr(model, "kl", lambda some, **how: sizes.append(len(some)) or kl(some, **how))
    monkeypatch.setattr(model, "batch_size", 10)
    again = dissecting.surprise(model, episodes, states), dissecting.groups(model, episodes, states)
    assert max(sizes) == 10
    assert again[0]["mean"] == pytest.approx(whole[0]["mean"], rel=1e-5)
    np.testing.assert_allclose(again[1]["kl"], whole[1]["kl"], rtol=1e-4)
