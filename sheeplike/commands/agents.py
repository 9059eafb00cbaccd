"""From a checked configuration to an agent, and what a run tells about it before it begins."""

from __future__ import annotations

from collections.abc import Iterable

from gymnasium.vector import VectorEnv
from lightning.fabric import Fabric

from sheeplike.agents.agent import Agent
from sheeplike.agents.spaces import ObservationKeys
from sheeplike.commands.kinds import Setup, kind_of
from sheeplike.commands.memory import estimate
from sheeplike.commands.schema import Config
from sheeplike.monitor.progress import format_seconds


def make_agent(config: Config, worlds: VectorEnv, fabric: Fabric) -> Agent:
    """The agent that the configuration describes, for these worlds."""
    return _make_agent(config, worlds, worlds.num_envs, fabric)


def make_agent_as_trained(config: Config, worlds: VectorEnv, fabric: Fabric) -> Agent:
    """:func:`make_agent`, for a checkpoint of the run: built for as many worlds as it was trained in.

    What an agent saves may be shaped by their number. It may act in any other.
    """
    return _make_agent(config, worlds, config.env.num_envs, fabric)


def _make_agent(config: Config, worlds: VectorEnv, num_envs: int, fabric: Fabric) -> Agent:
    setup = Setup(num_envs, fabric.device, fabric.autocast, config.compile, config.seed, config.learning_starts)
    space, actions = worlds.single_observation_space, worlds.single_action_space
    return kind_of(config.agent).build(config.agent, space, actions, setup)


def plan_memory(config: Config, worlds: VectorEnv) -> str:
    """What the agent's memory is about to take; empty where that is not known."""
    taken = estimate(config, worlds.single_observation_space, worlds.single_action_space).memory
    what, steps = kind_of(config.agent).remembered(config, worlds.num_envs)
    return f"{what} of {steps:,} policy steps: {taken / 2**20:,.0f} MiB on {worlds.device}" if taken else ""


def gradient_steps(config: Config, begun: int) -> int | None:
    """Gradient steps that a run makes from ``begun`` policy steps on, where that is known."""
    return kind_of(config.agent).gradient_steps(config, begun)


def learning_begins(config: Config) -> int:
    """Policy steps that a new run makes before the first gradient step; the next iteration may make one."""
    worlds = config.env.num_envs
    return kind_of(config.agent).learning_begins(config) // worlds * worlds


def name_collecting(config: Config) -> str:
    """What a run does until the agent learns for the first time."""
    return kind_of(config.agent).collecting


def describe_agent(config: Config, agent: Agent) -> dict[str, str]:
    """What the agent is and how it learns, name to text."""
    keys = getattr(agent, "keys", None)
    sees = {"sees": _describe_observations(keys, keys.spaces)} if keys else {}
    if targets := getattr(agent, "targets", ()):
        sees["predicts"] = f"{_describe_observations(agent.predicted, targets)}, unseen"
    return sees | kind_of(config.agent).describe(config, agent)


def _describe_observations(keys: ObservationKeys, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, keys.spaces[name].shape))}" for name in names)


def describe_run(
    config: Config, agent: Agent, worlds: VectorEnv, *, device: str, begun: int, step_seconds: float
) -> dict[str, str]:
    """What is about to happen, name to text.

    Args:
        device: what it happens on.
        begun: policy steps that were made before.
        step_seconds: of one simulated step of all worlds.
    """
    left, updates = config.total_steps - begun, gradient_steps(config, begun)
    updating = "" if updates is None else f", {updates:,} gradient steps"
    continued = f"continued from policy step {begun:,}: " if begun else ""
    acting = format_seconds(left / worlds.num_envs * step_seconds)
    varied = {"varied": ", ".join(config.randomization)} if config.randomization else {}
    return {
        "task": f"{config.env.task}: {worlds.num_envs} worlds, episodes of {worlds.episode_length} steps",
        **varied,
        "device": device,
        **describe_agent(config, agent),
        "run": f"{continued}{left:,} policy steps{updating}, in {config.run_dir}",
        "time": f"{acting} for acting, at {worlds.num_envs / step_seconds:,.0f} policy steps/s simulated; learning is "
        "timed when it is compiled",
    }


def time_left(config: Config, begun: int, step_seconds: float, update_seconds: float) -> float:
    """Seconds that the rest of a run takes, from what one step of all worlds and one update take."""
    iterations = (config.total_steps - begun) / config.env.num_envs
    return iterations * step_seconds + (gradient_steps(config, begun) or 0) * update_seconds
