"""Players that have seen or computed a number that is not finite: one world, one episode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sheeplike.agents.agent import Step

Make = Callable[..., Any]
NAN = float("nan")


def test_a_latent_that_is_no_number_lasts_until_the_next_episode_of_its_world(make_agent: Make) -> None:
    """The world is told so by the action; what is stored is 0; the next episode knows nothing of it."""
    agent = make_agent()
    healthy, sick = agent.player(3), agent.player(3)
    generator = torch.Generator().manual_seed(0)
    flags = torch.tensor([[True] * 3, [False] * 3, [False] * 3, [False, True, False], [False] * 3])
    for t, first in enumerate(flags):
        obs = {"state": torch.randn(3, 5, generator=generator)}
        actions = []
        for player in (healthy, sick):
            if t == 1 and player is sick:
                sick.state["deter"][1, 3] = NAN
            torch.manual_seed(t)
            actions.append(player.act(obs, first))
        others = [0, 2] if t in (1, 2) else [0, 1, 2]
        assert torch.equal(actions[0][others], actions[1][others])
        assert all(torch.equal(sick.extras[key][others], value[others]) for key, value in healthy.extras.items())
        assert actions[1][1].isnan().all() == (t in (1, 2))
        is_last = torch.tensor([False, t == 2, False])
        nothing = torch.zeros(3)
        agent.add(Step(obs, actions[1], nothing, first, is_last, nothing > 0, dict(sick.extras)))
    for key in ("action", "deter"):
        stored = agent.replay.storage[key][:5]
        assert bool(stored.float().isfinite().all())
        assert not stored[1:3, 1].any()
        assert bool(stored[3:, 1].any())
        assert bool(stored[1:3, [0, 2]].any())


def test_a_vector_that_is_no_number_reaches_one_action_of_ppo(make_ppo: Make) -> None:
    agent = make_ppo(cameras=("front",), frame_stack=2)
    healthy, sick = agent.player(3), agent.player(3)
    generator = torch.Generator().manual_seed(0)
    for t in range(4):
        image = torch.randint(0, 256, (3, 48, 48, 3), dtype=torch.uint8, generator=generator)
        state = torch.randn(3, 5, generator=generator)
        first = torch.tensor([t == 0, t in (0, 2), t == 0])
        actions = []
        for player in (healthy, sick):
            seen = state.clone()
            if t == 1 and player is sick:
                seen[1, 2] = NAN
            torch.manual_seed(t)
            actions.append(player.act({"pixels/front": image, "state": seen}, first))
        others = [0, 2] if t == 1 else [0, 1, 2]
        assert torch.equal(actions[0][others], actions[1][others])
        assert actions[1][1].isnan().all() == (t == 1)
