"""One step of one world as the replay holds it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sheeplike.agents.agent import Step
from sheeplike.agents.dreamer_v3.observations import ModelKeys
from sheeplike.agents.dreamer_v3.rssm import Latent
from sheeplike.agents.dreamer_v3.sizes import Size
from sheeplike.agents.spaces import ActionCodec


def replay_spec(
    keys: ModelKeys, codec: ActionCodec, size: Size, stoch: int = 32
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What one step of one world takes in the replay: key to (shape, dtype).

    Args:
        keys: the observations that the model predicts, which it sees or not.
    """
    flags = {name: ((), torch.bool) for name in ("is_first", "is_last", "is_terminal")}
    latents = {"deter": ((size.deter,), torch.bfloat16), "stoch": ((stoch,), torch.uint8)}
    return {
        **keys.stored(),
        **flags,
        "action": ((codec.width,), torch.float32),
        "reward": ((), torch.float32),
        **latents,
    }


def to_store(step: Step, keys: ModelKeys, codec: ActionCodec) -> dict[str, Tensor]:
    """A step of all worlds as the replay takes it: :func:`replay_spec`'s keys to ``(N, ...)``.

    An action or a latent that is no number becomes 0. The world that was told such an action ends its episode, and the
    next one begins from the zero state: only the updates that draw these steps would see it, and be skipped.
    """
    # What was chosen on the last step of an episode is ignored by the environment.
    action = torch.where(step.is_last.unsqueeze(-1), 0.0, codec.from_env(step.action))
    flags = {"is_first": step.is_first, "is_last": step.is_last, "is_terminal": step.is_terminal}
    chosen = {"action": _or_zero(action), "deter": _or_zero(step.extras["deter"])}
    return {**{key: step.obs[key] for key in keys.spaces}, **flags, "reward": step.reward, **step.extras, **chosen}


def compact(latent: Latent) -> dict[str, Tensor]:
    """A latent as the replay stores it: ``deter (..., D)`` bfloat16, ``stoch (..., S)`` uint8 class indices."""
    return {"deter": latent.deter.bfloat16(), "stoch": latent.stoch.argmax(-1).to(torch.uint8)}


def expand(deter: Tensor, index: Tensor, classes: int) -> Latent:
    """A latent from what :func:`compact` made of it, in float32."""
    return Latent(deter.float(), F.one_hot(index.long(), classes).float())


def _or_zero(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0.0)
