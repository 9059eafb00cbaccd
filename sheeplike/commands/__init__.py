"""The command line: each file here is a command, its first line the help, its ``main(request)`` what it does."""

from __future__ import annotations

from typing import NamedTuple

from sheeplike.options import CommandError


class Request(NamedTuple):
    """The parsed arguments of a command.

    Attributes:
        arguments: overrides such as ``env.num_envs=8``, and bare words.
        config_dirs: given with ``--config-dir``.
        help: whether ``--help`` is among them.
    """

    arguments: list[str]
    config_dirs: list[str]
    help: bool

    def about_run(self) -> list[str]:
        """The arguments of a command about a run, whose directory may stand there without ``run=``.

        Raises:
            CommandError: configs are of no use beside a run, which holds its whole configuration.
        """
        if self.config_dirs:
            raise CommandError("--config-dir: expected only run=<run_dir>, which holds the whole configuration")
        is_key = [argument.partition("=")[0].isidentifier() and "=" in argument for argument in self.arguments]
        return [text if key else f"run={text}" for text, key in zip(self.arguments, is_key, strict=True)]
