"""PPO (Schulman et al., 2017) on pixels, vectors or both: the baseline."""

from sheeplike.agents.ppo.agent import PPO

__all__ = ["PPO"]
