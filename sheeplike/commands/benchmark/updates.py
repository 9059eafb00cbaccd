"""One gradient update: how long it takes eager, compiled and captured, and how much it asks of the device."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sheeplike.agents.agent import Agent, Step
from sheeplike.agents.spaces import ObservationKeys
from sheeplike.commands.benchmark.common import Bench
from sheeplike.commands.benchmark.measure import interleaved, milliseconds, once, ratio
from sheeplike.commands.benchmark.tables import Table
from sheeplike.commands.errors import CommandError
from sheeplike.commands.kinds import kind_of
from sheeplike.monitor.progress import phase
from sheeplike.nn.compilation import keep_freed_memory

MODES = {"off": "eager", "inductor": "compiled", "graph": "captured"}  # as `compile=` has them, and for people
KEPT = "eager, freed memory kept"
EXPERIENCES = 4  # different steps of all worlds, remembered in turns


class Learner:
    """An agent with a replay that is as small as can be, so that several fit beside each other.

    Args:
        bench: what is measured.
        steps: see :func:`experiences`.
        mode: one of :data:`MODES`.

    Attributes:
        agent: it can make an update now.
        cycle: updates that it makes before it remembers again.
    """

    def __init__(self, bench: Bench, steps: Sequence[Step], mode: str = "off") -> None:
        self.bench, self.steps, self.mode = bench, steps, mode
        measured = kind_of(bench.config.agent).benchmark(bench.config)
        self.agent: Agent = bench.make_agent(replace(measured.smallest, compile=mode))
        self.cycle = measured.cycle
        self.remembered = 0
        self.fill()
        if mode != "off":  # there, the first update, which is never counted, does it all
            bench.warm_up(self.agent)

    def fill(self) -> None:
        """Remember until an update can be made."""
        while not self.agent.updates_due(self.remembered * self.bench.worlds.num_envs):
            self.agent.remember(self.steps[self.remembered % len(self.steps)])
            self.remembered += 1

    def update(self, cycles: int, *, keep: bool | None = None) -> float:
        """Make the updates of so many cycles: a task as measurements take it, without the time of remembering.

        Args:
            keep: on a CPU, whether freed memory is kept as compiled updates do; None: as this agent's own mode does.
        """
        if self.bench.device.type == "cpu":
            keep_freed_memory(self.mode != "off" if keep is None else keep)
        seconds = 0.0
        for rest in range(cycles - 1, -1, -1):
            if self.cycle > 1:
                self.fill()
                self.bench.wait()
            start = time.perf_counter()
            for _ in range(self.cycle):
                metrics = self.agent.update()
            if self.cycle > 1 or rest == 0:
                metrics["loss/total"].item()
                self.bench.wait()
            seconds += time.perf_counter() - start
        return seconds


def experiences(bench: Bench) -> list[Step]:
    """Steps of the right shapes for an agent to remember; what they show does not change what an update costs."""
    smallest = kind_of(bench.config.agent).benchmark(bench.config).smallest
    player = bench.make_agent(replace(smallest, compile="off")).player(bench.worlds.num_envs)
    generator = torch.Generator(bench.device).manual_seed(bench.config.seed)
    no = torch.zeros(bench.worlds.num_envs, dtype=torch.bool, device=bench.device)
    steps = []
    for _ in range(EXPERIENCES):
        obs = _random_observations(bench, generator)
        step = Step(obs, player.act(obs, no), no.float(), is_first=no, is_last=no, is_terminal=no, extras=player.extras)
        steps.append(step)
    return steps


def updates(bench: Bench, modes: Sequence[str]) -> Table:
    """One row for each way to make an update, taken in turns in one process."""
    bench.forget_agent()
    cuda = bench.device.type == "cuda"
    counted = list(COUNTED) if cuda else ["operator calls"]
    table = Table("update", "One update", ["ms", "times as fast as eager", *counted, "s to compile"])
    steps = experiences(bench)
    learners: dict[str, Learner] = {}
    for mode in modes:
        with phase(f"building the {MODES[mode]} update"):
            problem = _build(bench, steps, mode, learners)
        if problem:
            table.rows[MODES[mode]] = ["-"] * len(table.columns)
            table.notes.append(f"{MODES[mode]}: {problem}.")
    tasks = {mode: learner.update for mode, learner in learners.items()}
    if "off" in learners and len(learners) > 1 and not cuda:
        tasks[KEPT] = partial(learners["off"].update, keep=True)
    with phase("timing updates"):
        taken = interleaved(tasks, seconds=bench.seconds, rounds=bench.rounds)
    for mode, learner in learners.items():
        with phase(f"counting what the {MODES[mode]} update asks for"):
            counts = count(learner)
        table.rows[MODES[mode]] = [
            milliseconds([seconds / learner.cycle for seconds in taken[mode]]),
            ratio(taken["off"], taken[mode]) if "off" in taken and mode != "off" else "",
            *(once(counts[name]) for name in counted),
            once(bench.compile_seconds[mode], "s") if mode != "off" else "",
        ]
    if KEPT in taken:
        learner, nothing = learners["off"], [""] * (len(counted) + 1)
        quick = ratio(taken["off"], taken[KEPT])
        table.rows[KEPT] = [milliseconds([seconds / learner.cycle for seconds in taken[KEPT]]), quick, *nothing]
        table.notes.append(f"{KEPT}: with the part of compile=inductor that is not compiling.")
    table.rows = {name: table.rows[name] for name in (*MODES.values(), KEPT) if name in table.rows}
    table.notes.insert(0, _describe(bench))
    if learners.keys() - {"off"}:
        table.notes.append("To compile takes less where the caches of an earlier run are found.")
    return table


def _build(bench: Bench, steps: Sequence[Step], mode: str, learners: dict[str, Learner]) -> str:
    """Add the learner of a mode; returns why it cannot be had here, or nothing."""
    try:
        learner = Learner(bench, steps, mode)
    except CommandError as error:
        return str(error)
    except Exception as error:
        if mode == "off":
            raise
        # Compilers fail in many ways; the other modes can be measured all the same.
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if mode != "off" and not hasattr(learner.agent, "compiled"):
        return f"{bench.config.agent.name} compiles nothing"
    learners[mode] = learner
    return ""


# Columns, and the beginnings of the names by which the profiler knows what they count.
COUNTED = {
    "operator calls": ("aten::",),
    "kernel launches": ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchCooperativeKernel"),
    "copies and fills": ("cudaMemcpy", "cudaMemset"),
    "graph launches": ("cudaGraphLaunch",),
}


def count(learner: Learner) -> dict[str, float]:
    """What one update asks for, on average; a call of an operator within another one does not count."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if learner.bench.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    learner.fill()
    with _quiet(), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(learner.cycle):
            learner.agent.update()
        learner.bench.wait()
    events = profiler.events()
    found = dict.fromkeys(COUNTED, 0.0)
    for event in events:
        for name, beginnings in COUNTED.items():
            nested = event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")
            if event.name.startswith(beginnings) and not (name == "operator calls" and nested):
                found[name] += 1 / learner.cycle
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler tells the standard error, in C++, that it starts and stops."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _random_observations(bench: Bench, generator: torch.Generator) -> dict[str, Tensor]:
    """Random observations of all worlds."""
    obs = {}
    for key, space in bench.worlds.single_observation_space.items():
        shape, place = (bench.worlds.num_envs, *space.shape), {"device": bench.device, "generator": generator}
        if space.dtype == "uint8":
            obs[key] = torch.randint(0, 256, shape, dtype=torch.uint8, **place)
        else:
            obs[key] = torch.rand(shape, **place)
    return obs


def _describe(bench: Bench) -> str:
    config = bench.config
    keys = ObservationKeys(bench.worlds.single_observation_space, getattr(config.agent, "observations", ()))
    shapes = {keys.spaces[key].shape[:2] for key in keys.images}
    images = " and ".join("x".join(map(str, shape)) for shape in sorted(shapes)) or "no"
    return f"{kind_of(config.agent).benchmark(config).update}, {images} images, {config.fabric.precision}."
