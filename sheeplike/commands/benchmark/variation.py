"""What it costs that worlds differ, beside the same worlds that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sheeplike.commands.benchmark.common import IMPOSSIBLE, Bench
from sheeplike.commands.benchmark.layers import Actions, VectorEnvLoop
from sheeplike.commands.benchmark.measure import Task, interleaved, rate, ratio
from sheeplike.commands.benchmark.tables import Table
from sheeplike.commands.building import make_envs
from sheeplike.commands.errors import as_command_errors
from sheeplike.monitor.progress import phase

Lines = dict[str, dict[str, Any]]


def _scaled(*fields: str, **more: Any) -> dict[str, Any]:
    return {"field": list(fields), "operation": "scale", "distribution": {"uniform": [0.9, 1.1]}, **more}


SCALARS: Lines = {
    "gravity": _scaled("opt.gravity"),
    "timestep": _scaled("opt.timestep"),
}
GEOMS: Lines = {"colours": _scaled("geom_rgba"), "friction": _scaled("geom_friction")}
BODIES: Lines = {"masses": _scaled("body_mass", "body_inertia"), "armature": _scaled("dof_armature")}
RECIPES = {
    "a few scalars": SCALARS,
    "+ colour and friction of every geom": SCALARS | GEOMS,
    "+ mass of every body": SCALARS | GEOMS | BODIES,
}


def variation(bench: Bench) -> Table:
    """Steps per second of the run's worlds by what differs between them, taken in turns."""
    table = Table("variation", "Randomization", ["policy steps/s", "relative to none"])
    recipes: dict[str, Lines] = {"none": {}, **RECIPES}
    if bench.config.randomization:
        recipes["as configured"] = bench.config.randomization
    benches = {
        name: Bench(replace(bench.config, randomization=lines), bench.fabric, bench.seconds, bench.rounds)
        for name, lines in recipes.items()
    }
    tasks: dict[str, Task] = {}
    for name, own in benches.items():
        with as_command_errors(*IMPOSSIBLE):
            own.worlds = make_envs(own.config, own.config.env.num_envs, own.device)
        own.compile_worlds()
        tasks[name] = VectorEnvLoop(own, Actions(own).torch)
    with phase("timing worlds that differ"):
        taken = interleaved(tasks, seconds=bench.seconds, rounds=bench.rounds, alike=True)
    worlds = bench.config.env.num_envs
    for name, seconds in taken.items():
        relative = "" if name == "none" else ratio(taken["none"], seconds)
        table.rows[name] = [rate(seconds, worlds, "policy steps/s"), relative]
        benches[name].worlds.close()
    table.notes.append(f"{worlds} worlds; each draws anew at its reset, and every step carries what was drawn.")
    return table
