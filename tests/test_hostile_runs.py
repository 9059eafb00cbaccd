"""Directories that an attacker has prepared, and every command that reads or writes one."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import yaml

from sheeplike import checkpoint
from sheeplike.__main__ import list_commands, main
from sheeplike.agents.ppo import PPO
from sheeplike.config.compose import load, load_saved
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import to_data
from sheeplike.config.sources import Sources
from sheeplike.run.layout import FILES
from sheeplike.run.run_dir import claim
from sheeplike.trained.exported import DEMOS

pytestmark = pytest.mark.usefixtures("workplace")

JOB = ("exp=ppo", "env=cartpole_balance", "profile=cpu", "dry_run=true", "total_steps=100")
GYM = ("exp=ppo", "env=gym", "env.id=CartPole-v1", "profile=cpu", "compile=off", "env.num_envs=4", "eval.every=null")
GYM += ("agent.rollout_length=8", "agent.minibatches=2", "agent.epochs=2", "log_every=8")
# Each command at work in the directory "mine". A new one belongs here: it goes through all that follows.
COMMANDS = {
    "train": ("train", "resume=mine", "total_steps=200"),
    "eval": ("eval", "run=mine", "episodes=2", "video=false"),
    "export": ("export", "run=mine"),
    "compare": ("compare", "mine"),
    "bench": ("bench", *GYM, "out=mine", "parts=[envs]", "seconds=0.1"),
    "doctor": ("doctor", "disk", "out=mine/doctor.json"),
    "analyze": ("analyze", "run=mine", "episodes=4"),
    "dream": ("dream", "run=mine", "port=0"),
    "record": ("record", "run=mine", "to=recorded", "episodes=2"),
    "publish": ("publish", "run=mine", "to=published"),
}
# Of what a run has written, and that come to an end with it.
READERS = [name for name in COMMANDS if name not in ("analyze", "bench", "doctor", "dream")]
AUTO = (*JOB, "run_dir=mine", "resume=auto")  # train once more: it composes a configuration and looks into run_dir
# What a command reads or writes there, and names at which an attacker could have put something.
NAMES = {
    "train": (".lock", "config.yaml", "metrics.jsonl", "checkpoints", "replay", "nonfinite_batch.pt", "eval/x.json"),
    "eval": ("config.yaml", "checkpoints", "checkpoints/step_000000000064/agent.pt", "eval", "eval/x/result.json"),
    "export": ("config.yaml", "checkpoints/step_000000000064/manifest.json", "export", "export/step_000000000064"),
    "compare": ("metrics.jsonl", "compare", "compare/eval_return_mean_by_steps.md", "compare/x"),
    "bench": ("bench.md", "bench.json"),
    "doctor": ("doctor.json",),
    "analyze": ("config.yaml", "checkpoints", "analyze", "analyze/x/analysis.json"),
    "dream": ("config.yaml", "checkpoints", "dream", "dream/x.npz"),
    "record": ("config.yaml", "checkpoints", "checkpoints/step_000000000064/agent.pt"),
    "publish": ("config.yaml", "checkpoints/step_000000000064/agent.pt", "eval", "eval/x/result.json"),
}
KINDS = ("link", "pipe", "directory")  # a pipe stands for sockets and devices
ESCAPES = "\x1b]0;pwn\x07\x1b[31m\u202ered\x9b2J"


def test_no_command_escapes() -> None:
    assert set(COMMANDS) == set(NAMES) == set(list_commands())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared") / "mine"
    config = load([*JOB, "run_dir=mine"], Sources()).config
    with claim(place, config):
        pass
    parts = {part: {"x": torch.zeros(3)} for part in ("agent", "envs", "loop", "memory", "monitor", "rng")}
    with checkpoint.Writer(place / "checkpoints", keep_last=9, config=to_data(config)) as writer:
        writer.save(64, parts, {}, finite=(), wait=True)
    row = '{"step": %d, "gradient_steps": 0, "seconds": %d, "eval/return_mean": 1.0}\n'
    (place / "metrics.jsonl").write_text("".join(row % (step, step) for step in (1, 2)))
    return place


@pytest.fixture
def mine(prepared: Path) -> Path:
    """A run with one checkpoint and one row."""
    return shutil.copytree(prepared, Path("mine"))


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Run a command line to its end; a process that waits for a pipe is woken up, which is a failure."""

    def hung(*_: object) -> None:
        pytest.fail("the command hangs")

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        signal.alarm(120)
        status = 0
        try:
            main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        finally:
            signal.alarm(0)
        return (status, *capfd.readouterr())

    before = signal.signal(signal.SIGALRM, hung)
    yield run
    signal.signal(signal.SIGALRM, before)


def plant(path: Path, kind: str) -> None:
    """Something that is neither a file nor a directory, in place of what is there; a link leads to ``victim``."""
    victim = Path("victim")
    if path.is_dir():
        path.rename(victim)
    elif path.exists():
        victim.write_bytes(path.read_bytes())
        path.unlink()
    else:
        victim.write_text("precious")
        path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        path.symlink_to(victim.resolve())
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()


def content(place: Path) -> dict[str, bytes]:
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path): path.read_bytes() for path in files}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("command", "name"), [(command, name) for command in NAMES for name in NAMES[command]])
def test_what_is_no_file_and_no_directory_is_refused(
    mine: Path, call: Callable[..., tuple[int, str, str]], command: str, name: str, kind: str
) -> None:
    """Before anything is written, in one line, and without waiting for a writer."""
    if kind == "directory" and name not in (*FILES, "bench.md", "bench.json"):
        pytest.skip("it may be one")
    plant(mine / name, kind)
    before = content(Path("victim")), content(mine)
    lines = [COMMANDS[command], *([AUTO] if command == "train" and name != "config.yaml" else [])]
    for line in lines:
        status, _, error = call(*line)
        assert status == 2, error
        assert sum(text.startswith("sheeplike: ") for text in error.splitlines()) == 1, error
        assert str(name).split("/")[0] in error
        assert "Traceback" not in error
        assert (content(Path("victim")), content(mine)) == before


@pytest.mark.parametrize("name", ["dream", "demonstrations"])
def test_a_link_in_an_export_leads_no_episode_elsewhere(call: Callable[..., tuple[int, str, str]], name: str) -> None:
    shutil.copytree(DEMOS / "franka_pick", "mine")
    Path("victim").mkdir()
    Path("mine", name).symlink_to(Path("victim").resolve())
    status, output, error = call(*COMMANDS["dream"])
    assert status == 2
    assert f"mine/{name}" in error
    assert "loading torch" not in output


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", ".lock"])
def test_links_within_a_run(mine: Path, call: Callable[..., tuple[int, str, str]], name: str) -> None:
    """A file that is written must be one: that shows before anything heavy."""
    (mine / name).rename(mine / "kept")
    (mine / name).symlink_to((mine / "kept").resolve())
    status, output, error = call(*COMMANDS["train"])
    assert status == 2
    assert str(name) in error
    assert "loading torch" not in output


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lock"])
def test_files_that_grow_in_place_have_one_name(
    trained: Path, call: Callable[..., tuple[int, str, str]], name: str
) -> None:
    """Others are replaced as a whole; what is appended to would change under its other name too."""
    shutil.copytree(trained, "mine")
    victim = Path("victim")
    victim.write_bytes(Path("mine", name).read_bytes() if name == "metrics.jsonl" else b"precious")
    Path("mine", name).unlink(missing_ok=True)
    os.link(victim, Path("mine", name))
    before = victim.read_bytes()
    status, _, error = call("train", "resume=mine", "total_steps=200")
    assert (status, victim.read_bytes()) == (2, before)
    assert str(name) in error.replace(str(Path.cwd()) + "/", "")
    assert len([line for line in error.splitlines() if line.startswith("sheeplike: ")]) == 1


def test_digits_of_other_scripts_make_no_checkpoint(mine: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    Path("mine/checkpoints/step_" + "0" * 9 + "\N{ARABIC-INDIC DIGIT NINE}" * 3).mkdir()
    assert "best, last" in call("eval", "run=mine", "checkpoint=128")[2]


def test_a_file_with_the_name_of_a_checkpoint_is_none(mine: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    (mine / "checkpoints/step_000000000128").touch()
    assert "best, last" in call("eval", "run=mine", "checkpoint=128")[2]
    shutil.rmtree(mine / "checkpoints/step_000000000064")
    for command in ("eval", "export", "train"):
        assert "=mine" in call(*COMMANDS[command])[2]


@pytest.mark.parametrize("command", READERS)
def test_names_in_what_is_otherwise_in_order(
    trained: Path, call: Callable[..., tuple[int, str, str]], command: str
) -> None:
    """A recipe's name, the versions in a manifest and a metric: a command comes to its end, or far."""
    shutil.copytree(trained, "mine")
    Path("mine/latest").symlink_to("checkpoints/step_000000000100")
    config = yaml.safe_load(Path("mine/config.yaml").read_text()) | {"exp": ESCAPES}
    Path("mine/config.yaml").write_text(yaml.safe_dump(config))
    (manifest,) = Path("mine/checkpoints").glob("*/manifest.json")
    data = json.loads(manifest.read_text())
    del data["sha256"]
    data["config"]["exp"], data["versions"]["torch"] = ESCAPES, ESCAPES
    data["sha256"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps(data))
    rows = [json.loads(line) for line in Path("mine/metrics.jsonl").read_text().splitlines()]
    Path("mine/metrics.jsonl").write_text("".join(json.dumps(row | {f"m{ESCAPES}": 1.0}) + "\n" for row in rows))
    if command == "publish":
        call(*COMMANDS["eval"])
    arguments = (*COMMANDS[command], *((f"metric=m{ESCAPES}",) if command == "compare" else ()))
    status, output, error = call(*arguments)
    assert status == 0, error
    assert not any(sign in output + error for sign in "\x1b\x07\x9b\u202e")
    assert "\\x1b]0;pwn" in output + error or command in ("eval", "export", "record", "publish")


@pytest.mark.parametrize("text", [ESCAPES, "x\ntouch PWNED; return 0 # $\\frac{$ a|b \ud83d"])
@pytest.mark.parametrize("command", READERS)
def test_names_from_files_are_shown_and_nothing_more(
    mine: Path, call: Callable[..., tuple[int, str, str]], command: str, text: str
) -> None:
    """No character of theirs reaches a terminal that would obey it, and no line of theirs a file."""
    config = yaml.safe_load((mine / "config.yaml").read_text())
    config |= {"exp": text, "dry_run": False, text: 1, "env": config["env"] | {"name": f"e{text}", "id": text}}
    (mine / "config.yaml").write_text(yaml.safe_dump(config))
    with (mine / "metrics.jsonl").open("a") as file:
        file.write(
            f'{{"step": 3, "gradient_steps": 0, "seconds": 3, "eval/return_mean": 1, "eval/{hex(len(text))}": 1}}\n'
        )
    status, output, error = call(*COMMANDS[command])
    assert status == (0 if command == "compare" else 2), error
    for written in (output, error, *(file.read_text() for file in Path("mine/compare").glob("*.[mc]*"))):
        assert not any(sign in written for sign in "\x1b\x07\x9b\u202e")
        assert not any(line.startswith("touch PWNED") for line in written.splitlines())
    assert "Traceback" not in error


def nested(depth: int) -> str:
    return "x: " + "[" * depth + "]" * depth + "\n"


MONSTROUS = {
    "deep": nested(5000),
    "tag": "!!python/object/apply:os.system [touch PWNED]",
    "large": "x" * 2**21,
}
SLOW = ("x: [" + "[]," * 20_000 + "]", "x: " + "1:" * 30_000 + "1", "x: " + "1:" * 400 + "1.5")
REFUSED = ("a: &a [1]\nb: *a\n", "\0", "[", "- 1", *SLOW)


@pytest.mark.parametrize("text", MONSTROUS.values(), ids=MONSTROUS)
@pytest.mark.parametrize("command", READERS)
def test_monstrous_configurations_are_refused(
    mine: Path, call: Callable[..., tuple[int, str, str]], command: str, text: str
) -> None:
    (mine / "config.yaml").write_text(text)
    lines = [COMMANDS[command], *([AUTO] if command == "train" else [])]
    for line in lines:
        status, _, error = call(*line)
        assert status == 2, error
        assert error.count("\n") == 1, error
        assert "config.yaml" in error
    assert not Path("PWNED").exists()


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_other_configurations_that_no_run_has_saved(
    mine: Path, call: Callable[..., tuple[int, str, str]], text: str
) -> None:
    test_monstrous_configurations_are_refused(mine, call, "eval", text)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with a real checkpoint."""
    place = tmp_path_factory.mktemp("trained") / "mine"
    main([*GYM, "total_steps=100", f"run_dir={place}"])
    return place


@pytest.mark.parametrize("part", ["agent", "loop", "envs", "monitor", "rng", "memory"])
def test_a_whole_checkpoint_that_holds_something_else(
    trained: Path, call: Callable[..., tuple[int, str, str]], part: str
) -> None:
    config = load_saved(trained / "config.yaml").config
    shutil.copytree(trained, "mine")
    root = Path("mine/checkpoints")
    meta, parts = checkpoint.load_latest(root)
    whole = parts[part]
    nothing = [{}] * (part != "memory")  # an agent may have seen nothing
    for value in (*nothing, [1], {name: "x" for name in whole}, {name: {} for name in whole}):
        shutil.rmtree(root)
        with checkpoint.Writer(root, keep_last=9, config=to_data(config)) as writer:
            writer.save(meta["step"], parts | {part: value}, {}, finite=(), wait=True)
        status, _, error = call("train", "resume=mine", "total_steps=200")
        assert status == 2, (value, error)
        assert "Traceback" not in error
        assert "config.yaml" in error


def test_an_edited_configuration_is_noticed(trained: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    shutil.copytree(trained, "mine")
    file = Path("mine/config.yaml")
    text = file.read_text()
    file.write_text(text.replace("discount: 0.99", "discount: 0.1"))
    status, _, error = call("train", "resume=mine", "total_steps=200")
    assert status == 2
    assert "agent.discount 0.99 -> 0.1" in error
    for command in ("eval", "export", "record"):
        status, _, error = call(*COMMANDS[command])
        assert status == 0, error
        assert "agent.discount 0.99 -> 0.1\n" in error
    file.write_text(text.replace("log_every: 8", "log_every: 16"))
    status, output, _ = call("train", "resume=mine", "total_steps=120")
    assert status == 0
    assert "changed: total_steps 100 -> 120, log_every 8 -> 16" in output


@pytest.mark.parametrize("command", [*COMMANDS])
def test_a_full_disk_is_one_line(
    trained: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    shutil.copytree(trained, "mine")
    before = content(Path("mine"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    arguments = (*COMMANDS[command], *(("metric=rollout/return_mean",) if command == "compare" else ()))
    status, _, error = call(*arguments)
    assert status in (2, 74), error
    lines = [line for line in error.splitlines() if "No space left on device" in line]
    assert len(lines) == 1, error
    assert "Traceback" not in error
    assert content(Path("mine")) == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("command", ["eval", "export"])
def test_output_that_is_lost_is_no_success(
    trained: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    shutil.copytree(trained, "mine")
    monkeypatch.setattr("sys.stdout", open("/dev/full", "w"))  # noqa: SIM115, which cannot be closed: it holds text
    status, _, error = call(*COMMANDS[command])
    assert status == 74
    assert error == "sheeplike: standard output: No space left on device; SHEEPLIKE_DEBUG=1 shows where\n"


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "train"])
def test_whether_files_can_be_written_is_found_out_first(
    trained: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    shutil.copytree(trained, "mine")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", read_only)  # a name may be there and no room for what is in it
    arguments = (*COMMANDS[command], *(("metric=rollout/return_mean",) if command == "compare" else ()))
    assert "Read-only" in refused(*arguments)


class Exits(gymnasium.Env):
    """Ends the program, which its user must not take for the end of the run."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None) -> None:
        raise SystemExit(0)


def test_a_program_that_something_ends_has_not_succeeded(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Exits-v0", entry_point=Exits, max_episode_steps=9)
    monkeypatch.setitem(gymnasium.registry, "Exits-v0", spec)
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    (Path("mine/config.yaml")).write_text(
        to_yaml(load(["exp=ppo", "env=gym", "env.id=Exits-v0", "profile=cpu", "run_dir=mine"], Sources()).config)
    )
    before = content(Path("mine"))
    job = ("exp=ppo", "env=gym", "env.id=Exits-v0", "profile=cpu", "run_dir=mine", "resume=auto")
    status, _, error = call(*job)
    assert status == 70, error
    assert "sys.exit(0)" in error
    assert content(Path("mine")) == before


class Fails(gymnasium.Env):
    """Fails for good soon after the loop has begun."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def __init__(self, render_mode: str | None = None) -> None: ...

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict]:
        return np.zeros(2, np.float32), {}

    def step(self, action: object) -> tuple[np.ndarray, float, bool, bool, dict]:
        Fails.steps += 1
        if Fails.steps > 60:
            raise RuntimeError("for good \x1b[31m\n")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_a_start_that_fails_leaves_its_directory_free_and_the_files_of_others_alone(
    call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metrics of an attempt without a checkpoint are kept."""
    spec = gymnasium.envs.registration.EnvSpec("Fails-v0", entry_point=Fails, max_episode_steps=99)
    monkeypatch.setitem(gymnasium.registry, "Fails-v0", spec)
    job = (*GYM[:1], "env=gym", "env.id=Fails-v0", *GYM[3:7], "agent.rollout_length=64")
    job += ("env.options.max_restarts=0", "agent.observations=[state]")
    place = Path("logs/mine")
    with claim(place, load([*job, f"run_dir={place}"], Sources()).config):
        pass
    (place / "faults").mkdir()
    for name in ("notes.txt", "faults/step_000000000042.pt", "metrics.jsonl"):
        (place / name).write_text("precious\n")
    for _ in range(2):
        monkeypatch.setattr(Fails, "steps", 0)
        status, _, error = call(*job, f"run_dir={place}", "resume=auto")
        assert status == 70
        assert "RuntimeError: for good \\x1b[31m" in error.splitlines()[-1]
    for name in ("notes.txt", "faults/step_000000000042.pt", "metrics_before_1.jsonl"):
        assert (place / name).read_text() == "precious\n"


WEIGHT = "policy_head.0.weight"
FORGED = {
    "due": ("loop", ("counters", "due"), 10**15),
    "due-": ("loop", ("counters", "due"), -1),
    "policy_steps": ("loop", ("counters", "policy_steps"), float("nan")),
    "numpy": ("rng", ("numpy", 2), 2**31 - 1),
    "obs": ("loop", ("step", "obs"), {}),
    "shape": ("loop", ("step", "obs", "pixels/render"), torch.zeros(3, 4)),
    "reward": ("loop", ("step", "reward"), torch.zeros(9)),
    "lr": ("agent", ("optimizer", "param_groups", 0, "lr"), "x"),
    "moment": ("agent", ("optimizer", "state", 0, "exp_avg"), torch.zeros(1)),
    "no moment": ("agent", ("optimizer", "state", 0), {"step": torch.zeros(())}),
    "shift": ("agent", ("shift",), torch.zeros(3, 9)),
    "steps": ("memory", ("rollout", "steps"), 400),
    "updates": ("memory", ("learning", "updates"), 3),
    "seconds": ("loop", ("counters", "seconds"), 10**400),
    "large": ("monitor", ("latest",), {"rollout/return_mean": 10**400}),
    "latest": ("monitor", ("latest",), {"rollout/return_mean": ESCAPES}),
    "groups": ("monitor", ("metrics", "groups"), [(["loss"], torch.zeros(3), torch.zeros(3))]),
    "sums": ("monitor", ("episodes", "sums"), torch.zeros(4)),
    "generation": ("envs", ("generation",), torch.tensor(-7)),
    "generator": ("agent", ("generator",), torch.zeros(3)),
    "nan weights": ("agent", ("modules", WEIGHT), lambda weight: weight * math.nan),
    "inf weights": ("agent", ("modules", WEIGHT), lambda weight: torch.full(weight.shape, 1e300, dtype=torch.float64)),
    "nan moment": ("agent", ("optimizer", "state", 0, "exp_avg"), lambda moment: moment * math.nan),
    "negative moment": ("agent", ("optimizer", "state", 0, "exp_avg_sq"), lambda moment: -1 - moment),
    "negative step": ("agent", ("optimizer", "state", 0, "step"), torch.tensor(-3.0)),
}


@pytest.mark.parametrize(("part", "keys", "value"), FORGED.values(), ids=FORGED)
def test_a_whole_checkpoint_with_one_wrong_value(
    trained: Path, call: Callable[..., tuple[int, str, str]], part: str, keys: tuple, value: object
) -> None:
    config = load_saved(trained / "config.yaml").config
    shutil.copytree(trained, "mine")
    meta, parts = checkpoint.load_latest("mine/checkpoints")
    place = parts[part]
    for key in keys[:-1]:
        place = place[key]
    assert isinstance(place, list) or keys[-1] in place
    place[keys[-1]] = value(place[keys[-1]]) if callable(value) else value
    shutil.rmtree("mine/checkpoints")
    with checkpoint.Writer("mine/checkpoints", keep_last=9, config=to_data(config)) as writer:
        writer.save(meta["step"], parts, {}, finite=(), wait=True)
    Path("mine/.lock").unlink()  # says who had it last
    before = content(Path("mine"))
    status, output, error = call("train", "resume=mine", "total_steps=200")
    assert status == 2, error
    Path("mine/.lock").unlink()
    assert content(Path("mine")) == before
    assert "config.yaml" in error
    assert "Traceback" not in error
    assert "\x1b" not in output + error


@pytest.mark.parametrize("command", ["eval", "export"])
def test_weights_that_are_not_finite_do_not_act(
    trained: Path, call: Callable[..., tuple[int, str, str]], command: str
) -> None:
    config = load_saved(trained / "config.yaml").config
    shutil.copytree(trained, "mine")
    meta, parts = checkpoint.load_latest("mine/checkpoints")
    parts["agent"]["modules"][WEIGHT][0] = math.inf
    spaces = {"spaces": meta["spaces"]}
    with checkpoint.Writer("mine/checkpoints", keep_last=9, config=to_data(config)) as writer:
        writer.save(meta["step"], parts, spaces, finite=(), wait=True)
    before = content(Path("mine"))
    status, _, error = call(*COMMANDS[command])
    assert status == 2, error
    assert f"'{WEIGHT}'" in error
    assert content(Path("mine")) == before


@pytest.mark.parametrize("command", [COMMANDS["train"], AUTO])
def test_a_directory_in_place_of_steps_is_refused(
    mine: Path, call: Callable[..., tuple[int, str, str]], command: tuple[str, ...]
) -> None:
    """Nothing could be saved beside it."""
    (mine / "replay/000000000682-000000001022.pt").mkdir(parents=True)
    status, output, error = call(*command)
    assert status == 2
    assert "replay/000000000682-000000001022.pt" in error
    assert "loading torch" not in output


def test_what_goes_wrong_in_a_resumed_run_is_not_the_checkpoints_fault(
    trained: Path, call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a mistake in the agent")

    shutil.copytree(trained, "mine")
    monkeypatch.setattr(PPO, "add", fail)
    with pytest.raises(ValueError, match="mistake"):
        call("train", "resume=mine", "total_steps=200")


class Wanders(Fails):
    """Goes to another working directory."""

    def step(self, action: object) -> tuple[np.ndarray, float, bool, bool, dict]:
        os.chdir("..")
        return np.zeros(2, np.float32), 0.0, False, False, {}


def test_a_run_stays_where_it_began(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Wanders-v0", entry_point=Wanders, max_episode_steps=99)
    monkeypatch.setitem(gymnasium.registry, "Wanders-v0", spec)
    job = [*GYM[:1], "env=gym", "env.id=Wanders-v0", *GYM[3:], "agent.observations=[state]", "total_steps=64"]
    main([*job, "run_dir=a/mine", "checkpoint.every=32"])
    assert {path.name for path in (workplace / "a/mine").iterdir()} > {"config.yaml", "metrics.jsonl", "checkpoints"}
    assert len(checkpoint.list_checkpoints(workplace / "a/mine/checkpoints")) == 2
    assert not list(workplace.parent.glob("**/a/mine"))[1:], "it is there once"
