"""Runs of two ranks: one directory, decisions together, resumes, faults."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sheeplike
from sheeplike import checkpoint, host
from sheeplike import envs as environments
from sheeplike.config.compose import load
from sheeplike.config.saved import to_yaml
from sheeplike.config.schema import Config
from sheeplike.config.sources import Sources
from sheeplike.files import list_checkpoints, step_of
from sheeplike.options import CommandError
from sheeplike.ranks import Ranks
from sheeplike.run import snapshot
from sheeplike.run.build import check_alike
from sheeplike.run.layout import place_of

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("KILLS", "50"))
LIMIT = 300  # seconds after which a run hangs
STARTED: list[Run] = []
COMMON = [
    "env=cartpole_balance",
    "profile=cpu",
    "compile=off",
    "env.num_envs=4",
    "eval.num_envs=4",
    "eval.episodes=4",
    "eval.every=1000",
    "eval.video=false",
    "video_every=null",
    "log_every=200",
    "checkpoint.every=400",
    "logger=[]",
    "fabric.accelerator=cpu",
    "fabric.devices=2",
]
AGENTS = {
    "ppo": [
        "exp=ppo",
        "env.renderer=none",
        "agent.observations=[privileged_state]",
        "agent.rollout_length=16",
        "agent.minibatches=4",
        "agent.epochs=2",
    ],
    "dreamer_v3": [
        "exp=dreamer_v3",
        "agent.targets=[privileged_state]",
        "agent.probes=[privileged_state]",
        "agent.size=1m",
        "agent.batch_size=4",
        "agent.batch_length=16",
        "agent.replay_size=1600",
        "agent.replay_ratio=0.125",
        "agent.imagination_length=5",
    ],
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """Directory of a run; processes that a failed test has left are killed."""
    yield tmp_path / "run"
    while STARTED:
        STARTED.pop().kill()


FAILS = """
import sys
from sheeplike import terminal
from sheeplike.__main__ import main
from sheeplike.run.recorder import Recorder

log = Recorder.log

def fail(self, state):
    if state.policy_steps > 400 and not terminal.rank:
        raise ValueError("the first rank fails")
    log(self, state)

Recorder.log = fail
main(sys.argv[2:])
"""


class Run:
    """A run of several processes, of which :attr:`pids` are the ranks in their order."""

    def __init__(self, *arguments: str, program: list[str] | None = None, **environment: str) -> None:
        command = [*(program or [sys.executable, "-m"]), "sheeplike", *arguments]
        surroundings = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen(
            command,
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output: list[str] = []
        STARTED.append(self)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def read_until(self, part: str) -> None:
        for line in self.process.stdout:
            self.output.append(line)
            if part in line:
                return
        raise AssertionError("".join(self.output))

    @property
    def pids(self) -> list[int]:
        ours = []
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid and b"\0sheeplike" in (place / "cmdline").read_bytes():
                    ours.append(int(place.name))
        return [self.process.pid, *sorted(ours)]

    def end(self, limit: float = LIMIT) -> int:
        """Wait until all ranks have ended; return the status of the first."""
        try:
            self.output.append(self.process.communicate(timeout=limit)[0])
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the run hangs: {''.join(self.output)}") from None
        return self.process.returncode


def rows(run_dir: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "seconds"} for row in found]


def newest_whole(run_dir: Path, ranks: int) -> int | None:
    """Return the newest step of which every rank has written its share of the same save."""
    for path in reversed(list_checkpoints(run_dir / "checkpoints")):
        try:
            places = [place_of(run_dir, rank) / "checkpoints" / path.name for rank in range(ranks)]
            if len({checkpoint.load(place)[0]["save"] for place in places}) == 1:
                return step_of(path)
        except checkpoint.Corrupt:
            continue
    return None


# --- numbers of all ranks together ------------------------------------------------------------------------------------


def composed(*overrides: str) -> Config:
    return load(["exp=dreamer_v3", "env=cartpole_balance", "profile=cpu", *overrides], Sources()).config


def test_numbers_are_divided() -> None:
    config = composed("fabric.devices=2", "fabric.num_nodes=2", "env.num_envs=32", "agent.batch_size=16")
    own = config.whole().share()
    assert config.ranks == 4
    assert (own.env.num_envs, own.agent.batch_size) == (8, 4)
    assert own.agent.replay_size == config.agent.replay_size // 4
    assert (own.eval.episodes, own.eval.num_envs) == (config.eval.episodes // 4, config.eval.num_envs // 4)
    assert (own.total_steps, own.agent.replay_ratio) == (config.total_steps, config.agent.replay_ratio)
    alone = composed()
    assert alone.whole().share() is alone


def test_a_weak_scale_multiplies_them() -> None:
    config, alone = composed("fabric.devices=4", "scale=weak"), composed()
    whole = config.whole()
    assert whole.env.num_envs == 4 * alone.env.num_envs
    assert whole.total_steps == 4 * alone.total_steps
    assert whole.agent.train_ratio == alone.agent.train_ratio
    own = whole.share()
    for name in ("batch_size", "replay_size"):
        assert getattr(own.agent, name) == getattr(alone.agent, name)
    assert own.env.num_envs == alone.env.num_envs


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["fabric.devices=3"], "env.num_envs=32"),
        (["fabric.devices=5", "env.num_envs=30"], "eval.episodes=16"),
        (["fabric.devices=2", "agent.batch_size=3"], "agent.batch_size=3"),
        (["fabric.devices=2", "agent=ppo", "exp=ppo", "env.num_envs=2", "agent.rollout_length=5"], "agent.minibatches"),
    ],
)
def test_what_does_not_divide_is_refused(overrides: list[str], key: str, refused: Callable[..., Any]) -> None:
    given = {"exp": "exp=dreamer_v3", "env": "env=cartpole_balance", "profile": "profile=cpu"}
    given |= {text.partition("=")[0]: text for text in overrides if not text.startswith("agent=")}
    assert refused(*given.values()).names(key)


def world_states(**options: Any) -> list[torch.Tensor]:
    made = environments.make(**options, seed=3, image_size=32)
    seen = [made.reset(seed=5)[0]]
    action = torch.zeros(made.action_space.shape, dtype=torch.int64 if options["name"] == "gym" else torch.float32)
    seen += [made.step(action)[0] for _ in range(30)]
    made.close()
    return [obs["state"] for obs in seen]


@pytest.mark.parametrize(
    "options",
    [{"name": "gym", "id": "CartPole-v1"}, {"name": "cartpole_balance", "renderer": "none", "stagger": True}],
    ids=lambda options: options["name"],
)
def test_worlds_do_not_depend_on_the_ranks(options: dict[str, Any]) -> None:
    whole = world_states(**options, num_envs=4)
    parts = [world_states(**options, num_envs=2, first_env=first) for first in (0, 2)]
    for together, *apart in zip(whole, *parts, strict=True):
        assert torch.equal(together, torch.cat(apart))


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (4, 1)])
def test_worlds_and_replay_are_dealt_anew(before: int, after: int, make_agent: Callable[..., Any]) -> None:
    worlds, steps = 12, 20
    numbers = torch.arange(worlds).float()

    def share(rank: int) -> dict[str, Any]:
        own = numbers[rank * worlds // before :][: worlds // before]
        ring = own.expand(steps, -1).unsqueeze(-1)
        fresh = [[world, start] for start in (0, 7) for world in range(len(own))]
        loop = {"counters": {}, "step": {"obs": {"state": own}}, "player": {"deter": own[:, None]}}
        replay = {"storage": {"deter": ring}, "added": steps, "fresh": fresh}
        parts = {"agent": {"modules": 0}, "monitor": {"episodes": {}}, "loop": loop, "envs": {"a": own, "seed": 3}}
        parts["envs"]["shared"] = torch.ones(1)  # of all worlds, as contacts in Warp's physics
        parts["monitor"]["episodes"] = {"terms": ["x"], "sums": torch.ones(8)}
        return parts | {"memory": {"replay": replay}, "history": rank}

    shares = [share(rank) for rank in range(before)]
    agent = make_agent(num_envs=worlds // after, replay_size=worlds // after * 60)
    state = {"a": torch.zeros(worlds // after), "seed": 3, "shared": torch.zeros(1)}
    fake = SimpleNamespace(num_envs=worlds // after, first_env=0, state_dict=lambda: state)
    fresh = set()
    for rank in range(after):
        parts = snapshot.deal(shares, agent, fake, Ranks(rank, after))
        own = numbers[rank * worlds // after :][: worlds // after]
        assert torch.equal(parts["envs"]["a"], own)
        assert parts["envs"]["shared"].shape == (1,)
        assert parts["monitor"]["episodes"]["sums"].sum() == (0 if rank else 8)
        assert torch.equal(parts["loop"]["step"]["obs"]["state"], own)
        assert torch.equal(parts["memory"]["replay"]["storage"]["deter"], own.expand(steps, -1).unsqueeze(-1))
        for number, taken, place in parts["histories"]:
            assert torch.equal(shares[number]["envs"]["a"][taken], own[place])
        fresh |= {(int(own[world]), start) for world, start in parts["memory"]["replay"]["fresh"]}
    assert fresh == {(world, start) for world in range(worlds) for start in (0, 7)}


def test_worlds_without_numbers_begin_anew(make_agent: Callable[..., Any]) -> None:
    """Their states, such as a generator's, cannot be divided."""
    envs = {"generator": torch.Generator().get_state()}
    share = {"agent": {"modules": 0}, "monitor": {"episodes": {}}, "envs": envs}
    share["loop"] = {"counters": {}, "step": {"obs": {}}, "player": {}}
    agent, fake = make_agent(num_envs=4), SimpleNamespace(num_envs=4, first_env=None)
    assert "envs" not in snapshot.deal([share, share], agent, fake, Ranks(0, 1))


def test_a_rank_with_other_numbers_is_named() -> None:
    class Three(Ranks):
        def collect(self, value: Any) -> list[Any]:
            return [value, value, {name: number + 1 for name, number in value.items()}]

    with pytest.raises(CommandError, match="rank 2"):
        Three(0, 3).check_equal([("weight", torch.ones(3))])


@pytest.mark.parametrize(
    ("variables", "rank", "seen"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, 0, "2,3"),  # this process starts the others
        ({"LOCAL_RANK": "1"}, 1, "1"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, 1, "3"),
        ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "5"}, 1, "5"),
        ({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "2,3"}, 2, ""),
        ({"SLURM_NTASKS": "4", "SLURM_LOCALID": "3"}, 3, "3"),
        ({"SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0,1"}, 0, "0,1"),
        ({"SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_NAME": "bash"}, 0, None),
    ],
)
def test_each_rank_sees_its_gpu(
    variables: dict[str, str], rank: int, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_JOB_NAME", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert host.rank_here() == rank
    host.choose_gpu()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen


@pytest.mark.parametrize(("variables", "expected"), [({"LOCAL_RANK": "1"}, {4, 5}), ({"SLURM_LOCALID": "1"}, None)])
def test_cores_are_divided(
    variables: dict[str, str], expected: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[set[int]] = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 4, 5, 6}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: given.append(set(cores)), raising=False)
    host.choose_cores(2)
    host.choose_cores(9)
    assert given == ([] if expected is None else [expected])


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_signal_to_one_rank_saves_once(run_dir: Path) -> None:
    run = Run(*COMMON, *AGENTS["ppo"], "total_steps=1_000_000", f"run_dir={run_dir}")
    run.read_until("first gradient step")
    _, second = run.pids
    os.kill(second, signal.SIGTERM)
    assert run.end() == 75, run.output
    assert not Path(f"/proc/{second}").exists()
    assert "".join(run.output).count("saved;") == 1
    step = newest_whole(run_dir, 2)
    assert step is not None
    assert step_of(list_checkpoints(run_dir / "checkpoints")[-1]) == step
    manifest = json.loads((list_checkpoints(run_dir / "checkpoints")[-1] / "manifest.json").read_text())
    assert manifest["meta"]["ranks"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_a_resume_is_exact_after_signals_and_kills(agent: str, run_dir: Path) -> None:
    total = f"total_steps={4000 if agent == 'ppo' else 1200}"
    whole = Run(*COMMON, *AGENTS[agent], total, f"run_dir={run_dir / 'whole'}")
    assert whole.end() == 0, whole.output
    command = [*COMMON, *AGENTS[agent], total, f"run_dir={run_dir / 'parts'}", "resume=auto"]
    for signum, rank, status in ((15, 1, 75), (15, 0, 75), (9, 1, None), (9, 0, -9)):
        run = Run(*command)
        run.read_until("first gradient step")
        time.sleep(random.random())
        os.kill(run.pids[rank], signum)
        found = run.end()
        assert found == status or (status is None and found != 0), run.output
    last = Run(*command)
    assert last.end() == 0, last.output
    assert rows(run_dir / "parts") == rows(run_dir / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_a_run_goes_on_with_another_number_of_ranks(agent: str, run_dir: Path) -> None:
    run = Run(*COMMON, *AGENTS[agent], "total_steps=800", f"run_dir={run_dir}")
    assert run.end() == 0, run.output
    shares = [checkpoint.load(list_checkpoints(place_of(run_dir, rank) / "checkpoints")[-1])[1] for rank in (0, 1)]
    with sheeplike.init(f"resume={run_dir}", "fabric.devices=1", "total_steps=1200", "compile=off") as experiment:
        joined = {
            name: torch.cat([share["loop"]["step"]["obs"][name] for share in shares])
            for name in experiment.state.step.obs
        }
        assert all(torch.equal(experiment.state.step.obs[name], value) for name, value in joined.items())
        state = experiment.envs.state_dict()
        assert all(
            torch.equal(value, torch.cat([share["envs"][name] for share in shares])) for name, value in state.items()
        )
        if agent == "dreamer_v3":
            ring, held = experiment.agent.replay.storage, 200
            assert len(experiment.agent.replay) == 4 * held
            for name in ("deter", "stoch"):
                both = torch.cat([share["memory"]["replay"]["storage"][name] for share in shares], 1)
                assert torch.equal(ring[name][:held], both)
            tails = [share["history"] for share in shares]
            for name, value in tails[0].tail.items():
                both = torch.cat([value, tails[1].tail[name]], 1)
                assert torch.equal(ring[name][tails[0].tail_start : held], both)
        experiment.iterate()
    again = Run(f"resume={run_dir}", "fabric.devices=2", "total_steps=1600")
    assert again.end() == 0, again.output
    steps = [row["step"] for row in rows(run_dir)]
    assert steps == sorted(steps)
    assert steps[-1] == 1600
    learnt = [row for row in rows(run_dir) if "loss/total" in row]
    assert [row["gradient_steps"] for row in learnt] == sorted({row["gradient_steps"] for row in learnt})
    assert all(row["loss/total"] is not None for row in learnt)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(run_dir: Path) -> None:
    run = Run(*COMMON, *AGENTS["ppo"], "total_steps=1_000_000", f"run_dir={run_dir}", "fabric.timeout=15")
    run.read_until("first gradient step")
    _, second = run.pids
    os.kill(second, signal.SIGSTOP)
    assert run.end(90) not in (0, 75)
    assert not Path(f"/proc/{second}").exists()


@pytest.mark.slow
def test_an_error_of_the_first_rank_ends_the_other(run_dir: Path) -> None:
    script = run_dir.parent / "fails.py"  # the other rank is started with it too
    script.write_text(FAILS)
    command = [*COMMON, *AGENTS["ppo"], "total_steps=1_000_000", f"run_dir={run_dir}"]
    run = Run(*command, program=[sys.executable, str(script)])
    run.read_until("first gradient step")
    _, second = run.pids
    assert run.end(90) not in (0, 75)
    assert "the first rank fails" in "".join(run.output)
    assert not Path(f"/proc/{second}").exists()


@pytest.mark.slow
def test_without_a_share_there_is_no_checkpoint(run_dir: Path) -> None:
    run = Run(*COMMON, *AGENTS["ppo"], "total_steps=1_000_000", "eval.every=null", f"run_dir={run_dir}")
    run.read_until("first gradient step")
    while newest_whole(run_dir, 2) is None:
        time.sleep(0.1)
    place = run_dir / "ranks" / "1" / "checkpoints"
    place.rename(run_dir / "aside")
    place.write_text("no directory")
    time.sleep(3)
    before = {path.name for path in list_checkpoints(run_dir / "checkpoints")}
    time.sleep(3)
    assert before == {path.name for path in list_checkpoints(run_dir / "checkpoints")}
    os.kill(run.pids[0], signal.SIGTERM)
    assert run.end() == 74, run.output


@pytest.mark.slow
def test_torchrun_starts_the_same_run(run_dir: Path) -> None:
    pytest.importorskip("torch.distributed.run")
    runs = []
    for program in (None, [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]):
        place = run_dir / str(len(runs))
        run = Run(*COMMON, *AGENTS["ppo"], "total_steps=1200", f"run_dir={place}", program=program)
        assert run.end() == 0, run.output
        runs.append(rows(place))
    assert runs[0] == runs[1]


@pytest.mark.slow
def test_runs_of_several_seeds_have_ranks_of_their_own(run_dir: Path) -> None:
    run = Run(*COMMON, *AGENTS["ppo"], "total_steps=400", "eval.every=null", f"run_dir={run_dir}", "seeds=2")
    assert run.end() == 0, run.output
    for seed in (0, 1):
        assert newest_whole(run_dir / f"seed_{seed}", 2) == 400


@pytest.mark.slow
def test_every_kill_of_any_rank_leaves_a_valid_checkpoint(run_dir: Path) -> None:
    chance, before = random.Random(0), None
    often = ["total_steps=1_000_000", "checkpoint.every=40", "eval.every=null", "resume=auto", f"run_dir={run_dir}"]
    for kill in range(KILLS):
        run = Run(*COMMON, *AGENTS["ppo"], *often)
        run.read_until("simulation  ")
        told = next(line for line in run.output if line.startswith("  run "))
        begun = int(told.split("policy step ")[1].split(":")[0].replace(",", "")) if "continued" in told else None
        assert begun == before, f"kill {kill}: it went on from {begun}, not from {before}"
        while before is None and newest_whole(run_dir, 2) is None:
            time.sleep(0.2)
        time.sleep(chance.uniform(0.0, 4.0))
        os.kill(chance.choice(run.pids), signal.SIGKILL)
        assert run.end(60) != 0
        time.sleep(0.5)  # a child of a killed first rank ends at its next exchange
        before = newest_whole(run_dir, 2)
        assert before is not None
        print(f"kill {kill}: {before}", flush=True)


def test_a_rank_with_another_configuration_is_named() -> None:
    class Four(Ranks):
        def collect(self, value: Any) -> list[Any]:
            return [value, value, value.replace("seed: 0", "seed: 1"), value]

    with pytest.raises(CommandError, match="rank 2"):
        check_alike(Four(0, 4), to_yaml(composed("fabric.devices=4")))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("agent", AGENTS)
def test_two_gpus(agent: str, run_dir: Path) -> None:
    on_gpus = ["fabric.accelerator=cuda", "profile=gpu", "compile=auto", "total_steps=1200", f"run_dir={run_dir}"]
    run = Run(*COMMON, *AGENTS[agent], *on_gpus)
    assert run.end() == 0, run.output
    assert newest_whole(run_dir, 2) == 1200
