"""Names that do not exist: what to say instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.0) -> str | None:
    """The one of ``known`` that is most like ``name``, whatever the case of its letters.

    Args:
        cutoff: the least likeness, from 0 to 1; with the default there is an answer wherever anything is known.
    """
    lowered = {choice.lower(): choice for choice in reversed(list(known))}  # the first of two wins
    close = difflib.get_close_matches(str(name).lower(), lowered, n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def one_of(name: object, known: Iterable[str]) -> str:
    """What was expected in place of ``name``: all that is known, and the nearest of it."""
    known = list(known)
    return f"one of {', '.join(known)}" + (f" (nearest: {nearest(name, known)})" if known else "")
