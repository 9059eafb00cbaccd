"""Measure how fast simulation, acting and learning are on this machine.

``python -m sheeplike bench env=… agent=… [key=value …]``: of the run that the same keys would train.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import Composed, explain, load, load_options
from sheeplike.config.errors import as_command_errors, expand, require_writable, unknown_key
from sheeplike.config.schema import Config, all_keys, to_data
from sheeplike.config.sources import GROUPS, Sources
from sheeplike.files import write_atomically
from sheeplike.monitor.progress import format_seconds, phase
from sheeplike.options import CommandError, Options, explain_keys, keys_of
from sheeplike.run.run_dir import check_accelerator
from sheeplike.run.signals import stops_at_once
from sheeplike.terminal import echo, info

PARTS = {
    "physics": "the jitted simulation without rendering",
    "envs": "the same with rendering, as a bare loop and as torch sees it",
    "acting": "with the agent's actions; and acting alone",
    "learning": "the loop of a run, at its ratio of updates to steps",
    "update": "one update, eager, compiled and captured",
    "memory": "the peak of a run that has begun to learn",
}
MODES = {"off": "eager", "inductor": "compiled", "graph": "captured"}
EXAMPLE = "python -m sheeplike bench env=franka_pick agent=dreamer_v3"
LEAST_ROUNDS = 3  # below that there is no spread to speak of
ACTIONS = 16  # random ones, drawn before the clock starts and used in turns
WARM_UP = 6  # calls, before which a CUDA graph is captured
FEW = 16  # worlds of a small run, for which acting alone is timed in any case
Task = Callable[[int], tuple[float, int]]
"""Does something so many times and waits for the device once, at the end; returns seconds and how often it was done."""
Cell = list[float] | str
"""Samples, one per round or a single one, in the order in which they were taken; or what stands in their place."""


class BenchOptions(Options):
    """Keys of this command, beside those of the run that it measures."""

    parts: tuple[Literal[*PARTS], ...] = Field(tuple(PARTS), min_length=1, description="what is measured; see below")
    modes: tuple[Literal[*MODES], ...] = Field(tuple(MODES), min_length=1, description="ways to make an update")
    seconds: float = Field(5.0, gt=0, le=3600, description="for each measurement, over its rounds")
    rounds: int = Field(
        8, ge=1, le=1000, description="of each measurement; fewer, but three, where a single call takes long"
    )
    out: str | None = Field(
        None, min_length=1, description="where bench.md and bench.json go; null: bench/<env>_<agent>_<time>"
    )
    show: Literal["config"] | None = Field(None, description="config: print the configuration of the run, and stop")


def main(request: Request) -> None:
    """Measure, print the tables and save them after each part.

    Raises:
        CommandError: the request cannot be met.
    """
    if request.help:
        echo(f"{EXAMPLE} [key=value ...]", "", explain_keys(keys_of(BenchOptions)), "", "parts")
        echo(*(f"  {name:<32} {text}" for name, text in PARTS.items()), "")
        echo("Further keys are those of the run: python -m sheeplike train --help lists them.")
        return
    asked, composed = compose(request.arguments, Sources(request.config_dirs))
    if asked.show:
        echo(explain(composed))
        return
    config = composed.config
    check_accelerator(config)
    name = re.sub(r"[^\w.-]+", "_", f"{config.env.task} {config.agent.name} {datetime.now():%Y-%m-%d_%H-%M-%S}")
    asked = asked.replace(out=asked.out or f"bench/{name}")
    require_writable("out", expand(asked.out), "bench.md", "bench.json")
    info("loading torch and JAX")
    with stops_at_once():  # what has been measured is saved: there is nothing to wait for after Ctrl-C
        from sheeplike.run.build import explain_oom

        with explain_oom(config), as_command_errors(OSError, envs.Unusable):
            bench = Bench(config, asked, shlex.join(["python", "-m", "sheeplike", "bench", *request.arguments]))
            bench.measure()
    echo("", *bench.tables, f"saved: {asked.out}/bench.md and bench.json")


def compose(arguments: Sequence[str], sources: Sources) -> tuple[BenchOptions, Composed]:
    """This command's options, and the run that the other arguments describe.

    Raises:
        CommandError: a key of neither, or a value that is not valid.
    """
    known, given = {*GROUPS, *(key.path for key in all_keys())}, {}
    for key, value in (argument.split("=", 1) for argument in arguments if "=" in argument):
        given[key] = value
        if "." not in key and key not in known | BenchOptions.model_fields.keys():
            raise unknown_key(key, [*keys_of(BenchOptions), *all_keys()])
    if not given.keys() & {"agent", "exp"}:
        agents = ", ".join(sources.choices("agent"))
        raise CommandError(f"agent= is missing: expected one of {agents}; for example: {EXAMPLE}")
    own = [argument for argument in arguments if argument.partition("=")[0] in BenchOptions.model_fields]
    rest = [argument for argument in arguments if argument not in own]
    if "exp" not in given and given["agent"] in sources.choices("exp"):
        rest.insert(0, f"exp={given['agent']}")  # a benchmark asks only for an agent
    # It ends by itself, whatever a run of these keys would do.
    return load_options(BenchOptions, own), load([*rest, "total_steps=1000000000000"], sources)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median, the upper one."""
    return tuple(statistics.quantiles(samples if len(samples) > 1 else [*samples, *samples], n=4, method="inclusive"))


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> list[float]:
    """Quotients round by round: what slows the machine down for a while slows both sides of each."""
    return [a / b for a, b in zip(numerator, denominator, strict=True)]


def interleaved(tasks: Mapping[str, Task], *, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Take all measurements in turns, so that a machine that drifts does so for all of them.

    Every second round goes through the tasks backwards. Warm-up is not counted.

    Args:
        seconds: time for each task, over all rounds.
        rounds: how many there are; fewer, but no fewer than three, where a single call takes longer than its share.

    Returns:
        Seconds for doing each of them once, one number for each round.
    """
    for task in tasks.values():
        task(1)
    once = {name: max(task(1)[0], 1e-6) for name, task in tasks.items()}
    rounds = max(min(rounds, LEAST_ROUNDS), min(rounds, int(seconds / max(once.values(), default=seconds))))
    calls = {name: max(int(seconds / rounds / one), 1) for name, one in once.items()}
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(rounds):
        for name in list(tasks)[:: 1 if turn % 2 == 0 else -1]:
            spent, done = tasks[name](calls[name])
            taken[name].append(spent / done)
    return taken


@dataclass
class Table:
    """Cells by row and column; ``str()`` is Markdown whose columns are aligned.

    Attributes:
        key: name in JSON.
        notes: what a reader must know, sentences.
    """

    key: str
    title: str
    columns: Sequence[str]
    rows: dict[str, list[Cell]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        def plain(cell: Cell) -> dict[str, Any] | str:
            return cell if isinstance(cell, str) else {"quartiles": quartiles(cell), "samples": cell}

        rows = {name: dict(zip(self.columns, map(plain, cells), strict=True)) for name, cells in self.rows.items()}
        return {"title": self.title, "rows": rows, "notes": self.notes}

    def __str__(self) -> str:
        lines = [["", *self.columns], *([name, *map(_text, cells)] for name, cells in self.rows.items())]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        body = [" | ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in lines]
        notes = [f"\n{note}" for note in self.notes]
        return "\n".join([f"## {self.title}", "", *(f"| {line} |" for line in body), *notes, ""])


def _text(cell: Cell) -> str:
    """``1,234 (1,200 to 1,250)``: the median and, where there are several samples, the quartiles."""
    if isinstance(cell, str):
        return cell
    low, median, high = (f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}" for value in quartiles(cell))
    return f"{median} ({low} to {high})" if len(cell) > 1 else median


class Bench:
    """Builds the environments of a run, and measures them and its agent.

    Args:
        config: of the run.
        asked: ``out`` is filled in.
        command: as it was typed.

    Attributes:
        tables: all that has been measured.
        compile_seconds: by mode, of the first agent that was compiled: later ones find all kernels there.
    """

    def __init__(self, config: Config, asked: BenchOptions, command: str) -> None:
        import torch

        from sheeplike import checkpoint
        from sheeplike.run.build import build_envs, describe_device, launch, time_envs

        self.config, self.asked, self.start = config, asked, time.monotonic()
        self.fabric = launch(config)
        self.device, self.cuda = self.fabric.device, self.fabric.device.type == "cuda"
        torch.manual_seed(config.seed)
        self.envs = build_envs(config, config.env.num_envs, self.device)
        with phase("building simulation and rendering kernels"):
            time_envs(self.envs, steps=1)
        spaces = self.envs.single_observation_space.spaces.items()
        self.facts = {
            "command": f"`{command}`",
            "date": datetime.now().astimezone().isoformat(" ", timespec="seconds"),
            "device": describe_device(config, self.device),
            "processor": f"{_from_proc('cpuinfo', 'model name')}, {os.cpu_count()} cores",
            "worlds": f"{config.env.num_envs}: {', '.join(f'{name} {space.shape}' for name, space in spaces)}",
            "versions": ", ".join(f"{name} {version}" for name, version in checkpoint.versions().items() if version),
        }
        self.tables: list[Table] = []
        self.compile_seconds: dict[str, float] = {}

    def measure(self) -> None:
        """All parts that are asked for; the run as a whole begins first."""
        parts, agent, loop, state = set(self.asked.parts), None, None, None
        if parts & {"acting", "learning", "memory"}:
            agent = self.make_agent(self.config.agent, self.config.compile)
        if parts & {"learning", "memory"}:
            loop, state = self.learning_loop(agent)
        memory = self.memory(agent) if "memory" in parts else None  # before anything else has taken some
        if parts - {"update", "memory"}:
            self.save(self.layers(agent, loop, state))
        if memory:
            self.save(memory)
        if "acting" in parts:
            self.save(self.acting(agent))
        if "update" in parts:
            del agent, loop, state
            gc.collect()  # the replay goes before there are others
            self.save(self.updates())
        self.envs.close()

    def save(self, table: Table) -> None:
        """Add a table to the files; an older benchmark in their place is replaced."""
        self.tables.append(table)
        title = f"Benchmark: {self.config.env.task}, {self.config.agent.name}"
        facts = self.facts | {"took": format_seconds(time.monotonic() - self.start)}
        settings = {"bench": self.asked.model_dump(mode="json"), "config": to_data(self.config)}
        tables = {table.key: table.to_json() for table in self.tables}
        data = {"title": title, "facts": facts, "settings": settings, "tables": tables}
        lines = [f"| {name} | {text} |" for name, text in facts.items()]
        out = expand(self.asked.out)
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "bench.json", json.dumps(data, indent=1, allow_nan=False) + "\n")
        texts = [f"# {title}", "", "| | |", "| --- | --- |", *lines, "", *map(str, self.tables)]
        write_atomically(out / "bench.md", "\n".join(texts))

    # --- what the parts share ---------------------------------------------------------------------------------------

    def make_agent(self, options: Any, compile: str) -> Any:
        """Another agent for the same environments."""
        from sheeplike.run.build import make_agent

        with as_command_errors(ValueError, TypeError, MemoryError):
            return make_agent(self.config.replace(agent=options, compile=compile), self.envs, self.fabric)

    def warm_up(self, agent: Any) -> None:
        """Have an agent that has seen enough compile and capture its update, as far as this machine can."""
        start = time.perf_counter()
        agent.warm_up()
        compilation = getattr(agent, "compiled", None)
        mode = compilation.mode.partition(",")[0] if compilation else "off"
        self.compile_seconds.setdefault(MODES[mode], time.perf_counter() - start)

    def wait(self, value: Any = None) -> None:
        """Return when torch's work, all that it waits for, and JAX's ``value`` are done."""
        import jax
        import torch

        jax.block_until_ready(value)
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def repeat(self, function: Callable[[], Any]) -> Task:
        """Calls ``function``, without waiting for the device in between, as a run does not either."""

        def task(calls: int) -> tuple[float, int]:
            start = time.perf_counter()
            for _ in range(calls):
                value = function()
            self.wait(value)
            return time.perf_counter() - start, calls

        task(WARM_UP)
        return task

    def timed(self, tasks: Mapping[str, Task], **options: Any) -> dict[str, list[float]]:
        """:func:`interleaved`, as long as is asked for."""
        with phase(f"timing {', '.join(tasks)}"):
            return interleaved(tasks, **{"seconds": self.asked.seconds, "rounds": self.asked.rounds} | options)

    def env_loop(self, act: Callable[[Any], Any]) -> Callable[[], Any]:
        """Steps the environments as torch sees them, with the action that ``act`` chooses for the last step.

        Returns:
            Makes and returns the next :class:`~sheeplike.agents.agent.Step`.
        """
        from sheeplike.agents.agent import Step
        from sheeplike.loop import first_step

        last = first_step(self.envs.reset(seed=self.config.seed)[0], self.envs.num_envs)

        def step() -> Step:
            nonlocal last
            last.action = act(last)
            obs, reward, terminated, truncated, _ = self.envs.step(last.action)
            last = last.following(last.action, obs, reward, terminated, truncated)
            return last

        return step

    def learning_loop(self, agent: Any) -> tuple[Task, Any]:
        """The loop of a run that has begun to learn, and its state.

        A call ends with an update, so that it has its whole share of them.
        """
        from sheeplike.loop import LoopState, train
        from sheeplike.monitor.metrics import EpisodeStatistics, MetricBuffer

        num_envs, options = self.envs.num_envs, self.config.agent
        state = LoopState.begin(agent, self.envs, self.config.seed)
        episodes = EpisodeStatistics(num_envs, self.device)
        # Takes in what a run takes in, and writes nothing.
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

    def layers(self, agent: Any, loop: Task | None, state: Any) -> Table:
        """Policy steps per second, from the bare simulation to the whole run, to which ``loop`` belongs."""
        tasks, num_envs = self.simulation(), self.envs.num_envs
        if "acting" in self.asked.parts:
            act = agent.player(num_envs).act
            with phase("compiling the policy"):
                tasks["+ acting"] = self.repeat(self.env_loop(lambda step: act(step.obs, step.is_first)))
        if "learning" in self.asked.parts:
            tasks["+ learning"], before = loop, (state.policy_steps, state.gradient_steps)
        columns = ["policy steps/s", "ms per step of all worlds", "relative to the layer before"]
        table, above = Table("steps", "Policy steps per second", columns), None
        for name, seconds in self.timed(tasks).items():
            rate = [num_envs / one for one in seconds]
            table.rows[name] = [rate, _milliseconds(seconds), ratio(above, seconds) if above else ""]
            above = seconds
        if not envs.simulated(self.config.env.name):
            table.notes.append(f"{self.config.env.name} is not simulated here: there is nothing below its vector env.")
        if "learning" in self.asked.parts:
            steps, updates = state.policy_steps - before[0], state.gradient_steps - before[1]
            table.notes.append(
                f"Learning: {updates} updates in {steps:,} policy steps, {updates / steps:.4g} per step."
            )
        return table

    def simulation(self) -> dict[str, Task]:
        """The layers below acting, which all take the same random actions."""
        import jax
        import torch

        from sheeplike.envs.mjx.rendering import NoRenderer
        from sheeplike.envs.mjx.simulator import Simulator

        parts, seed, tasks = self.asked.parts, self.config.seed, {}
        self.envs.action_space.seed(seed)
        drawn = [self.envs.action_space.sample() for _ in range(ACTIONS)]
        if envs.simulated(self.config.env.name):
            whole = self.envs.simulator
            # Flat and committed to the device, as the vector env hands them over: JAX compiles once for both.
            flat = [jax.device_put(action.reshape(-1), whole.device) for action in drawn]
            if "physics" in parts:
                blind = NoRenderer(whole.num_envs)
                options = {"num_envs": whole.num_envs, "device": whole.device, "randomization": whole.randomization}
                physics = Simulator(whole.task, blind, **options, physics=whole.physics.name)
                with phase("building kernels without rendering"):
                    tasks["physics"] = self.repeat(bare_loop(physics, flat, seed))
            if "envs" in parts:
                tasks["+ render"] = self.repeat(bare_loop(whole, flat, seed))
        if "envs" in parts:
            turns = itertools.cycle([torch.as_tensor(action, device=self.device) for action in drawn])
            tasks["+ vector env"] = self.repeat(self.env_loop(lambda step: next(turns)))
        return tasks

    def acting(self, agent: Any) -> Table:
        """Acting alone, in few worlds and in all of them."""
        import torch

        obs, tasks = self.envs.reset(seed=self.config.seed)[0], {}
        for count in sorted({FEW, self.envs.num_envs}):
            some = torch.arange(count, device=self.device) % self.envs.num_envs
            seen, no = {key: value[some] for key, value in obs.items()}, torch.zeros_like(some, dtype=torch.bool)
            with phase("compiling the policy"):
                tasks[f"{count} worlds"] = self.repeat(partial(agent.player(count).act, seen, no))
        taken = self.timed(tasks, seconds=self.asked.seconds / 4)
        rows = {name: [_milliseconds(seconds)] for name, seconds in taken.items()}
        return Table("acting", "Acting alone", ["ms per call"], rows)

    def updates(self) -> Table:
        """One row for each way to make an update; a note says why one cannot be had."""
        table = Table("update", "One update", ["ms", "times as fast as eager", "s to compile"])
        options = self.config.agent.acting_only(self.envs.num_envs)  # so that several fit beside each other
        agent = self.make_agent(options, "off")
        if agent.history is None:  # its memory is small, and may be all that an update learns from
            options = self.config.agent
            agent = self.make_agent(options, "off")
        about = "; ".join(f"{name}: {text}" for name, text in agent.describe().items() if name != "memory")
        steps, tasks = self.experience(agent), {}
        for mode in self.asked.modes:
            try:
                with phase(f"building the {MODES[mode]} update"):
                    tasks[MODES[mode]] = self.learner(options, mode, steps)
            except Exception as error:  # compilers fail in many ways; the other modes can be measured all the same
                if mode == "off":
                    raise
                table.notes.append(f"{MODES[mode]}: {next(iter(str(error).splitlines()), type(error).__name__)}.")
        if {"eager", "compiled"} <= tasks.keys() and not self.cuda:
            tasks["eager, freed memory kept"] = partial(tasks["eager"], keep=True)
            table.notes.append("Kept: with the part of compile=inductor that is not compiling.")
        taken = self.timed(tasks)
        for name, seconds in taken.items():
            faster = ratio(taken["eager"], seconds) if "eager" in taken and name != "eager" else ""
            compiling = [self.compile_seconds[name]] if name in self.compile_seconds and name != "eager" else ""
            table.rows[name] = [_milliseconds(seconds), faster, compiling]
        table.notes.append(f"{about}.")
        return table

    def experience(self, agent: Any) -> list[Any]:
        """A few steps to learn from; what they show does not change what an update costs."""
        player = agent.player(self.envs.num_envs)
        loop = self.env_loop(lambda step: player.act(step.obs, step.is_first))
        steps = [loop()]  # not the one that begins all episodes
        for _ in range(4):
            steps.append(loop())
            steps[-2].extras = player.extras
        return steps[:-1]

    def learner(self, options: Any, mode: str, steps: Iterable[Any]) -> Task:
        """Updates alone. A call makes all that are due; what it takes until some are due is not counted."""
        from sheeplike.nn.compilation import keep_freed_memory

        agent, turns, policy_steps = self.make_agent(options, mode), itertools.cycle(steps), 0

        def collect() -> int:
            nonlocal policy_steps
            due = 0
            while not due:
                agent.add(next(turns))
                policy_steps += self.envs.num_envs
                due = agent.updates_due(policy_steps)
            return due

        due = collect()
        self.warm_up(agent)

        def task(calls: int, *, keep: bool = mode != "off") -> tuple[float, int]:
            nonlocal due
            keep_freed_memory(keep)  # as compiled updates do on a CPU, in the whole process
            seconds, made = 0.0, 0
            for _ in range(calls):
                due = due or collect()
                self.wait()
                start = time.perf_counter()
                for _ in range(due):
                    agent.update()
                self.wait()
                seconds, made, due = seconds + time.perf_counter() - start, made + due, 0
            return seconds, made

        return task

    def memory(self, agent: Any) -> Table:
        """Peaks since the process began."""
        import torch
        import warp

        # Not by getrusage, which on Linux begins with what the parent process had.
        rows = {"process, resident set": int(_from_proc("self/status", "VmHWM").split()[0]) * 2**10}
        if self.cuda:
            rows["torch, allocated"] = torch.cuda.max_memory_allocated(self.device)
            rows["torch, reserved"] = torch.cuda.max_memory_reserved(self.device)
            if envs.simulated(self.config.env.name):
                stats = self.envs.simulator.device.memory_stats() or {}  # some allocators keep none
                if "peak_bytes_in_use" in stats:
                    rows["JAX"] = stats["peak_bytes_in_use"]
                rows["Warp, beside what is JAX's"] = warp.get_mempool_used_mem_high(str(self.device))
            free, total = torch.cuda.mem_get_info(self.device)
            rows["the GPU, all programs on it, now"] = total - free
        if agent.history is not None:
            rows["the replay, once full"] = sum(ring.nbytes for ring in agent.history.storage.values())
        cells = {name: [[size / 2**20]] for name, size in rows.items()}
        notes = [] if self.cuda else ["torch, JAX and Warp share the process; of the replay it counts what is filled."]
        return Table("memory", "Peak memory of a run that has begun to learn", ["MiB"], cells, notes)


def bare_loop(simulator: Any, actions: Sequence[Any], seed: int) -> Callable[[], Any]:
    """Makes a step with nothing but the jitted simulation; returns its output."""
    turns = itertools.cycle(actions)
    # The step that begins all episodes ignores its actions, as the reset of the vector env does.
    variation, state, _ = simulator.step(*simulator.start(seed), actions[0])

    def step() -> Any:
        nonlocal variation, state  # both are donated: nothing else may hold them
        variation, state, output = simulator.step(variation, state, next(turns))
        return output

    return step


def _milliseconds(seconds: Iterable[float]) -> list[float]:
    return [1e3 * one for one in seconds]


def _from_proc(file: str, name: str) -> str:
    """What stands behind a name in a file of Linux's ``/proc``; ``0 unknown`` elsewhere."""
    path = Path("/proc", file)
    found = re.search(rf"^{name}\s*:?\s*(.*)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else "0 unknown"
