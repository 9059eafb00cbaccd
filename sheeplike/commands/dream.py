"""Play the real simulator and the world model's dream of it, side by side in a browser.

``python -m sheeplike dream run=<run_dir> [key=value …]`` serves a page to this machine alone. The agent may also be an
export, or ``run=demo:<name>``, which comes with the program.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import require_writable
from sheeplike.config.schema import Config
from sheeplike.options import CommandError, Options, explain_keys, keys_of
from sheeplike.run import exported
from sheeplike.run.exported import is_export
from sheeplike.run.run_dir import choose_checkpoint
from sheeplike.terminal import echo, info

RECORDINGS = "dream"
MOST_RATE = 30.0  # steps a second, of the start: what eyes can follow


class DreamOptions(Options):
    """Keys of this command."""

    run: str | None = Field(None, description="the directory of the run, or of an export; or demo:<name>")
    checkpoint: str = Field(
        "last", description="last; best: of those kept, the one with the highest eval/return_mean; or its policy steps"
    )
    port: int = Field(8000, ge=0, le=2**16 - 1, description="of this machine's own address; 0: any that is free")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="of the first start")


def main(request: Request) -> int | None:
    """Serve the page until Ctrl-C.

    Raises:
        CommandError: there is no such agent, it does not dream in pictures, or the port is taken.
    """
    if request.help:
        echo("python -m sheeplike dream run=<run_dir> [key=value ...]", "", explain_keys(keys_of(DreamOptions)), "")
        echo("The address that it prints holds a token, and is open to this machine alone; from another one:")
        echo("  ssh -L 8000:localhost:8000 <host>")
        echo(f"Episodes that the page records are kept in <run_dir>/{RECORDINGS}/, of a demo below logs/demo/.")
        return None
    asked = load_options(DreamOptions, request.about_run())
    place, config = exported.open_agent(asked.run, asked.checkpoint, "dream", RECORDINGS)
    if not is_export(place):
        choose_checkpoint(place, asked.checkpoint)  # before torch and JAX are loaded
    recordings = exported.results(place, RECORDINGS)
    require_writable("run", recordings)
    from sheeplike.analysis.dream.server import bind

    with bind(asked.port) as listening:
        info("loading torch and JAX")
        serve(listening, place, recordings, config, asked)
    return 0


def serve(listening: object, place: Path, recordings: Path, config: Config, asked: DreamOptions) -> None:
    """Build the world and the model, and serve them.

    Raises:
        CommandError: one of them cannot be built, or not with the other.
    """
    import asyncio

    from sheeplike.analysis import model as models
    from sheeplike.analysis.dream import server
    from sheeplike.analysis.dream.session import Session, check
    from sheeplike.config.errors import as_command_errors
    from sheeplike.monitor.progress import phase
    from sheeplike.run.build import build_envs, launch

    model = models.load(asked.run, checkpoint=asked.checkpoint)
    if not model.cameras:
        raise CommandError(
            f"run={asked.run}: the model shows no images: expected pixels/* or depth/* among agent.observations"
        )
    config = config.replace(fabric=config.fabric.replace(accelerator="cpu"), compile="off")
    fabric = launch(config)
    made = build_envs(config, 1, fabric.device)
    try:
        check(made, model)
        refused = envs.Unusable if envs.simulated(config.env.name) else Exception
        with phase("building simulation and rendering kernels"), as_command_errors(refused):
            session = Session(made, model, seed=asked.seed)
            session.tick()
            session.start(asked.seed)
        about = {"env": made.name, "agent": config.agent.name, "run": asked.run}
        rate = min(made.metadata["render_fps"], MOST_RATE)
        asyncio.run(server.serve(server.Server(session, about, recordings, rate=rate), listening))
    finally:
        made.close()
