"""The command line: each file is a command, its first line the help; ``main(request)`` runs it.

``train --help`` and ``train seeds=…`` have files of their own, which begin with an underscore.
"""

from __future__ import annotations

from typing import NamedTuple

from sheeplike.options import CommandError


class Request(NamedTuple):
    """The parsed arguments of a command."""

    arguments: list[str]  # overrides such as `env.num_envs=8`, and bare words
    config_dirs: list[str]  # given with `--config-dir`
    help: bool  # `--help` is among them

    def module(self, command: str) -> str:
        """Return the module to import: the command, or ``_train_help`` or ``_train_seeds``."""
        keys = {argument.partition("=")[0] for argument in self.arguments}
        form = "help" if self.help else "seeds" if "seeds" in keys and "show" not in keys else ""
        return f"_train_{form}" if command == "train" and form else command

    def about_run(self) -> list[str]:
        """Return the arguments with a bare ``<dir>`` written as ``run=<dir>``; CommandError for two of them."""
        if self.config_dirs:
            raise CommandError("--config-dir: expected only run=<run_dir>, which holds the whole configuration")
        named = [argument.partition("=")[:2] for argument in self.arguments]
        is_key = [bool(equals) and key.replace(".", "").isidentifier() for key, equals in named]
        if is_key.count(False) > 1:
            raise CommandError(f"{' '.join(self.arguments)}: expected one run; nearest: a command for each")
        return [text if key else f"run={text}" for text, key in zip(self.arguments, is_key, strict=True)]
