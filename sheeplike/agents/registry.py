"""Agents by name: built-in ones, and those that installed packages add as entry points of ``sheeplike.agents``.

Importing this module imports no agent, and neither torch nor JAX.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, NamedTuple

from sheeplike.agents.config import AgentConfig
from sheeplike.agents.dreamer_v3.config import DreamerV3Config, Plan2ExploreConfig
from sheeplike.agents.ppo.config import PPOConfig
from sheeplike.entry_points import Registry

if TYPE_CHECKING:
    from sheeplike.agents.agent import Agent


class AgentSpec(NamedTuple):
    """Options and class of an agent.

    Attributes:
        agent: the class, or its ``module:name``, imported when it is needed. Called as ``agent(observation_space,
            action_space, config, *, num_envs, device, compile, autocast, seed)``.
    """

    config: type[AgentConfig]
    agent: type[Agent] | str

    def load(self) -> type[Agent]:
        """Import the class; ValueError if a package names one that cannot be imported."""
        try:
            return pkgutil.resolve_name(self.agent) if isinstance(self.agent, str) else self.agent
        except (ImportError, AttributeError) as error:
            raise ValueError(f"agent={self.agent}: expected <module>:<class>; {error}") from error


AGENTS = Registry(
    "agent.name",
    "sheeplike.agents",
    {
        "dreamer_v3": AgentSpec(DreamerV3Config, "sheeplike.agents.dreamer_v3.agent:DreamerV3"),
        "plan2explore": AgentSpec(Plan2ExploreConfig, "sheeplike.agents.dreamer_v3.plan2explore:Plan2Explore"),
        "ppo": AgentSpec(PPOConfig, "sheeplike.agents.ppo.agent:PPO"),
    },
    what="agent",
)


def built_in() -> list[type[AgentConfig]]:
    return [spec.config for spec in AGENTS.built_in.values()]


def list_agents() -> list[str]:
    """Return the names of all agents, sorted; nothing is imported."""
    return sorted(AGENTS.names())


def lineage(name: str) -> list[str]:
    """Return the names of an agent and of those whose options it extends; recipes for these suit it too."""
    classes = [cls for cls in find(name).config.__mro__ if issubclass(cls, AgentConfig) and cls is not AgentConfig]
    return [cls.model_fields["name"].default for cls in classes]


def find(name: object) -> AgentSpec:
    """Return the agent of a name, importing another package if it is from there.

    Raises:
        InvalidOption: there is no such agent.
        ValueError: the package cannot be imported, its entry point is no AgentSpec, or two packages have the name.
    """
    spec, plugin = AGENTS.find(name)
    if plugin is None:
        return spec
    is_spec = isinstance(spec, AgentSpec) and isinstance(spec.config, type) and issubclass(spec.config, AgentConfig)
    if not is_spec:
        raise ValueError(
            f"agent {name!r} of {plugin}: expected an AgentSpec(config=<an AgentConfig>, agent=<its class>)"
        )
    if spec.config.model_fields["name"].default != name:
        raise ValueError(f'agent {name!r} of {plugin}: expected name: Literal["{name}"] = "{name}" in its options')
    return spec
