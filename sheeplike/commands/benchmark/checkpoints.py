"""What a checkpoint costs: the first of a run, and those that follow, which write only what is new."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from sheeplike.agents.ppo import PPO
from sheeplike.checkpoint import Journal, Saved, Writer
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.measure import LEAST_ROUNDS, Quantity, once
from sheeplike.commands.benchmark.tables import Table
from sheeplike.memory import SequenceReplay
from sheeplike.monitor.progress import phase

SIZES = (100_000, 1_000_000)  # policy steps in the replay
NEW = 20_000  # policy steps between two checkpoints
UNITS = {"the run waits, s": "s", "until it is on the disk, s": "s", "written, MiB": "MiB"}


def checkpoints(bench: Bench, out: Path) -> Table:
    """First and later checkpoints, by the size of what the agent remembers.

    Args:
        out: the checkpoints are written, and removed again, in a directory of its own beside it.
    """
    agent = bench.agent
    state = agent.state_dict(replay=False)
    table = Table("checkpoint", "Checkpoints", list(UNITS))
    out.mkdir(parents=True, exist_ok=True)
    if isinstance(agent, PPO):
        memory = {"rollout": agent.rollout.state_dict()}
        name = f"{agent.num_envs * agent.rollout_length:,} steps"
        _measure(table, name, out, lambda: ({"agent": state, "memory": memory}, {}))
        return table
    spec = {key: (tuple(ring.shape[2:]), ring.dtype) for key, ring in agent.replay.storage.items()}
    worlds, refreshed, sequence = agent.replay.num_envs, agent.replay.refreshed, agent.replay.sequence
    del agent
    bench.forget_agent()
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
        _replay(table, name, out, replay, state)
        del replay
        gc.collect()
    table.notes.append(
        f"Between two checkpoints {NEW:,} policy steps are added to a replay that is full. Where the run waits until "
        "all is on the disk, a copy would not have fitted into half of the free memory."
    )
    return table


def _replay(table: Table, name: str, out: Path, replay: SequenceReplay, state: dict[str, Any]) -> None:
    step: dict[str, Tensor] = {}
    for key, ring in replay.storage.items():
        step[key] = ring.fill_(1)[0].clone()
    replay.added = replay.length

    def grown() -> tuple[dict[str, Any], dict[str, Journal]]:
        for _ in range(NEW // replay.num_envs):
            replay.add(step)
        return {"agent": state, "memory": replay.state_dict(history=False)}, {"replay": replay.journal}

    _measure(table, name, out, grown)


def _measure(table: Table, name: str, out: Path, grown: Any) -> None:
    """Two rows.

    Args:
        grown: goes on for a while; returns the parts of a checkpoint, and the journals of its memory.
    """
    with (
        phase(f"checkpoints: {name}"),
        tempfile.TemporaryDirectory(dir=out.parent, prefix=".bench-") as place,
        Writer(place, keep_last=1, keep_best=0) as writer,
    ):
        saved: list[Saved] = []
        for number in range(1 + LEAST_ROUNDS):
            parts, journals = grown()
            writer.save(number, parts, {}, {"memory": journals})
            del parts
            writer.wait()
            saved.append(writer.last)
    first, *later = [(one.blocked, one.seconds, one.written / 2**20) for one in saved]
    columns = list(zip(UNITS.values(), first, zip(*later, strict=True), strict=True))
    table.rows[f"{name}, first"] = [once(value, unit) for unit, value, _ in columns]
    table.rows[f"{name}, later"] = [Quantity(unit, tuple(values)) for unit, _, values in columns]
