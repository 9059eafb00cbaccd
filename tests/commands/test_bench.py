"""``bench``: refused in one line where it cannot be done, and else measured on real worlds and real updates."""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

from sheeplike.__main__ import main
from sheeplike.commands.bench import PARTS, BenchOptions
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.tools.bench import Bench, Table, bare_loop, interleaved, quartiles, ratio

JOB = ("env=cartpole_balance", "agent=dreamer_v3")
# Short enough for a test; what it finds of speed means nothing.
TINY = ("profile=cpu", "dry_run=true", "compile=off", "rounds=3", "seconds=0.1")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["agent=", "dreamer_v3, plan2explore, ppo", "bench env=franka_pick agent=dreamer_v3"]),
        (("agent=dreamer_v3",), ["env=", "franka_pick"]),
        (("agent=dreamr_v3", "env=franka_pick"), ["'dreamr_v3'", "nearest: dreamer_v3"]),
        ((*JOB, "agent.batchsize=3"), ["'agent.batchsize'", "nearest: agent.batch_size"]),
        ((*JOB, "secnds=3"), ["'secnds'", "nearest: seconds"]),
        ((*JOB, "seeds=3"), ["'seeds'", "nearest: seed;"]),
        ((*JOB, "total_steps=-5"), ["total_steps=-5", "nearest: seconds="]),
        ((*JOB, "run_dir=x"), ["run_dir=x", "nearest: out="]),
        ((*JOB, "parts=[updates,act]"), ["parts=[updates,act]", "physics, envs", "nearest: parts=[update,acting]"]),
        ((*JOB, "parts=[]"), ["parts=[]", "physics"]),
        ((*JOB, "modes=[grph]"), ["modes=[grph]", "off, inductor", "nearest: modes=[graph]"]),
        ((*JOB, "rounds=0"), ["rounds=0", "1000", "nearest: rounds=1"]),
        ((*JOB, "seconds=0"), ["seconds=0", "nearest: seconds=5"]),
        ((*JOB, "fabric.accelerator=cuda"), ["fabric.accelerator=cuda"]),
        ((*JOB, f"out={sys.executable}/here"), ["/here"]),
    ],
)
def test_what_is_refused(refused, arguments, parts):
    line = refused("bench", *arguments)
    assert all(part in line for part in parts), line


def test_errors_come_before_torch_and_jax():
    code = (
        "import sys; from sheeplike.__main__ import main\n"
        "try: main(['bench', 'agent=ppo', 'env=franka_pick', 'rounds=0'])\n"
        "finally: print(sorted({'torch', 'jax', 'mujoco', 'gymnasium', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "[]\n")


def test_help_says_every_key_and_part(sheeplike):
    text = sheeplike("bench", "--help").output
    assert all(f"  {name} " in text for name in [*BenchOptions.model_fields, *PARTS])


def test_the_configuration_is_that_of_the_run(sheeplike):
    found = sheeplike("bench", *JOB, "parts=acting", "show=config").output.splitlines()
    trained = sheeplike(*JOB, "exp=dreamer_v3", "show=config").output.splitlines()
    assert [line for line in found if line not in trained] == ["total_steps: 1000000000000  # command line"]


# How it measures


def test_quartiles_and_quotients():
    assert quartiles([4.0, 1.0, 3.0, 2.0, 100.0]) == (2, 3, 4)
    assert quartiles([12.0]) == (12, 12, 12)
    assert ratio([1.0, 3.0], [2.0, 2.0]) == [0.5, 1.5]


@pytest.mark.parametrize(("seconds", "rounds", "expected"), [(8, 4, 4), (1, 8, 3), (1, 2, 2), (100, 8, 8)])
def test_rounds_are_taken_in_turns_there_and_back(seconds, rounds, expected):
    calls = []

    def task(name, each):
        return lambda count: (calls.append((name, count)), (each * 2 * count, 2 * count))[1]

    taken = interleaved({"a": task("a", 0.125), "b": task("b", 1.0)}, seconds=seconds, rounds=rounds)
    assert taken == {"a": [0.125] * expected, "b": [1.0] * expected}
    assert [name for name, _ in calls[4:]] == [*"abba" * 4][: 2 * expected]
    assert calls[4] == ("a", max(int(seconds / expected / 0.25), 1))


def test_tables_are_markdown_and_aligned():
    table = Table("update", "One update", ["ms", "why"], {"eager": [[1.0, 2.0, 3.0], ""], "captured": ["-", "none"]})
    lines = str(table).splitlines()
    assert lines[0] == "## One update"
    assert [cell.strip() for cell in lines[4].split("|")] == ["", "eager", "2 (1.5 to 2.5)", "", ""]
    assert len({len(line) for line in lines[2:]}) == 1
    assert table.to_json()["rows"]["eager"]["ms"] == {"quartiles": (1.5, 2, 2.5), "samples": [1, 2, 3]}


# Real worlds


def measure(place: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The rows of each table; what holds for any benchmark is checked here."""
    capsys.readouterr()
    main(["bench", *TINY, *arguments, f"out={place / 'out'}"])
    printed, markdown = capsys.readouterr().out, (place / "out" / "bench.md").read_text()
    assert sorted(path.name for path in place.rglob("*") if path.is_file()) == ["bench.json", "bench.md"]
    data = json.loads((place / "out" / "bench.json").read_text())
    assert all(data["facts"][fact] in markdown for fact in ("command", "date", "device", "versions"))
    for table in data["tables"].values():
        assert f"## {table['title']}\n" in printed
        assert f"## {table['title']}\n" in markdown
        for cell in (cell for row in table["rows"].values() for cell in row.values() if cell):
            low, median, high = cell["quartiles"]
            assert len(cell["samples"]) in (1, 3)
            assert 0 < low <= median == statistics.median(cell["samples"]) <= high
    return {name: table["rows"] for name, table in data["tables"].items()} | {"data": data}


@pytest.mark.slow
def test_the_physics_that_were_asked_for(tmp_path, capsys, monkeypatch):
    made, init = [], Simulator.__init__

    def noted(self, *args, **options):
        init(self, *args, **options)
        made.append(type(self.physics).__name__)

    monkeypatch.setattr(Simulator, "__init__", noted)
    measure(tmp_path, capsys, *JOB, "parts=[physics]", "env.physics=warp")
    assert made == ["WarpPhysics", "WarpPhysics"]


@pytest.mark.slow
def test_dreamer(tmp_path, capsys):
    found = measure(tmp_path, capsys, *JOB, "modes=[off,graph]", "agent.imagination_length=3")
    assert list(found) == ["steps", "memory", "acting", "ranks", "update", "data"]
    steps = found["steps"]
    assert list(steps) == ["physics", "+ render", "+ vector env", "+ acting", "+ learning"]
    for row in steps.values():
        per_second, per_step = (row[name]["samples"] for name in ("policy steps/s", "ms per step of all worlds"))
        assert [a * b for a, b in zip(per_second, per_step, strict=True)] == pytest.approx([2000] * 3)
    bare, env = (steps[name]["policy steps/s"]["samples"] for name in ("+ render", "+ vector env"))
    relative = steps["+ vector env"]["relative to the layer before"]["samples"]
    assert relative == pytest.approx([b / a for a, b in zip(bare, env, strict=True)])
    assert "0.0625 per step" in found["data"]["tables"]["steps"]["notes"][-1]  # whole periods of 8 iterations
    assert list(found["acting"]) == ["2 worlds", "16 worlds"]
    assert list(found["update"]) == ["eager"]
    assert found["data"]["tables"]["update"]["notes"][0].startswith("captured: compile=graph")
    assert 200 < found["memory"]["process, resident set"]["MiB"]["samples"][0] < 50_000
    replay = 1024 * (48 * 48 * 3 + 512 * 2 + 32 + 4 * 1 + 4 + 3) / 2**20
    assert found["memory"]["the replay, once full"]["MiB"]["samples"] == pytest.approx([replay])


def test_ppo_in_an_environment_that_is_not_simulated_here(tmp_path, capsys):
    """An older benchmark in its place is replaced."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.md").write_text("older")
    job = ("env=gym", "env.id=CartPole-v1", "agent=ppo", "parts=[physics,envs,learning,update]", "modes=[off]")
    found = measure(tmp_path, capsys, *job)
    assert list(found["steps"]) == ["+ vector env", "+ learning"]
    notes = " ".join(found["data"]["tables"]["steps"]["notes"])
    assert "gym" in notes
    assert "0.125 per step" in notes  # 4 updates for each rollout of 2 x 16 steps
    assert list(found["update"]) == ["eager"]


def test_an_agent_that_learns_on_one_device_has_no_table_of_ranks(tmp_path, capsys):
    job = ("env=cartpole_balance", "agent=plan2explore", "parts=[ranks,update]", "modes=[off]")
    found = measure(tmp_path, capsys, *job)
    assert list(found) == ["update", "data"]


def test_the_bare_loop_and_the_vector_env_do_the_same():
    """The same episodes, frames and ends included, from one compiled step."""
    arguments = ["exp=dreamer_v3", JOB[0], "profile=cpu", "env.num_envs=2", "env.options.episode_length=4", "seed=3"]
    bench = Bench(load(arguments, Sources()).config)
    simulator = bench.envs.simulator
    actions = list(torch.rand(3, 2, 1))
    flat = [jax.device_put(action.flatten().numpy(), simulator.device) for action in actions]
    bare, turns = bare_loop(simulator, flat, 3), itertools.cycle(actions)
    env = bench.env_loop(lambda step: next(turns))
    seen = set()
    for _ in range(8):
        output, step = bare(), env()
        (frames,) = output.frames.values()
        frame = torch.from_dlpack(frames)
        assert torch.equal(frame, step.obs["pixels/fixed"])
        assert torch.equal(torch.from_dlpack(output.vectors["state"]), step.obs["state"])
        seen.add(frame.sum().item())
    assert len(seen) > 3
    assert simulator.compilations == 1
    bench.envs.close()
