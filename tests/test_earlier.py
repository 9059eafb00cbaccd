from pathlib import Path

import yaml

from sheeplike.commands.config import load_saved
from sheeplike.earlier import completed, completed_agent

FIRST = Path(__file__).parent / "data" / "config_of_the_first_version.yaml"


def test_a_run_of_the_first_version_has_all_keys_of_today():
    """Whoever adds a key says here what was done before it could be chosen; else such a run could not go on."""
    config = load_saved(FIRST, [])
    assert config.total_steps == 1_000_000
    assert (config.env.name, config.env.renderer, config.env.action_repeat) == ("franka_pick", "warp", 1)
    assert (config.checkpoint.keep_last, config.checkpoint.keep_best) == (2, 1)
    assert (config.compile, config.randomization) == ("off", {})
    assert (config.agent.targets, config.agent.policy_unimix) == ((), 0.01)


def test_what_is_there_stays():
    saved = yaml.safe_load(FIRST.read_text())
    saved |= {"compile": "reduce-overhead", "eval": {"nominal": True}}
    saved["agent"]["policy_unimix"] = 0.5
    new = completed(saved)
    assert (new["compile"], new["eval"], new["agent"]["policy_unimix"]) == ("reduce-overhead", {"nominal": True}, 0.5)
    assert "targets" not in saved["agent"]
    assert "renderer" not in saved["env"], "the saved one is left alone"


def test_one_share_of_uniform_noise_served_latents_and_policy():
    assert completed_agent({"name": "dreamer_v3", "unimix": 0.05})["policy_unimix"] == 0.05


def test_sections_that_are_none_stay_as_they_are():
    new = completed({"env": "CartPole-v1", "agent": None})
    assert (new["env"], new["agent"]) == ("CartPole-v1", None)
    assert "eval" not in new
    assert completed({})["faults"] is not completed({})["faults"]


def test_agents_of_other_packages_are_left_alone():
    section = {"name": "linear", "steps": 3}
    assert completed_agent(section) == section
