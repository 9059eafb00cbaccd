"""A run's directory is never overwritten, and is all that resuming needs."""

import errno
import os
from pathlib import Path

import pytest
import yaml

from sheeplike.options import CommandError
from sheeplike.run.run_dir import Plan, claim, lock
from sheeplike.run.snapshot import Saved
from sheeplike.run.storage import Storage

JOB = ("exp=dreamer_v3", "env=franka_pick")
DEFAULT = Path("logs/franka_pick/dreamer_v3/seed_0")


@pytest.fixture
def begun(sheeplike):
    """Begins a run as training does, and gives it a checkpoint; returns what the command line had asked for."""

    def call(*arguments: str, checkpoint: bool = True):
        (run,) = sheeplike(*arguments).runs
        claim(run.run_dir, run.config)
        if checkpoint:
            (run.run_dir / "checkpoints/step_000000000128").mkdir(parents=True, exist_ok=True)
        return run

    return call


def test_a_run_dir_in_use(begun, refused, monkeypatch):
    begun(*JOB)
    with monkeypatch.context() as patch:
        patch.setattr("sheeplike.host.gpu_problem", lambda: "there is none")
        line = refused(*JOB, "fabric.accelerator=cuda")
        assert "fabric.accelerator=cuda" in line, "what is wrong in itself comes first"
    line = refused(*JOB)
    assert f"run_dir={DEFAULT}" in line
    assert f"resume={DEFAULT}" in line
    assert line.endswith(f"nearest: run_dir={DEFAULT}_2\n")
    begun(*JOB, f"run_dir={DEFAULT}_2")
    assert refused(*JOB).endswith(f"nearest: run_dir={DEFAULT}_3\n")
    begun(*JOB, "seed=1")


def test_checkpoints_that_cannot_be_listed_are_some(begun, refused, monkeypatch):
    begun(*JOB)
    listdir = os.listdir

    def denied(path="."):
        if Path(path).name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", denied)
    for job in ((*JOB, "resume=auto"), (f"resume={DEFAULT}",)):
        assert refused(*job).names("checkpoints", os.strerror(errno.EACCES))


def test_a_run_without_a_checkpoint_cannot_be_resumed(begun, refused):
    begun(*JOB, checkpoint=False)
    assert f"resume={DEFAULT}" in refused(f"resume={DEFAULT}")


def test_a_directory_of_something_else(begun, refused, tmp_path):
    (tmp_path / "papers").mkdir()
    begun(*JOB, f"run_dir={tmp_path}/papers/empty_so_far")
    for more in ((), ("dry_run=true",), ("resume=auto",)):
        assert f"run_dir={tmp_path}/papers" in refused(*JOB, f"run_dir={tmp_path}/papers", *more)


def test_a_place_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "file").touch()
    line = refused(*JOB, f"run_dir={tmp_path}/file/run")
    assert f"run_dir={tmp_path}/file/run" in line
    assert "run_dir=/proc/run" in refused(*JOB, "run_dir=/proc/run")


def test_a_dry_run_replaces_only_a_dry_run(begun, refused):
    first = begun(*JOB, "dry_run=true")
    (first.run_dir / "metrics.jsonl").touch()
    again = begun(*JOB, "dry_run=true")
    assert again.run_dir == first.run_dir
    assert not (again.run_dir / "metrics.jsonl").exists()
    begun(*JOB)
    assert f"run_dir={DEFAULT}" in refused(*JOB, "dry_run=true", f"run_dir={DEFAULT}")


def test_two_runs_that_start_at_once(sheeplike):
    (first,) = sheeplike(*JOB).runs
    assert (first.run_dir, first.resume, DEFAULT.exists()) == (DEFAULT, False, False)
    DEFAULT.mkdir(parents=True)  # empty, it will do
    (second,) = sheeplike(*JOB).runs
    with claim(first.run_dir, first.config), pytest.raises(CommandError):
        claim(second.run_dir, second.config)


def test_resume_takes_the_saved_configuration(begun, sheeplike):
    begun(*JOB, "env.num_envs=3", "agent.size=12m", "seed=5", "run_dir=mine", "total_steps=9999")
    (run,) = sheeplike("resume=mine", "total_steps=20_000", "eval.every=null", "logger=[]").runs
    assert run.resume is True
    assert run.run_dir == Path("mine")
    config = run.config
    assert (config.env.num_envs, config.agent.size, config.seed) == (3, "12m", 5)
    assert (config.total_steps, config.eval.every, config.logger) == (20_000, None, ())
    Storage(Plan(config, run.run_dir)).update(config)
    assert sheeplike("train", "resume=mine").runs[0].config == config
    Path("mine").rename("there")
    (moved,) = sheeplike("resume=there/").runs
    assert (moved.run_dir, moved.config) == (Path("there"), config.replace(run_dir="there"))


def test_fewer_episodes_need_fewer_worlds(begun, sheeplike):
    run = begun(*JOB)
    (plan,) = sheeplike(f"resume={run.run_dir}", "eval.episodes=4").runs
    assert (run.config.eval.num_envs, plan.config.eval.num_envs) == (16, 4)


def test_what_it_would_go_on_with_is_shown(begun, sheeplike):
    begun(*JOB, "seed=5", "run_dir=mine")
    shown = sheeplike("resume=mine", "total_steps=20_000", "show=config")
    assert (shown.status, shown.runs) == (0, [])
    lines = {line.partition("  # ")[0]: line.partition("  # ")[2] for line in shown.output.splitlines()}
    assert (lines["seed: 5"], lines["total_steps: 20000"]) == ("config.yaml", "command line")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ("env.num_envs=4", "'env.num_envs=4'"),
        ("env=cartpole_balance", "'env=cartpole_balance'"),
        ("agent.size=1m", "'agent.size=1m'"),
        ("run_dir=other", "'run_dir=other'"),
        ("eval.evry=3", "nearest: eval.every"),
        ("log_evry=3", "nearest: log_every"),
        ("total_steps=3", "total_steps=3"),
        ("eval=3", "eval=3"),
        ("total_steps", "key=value"),
    ],
)
def test_what_cannot_change(begun, refused, change, part):
    begun(*JOB, "run_dir=mine")
    assert part in refused("resume=mine", change)


def test_no_such_run(begun, refused):
    begun(*JOB)
    line = refused(f"resume={str(DEFAULT).replace('seed_0', 'sed_0')}")
    assert "config.yaml" in line
    assert line.endswith(f"nearest: resume={DEFAULT}\n")


def test_a_directory_of_runs_is_none_but_holds_one(begun, refused):
    begun(*JOB, "seed=1")
    newest = begun(*JOB).run_dir / "config.yaml"
    later = newest.stat().st_mtime + 1
    os.utime(newest, (later, later))
    for place in ("logs", DEFAULT.parent.absolute()):
        assert refused(f"resume={place}").endswith(f"nearest: resume={DEFAULT}\n")
    begun(*JOB, "run_dir=elsewhere/seed_0")
    assert refused("resume=elsewhere").endswith("nearest: resume=elsewhere/seed_0\n")


def test_a_saved_configuration_is_data(begun, refused):
    """Hostile forms are in ``test_security.py``."""
    run = begun(*JOB, "run_dir=mine")
    file = run.run_dir / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    for change in ({"surprise": 1}, {"seed": "x"}):
        file.write_text(yaml.safe_dump(saved | change))
        assert "mine/config.yaml" in refused("resume=mine")
    file.write_text(yaml.safe_dump(saved | {"format": 0}))
    assert "format 1" in refused("resume=mine")
    file.write_text("[")
    assert "mine/config.yaml" in refused("resume=mine")
    file.write_text("[1]")
    assert "mine/config.yaml" in refused("resume=mine")


def test_resume_needs_the_same_kind_of_device(begun, refused):
    run = begun(*JOB, "run_dir=mine")
    file = run.run_dir / "config.yaml"
    file.write_text(file.read_text().replace("accelerator: cpu", "accelerator: cuda"))
    assert "cuda" in refused("resume=mine")


def test_auto_begins_a_run_and_goes_on_with_it(begun, sheeplike):
    (first,) = sheeplike(*JOB, "resume=auto", "run_dir=mine").runs
    assert (first.resume, first.run_dir) == (False, Path("mine"))
    begun(*JOB, "run_dir=mine")
    result = sheeplike(*JOB, "resume=auto", "run_dir=mine")
    assert (result.runs[0].resume, result.runs[0].config) == (True, first.config)
    assert "changed" not in result.output
    shown = sheeplike(*JOB, "resume=auto", "run_dir=mine", "show=config").output
    assert shown == sheeplike(*JOB, "run_dir=x", "show=config").output.replace("run_dir: x", "run_dir: mine")


def test_auto_takes_what_may_change(begun, sheeplike):
    begun(*JOB)
    (run,) = sheeplike(*JOB, "resume=auto", "total_steps=2_000_000", "checkpoint.every=null", "log_every=7").runs
    assert (run.config.total_steps, run.config.checkpoint.every, run.config.log_every) == (2_000_000, None, 7)
    (run,) = sheeplike(f"resume={DEFAULT}", "eval.every=null").runs
    assert run.config.eval.every is None


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_many_digits_is_one_line(refused, digits):
    assert "total_steps=1000" in refused(*JOB, f"total_steps=1{'0' * digits}")


@pytest.mark.parametrize("value", ["x" * 2**16, str(2**65), "[" * 25 + "]" * 25])
def test_what_could_not_be_resumed_does_not_begin(refused, value):
    job = ("exp=ppo", "env=gym", "env.id=CartPole-v1", f"env.options.arguments.x={value}")
    assert "config.yaml" in refused(*job)


def test_auto_refuses_another_run_and_names_what_differs(begun, refused):
    begun(*JOB)
    line = refused(
        *JOB, "resume=auto", "agent.batch_size=8", "env.num_envs=3", "total_steps=9999", f"run_dir={DEFAULT}"
    )
    assert line.names(f"run_dir={DEFAULT}", "agent.batch_size 16 -> 8")
    assert "-> 3" in line.partition("env.num_envs")[2]
    assert "max_skipped, total_steps, video_every, watchdog" in line, "and the seed may not"
    line = refused("exp=ppo", "env=franka_pick", "resume=auto", f"run_dir={DEFAULT}")
    assert "exp dreamer_v3 -> ppo" in line
    # As one of a series it would be a longer run than the others.
    assert "total_steps 50000 -> 9999" in refused(*JOB, "resume=auto", "total_steps=9999")


@pytest.mark.parametrize(
    ("loop", "total_steps", "finished"),
    [
        ({"counters": {"due": 0}}, 2000, True),
        ({"counters": {"due": 0}}, 2001, False),
        ({"counters": {"due": 1}}, 2000, False),  # updates are left to make
        ({"counters": {"due": 1}}, 1500, True),  # but none of a total that was passed long ago
        ({}, 2000, False),  # forged
    ],
)
def test_which_runs_have_nothing_left_to_do(sheeplike, loop, total_steps, finished):
    config = sheeplike(*JOB, f"total_steps={total_steps}").runs[0].config
    assert Saved(2000, {"loop": loop}, (), {}).is_finished(config) == finished


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_will_do(begun, sheeplike, monkeypatch, code):
    def unsupported(*arguments):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", unsupported)
    run = begun(*JOB)
    lock(run.run_dir).close()
    assert sheeplike(f"resume={run.run_dir}").runs[0].resume


def test_a_directory_is_one_process_s(begun):
    run = begun(*JOB)
    with lock(run.run_dir), pytest.raises(CommandError, match=f" {os.getpid()} "):
        lock(run.run_dir)
    lock(run.run_dir).close()


@pytest.mark.parametrize("resume", [(), ("resume=auto",)])
def test_a_directory_without_a_checkpoint_is_free(begun, sheeplike, resume):
    """Its metrics are kept, as is anything that no run writes."""
    begun(*JOB, checkpoint=False)
    (DEFAULT / "replay").mkdir()
    (DEFAULT / "notes.txt").touch()
    for count in (1, 2):
        (DEFAULT / "metrics.jsonl").write_text(f"{count}")
        (again,) = sheeplike(*JOB, *resume, "log_every=7").runs
        assert not again.resume
        with claim(again.run_dir, again.config):
            assert "log_every: 7" in (DEFAULT / "config.yaml").read_text()
        assert (DEFAULT / f"metrics_before_{count}.jsonl").read_text() == f"{count}"
    assert {path.name for path in DEFAULT.iterdir()} == {
        *("config.yaml", ".lock", "notes.txt", "replay", "metrics_before_1.jsonl", "metrics_before_2.jsonl")
    }


def test_a_kill_while_the_configuration_is_written_leaves_the_directory_free(sheeplike):
    DEFAULT.mkdir(parents=True)
    (DEFAULT / ".config.yaml.4711").touch()
    assert not sheeplike(*JOB, "resume=auto").runs[0].resume


def test_a_directory_without_a_checkpoint_is_not_free_for_another_run(begun, refused):
    begun(*JOB, checkpoint=False)
    assert "agent.batch_size 16 -> 8" in refused(*JOB, f"run_dir={DEFAULT}", "agent.batch_size=8")


@pytest.mark.parametrize("resume", [(), ("resume=auto",)])
def test_an_export_is_no_place_for_a_run(begun, refused, resume):
    begun(*JOB, checkpoint=False)
    (DEFAULT / "model.json").touch()
    assert f"run_dir={DEFAULT}" in refused(*JOB, *resume)


def test_a_directory_that_came_to_a_checkpoint_meanwhile_is_not_cleared(begun, sheeplike):
    begun(*JOB, checkpoint=False)
    (again,) = sheeplike(*JOB, "resume=auto").runs
    (DEFAULT / "checkpoints/step_000000000128").mkdir(parents=True)
    with pytest.raises(CommandError):
        claim(again.run_dir, again.config)
    assert (DEFAULT / "checkpoints/step_000000000128").is_dir()
