"""Play the real simulator and the world model's dream of it, side by side in a browser.

``python -m sheeplike dream run=<run_dir> [key=value …]`` serves a page to this machine alone. The agent may also be an
export, or ``demo:<name>``, which comes with the program.
"""

from __future__ import annotations

import re
from contextlib import closing, nullcontext
from pathlib import Path
from socket import socket

from pydantic import Field

from sheeplike import envs
from sheeplike.commands import Request
from sheeplike.config.compose import load_options
from sheeplike.config.errors import as_command_errors, expand, require_writable
from sheeplike.config.schema import Config
from sheeplike.files import find_unusual
from sheeplike.options import CommandError, InvalidOption, explain_keys, keys_of
from sheeplike.terminal import echo, info
from sheeplike.trained import exported
from sheeplike.trained.playing import AgentOptions, open_trained, results_of

RECORDINGS, DEMOS = "dream", "demonstrations"  # directories in that of the run
MAX_RATE = 30.0  # steps per second at the start
HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")


class DreamOptions(AgentOptions):
    """Keys of this command."""

    port: int = Field(8000, ge=0, le=2**16 - 1, description="port on this machine's own address; 0: any free one")
    proxy: str | None = Field(
        None, description="host of a proxy, as in the browser's address, that may show this page in a frame of its own"
    )
    to: str | None = Field(
        None, description="record whole episodes from the start, into this directory; null: once asked, beside the run"
    )
    seed: int = Field(0, ge=0, le=2**31 - 1, description="random seed of the first start")


def main(request: Request) -> None:
    """Serve the page until Ctrl-C."""
    if request.help:
        echo("python -m sheeplike dream run=<run_dir> [key=value ...]", "", explain_keys(keys_of(DreamOptions)), "")
        echo("It prints an address with a token, which only this machine can open; from another machine, first run:")
        echo("  ssh -L 8000:localhost:8000 <host>")
        echo(f"What the page saves goes into <run_dir>/{RECORDINGS}/, episodes to learn from into to=, or else into")
        echo(f"<run_dir>/{DEMOS}/; for a demo, below logs/demo/, of the hub's below logs/hub/.")
        echo(f"A model comes with the program: run={exported.DEMO}franka_pick")
        return
    asked = load_options(DreamOptions, request.about_run())
    if asked.proxy is not None and not HOST.fullmatch(asked.proxy):
        found = HOST.search(asked.proxy.lower().rpartition("//")[2])
        expected = "a host as in the browser's address, without scheme and path"
        raise InvalidOption("proxy", asked.proxy, expected, found[0] if found else "localhost:8888")
    run_dir, config, asked = open_trained(asked, "dream", RECORDINGS, world_model=True)
    if asked.to:
        require_writable("to", expand(asked.to).parent)
    elif found := find_unusual(run_dir, DEMOS):  # a link could lead elsewhere
        raise CommandError(f"run={run_dir}: {found}: expected a directory for episodes; nearest: to=<one of your own>")
    from sheeplike.inspection.dream.server import bind

    with bind(asked.port) as listening:
        info("loading torch and JAX")
        play(listening, run_dir, config, asked)


def play(listening: socket, run_dir: Path, config: Config, asked: DreamOptions) -> None:
    """Build the environment and the model, and serve them."""
    import asyncio

    from sheeplike.data.writing import NpzWriter
    from sheeplike.inspection.dream import overlay
    from sheeplike.inspection.dream.server import Server, serve
    from sheeplike.inspection.dream.session import NO_IMAGES, Session
    from sheeplike.inspection.model import load
    from sheeplike.inspection.trust import smooth
    from sheeplike.monitor.progress import phase
    from sheeplike.run.build import build_envs, launch
    from sheeplike.trained.recording import facts_of

    config = config.replace(fabric=config.fabric.replace(accelerator=asked.accelerator), compile="off")
    fabric = launch(config)
    recordings = results_of(run_dir, RECORDINGS)
    model = load(run_dir, checkpoint=asked.checkpoint, device=fabric.device)
    if not model.cameras:
        raise CommandError(f"run={asked.run}: {NO_IMAGES}")
    world = build_envs(config, 1, fabric.device)
    # An environment of another package may raise anything at its first steps if it cannot be used as configured.
    refused = envs.Unusable if envs.simulated(config.env.name) else Exception
    try:
        with phase("building simulation and rendering kernels"), as_command_errors(refused):
            place = expand(asked.to) if asked.to else recordings.with_name(DEMOS)
            session = Session(world, model, seed=asked.seed, demos=lambda: NpzWriter(place, facts_of(config, world)))
            session.tick()
        several = envs.simulated(config.env.name)  # a world of another package may exist only once
        if several or world.positions:
            opened = closing(build_envs(config, overlay.EPISODES, fabric.device)) if several else nullcontext(world)
            with opened as worlds, phase(f"playing {overlay.EPISODES} episodes, to learn what is usual"):
                played, states = overlay.watch(model, worlds)
                session.alarm = smooth(model.kl(states).cpu()[:, 1:], played.valid[:, 1:]).max().item()
            if world.positions:
                session.places = overlay.learn(model, world, played, states)
        if asked.to:
            info(session.teach())
        session.start(asked.seed)
        if asked.to:
            session.choose("keys")  # a person's episodes are asked for, not the policy's
        about = {"env": world.name, "agent": config.agent.name, "run": asked.run}
        rate = min(world.metadata["render_fps"], MAX_RATE)
        server = Server(session, about, recordings, rate=rate, paused=asked.to is not None, proxy=asked.proxy)
        asyncio.run(serve(server, listening))
    finally:
        world.close()
