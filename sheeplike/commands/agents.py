"""From a checked configuration to an agent, and what a run tells about it before it begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gymnasium.vector import VectorEnv
from lightning.fabric import Fabric

from sheeplike.agents.agent import Agent
from sheeplike.agents.dreamer_v3 import DreamerV3
from sheeplike.agents.ppo import PPO
from sheeplike.agents.ppo.networks import Vision
from sheeplike.agents.spaces import ObservationKeys
from sheeplike.commands import schema
from sheeplike.commands.memory import estimate, widths
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
    place = {"num_envs": num_envs, "device": fabric.device, "autocast": fabric.autocast, "seed": config.seed}
    place["compile"] = config.compile
    spaces = worlds.single_observation_space, worlds.single_action_space
    if isinstance(config.agent, schema.PPO):
        return PPO(*spaces, **_numbers(config.agent, vision=Vision(**asdict(config.agent.vision))), **place)
    a = config.agent
    numbers = _numbers(a, size=widths(a), betas=(a.beta1, a.beta2), free_nats=a.kl_free_nats)
    for name in ("beta1", "beta2", "kl_free_nats"):
        del numbers[name]
    return DreamerV3(*spaces, learning_starts=config.learning_starts, **numbers, **place)


def plan_memory(config: Config, worlds: VectorEnv) -> str:
    """What the agent's memory is about to take."""
    a = config.agent
    taken = estimate(config, worlds.single_observation_space, worlds.single_action_space).memory
    if isinstance(a, schema.PPO):
        what = f"rollout of {a.rollout_length * worlds.num_envs:,} policy steps"
    else:
        what = f"replay of {a.replay_size:,} policy steps"
    return f"{what}: {taken / 2**20:,.0f} MiB on {worlds.device}"


def gradient_steps(config: Config, begun: int) -> int:
    """Gradient steps that a run makes from ``begun`` policy steps on."""
    a = config.agent
    if isinstance(a, schema.PPO):
        # A rollout is complete one iteration later: with the step that bootstraps it.
        ended, done = (
            max(math.ceil(steps / config.env.num_envs) - 1, 0) // a.rollout_length
            for steps in (config.total_steps, begun)
        )
        return (ended - done) * a.epochs * a.minibatches
    return int(max(config.total_steps - max(config.learning_starts, begun), 0) * a.replay_ratio)


def learning_begins(config: Config) -> int:
    """Policy steps that a new run makes before the first gradient step; the next iteration may make one."""
    a, worlds = config.agent, config.env.num_envs
    last = a.rollout_length * worlds if isinstance(a, schema.PPO) else config.learning_starts
    return last // worlds * worlds


def name_collecting(config: Config) -> str:
    """What a run does until the agent learns for the first time."""
    return "collecting a rollout" if isinstance(config.agent, schema.PPO) else "filling the replay"


def describe_agent(config: Config, agent: DreamerV3 | PPO) -> dict[str, str]:
    """What the agent is and how it learns, name to text."""
    sees = _describe_observations(agent.keys, agent.keys.spaces)
    if isinstance(agent, PPO):
        return {"sees": sees} | _describe_ppo(config, agent)
    targets = {"predicts": f"{_describe_observations(agent.predicted, agent.targets)}, unseen"} if agent.targets else {}
    return {"sees": sees} | targets | _describe_dreamer(config, agent)


def _describe_observations(keys: ObservationKeys, names: Iterable[str]) -> str:
    return ", ".join(f"{name} {'x'.join(map(str, keys.spaces[name].shape))}" for name in names)


def describe_run(
    config: Config, agent: DreamerV3 | PPO, worlds: VectorEnv, *, device: str, begun: int, step_seconds: float
) -> dict[str, str]:
    """What is about to happen, name to text.

    Args:
        device: what it happens on.
        begun: policy steps that were made before.
        step_seconds: of one simulated step of all worlds.
    """
    left, updates = config.total_steps - begun, gradient_steps(config, begun)
    continued = f"continued from policy step {begun:,}: " if begun else ""
    acting = format_seconds(left / worlds.num_envs * step_seconds)
    varied = {"varied": ", ".join(config.randomization)} if config.randomization else {}
    return {
        "task": f"{config.env.task}: {worlds.num_envs} worlds, episodes of {worlds.episode_length} steps",
        **varied,
        "device": device,
        **describe_agent(config, agent),
        "run": f"{continued}{left:,} policy steps, {updates:,} gradient steps, in {config.run_dir}",
        "time": f"{acting} for acting, at {worlds.num_envs / step_seconds:,.0f} policy steps/s simulated; learning is "
        "timed when it is compiled",
    }


def time_left(config: Config, begun: int, step_seconds: float, update_seconds: float) -> float:
    """Seconds that the rest of a run takes, from what one step of all worlds and one update take."""
    iterations = (config.total_steps - begun) / config.env.num_envs
    return iterations * step_seconds + gradient_steps(config, begun) * update_seconds


def _describe_dreamer(config: Config, agent: DreamerV3) -> dict[str, str]:
    a, n = config.agent, config.env.num_envs
    per_iteration = n * a.replay_ratio
    train_ratio = a.replay_ratio * a.batch_size * a.batch_length
    if per_iteration >= 1:
        rhythm = f"{n} policy steps, then {per_iteration:g} gradient steps"
    else:
        rhythm = f"{n} policy steps; one gradient step every {1 / per_iteration:g} iterations"
    parameters = sum(p.numel() for p in agent.modules.parameters() if p.requires_grad)
    return {
        "agent": f"{a.name}, size {a.size.name}: {parameters:,} parameters",
        "one iteration": rhythm,
        "learning": f"from policy step {config.learning_starts:,} on; replay_ratio {a.replay_ratio:g} is train_ratio "
        f"{train_ratio:g}: each frame is replayed {train_ratio:g} times on average",
        "memory": f"replay of {agent.replay.describe()}",
    }


def _describe_ppo(config: Config, agent: PPO) -> dict[str, str]:
    a, n = config.agent, config.env.num_envs
    steps = a.rollout_length * n
    parameters = sum(p.numel() for p in agent.networks.parameters())
    frames = f"{a.frame_stack} stacked frames" if a.frame_stack > 1 else "single frames"
    cnn = f", {a.vision.layout} network on {frames}" if agent.keys.images else ""
    return {
        "agent": f"{a.name}{cnn}: {parameters:,} parameters",
        "one iteration": f"{n} policy steps",
        "learning": f"every {a.rollout_length} iterations: {a.epochs} epochs of {a.minibatches} minibatches of "
        f"{steps // a.minibatches:,} steps",
        "memory": f"rollout of {steps:,} policy steps",
    }


def _numbers(section: Any, **replaced: Any) -> Mapping[str, Any]:
    """The keys of a section as keyword arguments, sections within it replaced by what they describe."""
    names = [name for name in section.__dataclass_fields__ if name != "name"]
    return {name: getattr(section, name) for name in names} | replaced
