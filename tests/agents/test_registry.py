"""Agents of other packages, as the command line takes them; one that trains is tested with the how-to page."""

from __future__ import annotations

import sys

import pytest
import yaml

from sheeplike.agents import registry
from sheeplike.config import compose
from sheeplike.config.compose import load_saved
from sheeplike.config.saved import to_yaml
from sheeplike.config.sources import Sources
from sheeplike.options import CommandError

WOLF = """
from typing import ClassVar, Literal
from pydantic import Field
from sheeplike.agents.config import AgentConfig
from sheeplike.agents.registry import AgentSpec
from sheeplike.options import InvalidOption, Options

class Tail(Options):
    length: int = Field(2, ge=1, description="of the tail")
    colour: Literal["black", "white"] = Field("black", description="of the tail")

class WolfConfig(AgentConfig):
    name: Literal["wolf"] = Field("wolf", description="the algorithm")
    observations: tuple[str, ...] = Field(("state",), description="what it sees")
    hunger: float = Field(0.5, ge=0, le=1, description="how hungry it is")
    steps: tuple[float, ...] = Field((0.5, 1.0), min_length=1, description="sizes")
    tail: Tail = Field(Tail(length=5), description="its tail")

    dry_run: ClassVar[dict] = {"hunger": 1}

    def check(self, *, num_envs, total_steps):
        if self.hunger == 0.25:
            raise InvalidOption("agent.hunger", 0.25, "another one", 0.5)
        return self

WOLF = AgentSpec(config=WolfConfig, agent=object)
"""
JOB = ("exp=wolf", "env=cartpole_balance", "profile=cpu")


@pytest.fixture(autouse=True)
def _wolf(alone, site) -> None:
    site.announce("my-agents", "[sheeplike.agents]\nwolf = my_agents:WOLF", WOLF, version="0.4")


def load(*arguments: str):
    return compose.load(arguments, Sources()).config


def test_the_built_in_agents_import_no_other():
    for agent in ("dreamer_v3", "plan2explore", "ppo"):
        assert load(f"exp={agent}", "env=franka_pick").agent.name == agent
    assert registry.list_agents() == ["dreamer_v3", "plan2explore", "ppo", "wolf"]
    assert [registry.AGENTS.origins(name) for name in registry.list_agents()] == [[], [], [], ["my-agents 0.4"]]
    assert "my_agents" not in sys.modules


def test_a_name_is_an_agent_and_a_recipe():
    config = load(*JOB)
    assert (config.exp, config.agent.name) == ("wolf", "wolf")
    assert config.run_dir == "logs/cartpole_balance/wolf/seed_0"
    assert load("exp=ppo", "agent=wolf", *JOB[1:]).agent == config.agent


def test_options_have_the_defaults_of_their_class():
    agent = load(*JOB, "agent.tail.colour=white", "agent.steps=0.25").agent
    assert (agent.hunger, agent.steps, agent.observations) == (0.5, (0.25,), ("state",))
    assert agent.tail.colour == "white"
    assert load(*JOB).agent.tail.length == 5
    assert load(*JOB, "dry_run=true").agent.hunger == 1
    assert load(*JOB, "dry_run=true", "agent.hunger=0").agent.hunger == 0


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("agent.hungr=1", ["'agent.hungr'", "nearest: agent.hunger"]),
        ("agent.tail.lenght=1", ["'agent.tail.lenght'", "nearest: agent.tail.length"]),
        ("agent.hunger=2", ["agent.hunger=2", "nearest: agent.hunger=1"]),
        ("agent.hunger=x", ["agent.hunger=x", "nearest: agent.hunger=0.5"]),
        ("agent.hunger=0.25", ["agent.hunger=0.25", "nearest: agent.hunger=0.5"]),
        ("agent.tail.colour=wite", ["black, white", "nearest: agent.tail.colour=white"]),
        ("agent.steps=[]", ["agent.steps=[]", "nearest: agent.steps=[0.5,1.0]"]),
        ("agent.rollout_length=3", ["agent.rollout_length", "wolf"]),
    ],
)
def test_mistakes_are_answered_as_for_the_built_in_ones(refused, override, facts):
    assert refused(*JOB, override).names(*facts)


def test_its_options_belong_to_it_alone(refused):
    load(*JOB)
    assert "'agent.hunger'" in refused("exp=ppo", "env=cartpole_balance", "agent.hunger=1")


def test_files_of_its_own(tmp_path, monkeypatch):
    for name, text in {
        "agent/wolf.yaml": "name: wolf\nhunger: 0.75\n",
        "agent/old_wolf.yaml": "name: wolf\ntail:\n  length: 9\n",
        "exp/hunt.yaml": "# @package _global_\ndefaults:\n  - override /agent: wolf\nagent:\n  hunger: 0.125\n",
    }.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", str(tmp_path / "configs"))
    assert load(*JOB).agent.hunger == 0.75
    hunt = load("exp=hunt", *JOB[1:], "agent.tail.length=3")
    assert (hunt.exp, hunt.agent.hunger, hunt.agent.tail.length) == ("hunt", 0.125, 3)
    assert load("exp=wolf", "agent=old_wolf", *JOB[1:]).agent.tail.length == 9


def test_what_is_saved_is_read_again(tmp_path):
    config, file = load(*JOB, "agent.hunger=0.125"), tmp_path / "config.yaml"
    file.write_text(to_yaml(config))
    assert load_saved(file).config == config
    data = yaml.safe_load(to_yaml(config))
    del data["agent"]["steps"]
    file.write_text(yaml.safe_dump(data))
    assert load_saved(file).config == config
    data["agent"]["teeth"] = 42
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(CommandError, match=r"'agent\.teeth'.*config\.yaml"):
        load_saved(file)


def test_help(sheeplike):
    text = sheeplike("--help").output
    assert "  agent=wolf               my-agents 0.4" in text
    assert "dreamer_v3, plan2explore, ppo, wolf" in text
    assert "agent.hunger" not in sheeplike("train", "--help").output
    assert "my_agents" not in sys.modules
    for chosen in ("agent=wolf", "exp=wolf"):
        text = sheeplike("train", "--help", chosen).output
        assert "agent.name=wolf" in text
        (line,) = [line for line in text.splitlines() if line.startswith("  agent.hunger ")]
        assert line.split()[1] == "0.5"
        assert line.endswith("how hungry it is (a number from 0 to 1)")
        assert "  agent.tail.length " in text


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("WOLF = 3", "AgentSpec(config=<an AgentConfig>, agent=<its class>)"),
        (WOLF.replace("AgentSpec(config=WolfConfig", "AgentSpec(config=Tail"), "AgentSpec(config=<an"),
        (WOLF, 'Literal["wolf_2"] = "wolf_2"'),
    ],
)
def test_a_broken_one_is_told_with_its_package_when_it_is_chosen(site, refused, sheeplike, code, reason):
    site.announce("bad-agents", "[sheeplike.agents]\nwolf_2 = bad_agents:WOLF", code)
    assert sheeplike("exp=ppo", "env=cartpole_balance").runs
    assert sheeplike(*JOB).runs
    error = refused("exp=wolf_2", *JOB[1:])
    assert error.names("'wolf_2'", "bad-agents 0.1 (bad_agents:WOLF)")
    assert reason in error


def test_two_of_one_name(site, refused, sheeplike):
    site.announce("other-agents", "[sheeplike.agents]\nwolf = x:Wolf\nppo = x:PPO")
    assert refused(*JOB).names("my-agents 0.4 (my_agents:WOLF)", "other-agents 0.1 (x:Wolf)")
    assert refused("exp=ppo", *JOB[1:]).names("'ppo'", "other-agents 0.1 (x:PPO)")
    assert sheeplike("exp=dreamer_v3", *JOB[1:]).runs
    assert "agent=ppo                sheeplike, other-agents 0.1: refused" in sheeplike("--help").output


def test_an_environment_needs_no_file(site, refused, sheeplike, tmp_path):
    code = "def flock(*, episode_length: int = 30, sheep: int = 3): ..."
    site.announce("my-worlds", "[sheeplike.envs]\nflock = my_worlds:flock", code)
    assert "env=flock                my-worlds 0.1" in sheeplike("--help").output
    (run,) = sheeplike("exp=ppo", "env=flock", "env.options.sheep=5").runs
    assert (run.config.env.name, run.config.env.options) == ("flock", {"sheep": 5})
    assert run.config.run_dir == "logs/flock/ppo/seed_0"
    assert "nearest: env.options.episode_length" in refused("exp=ppo", "env=flock", "env.options.episode_lenght=5")
    assert refused("exp=ppo", "env=flock", "env.options.sheep=x").names(
        "env.options.sheep=x", "nearest: env.options.sheep=3"
    )
    assert "'flok'" in refused("exp=ppo", "env=flok")
    (tmp_path / "configs/env").mkdir(parents=True)
    (tmp_path / "configs/env/flock.yaml").write_text("name: flock\noptions:\n  sheep: 7\n")
    (run,) = sheeplike("exp=ppo", "env=flock", "--config-dir", str(tmp_path / "configs")).runs
    assert run.config.env.options == {"sheep": 7}


def test_a_dry_run_shortens_episodes_where_that_is_an_option(site):
    code = "def long(*, episode_length: int = 30): ...\ndef fixed(*, sheep: int = 30): ...\ndef bare(): ..."
    names = ("long", "fixed", "bare")
    site.announce("my-worlds", "\n".join(["[sheeplike.envs]", *(f"{name} = my_worlds:{name}" for name in names)]), code)
    found = [load("exp=ppo", f"env={name}", "dry_run=true").env.options for name in names]
    assert found == [{"episode_length": 24}, {}, {}]
