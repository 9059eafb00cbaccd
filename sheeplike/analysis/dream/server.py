"""The page of a session, and the socket that drives it.

One thread plays; the event loop only sends and receives. The play goes on at a fixed rate. A picture is sent when the
page has shown the one before, and then the newest: what came between is dropped.

The socket's pictures are binary: the length of a JSON header in 4 bytes, least significant first; the header; the
frames' pixels, RGB, in its order. All other messages are JSON text.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import mimetypes
import secrets
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web
from pydantic import Field

from sheeplike.analysis.dream import recording
from sheeplike.analysis.dream.session import MOST_SEED, STRIPS, Driver, Session, Source
from sheeplike.options import CommandError, InvalidOption, Options, build, nearest
from sheeplike.run.trained import finite
from sheeplike.terminal import info, one_line

LOCAL = ("127.0.0.1", "localhost")
FILES = {"": "page.html", "page.js": "page.js", "page.css": "page.css"}
LONGEST_MESSAGE = 2**16  # bytes
HEARTBEAT = 10.0  # seconds after which a client that does not answer has gone
MOST_RATE = 60.0  # steps a second
TAKEN = "another page plays already: close it, then reload this one"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src data:; connect-src 'self' ws:; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _Act(Options):
    action: Any


class _Choose(Options):
    source: Source
    name: str | None = None


class _Pause(Options):
    on: bool


class _Start(Options):
    seed: int | None = Field(None, ge=0, le=MOST_SEED)


class _Rate(Options):
    rate: float = Field(ge=0.5, le=MOST_RATE)


class _Go(Options):
    step: int


class _Drive(Options):
    dream: int = Field(ge=0)
    driver: Driver


class _Force(Options):
    group: int
    one: int | None


class _Nothing(Options):
    pass


class Server:
    """Serves one session to one page at a time.

    Args:
        session: what is played.
        about: shown at the top of the page.
        place: directory of recorded episodes.
        rate: steps a second, at first.

    Attributes:
        token: part of every address.
        paused: whether the play stands still; it does while no page is open.
    """

    def __init__(self, session: Session, about: Mapping[str, str], place: Path, *, rate: float) -> None:
        self.session, self.about, self.place, self.rate = session, dict(about), place, rate
        self.token = secrets.token_urlsafe(16)
        self.paused = False
        self._thread = ThreadPoolExecutor(1, "dream")
        self._client: web.WebSocketResponse | None = None
        self._sent = 0  # pictures
        self._shown = 0  # of them, by the page
        self._behind = False  # there is a newer one than the page was sent
        self._strip = (-1, 0)  # version and step up to which the page has the numbers
        self._does: dict[str, tuple[type[Options], Callable[..., Awaitable[str | None]]]] = {
            "act": (_Act, self._in_thread(session.act)),
            "choose": (_Choose, self._choose),
            "pause": (_Pause, self._pause),
            "step": (_Nothing, self._step),
            "start": (_Start, self._in_thread(session.start)),
            "rate": (_Rate, self._change_rate),
            "branch": (_Nothing, self._in_thread(session.branch)),
            "drive": (_Drive, self._in_thread(session.drive)),
            "check": (_Nothing, self._in_thread(session.check_reality)),
            "go": (_Go, self._go),
            "force": (_Force, self._in_thread(session.force)),
            "release": (_Nothing, self._in_thread(session.release)),
            "save": (_Nothing, self._save),
        }

    def app(self) -> web.Application:
        """The application: the page, what it loads, and its socket, all below the token."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(f"/{self.token}/ws", self._socket)
        for name in FILES:
            app.router.add_get(f"/{self.token}/{name}", partial(_file, name))
        app.cleanup_ctx.append(self._playing)
        return app

    # --- who may come ----------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        """Refuse other hosts, pages of other origins, and whoever does not have the token."""
        origin = request.headers.get("Origin")
        if request.host.partition(":")[0] not in LOCAL:
            return _refusal("this page is served to 127.0.0.1 and localhost alone")
        if origin not in (None, f"http://{request.host}"):
            return _refusal("this page is not served to other pages")
        token = request.path.split("/")[1]
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            return _refusal("the address lacks its token: open the one that the command printed")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.status}: there is nothing here\n")

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(heartbeat=HEARTBEAT, max_msg_size=LONGEST_MESSAGE, compress=False)
        await ws.prepare(request)
        if self._client is not None:
            await ws.send_json({"kind": "refused", "line": TAKEN})
            await ws.close(code=WSCloseCode.TRY_AGAIN_LATER)
            return ws
        self._client, self._sent, self._shown, self._behind, self._strip = ws, 0, 0, False, (-1, 0)
        try:
            await self._run(self.session.choose, self.session.source)
            await ws.send_json(self._hello())
            await self._show()
            async for message in ws:
                if message.type == WSMsgType.TEXT:
                    await self._receive(message.data)
                elif message.type == WSMsgType.BINARY:
                    await self._say("a message of bytes: expected JSON")
        except ConnectionError:
            pass
        finally:
            self._client = None
        return ws

    # --- what it says -----------------------------------------------------------------------------------------------

    async def _receive(self, text: str) -> None:
        """Do what the page asks for; what cannot be done is one line in it."""
        try:
            message = parse_message(text)
            if not isinstance(message, dict):
                raise CommandError("a message that is no object: expected {do: ..., ...}")
            name = message.pop("do", None)
            if name == "shown":
                await self._acknowledge(message.get("picture"))
                return
            if not isinstance(name, str) or name not in self._does:
                raise InvalidOption("do", name, f"one of {', '.join(self._does)}", nearest(name, self._does))
            options, do = self._does[name]
            asked = build(options, message)
            line = await do(**{key: getattr(asked, key) for key in type(asked).model_fields})
        except CommandError as error:
            line = str(error)
        except Exception as error:  # of somebody else's environment, say
            self.paused, line = True, f"{type(error).__name__}: {error}"
        if line:
            await self._say(line)
        await self._show()

    async def _acknowledge(self, picture: Any) -> None:
        if not isinstance(picture, int) or not self._shown <= picture <= self._sent:
            raise InvalidOption("picture", picture, f"from {self._shown} to {self._sent}")
        self._shown = picture
        if self._behind:
            await self._show()

    async def _choose(self, source: Source, name: str | None) -> str | None:
        if source != "recorded":
            return await self._run(self.session.choose, source)
        names = recording.list_names(self.place)
        if name not in names:
            raise InvalidOption("name", name, f"one of {', '.join(names) or 'none'}", nearest(name, names))
        return await self._run(lambda: self.session.replay(recording.read(self.place / f"{name}.npz")))

    async def _pause(self, on: bool) -> None:
        self.paused = on

    async def _step(self) -> None:
        self.paused = True
        await self._run(self.session.tick)

    async def _change_rate(self, rate: float) -> None:
        self.rate = rate

    async def _go(self, step: int) -> str | None:
        before, self.paused = self.paused, True  # at once: a tick from there would cut off what came after
        try:
            return await self._run(self.session.go_to, step)
        except CommandError:
            self.paused = before
            raise

    async def _save(self) -> str:
        fps = self.session.envs.metadata["render_fps"]
        name = await self._run(lambda: recording.write(self.place, self.session.episode(), fps))
        await self._client.send_json({"kind": "recordings", "names": recording.list_names(self.place)})
        return f"saved: {self.place / name}.npz and .gif"

    # --- what it is shown -------------------------------------------------------------------------------------------

    def _hello(self) -> dict[str, Any]:
        session, codec = self.session, self.session.model.codec
        return {
            "kind": "hello",
            "about": self.about,
            "actions": {"width": codec.width, "classes": codec.classes, "starts": codec.starts, "joint": codec.joint},
            "groups": session.model.groups,
            "classes": session.model.classes,
            "strips": STRIPS,
            "exact": session.exact,
            "recordings": recording.list_names(self.place),
            "fps": session.envs.metadata["render_fps"],
        }

    async def _say(self, line: str) -> None:
        with suppress(ConnectionError):
            if self._client is not None:
                await self._client.send_json({"kind": "line", "line": one_line(line)})

    async def _show(self) -> None:
        """Send the present picture, if the page has shown the one before."""
        client = self._client
        if client is None or client.closed:
            return
        if self._sent > self._shown:
            self._behind = True
            return
        self._behind, self._sent = False, self._sent + 1
        try:
            picture = await self._run(self._picture)
        except Exception as error:  # the play waits, and the next picture may come
            self.paused, self._sent = True, self._sent - 1
            await self._say(f"{type(error).__name__}: {error}")
            return
        with suppress(ConnectionError):
            await client.send_bytes(picture)

    def _picture(self) -> bytes:
        session, view = self.session, self.session.view()
        version, upto = self._strip
        start = upto if version == session.version else view.first
        frames = [frame for panel in view.panels for frame in panel.frames.values()]
        header = {
            "picture": self._sent,
            "step": view.step,
            "last": view.last,
            "first": view.first,
            "paused": self.paused,
            "rate": self.rate,
            "seed": session.seed,
            "mark": session.mark,
            "source": session.source,
            "action": session.action,
            "psnr": view.psnr,
            "panels": [
                {
                    "name": panel.name,
                    "driver": panel.driver,
                    "end": panel.end,
                    "cameras": {key: frame.shape[:2] for key, frame in panel.frames.items()},
                    "points": panel.points,
                }
                for panel in view.panels
            ],
            "strip": {"start": start, **session.strip(start)},
            "forced": sorted(session.forced.items()),
            "expected": (view.expected * 255).round().astype(int).ravel().tolist(),
            "drawn": view.drawn.tolist(),
            "believed": view.believed.tolist(),
        }
        self._strip = session.version, view.last + 1
        text = json.dumps(finite(header), allow_nan=False).encode()
        return b"".join([len(text).to_bytes(4, "little"), text, *(frame.tobytes() for frame in frames)])

    # --- the play ---------------------------------------------------------------------------------------------------

    async def _playing(self, app: web.Application) -> Any:
        task = asyncio.create_task(self._play())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        if self._client is not None:
            await self._client.close(code=WSCloseCode.GOING_AWAY)
        self._thread.shutdown()

    async def _play(self) -> None:
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            due = max(due + 1 / self.rate, clock() - 1 / self.rate)  # more than one late tick is not made up for
            await asyncio.sleep(max(due - clock(), 0))
            if self._client is None or self.paused:
                continue
            try:
                if self.session.finished:
                    self.paused = True
                    await self._say("the recorded episode is over")
                else:
                    await self._run(self.session.tick)
            except Exception as error:  # of somebody else's environment, say
                self.paused = True
                await self._say(f"{type(error).__name__}: {error}")
            await self._show()

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _in_thread(self, function: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
        return lambda **arguments: self._run(partial(function, **arguments))


def parse_message(text: str) -> Any:
    """What a page has sent.

    Raises:
        CommandError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise CommandError("a message that is no JSON") from None


async def serve(server: Server, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        listening: a bound socket.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        port = listening.getsockname()[1]
        info(f"open http://{LOCAL[0]}:{port}/{server.token}/ in a browser; Ctrl-C ends it")
        await stop.wait()
        info("ending")
    finally:
        await runner.cleanup()


def bind(port: int) -> socket.socket:
    """A socket on this machine's own address.

    Raises:
        InvalidOption: the port cannot be had.
    """
    try:
        return _bound(port)
    except OSError as error:
        for other in [*range(port + 1, min(port + 100, 2**16)), 0]:
            with suppress(OSError), _bound(other) as free:
                raise InvalidOption(
                    "port", port, f"one that is free ({error.strerror})", free.getsockname()[1]
                ) from None
        raise InvalidOption("port", port, f"one that is free ({error.strerror})") from None


def _bound(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((LOCAL[0], port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


async def _file(name: str, request: web.Request) -> web.Response:
    text = resources.files(__package__).joinpath(FILES[name]).read_text(encoding="utf-8")
    return web.Response(text=text, content_type=mimetypes.guess_type(FILES[name])[0], headers=HEADERS)


def _refusal(line: str) -> web.Response:
    return web.Response(status=403, text=f"{line}\n", headers=HEADERS)
