"""The numbers of a step, each one of its own per world, in two arrays.

To hand an array over to torch costs the host some 15 µs, and a view of what torch has about two.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import torch

from sheeplike.bridge import to_torch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A tree of arrays (N,), of float32, int32 and bool."""

    words: jax.Array
    """int32 (K, N), the bits of the numbers. As integers, because nothing alters those on their way, as a float's NaN
    may be."""
    flags: jax.Array  # bool (L, N)
    structure: jax.tree_util.PyTreeDef = dataclasses.field(metadata={"static": True})
    places: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    """Dtype and row of each leaf."""

    def unpack(self) -> Any:
        """Return the tree with torch tensors for leaves, all views of this memory."""
        words, flags = to_torch(self.words), to_torch(self.flags)
        rows = {"float32": words.view(torch.float32).unbind(), "int32": words.unbind(), "bool": flags.unbind()}
        return self.structure.unflatten([rows[dtype][row] for dtype, row in self.places])


def pack(tree: Any) -> Packed:
    """Pack a tree of arrays (N,), at least one of them bool and one float32 or int32; traced inside a compiled step."""
    leaves, structure = jax.tree.flatten(tree)
    words: list[jax.Array] = []
    flags: list[jax.Array] = []
    places = []
    for leaf in leaves:
        is_flag = leaf.dtype == bool
        rows = flags if is_flag else words
        places.append((str(leaf.dtype), len(rows)))
        rows.append(leaf if is_flag else jax.lax.bitcast_convert_type(leaf, jnp.int32))
    return Packed(jnp.stack(words), jnp.stack(flags), structure, tuple(places))
