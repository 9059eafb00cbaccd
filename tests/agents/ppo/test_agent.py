"""The agent's bookkeeping: what acting saw is what learning sees, step by step, and when learning happens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.ppo import PPO

KINDS = {
    "vector": {},
    "camera": {"cameras": ("front",), "vectors": {}},
    "stacked cameras and vector": {"cameras": ("front", "wrist"), "frame_stack": 3},
    "stacked camera, discrete": {
        "cameras": ("front",),
        "vectors": {},
        "actions": spaces.Discrete(3),
        "frame_stack": 2,
    },
    "several discrete": {"actions": spaces.MultiDiscrete([2, 3], start=[0, -1])},
    "two vectors, clipped": {"vectors": {"state": 5, "privileged_state": 9}, "distribution": "clipped_normal"},
}
# Shifts of frames concern those alone that see some.
SHIFTED = [(kind, False) for kind in KINDS] + [(kind, True) for kind, options in KINDS.items() if "cameras" in options]
# (step, world) in a rollout of 8: at the first, an inner, the last and the bootstrapping step, and twice in one world.
LAST, TERMINAL = {(0, 0), (3, 1), (7, 2)}, {(4, 0), (8, 1)}


class Diary:
    """Several rollouts of one agent, as an explicit list of steps."""

    def __init__(self, agent: PPO, fill: Callable[..., list[Step]]) -> None:
        self.agent, self.fill = agent, fill
        self.player = agent.player(agent.num_envs)
        self.steps: list[Step] = []

    def complete(self, seed: int = 0) -> int:
        """Fill the rollout; the time of its first step."""
        # After the first rollout, its last step is step 0 already.
        offset = 0 if not self.steps else 1
        moved = [{(t - offset, n) for t, n in ends if t >= offset} for ends in (LAST, TERMINAL)]
        self.steps += self.fill(
            self.agent, last=moved[0], terminal=moved[1], seed=seed, player=self.player, after=self.steps
        )
        return len(self.steps) - 1 - self.agent.config.rollout_length

    def image(self, key: str, time: int, world: int, shift: tuple[int, int] = (0, 0)) -> Tensor:
        """The stack of frames that is seen at a step: of this episode only, its first one repeated, edges repeated."""
        frames = []
        for _ in range(self.agent.config.frame_stack):
            frames.insert(0, self.steps[time].obs[key][world])
            time -= not bool(self.steps[time].is_first[world])
        image = torch.cat(frames, -1)
        padded = F.pad(image.permute(2, 0, 1).float().unsqueeze(0), (4, 4, 4, 4), mode="replicate")[0]
        rows, columns = (slice(4 + move, 4 + move + side) for move, side in zip(shift, image.shape[:2], strict=True))
        return padded[:, rows, columns].permute(1, 2, 0).to(torch.uint8)

    def observations(self, time: int, shift: Tensor | None = None) -> dict[str, Tensor]:
        obs = {key: self.steps[time].obs[key] for key in self.agent.keys.vectors}
        for camera, key in enumerate(self.agent.keys.images):
            rows = []
            for n in range(self.agent.num_envs):
                rows.append(self.image(key, time, n, (0, 0) if shift is None else tuple(shift[n, camera].tolist())))
            obs[key] = torch.stack(rows)
        return obs


def learn(agent: PPO) -> list[dict[str, Tensor]]:
    return [agent.update() for _ in range(agent.updates_due(0))]


def spy_on(agent: PPO, method: str) -> list[tuple[Any, ...]]:
    """The arguments of every call of an agent's method from now on."""
    calls: list[tuple[Any, ...]] = []
    original = getattr(agent, method)

    def spied(*args: Any) -> Any:
        calls.append(tuple(deepcopy(a) if isinstance(a, dict) else a.clone() for a in args))
        return original(*args)

    setattr(agent, method, spied)
    return calls


# --- what acting saw is what learning sees ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stacked cameras and vector", "stacked camera, discrete"])
def test_players_stacks_are_the_rollouts(
    kind: str, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Over several rollouts, with endings everywhere."""
    agent = make_ppo(**KINDS[kind], rollout_length=8)
    diary = Diary(agent, fill)
    seen: list[dict[str, Tensor]] = []
    act = diary.player.act

    def watched(*args: Any) -> Tensor:
        handle = agent.networks.register_forward_pre_hook(lambda module, inputs: seen.append(dict(inputs[0])))
        try:
            return act(*args)
        finally:
            handle.remove()

    diary.player.act = watched
    for round_ in range(3):
        start = diary.complete(round_)
        for t in range(start, start + 9):
            slot = torch.full((3,), agent.rollout.history + t - start)
            for key in agent.keys.images:
                expected = torch.stack([diary.image(key, t, n) for n in range(3)])
                assert torch.equal(seen[t][key], expected), (t, key)
                assert torch.equal(agent.rollout.stack(key, slot, torch.arange(3)), expected)
        agent.rollout.restart()
    assert len(seen) == 25


@pytest.mark.parametrize(("kind", "augment"), SHIFTED)
def test_stored_log_probability_and_value_are_those_of_what_learning_will_see(
    kind: str, augment: bool, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Recomputed by the networks as they are before the updates, on frames put together by hand."""
    agent = make_ppo(**KINDS[kind], augment=augment)
    diary = Diary(agent, fill)
    for round_ in range(3):
        start = diary.complete(round_)
        for t in range(9):  # the step that two rollouts share included, which keeps its shift
            shift = agent.rollout.trajectory("shift")[t] if agent.augment else None
            with torch.no_grad():
                policy, value = agent.networks(diary.observations(start + t, shift))
            drawn = diary.steps[start + t].extras["raw_action"]
            assert torch.equal(agent.rollout.trajectory("raw_action")[t], drawn)
            torch.testing.assert_close(agent.rollout.trajectory("value")[t], value, atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(
                agent.rollout.trajectory("log_prob")[t], policy.log_prob(drawn), atol=1e-5, rtol=1e-5
            )
        learn(agent)


@pytest.mark.parametrize(("kind", "augment"), SHIFTED)
def test_every_rollout_begins_with_the_policy_that_acted(
    kind: str, augment: bool, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Policy and normalisation have moved, and its first update, on all of its steps, finds no divergence yet."""
    agent = make_ppo(
        **KINDS[kind], augment=augment, minibatches=1, epochs=4, learning_rate=1e-2, kl_control="adaptive_lr"
    )
    diary = Diary(agent, fill)
    for round_ in range(3):
        diary.complete(round_)
        rate = agent.optimizer.learning_rate()
        first, *_, last = learn(agent)
        assert first["ppo/approx_kl"].item() == pytest.approx(0, abs=1e-6), f"rollout {round_}"
        assert torch.equal(first["opt/learning_rate"], rate)
        assert last["ppo/approx_kl"] > 1e-4


@pytest.mark.parametrize("augment", [False, True])
@pytest.mark.parametrize("kind", ["camera", "stacked camera, discrete"])
def test_ratios_start_at_one(
    kind: str, augment: bool, make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Ratios of a learning rate of zero stay there, in every minibatch, the shared step of later rollouts included."""
    agent = make_ppo(**KINDS[kind], augment=augment)
    agent.optimizer.param_groups[0]["lr"].zero_()
    diary = Diary(agent, fill)
    calls = spy_on(agent, "losses")
    for round_ in range(3):
        diary.complete(round_)
        for metrics in learn(agent):
            assert metrics["ppo/approx_kl"].item() == pytest.approx(0, abs=1e-9)
            assert metrics["ppo/clip_fraction"] == 0
    for (data,) in calls:
        with torch.no_grad():
            ratio = (agent.networks(data)[0].log_prob(data["raw_action"]) - data["log_prob"]).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)
    assert len(calls) == 3 * 8


def test_actions_are_what_was_drawn_as_the_environment_takes_it(
    make_ppo: Callable[..., PPO], play: Callable[..., list[Step]]
) -> None:
    for options in ({}, {"distribution": "clipped_normal"}, {"actions": spaces.Discrete(3)}):
        agent = make_ppo(**options)
        for step in play(agent, 8):
            drawn = step.extras["raw_action"]
            if agent.codec.discrete:
                assert step.action.dtype == torch.int64
                assert torch.equal(F.one_hot(step.action, 3).float(), drawn)
            else:
                squash = torch.tanh if not options else lambda x: x.clamp(-1, 1)
                assert torch.equal(step.action, squash(drawn))
                assert step.action.abs().max() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_mode_is_taken_without_chance_and_sampling_varies(
    kind: str, make_ppo: Callable[..., PPO], play: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(**KINDS[kind], num_envs=4, rollout_length=4)
    step = play(agent, 1)[0]
    obs, first = step.obs, torch.ones(4, dtype=torch.bool)

    def act(sample: bool) -> Tensor:
        return agent.player(4).act(obs, first, sample=sample).float()

    assert torch.equal(act(False), act(False))
    assert any(not torch.equal(act(True), act(False)) for _ in range(20))


def test_players_share_parameters_and_nothing_else(make_ppo: Callable[..., PPO]) -> None:
    agent = make_ppo(cameras=("front",), vectors={}, frame_stack=2)
    training, evaluation = agent.player(3), agent.player(5)
    first = torch.ones(3, dtype=torch.bool)
    frames = torch.randint(0, 256, (3, 48, 48, 3), dtype=torch.uint8)
    training.act({"pixels/front": frames}, first)
    kept = {key: value.clone() for key, value in training.state.items()}
    evaluation.act({"pixels/front": torch.zeros(5, 48, 48, 3, dtype=torch.uint8)}, torch.ones(5, dtype=torch.bool))
    assert all(torch.equal(kept[key], value) for key, value in training.state.items())
    restored = agent.player(3)
    restored.load_state_dict(training.state_dict())
    obs, later = {"pixels/front": 255 - frames}, torch.zeros(3, dtype=torch.bool)
    assert torch.equal(training.act(obs, later, sample=False), restored.act(obs, later, sample=False))
    assert not agent.rollout.steps


# --- augmentation -----------------------------------------------------------------------------------------------------


def test_one_shift_per_world_camera_and_trajectory_within_four_pixels(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(cameras=("front", "wrist"), vectors={}, augment=True, num_envs=16, rollout_length=2)
    diary = Diary(agent, fill)
    drawn = []
    for round_ in range(12):
        diary.complete(round_)
        shift = agent.rollout.trajectory("shift")
        assert shift.shape == (3, 16, 2, 2)
        # The shared first step belongs to the trajectory before.
        assert torch.equal(shift[0], shift[1] if not drawn else drawn[-1])
        assert torch.equal(shift[1], shift[2])
        drawn.append(shift[2].clone())
        learn(agent)
    values = torch.stack(drawn).flatten().tolist()
    assert set(values) == set(range(-4, 5))
    for axes in ((0,), (1,), (2,), (3,)):  # trajectories, worlds, cameras, rows and columns differ from each other
        spread = torch.stack(drawn).float().std(axes)
        assert spread.mean() > 1.0
    counts = np.bincount(np.array(values) + 4, minlength=9)
    # 99.99 % quantile of chi-square with 8 degrees of freedom
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 31.8


# --- when learning happens --------------------------------------------------------------------------------------------


def test_updates_are_due_when_every_world_has_taken_its_steps_and_seen_where_they_led(
    make_ppo: Callable[..., PPO], play: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(rollout_length=4, minibatches=3, epochs=5)
    player = agent.player(3)
    policy_steps = 0
    for round_ in range(3):
        for _ in range(5 if round_ == 0 else 4):
            assert agent.updates_due(policy_steps) == 0
            play(agent, 1, player=player)
            policy_steps += 3
        assert agent.updates_due(policy_steps) == 15
        for done in range(15):
            assert agent.rollout.full, f"after {done} updates"
            agent.update()
    assert agent.updates_due(policy_steps) == 0


def test_every_step_is_used_once_per_epoch_with_everything_that_belongs_to_it(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    """Minibatches come in an order drawn anew for each epoch; the step that bootstraps is not used."""
    agent = make_ppo(cameras=("front", "wrist"), frame_stack=2, augment=True, minibatches=3, epochs=4)
    diary = Diary(agent, fill)
    orders = []
    for round_ in range(2):
        start = diary.complete(round_)
        rollout = {key: agent.rollout.trajectory(key).clone() for key in agent.rollout.storage}
        calls = spy_on(agent, "losses")
        learn(agent)
        del agent.losses  # the spy
        assert len(calls) == 12
        expected_mask = ~rollout["is_last"][:-1]
        for epoch in range(4):
            batches = [data for (data,) in calls[3 * epoch : 3 * epoch + 3]]
            raw_action = torch.cat([data["raw_action"] for data in batches])
            assert raw_action.shape == (24, 2)
            # Which step each row is, by what was drawn there: a real number that no other step has.
            index = (raw_action[:, None] == rollout["raw_action"][:-1].flatten(0, 1)).all(-1).nonzero()[:, 1]
            assert sorted(index.tolist()) == list(range(24))
            orders.append(index.tolist())
            for key in ("log_prob", "value"):
                assert torch.equal(torch.cat([data[key] for data in batches]), rollout[key][:-1].flatten()[index])
            mask = torch.cat([data["mask"] for data in batches])
            assert torch.equal(mask.bool(), expected_mask.flatten()[index])
            seen = {key: torch.cat([data[key] for data in batches]) for key in agent.keys.spaces}
            for row, (t, n) in enumerate((i // 3, i % 3) for i in index.tolist()):
                obs = diary.observations(start + t, rollout["shift"][t])
                assert all(torch.equal(seen[key][row], obs[key][n]) for key in seen)
    assert len({tuple(order) for order in orders}) == 8


def test_a_seed_settles_the_order_and_the_parameters_and_leaves_acting_alone(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    orders, starts = [], []
    for seed in (1, 1, 2):
        torch.manual_seed(5)
        agent = make_ppo(seed=seed, augment=True, cameras=("front",))
        assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))
        starts.append([p.clone() for p in agent.networks.parameters()] + [agent.shift])
        fill(agent)
        agent.update()
        orders.append(agent.order)
    same = [[torch.equal(a, b) for a, b in zip(starts[0], other, strict=True)] for other in starts[1:]]
    assert all(same[0])
    assert not all(same[1])
    assert torch.equal(orders[0], orders[1])
    assert not torch.equal(orders[0], orders[2])


# --- the normaliser ---------------------------------------------------------------------------------------------------


def test_the_normaliser_takes_in_each_step_once_after_the_updates(
    make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]
) -> None:
    agent = make_ppo(vectors={"state": 5, "other": 3}, value_observations=("*",))
    diary = Diary(agent, fill)
    trunks = agent.networks.policy_trunk, agent.networks.value_trunk
    norms = [norm for trunk in trunks for norm in trunk.norms.values()]
    assert len(norms) == 4
    for round_ in range(3):
        diary.complete(round_)
        due = agent.updates_due(0)
        for done in range(due):
            assert {norm.count.item() for norm in norms} == {24 * round_}, f"after {done} updates"
            agent.update()
        seen = 24 * (round_ + 1)
        for trunk in trunks:
            for key, norm in trunk.norms.items():
                data = torch.stack([step.obs[key] for step in diary.steps])[: 8 * (round_ + 1)].flatten(0, 1).double()
                assert norm.count.item() == seen == len(data)
                torch.testing.assert_close(norm.mean, data.mean(0))
                torch.testing.assert_close(norm.square / seen, data.var(0, correction=0))


def test_a_shared_trunk_takes_in_each_step_once(make_ppo: Callable[..., PPO], fill: Callable[..., list[Step]]) -> None:
    agent = make_ppo(shared_trunk=True)
    fill(agent)
    learn(agent)
    assert agent.networks.policy_trunk.norms["state"].count == 24
