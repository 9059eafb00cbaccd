"""How well the world model predicts what it does not see (after ``danijar/dreamerv3`` ``agent.py``: ``report``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sheeplike.agents.agent import Prediction
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.world_model import WorldModel
from sheeplike.nn.images import to_unit


def open_loop(
    world: WorldModel, start: Latent, action: Tensor, batch: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Prediction]]:
    """Observe the first half of each sequence, then predict the second from its actions alone.

    Args:
        world: the model.
        start: latent before the first step, ``(B, ...)``.
        action: ``(B, T, A)``, the action that led to each step.
        batch: observations and ``is_first``, ``(B, T, ...)``.

    Returns:
        0-dim metrics ``wm/open_loop_mse@K/<camera>``, the mean squared error of pixels in [0, 1] ``K`` steps into the
        imagined half, and the images of both halves by camera.
    """
    length = action.shape[1]
    context = max(length // 2, 1)
    shown = {key: batch[key][:, :context] for key in (*world.encoder.keys.spaces, "is_first")}
    seen, _ = world.observe(start, action[:, :context], shown, shown["is_first"])
    latent = seen.map(lambda x: x[:, -1])
    states = [seen.map(lambda x, t=t: x[:, t]) for t in range(context)]
    for t in range(context, length):
        # An episode may end inside the imagined half: the model is told so, as it would be by the environment.
        first = batch["is_first"][:, t]
        latent = world.rssm.imagine(latent.reset(first), torch.where(first[:, None], 0.0, action[:, t]))
        states.append(latent)
    stacked = Latent(*(torch.stack(part, 1).flatten(0, 1) for part in zip(*states, strict=True)))
    predicted = world.decoder(stacked)
    metrics: dict[str, Tensor] = {}
    predictions: dict[str, Prediction] = {}
    for key in world.decoder.keys.images:
        model = predicted[key].unflatten(0, (-1, length))
        truth = batch[key]
        error = (model - to_unit(truth)).square().mean((0, 2, 3, 4))  # (T,)
        name = key.removeprefix("pixels/")
        for ahead in (1, 5, 15, 30):
            if context + ahead <= length:
                metrics[f"wm/open_loop_mse@{ahead}/{name}"] = error[context + ahead - 1]
        pixels = (model * 255).clamp(0, 255).to(torch.uint8)
        shown = truth if truth.dtype == torch.uint8 else (to_unit(truth) * 255).to(torch.uint8)
        predictions[name] = Prediction(shown.transpose(0, 1), pixels.transpose(0, 1), context)
    return metrics, predictions
