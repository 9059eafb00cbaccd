"""Agents of other packages, as the command line takes them; what trains is tested with the how-to page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from sheeplike.commands import kinds
from sheeplike.commands.config import load, load_saved, to_yaml
from sheeplike.commands.errors import CommandError
from sheeplike.commands.run_directory import create
from sheeplike.commands.schema import all_keys
from sheeplike.commands.sources import Sources

HEAD = """
from dataclasses import dataclass
from typing import Annotated
from sheeplike.commands.kinds import AgentKind, InvalidValue, Rule
"""
KIND = (
    HEAD
    + """
@dataclass(frozen=True, kw_only=True)
class Tail:
    length: Annotated[int, Rule("of the tail", at_least=1)] = 2
    colour: Annotated[str, Rule("of the tail", choices=("black", "white"))] = "black"

@dataclass(frozen=True, kw_only=True)
class Keys:
    name: Annotated[str, Rule("the algorithm", choices=("wolf",))] = "wolf"
    observations: Annotated[tuple[str, ...], Rule("what it sees")] = ("state",)
    hunger: Annotated[float, Rule("how hungry it is", at_least=0, at_most=1)] = 0.5
    steps: Annotated[tuple[float, ...], Rule("sizes", above=0)] = (0.5, 1.0)
    tail: Annotated[Tail, Rule("its tail")] = Tail(length=5)

class Wolf(AgentKind):
    section = Keys
    dry_run = ("agent.hunger=1",)

    def check(self, config):
        if config.agent.hunger == 0.25:
            raise InvalidValue("agent.hunger", 0.25, "another one", 0.5)
        return config
"""
)
JOB = ("exp=wolf", "env=cartpole_balance", "profile=cpu")


@pytest.fixture(autouse=True)
def _wolf(site) -> None:
    site.announce("my-agents", "[sheeplike.agents]\nwolf = my_agents:Wolf", KIND, version="0.4")


def test_the_built_in_agents_import_no_other():
    for agent in ("dreamer_v3", "ppo"):
        assert load([f"exp={agent}", "env=franka_pick"], Sources()).agent.name == agent
    assert kinds.list_agents() == ["dreamer_v3", "ppo", "wolf"]
    assert [kinds.origins(name) for name in kinds.list_agents()] == [[], [], ["my-agents 0.4"]]
    assert "my_agents" not in sys.modules


def test_a_name_is_an_agent_and_a_recipe():
    config = load(JOB, Sources())
    assert (config.exp, config.agent.name) == ("wolf", "wolf")
    assert config.run_dir == "logs/cartpole_balance/wolf/wolf/seed_0"
    assert load(["exp=ppo", "agent=wolf", *JOB[1:]], Sources()).agent == config.agent


def test_keys_have_the_defaults_of_their_section():
    agent = load([*JOB, "agent.tail.colour=white", "agent.steps=0.25"], Sources()).agent
    assert (agent.hunger, agent.steps, agent.observations) == (0.5, (0.25,), ("state",))
    assert (agent.tail.length, agent.tail.colour) == (5, "white"), "those of the section, not of its class"
    assert load([*JOB, "dry_run=true"], Sources()).agent.hunger == 1
    assert load([*JOB, "dry_run=true", "agent.hunger=0"], Sources()).agent.hunger == 0


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("agent.hungr=1", "unknown key 'agent.hungr': nearest: agent.hunger"),
        ("agent.tail.lenght=1", "unknown key 'agent.tail.lenght': nearest: agent.tail.length"),
        ("agent.hunger=2", "agent.hunger=2: expected a number from 0 to 1; nearest: agent.hunger=1"),
        ("agent.hunger=x", "agent.hunger=x: expected a number from 0 to 1; nearest: agent.hunger=0.5"),
        ("agent.hunger=0.25", "agent.hunger=0.25: expected another one; nearest: agent.hunger=0.5"),
        (
            "agent.tail.colour=wite",
            "agent.tail.colour=wite: expected one of black, white; nearest: agent.tail.c",
        ),
        (
            "agent.steps=[1,-1]",
            "agent.steps=[1,-1]: expected a list of one or more numbers; nearest: agent.steps=[",
        ),
        ("agent.rollout_length=3", "agent.rollout_length: wolf has no such key; python -m"),
        ("agent/size=1m", "agent/size=1m: wolf has no sizes; expected agent=dreamer_v3"),
    ],
)
def test_mistakes_are_answered_as_for_the_built_in_ones(refused, override, error):
    assert error in refused(*JOB, override)


def test_its_keys_belong_to_it_alone(refused):
    load(JOB, Sources())
    assert "agent.hunger: ppo has no such key" in refused("exp=ppo", "env=cartpole_balance", "agent.hunger=1")


def test_files_of_its_own(tmp_path, monkeypatch):
    for name, text in {
        "agent/wolf.yaml": "name: wolf\nhunger: 0.75\n",
        "agent/old_wolf.yaml": "name: wolf\ntail:\n  length: 9\n",
        "exp/hunt.yaml": "# @package _global_\ndefaults:\n  - override /agent: wolf\nagent:\n  hunger: 0.125\n",
        "env/pole.yaml": "name: cartpole_balance\n",
    }.items():
        path = tmp_path / "configs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("SHEEPLIKE_SEARCH_PATH", str(tmp_path / "configs"))
    assert load(JOB, Sources()).agent.hunger == 0.75
    hunt = load(["exp=hunt", "env=pole", "agent.tail.length=3"], Sources())
    assert (hunt.exp, hunt.agent.hunger, hunt.agent.tail.length) == ("hunt", 0.125, 3), (
        "chosen by a file, its keys known"
    )
    assert load(["exp=wolf", "agent=old_wolf", "env=pole"], Sources()).agent.tail.length == 9


def test_what_is_saved_is_read_again(tmp_path):
    config = load([*JOB, "agent.hunger=0.125", f"run_dir={tmp_path / 'run'}"], Sources())
    create(tmp_path / "run", config).close()
    file = tmp_path / "run/config.yaml"
    assert load_saved(file, []) == config
    data = yaml.safe_load(to_yaml(config))
    del data["agent"]["steps"]  # of an older version of the package
    file.write_text(yaml.safe_dump(data))
    assert load_saved(file, []) == config
    data["agent"]["teeth"] = 42
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(CommandError, match=r"unknown key 'agent\.teeth'.*run/config\.yaml"):
        load_saved(file, [])


def test_help(sheeplike):
    text = sheeplike("--help").output
    assert "  agent=wolf               my-agents 0.4" in text
    assert "dreamer_v3, ppo, wolf" in text
    assert "agent.hunger" not in sheeplike("train", "--help").output
    assert "my_agents" not in sys.modules
    for chosen in ("agent=wolf", "exp=wolf"):
        text = sheeplike("train", "--help", chosen).output
        assert "with agent.name=wolf:" in text
        assert "agent.hunger                     how hungry it is (a number from 0 to 1)" in text
    assert {"agent.tail.length", "agent.steps"} <= {item.path for item in all_keys()}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("Wolf = 3", "expected a subclass of sheeplike.commands.kinds.AgentKind"),
        ("class Wolf: ...", "expected a subclass of sheeplike.commands.kinds.AgentKind"),
        (f"{HEAD}class Wolf(AgentKind): ...", "expected a dataclass of keys as its section"),
        (f"{HEAD}class Wolf(AgentKind):\n    dry_run = 'a=1'", "its dry_run='a=1': expected overrides, such as"),
        (f"{HEAD}class Wolf(AgentKind):\n def __init__(self): raise OSError('no\\nroom')", "no room"),
        (
            KIND.replace('("wolf",)', '("dog",)'),
            'expected the key name: Annotated[str, Rule("the algorithm", choices=("',
        ),
        (
            KIND.replace("hunger: Annotated[float, R", "hunger: Annotated[bytes, R"),
            "'hunger' is <class 'bytes'>: ",
        ),
        (
            KIND.replace('hunger: Annotated[float, Rule("how hungry it is", at_least=0, at_most=1)]', "hunger: float"),
            "'hu",
        ),
        (KIND.replace("    tail:", "    size:"), "its key 'size': expected another name"),
    ],
)
def test_a_broken_one_is_told_with_its_package_when_it_is_chosen(site, refused, sheeplike, code, reason):
    site.announce(
        "bad-agents", "[sheeplike.agents]\nwolf_2 = bad_agents:Wolf", code.replace('("wolf",)', '("wolf_2",)')
    )
    assert sheeplike("exp=ppo", "env=cartpole_balance").runs
    assert sheeplike(*JOB).runs
    error = refused("exp=wolf_2", *JOB[1:])
    assert "agent 'wolf_2' of bad-agents 0.1 (bad_agents:Wolf)" in error
    assert reason in error


def test_two_of_one_name(site, refused, sheeplike):
    site.announce("other-agents", "[sheeplike.agents]\nwolf = x:Wolf\nppo = x:PPO")
    assert "my-agents 0.4 (my_agents:Wolf) and in other-agents 0.1 (x:Wolf): expected one" in refused(*JOB)
    assert "agent 'ppo' is in sheeplike itself and in other-agents 0.1 (x:PPO)" in refused("exp=ppo", *JOB[1:])
    assert sheeplike("exp=dreamer_v3", *JOB[1:]).runs
    assert "agent=ppo                sheeplike, other-agents 0.1: refused" in sheeplike("--help").output


def test_an_environment_needs_no_file(site, refused, sheeplike, tmp_path):
    code = "def flock(*, episode_length: int = 30, sheep: int = 3): ..."
    site.announce("my-worlds", "[sheeplike.envs]\nflock = my_worlds:flock", code)
    assert "env=flock                my-worlds 0.1" in sheeplike("--help").output
    (run,) = sheeplike("exp=ppo", "env=flock", "env.options.sheep=5").runs
    assert (run.config.env.name, run.config.env.options) == ("flock", {"sheep": 5})
    assert run.config.run_dir == "logs/flock/ppo/ppo/seed_0"
    assert "nearest: episode_length" in refused("exp=ppo", "env=flock", "env.options.episode_lenght=5")
    assert "env.options.sheep=x: expected an integer; nearest: env.options.sheep=3" in refused(
        "exp=ppo", "env=flock", "env.options.sheep=x"
    )
    assert "env 'flok' does not exist" in refused("exp=ppo", "env=flok")
    (tmp_path / "configs/env").mkdir(parents=True)
    (tmp_path / "configs/env/flock.yaml").write_text("name: flock\noptions:\n  sheep: 7\n")
    (run,) = sheeplike("exp=ppo", "env=flock", "--config-dir", str(tmp_path / "configs")).runs
    assert run.config.env.options == {"sheep": 7}


def test_a_dry_run_shortens_episodes_where_that_is_an_option(site):
    code = "def long(*, episode_length: int = 30): ...\ndef fixed(*, sheep: int = 30): ...\ndef bare(): ..."
    names = ("long", "fixed", "bare")
    site.announce("my-worlds", "\n".join(["[sheeplike.envs]", *(f"{name} = my_worlds:{name}" for name in names)]), code)
    found = [load(["exp=ppo", f"env={name}", "dry_run=true"], Sources()).env.options for name in names]
    assert found == [{"episode_length": 24}, {}, {}]


def test_a_directory_of_configs_does_not_hide_an_agent(tmp_path: Path, refused):
    (tmp_path / "configs/agent").mkdir(parents=True)
    (tmp_path / "configs/agent/ppo.yaml").write_text("name: wolf\n")
    assert "agent=ppo exists already" in refused(*JOB, "--config-dir", str(tmp_path / "configs"))
