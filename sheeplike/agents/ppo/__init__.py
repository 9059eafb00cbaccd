"""Proximal policy optimisation on pixels and vectors: the baseline."""

from typing import Any

from sheeplike.agents.ppo.config import PPOConfig, Vision

__all__ = ["PPO", "PPOConfig", "Vision"]


def __getattr__(name: str) -> Any:
    """``PPO``, loaded when it is asked for: its options need no torch."""
    if name == "PPO":
        from sheeplike.agents.ppo.agent import PPO

        return PPO
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
