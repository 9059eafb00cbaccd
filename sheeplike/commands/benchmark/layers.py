"""From the bare simulation to the whole run, layer by layer, in policy steps per second.

Every layer is timed without waiting for the device between two steps, as a run does not either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.commands.agents import learning_begins, name_collecting
from sheeplike.commands.benchmark.common import Bench, compile_mode
from sheeplike.commands.benchmark.measure import Task, interleaved, milliseconds, rate, ratio
from sheeplike.commands.benchmark.tables import Cell, Table
from sheeplike.commands.kinds import kind_of
from sheeplike.commands.schema import Config
from sheeplike.envs.mjx.rendering import NoRenderer
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.loop import LoopState, train
from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer
from sheeplike.monitor.progress import phase

ACTIONS = 16  # different ones, made before the clock starts and used in turns
UNIT = "steps/s"
LAYERS = ("physics", "+ render", "+ vector env", "+ acting", "+ learning")
WARM_UP = 6  # calls of acting: a CUDA graph is captured after some that are not
FEW = 16  # worlds of a small run, for which acting is timed in any case


class Actions:
    """The same random actions as torch and as JAX have them, in turns.

    Two layers that take equally many steps from the same seed simulate the same episodes.
    """

    def __init__(self, bench: Bench) -> None:
        space = bench.worlds.single_action_space
        drawn = np.random.default_rng(bench.config.seed).uniform(
            space.low, space.high, (ACTIONS, bench.worlds.num_envs, *space.shape)
        )
        self.torch = [torch.from_numpy(one.astype(np.float32)).to(bench.device) for one in drawn]
        # Flat and committed to the device, as the vector env hands them over: JAX compiles once for both.
        place = bench.worlds.simulator.device
        self.jax = [jax.device_put(one.astype(np.float32).reshape(-1), place) for one in drawn]


class BareLoop:
    """The jitted step and nothing else; what it compiles, it compiles here.

    Attributes:
        output: of the last step.
    """

    def __init__(self, simulator: Simulator, actions: Sequence[jax.Array], seed: int) -> None:
        self.simulator, self.actions, self.steps = simulator, actions, 0
        # The step that begins all episodes ignores its actions, as the reset of the vector env does.
        self.variation, self.state, self.output = simulator.step(*simulator.start(seed), actions[0])

    def __call__(self, calls: int) -> float:
        variation, state, step = self.variation, self.state, self.simulator.step
        start = time.perf_counter()
        for _ in range(calls):
            variation, state, output = step(variation, state, self.actions[self.steps % ACTIONS])
            self.steps += 1
        jax.block_until_ready(output)
        seconds = time.perf_counter() - start
        self.variation, self.state, self.output = variation, state, output
        return seconds


class VectorEnvLoop:
    """The same worlds as torch sees them.

    Attributes:
        obs: of the last step.
    """

    def __init__(self, bench: Bench, actions: Sequence[Tensor]) -> None:
        self.bench, self.actions, self.steps = bench, actions, 0
        self.obs, _ = bench.worlds.reset(seed=bench.config.seed)

    def __call__(self, calls: int) -> float:
        step = self.bench.worlds.step
        start = time.perf_counter()
        for _ in range(calls):
            obs, reward, *_ = step(self.actions[self.steps % ACTIONS])
            self.steps += 1
        reward.sum().item()
        self.bench.wait()
        seconds = time.perf_counter() - start
        self.obs = obs
        return seconds


def simulation(bench: Bench, parts: Sequence[str], table: Table) -> Table:
    """The table with the rows ``physics``, ``+ render`` and ``+ vector env``, those that are asked for, in turns."""
    worlds, seed = bench.worlds, bench.config.seed
    bench.compile_worlds()
    actions = Actions(bench)
    tasks: dict[str, Task] = {}
    if "physics" in parts:
        simulator = worlds.simulator
        physics = Simulator(
            simulator.task,
            NoRenderer(worlds.num_envs),
            num_envs=worlds.num_envs,
            device=simulator.device,
            randomization=simulator.randomization,
        )
        with phase("building kernels without rendering"):
            tasks["physics"] = BareLoop(physics, actions.jax, seed)
    if "worlds" in parts:
        tasks["+ render"] = BareLoop(worlds.simulator, actions.jax, seed)
        tasks["+ vector env"] = VectorEnvLoop(bench, actions.torch)
    with phase(f"timing {' and '.join(tasks)}"):
        taken = interleaved(tasks, seconds=bench.seconds, rounds=bench.rounds, alike=True)
    bare = taken.get("+ render")
    for name, seconds in taken.items():
        _put(table, name, seconds, worlds.num_envs, ratio(bare, seconds) if bare and seconds is not bare else "")
    return table


def acting(bench: Bench, table: Table) -> list[Table]:
    """The table with the row ``+ acting``, and a table of what acting alone takes."""
    agent, worlds = bench.agent, bench.worlds
    bench.compile_worlds()
    obs, _ = worlds.reset(seed=bench.config.seed)
    no = torch.zeros(worlds.num_envs, dtype=torch.bool, device=bench.device)
    both = {"+ acting": _act_and_step(bench, agent.player(worlds.num_envs), obs, ~no)}
    alone = {}
    for count in sorted({FEW, worlds.num_envs}):
        some = torch.arange(count, device=bench.device) % worlds.num_envs
        seen = {key: value[some] for key, value in obs.items()}
        alone[f"{count} worlds"] = _act(bench, agent.player(count), seen, no[some])
    with phase("building acting"):
        for task in (both | alone).values():
            task(WARM_UP)
    budget = {"rounds": bench.rounds, "warm": True}
    with phase("timing + acting"):
        (taken,) = interleaved(both, seconds=bench.seconds, **budget).values()
        _put(table, "+ acting", taken, worlds.num_envs)
    with phase("timing acting alone"):
        taken = interleaved(alone, seconds=bench.seconds / 4, **budget)
    rows = {name: [milliseconds(seconds)] for name, seconds in taken.items()}
    return [table, Table("acting", "Acting alone", ["ms per call"], rows)]


def _act_and_step(bench: Bench, player: Any, obs: dict[str, Tensor], is_first: Tensor) -> Task:
    is_last = torch.zeros_like(is_first)

    def run(calls: int) -> float:
        nonlocal obs, is_first, is_last
        start = time.perf_counter()
        for _ in range(calls):
            obs, _, terminated, truncated, _ = bench.worlds.step(player.act(obs, is_first))
            is_first, is_last = is_last, terminated | truncated
        is_first.sum().item()
        bench.wait()
        return time.perf_counter() - start

    return run


def _act(bench: Bench, player: Any, obs: dict[str, Tensor], is_first: Tensor) -> Task:
    def run(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            action = player.act(obs, is_first)
        action.sum().item()
        bench.wait()
        return time.perf_counter() - start

    return run


class Observer:
    """Takes in what a run takes in, and writes nothing."""

    def __init__(self, bench: Bench) -> None:
        self.episodes = EpisodeStatistics(bench.worlds.num_envs, bench.device)
        self.metrics = MetricBuffer()

    def stepped(self, step: Step, info: dict[str, Any]) -> None:
        self.episodes.add(step.reward, step.is_terminal, step.is_last & ~step.is_terminal, info)

    def learned(self, metrics: dict[str, Tensor]) -> None:
        self.metrics.add(metrics)


def learning(bench: Bench, table: Table) -> Table:
    """The table with the row ``+ learning``: the loop of a run, at its ratio of learning to acting."""
    run, state = learning_loop(bench)
    worlds, each = bench.worlds, period(bench.config)
    before = state.policy_steps, state.gradient_steps
    with phase("timing + learning"):
        (taken,) = interleaved(
            {"": lambda calls: run(calls * each)}, seconds=bench.seconds, rounds=bench.rounds, warm=True
        ).values()
    steps, updates = state.policy_steps - before[0], state.gradient_steps - before[1]
    _put(table, "+ learning", [seconds / each for seconds in taken], worlds.num_envs)
    table.notes.append(f"Learning: {updates} updates in {steps:,} policy steps, {updates / steps:.4g} per step.")
    return table


def learning_loop(bench: Bench) -> tuple[Callable[[int], float], LoopState]:
    """The loop of a run that has begun to learn: does so many iterations, and returns the seconds that they took."""
    bench.compile_worlds()
    agent, worlds = bench.agent, bench.worlds
    state = LoopState.begin(agent, worlds, bench.config.seed)
    observer = Observer(bench)

    def run(iterations: int) -> float:
        start = time.perf_counter()
        total = state.policy_steps + iterations * worlds.num_envs
        train(agent, worlds, state, total_steps=total, observer=observer)
        state.step.reward.sum().item()
        bench.wait()
        return time.perf_counter() - start

    with phase(name_collecting(bench.config)):
        run(learning_begins(bench.config) // worlds.num_envs)
    with phase("compiling the update" if compile_mode(agent) != "off" else "trying one update"):
        bench.warm_up(agent)
    with phase("the first updates"):
        while not state.gradient_steps:
            run(1)
    return run, state


def period(config: Config) -> int:
    """Iterations after which acting and learning begin anew: a round that is cut elsewhere measures too much of one."""
    return kind_of(config.agent).benchmark(config).period


def steps_table() -> Table:
    """The table that all layers share, still without rows."""
    return Table(
        "steps",
        "Policy steps per second",
        [UNIT, "ms per step of all worlds", "relative to + render"],
        notes=[
            "physics: the jitted simulation without rendering; + render: with it, still a bare loop; + vector env: the "
            "same worlds as torch sees them; these three in turns, through the same episodes. + acting: with the "
            "agent's actions. + learning: the loop of a run, at its ratio of updates to steps."
        ],
    )


def _put(table: Table, name: str, seconds: Sequence[float], num_envs: int, relative: Cell = "") -> None:
    """Add a row; the bare simulation comes first and the whole run last, in whatever order they are measured."""
    table.rows[name] = [rate(seconds, num_envs, UNIT), milliseconds(seconds), relative]
    table.rows = {layer: table.rows[layer] for layer in LAYERS if layer in table.rows}
