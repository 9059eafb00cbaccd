"""The packages on the pages about tasks, environments and agents, built and installed outside the repository."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from sheeplike import envs
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources
from sheeplike.loop import LoopState, evaluate, train

HOWTO = Path(__file__).parents[1] / "howto"
PAGES = {"add_a_task.md": "reach", "add_an_environment.md": "catch", "add_an_agent.md": "linear"}


def commands(page: str, name: str) -> list[list[str]]:
    text = (HOWTO / page).read_text(encoding="utf-8")
    found = [shlex.split(words) for words in re.findall(r"^python -m sheeplike (.+)$", text, re.MULTILINE)]
    return [words for words in found if {f"env={name}", f"exp={name}", f"agent={name}"} & set(words)]


@pytest.fixture
def pages(site, tmp_path, monkeypatch):
    for page in PAGES:
        site.install(page)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return site


@pytest.fixture
def catch(pages):
    return envs.make("catch", num_envs=4, image_size=48, seed=3)


class Observer:
    def stepped(self, step, info): ...
    def learned(self, metrics): ...


def linear(made, seed=0):
    agent = importlib.import_module("linear").Linear
    return agent(made.single_observation_space, made.single_action_space, num_envs=made.num_envs, seed=seed)


def test_every_command_on_the_pages_composes(pages):
    composed = [words for page, name in PAGES.items() for words in commands(page, name)]
    assert len(composed) == 8
    for words in composed:
        words = [word for word in words if not word.startswith("seeds=")]
        if "--help" not in words:
            config = load([*words, "profile=cpu"], Sources()).config
            assert config.env.name in PAGES.values()
            assert config.agent.name in (*PAGES.values(), "ppo", "dreamer_v3")


def test_a_process_of_its_own_lists_and_checks_them(pages, tmp_path):
    listed = pages.run("--help", place=tmp_path).stdout
    for choice, package in (("env=reach", "reach"), ("env=catch", "catch"), ("agent=linear", "linear")):
        assert f"  {choice:<24} {package} 0.1\n" in listed
    refused = pages.run("exp=linear", "env=catch", "agent.learning_rat=3", place=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "nearest: agent.learning_rate" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "logs").exists()


# Catch


def test_catch_resets_at_the_next_step(catch):
    obs, info = catch.reset(seed=5)
    totals = torch.zeros(4)
    for step in range(1, 31):
        before = obs
        obs, reward, terminated, truncated, info = catch.step(torch.tensor([0, 1, 2, 1]))
        assert all(catch.single_observation_space[key].contains(value[0].numpy()) for key, value in obs.items())
        assert not any(obs[key].data_ptr() == before[key].data_ptr() for key in obs), "new tensors at every step"
        assert not truncated.any()
        begins = step % (catch.episode_length + 1) == 0
        ends = step % (catch.episode_length + 1) == catch.episode_length
        assert bool(terminated.all()) == bool(terminated.any()) == ends
        totals = torch.zeros(4) if begins else totals + reward
        if begins:
            assert (obs["state"][:, 0] == -1).all()
            assert (reward == 0).all()
        if ends:
            assert (obs["state"][:, 0] == 1).all(), "the last frame is a true one"
            assert torch.equal(info["success"], obs["state"][:, 1] == obs["state"][:, 2])
            assert torch.equal(reward, torch.where(info["success"], 1.0, -1.0))
        assert torch.equal(info["episode"]["return"], totals)
        assert (info["episode"]["length"] == step % (catch.episode_length + 1)).all()
        assert torch.equal(info["reward_terms"]["catch"], reward)


def test_catch_goes_on_from_its_state(catch, pages):
    catch.reset(seed=5)
    actions = torch.randint(3, (40, 4), generator=torch.Generator().manual_seed(0))
    for action in actions[:13]:
        catch.step(action)
    state = catch.state_dict()
    other = envs.make("catch", num_envs=4, image_size=48, seed=99)
    other.load_state_dict(state)
    for action in actions[13:]:
        (obs, *rest, info), (obs_2, *rest_2, info_2) = catch.step(action), other.step(action)
        assert all(torch.equal(a, b) for a, b in zip([*obs.values(), *rest], [*obs_2.values(), *rest_2], strict=True))
        assert torch.equal(info["episode"]["return"], info_2["episode"]["return"])


def test_catch_refuses_what_it_cannot_do(pages):
    for options, refusal in (
        ({"rows": 1}, r"rows=1: expected 1 \+ a multiple of action_repeat=1"),
        ({"columns": 1}, "columns=1: expected at least 2"),
        ({"action_repeat": 2}, r"rows=10: expected 1 \+ a multiple of action_repeat=2"),
    ):
        with pytest.raises(ValueError, match=refusal):
            envs.make("catch", num_envs=1, **options)
    assert envs.make("catch", num_envs=1, action_repeat=3).episode_length == 3
    with pytest.raises(ValueError, match="depth=true"):
        envs.make("catch", num_envs=1, depth=True)


# The linear agent


def test_linear_goes_on_from_its_state(catch):
    agent, other = linear(catch), linear(catch, seed=1)
    state = LoopState.begin(agent, catch, 0)
    train(agent, catch, state, total_steps=4 * 34, observer=Observer())
    assert state.gradient_steps == 3
    made = envs.make("catch", num_envs=4, image_size=48)
    made.load_state_dict(catch.state_dict())
    other.load_state_dict(copy.deepcopy(agent.state_dict()))
    again = LoopState(other.player(4), state.step, state.policy_steps, state.gradient_steps)
    for one, place, at in ((agent, catch, state), (other, made, again)):
        torch.manual_seed(7)
        train(one, place, at, total_steps=4 * 60, observer=Observer())
    assert state.gradient_steps == again.gradient_steps == 6
    pairs = zip(agent.networks.state_dict().values(), other.networks.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_linear_skips_what_is_not_finite(catch):
    agent = linear(catch)
    state = LoopState.begin(agent, catch, 0)
    train(agent, catch, state, total_steps=4 * 19, observer=Observer())
    before = agent.networks.linear.weight.clone()
    agent.rollout["reward"][3] = torch.nan
    train(agent, catch, state, total_steps=4 * 20, observer=Observer())
    assert (int(agent.skipped_in_a_row), int(agent.skipped_total)) == (1, 1)
    assert torch.equal(agent.networks.linear.weight, before)
    train(agent, catch, state, total_steps=4 * 30, observer=Observer())
    assert (int(agent.skipped_in_a_row), int(agent.skipped_total)) == (0, 1)
    assert not torch.equal(agent.networks.linear.weight, before)


def test_linear_learns(pages):
    """A tenth of what the page trains for: well on the way."""
    torch.manual_seed(0)
    made = envs.make("catch", num_envs=16, image_size=16)
    agent = linear(made)
    caught = [evaluate(agent, made, episodes=128, seed=9).success.float().mean()]
    train(agent, made, LoopState.begin(agent, made, 0), total_steps=12_000, observer=Observer())
    caught.append(evaluate(agent, made, episodes=128, seed=9).success.float().mean())
    assert caught[0] < 0.5
    assert caught[1] > caught[0] + 0.15


# Runs of all of them, to the end


@pytest.mark.slow
@pytest.mark.parametrize(("exp", "env"), [("ppo", "reach"), ("dreamer_v3", "reach"), ("ppo", "catch")])
def test_the_environments_run(pages, tmp_path, exp, env):
    run(pages, tmp_path, exp, env)


@pytest.mark.slow
def test_both_packages_run_together_and_the_run_can_be_used(pages, tmp_path):
    run(pages, tmp_path, "dreamer_v3", "catch")
    run_dir = run(pages, tmp_path, "linear", "catch")
    go_on = pages.run(f"resume={run_dir}", "total_steps=256", place=tmp_path)
    assert go_on.returncode == 0, go_on.stderr
    assert "step 128" in go_on.stdout
    exported = pages.run("export", f"run={run_dir}", place=tmp_path)
    assert exported.returncode == 0, exported.stderr
    from sheeplike.trained.exported import load_agent

    (place,) = (tmp_path / run_dir / "export").iterdir()
    player = load_agent(place).player(num_envs=3)
    action = player.act({"state": torch.zeros(3, 3)}, torch.ones(3, dtype=torch.bool))
    assert action.shape == (3,)


@pytest.mark.slow
def test_what_the_page_promises_of_the_linear_agent(pages, tmp_path):
    (words,) = [words for words in commands("add_an_agent.md", "linear") if words[-1] == "total_steps=60000"]
    done = pages.run(*words, "profile=cpu", place=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = map(json.loads, (tmp_path / "logs/catch/linear/seed_0/metrics.jsonl").read_text().splitlines())
    caught = [row["eval/success_rate"] for row in rows if "eval/success_rate" in row]
    assert len(caught) == 6
    assert caught[-1] >= 0.85


def run(site, place: Path, exp: str, env: str) -> str:
    """A dry run, and an evaluation of it; returns its directory."""
    done = site.run(f"exp={exp}", f"env={env}", "dry_run=true", place=place)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^  task +{env}:", done.stdout, re.MULTILINE)
    run_dir = f"dry_runs/{env}/{exp}/seed_0"
    assert f"finished: {run_dir}" in done.stdout
    played = site.run("eval", f"run={run_dir}", "episodes=2", place=place)
    assert played.returncode == 0, played.stderr
    (result,) = (place / run_dir / "eval").glob("*/result.json")
    assert json.loads(result.read_text())["run"] == {"env": env, "id": None, "agent": exp, "exp": exp, "seed": 0}
    return run_dir
