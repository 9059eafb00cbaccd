"""``show=config``: print every value of a run and the file that it comes from."""

from __future__ import annotations

from sheeplike.commands import Request
from sheeplike.config.compose import explain, load, load_saved, start_of
from sheeplike.config.errors import expand
from sheeplike.config.sources import Sources
from sheeplike.run.layout import config_file
from sheeplike.terminal import echo


def main(request: Request) -> None:
    """Print the configuration that the command line composes, or that of the run that ``resume=`` names."""
    start, overrides = start_of(request.arguments)
    if start.resume in (None, "auto"):
        composed = load(overrides, Sources(request.config_dirs))
    else:
        composed = load_saved(config_file(expand(start.resume), "resume"), overrides)
    echo(explain(composed))
