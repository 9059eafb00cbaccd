"""Saving in the background: what is saved is what was."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sheeplike import host
from sheeplike.checkpoint import Writer, list_checkpoints, load, load_latest, snapshot, writing


def part(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value), "updates": 7}}


def steps(root: Path) -> list[int]:
    return [load(path)[0]["step"] for path in list_checkpoints(root)]


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until the event is set, at the latest when the context ends."""
    allowed, real = threading.Event(), writing.write_part

    def waiting(*arguments: object) -> dict:
        assert allowed.wait(60)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_part", waiting)
        try:
            yield allowed
        finally:
            allowed.set()


def test_what_changes_after_the_call_is_not_saved(tmp_path, monkeypatch, rings):
    """Neither in tensors, nor in containers, nor in a ring that wraps until nothing of it is left."""
    replay, expected = rings.make(), rings.make()
    rings.fill(replay, 47)
    rings.fill(expected, 47)
    rings.assert_same(replay, expected)
    weight, names, counts = torch.ones(5), ["a"], {"n": {1}}
    parts = {"agent": {"w": weight, "half": weight[:2], "names": names, "counts": counts}}
    parts["memory"] = replay.state_dict(history=False)
    with Writer(tmp_path) as writer:
        with held(monkeypatch) as allowed:
            writer.save(1, parts, {}, {"memory": {"replay": replay.journal}})
            weight.zero_()
            names.append("b")
            counts["n"].add(2)
            parts["agent"]["late"] = 1
            rings.fill(replay, 100, seed=9)
            assert list_checkpoints(tmp_path) == [], "it is written in the background"
            allowed.set()
        writer.wait()
    agent = load(tmp_path / "step_000000000001")[1]["agent"]
    assert torch.equal(agent.pop("w"), torch.ones(5))
    assert torch.equal(agent.pop("half"), torch.ones(2))
    assert agent == {"names": ["a"], "counts": {"n": {1}}}
    rings.assert_same(expected, rings.restore(tmp_path))


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    with Writer(tmp_path, keep_last=9) as writer, held(monkeypatch) as allowed:
        writer.save(1, part(), {})
        threading.Timer(0.2, allowed.set).start()
        writer.save(2, part(), {})
        assert steps(tmp_path)[0] == 1
        assert writer.holds(2)
        assert not writer.holds(1)
    assert steps(tmp_path) == [1, 2]


def test_closing_waits(tmp_path, monkeypatch):
    writer = Writer(tmp_path)
    with held(monkeypatch) as allowed:
        writer.save(1, part(), {})
        threading.Timer(0.2, allowed.set).start()
        writer.close()
        assert steps(tmp_path) == [1]
    writer.close()


def test_a_process_that_ends_without_closing_finishes_its_checkpoint(tmp_path):
    program = """
import sys, torch
from sheeplike.checkpoint import Writer
Writer(sys.argv[1]).save(1, {"agent": {"x": torch.ones(5_000_000)}}, {})
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=120)
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (2, False), (None, True)])
def test_a_state_that_would_not_fit_twice_is_written_without_a_copy(tmp_path, monkeypatch, rings, missing, fits):
    """Half of what is free must be enough: for the weights, for the state of the ring and for its journal."""
    replay = rings.make()
    rings.fill(replay, 25)
    state = replay.state_dict(history=False)
    needed = 50 * 4 + state["storage"]["latent"].nbytes + state["generator"].nbytes + 25 * 36
    free = None if missing is None else 2 * needed - missing
    copies, threads, real = [], [], snapshot.take
    monkeypatch.setattr(host, "free_memory", lambda: free)
    monkeypatch.setattr(snapshot, "take", lambda value: copies.append(value) or real(value))
    write = writing.write_part
    monkeypatch.setattr(writing, "write_part", lambda *a: threads.append(threading.current_thread().name) or write(*a))
    with Writer(tmp_path) as writer:
        parts = {"agent": {"w": torch.ones(50)}, "memory": replay.state_dict(history=False)}
        writer.save(1, parts, {}, {"memory": {"replay": replay.journal}})
    assert bool(copies) == fits
    assert set(threads) == {"checkpoint" if fits else "MainThread"}
    rings.assert_same(replay, rings.restore(tmp_path))


def test_a_view_is_saved_without_what_lies_behind_it(tmp_path):
    """Also where no copy is made."""
    big = torch.zeros(1_000_000)
    with Writer(tmp_path) as writer:
        for wait in (False, True):
            writer.save(1, {"agent": {"x": big[:10]}}, {}, wait=wait)
            writer.wait()
            assert (writer.last.path / "agent.pt").stat().st_size < 10_000


def test_the_parameters_and_versions_of_modules_come_back(tmp_path):
    module = torch.nn.BatchNorm1d(3)
    with Writer(tmp_path) as writer:
        writer.save(1, {"agent": {"module": module.state_dict(keep_vars=True)}}, {})
    state = load_latest(tmp_path)[1]["agent"]["module"]
    assert isinstance(state["weight"], torch.nn.Parameter)
    assert state._metadata == module.state_dict()._metadata
    module.load_state_dict(state)


def test_bytes_and_seconds_are_told(tmp_path, monkeypatch):
    with Writer(tmp_path) as writer:
        assert writer.last is None
        with held(monkeypatch) as allowed:
            writer.save(5, part(), {})
            threading.Timer(0.3, allowed.set).start()
            writer.wait()
        saved = writer.last
        assert (saved.step, saved.path, saved.linked) == (5, tmp_path / "step_000000000005", 0)
        assert saved.written == (saved.path / "agent.pt").stat().st_size
        assert saved.blocked < 0.3 <= saved.seconds
