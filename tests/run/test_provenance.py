"""Provenance that a run records of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sheeplike
from sheeplike.run.storage import commit

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C"]


def test_the_commit_and_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"], ["tag", "v1"]):
        subprocess.run([*GIT, tmp_path, *command], check=True)
    head = subprocess.run([*GIT, tmp_path, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    assert commit(tmp_path) == head.stdout.strip()
    (tmp_path / "file").write_text("new")
    subprocess.run([*GIT, tmp_path, "add", "file"], check=True)
    assert commit(tmp_path, dirty=True) == f"{head.stdout.strip()}-dirty"


def test_a_repository_around_the_working_directory_runs_nothing(tmp_path: Path) -> None:
    """A filter runs for files whose times differ from the index, and a hook when the index is written."""
    ran = tmp_path / "ran"
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / ".gitattributes").write_text("* filter=x\n")
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*GIT, repository, *command], check=True)
    subprocess.run([*GIT, repository, "config", "filter.x.clean", f"touch {ran}; cat"], check=True)
    hook = repository / ".git/hooks/post-index-change"
    hook.write_text(f"#!/bin/sh\ntouch {ran}\n")
    hook.chmod(0o755)
    os.utime(repository / ".gitattributes", (0, 0))
    assert len(commit(repository)) == 40
    assert not ran.exists()
    commit(repository, dirty=True)
    assert ran.exists(), "the test does not set the trap that it claims to"


def test_git_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit(Path(sheeplike.__file__).parents[1]) is None


def test_each_start_of_a_run_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "sheeplike", "agent.observations=[pixels/*]"])
    job = ["exp=ppo", "env=gym", "env.id=CartPole-v1", "env.options.frames=none", "agent.observations=[state]"]
    job += ["profile=cpu", "dry_run=true", f"run_dir={tmp_path / 'run'}", "total_steps=64"]
    for more in ([], ["resume=auto", "total_steps=96"]):
        with sheeplike.init(*job, *more) as run:
            run.iterate()
    first, second = map(json.loads, (tmp_path / "run/starts.jsonl").read_text().splitlines())
    assert first["command"] == "python -m sheeplike 'agent.observations=[pixels/*]'"
    assert first["versions"]["sheeplike"] == sheeplike.__version__
    assert first["time"] <= second["time"]
    assert first["id"] != second["id"]
    assert all(b"python -m sheeplike 'agent" in path.read_bytes() for path in (tmp_path / "run").glob("events*"))
