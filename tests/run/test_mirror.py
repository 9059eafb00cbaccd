"""Checkpoints that are copied to a place that outlives the machine, and an empty machine that goes on from there."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import sheeplike
from sheeplike import checkpoint
from sheeplike.__main__ import main
from sheeplike.config.compose import load
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.memory import SequenceReplay
from sheeplike.options import CommandError, InvalidOption
from sheeplike.run.layout import checkpoint_steps, place_of
from sheeplike.run.mirror import Mirror
from sheeplike.run.run_dir import plan

JOB = ("exp=ppo", "env=cartpole_balance")
SPEC = {"image": ((4, 4), torch.uint8), "is_first": ((), torch.bool), "is_last": ((), torch.bool)}


class Faulty(MemoryFileSystem):
    """A place in memory that fails as it is asked to."""

    protocol = "faulty"
    store: dict = {}  # noqa: RUF012
    puts: list = []  # noqa: RUF012
    gate = threading.Event()
    problem: Any = staticmethod(lambda name: None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("faulty://"))

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        self.gate.wait(30)
        error = self.problem(rpath)
        if error:  # as a connection that is cut: half of it is there
            content = Path(lpath).read_bytes()
            self.pipe_file(rpath, content[: len(content) // 2])
            raise error
        self.puts.append(rpath.rpartition("/")[2])
        super().put_file(lpath, rpath, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        if path.endswith((".json", ".jsonl")) and (error := self.problem(path)):
            raise error
        super().pipe_file(path, value, **kwargs)

    def ls(self, path: str, **kwargs: Any) -> list:
        if error := self.problem("ls"):
            raise error
        return super().ls(path, **kwargs)


@pytest.fixture
def faulty() -> type[Faulty]:
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.store.clear()
    Faulty.puts.clear()
    Faulty.gate.set()
    Faulty.problem = staticmethod(lambda name: None)
    return Faulty


class Copied:
    """A run's directory whose checkpoints are copied, without the run."""

    def __init__(self, place: Path, url: str, keep_last: int = 2, ranks: int = 1) -> None:
        self.run_dir, self.ranks = place, ranks
        place.mkdir(exist_ok=True)
        config = load([*JOB, f"checkpoint.mirror={url}"], Sources()).config
        (place / "config.yaml").write_text(to_yaml(config))
        (place / "metrics.jsonl").write_text("{}\n")
        self.start()
        self.mirror = Mirror(url, place)
        self.writer = checkpoint.Writer(place / "checkpoints", keep_last=keep_last, config=to_data(config))
        self.mirror.follow(self.writer)
        self.replay = SequenceReplay(SPEC, num_envs=2, size=80, sequence=4)

    def start(self) -> None:
        with open(self.run_dir / "starts.jsonl", "a") as file:
            file.write(json.dumps({"command": uuid.uuid4().hex}) + "\n")

    def save(self, step: int) -> None:
        """Write a checkpoint after 15 more time steps of the replay; a chunk has 10."""
        for _ in range(15):
            self.replay.add({k: torch.randint(0, 256, (2, *shape)).to(d) for k, (shape, d) in SPEC.items()})
        for rank in reversed(range(self.ranks)):
            root = place_of(self.run_dir, rank) / "checkpoints"
            writer = checkpoint.Writer(root, keep_last=9) if rank else self.writer
            parts = {
                "agent": {"x": torch.full((50,), step + 0.5 + rank)},
                "memory": self.replay.state_dict(history=False),
            }
            writer.save(step, parts, {"ranks": self.ranks}, self.replay, wait=True)
            self.replay.chunks = [] if self.ranks > 1 else self.replay.chunks

    def copied(self, step: int) -> None:
        self.save(step)
        self.mirror._due.join()


@pytest.fixture
def begin(faulty: type[Faulty], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Copied]]:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 36 * 10)
    begun = []

    def call(name: str = "run", url: str = f"file://{tmp_path}/bucket/here", **options: int) -> Copied:
        begun.append(Copied(tmp_path / name, url, **options))
        return begun[-1]

    yield call
    faulty.gate.set()
    for run in begun:
        run.mirror.wait(30)
    for thread in threading.enumerate():  # also one that was given up
        if thread.name == "mirror":
            thread.join(30)


def download(run: Copied, name: str = "empty") -> Path:
    """Return a new directory with what an empty machine gets."""
    place = run.run_dir.with_name(name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    Mirror(run.mirror.url, place).download()
    return place


def digests(run_dir: Path) -> set[str]:
    """SHA-256 of all parts and chunks of the checkpoints in a run directory."""
    found = set()
    for path in run_dir.rglob("manifest.json"):
        manifest = json.loads(path.read_text())
        found |= {entry["sha256"] for entry in manifest["files"].values()} | {entry[4] for entry in manifest["chunks"]}
    return found


def assert_same_checkpoint(one: Path, other: Path, step: int) -> None:
    (meta, parts), (theirs, others) = (checkpoint.load(d / f"checkpoints/step_{step:012d}") for d in (one, other))
    assert meta == theirs
    assert torch.equal(parts["agent"]["x"], others["agent"]["x"])
    rings = [SequenceReplay(SPEC, num_envs=2, size=80, sequence=4) for _ in range(2)]
    for ring, found in zip(rings, (parts, others), strict=True):
        ring.load_state_dict(found["memory"])
        found["history"].copy_to(ring)
    assert all(torch.equal(rings[0].storage[key], rings[1].storage[key]) for key in SPEC)


# --- copies ---------------------------------------------------------------------------------------------------------


def test_an_empty_machine_gets_what_the_run_directory_held(begin: Callable[..., Copied], tmp_path: Path) -> None:
    """And nothing lies in the bucket that these checkpoints do not need."""
    run = begin()
    for step in range(10, 60, 10):
        run.copied(step)
    bucket, empty = tmp_path / "bucket/here", download(run)
    assert run.mirror._steps() == checkpoint_steps(run.run_dir) == [40, 50]
    assert {file.name for file in (bucket / "files").iterdir()} == digests(run.run_dir)
    for step in (40, 50):
        assert_same_checkpoint(run.run_dir, empty, step)
    for name in ("starts.jsonl", "config.yaml", "metrics.jsonl"):
        assert (empty / name).read_bytes() == (run.run_dir / name).read_bytes()
    assert sorted(f.name for f in empty.rglob("*.pt")) == sorted(f.name for f in run.run_dir.rglob("*.pt"))


@pytest.fixture
def late(begin: Callable[..., Copied]) -> Copied:
    """A run that has a checkpoint from before its mirror."""
    run = begin()
    written, run.writer.written = run.writer.written, lambda: None
    run.save(10)
    run.writer.written = written
    return run


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_files_that_no_run_wrote_are_kept(
    name: str, begin: Callable[..., Copied], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "bucket/here"
    place.mkdir(parents=True)
    (place / name).write_text("own")
    run = begin()
    run.save(10)
    run.mirror.wait(30)
    assert {path.name: path.read_text() for path in place.iterdir()} == {name: "own"}
    assert name in capsys.readouterr().err


def test_a_checkpoint_from_before_the_mirror_is_copied_too(late: Copied) -> None:
    late.copied(20)
    assert late.mirror._steps() == checkpoint_steps(late.run_dir) == [10, 20]
    assert_same_checkpoint(late.run_dir, download(late), 10)


@pytest.mark.parametrize(
    ("when", "saved", "copied"),
    [
        ((20, "after"), (), [20]),  # the directory of the run is lost
        ((10, "before"), (), [20, 10]),
        ((20, "after"), (30,), [20, 30]),  # a newer one comes first
        ((10, "before"), (30, 40), [20, 10, 40]),  # and the one that was copied is removed here
    ],
)
def test_what_happens_meanwhile_costs_no_newer_checkpoint(
    when: tuple[int, str], saved: tuple[int, ...], copied: list[int], late: Copied, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, begun = late.mirror._copy_one, []

    def interrupt(now: tuple[int, str]) -> None:
        if now == when and begun[-1:] == [when[0]] and len(begun) <= 2:
            for step in saved:
                late.save(step)
            if not saved:
                shutil.rmtree(late.run_dir / "checkpoints")

    def note(step: int) -> None:
        begun.append(step)
        interrupt((step, "before"))
        copy(step)
        interrupt((step, "after"))

    monkeypatch.setattr(late.mirror, "_copy_one", note)
    late.copied(20)
    assert begun[: len(copied)] == copied
    assert late.mirror._steps() == (checkpoint_steps(late.run_dir) or [20])
    assert checkpoint_steps(download(late))[-1] == max(20, *saved, 0)


def test_the_end_does_not_complain_of_an_older_checkpoint(
    late: Copied, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, begun, go = late.mirror._copy_one, threading.Event(), threading.Event()

    def wait(step: int) -> None:
        if step == 10:
            begun.set()
            go.wait(30)
        copy(step)

    monkeypatch.setattr(late.mirror, "_copy_one", wait)
    late.save(20)
    begun.wait(30)
    late.mirror.wait(0.1)
    assert capsys.readouterr().err == ""
    go.set()


def test_a_finished_run_whose_last_copy_was_stopped_is_copied(late: Copied) -> None:
    late.mirror.catch_up()
    assert late.mirror._steps() == checkpoint_steps(late.run_dir)
    assert_same_checkpoint(late.run_dir, download(late), checkpoint_steps(late.run_dir)[-1])


def test_each_file_is_copied_once(begin: Callable[..., Copied], faulty: type[Faulty]) -> None:
    run = begin(url="faulty://bucket/x", keep_last=9)
    for step in (10, 20, 30, 40):
        run.copied(step)
    assert sorted(faulty.puts) == sorted(digests(run.run_dir))


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_000000000010.json"])
def test_in_a_directory_a_file_is_replaced_and_never_overwritten(
    name: str, begin: Callable[..., Copied], tmp_path: Path
) -> None:
    """A reader of the file that was there, such as an empty machine's after a kill, finds all of it."""
    run = begin()
    run.copied(10)
    with open(tmp_path / "bucket/here" / name) as there:
        before = Path(there.name).read_text()
        (run.run_dir / "metrics.jsonl").write_text("{}\n{}\n")
        run.copied(10 if "step" in name else 20)
        assert there.read() == before


def test_files_of_others_stay(begin: Callable[..., Copied], tmp_path: Path) -> None:
    theirs = [tmp_path / "bucket/here" / name for name in ("thesis.tex", "files/photo.jpg", "checkpoints/model.json")]
    for file in theirs:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    run = begin()
    run.copied(10)
    assert checkpoint_steps(download(run)) == [10]
    assert all(file.exists() for file in theirs)


def test_a_checkpoint_of_the_same_step_replaces_the_copy(begin: Callable[..., Copied], tmp_path: Path) -> None:
    run = begin(keep_last=1)
    run.copied(10)
    run.copied(10)
    assert_same_checkpoint(run.run_dir, download(run), 10)
    assert len(list((tmp_path / "bucket/here/files").iterdir())) == len(digests(run.run_dir))


def test_the_shares_of_all_ranks_are_copied(begin: Callable[..., Copied]) -> None:
    run = begin(ranks=3)
    run.copied(20)
    empty = download(run)
    for rank in range(3):
        assert_same_checkpoint(place_of(run.run_dir, rank), place_of(empty, rank), 20)


def test_a_checkpoint_that_waits_gives_way_and_one_that_is_copied_is_kept(
    begin: Callable[..., Copied], faulty: type[Faulty]
) -> None:
    """Saving never waits for a slow place, and a place slower than checkpoints come still gets them."""
    faulty.gate.clear()
    run = begin(url="faulty://bucket/x", keep_last=1)
    run.save(10)
    while run.writer.pinned is None:
        time.sleep(0.01)
    for step in (20, 30, 40):
        run.save(step)
    assert checkpoint_steps(run.run_dir) == [10, 40]
    faulty.gate.set()
    run.copied(50)
    assert checkpoint_steps(run.run_dir) == run.mirror._steps() == [50]


def test_the_end_waits_for_the_newest_checkpoint_within_a_bound(
    begin: Callable[..., Copied], faulty: type[Faulty], capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(url="faulty://bucket/x")
    faulty.gate.clear()
    run.save(10)
    threading.Timer(0.5, faulty.gate.set).start()
    run.mirror.wait(30)
    assert run.mirror._steps() == [10]
    assert capsys.readouterr().err == ""
    run.mirror.follow(run.writer)
    faulty.gate.clear()
    run.save(20)
    run.mirror.wait(0.1)
    run.mirror.wait(30)  # it has given up
    assert run.mirror._steps() == [10]
    assert capsys.readouterr().err.count("\n") == 1


# --- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["files/", "checkpoints/", "starts.jsonl", "ls"])
@pytest.mark.parametrize("error", [PermissionError("refused"), ConnectionResetError("cut"), RuntimeError("strange")])
def test_a_failure_is_told_once_and_the_next_checkpoint_is_tried(
    error: Exception, where: str, begin: Callable[..., Copied], faulty: type[Faulty], capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(url="faulty://bucket/x")
    run.copied(10)
    faulty.problem = staticmethod(lambda name: error if where in name else None)
    run.copied(20)
    run.copied(30)
    (line,) = capsys.readouterr().err.splitlines()
    assert str(error) in line
    assert run.mirror.url in line
    faulty.problem = staticmethod(lambda name: None)
    assert run.mirror._steps() == [10], "what was whole stays until a newer one is"
    empty = download(run)
    assert checkpoint_steps(empty) == [10], "half of one is none"
    checkpoint.load_latest(empty / "checkpoints")
    run.copied(40)
    assert run.mirror._steps() == checkpoint_steps(run.run_dir) == [30, 40]
    assert_same_checkpoint(run.run_dir, download(run), 40)


def test_a_connection_that_is_cut_during_a_download_is_taken_up_again(
    begin: Callable[..., Copied], faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(url="faulty://bucket/x")
    run.copied(10)
    run.copied(20)
    empty, got, get = run.run_dir.with_name("empty"), [], faulty.get_file
    empty.mkdir()

    def cut(self: Faulty, rpath: str, lpath: str, **kwargs: Any) -> None:
        got.append(rpath)
        get(self, rpath, lpath, **kwargs)
        if len(got) in (2, 5):
            Path(lpath).write_bytes(Path(lpath).read_bytes()[:9])
            raise ConnectionResetError("cut")

    monkeypatch.setattr(faulty, "get_file", cut)
    for _ in range(2):
        with pytest.raises(CommandError, match="cut"):
            Mirror(run.mirror.url, empty).download()
        assert 20 not in checkpoint_steps(empty), "the newest comes last"
    Mirror(run.mirror.url, empty).download()
    assert checkpoint_steps(empty) == [10, 20]
    assert_same_checkpoint(run.run_dir, empty, 20)


@pytest.mark.parametrize("name", ["config.yaml", "starts.jsonl", "metrics.jsonl"])
def test_a_first_download_that_was_cut_is_taken_up_again(
    name: str, begin: Callable[..., Copied], faulty: type[Faulty], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(url="faulty://bucket/x")
    run.copied(10)
    place = run.run_dir.with_name("empty")
    job = [*JOB, f"checkpoint.mirror={run.mirror.url}", "resume=auto", f"run_dir={place}"]
    place.mkdir()
    read = faulty.cat_file

    def cut(self: Faulty, path: str, **kwargs: Any) -> bytes:
        if path.endswith(name):
            raise ConnectionResetError("cut")
        return read(self, path, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(faulty, "cat_file", cut)
        with pytest.raises(CommandError, match="cut"):
            Mirror(run.mirror.url, place).download()
    assert plan(job).resume


def test_a_download_that_was_stopped_is_completed_before_the_run_goes_on(begin: Callable[..., Copied]) -> None:
    """Otherwise the next copy would remove there what is not here, such as the best checkpoint."""
    run = begin()
    run.copied(10)
    run.copied(20)
    for step in (10, 20):
        empty = download(run)
        shutil.rmtree(empty / f"checkpoints/step_{step:012d}")
        Mirror(run.mirror.url, empty).download()
        assert checkpoint_steps(empty) == ([20] if step == 10 else [10, 20]), "the newest tells that all is there"


@pytest.mark.parametrize("fault", ["shorter", "altered", "missing"])
def test_a_damaged_copy_is_not_taken_for_a_whole_one(fault: str, begin: Callable[..., Copied], tmp_path: Path) -> None:
    run, bucket = begin(), tmp_path / "bucket/here"
    run.copied(10)
    before = digests(run.run_dir)
    run.copied(20)
    file = bucket / "files" / min(digests(run.run_dir) - before)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content[:-1] if fault == "shorter" else content)
    if fault == "missing":
        file.unlink()
    with pytest.raises(CommandError, match=run.mirror.url):
        download(run)
    assert checkpoint_steps(tmp_path / "empty") == [10]
    (bucket / "checkpoints/step_000000000020.json").unlink()
    assert_same_checkpoint(run.run_dir, download(run), 10)


@pytest.mark.parametrize("content", ["", "{", "[]", "[1]", '["{}"]', "[" * 100_000])
def test_a_list_of_something_else_is_refused(content: str, begin: Callable[..., Copied], tmp_path: Path) -> None:
    run = begin()
    run.copied(10)
    (tmp_path / "bucket/here/checkpoints/step_000000000010.json").write_text(content)
    with pytest.raises(CommandError):
        Mirror(run.mirror.url, tmp_path / "empty").newest_config()


def test_a_strangers_list_leads_nowhere(begin: Callable[..., Copied], tmp_path: Path) -> None:
    """It is forged with its digest; nothing but what it names by a true SHA-256 is kept."""
    run = begin()
    run.copied(10)
    (tmp_path / "secret").write_text("do-not-tell")
    file = tmp_path / "bucket/here/checkpoints/step_000000000010.json"
    (text,) = json.loads(file.read_text())
    for entry in ({"../agent.pt": {"bytes": 1, "sha256": "0"}}, {"a.pt": {"bytes": 11, "sha256": "../../../secret"}}):
        manifest = json.loads(text) | {"files": entry}
        manifest.pop("sha256")
        manifest["sha256"] = checkpoint._digest_of(manifest)
        file.write_text(json.dumps([json.dumps(manifest)]))
        with pytest.raises(CommandError):
            download(run)
        assert not [path for path in (tmp_path / "empty").rglob("*") if path.suffix == ".pt"]


# --- whose place it is ----------------------------------------------------------------------------------------------


def contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_the_copies_of_another_run_are_left_alone(
    begin: Callable[..., Copied], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = begin(), begin("other")
    run.copied(10)
    before = contents(tmp_path / "bucket")
    other.copied(10)
    other.copied(20)
    assert capsys.readouterr().err.count("another run") == 1
    with pytest.raises(CommandError, match="another run"):
        other.mirror.download()
    assert contents(tmp_path / "bucket") == before
    run.start()  # resumed, it goes on
    run.copied(20)
    assert run.mirror._steps() == [10, 20]
    before = contents(run.run_dir)
    run.mirror.download()
    assert contents(run.run_dir) == before


def test_a_place_without_a_checkpoint_belongs_to_no_run(begin: Callable[..., Copied], tmp_path: Path) -> None:
    run, other = begin(), begin("other")
    run.copied(10)
    (tmp_path / f"bucket/here/checkpoints/step_{10:012d}.json").unlink()
    other.copied(20)
    assert_same_checkpoint(other.run_dir, download(other), 20)


def test_of_two_runs_that_begin_there_at_once_one_is_told_so(
    begin: Callable[..., Copied],
    faulty: type[Faulty],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    late, early = begin(url="faulty://here"), begin("other", url="faulty://here")

    def overtake(name: str) -> None:
        monkeypatch.setattr(faulty, "problem", staticmethod(lambda name: None))
        early.copied(10)

    monkeypatch.setattr(faulty, "problem", staticmethod(lambda name: overtake(name) if "/files/" in name else None))
    late.copied(10)
    assert capsys.readouterr().err.count("another run") == 1
    assert_same_checkpoint(early.run_dir, download(early), 10)


def test_a_machine_that_was_left_behind_does_not_mix_with_the_one_that_went_on(
    begin: Callable[..., Copied], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = begin()
    left.copied(10)
    download(left, "next")
    went_on = begin("next")
    went_on.copied(20)
    left.copied(20)
    assert capsys.readouterr().err.count("went on elsewhere") == 1
    with pytest.raises(CommandError, match="went on elsewhere"):
        left.mirror.download()
    assert_same_checkpoint(went_on.run_dir, download(left), 20)


# --- command lines --------------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(begin: Callable[..., Copied], tmp_path: Path) -> str:
    """The URL of a place that holds a checkpoint of ``JOB``, whose run directory is gone."""
    run = begin()
    run.copied(10)
    shutil.rmtree(run.run_dir)
    return run.mirror.url


def test_auto_finds_it(bucket: str, sheeplike: Callable[..., Any], refused: Callable[..., Any], tmp_path: Path) -> None:
    mirror = f"checkpoint.mirror={bucket}"
    (plan,) = sheeplike(*JOB, mirror, "resume=auto").runs
    assert plan.resume
    assert not plan.run_dir.exists(), "nothing is copied yet"
    assert refused(*JOB, mirror).names(mirror, "resume=auto")
    assert refused(*JOB, mirror, "resume=auto", "env.num_envs=2").names(mirror, "env.num_envs")
    assert refused(*JOB, mirror, "resume=auto", "seed=1").names(mirror, "seed")
    (plan,) = sheeplike(*JOB, "checkpoint.mirror=memory://nothing/here", "resume=auto").runs
    assert not plan.resume
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").touch()
    assert refused(*JOB, mirror, "resume=auto", f"run_dir={tmp_path}/full").names(f"run_dir={tmp_path}/full")


@pytest.mark.parametrize(
    "url",
    ["s4://bucket/x", "bucket/x", "s3://", "simplecache::file:///x", "dropbox://no/package", "file://a/x", "dir:///x"],
)
def test_an_impossible_place_is_refused(url: str, refused: Callable[..., Any]) -> None:
    assert refused(*JOB, f"checkpoint.mirror={url}").names(f"checkpoint.mirror={url}", "s3://bucket/prefix")


def test_a_missing_package_is_named_with_its_pip_line(refused: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert refused(*JOB, "checkpoint.mirror=gs://bucket/x").names(
        "checkpoint.mirror=gs://bucket/x", "pip install gcsfs"
    )


def test_an_installed_package_says_what_is_missing(refused: Callable[..., Any], monkeypatch: Any) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("no account")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    assert refused(*JOB, "checkpoint.mirror=az://box/x").names("checkpoint.mirror=az://box/x", "no account")


def test_a_place_in_the_run_itself_is_refused(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/run", f"file://{tmp_path}/run/copies"):
        with pytest.raises(InvalidOption):
            Mirror(url, tmp_path / "run")


@pytest.mark.parametrize(
    "url", ["s3://KEY:do-not-tell@bucket/x", "s3://KEY:do-not/tell@bucket/x", "https://bucket/x?sig=do-not-tell"]
)
def test_a_password_is_not_taken_and_not_shown(url: str, refused: Callable[..., Any]) -> None:
    line = refused(*JOB, f"checkpoint.mirror={url}")
    assert line.names("checkpoint.mirror", "AWS_SECRET_ACCESS_KEY")
    assert "tell" not in line


def test_a_directory_does_not_choose_where_to_write(
    begin: Callable[..., Copied], sheeplike: Callable[..., Any], refused: Callable[..., Any]
) -> None:
    run = begin()
    run.copied(10)
    mirror = f"checkpoint.mirror={run.mirror.url}"
    assert refused(f"resume={run.run_dir}").names(mirror, "checkpoint.mirror=null")
    (plan,) = sheeplike(f"resume={run.run_dir}", mirror).runs
    assert plan.config.checkpoint.mirror == run.mirror.url
    (plan,) = sheeplike(f"resume={run.run_dir}", "checkpoint.mirror=null").runs
    assert plan.config.checkpoint.mirror is None


def test_a_place_that_cannot_be_reached(refused: Callable[..., Any], faulty: type[Faulty]) -> None:
    """A checkpoint may be there that was not found, so none begins anew."""
    faulty.problem = staticmethod(lambda name: ConnectionError("no such host"))
    for arguments in ([], ["resume=auto"]):
        assert refused(*JOB, "checkpoint.mirror=faulty://bucket/x", *arguments).names("no such host")


# --- whole runs -----------------------------------------------------------------------------------------------------

SMALL = "dry_run=true logger=[] video_every=null eval.every=null log_every=2 total_steps=96 checkpoint.every=32"
WHOLE = (*JOB, "env.renderer=none", "agent.observations=[state]", *SMALL.split())


def as_text(values: Any) -> str:
    """Every number, times apart; NaN equals NaN."""

    def timeless(found: dict[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in found.items() if k not in ("seconds", "pauses") and not k.startswith("time/")}

    text = json.dumps(values, default=lambda value: value.tolist())
    return json.dumps(json.loads(text, object_hook=timeless), sort_keys=True)


def assert_same_end(*run_dirs: Path) -> None:
    one, other = (checkpoint.load_latest(run_dir / "checkpoints")[1] for run_dir in run_dirs)
    for name in ("agent", "envs", "loop", "memory", "rng"):
        assert as_text(one[name]) == as_text(other[name]), name
    rows, others = ((run_dir / "metrics.jsonl").read_text().splitlines() for run_dir in run_dirs)
    assert as_text(list(map(json.loads, rows))) == as_text(list(map(json.loads, others)))


@pytest.mark.slow
def test_an_empty_machine_goes_on_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin = (*WHOLE, f"run_dir={tmp_path}/run", f"checkpoint.mirror=memory://{uuid.uuid4().hex}/x", "resume=auto")
    run = sheeplike.init(*begin)
    run.iterate(64)
    run.iterate(80)
    run.close()  # as if it were killed: its last steps are lost
    assert checkpoint_steps(run.run_dir) == [32, 64]
    shutil.rmtree(run.run_dir)
    with sheeplike.init(*begin) as again:
        assert again.policy_steps == 64
        again.iterate()
    assert f"mirror         {again.config.checkpoint.mirror}" in capsys.readouterr().out
    assert len((again.run_dir / "starts.jsonl").read_text().splitlines()) == 2
    with sheeplike.init(*WHOLE, f"run_dir={tmp_path}/straight") as straight:
        straight.iterate()
    assert_same_end(run.run_dir, straight.run_dir)
    url = again.config.checkpoint.mirror
    fsspec.filesystem("memory").rm(url, recursive=True)
    main(["train", *begin])  # it is finished
    assert Mirror(url, tmp_path / "none")._steps() == checkpoint_steps(run.run_dir)


# --- S3 -------------------------------------------------------------------------------------------------------------


class Server:
    """A process that speaks S3, and forgets everything when it stops."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(self.port)], **quiet)
        while self.process.poll() is None:
            with suppress(OSError), urllib.request.urlopen(self.url, timeout=5):
                return
            time.sleep(0.1)
        pytest.fail("the server does not answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Wire(socketserver.ThreadingTCPServer):
    """A connection to the server that fails as it is asked to, at each request that begins with ``method``."""

    daemon_threads = True
    method, fault = b"PUT", ""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), self.pass_on)
        self.target, self.url = port, f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def pass_on(self, client: socket.socket, *_: Any) -> None:
        with socket.create_connection(("127.0.0.1", self.target)) as server, suppress(OSError):
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            while data := client.recv(65536):
                failing = self.fault and data.startswith(self.method)
                if failing and self.fault == "refuse":
                    client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                    break
                server.sendall(data[:-10] if failing and self.method == b"PUT" else data)
                if failing:
                    break

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)
                if self.fault and self.method == b"GET":
                    client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    server = Server()
    secrets = {"ACCESS_KEY_ID": "AKIDONOTTELL", "SECRET_ACCESS_KEY": "do-not-tell", "DEFAULT_REGION": "us-east-1"}
    for name, value in (secrets | {"ENDPOINT_URL": server.url, "MAX_ATTEMPTS": "1"}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)  # it waits between them
    server.start()
    server.files = s3fs.S3FileSystem(skip_instance_cache=True)
    server.files.mkdir("bucket")
    yield server
    server.stop()


@pytest.fixture
def wire(s3: Server) -> Iterator[Wire]:
    with Wire(s3.port) as found:
        yield found
        found.shutdown()


def test_s3(s3: Server, begin: Callable[..., Copied], capsys: pytest.CaptureFixture[str]) -> None:
    """Copies, removals, a server that goes away in between, and a bucket that does not exist."""
    run = begin(url="s3://bucket/some/where")
    for step in (10, 20, 30):
        run.copied(step)
    assert run.mirror._steps() == checkpoint_steps(run.run_dir) == [20, 30]
    assert run.mirror._sizes("files").keys() == digests(run.run_dir)
    assert_same_checkpoint(run.run_dir, download(run), 30)
    s3.stop()
    run.copied(40)
    run.copied(50)
    assert capsys.readouterr().err.count("\n") == 1
    s3.start()
    run.copied(60)
    assert capsys.readouterr().err == "", "the bucket is missing: told before, as a failure"
    s3.files.invalidate_cache()
    s3.files.mkdir("bucket")
    run.copied(70)
    assert run.mirror._steps() == checkpoint_steps(run.run_dir) == [60, 70]


@pytest.mark.parametrize("fault", ["refuse", "cut"])
def test_half_a_checkpoint_in_s3_is_none(
    fault: str, wire: Wire, begin: Callable[..., Copied], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write is refused or cut in its midst after the first files of a checkpoint; so is a transfer back."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", wire.url)
    run = begin(url="s3://bucket/some/where")
    run.copied(10)
    there, put = set(run.mirror._sizes("files")), run.mirror._fs.put_file

    def put_one(*arguments: str) -> None:
        put(*arguments)
        wire.fault = fault

    with monkeypatch.context() as later:
        later.setattr(run.mirror._fs, "put_file", put_one)
        run.copied(20)
    wire.fault = ""
    new = set(run.mirror._sizes("files")) - there
    assert len(new) == 1 < len(digests(run.run_dir) - there)
    assert run.mirror._steps() == [10]
    assert checkpoint_steps(download(run)) == [10]
    run.copied(30)
    assert run.mirror._steps() == checkpoint_steps(run.run_dir) == [20, 30]
    wire.method, wire.fault = b"GET", fault
    with pytest.raises(CommandError):
        download(run)
    assert checkpoint_steps(run.run_dir.with_name("empty")) == []
    wire.fault = ""
    assert_same_checkpoint(run.run_dir, download(run), 30)


@pytest.mark.slow
def test_a_killed_run_goes_on_from_s3(s3: Server, tmp_path: Path) -> None:
    """Bit for bit, and its credentials are in no file and in no output."""
    command = [sys.executable, "-m", "sheeplike", *WHOLE, "total_steps=1000", "checkpoint.every=100", "log_every=100"]
    mirrored = [*command, f"run_dir={tmp_path}/run", "checkpoint.mirror=s3://bucket/runs/x", "resume=auto"]
    pipes, output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}, []

    def newest() -> int:
        s3.files.invalidate_cache()
        return max((int(path[-17:-5]) for path in s3.files.glob("bucket/runs/x/checkpoints/*")), default=0)

    process = subprocess.Popen(mirrored, **pipes)
    while not newest():
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    output.append(process.communicate()[0])
    shutil.rmtree(tmp_path / "run")
    killed = newest()
    process = subprocess.Popen(mirrored, **pipes)
    for line in process.stdout:
        output.append(line)
        if line.startswith("  simulation "):
            process.send_signal(signal.SIGTERM)
            break
    output.append(process.communicate(timeout=200)[0])
    assert process.returncode == 75, output
    assert f"continued from policy step {killed:,}" in "".join(output)
    assert newest() == max(checkpoint_steps(tmp_path / "run")) < 1_000, "the end waits for the last copy"
    shutil.rmtree(tmp_path / "run")
    for line in (mirrored, [*command, f"run_dir={tmp_path}/straight"]):
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        output += [done.stdout, done.stderr]
        assert done.returncode == 0, output
    assert_same_end(tmp_path / "run", tmp_path / "straight")
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [part for part in (*written, "".join(output).encode()) if b"do-not-tell" in part or b"AKIDO" in part]
