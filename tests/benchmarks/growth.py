"""Growth of speed and memory: ``python tests/benchmarks/growth.py env=… agent=… [key=value …] -- key=value …``.

Each change behind ``--`` is a row, measured in a process of its own: its peak of memory is its own, and one that does
not fit costs only its own row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sheeplike.tools.bench import Cell, Table

COLUMNS = {
    "policy steps/s of the vector env": ("steps", "+ vector env", "policy steps/s"),
    "ms per eager update": ("update", "eager", "ms"),
    "MiB of the process": ("memory", "process, resident set", "MiB"),
    "MiB of torch": ("memory", "torch, allocated", "MiB"),
}
PARTS = ["parts=[envs,update,memory]", "modes=[off]", "compile=off"]


def measure(arguments: list[str]) -> list[Cell] | str:
    """A row, or why there is none."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "sheeplike", "bench", *PARTS, *arguments, f"out={out}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip().rpartition("\n")[2]
        tables = json.loads(Path(out, "bench.json").read_text())["tables"]
    cells = (tables[table]["rows"].get(row, {}).get(column) for table, row, column in COLUMNS.values())
    return [cell["samples"] if cell else "" for cell in cells]


def main() -> None:
    split = sys.argv.index("--")
    common, changes = sys.argv[1:split], sys.argv[split + 1 :]
    table = Table("growth", "Growth", list(COLUMNS))
    for change in changes:
        print(change, flush=True)
        found = measure([*common, change])
        if isinstance(found, str):
            table.notes.append(f"{change}: {found}")
        else:
            table.rows[change] = found
    print(table)


if __name__ == "__main__":
    main()
