"""The agents on the page about changing DreamerV3, built and installed outside the repository."""

from __future__ import annotations

import copy
import importlib
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium import spaces

import sheeplike
from sheeplike.agents import registry
from sheeplike.agents.dreamer_v3 import Size
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources

PAGE = "change_dreamer.md"
TEXT = (Path(__file__).parents[1] / "howto" / PAGE).read_text(encoding="utf-8")
AGENTS = {"inverse": "Inverse", "patches": "Patches", "plain_adam": "PlainAdam"}
TINY = Size(deter=64, hidden=16, classes=4, depth=2, units=16)
SEEN = {
    "pixels/front": spaces.Box(0, 255, (48, 48, 3), np.uint8),
    "pixels/wrist": spaces.Box(0, 255, (64, 48, 3), np.uint8),
    "state": spaces.Box(-np.inf, np.inf, (5,), np.float32),
    "privileged_state": spaces.Box(-np.inf, np.inf, (7,), np.float32),
}


@pytest.fixture
def installed(site):
    site.install(PAGE)
    return site


@pytest.fixture
def make(installed):
    """Builds an agent of the page, with a few thousand parameters."""

    def build(name, *, actions=spaces.Box(-1, 1, (2,), np.float32), **options):  # noqa: B008, not changed
        spec = registry.find(name)
        defaults = {"size": TINY, "observations": ("pixels/*", "state"), "targets": ("privileged_state",)}
        defaults |= {"batch_size": 4, "batch_length": 6, "learning_starts": 0, "replay_size": 180}
        defaults |= {"imagination_length": 3, "warmup": 0, "learning_rate": 1e-3}
        return spec.load()(spaces.Dict(SEEN), actions, spec.config(**(defaults | options)), num_envs=3)

    return build


def changed(before, module):
    return any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_every_command_on_the_page_composes(installed):
    found = [shlex.split(words) for words in re.findall(r"^python -m sheeplike (.+)$", TEXT, re.MULTILINE)]
    assert {name for words in found for name in AGENTS if {f"exp={name}", f"agent={name}"} & set(words)} == set(AGENTS)
    for words in found:
        if "--help" not in words and words[0] != "compare":
            load([word for word in words if word != "show=config"] + ["profile=cpu"], Sources())


def test_a_process_of_its_own_lists_and_explains_them(installed, tmp_path):
    listed = installed.run("--help", place=tmp_path).stdout
    assert all(f"  agent={name:<18} my-dreamers 0.1\n" in listed for name in AGENTS)
    explained = installed.run("train", "--help", "agent=patches", place=tmp_path).stdout
    assert "agent.patch_width" in explained
    refused = installed.run("exp=inverse", "env=franka_pick", "agent.loss_scales.invers=1", place=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "nearest: agent.loss_scales.inverse" in refused.stderr


@pytest.mark.parametrize("name", AGENTS)
def test_what_holds_for_dreamer_holds_for_them(name, installed):
    """Its size on a CPU, its targets and horizon for the pick task; their own defaults stay."""
    assert registry.lineage(name) == [name, "dreamer_v3"]
    plain, made = (load([f"exp={one}", "env=franka_pick", "profile=cpu"], Sources()) for one in ("dreamer_v3", name))
    assert (made.config.agent.size, made.config.agent.targets) == ("1m", ("privileged_state",))
    assert made.config.env == plain.config.env
    theirs, ours = (one.config.agent.model_dump(by_alias=True) for one in (plain, made))
    own = {"name", "loss_scales", "eps"}
    assert {key: ours[key] for key in theirs if key not in own} == {
        key: theirs[key] for key in theirs if key not in own
    }
    assert made.config.total_steps == plain.config.total_steps


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("actions", [spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(3)], ids=["box", "choice"])
def test_they_learn_and_go_on_from_their_state(name, actions, make, play):
    agent = make(name, actions=actions)
    assert type(agent).__name__ == AGENTS[name]
    play(agent, 20, last={(7, 1)}, terminal={(9, 0)})
    before = {part: [p.clone() for p in module.parameters()] for part, module in agent.networks.named_children()}
    for _ in range(3):
        metrics = agent.update()
    assert all(torch.isfinite(value) for key, value in metrics.items() if "likelihood" not in key)
    assert int(agent.skipped_total) == 0
    assert all(changed(before[part], module) for part, module in agent.networks.named_children())
    other = make(name, actions=actions)
    other.load_state_dict(copy.deepcopy(agent.state_dict()))
    for one in (agent, other):
        torch.manual_seed(3)
        one.update()
    state, again = agent.networks.state_dict(), other.networks.state_dict()
    assert all(torch.equal(value, again[key]) for key, value in state.items())


@pytest.mark.parametrize("name", AGENTS)
def test_they_skip_what_is_not_finite(name, make, play):
    agent = make(name)
    play(agent, 20)
    agent.replay.storage["reward"].fill_(torch.nan)
    before = [p.clone() for p in agent.networks.parameters()]
    agent.update()
    assert (int(agent.skipped_in_a_row), int(agent.skipped_total)) == (1, 1)
    assert not changed(before, agent.networks)


@pytest.mark.parametrize("bad", [False, True])
def test_what_they_add_is_watched_and_what_is_frozen_is_not(bad, make, play):
    agent = make("inverse")
    play(agent, 20)
    frozen = agent.world_model.decoder
    frozen.requires_grad_(False)
    if bad:
        next(agent.networks.inverse.parameters()).register_hook(lambda gradient: gradient * torch.nan)
    before = [p.clone() for p in agent.networks.parameters()]
    metrics = agent.update()
    assert bool(metrics["grad_norm/inverse"].isfinite()) is not bad
    assert int(agent.skipped_total) == bad
    assert changed(before, agent.networks) is not bad


@pytest.mark.slow
def test_the_inverse_model_finds_out_what_was_done(make, play):
    """On states that hold the last action it gets much better than at first, and the states get its gradient."""
    agent = make("inverse", loss_scales={"inverse": 1.0})
    play(agent, 30)
    first = float(agent.update()["loss/inverse"])
    for _ in range(80):
        last = float(agent.update()["loss/inverse"])
    assert last < 0.7 * first
    losses, _, posterior = agent.losses(agent.replay.sample(4).data)
    assert losses["inverse"].shape == (4, 5)
    assert torch.autograd.grad(losses["inverse"].sum(), posterior.deter)[0].abs().sum() > 0


def test_the_patches_are_what_the_model_sees(make, play):
    agent = make("patches", patch_width=4)
    encoder = agent.world_model.encoder
    assert encoder.outputs == 4 * (6 * 6 + 8 * 6) + 16
    seen = {key: torch.zeros(2, *SEEN[key].shape, dtype=agent.keys.dtype(key)) for key in agent.keys.spaces}
    other = {key: value.clone() for key, value in seen.items()}
    other["pixels/wrist"][:, -1, -1] = 255
    assert encoder(seen).shape == (2, encoder.outputs)
    difference = (encoder(seen) - encoder(other)).abs()[0]
    assert 0 < (difference > 0).sum() <= 4, "one pixel is in one patch"


def test_adam_clips_the_whole_gradient(make, play):
    agent = make("plain_adam", max_grad_norm=1e-3)
    play(agent, 20)
    agent.update()
    norm = torch.nn.utils.get_total_norm([p.grad for p in agent.networks.parameters() if p.grad is not None])
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)
    assert type(agent.optimizer).__mro__[2] is torch.optim.Adam


@pytest.mark.slow
def test_a_whole_run(installed, tmp_path, monkeypatch):
    """Trained, saved, evaluated, exported, and looked into."""
    name = "patches"
    run = ["exp=" + name, "env=cartpole_balance", "dry_run=true", f"run_dir={tmp_path}/run", "logger=[]"]
    done = installed.run(*run, place=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(row.get("loss/reward") is not None for row in rows)
    done = installed.run("export", f"run={tmp_path}/run", f"to={tmp_path}/out", place=tmp_path)
    assert done.returncode == 0, done.stderr
    model = sheeplike.load(tmp_path / "out")
    assert type(model.networks).__name__.startswith(AGENTS[name])
    assert importlib.import_module(name).SPEC.config.model_fields["name"].default == name
