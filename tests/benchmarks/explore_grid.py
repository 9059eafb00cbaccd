"""States that agents visit in MiniGrid's FourRooms, with walls, start and goal that never move.

    python tests/benchmarks/explore_grid.py to.json plan2explore 0 10000 [overrides of the run…]

The agent is ``random``, ``dreamer_v3`` or ``plan2explore``; the numbers are seed and policy steps. A state is the
agent's cell and direction: there are 1,040. ``to.json`` gets the number of different states every 500 policy steps, and
how often the goal was reached.
"""

from __future__ import annotations

import collections
import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
from minigrid.envs.fourrooms import FourRoomsEnv

import sheeplike

ID, LAYOUT, WORLDS, EVERY = "MiniGrid-FourRooms-v0", 0, 16, 500
visited: collections.Counter[tuple[int, int, int]] = collections.Counter()
goals: list[float] = []


class FixedFourRooms(FourRoomsEnv):
    """FourRooms with one layout, in which each state is counted."""

    def reset(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found = super().reset(seed=LAYOUT)
        self._count()
        return found

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        found = super().step(action)
        self._count()
        goals.extend([found[1]] if found[1] else [])
        return found

    def _count(self) -> None:
        visited[int(self.agent_pos[0]), int(self.agent_pos[1]), int(self.agent_dir)] += 1


gymnasium.registry[ID].entry_point = FixedFourRooms


def count_random(seed: int, steps: int) -> list[int]:
    """Return the states that random actions have visited every :data:`EVERY` steps of all worlds."""
    counts, envs = [], [gymnasium.make(ID) for _ in range(WORLDS)]
    for number, env in enumerate(envs):
        env.action_space.seed(seed * WORLDS + number)
        env.reset()
    for step in range(0, steps, WORLDS):
        for env in envs:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            if terminated or truncated:
                env.reset()
        if (step + WORLDS) // EVERY > step // EVERY:
            counts.append(len(visited))
    return counts


def count(agent: str, seed: int, steps: int, overrides: list[str]) -> list[int]:
    """Return the states that an agent has visited in training every :data:`EVERY` policy steps."""
    job = [f"exp={agent}", "env=minigrid", f"env.id={ID}", f"env.num_envs={WORLDS}", f"seed={seed}"]
    counts = []
    with sheeplike.init(*job, f"total_steps={steps}", "eval.every=null", "video_every=null", *overrides) as run:
        visited.clear()  # of a first reset, for the spaces
        while not run.over:
            run.iterate(EVERY)
            counts.append(len(visited))
    return counts


def main() -> None:
    path, agent, seed, steps, *overrides = sys.argv[1:]
    counts = (
        count_random(int(seed), int(steps)) if agent == "random" else count(agent, int(seed), int(steps), overrides)
    )
    found = {"agent": agent, "seed": int(seed), "every": EVERY, "states": counts, "goals": len(goals)}
    Path(path).write_text(json.dumps(found) + "\n")
    print(f"{agent}, seed {seed}: {counts[-1]} states and {len(goals)} goals after {steps} policy steps")


if __name__ == "__main__":
    main()
