"""Saving in the background: whole or absent; a save that fails is reported and ends nothing."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from sheeplike import checkpoint, host
from sheeplike.checkpoint import NonFinite, NotWritten, Writer, best, list_checkpoints, load, load_latest


def save(root: Path, step: int, parts: dict, meta: dict, keep_last: int) -> Path:
    with Writer(root, keep_last=keep_last) as writer:
        writer.save(step, parts, meta, finite=(), wait=True)
    return root / f"step_{step:012d}"


def part(value: float = 1.0) -> dict:
    return {"agent": {"weight": torch.full((100,), value), "updates": 7}}


def steps(root: Path) -> list[int]:
    return [load(path)[0]["step"] for path in list_checkpoints(root)]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def fail(error: BaseException):
    def failing(*arguments: object, **options: object) -> None:
        raise error

    return failing


FULL = OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written until the event is set, at the latest when the context ends."""
    allowed, real = threading.Event(), checkpoint.write_part

    def waiting(*arguments: object) -> dict:
        assert allowed.wait(60)
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_part", waiting)
        try:
            yield allowed
        finally:
            allowed.set()


# What is saved is what is loaded


def test_a_checkpoint_loads_as_it_was_saved_and_its_manifest_describes_every_file(root):
    with Writer(root, config={"seed": 1}, device="cuda") as writer:
        writer.save(1200, part(3.0) | {"loop": {"carry": 0.25}}, {"score": 2.0, "sizes": [1, 2]}, wait=True)
    path = root / "step_000000001200"
    assert list_checkpoints(root) == [path]
    assert names(path) == ["agent.pt", "loop.pt", "manifest.json"]
    for meta, loaded in (load(path), load_latest(root)):
        assert (meta["step"], meta["score"], meta["sizes"], meta["device"]) == (1200, 2.0, [1, 2], "cuda")
        assert meta["config"] == {"seed": 1}
        packages = {"sheeplike", "torch", "jax", "jaxlib", "mujoco", "mujoco-mjx", "warp-lang", "python"}
        assert set(meta["versions"]) == packages
        assert meta["versions"]["torch"] == importlib.metadata.version("torch")
        assert torch.equal(loaded["agent"]["weight"], torch.full((100,), 3.0))
        assert loaded["loop"] == {"carry": 0.25}
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == checkpoint.FORMAT
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@pytest.mark.parametrize("wait", [False, True])
def test_everything_a_continuation_needs_can_be_saved(root, wait):
    module = torch.nn.BatchNorm1d(3)
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    big = torch.zeros(1_000_000)
    state = {
        "optimizer": optimizer.state_dict(),
        "module": module.state_dict(),
        "python": random.getstate(),
        "generator": torch.Generator().get_state(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "plain": [True, 1, 2.5, 1j, "s", b"b", None, (1, (2,)), {1, 2}, {3: {"x": []}}, OrderedDict(a=1)],
        "types": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
        "deter": torch.randn(5).bfloat16(),
        "empty": torch.zeros(0, 3),
        "view": big[:10],
    }
    with Writer(root) as writer:
        writer.save(0, {"state": state}, {}, wait=wait)
    loaded = load_latest(root)[1]["state"]
    for name in ("python", "numpy", "plain", "types"):
        assert loaded[name] == state[name]
    for name in ("generator", "deter", "empty", "view"):
        assert torch.equal(loaded[name], state[name])
        assert loaded[name].dtype == state[name].dtype
    for key, value in state["optimizer"]["state"][0].items():
        assert torch.equal(loaded["optimizer"]["state"][0][key], value)
    assert loaded["module"]._metadata == state["module"]._metadata, "the versions of modules"
    module.load_state_dict(loaded["module"])
    assert (list_checkpoints(root)[-1] / "state.pt").stat().st_size < 50_000, "a view, without what lies behind it"


def test_what_changes_after_the_call_is_not_saved(root, monkeypatch, lab):
    """Neither in tensors, nor in containers, nor in a ring that wraps until nothing of it is left."""
    replay, expected = (lab.fill(lab.make_ring(), 47) for _ in range(2))
    weight, words, counts = torch.ones(5), ["a"], {"n": {1}}
    parts = {"agent": {"w": weight, "words": words, "counts": counts}, "memory": replay.state_dict(history=False)}
    with Writer(root) as writer:
        with held(monkeypatch) as allowed:
            writer.save(1, parts, {}, replay)
            weight.zero_()
            words.append("b")
            counts["n"].add(2)
            parts["agent"]["late"] = 1
            lab.fill(replay, 100, seed=9)
            assert list_checkpoints(root) == [], "it is written in the background"
            allowed.set()
        writer.wait()
    agent = load_latest(root)[1]["agent"]
    assert torch.equal(agent.pop("w"), torch.ones(5))
    assert agent == {"words": ["a"], "counts": {"n": {1}}}
    lab.assert_same(expected, lab.restore_ring(root))


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (2, False), (None, True)])
def test_a_state_that_would_not_fit_twice_is_written_without_a_copy(root, monkeypatch, lab, missing, fits):
    """Half of what is free must be enough: for the weights, for the state of the ring and for its steps."""
    replay = lab.fill(lab.make_ring(), 25)
    state = replay.state_dict(history=False)
    needed = 50 * 4 + state["storage"]["latent"].nbytes + state["generator"].nbytes + 25 * 36
    monkeypatch.setattr(host, "free_memory", lambda: None if missing is None else 2 * needed - missing)
    order, write, read = [], checkpoint.write_part, type(replay).read_steps
    monkeypatch.setattr(checkpoint, "write_part", lambda *a: order.append(threading.current_thread().name) or write(*a))
    monkeypatch.setattr(type(replay), "read_steps", lambda *a: order.append(a[1:]) or read(*a))
    with Writer(root) as writer:
        writer.save(1, {"agent": {"w": torch.ones(50)}, "memory": state}, {}, replay)
    if fits:
        assert order == [(20, 25), (0, 10), (10, 20), *["checkpoint"] * 5]
    else:
        assert order == [(20, 25), (0, 10), "MainThread", (10, 20), *["MainThread"] * 4]
    lab.assert_same(replay, lab.restore_ring(root))


def test_a_save_waits_for_the_one_before_and_closing_for_the_last(root, monkeypatch):
    writer = Writer(root, keep_last=9)
    with held(monkeypatch) as allowed:
        writer.save(1, part(), {})
        threading.Timer(0.3, allowed.set).start()
        writer.save(2, part(), {})
        assert steps(root)[0] == 1
    writer.close()
    assert steps(root)[-1] == 2
    with held(monkeypatch) as allowed:
        writer.save(3, part(), {})
        threading.Timer(0.3, allowed.set).start()
        writer.close()
    assert steps(root) == [1, 2, 3]
    writer.close()


def test_a_process_that_ends_without_closing_finishes_its_checkpoint(root):
    program = """
import sys, torch
from sheeplike.checkpoint import Writer
Writer(sys.argv[1]).save(1, {"agent": {"x": torch.ones(5_000_000)}}, {})
"""
    subprocess.run([sys.executable, "-c", program, str(root)], check=True, timeout=120)
    assert steps(root) == [1]


# Which are kept


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "left"),
    [
        (1, 0, [6]),
        (1, 1, [2, 6]),
        (1, 2, [2, 5, 6]),
        (2, 2, [2, 5, 6]),
        (1, 3, [2, 4, 5, 6]),
        (9, 9, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_newest_and_the_best_are_kept(root, keep_last, keep_best, left):
    with Writer(root, keep_last=keep_last, keep_best=keep_best) as writer:
        for step, score in enumerate([1.0, 9.0, 9.0, 3.0, 5.0, None], 1):
            writer.save(step, part(), {"score": score} if score is not None else {}, wait=True)
    # Step 3 repeats the score of step 2, so it was not evaluated itself.
    assert steps(root) == left


@pytest.mark.parametrize(
    ("scores", "winner"), [((-7, -8), 1), ((math.nan, 1.0, math.inf, "good", 10**400), 2), ((None, None), None)]
)
def test_the_best(root, scores, winner):
    for step, score in enumerate(scores, 1):
        save(root, step, part(), {"score": score} if score is not None else {}, keep_last=9)
    found = best(root)
    assert (found and load(found)[0]["step"]) == winner
    if found:
        (found / "manifest.json").write_text("{}")
        assert best(root) != found


@pytest.mark.parametrize("next_step", [12, 15, 20])
def test_what_a_run_passed_over_goes_with_the_next_save_and_pushes_nothing_out(root, next_step):
    """Although it has the best score of all."""
    for step, score in ((5, 2.0), (10, 1.0), (15, 9.0), (18, None)):
        save(root, step, part(), {} if score is None else {"score": score}, keep_last=9)
    with Writer(root, keep_last=9) as writer:
        writer.save(30, part(), {})
        writer.resumed_from(10)
        assert steps(root) == [5, 10, 15, 18, 30]
    with Writer(root, keep_last=2, keep_best=1) as writer:
        writer.resumed_from(10)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "write_part", fail(FULL))
            with pytest.raises(OSError, match="No space left"):
                writer.save(next_step, part(), {}, wait=True)
        assert steps(root) == [5, 10, 15, 18, 30]
        writer.save(next_step, part(), {}, wait=True)
        assert steps(root) == [5, 10, next_step]
        writer.save(next_step + 7, part(), {}, wait=True)
    assert steps(root) == [5, next_step, next_step + 7], "from then on the run only goes forward"


def test_other_files_are_left_alone(root):
    root.mkdir(parents=True)
    for name in ("notes.txt", "step_1", "step_000000000001.bak"):
        (root / name).mkdir() if "." not in name else (root / name).touch()
    for step in (7, 8, 10**13):
        save(root, step, part(), {}, keep_last=1)
    assert names(root) == ["notes.txt", "step_000000000001.bak", "step_1", "step_10000000000000"]


# Whole or absent


def test_files_and_directories_are_synced_before_and_after_the_rename(root, monkeypatch, lab):
    log, real_sync, real_rename = [], os.fsync, os.rename

    def sync(descriptor):
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", lambda *paths: log.append("rename") or real_rename(*paths))
    lab.save_ring(root, 1, lab.fill(lab.make_ring(), 10))
    log = [re.sub(r"\.(tmp-|manifest).*", "temporary", name) for name in log]
    assert log[:2] == [root.parent.parent.name, "run"], "the new directories"
    assert log[2:] == [
        "run",
        *("temporary", "rename", "replay"),
        *("agent.pt", "memory.pt", "history.pt", "temporary", "temporary"),
        *("rename", "checkpoints"),
    ]


@pytest.mark.parametrize("wait", [False, True])
def test_a_write_that_fails_leaves_the_earlier_ones_and_no_rest(root, monkeypatch, wait):
    save(root, 1, part(1.0), {}, keep_last=1)
    real = os.rename

    def renamed(source, target):
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, "Input/output error")
        real(source, target)

    with Writer(root, keep_last=1, report=lambda text: None) as writer:
        for name, failing in (("rename", renamed), ("fsync", fail(FULL)), ("mkdir", fail(FULL))):
            for step in (1, 2):
                with monkeypatch.context() as patch:
                    patch.setattr(os, name, failing)
                    with pytest.raises(OSError, match=r"Input/output|No space"):
                        writer.save(step, part(2.0), {}, wait=wait) or writer.wait()
                assert names(root) == ["step_000000000001"]
                assert load_latest(root)[1]["agent"]["weight"][0] == 1.0
        writer.save(1, part(3.0), {}, wait=True)
    assert load_latest(root)[1]["agent"]["weight"][0] == 3.0


def test_what_a_killed_save_left_is_put_in_order(root):
    """Half a directory; one that was moved aside for another of its step; one that was moved aside too late."""
    path = save(root, 5, part(1.0), {}, keep_last=9)
    path.rename(root / ".old-step_000000000005")
    (root / ".tmp-0123").mkdir()
    assert load_latest(root)[0]["step"] == 5
    Writer(root).close()
    assert names(root) == ["step_000000000005"]
    path.rename(root / ".old-step_000000000005")
    save(root.parent / "other", 5, part(2.0), {}, keep_last=1).rename(path)
    assert list_checkpoints(root) == [path]
    Writer(root).close()
    assert names(root) == ["step_000000000005"]
    assert load_latest(root)[1]["agent"]["weight"][0] == 2.0


# Failures


@pytest.mark.parametrize("blocking", [False, True], ids=["in the background", "without a copy"])
@pytest.mark.parametrize(
    "error", [FULL, MemoryError("no more"), RuntimeError("unexpected pos"), ZeroDivisionError("a bug")], ids=repr
)
def test_a_save_that_fails_is_reported_once_and_the_next_one_is_tried(root, monkeypatch, blocking, error):
    """torch has a RuntimeError for a write that is cut short, and nothing of it is worth the run."""
    told: list[str] = []
    monkeypatch.setattr(host, "free_memory", lambda: 0 if blocking else None)
    kind = OSError if error is FULL else NotWritten
    with Writer(root, report=told.append) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_part", fail(error))
            for step in (2, 3):
                writer.save(step, part(), {})
                writer.close()
                assert steps(root) == []
            assert len(told) == 1
            assert str(error).rpartition("] ")[2] in told[0]
            with pytest.raises(kind) as waited:
                writer.wait()
            with pytest.raises(kind) as asked:
                writer.save(4, part(), {}, wait=True)
            for caught in (waited.value, asked.value):
                assert (caught if error is FULL else caught.__cause__) is error
            patch.setattr(checkpoint, "write_part", lambda *a: os.stat(root / "absent"))
            writer.save(5, part(), {})
            writer.close()
            assert steps(root) == []
            assert len(told) == 2, "another kind"
        assert list(root.iterdir()) == []
        writer.save(6, part(), {})
        writer.wait()
    assert steps(root) == [6]


def test_the_copy_of_a_state_does_not_outlive_its_failed_save(root, monkeypatch):
    copies = []

    def broken(path: Path, state: dict) -> None:
        copies.append(weakref.ref(state["weight"]))
        raise MemoryError

    monkeypatch.setattr(checkpoint, "write_part", broken)
    with Writer(root, report=lambda text: None) as writer:
        writer.save(1, part(), {})
        writer.close()
        assert steps(root) == []
        assert [copy() for copy in copies] == [None]


LIMITED = """
import resource, sys, torch
from sheeplike.checkpoint import Writer
with Writer(sys.argv[1], report=lambda text: print("told")) as writer:
    for step, limit in ((1, -1), (2, 2_000_000), (3, 2_000_000), (4, -1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        writer.save(step, {"agent": {"x": torch.ones(5_000_000)}}, {})
        try:
            writer.wait()
        except OSError as error:
            print(type(error).__name__, error.errno)
"""


def test_a_file_that_the_system_does_not_let_grow(root):
    """A limit on the size of files stands in for a full disk: the write itself fails, half-way through a tensor."""
    done = subprocess.run([sys.executable, "-c", LIMITED, str(root)], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"told\nOSError {errno.EFBIG}\nOSError {errno.EFBIG}\n", done.stderr
    assert names(root) == ["step_000000000001", "step_000000000004"]
    assert steps(root) == [1, 4]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_directory(root):
    told: list[str] = []
    with Writer(root, report=told.append) as writer:
        writer.save(1, part(), {}, wait=True)
        root.chmod(0o500)
        writer.save(2, part(), {})
        writer.close()
        root.chmod(0o700)
    assert "Permission denied" in told[0]
    assert steps(root) == [1]


def test_a_place_that_cannot_be_made_is_told_at_once(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Writer(tmp_path / "file" / "checkpoints")


# Refusals, before anything is written


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wait", [False, True])
def test_weights_that_are_not_finite_are_not_saved(root, value, wait):
    state = part()["agent"] | {"optimizer": {"state": {0: {"exp_avg": torch.ones(4, dtype=torch.bfloat16)}}}}
    with Writer(root) as writer:
        writer.save(1, {"agent": state}, {}, wait=True)
        state["optimizer"]["state"][0]["exp_avg"][2] = value
        with pytest.raises(NonFinite, match=r"^agent\['optimizer'\]\['state'\]\[0\]\['exp_avg'\]"):
            writer.save(2, {"agent": state}, {}, wait=wait)
        assert steps(root) == [1]
        writer.save(3, {"agent": {"x": torch.tensor([1, 2])}, "loop": state}, {}, wait=True)
        writer.save(4, {"agent": state}, {}, finite=(), wait=True)


def test_finiteness_is_read_once(root, monkeypatch):
    reads, real = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or real(self))
    with Writer(root) as writer:
        writer.save(1, {"agent": {str(i): torch.ones(3) for i in range(50)} | {"empty": torch.zeros(0)}}, {})
    assert [read.shape for read in reads] == [(51,)]


class Colour(int):
    pass


@pytest.mark.parametrize(
    "value",
    [np.zeros(3), np.float64(1.0), defaultdict(list), Counter(), Path("x"), torch.nn.Linear(1, 1), Colour(1), print],
    ids=lambda value: type(value).__name__,
)
def test_what_could_not_be_loaded_is_refused_by_its_key(root, value):
    with pytest.raises(TypeError) as caught:
        save(root, 1, {"agent": {"player": [0, {"carry": value}]}}, {}, keep_last=1)
    message = str(caught.value)
    assert message.startswith("agent['player'][1]['carry'] is ")
    assert str(type(value).__name__) in message
    assert "\n" not in message
    with pytest.raises(TypeError, match=r"numpy\.int64"):
        save(root, 1, {"agent": {np.int64(1): 1}}, {}, keep_last=1)
    assert names(root) == []


@pytest.mark.parametrize(
    ("step", "name", "meta", "keep"),
    [
        (1, "agent", {}, 0),
        (-1, "agent", {}, 1),
        (1, "../agent", {}, 1),
        (1, "", {}, 1),
        (1, "history", {}, 1),
        (1, "agent", {"path": Path("x")}, 1),
    ],
)
def test_bad_arguments_are_refused(root, step, name, meta, keep):
    with pytest.raises((AssertionError, TypeError)):
        save(root, step, {name: {}}, meta, keep_last=keep)
    assert not root.exists() or names(root) == []
