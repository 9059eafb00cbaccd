"""How much memory a run takes at its peak, and who takes it."""

from __future__ import annotations

import resource
import sys

import torch
import warp

from sheeplike.agents.agent import Agent
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.facts import values
from sheeplike.commands.benchmark.measure import once
from sheeplike.commands.benchmark.tables import Cell, Table

UNIT = "MiB"


def memory(bench: Bench, after: str) -> Table:
    """Peaks since the process began.

    Args:
        after: what was done until now.
    """
    rows: dict[str, Cell] = {}
    if bench.device.type == "cuda":
        rows["torch, allocated"] = _mebibytes(torch.cuda.max_memory_allocated(bench.device))
        rows["torch, reserved"] = _mebibytes(torch.cuda.max_memory_reserved(bench.device))
        held = bench.worlds.simulator.device.memory_stats() or {}
        rows["JAX"] = _mebibytes(held["peak_bytes_in_use"]) if "peak_bytes_in_use" in held else "unknown"
        rows["Warp"] = _warp(bench.device)
        free, total = torch.cuda.mem_get_info(bench.device)
        rows["the GPU, all programs on it, now"] = _mebibytes(total - free)
    rows["process, resident set"] = _mebibytes(_resident())
    if "agent" in vars(bench) and _remembered(bench.agent):
        rows["the agent's memory, once full"] = _mebibytes(_remembered(bench.agent))
    table = Table("memory", f"Peak memory of {after}", [UNIT], {name: [cell] for name, cell in rows.items()})
    if bench.device.type == "cpu":
        table.notes.append(
            "On a CPU, torch, JAX and Warp share the process. Of the agent's memory, only what is filled counts there."
        )
    return table


def _mebibytes(count: int) -> Cell:
    return once(count / 2**20, UNIT)


def _resident() -> int:
    peaks = values("/proc/self/status", "VmHWM")
    if peaks:  # Linux lets ru_maxrss begin with what the parent process had
        return int(peaks[0].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _warp(device: torch.device) -> Cell:
    """What Warp allocated itself; the arrays that it shares with JAX are JAX's."""
    try:
        return _mebibytes(warp.get_mempool_used_mem_high(str(device)))
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]


def _remembered(agent: Agent) -> int:
    """Bytes of the replay or the rollout; 0 for an agent that has neither."""
    held = getattr(agent, "rollout", None) or getattr(agent, "replay", None)
    return sum(ring.nbytes for ring in held.storage.values()) if hasattr(held, "storage") else 0
