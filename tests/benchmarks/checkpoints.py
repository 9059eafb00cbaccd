"""Cost of a checkpoint: ``python tests/benchmarks/checkpoints.py env=… agent=… agent.replay_size=… [out=…]``.

The replay is filled, and saved at once; then with ``NEW`` policy steps more each time. What the run loses is the wait,
and what its iterations take longer than usual until all is on the disk.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from sheeplike.checkpoint import Writer
from sheeplike.commands.bench import compose
from sheeplike.config.sources import Sources
from sheeplike.tools.bench import Bench, Table

NEW = 20_000  # policy steps between two checkpoints
LATER = 3  # checkpoints after the first
COLUMNS = ["the run waits, s", "until it is on the disk, s", "written, MiB", "the run loses, s"]


def main() -> None:
    asked, composed = compose(sys.argv[1:], Sources())
    bench = Bench(composed.config, seconds=asked.seconds, rounds=asked.rounds)
    agent = bench.make_agent(composed.config.agent, composed.config.compile)
    run, _ = bench.learning_loop(agent)
    replay = agent.history
    if replay is None:
        raise SystemExit(f"agent={composed.config.agent.name} has no replay")
    step = {key: ring[0].clone() for key, ring in replay.storage.items()}

    def grow(policy_steps: int) -> None:
        for _ in range(policy_steps // replay.num_envs):
            replay.add(step)

    rows = []
    place = asked.out or "."
    with tempfile.TemporaryDirectory(dir=place) as root, Writer(Path(root, "checkpoints"), keep_best=0) as writer:
        grow(replay.length * replay.num_envs)
        for number in range(1 + LATER):
            usual = statistics.median(spent / done for spent, done in (run(1) for _ in range(3)))
            start, began, iterations = time.perf_counter(), time.time(), 0
            state = agent.state_dict(history=False)
            parts = {"agent": agent.state_dict(replay=False)}
            parts["memory"] = {name: value for name, value in state.items() if name not in parts["agent"]}
            writer.save(number, parts, {}, replay)
            blocked = time.perf_counter() - start
            waiting = threading.Thread(target=writer.wait)
            waiting.start()
            while waiting.is_alive():
                iterations += run(1)[1]
            writer.wait()  # raises if the save failed
            seconds = time.perf_counter() - start
            new = [file.stat() for file in Path(root).rglob("*.pt") if file.stat().st_mtime >= began]
            written = sum(file.st_size for file in new) / 2**20
            # The rest may drown in noise.
            rows.append((blocked, seconds, written, max(seconds - iterations * usual, blocked)))
            grow(NEW)
    first, later = rows[0], zip(*rows[1:], strict=True)
    table = Table("checkpoint", f"Checkpoints with {len(replay):,} policy steps in the replay", COLUMNS)
    table.rows = {"the first": [[value] for value in first], f"with {NEW:,} new ones": [list(cell) for cell in later]}
    print(table)


if __name__ == "__main__":
    main()
