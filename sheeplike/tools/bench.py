"""Speed of simulation, acting and learning on this machine: the measurements of the ``bench`` command."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import torch
import warp
from torch import Tensor

from sheeplike import checkpoint, envs
from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3.config import WRITE_HEAD, DreamerV3Config
from sheeplike.analysis.comparison import markdown_table, number
from sheeplike.config.errors import as_command_errors
from sheeplike.config.schema import Config
from sheeplike.envs.mjx.rendering.renderer import NoRenderer
from sheeplike.envs.mjx.simulator import Simulator
from sheeplike.files import write_atomically
from sheeplike.loop import LoopState, first_step, train
from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer
from sheeplike.monitor.progress import phase
from sheeplike.nn.compilation import keep_freed_memory
from sheeplike.options import InvalidOption
from sheeplike.ranks import ALONE, Ranks
from sheeplike.run.build import build_envs, describe_device, launch, make_agent, time_envs
from sheeplike.terminal import info

MODES = {"off": "eager", "inductor": "compiled", "graph": "captured"}
MIN_ROUNDS = 3  # fewer rounds have no meaningful quartiles
ACTIONS = 16  # random actions, drawn before the clock starts and used in turns
WARM_UP = 6  # calls before a CUDA graph is captured
FEW = 16  # environments of a small run; acting in so many is always timed
Task = Callable[[int], tuple[float, int]]
"""Does something that many times or more, then waits for the device; returns seconds and the number of times."""
Cell = list[float] | str  # samples in the order in which they were taken, one per round or a single one; or a text


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    return tuple(statistics.quantiles(samples if len(samples) > 1 else [*samples, *samples], n=4, method="inclusive"))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Quotients by round, since a slow moment of the machine slows both sides of a round."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def interleaved(tasks: Mapping[str, Task], *, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Measure all tasks in turns, so that a drift of the machine affects all of them.

    Every second round goes through the tasks backwards. The warm-up is not counted.

    Args:
        seconds: time for each task, over all rounds.
        rounds: maximum number; at least three are measured even if single calls take longer than their share.

    Returns:
        Seconds that each task takes once, one number per round.
    """
    for task in tasks.values():
        task(1)
    once = {name: max(task(1)[0], 1e-6) for name, task in tasks.items()}
    rounds = max(min(rounds, MIN_ROUNDS), min(rounds, int(seconds / max(once.values(), default=seconds))))
    calls = {name: max(int(seconds / rounds / one), 1) for name, one in once.items()}
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds):
        for name in list(tasks)[:: 1 if turn % 2 == 0 else -1]:
            spent, done = tasks[name](calls[name])
            taken[name].append(spent / done)
    return taken


@dataclass
class Table:
    """Cells by row and column; ``str()`` is Markdown with aligned columns, ``key`` the name in JSON."""

    key: str
    title: str
    columns: Sequence[str]
    rows: dict[str, list[Cell]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # sentences

    def to_json(self) -> dict[str, Any]:
        def plain(cell: Cell) -> dict[str, Any] | str:
            return cell if isinstance(cell, str) else {"quartiles": quartiles(cell), "samples": cell}

        rows = {name: dict(zip(self.columns, map(plain, cells), strict=True)) for name, cells in self.rows.items()}
        return {"title": self.title, "rows": rows, "notes": self.notes}

    def __str__(self) -> str:
        rows = [["", *self.columns], *([name, *map(_text, cells)] for name, cells in self.rows.items())]
        return "\n\n".join([f"## {self.title}", markdown_table(rows), *self.notes]) + "\n"


def _text(cell: Cell) -> str:
    """Format the median, with the quartiles of several samples: ``1,234 (1,200 to 1,250)``."""
    if isinstance(cell, str):
        return cell
    low, median, high = map(number, quartiles(cell))
    return f"{median} ({low} to {high})" if len(cell) > 1 else median


def save(place: Path, title: str, facts: Mapping[str, str], settings: Any, tables: Sequence[Table]) -> None:
    """Write ``bench.json`` and ``bench.md``, in place of older ones."""
    data = {"title": title, "facts": facts, "settings": settings, "tables": {one.key: one.to_json() for one in tables}}
    lines = [f"| {name} | {text} |" for name, text in facts.items()]
    place.mkdir(parents=True, exist_ok=True)
    write_atomically(place / "bench.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
    texts = [f"# {title}", "", "| | |", "| --- | --- |", *lines, "", *map(str, tables)]
    write_atomically(place / "bench.md", "\n".join(texts))


class Bench:
    """Measurements of the environments and the agent of a run, each of ``seconds`` in some ``rounds``.

    Attributes:
        compile_seconds: by mode, of the first agent that was compiled: later ones find all kernels in caches.
    """

    def __init__(self, config: Config, *, seconds: float = 5.0, rounds: int = 8) -> None:
        self.config, self.seconds, self.rounds = config, seconds, rounds
        self.simulated = envs.simulated(config.env.name)
        self.fabric = launch(config)
        self.device, self.cuda = self.fabric.device, self.fabric.device.type == "cuda"
        torch.manual_seed(config.seed)
        self.envs = build_envs(config, config.env.num_envs, self.device)
        with phase("building simulation and rendering kernels"):
            time_envs(self.envs, steps=1)
        self.compile_seconds: dict[str, float] = {}

    def facts(self) -> dict[str, str]:
        """Describe the machine, its software and the environments."""
        spaces = self.envs.single_observation_space.spaces.items()
        return {
            "date": datetime.now().astimezone().isoformat(" ", timespec="seconds"),
            "device": describe_device(self.config, self.device),
            "processor": f"{_from_proc('cpuinfo', 'model name')}, {os.cpu_count()} cores",
            "worlds": f"{self.envs.num_envs}: {', '.join(f'{name} {space.shape}' for name, space in spaces)}",
            "versions": ", ".join(f"{name} {version}" for name, version in checkpoint.versions().items() if version),
        }

    def measure(self, parts: Collection[str], modes: Sequence[str]) -> Iterator[Table]:
        """Yield a table for each part; a whole run, if needed, starts before the rest."""
        parts, agent, loop, state = set(parts), None, None, None
        if parts & {"acting", "learning", "memory"}:
            agent = self.make_agent(self.config.agent, self.config.compile)
        if parts & {"learning", "memory"}:
            loop, state = self.learning_loop(agent)
        memory = self.memory(agent) if "memory" in parts else None  # before other parts raise the peak
        if parts - {"update", "memory", "ranks"}:
            yield self.layers(parts, agent, loop, state)
        if memory:
            yield memory
        if "acting" in parts:
            yield self.acting(agent)
        if "ranks" in parts:
            try:
                yield self.ranks()
            except InvalidOption as error:  # the agent learns on one device
                info(f"no table of ranks: {error}")
        if "update" in parts:
            del agent, loop, state
            gc.collect()  # frees the replay before others are made
            yield self.updates(modes)
        self.envs.close()

    # --- what the parts share ---------------------------------------------------------------------------------------

    def make_agent(self, options: Any, compile: str, ranks: Ranks = ALONE) -> Any:
        """Build another agent for the same environments."""
        with as_command_errors(ValueError, TypeError, MemoryError):
            return make_agent(self.config.replace(agent=options, compile=compile), self.envs, self.fabric, ranks)

    def warm_up(self, agent: Any) -> None:
        """Compile and capture the update of an agent with enough experience, as far as this machine can."""
        start = time.perf_counter()
        agent.warm_up()
        mode = agent.networks.compiled.mode.partition(",")[0]
        self.compile_seconds.setdefault(MODES[mode], time.perf_counter() - start)

    def wait(self, value: Any = None) -> None:
        """Wait for torch, for all work that it depends on, and for JAX's ``value``."""
        jax.block_until_ready(value)
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def repeat(self, function: Callable[[], Any]) -> Task:
        """Make a task of a function, without waiting for the device between its calls."""

        def task(calls: int) -> tuple[float, int]:
            start = time.perf_counter()
            for _ in range(calls):
                value = function()
            self.wait(value)
            return time.perf_counter() - start, calls

        task(WARM_UP)
        return task

    def timed(self, tasks: Mapping[str, Task], **options: Any) -> dict[str, list[float]]:
        """Run :func:`interleaved` with this benchmark's seconds and rounds."""
        with phase(f"timing {', '.join(tasks)}"):
            return interleaved(tasks, **{"seconds": self.seconds, "rounds": self.rounds} | options)

    def env_loop(self, act: Callable[[Step], Any]) -> Callable[[], Step]:
        """Make a function that steps the environments with the action that ``act`` chooses for the last step."""
        last = first_step(self.envs.reset(seed=self.config.seed)[0], self.envs.num_envs)

        def step() -> Step:
            nonlocal last
            last.action = act(last)
            obs, reward, terminated, truncated, _ = self.envs.step(last.action)
            last = last.following(last.action, obs, reward, terminated, truncated)
            return last

        return step

    def learning_loop(self, agent: Any) -> tuple[Task, LoopState]:
        """Begin a run until it learns; return its loop, a task whose calls end with an update, and its state."""
        num_envs, options = self.envs.num_envs, self.config.agent
        state = LoopState.begin(agent, self.envs, self.config.seed)
        episodes = EpisodeStatistics(num_envs, self.device)
        # Gathers the same statistics as a run, but writes nothing.
        observer = SimpleNamespace(
            stepped=lambda step, _: episodes.add(step.reward, step.is_terminal, step.is_last & ~step.is_terminal, _),
            learned=MetricBuffer().add,
        )

        def iterate(count: int) -> None:
            train(agent, self.envs, state, total_steps=state.policy_steps + count * num_envs, observer=observer)

        def task(calls: int) -> tuple[float, int]:
            start, before = time.perf_counter(), state.policy_steps
            iterate(calls - 1)
            updates = state.gradient_steps
            while state.gradient_steps == updates:
                iterate(1)
            self.wait()
            return time.perf_counter() - start, (state.policy_steps - before) // num_envs

        with phase(options.collecting):
            iterate(options.first_update(num_envs) // num_envs)
        with phase("compiling the update"):
            self.warm_up(agent)
        with phase("the first updates"):
            task(1)
        return task, state

    # --- the parts --------------------------------------------------------------------------------------------------

    def layers(self, parts: Collection[str], agent: Any, loop: Task | None, state: LoopState | None) -> Table:
        """Measure policy steps per second, from the bare simulation to the whole run, given as its loop and state."""
        tasks = self.simulation(parts)
        if "acting" in parts:
            act = agent.player(self.envs.num_envs).act
            with phase("first steps of the policy"):
                tasks["+ acting"] = self.repeat(self.env_loop(lambda step: act(step.obs, step.is_first)))
        if "learning" in parts:
            tasks["+ learning"], before = loop, (state.policy_steps, state.gradient_steps)
        columns = ["policy steps/s", "ms per step of all worlds", "relative to the layer before"]
        table, above = Table("steps", "Policy steps per second", columns), None
        for name, seconds in self.timed(tasks).items():
            rate = [self.envs.num_envs / one for one in seconds]
            table.rows[name] = [rate, _milliseconds(seconds), ratio(above, seconds) if above else ""]
            above = seconds
        if not self.simulated:
            table.notes.append(f"{self.config.env.name} is not simulated here: its vector env is the lowest layer.")
        if "learning" in parts:
            steps, updates = state.policy_steps - before[0], state.gradient_steps - before[1]
            table.notes.append(f"{updates} updates in {steps:,} policy steps, {updates / steps:.4g} per step.")
        return table

    def simulation(self, parts: Collection[str]) -> dict[str, Task]:
        """Make tasks of the layers below acting, all with the same random actions."""
        tasks, seed = {}, self.config.seed
        self.envs.action_space.seed(seed)
        actions = [self.envs.action_space.sample() for _ in range(ACTIONS)]
        if self.simulated:
            whole = self.envs.simulator
            # Flat and committed to the device, as the vector env passes them: JAX compiles once for both.
            flat = [jax.device_put(action.reshape(-1), whole.device) for action in actions]
            if "physics" in parts:
                no_frames = NoRenderer(whole.task.model, whole.renderer.options, num_envs=whole.num_envs)
                blind = Simulator(whole.task, no_frames, device=whole.device, randomization=whole.randomization)
                with phase("building kernels without rendering"):
                    tasks["physics"] = self.repeat(bare_loop(blind, flat, seed))
            if "envs" in parts:
                tasks["+ render"] = self.repeat(bare_loop(whole, flat, seed))
        if "envs" in parts:
            turns = itertools.cycle([torch.as_tensor(action, device=self.device) for action in actions])
            tasks["+ vector env"] = self.repeat(self.env_loop(lambda step: next(turns)))
        return tasks

    def acting(self, agent: Any) -> Table:
        """Measure acting alone, in few environments and in all of them."""
        obs, tasks = self.envs.reset(seed=self.config.seed)[0], {}
        for count in sorted({FEW, self.envs.num_envs}):
            some = torch.arange(count, device=self.device) % self.envs.num_envs
            seen, no = {key: value[some] for key, value in obs.items()}, torch.zeros_like(some, dtype=torch.bool)
            with phase("first steps of the policy"):
                tasks[f"{count} worlds"] = self.repeat(partial(agent.player(count).act, seen, no))
        taken = self.timed(tasks, seconds=self.seconds / 4)
        rows = {name: [_milliseconds(seconds)] for name, seconds in taken.items()}
        return Table("acting", "Acting alone", ["ms per call"], rows)

    def updates(self, modes: Sequence[str]) -> Table:
        """Measure an update in each mode of compilation; a note says why a mode is unavailable."""
        table = Table("update", "One update", ["ms", "times as fast as eager", "s to compile"])
        options = self.config.agent
        if isinstance(options, DreamerV3Config):  # small replays leave memory for several agents
            num_envs = self.envs.num_envs
            smallest = options.first_update(num_envs) + num_envs * WRITE_HEAD
            options = options.replace(replay_size=min(options.replay_size, smallest))
        agent = self.make_agent(options, "off")
        about = "; ".join(f"{name}: {text}" for name, text in agent.describe().items() if name != "memory")
        steps, tasks = self.experience(agent), {}
        for mode in modes:
            try:
                with phase(f"building the {MODES[mode]} update"):
                    tasks[MODES[mode]] = self.learner(options, mode, steps)
            except Exception as error:  # compilers fail in many ways; the other modes are still measured
                if mode == "off":
                    raise
                table.notes.append(f"{MODES[mode]}: {next(iter(str(error).splitlines()), type(error).__name__)}.")
        if {"eager", "compiled"} <= tasks.keys() and not self.cuda:
            tasks["eager, freed memory kept"] = partial(tasks["eager"], keep=True)
            table.notes.append("Freed memory kept: as compile=inductor does, but without its compilation.")
        taken = self.timed(tasks)
        for name, seconds in taken.items():
            faster = ratio(taken["eager"], seconds) if "eager" in taken and name != "eager" else ""
            compiling = [self.compile_seconds[name]] if name in self.compile_seconds and name != "eager" else ""
            table.rows[name] = [_milliseconds(seconds), faster, compiling]
        table.notes.append(f"{about}.")
        return table

    def ranks(self) -> Table:
        """Count what one of several ranks would send for an update; nothing is sent."""
        counted = Counting(0, max(self.config.ranks, 2))
        with as_command_errors(ValueError):
            options = self.config.agent.divide(counted.size, self.envs.num_envs)
        agent = self.make_agent(options, "off", counted)
        for count, step in enumerate(itertools.cycle(self.experience(agent)), 1):
            agent.add(step)
            if due := agent.updates_due(count * self.envs.num_envs):
                break
        counted.collectives = counted.bytes = 0
        for _ in range(due):
            agent.update()
        cells = [[counted.collectives / due], [counted.bytes / due]]
        return Table("ranks", "What a rank exchanges", ["collectives", "bytes"], {"each update": cells})

    def experience(self, agent: Any) -> list[Step]:
        """Collect a few steps to learn from; their content does not change what an update costs."""
        player = agent.player(self.envs.num_envs)
        loop = self.env_loop(lambda step: player.act(step.obs, step.is_first))
        steps = [loop()]  # the first step begins all episodes
        for _ in range(4):
            steps.append(loop())
            steps[-2].extras = player.extras
        return steps[:-1]

    def learner(self, options: Any, mode: str, steps: Iterable[Step]) -> Task:
        """Make a task of updates alone: each call makes all that are due; adding steps until then is not timed."""
        agent = self.make_agent(options, mode)

        def collect() -> Iterator[int]:
            for count, step in enumerate(itertools.cycle(steps), 1):
                agent.add(step)
                if due := agent.updates_due(count * self.envs.num_envs):
                    yield due

        collected = collect()
        dues = itertools.chain([next(collected)], collected)
        self.warm_up(agent)

        def task(calls: int, *, keep: bool = mode != "off") -> tuple[float, int]:
            keep_freed_memory(keep)  # compiled updates do so on a CPU, for the whole process
            seconds, made = 0.0, 0
            for due in itertools.islice(dues, calls):
                self.wait()
                start = time.perf_counter()
                for _ in range(due):
                    agent.update()
                self.wait()
                seconds, made = seconds + time.perf_counter() - start, made + due
            return seconds, made

        return task

    def memory(self, agent: Any) -> Table:
        """Measure the peaks since the process began."""
        # getrusage would not do: on Linux it begins with the peak of the parent process.
        rows = {"process, resident set": int(_from_proc("self/status", "VmHWM").split()[0]) * 2**10}
        if self.cuda:
            rows["torch, allocated"] = torch.cuda.max_memory_allocated(self.device)
            rows["torch, reserved"] = torch.cuda.max_memory_reserved(self.device)
            if self.simulated:
                stats = self.envs.simulator.device.memory_stats() or {}  # some allocators keep none
                if "peak_bytes_in_use" in stats:
                    rows["JAX"] = stats["peak_bytes_in_use"]
                rows["Warp, without JAX's memory"] = warp.get_mempool_used_mem_high(str(self.device))
            free, total = torch.cuda.mem_get_info(self.device)
            rows["the GPU, all programs, now"] = total - free
        if agent.history is not None:
            rows["the replay, once full"] = sum(ring.nbytes for ring in agent.history.storage.values())
        cells = {name: [[size / 2**20]] for name, size in rows.items()}
        notes = [] if self.cuda else ["The process includes torch, JAX, Warp and the filled part of the replay."]
        return Table("memory", "Peak memory of a run that has begun to learn", ["MiB"], cells, notes)


class Counting(Ranks):
    """One of several ranks, of which all others are like it: exchanges are counted, and nothing is sent."""

    def sum(self, x: Tensor) -> Tensor:
        self.count(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        self.count(x)
        return torch.stack([x] * self.size)


def bare_loop(simulator: Simulator, actions: Sequence[Any], seed: int) -> Callable[[], Any]:
    """Make a function that takes a step of the jitted simulation alone, and returns its output."""
    turns = itertools.cycle(actions)
    # The step that begins all episodes ignores its actions: the vector env's reset does the same.
    variation, state, _ = simulator.step(*simulator.start(seed), actions[0])

    def step() -> Any:
        nonlocal variation, state  # both are donated: nothing else may hold them
        variation, state, output = simulator.step(variation, state, next(turns))
        return output

    return step


def _milliseconds(seconds: Iterable[float]) -> list[float]:
    return [1e3 * one for one in seconds]


def _from_proc(file: str, name: str) -> str:
    """Read the value of a name from a file in ``/proc``; ``0 unknown`` if there is none."""
    path = Path("/proc", file)
    found = re.search(rf"^{name}\s*:?\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else "0 unknown"
