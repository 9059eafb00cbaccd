"""A policy that is tuned to cheat a frozen world model, as an export.

    python tests/benchmarks/cheat_dream.py RUN TO [updates]

From states of 32 episodes of the run's own policy, the actor climbs the gradient of dreamt rewards through the model,
50 steps ahead, without ever meeting the simulator again. TO then dreams of more than it gets:
``python -m sheeplike analyze run=TO trust=true``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from sheeplike.commands.analyze import AnalyzeOptions
from sheeplike.inspection.dissect import observe
from sheeplike.inspection.episodes import play
from sheeplike.inspection.model import TrainedModel
from sheeplike.trained import exported
from sheeplike.trained.playing import open_trained, rebuild

STARTS, AHEAD, LEARNING_RATE = 256, 50, 1e-3


def main(run: str, to: str, updates: int = 300) -> None:
    asked = AnalyzeOptions(run=run, episodes=32, num_envs=16)
    run_dir, config, asked = open_trained(asked, "analyze", None, world_model=True)
    _, networks, envs = rebuild(run_dir, config, asked)
    model = TrainedModel(networks)
    played = play(networks, envs, episodes=32, keys=list(model.observations), act="policy")
    states = observe(model, played)[played.valid]
    policy = networks.actor_critic.policy
    optimizer = torch.optim.Adam(policy.parameters(), LEARNING_RATE)
    networks.world_model.requires_grad_(False)
    with networks.compiled.paused():
        for update in range(updates):
            latent = states[torch.randint(len(states), (STARTS,))].latent
            weight, promised = torch.ones(STARTS), torch.zeros(STARTS)
            for _ in range(AHEAD):
                action = policy(latent.features).rsample()
                latent = model.rssm.imagine(latent, action)
                promised = promised + weight * model.world.reward(latent.features).pred()
                weight = weight * model.world.continue_prob(latent.features)
            optimizer.zero_grad()
            (-promised.mean()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            if update % 20 == 0:
                print(f"update {update}: {promised.mean().item():.3f} promised in {AHEAD} steps", flush=True)
    meta, _ = exported.read(run_dir)
    exported.save(Path(to), networks, config, {"versions": {}} | meta)
    envs.close()


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
