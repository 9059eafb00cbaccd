"""The world model as a whole can learn: it overfits one batch of moving squares to near-zero reconstruction error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from sheeplike.agents.dreamer_v3 import DreamerV3Config, Size
from sheeplike.agents.dreamer_v3.storage import ModelKeys
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.nn.optimizers import LaProp

SEQUENCES, STEPS, SIDE = 2, 8, 48


def moving_squares() -> dict[str, Tensor]:
    """A red and a blue square that wander over a grey floor; the action is the red one's velocity."""
    rng = np.random.default_rng(0)
    frames = np.full((SEQUENCES, STEPS, SIDE, SIDE, 3), 90, np.uint8)
    actions = rng.uniform(-1, 1, (SEQUENCES, STEPS, 2))
    for b in range(SEQUENCES):
        red, blue = rng.uniform(6, 30, 2), rng.uniform(6, 30, 2)
        for t in range(STEPS):
            red, blue = np.clip(red + 5 * actions[b, t], 0, 36), np.clip(blue + np.array([2, -2]), 0, 36)
            for (y, x), colour in ((red.astype(int), (220, 40, 30)), (blue.astype(int), (30, 60, 210))):
                frames[b, t, y : y + 12, x : x + 12] = colour
    is_first = torch.zeros(SEQUENCES, STEPS, dtype=torch.bool)
    is_first[:, 0] = True
    return {
        "pixels/front": torch.tensor(frames),
        "action": torch.tensor(actions, dtype=torch.float32),
        "is_first": is_first,
        "is_terminal": torch.zeros_like(is_first),
        "reward": torch.tensor(rng.uniform(0, 1, (SEQUENCES, STEPS)), dtype=torch.float32),
    }


def psnr(mean_squared_error: float) -> float:
    return -10 * np.log10(mean_squared_error)


@pytest.mark.slow
def test_a_world_model_overfits_one_batch_to_near_zero_reconstruction_error() -> None:
    torch.manual_seed(0)
    batch = moving_squares()
    truth = batch["pixels/front"].double() / 255
    constant = psnr(float((truth - truth.mean((0, 1), keepdim=True)).square().mean()))

    keys = ModelKeys(spaces.Dict({"pixels/front": spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)}), ("*",))
    config = DreamerV3Config(size=Size(deter=256, hidden=64, classes=4, depth=8, units=64))
    world = WorldModel(keys, 2, config)
    optimizer = LaProp(world.parameters(), 4e-3, betas=(0.9, 0.999), eps=1e-20, agc=0.3, warmup=20)
    start = world.rssm.initial(SEQUENCES, torch.device("cpu"))
    for _ in range(240):
        posterior, logits, _ = world.observe(start, batch["action"], batch, batch["is_first"])
        losses, metrics = world.losses(posterior, logits, batch)
        optimizer.zero_grad()
        sum(loss.mean() * (0.1 if name == "rep" else 1.0) for name, loss in losses.items()).backward()
        optimizer.step()

    reached = metrics["wm/psnr/front"].item()
    with torch.no_grad():
        image = world.decoder(posterior.map(lambda x: x.flatten(0, 1)))["pixels/front"]
    assert reached > 32
    assert constant < 21, "the mean image must be far from it"
    # The metric is the ratio it says it is, up to the one update since.
    measured = psnr((image.unflatten(0, (SEQUENCES, STEPS)).double() - truth).square().mean().item())
    assert abs(measured - reached) < 2
