"""What a checkpoint costs: the first of a run, and those that follow, which write only what is new."""

from __future__ import annotations

import gc
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.checkpoint import History, Writer
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.layers import learning_loop, period
from sheeplike.commands.benchmark.measure import LEAST_ROUNDS, Quantity, once
from sheeplike.commands.benchmark.tables import Table
from sheeplike.commands.kinds import kind_of
from sheeplike.memory import SequenceReplay
from sheeplike.monitor.progress import phase

Grown = tuple[dict[str, Any], History | None]

SIZES = (100_000, 1_000_000)  # policy steps in the replay
NEW = 20_000  # policy steps between two checkpoints
EVERY = 300  # seconds between two checkpoints, for the share of time that they take
UNITS = {
    "the run waits, s": "s",
    "until it is on the disk, s": "s",
    "written, MiB": "MiB",
    "the run loses, s": "s",
    f"% at one in {EVERY // 60} min": "%",
}


def checkpoints(bench: Bench, out: Path) -> Table:
    """First and later checkpoints, by the size of what the agent remembers.

    Args:
        out: the checkpoints are written, and removed again, in a directory of its own beside it.
    """
    run, _ = learning_loop(bench)
    each = period(bench.config)
    agent = bench.agent
    state = agent.state_dict(replay=False)
    table = Table("checkpoint", "Checkpoints", list(UNITS))
    out.mkdir(parents=True, exist_ok=True)
    if not isinstance(agent, DreamerV3):
        memory = {name: value for name, value in agent.state_dict(history=False).items() if name not in state}
        what, steps = kind_of(bench.config.agent).remembered(bench.config, bench.worlds.num_envs)
        name = f"{steps:,} steps" if steps else what
        _measure(table, name, out, lambda: ({"agent": state, "memory": memory}, None), lambda: run(each))
        return table
    spec = {key: (tuple(ring.shape[2:]), ring.dtype) for key, ring in agent.replay.storage.items()}
    worlds, refreshed, sequence = agent.replay.num_envs, agent.replay.refreshed, agent.replay.sequence
    for size in SIZES:
        name, needed = f"{size:,} steps", SequenceReplay.footprint(spec, worlds, size)
        if shutil.disk_usage(out).free < 2 * needed:
            table.notes.append(f"{name}: two of them do not fit onto the disk ({needed / 2**30:.1f} GiB each).")
            continue
        try:
            replay = SequenceReplay(
                spec, num_envs=worlds, size=size, sequence=sequence, device=bench.device, refreshed=refreshed
            )
        except (MemoryError, ValueError) as error:
            table.notes.append(f"{name}: {error}.")
            continue
        _replay(table, name, out, replay, state, lambda: run(each))
        del replay
        gc.collect()
    table.notes.append(
        f"Between two checkpoints {NEW:,} policy steps are added to a replay that is full, beside that of the run. "
        "Where the run waits until all is on the disk, a copy would not have fitted into half of the free memory. What "
        "the run loses is the wait, and what its iterations take longer than usual until all is on the disk."
    )
    return table


def _replay(
    table: Table, name: str, out: Path, replay: SequenceReplay, state: dict[str, Any], run: Callable[[], float]
) -> None:
    step: dict[str, Tensor] = {}
    for key, ring in replay.storage.items():
        step[key] = ring.fill_(1)[0].clone()
    replay.added = replay.length

    def grown() -> Grown:
        for _ in range(NEW // replay.num_envs):
            replay.add(step)
        return {"agent": state, "memory": replay.state_dict(history=False)}, replay

    _measure(table, name, out, grown, run)


def _measure(table: Table, name: str, out: Path, grown: Callable[[], Grown], run: Callable[[], float]) -> None:
    """Two rows.

    Args:
        grown: adds to the memory; returns the parts of a checkpoint, and the history among the memory.
        run: lets the run go on for a while; returns the seconds that it took.
    """
    with (
        phase(f"checkpoints: {name}"),
        tempfile.TemporaryDirectory(dir=out.parent, prefix=".bench-") as place,
        Writer(Path(place) / "checkpoints", keep_last=1, keep_best=0) as writer,
    ):
        rows: list[tuple[float, ...]] = []
        for number in range(1 + LEAST_ROUNDS):
            parts, history = grown()
            usual = statistics.median(run() for _ in range(LEAST_ROUNDS))
            start = time.perf_counter()
            writer.save(number, parts, {}, history)
            del parts
            made = 0
            while writer.busy:
                run()
                made += 1
            lost = time.perf_counter() - start - made * usual
            writer.wait()
            one = writer.last
            lost = max(lost, one.blocked)  # the rest may drown in noise
            rows.append((one.blocked, one.seconds, one.written / 2**20, lost, 100 * lost / EVERY))
    first, *later = rows
    columns = list(zip(UNITS.values(), first, zip(*later, strict=True), strict=True))
    table.rows[f"{name}, first"] = [once(value, unit) for unit, value, _ in columns]
    table.rows[f"{name}, later"] = [Quantity(unit, tuple(values)) for unit, _, values in columns]
