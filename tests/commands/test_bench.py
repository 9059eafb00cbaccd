"""``bench``: refused in one line where it cannot be done, and else measured on real worlds and real updates."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from sheeplike.__main__ import main
from sheeplike.commands.bench import PARTS, Settings
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.layers import Actions, BareLoop, VectorEnvLoop
from sheeplike.commands.benchmark.measure import Quantity
from sheeplike.config.compose import load
from sheeplike.config.sources import Sources

JOB = ("env=cartpole_balance", "agent=dreamer_v3")
# Short enough for a test; what it finds of speed means nothing.
TINY = ("profile=cpu", "dry_run=true", "rounds=3", "seconds=0.2")


# Refusals: one line, nothing written


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((), ["agent= is missing: expected one of dreamer_v3, ppo", "bench env=franka_pick agent=dreamer_v3"]),
        (("env=franka_pick",), ["agent= is missing"]),
        (("agent=dreamer_v3",), ["env= is missing", "franka_pick"]),
        (("agent=dreamr_v3", "env=franka_pick"), ["agent 'dreamr_v3' does not exist", "nearest: dreamer_v3"]),
        ((*JOB, "agent.batchsize=3"), ["unknown key 'agent.batchsize'", "nearest: agent.batch_size"]),
        ((*JOB, "secnds=3"), ["unknown key 'secnds': nearest: seconds", "bench --help"]),
        ((*JOB, "seeds=3"), ["unknown key 'seeds'", "nearest: seed;"]),
        (
            (*JOB, "parts=[updates,act]"),
            ["parts=[updates,act]", "of physics, worlds", "nearest: parts=[update,acting]"],
        ),
        ((*JOB, "parts=[xyz]"), ["parts=[xyz]", "nearest: parts=[physics,"]),
        ((*JOB, "parts=[]"), ["parts=[]: expected a list of one or more of physics"]),
        ((*JOB, "modes=[grph]"), ["modes=[grph]", "of off, inductor, graph, or null", "nearest: modes=[graph]"]),
        ((*JOB, "rounds=0"), ["rounds=0: expected an integer of at least 1", "nearest: rounds=1"]),
        ((*JOB, "rounds=many"), ["rounds=many", "nearest: rounds=8"]),
        ((*JOB, "seconds=0"), ["seconds=0: expected a number above 0", "nearest: seconds=5"]),
        ((*JOB, "agent.batch_size=0"), ["agent.batch_size=0", "nearest: agent.batch_size=1"]),
        ((*JOB, "fabric.accelerator=cuda"), ["expected a GPU, but this machine shows no NVIDIA GPU"]),
        ((*JOB, f"out={sys.executable}/here"), ["/here: expected a directory that can be written"]),
        ((*JOB, "--fast"), ["flag '--fast'"]),
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


def test_help_says_every_key(sheeplike):
    text = sheeplike("bench", "--help").output
    assert all(f"  {name} " in text for name in Settings.__dataclass_fields__)
    assert "default 8" in text
    assert "  bench " in sheeplike("--help").output


def test_the_configuration_is_that_of_the_run(sheeplike):
    found = yaml.safe_load(sheeplike("bench", *JOB, "parts=acting", "--cfg").output)
    settings = found.pop("bench")
    trained = yaml.safe_load(sheeplike(*JOB, "exp=dreamer_v3", "--cfg").output)
    assert found | {"total_steps": trained["total_steps"]} == trained
    assert (settings["parts"], settings["rounds"], settings["modes"]) == (["acting"], 8, None)
    assert settings["out"].startswith("bench/cartpole_balance_dreamer_v3_20")
    assert yaml.safe_load(sheeplike("bench", *JOB, "--cfg").output)["bench"]["parts"] == list(PARTS)


# Real worlds


class Found(NamedTuple):
    data: dict[str, Any]
    markdown: str
    printed: str
    files: list[str]

    def rows(self, table: str) -> dict[str, dict[str, Any]]:
        return self.data["tables"][table]["rows"]


def measure(place: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Found:
    capsys.readouterr()
    main(["bench", *TINY, *arguments, f"out={place / 'out'}"])
    out = place / "out"
    printed = capsys.readouterr().out
    files = sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())
    return Found(json.loads((out / "bench.json").read_text()), (out / "bench.md").read_text(), printed, files)


def lines_of(text: str, title: str) -> list[str]:
    """The lines below a title, up to the next empty one behind the rows."""
    lines = text.splitlines()
    return lines[lines.index(title) + 1 :]


def check(found: Found) -> None:
    """What holds for any benchmark: sane numbers, and the same ones in all three forms."""
    assert found.files == ["out/bench.json", "out/bench.md"]
    for table in found.data["tables"].values():
        markdown = lines_of(found.markdown, f"## {table['title']}")
        printed = lines_of(found.printed, table["title"])
        for name, row in table["rows"].items():
            shown = [str(_quantity(cell)) if isinstance(cell, dict) else cell for cell in row.values()]
            assert f"| {name} | {' | '.join(shown)} |" in markdown
            line = next(line for line in printed if line.startswith(f"  {name}  "))
            assert line.removeprefix(f"  {name}").split() == " ".join(shown).split()


def _quantity(cell: dict[str, Any]) -> Quantity:
    """The quantity of a cell, which must be sane."""
    assert len(cell["samples"]) in (1, 3)
    assert 0 < min(cell["samples"]) <= cell["low"] <= cell["median"] <= cell["high"] <= max(cell["samples"])
    assert cell["median"] == statistics.median(cell["samples"])
    return Quantity(cell["unit"], tuple(cell["samples"]))


@pytest.fixture
def found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Found:
    """A benchmark of DreamerV3 in two worlds: every part but growth, which takes a process per row."""
    parts = "parts=[learning,update,worlds,breakdown,acting,physics]"
    return measure(tmp_path, capsys, *JOB, parts, "modes=[off]", "agent.imagination_length=3")


def test_dreamer(found, tmp_path):
    check(found)
    assert list(found.data["tables"]) == ["steps", "acting", "update", "breakdown", "memory"]
    assert Path(found.data["settings"]["bench"]["out"]) == tmp_path / "out"
    assert found.data["settings"]["config"]["agent"]["size"]["name"] == "1m"
    for fact in ("command", "date", "processor", "versions", "took"):
        assert found.data["facts"][fact] in found.markdown

    steps = found.rows("steps")
    assert list(steps) == ["physics", "+ render", "+ vector env", "+ acting", "+ learning"]
    for row in steps.values():
        per_second, per_step = (row[name]["samples"] for name in ("steps/s", "ms per step of all worlds"))
        assert [a * b for a, b in zip(per_second, per_step, strict=True)] == pytest.approx([2000] * 3)
    bare, env = (steps[name]["steps/s"]["samples"] for name in ("+ render", "+ vector env"))
    relative = steps["+ vector env"]["relative to + render"]
    assert relative["samples"] == pytest.approx([b / a for a, b in zip(bare, env, strict=True)])
    assert 0.2 < relative["median"] < 5
    assert "0.0625 per step" in " ".join(found.data["tables"]["steps"]["notes"])
    assert list(found.rows("acting")) == ["2 worlds", "16 worlds"]

    eager = found.rows("update")["eager"]
    assert (eager["ms"]["unit"], eager["times as fast as eager"]) == ("ms", "")
    assert 1000 < eager["operator calls"]["median"] < 50_000
    breakdown = found.rows("breakdown")
    parts = [breakdown[name]["ms"]["samples"] for name in list(breakdown)[:-2]]
    assert len(parts) == 8
    assert breakdown["all parts"]["ms"]["samples"] == pytest.approx([sum(turn) for turn in zip(*parts, strict=True)])
    assert breakdown["the whole update"]["% of the whole"]["samples"] == [100, 100, 100]
    assert 30 < breakdown["all parts"]["% of the whole"]["median"] < 300
    memory = found.rows("memory")
    assert found.data["tables"]["memory"]["title"] == "Peak memory of learning"
    assert 200 < memory["process, resident set"]["MiB"]["median"] < 50_000
    replay = 1024 * (48 * 48 * 3 + 512 * 2 + 32 + 4 * 1 + 4 + 3) / 2**20
    assert memory["the agent's memory, once full"]["MiB"]["median"] == pytest.approx(replay)


def test_ppo(tmp_path, capsys):
    """Alone what needs no simulation; an older benchmark in its place is replaced."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bench.md").write_text("older")
    found = measure(tmp_path, capsys, JOB[0], "agent=ppo", "parts=[breakdown,update]", "modes=[off]")
    check(found)
    assert list(found.data["tables"]) == ["update", "breakdown", "memory"]
    assert 100 < found.rows("update")["eager"]["operator calls"]["median"] < 10_000
    names = ["advantages, once per rollout", "reading the minibatch, augmentation", "losses", "optimizer"]
    assert list(found.rows("breakdown")) == [*names, "all parts", "the whole update"]
    assert found.rows("breakdown")["losses"]["% of the whole"]["median"] > 20


@pytest.mark.parametrize("agent", ["dreamer_v3", pytest.param("ppo", marks=pytest.mark.slow)])
def test_checkpoints(agent, tmp_path, capsys, monkeypatch):
    """Later ones write only what is new; a size that does not fit is left out, and nothing is left behind."""
    monkeypatch.setattr("sheeplike.commands.benchmark.checkpoints.SIZES", (2000, 10**12))
    monkeypatch.setattr("sheeplike.commands.benchmark.checkpoints.NEW", 200)
    monkeypatch.setattr("sheeplike.checkpoint.CHUNK_BYTES", 100 * 2 * 48 * 48 * 3)
    found = measure(tmp_path, capsys, JOB[0], f"agent={agent}", "parts=[checkpoint]", "compile=off")
    check(found)
    rows, notes = found.rows("checkpoint"), found.data["tables"]["checkpoint"]["notes"]
    size = "2,000 steps" if agent == "dreamer_v3" else "32 steps"
    assert list(rows) == [f"{size}, first", f"{size}, later"]
    first, later = rows.values()
    for row in rows.values():
        assert row["the run waits, s"]["median"] <= row["until it is on the disk, s"]["median"]
        assert row["the run loses, s"]["median"] < 20
    written = [row["written, MiB"]["median"] for row in (first, later)]
    if agent == "dreamer_v3":
        frame = 48 * 48 * 3 / 2**20
        assert written[0] - written[1] == pytest.approx(1700 * frame, rel=0.1)
        assert any(note.startswith("1,000,000,000,000 steps: ") for note in notes)
    else:
        assert written[0] == pytest.approx(written[1])


def test_the_bare_loop_and_the_vector_env_do_the_same(tmp_path):
    """The same episodes, frames and ends included, from one compiled step."""
    from sheeplike.run.build import launch

    arguments = ["exp=dreamer_v3", JOB[0], "profile=cpu", "env.num_envs=2", "env.options.episode_length=4", "seed=3"]
    config = load(arguments, Sources())
    bench = Bench(config, launch(config), seconds=0.1, rounds=3)
    bench.compile_worlds()
    actions = Actions(bench)
    bare, env = BareLoop(bench.worlds.simulator, actions.jax, 3), VectorEnvLoop(bench, actions.torch)
    seen = set()
    for calls in (1, 2, 5):
        assert bare(calls) > 0
        assert env(calls) > 0
        (frames,) = bare.output.frames.values()
        frame = torch.from_dlpack(frames)
        assert torch.equal(frame, env.obs["pixels/fixed"])
        assert torch.equal(torch.from_dlpack(bare.output.vectors["state"]), env.obs["state"])
        seen.add(frame.sum().item())
    assert len(seen) == 3
    assert bench.worlds.simulator.compilations == 1
    bench.worlds.close()


@pytest.mark.slow
def test_all_ways_to_make_an_update(tmp_path, capsys):
    """Those that cannot be had here say why."""
    found = measure(tmp_path, capsys, *JOB, "parts=[update]")
    check(found)
    rows, notes = found.rows("update"), found.data["tables"]["update"]["notes"]
    assert list(rows)[:3] == ["eager", "compiled", "captured"]
    assert list(rows)[3:] in ([], ["eager, freed memory kept"])  # where a CPU can compile
    for name in ("compiled", "captured"):
        if rows[name]["ms"] == "-":
            assert any(note.startswith(f"{name}: ") for note in notes)
        else:
            eager, taken = (rows[mode]["ms"]["samples"] for mode in ("eager", name))
            faster = [a / b for a, b in zip(eager, taken, strict=True)]
            assert rows[name]["times as fast as eager"]["samples"] == pytest.approx(faster)
            assert rows[name]["operator calls"]["median"] < rows["eager"]["operator calls"]["median"]


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["dreamer_v3", "ppo"])
def test_growth(agent, tmp_path, capsys):
    """Each row in a process of its own; one of DreamerV3's cannot be had."""
    small = ["agent.replay_size=64"] if agent == "dreamer_v3" else ["agent.rollout_length=8"]
    found = measure(tmp_path, capsys, JOB[0], f"agent={agent}", "parts=[growth]", *small)
    check(found)
    rows = found.rows("growth")
    worlds, updates = [f"env.num_envs={count}" for count in (1, 2, 8)], list(rows)[3:]
    if agent == "dreamer_v3":
        assert updates == [*(f"agent.batch_size={count}" for count in (2, 4, 8)), "agent/size=12m"]
        assert rows.pop(worlds.pop())["process, MiB"] == "-"
        notes = found.data["tables"]["growth"]["notes"]
        assert notes[-1].startswith("env.num_envs=8: agent.batch_length=8: expected ")
    else:
        assert updates == [f"agent.minibatches={count}" for count in (4, 2, 1)]
    assert all(rows[name]["steps/s of the vector env"]["median"] > 0 for name in worlds)
    assert all(rows[name]["ms per update"]["median"] > 0 for name in updates)
    assert all(200 < row["process, MiB"]["median"] < 50_000 for row in rows.values())
