"""States that agents visit in MiniGrid's FourRooms, with walls, start and goal that never move.

    python tests/benchmarks/explore_grid.py to.json plan2explore 0 20000 [overrides of the run…]
    python tests/benchmarks/explore_grid.py draw howto/runs/explore_grid to.png

The agent is ``random``, ``dreamer_v3`` or ``plan2explore``; the numbers are seed and policy steps. A state is the
agent's cell and direction: there are 1,040. Every 500 policy steps ``to.json`` gets the number of different states
visited, and how often the goal was reached, both without evaluations. Those are off unless an override sets
``eval.every``. With ``resume=auto`` among the overrides, a run that was stopped by SIGTERM goes on.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from matplotlib.figure import Figure
from minigrid.envs.fourrooms import FourRoomsEnv

import sheeplike
from sheeplike.analysis.figure import COLOURS
from sheeplike.analysis.runs import read_rows

ID, LAYOUT, WORLDS, EVERY = "MiniGrid-FourRooms-v0", 0, 16, 500
visited: set[tuple[int, int, int]] = set()
goals: list[float] = []


class FixedFourRooms(FourRoomsEnv):
    """FourRooms with one layout, in which each state is counted until :attr:`counts` is False."""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.counts = type(self).counts

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        found = super().reset(seed=LAYOUT, options=options)
        self._count()
        return found

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        found = super().step(action)
        self._count()
        if self.counts and found[1]:
            goals.append(found[1])
        return found

    def _count(self) -> None:
        if self.counts:
            visited.add((int(self.agent_pos[0]), int(self.agent_pos[1]), int(self.agent_dir)))


gymnasium.registry[ID].entry_point = FixedFourRooms


def act_at_random(seed: int, steps: int, note: Callable[[], None]) -> None:
    """Take random actions, and call ``note`` every :data:`EVERY` steps of all worlds."""
    envs = [gymnasium.make(ID) for _ in range(WORLDS)]
    for number, env in enumerate(envs):
        env.action_space.seed(seed * WORLDS + number)
        env.reset()
    for step in range(0, steps, WORLDS):
        for env in envs:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        if (step + WORLDS) // EVERY > step // EVERY:
            note()


def train(agent: str, seed: int, steps: int, overrides: list[str], note: Callable[[], None], places: Path) -> None:
    """Train an agent, and call ``note`` every :data:`EVERY` policy steps.

    Args:
        places: file for the states visited and the goals so far, from which a resumed run goes on.
    """
    job = [f"exp={agent}", "env=minigrid", f"env.id={ID}", f"env.num_envs={WORLDS}", f"seed={seed}"]
    job += [] if any(override.startswith("eval.every=") for override in overrides) else ["eval.every=null"]
    with sheeplike.init(*job, f"total_steps={steps}", "video_every=null", *overrides) as run:
        visited.clear()  # the first steps, which only warm up, do not count
        goals.clear()
        if run.policy_steps:
            before = json.loads(places.read_text(encoding="utf-8"))
            visited.update(map(tuple, before["states"]))
            goals.extend(before["goals"])
        FixedFourRooms.counts = False  # worlds made from now on are those of evaluations
        while not run.over:
            start = run.policy_steps
            run.iterate(EVERY)
            if run.policy_steps // EVERY > start // EVERY:  # else it was stopped
                note()
            places.write_text(json.dumps({"states": sorted(visited), "goals": goals}) + "\n")


def draw(place: Path) -> Figure:
    """Draw the states visited, and the evaluations of the task, of the runs in a directory."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    visits, task = figure.subplots(1, 2)
    kinds = {
        "p2e": "plan2explore",
        "plain": "dreamer_v3",
        "random": "random actions",
        "narrow": "plan2explore, 64 units",
    }
    for color, (kind, label) in zip(COLOURS, kinds.items(), strict=False):
        for number, file in enumerate(sorted(place.glob(f"{kind}_?.json"))):
            found = json.loads(file.read_text(encoding="utf-8"))
            steps = found["every"] * np.arange(1, len(found["states"]) + 1)
            visits.plot(steps, found["states"], color=color, label=None if number else label)
    for color, kind, label in (
        (COLOURS[0], "from", "from explored"),
        (COLOURS[3], "narrow_from", "from explored, 64 units"),
        (COLOURS[1], "plain", "from nothing"),
    ):
        for number, run in enumerate(sorted(place.glob(f"{kind}_?/metrics.jsonl"))):
            points = [(s, row["eval/return_mean"]) for s, _, row in read_rows(run) if "eval/return_mean" in row]
            task.plot(*zip(*points, strict=True), color=color, label=None if number else label)
    for axis, title in ((visits, "different states visited, of 1,040"), (task, "return of 16 evaluation episodes")):
        axis.set_title(title, loc="left")
        axis.set_xlabel("policy steps")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    return figure


def main() -> None:
    if sys.argv[1] == "draw":
        draw(Path(sys.argv[2])).savefig(sys.argv[3], dpi=110)
        return
    path, agent, seed, steps, *overrides = sys.argv[1:]
    found: dict[str, Any] = {"agent": agent, "seed": int(seed), "every": EVERY, "states": [], "goals": []}
    if "resume=auto" in overrides and Path(path).exists():
        found = json.loads(Path(path).read_text(encoding="utf-8"))

    def note() -> None:
        found["states"].append(len(visited))
        found["goals"].append(len(goals))
        Path(path).write_text(json.dumps(found) + "\n")

    if agent == "random":
        act_at_random(int(seed), int(steps), note)
    else:
        train(agent, int(seed), int(steps), overrides, note, Path(path).with_suffix(".places"))
    print(f"{agent}, seed {seed}, {steps} policy steps: {found['states'][-1]} states, {found['goals'][-1]} goals")


if __name__ == "__main__":
    main()
