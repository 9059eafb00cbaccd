"""What the measurements share: the configuration, the worlds, the agent, and how to wait for the device."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, field
from functools import cached_property

import torch
from gymnasium.vector import VectorEnv
from lightning.fabric import Fabric

from sheeplike.agents.agent import Agent
from sheeplike.commands.agents import make_agent
from sheeplike.commands.building import make_envs, time_worlds
from sheeplike.commands.errors import as_command_errors
from sheeplike.commands.schema import Config
from sheeplike.monitor.progress import phase

IMPOSSIBLE = (ValueError, TypeError, MemoryError)  # what cannot be built as it is configured


@dataclass
class Bench:
    """What is measured, built when it is first needed.

    Attributes:
        config: of the run that is measured.
        fabric: launched.
        seconds: for each measurement, over all of its rounds.
        rounds: of each measurement, at most.
        compile_seconds: what it took to compile and capture the first update of each mode.
    """

    config: Config
    fabric: Fabric
    seconds: float
    rounds: int
    compile_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.fabric.device

    @cached_property
    def worlds(self) -> VectorEnv:
        """The worlds of the run; their kernels are compiled by :meth:`compile_worlds`."""
        with phase("building worlds"), as_command_errors(*IMPOSSIBLE):
            return make_envs(self.config, self.config.env.num_envs, self.device)

    @cached_property
    def agent(self) -> Agent:
        """The agent of the run, with room for all that a run remembers."""
        with phase("building the agent"):
            return self.make_agent(self.config)

    def warm_up(self, agent: Agent) -> None:
        """Have an agent that remembers enough compile and capture its update."""
        start = time.perf_counter()
        agent.warm_up()
        # A second agent of the same process finds all kernels there.
        self.compile_seconds.setdefault(compile_mode(agent), time.perf_counter() - start)

    def make_agent(self, config: Config) -> Agent:
        """Another agent for the same worlds."""
        with as_command_errors(*IMPOSSIBLE):
            return make_agent(config, self.worlds, self.fabric)

    def forget_agent(self) -> None:
        """Give its memory back."""
        self.__dict__.pop("agent", None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def compile_worlds(self) -> None:
        """Build the kernels of simulation and rendering, and begin new episodes."""
        with phase("building simulation and rendering kernels"):
            time_worlds(self.worlds, steps=1)

    def wait(self) -> None:
        """Return when torch's work, and with it all that it waits for, is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def compile_mode(agent: Agent) -> str:
    """How an agent's updates are made: ``off``, ``inductor`` or ``graph``; one that says nothing compiles nothing."""
    return agent.compiled.mode if hasattr(agent, "compiled") else "off"
