"""The command line: each file here is a command, its first line the help, its ``main(request)`` what it does."""

from __future__ import annotations

from typing import NamedTuple


class Request(NamedTuple):
    """What stands behind a command's name.

    Attributes:
        arguments: overrides such as ``env.num_envs=8``, and bare words.
        config_dirs: given with ``--config-dir``.
        help: whether ``--help`` is among them.
    """

    arguments: list[str]
    config_dirs: list[str]
    help: bool
