"""``replay_device`` and ``sampling``: runs that learn the same from any place, and go on in another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sheeplike
from sheeplike.agents.dreamer_v3 import DreamerV3

PLACES = ["device", "cpu", "disk"]
JOB = ("exp=dreamer_v3", "env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]")
JOB += ("dry_run=true", "compile=off", "logger=[]", "video_every=null", "eval.every=null")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def updates(agent: DreamerV3, count: int = 3) -> list[dict[str, float]]:
    torch.manual_seed(5)
    return [{name: value.item() for name, value in agent.update().items()} for _ in range(count)]


def same(ours: DreamerV3, theirs: DreamerV3) -> bool:
    state, other = (agent.state_dict() for agent in (ours, theirs))
    parts = ((part["modules"], part["replay"]["storage"]) for part in (state, other))
    return all(all(map(torch.equal, a.values(), b.values())) for a, b in zip(*parts, strict=True))


@pytest.mark.parametrize("sampling", ["uniform", "episode"])
def test_learning_is_the_same_wherever_the_replay_lies(
    sampling: str, tmp_path: Path, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    learned = []
    for place in ("auto", *PLACES):
        torch.manual_seed(0)
        options = {"replay_device": place, "directory": tmp_path, "sampling": sampling, "replay_size": 3 * 20}
        agent = make_agent(cameras=("front",), **options, seed=1)
        agent.warm_up()
        play(agent, 30, last={(8, 0), (17, 2)})
        learned.append((agent, updates(agent), agent.last_batch()))
    (first, metrics, batch), *others = learned
    for agent, theirs, found in others:
        assert theirs == metrics
        assert same(agent, first)
        assert all(torch.equal(value, found[key]) for key, value in batch.items())
    names = [agent.describe()["memory"] for agent, _, _ in learned]
    assert ["disk" in name for name in names] == [False, False, False, True]


@pytest.mark.parametrize(("before", "after"), [("device", "disk"), ("disk", "cpu")])
def test_a_run_goes_on_with_its_replay_elsewhere(
    before: str, after: str, tmp_path: Path, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    torch.manual_seed(0)
    options = {"directory": tmp_path, "sampling": "episode", "learning_rate": 1e-3}
    agent, other = (make_agent(replay_device=place, seed=seed, **options) for seed, place in enumerate((before, after)))
    play(agent, 30, last={(8, 0), (20, 1)})
    updates(agent)
    other.load_state_dict(copy.deepcopy(agent.state_dict(history=False)))
    other.history.write_steps(0, agent.history.read_steps(0, 30))
    results = []
    for one in (agent, other):
        torch.manual_seed(1)
        play(one, 9, seed=3)
        results.append(updates(one))
    assert results[0] == results[1]
    assert same(agent, other)


def test_sampling_by_episode_is_another_draw_that_reads_no_tensor(
    make_agent: Callable[..., DreamerV3], play: Callable[..., Any], no_host_reads: Callable[..., Any]
) -> None:
    agents = [make_agent(sampling=sampling) for sampling in ("uniform", "episode")]
    for agent in agents:
        torch.manual_seed(0)
        play(agent, 40, last={(3, 0), (9, 0), (11, 1)})
        agent.replay.fresh.clear()
        with no_host_reads():
            agent.update()
    assert any(not torch.equal(a, b) for a, b in zip(*(agent._last_draw for agent in agents), strict=True))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compile", ["off", "graph"])
@pytest.mark.parametrize("sampling", ["uniform", "episode"])
def test_a_gpu_is_served_the_same_sequences_from_all_places(
    compile: str, sampling: str, tmp_path: Path, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    """Frames are compared; latents differ in the last bits, since a GPU adds in varying order."""
    batches = []
    for place in PLACES:
        options = {"replay_device": place, "directory": tmp_path, "sampling": sampling, "compile": compile, "seed": 1}
        agent = make_agent(cameras=("front",), device="cuda", **options)
        agent.warm_up()
        found = []
        for round_ in range(12):
            torch.manual_seed(round_)
            play(agent, 9, last={(6, 0)}, seed=round_)
            for _ in range(2):
                agent.update()
                found.append({k: v.cpu() for k, v in agent.last_batch().items()})
        assert int(agent.skipped_total) == 0
        assert agent.compiled.mode == "off" or agent._learn.captures == 1
        batches.append(found)
    for others in zip(*batches, strict=True):
        for key in ("pixels/front", "state", "reward", "is_first", "is_last", "envs", "times"):
            assert all(torch.equal(others[0][key], other[key]) for other in others), key


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("place", PLACES)
def test_old_steps_are_drawn_without_a_synchronisation(
    place: str, tmp_path: Path, make_agent: Callable[..., DreamerV3], play: Callable[..., Any]
) -> None:
    agent = make_agent(cameras=("front",), device="cuda", replay_device=place, directory=tmp_path, sampling="episode")
    play(agent, 40)
    agent.warm_up()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(4):
            agent.update()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_run_keeps_its_replay_in_a_file_without_a_name_and_may_go_on_without(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    """The directory of a new run does not exist yet when the file is made."""
    run_dir = tmp_path / "new" / "run"
    with sheeplike.init(*JOB, f"run_dir={run_dir}", "agent.replay_device=disk", "total_steps=64") as run:
        run.iterate()
        assert run.agent.replay.maps
        saved = run.agent.replay.state_dict()
    assert {path.name for path in tmp_path.iterdir()} == {"new"}
    assert "agent.replay_device" in refused(f"resume={run_dir}", "agent.sampling=episode")
    with sheeplike.init(f"resume={run_dir}", "agent.replay_device=cpu", "total_steps=96") as again:
        assert not again.agent.replay.maps
        found = again.agent.replay.state_dict()
        assert found["fresh"] == saved["fresh"]
        assert all(torch.equal(value, saved["storage"][key]) for key, value in found["storage"].items())
        assert again.iterate()
