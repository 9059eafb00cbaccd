"""Data from elsewhere is refused or kept as text, and nothing in it is run, followed or resolved."""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import yaml

from sheeplike import checkpoint
from sheeplike.__main__ import main
from sheeplike.checkpoint import Corrupt
from sheeplike.config.compose import load
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.run.run_dir import claim

JOB = ("exp=dreamer_v3", "env=cartpole_balance", "profile=cpu", "dry_run=true")
USES = ("eval run=mine checkpoint=64", "export run=mine checkpoint=64", "train resume=mine")
PARTS = ("agent", "envs", "loop")


pytestmark = pytest.mark.usefixtures("workplace")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared") / "mine"
    config = load([*JOB, "run_dir=mine"], Sources()).config
    with claim(place, config):
        pass
    parts = {part: {"x": torch.zeros(3)} for part in PARTS}
    with checkpoint.Writer(place / "checkpoints", keep_last=9, config=to_data(config)) as writer:
        writer.save(64, parts, {}, finite=(), wait=True)
    return place


@pytest.fixture
def run_dir(prepared: Path) -> Path:
    """The directory ``mine`` of a run with one checkpoint."""
    return shutil.copytree(prepared, Path("mine"))


# Checkpoints


class Bomb:
    """Runs a command of the shell when it is unpickled."""

    def __init__(self, fired: Path) -> None:
        self.command = f"touch {fired}"

    def __reduce__(self):
        return (os.system, (self.command,))


def forge(directory: Path, part: str, content: bytes) -> None:
    """Replace a part's file and make the manifest agree, as an attacker would."""
    (directory / part).write_bytes(content)
    files = json.loads((directory / "manifest.json").read_text())["files"]
    described = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(directory, files=files | {part: described})


def rewrite(directory: Path, **changed: object) -> None:
    manifest = json.loads((directory / "manifest.json").read_text()) | changed
    del manifest["sha256"]
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest | {"sha256": digest}))


def archived(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("form", [pickle.dumps, archived], ids=["pickle", "torch.save"])
@pytest.mark.parametrize(("command", "part"), [*((use, "agent") for use in USES), (USES[-1], "loop")])
def test_a_checkpoint_runs_nothing(run_dir, tmp_path, monkeypatch, refusal, command, part, form):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # does not reach a load that says what it wants
    fired = tmp_path / "fired"
    pickle.loads(pickle.dumps(Bomb(fired)))
    assert fired.exists(), "the bomb is a dud"
    fired.unlink()
    forge(run_dir / "checkpoints/step_000000000064", f"{part}.pt", form({"modules": Bomb(fired)}))
    assert refusal(command).names(f"{part}.pt", "weights_only")
    assert not fired.exists()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", archived({"x": 1})[:-9], b"\x80\x02."], ids=range(4))
@pytest.mark.parametrize("command", USES)
def test_a_checkpoint_of_something_else_is_one_line(run_dir, refusal, command, content):
    forge(run_dir / "checkpoints/step_000000000064", "agent.pt", content)
    assert "agent.pt: " in refusal(command)


def test_no_other_kinds_of_objects_are_let_through():
    """The libraries that a run imports add to what ``weights_only`` takes; nothing but torch's own kinds of tensors."""
    importlib.import_module("sheeplike.run.experiment")
    assert {one.__module__.partition(".")[0] for one in torch.serialization.get_safe_globals()} <= {"torch"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with checkpoint.Writer(tmp_path / "root", keep_last=9) as writer:
        writer.save(1, {"agent": {"x": torch.arange(9)}}, {"score": 1.0}, finite=(), wait=True)
    return tmp_path / "root/step_000000000001"


def problem(path: Path) -> str:
    with pytest.raises(Corrupt) as caught:
        checkpoint.load(path)
    return str(caught.value)


def test_links_in_a_checkpoint_are_not_followed(saved, tmp_path):
    for name in ("agent.pt", "manifest.json"):
        file = saved / name
        file.rename(tmp_path / name)
        file.symlink_to(tmp_path / name)
        assert str(name) in problem(saved)
        assert checkpoint.best(saved.parent) == (saved if name == "agent.pt" else None)
        file.unlink()
        (tmp_path / name).rename(file)
    assert checkpoint.load(saved)[0]["step"] == 1


@pytest.mark.parametrize("name", ["agent.pt", "manifest.json"])
def test_what_is_no_file_does_not_keep_anybody_waiting(saved, name):
    (saved / name).unlink()
    os.mkfifo(saved / name)
    assert str(name) in problem(saved)
    (saved / name).unlink()
    (saved / name).mkdir()
    assert str(name) in problem(saved)


def test_a_manifest_of_a_gigabyte_is_not_read(saved):
    with (saved / "manifest.json").open("r+b") as file:
        file.truncate(2**30)
    assert "manifest.json" in problem(saved)


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"agent.pt": {"bytes": 10**15, "sha256": ""}}},
        {"files": ["agent.pt"]},
        {"step": "../../x"},
        {"step": -1},
        {"step": True},
        {"meta": [1]},
        {"versions": None},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_none_says(saved, changed):
    rewrite(saved, **changed)
    assert str(saved) in problem(saved)


def test_what_a_checkpoint_says_of_itself_cannot_pass_for_what_it_is(saved):
    rewrite(saved, meta={"step": "../../x", "versions": 5, "score": 10**400})
    assert checkpoint.load(saved)[0]["step"] == 1
    assert checkpoint.best(saved.parent) is None


def test_deep_nesting_is_no_manifest(saved):
    (saved / "manifest.json").write_text("[" * 100_000)
    assert "manifest" in problem(saved)


def test_an_archive_that_grows_when_it_is_read_is_refused(saved):
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO((saved / "agent.pt").read_bytes())) as plain,
        zipfile.ZipFile(buffer, "w") as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry.filename), compress_type=zipfile.ZIP_DEFLATED)
    forge(saved, "agent.pt", buffer.getvalue())
    assert "agent.pt" in problem(saved)


# Configurations in the directory of a run

# What is written for `exp` and below everything else, and what the refusal says of it.
HOSTILE = {
    "object": ("!!python/object/apply:os.system ['touch {fired}']", "", "object/apply:os.system'"),
    "new object": ("!!python/object/new:os.system ['touch {fired}']", "", "object/new:os.system'"),
    "module": ("!!python/name:os.system", "", "python/name:os.system'"),
    "path": ("!!python/object/apply:pathlib.Path [x]", "", "apply:pathlib.Path'"),
    "target": ("x", "_target_: os.system", "unknown key '_target_'"),
    "target of a section": ("x", "eval: {{every: 8, _target_: os.system}}", "unknown key 'eval._target_'"),
    "target of the task": ("x", "env: {{name: cartpole_balance, _target_: os.system}}", "unknown key 'env._target_'"),
    "environment": ("${{oc.env:SECRET}}", "", "the interpolation '${{oc.env:SECRET}}'"),
    "environment, escaped": ('"\\x24{{oc.env:SECRET}}"', "", "the interpolation '${{oc.env:SECRET}}'"),
    "environment, as a name": ("x", "${{oc.env:SECRET}}: 1", "the interpolation"),
    "environment, in a comment's place": ("x", "? ${{oc.env:SECRET}}\n: 1", "the interpolation"),
    "create": ("${{oc.create:${{oc.env:SECRET}}}}", "", "the interpolation"),
    "another key": ("${{seed}}", "", "the interpolation"),
    "hydra": ("${{hydra:runtime.cwd}}", "", "the interpolation"),
    "defaults": ("x", "defaults: [/exp: ppo]", "unknown key 'defaults'"),
    "hydra section": ("x", "hydra: {{searchpath: [file:///tmp]}}", "unknown key 'hydra'"),
    "references": ("x", "a: &a [x, x]\nb: [*a, *a]", "the reference 'a'"),
    "depth": ("[" * 3000, "", "more than 20 sections in each other"),
    "no text": ("\x00", "", "special characters are not allowed"),
}


@pytest.mark.parametrize("command", [*USES, "train resume=mine show=config"])
@pytest.mark.parametrize(("value", "more", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_configuration_is_data(run_dir, tmp_path, refusal, command, value, more, reason):
    fired, file = tmp_path / "fired", run_dir / "config.yaml"
    names = {"exp", more.partition(":")[0]}
    kept = re.sub(rf"^(?:{'|'.join(map(re.escape, names))}):.*\n(?: .*\n)*", "", file.read_text(), flags=re.MULTILINE)
    file.write_text(f"exp: {value.format(fired=fired)}\n{more.format()}\n{kept}")
    error = refusal(command)
    assert "mine/config.yaml" in error
    assert reason.format() in error
    assert not fired.exists()


def test_the_configuration_that_was_made_hostile_is_valid(run_dir, capsys):
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("exp: dreamer_v3", "exp: x"))
    main(["resume=mine", "show=config"])
    assert "exp: x  # config.yaml" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("option", ["{_target_: os.system}", "'${oc.env:SECRET}'", "[1]"])
def test_nor_are_the_options_of_a_task_anything_else(run_dir, refusal, option):
    data = yaml.safe_load((run_dir / "config.yaml").read_text())
    for name in ("episode_length", "_target_"):
        data["env"]["options"] = {name: yaml.safe_load(option)}
        (run_dir / "config.yaml").write_text(yaml.safe_dump(data))
        assert "mine/config.yaml" in refusal("export run=mine")


def test_a_configuration_that_is_no_file_or_too_large(run_dir, tmp_path, refusal):
    file = run_dir / "config.yaml"
    text = file.read_text()
    file.write_text(text + "#" * 2**20)
    assert refusal(USES[0]).names("mine/config.yaml", "65,536")
    file.unlink()
    (run_dir / "other").write_text(text)
    file.symlink_to("other")
    assert "mine/config.yaml" in refusal(USES[0])


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints", "eval", "export", ".lock", "tensorboard/x"])
def test_a_link_out_of_a_run_is_refused_before_anything_is_written(run_dir, tmp_path, refusal, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("precious")
    path = run_dir / name
    path.parent.mkdir(exist_ok=True)
    if name == "checkpoints":
        path.rename(outside / "checkpoints")
        path.symlink_to(outside / "checkpoints")
    else:
        path.unlink(missing_ok=True)
        path.symlink_to(outside / "file")
    before = sorted(outside.rglob("*"))
    for command in USES:
        error = refusal(command)
        assert f"mine/{name}" in error
    assert sorted(outside.rglob("*")) == before
    assert (outside / "file").read_text() == "precious"


def test_a_link_within_a_run_and_to_a_run_will_do(run_dir, capsys):
    (run_dir / "latest").symlink_to("checkpoints/step_000000000064")
    Path("link").symlink_to("mine")
    main(["resume=link", "show=config"])
    assert "exp: dreamer_v3  # config.yaml" in capsys.readouterr().out.splitlines()


def test_text_of_a_user_that_looks_like_an_interpolation_is_never_resolved_later(capsys):
    config = load([*JOB, "run_dir='\\${oc.env:SECRET}'"], Sources()).config
    assert "do-not-tell" not in to_yaml(config)
