"""Web server of a session: the page, and the socket that drives it.

One thread plays, at a fixed rate; the event loop only sends and receives. Pictures that a page has no time to show are
dropped.

Pictures are binary messages: the length of a JSON header in 4 bytes, least significant first; the header; the RGB
pixels of the frames in the header's order. All other messages are JSON text.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import mimetypes
import os
import re
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.http import HttpProcessingError
from gymnasium.vector import VectorEnv
from pydantic import Field, create_model

from sheeplike.inspection.dream import recording
from sheeplike.inspection.dream.recording import MOST_SEED
from sheeplike.inspection.dream.session import GAIN, STRIPS, Driver, Session, Source
from sheeplike.inspection.model import psnr
from sheeplike.options import CommandError, InvalidOption, Options, build, nearest
from sheeplike.terminal import info, one_line
from sheeplike.trained.playing import finite

LOCAL = ("127.0.0.1", "localhost")
PANELS = ("real", "dream", "dream B")
FILES = {"": "page.html", "page.js": "page.js", "page.css": "page.css"}
MAX_MESSAGE = 2**16  # bytes
HEARTBEAT = 10.0  # seconds; a client that does not answer in time is disconnected
MAX_RATE = 60.0  # steps per second
UNSHOWN = 2  # most pictures that a page has not acknowledged: one is made while it shows the other
TAKEN = "another page is open: close it, then"
POLICY = "default-src 'self'; img-src data:; connect-src 'self' ws:{}; frame-ancestors {}"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY.format("", "'none'"),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_FIELDS: dict[str, dict[str, Any]] = {
    "act": {"action": (Any, ...)},
    "choose": {"source": (Source, ...), "name": (str | None, None)},
    "pause": {"on": (bool, ...)},
    "step": {},
    "start": {"seed": (int | None, Field(None, ge=0, le=MOST_SEED))},
    "rate": {"rate": (float, Field(ge=0.5, le=MAX_RATE))},
    "branch": {},
    "spread": {},
    "show_scene": {},
    "drag": {"panel": (int, Field(ge=0)), "name": (str, ...), "camera": (str, ...)}
    | dict.fromkeys("xy", (float, Field(allow_inf_nan=False))),
    "drive": {"dream": (int, Field(ge=0)), "driver": (Driver, ...)},
    "check": {},
    "go": {"step": (int, ...)},
    "force": {"group": (int, ...), "one": (int | None, ...)},
    "release": {},
    "save": {},
    "teach": {},
}
MESSAGES = {name: create_model(name, __base__=Options, **fields) for name, fields in _FIELDS.items()}
"""Messages of the page, ``{"do": name, …}``, with their fields; the method of that name answers each."""


@dataclass(eq=False)
class _Page:
    """An open page."""

    ws: web.WebSocketResponse
    sent: int = 0  # pictures
    shown: int = 0  # pictures that it has acknowledged
    behind: bool = False  # True if there is a newer picture than the last one sent
    strip: tuple[int, int] = (-1, 0)  # session's version, and the step up to which the page has its numbers


class Server:
    """Server of one session to one page at a time; the play stands still while no page is open.

    Args:
        about: facts for the top of the page.
        place: directory of recorded episodes.
        rate: initial steps per second.
        paused: the play waits at first.
        proxy: host, with its port if the browser shows one, of a proxy before this server. Its pages may show this one
            in a frame. It may pass on its own name as the host, or this machine's.

    Attributes:
        token: part of every address.
    """

    def __init__(
        self,
        session: Session,
        about: Mapping[str, str],
        place: Path,
        *,
        rate: float,
        paused: bool = False,
        proxy: str | None = None,
    ) -> None:
        self.session, self.about, self.place, self.rate = session, dict(about), place, rate
        self.token = secrets.token_urlsafe(16)
        self.paused, self.proxy = paused, proxy
        self._origins = {f"https://{proxy}", f"http://{proxy}"} if proxy else set()
        self._thread = ThreadPoolExecutor(1, "dream")
        self._page: _Page | None = None
        self._saving: asyncio.Task[None] | None = None

    def app(self) -> web.Application:
        """Make the application: the page, its files, and its socket, all below the token."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(f"/{self.token}/ws", self._socket)
        headers, proxy = HEADERS, self.proxy
        if proxy:
            policy = POLICY.format(f" wss://{proxy}", f"https://{proxy} http://{proxy}")
            headers = HEADERS | {"Content-Security-Policy": policy}
        for name in FILES:
            app.router.add_get(f"/{self.token}/{name}", partial(_file, name, headers))
        app.cleanup_ctx.append(self._playing)
        app.on_shutdown.append(self._leave)
        return app

    # --- access ----------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        """Refuse other hosts, other origins, and requests without the token."""
        origin, proxy = request.headers.get("Origin"), self.proxy
        if request.host.partition(":")[0] not in LOCAL and request.host != proxy:
            return _refusal("this page is served to 127.0.0.1, localhost and the host of proxy= alone")
        if origin not in (None, f"http://{request.host}") and origin not in self._origins:
            return _refusal("this page is not served to other sites")
        token = request.path.removeprefix("/").partition("/")[0]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return _refusal("the address lacks its token: open the one that the command printed")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _refusal(f"{error.status}: there is nothing here", error.status)

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=MAX_MESSAGE, compress=False)
        await ws.prepare(request)
        if self._page is not None:
            await ws.send_json({"kind": "refused", "line": TAKEN})
            await ws.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return ws
        self._page = _Page(ws)
        try:
            await self._run(self.session.choose, self.session.source)
            await ws.send_json(self._hello())
            await self._show()
            async for message in ws:
                if message.type == WSMsgType.TEXT:
                    await self._receive(message.data)
                elif message.type == WSMsgType.BINARY:
                    await self._send_line("a message of bytes: expected JSON")
        except ConnectionError:
            pass
        finally:
            self._page = None
        return ws

    # --- messages of the page ---------------------------------------------------------------------------------------

    async def _receive(self, text: str) -> None:
        """Do what the page asks for, or answer with one line of error."""
        message = None
        try:
            with suppress(ValueError, RecursionError):
                message = json.loads(text)
            if not isinstance(message, dict):
                raise CommandError("expected a JSON object, {do: ..., ...}")
            name = message.pop("do", None)
            if name == "shown":
                await self._acknowledge(message.get("picture"))
                return
            if not isinstance(name, str) or name not in MESSAGES:
                raise InvalidOption("do", name, f"one of {', '.join(MESSAGES)}", nearest(name, MESSAGES))
            fields, own = dict(build(MESSAGES[name], message)), getattr(self, f"_{name}", None)
            line = await (own(**fields) if own else self._run(partial(getattr(self.session, name), **fields)))
        except Exception as error:
            # A refusal changes nothing; other errors, such as an environment's, pause the play.
            self.paused, line = self.paused or not isinstance(error, CommandError), error
        if line:
            await self._send_line(line)
        await self._show()

    async def _acknowledge(self, picture: Any) -> None:
        page = self._page
        if not isinstance(picture, int) or not page.shown <= picture <= page.sent:
            raise InvalidOption("picture", picture, f"from {page.shown} to {page.sent}")
        page.shown = picture
        if page.behind:
            await self._show()

    async def _choose(self, source: Source, name: str | None) -> None:
        if source != "recorded":
            return await self._run(self.session.choose, source)
        names = recording.list_names(self.place)
        if name not in names:
            raise InvalidOption("name", name, f"one of {', '.join(names) or 'none'}", nearest(name, names))
        await self._run(lambda: self.session.replay(recording.read(self.place / f"{name}.npz")))
        self.paused = False

    async def _pause(self, on: bool) -> None:
        self.paused = on

    async def _step(self) -> None:
        self.paused = True
        await self._run(partial(self.session.tick, newest=True))

    async def _rate(self, rate: float) -> None:
        self.rate = rate

    async def _drag(self, **fields: Any) -> str | None:
        line = await self._run(partial(self.session.drag, **fields))
        if self.paused and not fields["panel"]:  # the simulator shows it after a step
            await self._run(partial(self.session.tick, newest=True))
        return line

    async def _check(self) -> None:
        await self._run(self.session.check_reality)

    async def _go(self, step: int) -> str | None:
        before, self.paused = self.paused, True  # a tick would cut off the later steps
        try:
            return await self._run(self.session.go_to, step)
        except CommandError:
            self.paused = before
            raise

    async def _save(self) -> str | None:
        if self._saving is not None and not self._saving.done():
            return "an episode is being saved: wait until it is done"
        episode, scene = await self._run(lambda: (self.session.episode(), self.session.films))
        self._saving = asyncio.create_task(self._write(episode, scene))
        return f"saving all {len(episode['action'])} steps since the last start: a long play takes a while"

    async def _write(self, episode: Mapping[str, np.ndarray], scene: Sequence[np.ndarray | None]) -> None:
        """Write an episode while the play goes on."""
        fps = self.session.envs.metadata["render_fps"]
        try:
            name = await asyncio.to_thread(recording.write, self.place, episode, fps, scene)
        except Exception as error:  # the disk may be full
            await self._send_line(error)
            return
        await self._send({"kind": "recordings", "names": recording.list_names(self.place)})
        await self._send_line(f"saved: {self.place / name}.npz and .gif")

    # --- messages to the page ---------------------------------------------------------------------------------------

    def _hello(self) -> dict[str, Any]:
        session, codec = self.session, self.session.model.codec
        return {
            "kind": "hello",
            "about": self.about,
            "goal": goal_of(session.envs),
            "actions": {name: getattr(codec, name) for name in ("width", "classes", "starts", "joint")}
            | {"names": session.envs.action_names},
            "groups": session.model.groups,
            "classes": session.model.classes,
            "strips": STRIPS,
            "recordings": recording.list_names(self.place),
            "fps": session.envs.metadata["render_fps"],
            "filmed": session.filmed,
            "exact": session.exact,
            "gain": GAIN,
            "trust": session.places.trust if session.places else {},
        }

    async def _send_line(self, line: str | Exception) -> None:
        named = isinstance(line, str | CommandError)
        await self._send({"kind": "line", "line": one_line(line if named else f"{type(line).__name__}: {line}")})

    async def _send(self, message: dict[str, Any]) -> None:
        with suppress(ConnectionError):
            if self._page is not None:
                await self._page.ws.send_json(message)

    async def _show(self) -> None:
        """Send the present picture, unless the page has still to show :data:`UNSHOWN` others."""
        page = self._page
        if page is None or page.ws.closed:
            return
        if page.sent - page.shown >= UNSHOWN:
            page.behind = True
            return
        page.behind, page.sent = False, page.sent + 1
        try:
            picture = await self._run(self._picture, page, page.sent)
        except Exception as error:  # the play pauses; later pictures may succeed
            self.paused, page.sent = True, page.sent - 1
            await self._send_line(error)
            return
        with suppress(ConnectionError):
            await page.ws.send_bytes(picture)

    def _picture(self, page: _Page, number: int) -> bytes:
        session, here = self.session, self.session.here
        version, upto = page.strip
        start = upto if version == session.version else session.first
        hands, drivers = [[], *map(sorted, here.by_hand)], (None, *here.settings.drivers)
        sides = zip(PANELS, here.pictures, here.points, drivers, session.ends, hands, strict=False)
        real, dream = session.classes
        header = {
            "picture": number,
            "step": session.now,
            "last": session.last,
            "first": session.first,
            "paused": self.paused,
            "rate": self.rate,
            "seed": session.seed,
            **{name: getattr(here, name) for name in ("episode", "age", "blind", "looks", "effect")},
            "scene": session.scene,
            "teaching": session.teaching,
            "whole": session.whole,
            "taught": [len(session.taught), sum(session.taught.values())],
            "handles": session.handles,
            "extras": {name: frame.shape[:2] for name, frame in here.extras.items()},
            "mark": here.settings.branched,
            "source": session.source,
            "action": session.action,
            "psnr": [psnr(error) for error in here.numbers["error"]],
            "panels": [
                {
                    "name": name,
                    "driver": driver,
                    "end": end,
                    "cameras": {key: frame.shape[:2] for key, frame in frames.items()},
                    "points": points,
                    "by_hand": hand,
                }
                for name, frames, points, driver, end, hand in sides
            ],
            "strip": {"start": start, **session.strip(start)},
            "forced": sorted(here.settings.forced.items()),
            "expected": (session.expected * 255).round().astype(int).ravel().tolist(),
            "drawn": dream.tolist(),
            "believed": real.tolist(),
        }
        page.strip = session.version, session.last + 1
        text = json.dumps(finite(header), allow_nan=False).encode()
        pixels = (frame.tobytes() for frames in (*here.pictures, here.extras) for frame in frames.values())
        return b"".join([len(text).to_bytes(4, "little"), text, *pixels])

    # --- the play ---------------------------------------------------------------------------------------------------

    async def _playing(self, app: web.Application) -> Any:
        task = asyncio.create_task(self._play())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if self._saving is not None:
            await self._saving
        self._thread.shutdown()

    async def _leave(self, app: web.Application) -> None:
        if self._page is not None:
            await self._page.ws.close(code=WSCloseCode.GOING_AWAY)

    async def _play(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + 1 / self.rate, clock() - 1 / self.rate)  # makes up for one late tick at most
            self.session.late = clock() > due
            await asyncio.sleep(max(due - clock(), 0))
            if self._page is None or self.paused:
                continue
            try:
                await self._run(self.session.tick)
            except Exception as error:  # a recorded episode is over, or an environment failed
                self.paused = True
                await self._send_line(error)
            await self._show()

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


def make_runner(server: Server) -> web.AppRunner:
    """Make the runner of a server's application; clients cannot make it print tracebacks."""
    logger, theirs = logging.getLogger(__name__), (HttpProcessingError, ConnectionError)
    logger.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], theirs)))
    return web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0, logger=logger)


async def serve(server: Server, listening: socket.socket) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    runner = make_runner(server)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        port = listening.getsockname()[1]
        info(f"open http://{LOCAL[0]}:{port}/{server.token}/ in a browser; Ctrl-C ends it")
        if server.proxy:  # the path before the token is the proxy's own
            info(f"through {server.proxy}: that proxy's address of port {port}, and then {server.token}/")
        await stop.wait()
        info("ending")
    finally:
        await runner.cleanup()


def bind(port: int) -> socket.socket:
    """Return a listening socket on this machine's own address, or raise an InvalidOption; port 0 is any free one."""
    try:
        return socket.create_server((LOCAL[0], port))
    except OSError as error:
        raise InvalidOption("port", port, f"one that is free ({os.strerror(error.errno)})", 0) from None


def goal_of(envs: VectorEnv) -> str:
    """Return the beginning of the docstring of a simulated task, which says what to do; empty for other worlds."""
    text = type(envs.simulator.task).__doc__ if envs.simulator else None
    goal = re.split(r"[;.\n]", text or "")[0]
    return goal[:1].lower() + goal[1:]


async def _file(name: str, headers: Mapping[str, str], request: web.Request) -> web.Response:
    text = resources.files(__package__).joinpath(FILES[name]).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=mimetypes.guess_type(FILES[name])[0], headers=headers)


def _refusal(line: str, status: int = 403) -> web.Response:
    return web.Response(status=status, text=f"{line}\n", headers=HEADERS)
