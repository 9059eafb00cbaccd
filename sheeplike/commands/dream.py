"""Play the real simulator and the world model's dream of it, side by side in a browser.

``python -m sheeplike dream run=<run_dir> [key=value …]`` serves a page to this machine alone. The agent may also be an
export, or ``run=demo:<name>``, which comes with the program.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from socket import socket

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, require_writable
from sheeplike.config.schema import Config
from sheeplike.options import CommandError, explain_keys, keys_of
from sheeplike.run.layout import choose_checkpoint
from sheeplike.terminal import echo, info
from sheeplike.trained import exported
from sheeplike.trained.exported import is_export
from sheeplike.trained.playing import AgentOptions, choose_accelerator, open_trained, results_of

RECORDINGS = "dream"  # a directory in that of the run
MAX_RATE = 30.0  # steps per second at the start


class DreamOptions(AgentOptions):
    """Keys of this command."""

    port: int = Field(8000, ge=0, le=2**16 - 1, description="of this machine's own address; 0: any that is free")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="of the first start")


def main(request: Request) -> None:
    """Serve the page until Ctrl-C."""
    if request.help:
        echo("python -m sheeplike dream run=<run_dir> [key=value ...]", "", explain_keys(keys_of(DreamOptions)), "")
        echo("The address that it prints holds a token, and is open to this machine alone; from another one:")
        echo("  ssh -L 8000:localhost:8000 <host>")
        echo(f"Episodes that the page records are kept in <run_dir>/{RECORDINGS}/, of a demo below logs/demo/.")
        echo(f"A model that comes along: run={exported.DEMO}franka_pick")
        return
    asked = load_options(DreamOptions, request.about_run())
    run_dir, config = open_trained(asked.run, asked.checkpoint, "dream", RECORDINGS)
    if not is_export(run_dir):
        choose_checkpoint(run_dir, asked.checkpoint)  # a mistake is told before torch and JAX are loaded
    asked = asked.replace(accelerator=choose_accelerator(asked.accelerator, config))
    require_writable("run", results_of(run_dir, RECORDINGS))
    if not config.agent.has_world_model:
        raise CommandError(f"run={asked.run}: {config.agent.name} has no world model: expected a run of dreamer_v3")
    from sheeplike.inspection.dream.server import bind

    with bind(asked.port) as listening:
        info("loading torch and JAX")
        play(listening, results_of(run_dir, RECORDINGS), config, asked)


def play(listening: socket, recordings: Path, config: Config, asked: DreamOptions) -> None:
    """Build the environment and the model, and serve them; ``recordings`` is a directory."""
    import asyncio

    from sheeplike.inspection.dream import overlay
    from sheeplike.inspection.dream.server import Server, serve
    from sheeplike.inspection.dream.session import NO_IMAGES, Session
    from sheeplike.inspection.model import load
    from sheeplike.monitor.progress import phase
    from sheeplike.run.build import build_envs, launch, make_envs

    config = config.replace(fabric=config.fabric.replace(accelerator=asked.accelerator), compile="off")
    fabric = launch(config)
    model = load(asked.run, checkpoint=asked.checkpoint, device=fabric.device)
    if not model.cameras:
        raise CommandError(f"run={asked.run}: {NO_IMAGES}")
    world = build_envs(config, 1, fabric.device)
    # Other people's environments may raise at their first steps that they cannot be used as configured.
    refused = envs.Unusable if envs.simulated(config.env.name) else Exception
    try:
        points = None
        if world.positions and not overlay.is_taught(model):
            many = make_envs(config, overlay.EPISODES, fabric.device)
            with closing(many), phase(f"a probe learns from {overlay.EPISODES} episodes where things are"):
                points = overlay.points(overlay.probed(model, many), world)
        elif world.positions:
            points = overlay.points(overlay.taught, world)
        with phase("building simulation and rendering kernels"), as_command_errors(refused):
            session = Session(world, model, seed=asked.seed, points=points)
            session.tick()
            session.start(asked.seed)
        about = {"env": world.name, "agent": config.agent.name, "run": asked.run}
        rate = min(world.metadata["render_fps"], MAX_RATE)
        asyncio.run(serve(Server(session, about, recordings, rate=rate), listening))
    finally:
        world.close()
