"""A trained world model, against what its agent computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import sheeplike
from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3.agent import DreamerV3
from sheeplike.agents.dreamer_v3.world_model import open_loop
from sheeplike.agents.ppo.agent import PPO
from sheeplike.inspection.model import DETER, Effects, States, TrainedModel
from sheeplike.options import CommandError

CAMERAS = {"front": (48, 48, 3), "side": (64, 48, 1)}
ACTIONS = {
    "continuous": 2,
    "discrete": spaces.Discrete(4, start=-1),
    "several": spaces.MultiDiscrete([2, 3]),
}
T = 6


@pytest.fixture(params=ACTIONS)
def played(
    request: pytest.FixtureRequest, make_agent: Callable[..., DreamerV3], play: Callable[..., list[Step]]
) -> tuple[DreamerV3, list[Step]]:
    """An agent whose every parameter has moved, so that nothing is zero, and what it saw and did."""
    agent = make_agent(cameras=CAMERAS, actions=ACTIONS[request.param])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in agent.networks.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return agent, play(agent, T, last=[(2, 1)])


def sequences(steps: list[Step]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Observations, actions and beginnings, worlds first."""
    obs = {key: torch.stack([step.obs[key] for step in steps], 1) for key in steps[0].obs}
    return obs, torch.stack([step.action for step in steps], 1), torch.stack([step.is_first for step in steps], 1)


def assert_same(found: States, expected: States) -> None:
    for name in ("deter", "stoch", "logits"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_dreams_are_those_of_the_agents_own_open_loop(played: tuple[DreamerV3, list[Step]]) -> None:
    """The first half observed, the second imagined from the recorded actions, under the same noise: bit for bit."""
    agent, steps = played
    obs, actions, is_first = sequences([step for step in steps if not step.is_last.any()][-4:])
    is_first = torch.zeros_like(is_first)
    is_first[:, 0] = True
    model = TrainedModel(agent.networks)
    half = {key: value[:, :2] for key, value in obs.items()}
    torch.manual_seed(3)
    states = model.observe(half, actions[:, :2], is_first[:, :2])
    dream = model.imagine(states[:, -1], actions[:, 1:3])
    found = model.decode(dream)

    inside = agent.codec.from_env(actions.flatten(0, 1)).unflatten(0, actions.shape[:2])
    before = torch.cat([torch.zeros_like(inside[:, :1]), inside[:, :-1]], 1)
    torch.manual_seed(3)
    with torch.no_grad():
        start = agent.world_model.rssm.initial(3, agent.device)
        _, predictions = open_loop(agent.world_model, start, before, obs | {"is_first": is_first})
    for camera, prediction in predictions.items():
        assert torch.equal(found.frames[f"pixels/{camera}"].transpose(0, 1), prediction.model[2:]), camera


def test_states_are_those_in_which_the_agent_acted(played: tuple[DreamerV3, list[Step]]) -> None:
    agent, steps = played
    obs, actions, is_first = sequences(steps)
    states = TrainedModel(agent.networks).observe(obs, actions, is_first, seed=0)
    assert states.lead == (3, T)
    first = steps[0].extras["deter"]
    torch.testing.assert_close(states[:, 0].deter.bfloat16(), first)
    assert torch.equal(states.stoch.sum(-1), torch.ones(3, T, 32))
    same = TrainedModel(agent.networks).observe(obs, actions, is_first, seed=0)
    assert_same(states, same)


def test_an_episode_followed_step_by_step_is_the_one_observed_at_once(played: tuple[DreamerV3, list[Step]]) -> None:
    agent, steps = played
    obs, actions, _ = sequences(steps[:3])
    model = TrainedModel(agent.networks)
    torch.manual_seed(5)
    whole = model.observe(obs, actions)
    torch.manual_seed(5)
    state = model.observe_step(None, None, {key: value[:, 0] for key, value in obs.items()})
    for t in range(3):
        assert torch.equal(state.stoch, whole[:, t].stoch)
        torch.testing.assert_close(state.deter, whole[:, t].deter)
        torch.testing.assert_close(state.logits, whole[:, t].logits, atol=1e-5, rtol=1e-5)
        if t < 2:
            state = model.observe_step(state, actions[:, t], {key: value[:, t + 1] for key, value in obs.items()})


def test_one_episode_needs_no_axis_for_several(played: tuple[DreamerV3, list[Step]]) -> None:
    agent, steps = played
    obs, actions, _ = sequences(steps[:3])
    model = TrainedModel(agent.networks)
    alone = {key: value[0].numpy() for key, value in obs.items()}
    states = model.observe(alone, actions[0].numpy(), seed=0)
    assert states.lead == (3,)
    assert len(states) == 3
    assert_same(states[..., -1], states[2])
    assert_same(states[torch.tensor([False, True, True])], states[1:])
    with pytest.raises(IndexError):
        states[0, 0]
    with pytest.raises(TypeError, match="state"):
        len(states[0])
    dream = model.imagine(states[-1], steps=4, seed=0)
    assert dream.lead == (4,)
    frames, reward, cont, value = model.decode(dream)
    assert {key: (tuple(x.shape), x.dtype) for key, x in frames.items()} == {
        "pixels/front": ((4, 48, 48, 3), torch.uint8),
        "pixels/side": ((4, 64, 48, 1), torch.uint8),
        "state": ((4, 5), torch.float32),
    }
    assert reward.shape == cont.shape == value.shape == (4,)
    assert bool(((cont > 0) & (cont <= 1)).all())
    assert model.act(dream, seed=0).shape == (4, *agent.codec.space.shape)


def test_dreams_follow_the_policy_or_whatever_chooses(played: tuple[DreamerV3, list[Step]]) -> None:
    agent, steps = played
    obs, actions, _ = sequences(steps[:2])
    model = TrainedModel(agent.networks)
    start = model.observe(obs, actions, seed=0)[:, -1]
    chosen = model.act(start, sample=False)
    torch.manual_seed(0)
    given = model.imagine(start, chosen.unsqueeze(1))
    torch.manual_seed(0)
    assert_same(given, model.imagine(start, lambda states: model.act(states, sample=False), steps=1))
    by_policy = model.imagine(start, steps=5, seed=1)
    assert_same(by_policy, model.imagine(start, steps=5, seed=1))
    assert not torch.equal(by_policy.deter, model.imagine(start, steps=5, seed=2).deter)
    likely = model.imagine(start, chosen.unsqueeze(1), most_likely=True)
    assert torch.equal(likely.stoch.argmax(-1), likely.logits.argmax(-1))


def test_surprise_is_the_divergence_of_what_was_seen_from_what_was_expected(
    played: tuple[DreamerV3, list[Step]],
) -> None:
    agent, steps = played
    obs, actions, is_first = sequences(steps)
    model = TrainedModel(agent.networks)
    states = model.observe(obs, actions, is_first, seed=0)
    groups = model.surprise(obs, actions, is_first, per_group=True, seed=0)
    total = model.surprise(obs, actions, is_first, seed=0)
    assert groups.shape == (3, T, 32)
    torch.testing.assert_close(groups.sum(-1), total)
    assert bool((groups > -1e-5).all())
    rssm = agent.world_model.rssm
    with torch.no_grad():
        seen = torch.distributions.Categorical(probs=rssm.distribution(states.logits).probs)
        foreseen = torch.distributions.Categorical(probs=rssm.distribution(rssm.prior(states.deter)).probs)
    torch.testing.assert_close(groups, torch.distributions.kl_divergence(seen, foreseen), atol=1e-5, rtol=1e-4)
    dream = model.imagine(states[:, -1], steps=3, seed=0)
    torch.testing.assert_close(model.kl(dream), torch.zeros(3, 3))


def test_variants_of_a_state(played: tuple[DreamerV3, list[Step]]) -> None:
    agent, steps = played
    obs, actions, _ = sequences(steps[:2])
    model = TrainedModel(agent.networks)
    state = model.observe(obs, actions, seed=0)[0, -1]
    variants = model.traverse(state, group=7)
    assert torch.equal(variants.stoch[:, 7], torch.eye(model.classes))
    others = [group for group in range(32) if group != 7]
    assert torch.equal(variants.stoch[:, others], state.stoch[others].expand(model.classes, -1, -1))
    assert torch.equal(model.traverse(state, group=7, classes=[1]).stoch[0, 7], torch.eye(model.classes)[1])
    direction = torch.randn(state.features.shape)
    assert len(model.traverse(state, direction)) == 5
    moved = model.traverse(state, direction, amounts=(0, 2))
    torch.testing.assert_close(moved.features, torch.stack([state.features, state.features + 2 * direction]))
    assert model.decode(moved).reward.shape == (2,)


def test_a_part_that_matters_to_nothing_has_no_effect(played: tuple[DreamerV3, list[Step]]) -> None:
    agent, steps = played
    rssm, group = agent.world_model.rssm, 5
    # Nothing reads this group any more.
    here = slice(group * rssm.classes, (group + 1) * rssm.classes)
    with torch.no_grad():
        rssm.in_stoch[0].weight[:, here] = 0
        for net in (agent.world_model.reward.net, agent.world_model.cont.net, agent.actor_critic.value.net):
            net[0][0].weight[:, rssm.deter :][:, here] = 0
        agent.actor_critic.policy.net[0].weight[:, rssm.deter :][:, here] = 0
        for images in agent.world_model.decoder.keys.sizes:
            getattr(agent.world_model.decoder, images.name).from_stoch[0].weight[:, here] = 0
        agent.world_model.decoder.mlp[0].weight[:, rssm.deter :][:, here] = 0
    obs, actions, is_first = sequences(steps)
    model = TrainedModel(agent.networks)
    states = model.observe(obs, actions, is_first, seed=0).map(lambda x: x.flatten(0, 1))
    effects = model.ablate(states, [group, 6, DETER])
    assert effects.parts == [group, 6, DETER]
    for name in ("pixels", "reward", "value", "kl"):
        nothing, some, recurrent = getattr(effects, name).tolist()
        assert nothing == pytest.approx(0, abs=1e-6), name
        assert some > 1e-8, name
        assert recurrent > 1e-8, name
    every = model.ablate(states)
    assert isinstance(every, Effects)
    assert every.parts == [*range(32), DETER]
    assert every.value.shape == (33,)


@pytest.fixture(scope="module")
def demo() -> TrainedModel:
    return sheeplike.load("demo:franka_pick")


@pytest.fixture(scope="module")
def episode(demo: TrainedModel) -> tuple[Tensor, Tensor]:
    """Frames and actions of 40 steps of the demo's own task, with its own policy."""
    envs = sheeplike.envs.make("franka_pick", num_envs=1, image_size=48, cameras=["front"])
    player, frames, actions = demo.networks.player(1), [], []
    torch.manual_seed(0)
    obs, _ = envs.reset(seed=11)
    for t in range(40):
        frames.append(obs["pixels/front"][0].clone())
        actions.append(player.act(obs, torch.tensor([t == 0]))[0])
        obs, *_ = envs.step(actions[-1][None])
    envs.close()
    return torch.stack(frames), torch.stack(actions)


def test_the_demo_is_surprised_where_an_episode_is_cut_and_glued(
    demo: TrainedModel, episode: tuple[Tensor, Tensor]
) -> None:
    frames, actions = episode
    usual = demo.surprise(frames, actions, seed=0)[2:]
    kept = [*range(12), *range(30, 40)]
    glued = demo.surprise(frames[kept], actions[kept], seed=0)
    assert glued[12] > 8 * usual.median()
    assert glued[12] > usual.max()
    assert glued[2:12].max() <= usual.max() + 1e-4


def test_the_demo_foresees_what_it_does(demo: TrainedModel, episode: tuple[Tensor, Tensor]) -> None:
    frames, actions = episode
    states = demo.observe(frames, actions, seed=0)
    seen = demo.decode(states)
    foreseen = demo.decode(demo.imagine(states[9], actions[9:24], seed=0))

    def psnr(found: Tensor, truth: Tensor) -> float:
        return float(-10 * ((found.float() - truth.float()) / 255).square().mean().log10())

    still = psnr(frames[9].expand(15, -1, -1, -1), frames[10:25])
    assert psnr(seen.frames["pixels/front"], frames) > 23
    assert psnr(foreseen.frames["pixels/front"], frames[10:25]) > still + 2
    assert set(seen.frames) == {"pixels/front", "privileged_state"}
    assert (seen.cont > 0.9).all()


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (lambda m, f, a: m.observe(f[:, :47], a), "pixels/front.*uint8.*40, 47, 48, 3.*uint8.*48, 48, 3"),
        (lambda m, f, a: m.observe(f.float(), a), "pixels/front.*float32.*uint8"),
        (lambda m, f, a: m.observe(f[0], a), "pixels/front.*48, 48, 3.*T, 48, 48, 3"),
        (lambda m, f, a: m.observe({"pixels/frnt": f}, a), "pixels/front.*nearest.*pixels/frnt"),
        (lambda m, f, a: m.observe(f, a[:-1]), "39, 3.*40, 3"),
        (lambda m, f, a: m.observe(f, a * torch.nan), "finite"),
        (lambda m, f, a: m.imagine(m.observe(f, a)[-1]), "steps=None"),
        (lambda m, f, a: m.imagine(m.observe(f, a)[-1], a[:0]), "0 actions"),
        (lambda m, f, a: m.imagine(m.observe(f, a)[-1], a, steps=3), "steps=3.*40 actions"),
    ],
)
def test_what_is_refused(
    demo: TrainedModel,
    episode: tuple[Tensor, Tensor],
    call: Callable[[TrainedModel, Tensor, Tensor], object],
    facts: str,
) -> None:
    with pytest.raises(ValueError, match=facts):
        call(demo, *episode)


@pytest.mark.parametrize(
    "call",
    [
        lambda m, f, a: m.observe_step(m.observe(f, a), a[0], f[0]),
        lambda m, f, a: m.traverse(m.observe(f, a), group=0),
        lambda m, f, a: m.traverse(m.observe(f, a)[-1]),
        lambda m, f, a: m.traverse(m.observe(f, a)[-1], group=32),
        lambda m, f, a: m.traverse(m.observe(f, a)[-1], group=0, classes=[4]),
        lambda m, f, a: m.traverse(m.observe(f, a)[-1], a[0]),
        lambda m, f, a: m.ablate(m.observe(f, a)[-1]),
        lambda m, f, a: m.ablate(m.observe(f, a), ["detr"]),
    ],
)
def test_what_a_caller_may_not_ask(
    demo: TrainedModel, episode: tuple[Tensor, Tensor], call: Callable[[TrainedModel, Tensor, Tensor], object]
) -> None:
    with pytest.raises(AssertionError):
        call(demo, *episode)


@pytest.mark.parametrize("actions", [np.array([0, 3]), np.array([0.9, 1.7])])
def test_actions_that_a_discrete_space_lacks(make_agent: Callable[..., DreamerV3], actions: np.ndarray) -> None:
    model = TrainedModel(make_agent(vectors={"state": 5}, actions=spaces.Discrete(4, start=-1)).networks)
    with pytest.raises(ValueError, match=r"Discrete\(4, start=-1\)"):
        model.observe(torch.zeros(2, 5), actions)


def test_depth_and_targets_come_back_in_their_own_units(
    make_agent: Callable[..., DreamerV3], play: Callable[..., list[Step]]
) -> None:
    agent = make_agent(
        vectors={"state": 5, "privileged_state": 2}, observations=("state",), targets=("privileged_state",)
    )
    play(agent, 20)
    norm = agent.world_model.norms[0]
    x = torch.randn(4, 2)
    torch.testing.assert_close(norm.invert(norm(x)), x)
    model = TrainedModel(agent.networks)
    with torch.no_grad():
        agent.world_model.decoder.heads[0].weight.zero_()
        agent.world_model.decoder.heads[0].bias.zero_()
    states = model.observe(torch.randn(3, 5), torch.zeros(3, 2), seed=0)
    torch.testing.assert_close(model.decode(states).frames["privileged_state"], norm.mean.float().expand(3, 2))


def test_what_has_no_world_model(make_ppo: Callable[..., PPO]) -> None:
    with pytest.raises(CommandError, match=r"ppo.*dreamer_v3"):
        TrainedModel(make_ppo().networks)
    with pytest.raises(CommandError, match="ppo"):
        sheeplike.load("demo:franka_pick_ppo")
    with pytest.raises(CommandError, match=r"demo:frnka_pick.*nearest: run=demo:franka_pick"):
        sheeplike.load("demo:frnka_pick")
    for impossible in ("x" * 5000, "a/" * 3000, "\0"):
        with pytest.raises(CommandError):
            sheeplike.load(impossible)


@pytest.mark.parametrize(("device", "expected"), [("gpu", "cuda"), ("cuda", "cpu")])
def test_a_device_that_is_not_there(device: str, expected: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with pytest.raises(CommandError, match=rf"device='{device}'.*expected.*{expected}"):
        sheeplike.load("demo:franka_pick", device=device)


def test_it_needs_neither_jax_nor_a_simulator_nor_hydra() -> None:
    code = (
        "import sys, torch, sheeplike\n"
        "model = sheeplike.load('demo:franka_pick')\n"
        "frames, actions = torch.zeros(3, 48, 48, 3, dtype=torch.uint8), torch.zeros(3, 3)\n"
        "model.decode(model.imagine(model.observe(frames, actions)[-1], steps=2))\n"
        "assert not {'jax', 'mujoco', 'warp', 'hydra', 'omegaconf', 'lightning'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
