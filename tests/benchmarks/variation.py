"""Cost of worlds that differ: ``python tests/benchmarks/variation.py env=… agent=… [randomization=…]``."""

from __future__ import annotations

import sys
from typing import Any

from sheeplike.commands.bench import compose
from sheeplike.config.sources import Sources
from sheeplike.tools.bench import Bench, Table, ratio


def scaled(*fields: str) -> dict[str, Any]:
    """A line that scales fields by up to a tenth."""
    return {"field": list(fields), "operation": "scale", "distribution": {"uniform": [0.9, 1.1]}}


SCALARS = {"gravity": scaled("opt.gravity"), "timestep": scaled("opt.timestep")}
GEOMS = SCALARS | {"colours": scaled("geom_rgba"), "friction": scaled("geom_friction")}
BODIES = GEOMS | {"masses": scaled("body_mass", "body_inertia"), "armature": scaled("dof_armature")}
RECIPES = {
    "none": {},
    "a few scalars": SCALARS,
    "+ colour and friction of every geom": GEOMS,
    "+ mass of every body": BODIES,
}


def main() -> None:
    asked, composed = compose(sys.argv[1:], Sources())
    config, recipes = composed.config, dict(RECIPES)
    if config.randomization:
        recipes["as configured"] = config.randomization
    options = {"seconds": asked.seconds, "rounds": asked.rounds}
    benches = {name: Bench(config.replace(randomization=lines), **options) for name, lines in recipes.items()}
    tasks = {name: bench.simulation({"envs"})["+ vector env"] for name, bench in benches.items()}
    table = Table("variation", "Randomization", ["policy steps/s", "relative to none"])
    taken = benches["none"].timed(tasks)
    for name, seconds in taken.items():
        relative = "" if name == "none" else ratio(taken["none"], seconds)
        table.rows[name] = [[config.env.num_envs / one for one in seconds], relative]
    print(table)


if __name__ == "__main__":
    main()
