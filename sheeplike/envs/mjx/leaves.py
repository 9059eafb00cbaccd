"""Leaves of MJX's models and data by name, and which of them a function reads."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.interpreters import partial_eval
from mujoco import mjx


def leaf(holder: mjx.Model | mjx.Option | mjx.Data, name: str) -> jax.Array:
    """Return a field, wherever it stands: some are Warp's own, in ``_impl``."""
    return getattr(holder if name in {field.name for field in type(holder).fields()} else holder._impl, name)


def leaves_read(function: Callable[..., Any], tree: Any, *arguments: Any) -> Iterator[str]:
    """Yield names, such as ``qpos``, of the leaves of ``tree`` on which ``function(tree, *arguments)`` depends."""
    traced = jax.make_jaxpr(function)(tree, *arguments).jaxpr
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    for (path, _), read in zip(paths, used, strict=False):  # the arguments' leaves come after the tree's
        if read:
            yield jax.tree_util.keystr(path, simple=True, separator=".")
