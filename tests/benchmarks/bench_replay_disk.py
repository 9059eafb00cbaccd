"""Speed and memory of a replay in a file: ``python tests/benchmarks/bench_replay_disk.py [gib=20] [seconds=120]``.

The agent is of size 1m and sees one camera of 48x48 pixels; a round adds 16 steps of each of 16 worlds, samples, and
makes an update on 16 x 64 steps. A ring of ``gib`` GiB lies in a file, another, small one in memory; their rounds take
turns. Then the file alone is added to and sampled from for ``seconds``, half of it after the system's cache of the
files was emptied before each round (``cold=true``, for root).
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import gymnasium
import numpy as np
import torch

from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.dreamer_v3.config import DreamerV3Config

WORLDS, ROUNDS = 16, 9
SPACE = gymnasium.spaces.Dict({"pixels/front": gymnasium.spaces.Box(0, 255, (48, 48, 3), np.uint8)})
ACTIONS = gymnasium.spaces.Box(-1, 1, (7,), np.float32)


def resident() -> float:
    """Return the resident set in GiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def empty_cache(agent: DreamerV3) -> None:
    """Have the system forget what it holds of the replay's files."""
    for memory in agent.replay.maps.values():
        memory.flush()
        memory.madvise(mmap.MADV_DONTNEED)
    for link in Path("/proc/self/map_files").iterdir():
        if os.readlink(link).endswith("(deleted)"):
            with link.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make(place: str, size: int, directory: Path) -> DreamerV3:
    config = DreamerV3Config(size="1m", replay_size=size, replay_device=place)
    return DreamerV3(SPACE, ACTIONS, config, num_envs=WORLDS, directory=directory, compile="off")


def new_step() -> dict[str, torch.Tensor]:
    """Return a step of all worlds as the replay stores it."""
    flags = dict.fromkeys(("is_first", "is_last", "is_terminal"), torch.zeros(WORLDS, dtype=torch.bool))
    step = {"pixels/front": torch.randint(256, (WORLDS, 48, 48, 3), dtype=torch.uint8), "reward": torch.rand(WORLDS)}
    latents = {"deter": torch.zeros(WORLDS, 512), "stoch": torch.zeros(WORLDS, 32)}
    return step | latents | flags | {"action": torch.rand(WORLDS, 7)}


def take_turn(agent: DreamerV3, steps: list[dict[str, torch.Tensor]], *, learn: bool) -> tuple[float, float]:
    """Add steps, sample, perhaps make an update; returns the seconds before the update, and of all."""
    start = time.perf_counter()
    for step in steps:
        agent.replay.add(step)
    agent.replay.sample(agent.config.batch_size)
    own = time.perf_counter() - start
    if learn:
        agent.update()
    return own, time.perf_counter() - start


def main() -> None:
    asked = {"gib": "20", "seconds": "120", "dir": ".", "cold": "false"}
    asked |= dict(argument.split("=") for argument in sys.argv[1:])
    torch.manual_seed(0)
    limit, peak, steps = float(asked["seconds"]), 0.0, [new_step() for _ in range(16)]
    with tempfile.TemporaryDirectory(dir=asked["dir"]) as place:
        agents = {"memory": make("device", 50_000, Path(place))}
        each = sum(ring[0, 0].nbytes for ring in agents["memory"].replay.storage.values())
        agents["disk"] = make("disk", int(float(asked["gib"]) * 2**30 / each), Path(place))
        began = time.perf_counter()
        for agent in agents.values():
            for number in range(agent.replay.length + 100):
                agent.replay.add(steps[number % 16])
                if number % 1000 == 0:
                    peak = max(peak, resident())
        filled = time.perf_counter() - began
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in agents}
        for number in range(ROUNDS):
            for name in ("memory", "disk") if number % 2 else ("disk", "memory"):
                seconds[name].append(take_turn(agents[name], steps, learn=True))
            peak = max(peak, resident())
        for name in ("disk, alone", "disk, alone, cold") if asked["cold"] == "true" else ("disk, alone",):
            began, seconds[name] = time.perf_counter(), []
            while time.perf_counter() - began < limit / (1 + (asked["cold"] == "true")):
                if "cold" in name:
                    empty_cache(agents["disk"])
                seconds[name].append(take_turn(agents["disk"], steps, learn=False))
                peak = max(peak, resident())
    print(f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}, filled in {filled:.0f} s")
    print(agents["disk"].describe()["memory"])
    print("| ring | add 256 steps and sample, ms | with an update, ms | rounds |\n|---|---|---|---|")
    for name, rounds in seconds.items():
        own, whole = (1000 * statistics.median(part) for part in zip(*rounds, strict=True))
        print(f"| {name} | {own:.1f} | {'' if 'alone' in name else f'{whole:.0f}'} | {len(rounds)} |")
    ratio = statistics.median(a[1] / b[1] for a, b in zip(seconds["memory"], seconds["disk"], strict=True))
    print(f"speed with the file: {ratio:.2f} of that in memory; peak of the resident set: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
