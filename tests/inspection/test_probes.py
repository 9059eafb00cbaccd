"""Probes: they find what is there, and nothing where nothing is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sheeplike
from sheeplike import envs
from sheeplike.inspection.episodes import play
from sheeplike.inspection.probes import LinearProbe, directions, fit_linear, fit_mlp, r_squared, rmse, split


def latents(episodes: int = 12, steps: int = 60, width: int = 40) -> tuple[Tensor, Tensor]:
    """Features that drift within an episode, as latents do, and the episode of each row."""
    generator = torch.Generator().manual_seed(0)
    level = torch.randn(episodes, 1, width, generator=generator)
    features = level + torch.randn(episodes, steps, width, generator=generator)
    return features.flatten(0, 1), torch.arange(episodes).repeat_interleave(steps)


def halves(episode: Tensor) -> tuple[Tensor, Tensor]:
    fit, test = split(int(episode.max()) + 1)
    return torch.isin(episode, fit), torch.isin(episode, test)


def test_a_linear_target_is_found_and_the_weights_are_its_direction() -> None:
    features, episode = latents()
    direction = torch.randn(40, 3)
    target = 7 + features @ direction + 0.01 * torch.randn(len(features), 3)
    fit, test = halves(episode)
    probe = fit_linear(features[fit], target[fit], episode[fit])
    scores = r_squared(probe.predict(features[test]), target[test])
    assert min(scores) > 0.99
    assert (probe.weights.shape, probe.bias.shape) == ((40, 3), (3,))
    torch.testing.assert_close(probe.weights, direction, atol=0.02, rtol=0)
    # What traverse() does: along a direction the reading changes by what the direction says.
    step = 0.5 * probe.weights[:, 0]
    moved = probe.predict(features[:5] + step) - probe.predict(features[:5])
    torch.testing.assert_close(moved, (step @ probe.weights).expand(5, 3), atol=1e-4, rtol=0)


@pytest.mark.parametrize("make", [fit_linear, fit_mlp])
def test_nothing_is_found_in_noise_on_other_episodes(make) -> None:
    """Noise of each episode's own, which a split by steps would find by heart, and of each step's."""
    features, episode = latents()
    target = torch.randn(int(episode.max()) + 1, 2)[episode] + 0.1 * torch.randn(len(episode), 2)
    fit, test = halves(episode)
    target = torch.cat([target, torch.randn(len(features), 2)], 1)
    probe = make(features[fit], target[fit], episode[fit])
    assert max(r_squared(probe.predict(features[test]), target[test])) < 0.05


def test_an_mlp_reads_what_no_line_tells() -> None:
    features, episode = latents(episodes=30, width=4)
    target = (features[:, :1] * features[:, 1:2]).tanh()
    fit, test = halves(episode)
    scores = [
        r_squared(make(features[fit], target[fit], episode[fit]).predict(features[test]), target[test])[0]
        for make in (fit_linear, fit_mlp)
    ]
    assert scores[0] < 0.1
    assert scores[1] > 0.7


def test_constant_entries_are_told_as_such() -> None:
    features, episode = latents()
    target = torch.stack([features[:, 0], torch.full((len(features),), 0.3), torch.zeros(len(features))], 1)
    fit, test = halves(episode)
    for make in (fit_linear, fit_mlp):
        probe = make(features[fit], target[fit], episode[fit])
        read = probe.predict(features[test])
        assert bool(read.isfinite().all())
        scores = r_squared(read, target[test])
        assert scores[0] > 0.8
        assert scores[1:] == [None, None]
        torch.testing.assert_close(read[:, 1:], target[test][:, 1:], atol=1e-4, rtol=0)
    # An entry that changed where the probe was fitted, and hardly moves here.
    assert r_squared(torch.zeros(50, 1), 1e-3 * torch.randn(50, 1), torch.ones(1)) == [None]
    assert r_squared(torch.zeros(50, 1), 1e-3 * torch.randn(50, 1), None)[0] is not None


def test_features_that_never_change_have_no_weight() -> None:
    features, episode = latents()
    features[:, 3] = 2.0
    probe = fit_linear(features, features[:, :1], episode)
    assert probe.weights[3].item() == 0
    assert bool(probe.weights.isfinite().all())


def test_a_class_that_hardly_ever_occurs_pulls_no_reading_far_away() -> None:
    """One-hot, and in 1 of 2,000 rows: whitened it would be at 45 deviations."""
    features, episode = latents(episodes=40, steps=50)
    features[:, 3] = 0
    features[17, 3] = 1
    probe = fit_mlp(features, features[:, :1], episode, steps=200)
    rare = features[:5].clone()
    rare[:, 3] = 1
    clipped = rare.clone()
    clipped[:, 3] = probe.centre[3] + 10 / probe.scale[3]
    torch.testing.assert_close(probe.predict(rare), probe.predict(clipped))


def test_errors_are_in_the_units_of_the_entry() -> None:
    target = torch.tensor([[1.0, 100.0], [3.0, 300.0]])
    assert rmse(target + torch.tensor([0.5, 30.0]), target) == pytest.approx([0.5, 30.0])


def test_more_features_than_rows() -> None:
    """Solved in the dual; the same weights as by the normal equations."""
    features, episode = torch.randn(30, 50, dtype=torch.float32), torch.arange(6).repeat_interleave(5)
    target = features[:, :2]
    wide = fit_linear(features, target, episode)
    x = features - features.mean(0)
    x = (x / x.std(0, correction=0)).double()
    y = ((target - target.mean(0)) / 1).double()
    for n in range(2):
        ridge = x.T @ x + wide.alpha[n].double() * len(x) * torch.eye(50, dtype=torch.float64)
        expected = torch.linalg.solve(ridge, x.T @ y[:, n]) / features.std(0, correction=0).double()
        torch.testing.assert_close(wide.weights[:, n].double(), expected, atol=1e-4, rtol=1e-3)


def test_the_same_rows_give_the_same_probes_and_no_stream_is_moved() -> None:
    features, episode = latents()
    before = torch.get_rng_state()
    first, second = (fit_mlp(features, features[:, :2], episode, steps=60) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.predict(features), second.predict(features))
    assert isinstance(fit_linear(features, features[:, :2], episode), LinearProbe)


def test_episodes_are_split_and_not_steps() -> None:
    fit, test = split(10)
    assert sorted([*fit.tolist(), *test.tolist()]) == list(range(10))
    assert len(test) == 3
    assert [len(part) for part in split(2)] == [1, 1]
    with pytest.raises(AssertionError):
        split(1)


def test_directions_are_those_in_which_the_features_go_whatever_else_a_probe_reads() -> None:
    """Two causes that move together, each with a direction of its own; noise that a probe would subtract."""
    generator = torch.Generator().manual_seed(0)
    cause = torch.randn(4000, 2, generator=generator) @ torch.tensor([[1.0, 0.8], [0.0, 0.6]])
    cause = torch.cat([cause, torch.ones(4000, 1)], 1)  # and one that never changes
    way = torch.randn(3, 20, generator=generator)
    noise = torch.randn(4000, 1, generator=generator)
    features = cause @ way + noise * way[:1].roll(1)
    found = directions(features, cause)
    torch.testing.assert_close(found[:2], way[:2], atol=0.1, rtol=0)
    assert not found[2].any()
    probe = fit_linear(features, cause, torch.arange(4000) % 8)
    least = probe.least_changes
    torch.testing.assert_close((least @ probe.weights)[:2].diag(), torch.ones(2), atol=1e-4, rtol=0)
    assert not least[2].any()
    assert (least[:2].norm(dim=1) < found[:2].norm(dim=1)).all(), "the least change that is read as one unit"


def test_the_demos_decoder_follows_the_regression_and_hardly_the_probe() -> None:
    worlds = envs.make("franka_pick", num_envs=12, image_size=48, cameras=["front"])
    model, keys = sheeplike.load("demo:franka_pick"), ["pixels/front", "privileged_state"]
    played = play(model.networks, worlds, episodes=12, keys=keys, act="policy")
    worlds.close()
    states = model.observe(played.obs["pixels/front"], played.action, seed=0)
    features, truth = states.features[played.valid], played.obs["privileged_state"][played.valid]
    box, with_tip = truth[:, 7:10], truth[:, [7, 8, 9, 0, 1, 2]]
    probe = fit_linear(features, box, played.valid.nonzero()[:, 0])
    ways = {"regression": directions(features, box)[1], "hand held": directions(features, with_tip)[1]}
    asked, box_moves, hand_moves = torch.tensor([-0.05, -0.02, 0.0, 0.02, 0.05]), {}, {}
    pixels = 106 * asked[[0, 1, 3, 4]]  # one metre along y in this camera, as the simulator draws it
    for name, way in (ways | {"probe": probe.least_changes[1]}).items():
        shown = [model.decode(model.traverse(one, way, amounts=asked)).frames["pixels/front"] for one in states[:, 6]]
        for moves, shift in ((box_moves, red), (hand_moves, white)):
            found = torch.stack([shift(frames) - shift(frames[2:3]) for frames in shown]).nanmedian(0).values
            moves[name] = found[[0, 1, 3, 4]] / pixels
    assert box_moves["regression"].min() > 0.5
    assert box_moves["probe"].max() < 0.5
    # The hand goes along, as it does in the episodes, unless its place is among those that are regressed on.
    assert hand_moves["regression"].min() > 0.5
    assert hand_moves["hand held"].abs().max() < 0.2
    assert box_moves["hand held"].min() > box_moves["probe"].max()


def red(frames: Tensor) -> Tensor:
    """Return the column ``(M,)`` of the red pixels' centre in frames ``(M, H, W, 3)``; NaN where none is red."""
    first, green, blue = frames.float().unbind(-1)
    return centre(first - torch.maximum(green, blue) - 20)


def white(frames: Tensor) -> Tensor:
    return centre(frames[:, :30].float().amin(-1) - 180)


def centre(weight: Tensor) -> Tensor:
    columns = weight.clamp(min=0).sum(-2)
    return (columns * torch.arange(columns.shape[-1])).sum(-1) / columns.sum(-1)
