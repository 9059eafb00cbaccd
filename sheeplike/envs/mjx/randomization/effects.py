"""What a variation does beside the model: to actions, to frames, and to what is observed."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from sheeplike.envs.mjx.randomization.draw import Variation
from sheeplike.envs.mjx.randomization.spec import DELAY


def delayed(
    action: jax.Array, waiting: dict[str, jax.Array], variation: Variation
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The action that takes effect now, and those that still wait."""
    if not waiting:
        return action, waiting
    line = jnp.concatenate([action[None], waiting[DELAY]])
    return line[variation.delay[DELAY]], {DELAY: line[:-1]}


def told(vectors: dict[str, jax.Array], variation: Variation) -> dict[str, jax.Array]:
    """The vectors of one world with its variation among them: on its own, and for a critic at the end of what only it
    may see."""
    if not variation.drawn:
        return dict(vectors)
    drawn = jnp.concatenate([numbers.reshape(-1) for _, numbers in sorted(variation.drawn.items())])
    seen = vectors.get("privileged_state", vectors.get("state", jnp.zeros(0)))
    return vectors | {"variation": drawn, "privileged_state": jnp.concatenate([seen, drawn])}


def adjust(frames: dict[str, jax.Array], changes: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Frames of one world with the brightness and colours of its cameras changed; uint8 as before."""
    adjusted = dict(frames)
    for camera, (factor, offset) in changes.items():
        if (name := f"pixels/{camera}") in frames:
            colours = frames[name].astype(jnp.float32) * factor + 255.0 * offset
            adjusted[name] = jnp.clip(jnp.round(colours), 0, 255).astype(jnp.uint8)
    return adjusted
