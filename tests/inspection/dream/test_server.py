"""The page's server: who may come, what it answers, and that nothing ends it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WSMsgType, WSServerHandshakeError, web
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from sheeplike.inspection.dream.server import FILES, TAKEN, UNSHOWN, Server, bind, goal_of, make_runner
from sheeplike.options import InvalidOption

POLICY = "Content-Security-Policy"
Play = Callable[[TestClient, Server], Awaitable[None]]


class Picture(dict):
    """The header of a picture; ``pixels`` are what follows it."""

    def __init__(self, data: bytes) -> None:
        length = int.from_bytes(data[:4], "little")
        super().__init__(json.loads(data[4 : 4 + length]))
        self.pixels = data[4 + length :]


class Page:
    def __init__(self, ws: ClientWebSocketResponse) -> None:
        self.ws = ws

    async def do(self, what: str, **values: Any) -> None:
        await self.ws.send_json({"do": what, **values})

    async def next(self) -> Picture | dict[str, Any] | None:
        """The next message; None where the socket was closed."""
        message = await self.ws.receive(timeout=60)
        if message.type == WSMsgType.BINARY:
            return Picture(message.data)
        return json.loads(message.data) if message.type == WSMsgType.TEXT else None

    async def picture(self, where: Callable[[Picture], bool] = lambda picture: True) -> Picture:
        """The next picture of which that is true; all are acknowledged."""
        while True:
            message = await self.next()
            assert message is not None
            if isinstance(message, Picture):
                await self.do("shown", picture=message["picture"])
                if where(message):
                    return message

    async def line(self) -> str:
        """The next line that it is to show."""
        while True:
            message = await self.next()
            assert message is not None
            if isinstance(message, Picture):
                await self.do("shown", picture=message["picture"])
            elif message["kind"] == "line":
                return message["line"]


async def come(client: TestClient, server: Server) -> Page:
    page = Page(await client.ws_connect(f"/{server.token}/ws"))
    assert (await page.next())["kind"] == "hello"
    return page


@pytest.fixture
def served(dots, tmp_path: Path) -> Callable[..., None]:
    """Runs a coroutine beside a served session of the dot."""

    def run(play: Play, kind: str = "continuous", rate: float = 50.0, proxy: str | None = None) -> None:
        async def main() -> None:
            server = Server(dots(kind), {"env": "dot"}, tmp_path / "recordings", rate=rate, proxy=proxy)
            async with TestClient(TestServer(server.app())) as client:
                await asyncio.wait_for(play(client, server), 20)

        asyncio.run(main())

    return run


# Who may come


def test_the_page_and_what_it_loads(served):
    async def play(client: TestClient, server: Server) -> None:
        for name, kind in (("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css")):
            response = await client.get(f"/{server.token}/{name}")
            assert response.status == 200
            assert response.content_type == kind
            assert response.headers["Referrer-Policy"] == "no-referrer"
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]
        assert (await client.get(f"/{server.token}/other")).status == 404
        for above in ("%2e%2e%2fsession.py", "..%2fsession.py", "page.js%2f..%2f..%2fserver.py"):
            url = URL(f"{client.make_url(f'/{server.token}/')}{above}", encoded=True)  # sent as it is
            response = await client.session.get(url)
            assert response.status == 404
            assert "nosniff" in response.headers["X-Content-Type-Options"]

    served(play)


@pytest.mark.parametrize("path", ["/", "/ws", "/wrong/", "/wrong/ws", "/%00/page.js"])
def test_without_the_token_there_is_nothing(served, path):
    async def play(client: TestClient, server: Server) -> None:
        response = await client.get(path)
        assert response.status == 403
        assert await response.text() == "the address lacks its token: open the one that the command printed\n"
        assert server.token not in await response.text()

    served(play)


def test_two_servers_have_two_tokens(dots, tmp_path):
    session = dots()
    tokens = {Server(session, {}, tmp_path, rate=1.0).token for _ in range(3)}
    assert len(tokens) == 3
    assert all(len(token) >= 20 for token in tokens)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("Origin", "http://elsewhere.example"),
        ("Origin", "null"),
        ("Origin", "http://127.0.0.1:1"),
        ("Host", "elsewhere.example"),
        ("Host", "127.0.0.1.elsewhere.example:8000"),
        ("Host", "[::1"),
    ],
)
def test_foreign_pages_and_names_are_refused(served, header, value):
    async def play(client: TestClient, server: Server) -> None:
        for path in ("", "page.js"):
            response = await client.get(f"/{server.token}/{path}", headers={header: value})
            assert response.status in (400, 403)
        with pytest.raises(WSServerHandshakeError):
            await client.ws_connect(f"/{server.token}/ws", headers={header: value})
        assert server._page is None

    served(play)


@pytest.mark.parametrize("name", ["localhost:9000", "127.0.0.1:8000"])
def test_a_tunnel_may_have_another_port(served, name):
    async def play(client: TestClient, server: Server) -> None:
        headers = {"Host": name, "Origin": f"http://{name}"}
        ws = await client.ws_connect(f"/{server.token}/ws", headers=headers)
        assert (await ws.receive_json())["kind"] == "hello"

    served(play)


# Behind a proxy


PROXY = "hub.example.org"


def proxying(behind: URL, prefix: str, host: str) -> web.Application:
    """A proxy of everything below a prefix, which it strips. It passes on the header Origin, and ``host`` as Host."""

    def sent(request: web.Request) -> dict[str, str]:
        passed = {name: request.headers[name] for name in ("Origin",) if name in request.headers}
        return passed | {"Host": host}

    async def relay(request: web.Request) -> web.StreamResponse:
        there = behind.with_path(request.path.removeprefix(prefix))
        async with ClientSession() as session:
            if request.headers.get("Upgrade") != "websocket":
                async with session.get(there, headers=sent(request)) as answer:
                    return web.Response(status=answer.status, body=await answer.read(), headers=answer.headers)
            try:
                inner = await session.ws_connect(there, headers=sent(request))
            except WSServerHandshakeError as error:
                return web.Response(status=error.status)
            outer = web.WebSocketResponse()
            await outer.prepare(request)

            async def pump(source: Any, sink: Any) -> None:
                async for message in source:
                    binary = message.type == WSMsgType.BINARY
                    await (sink.send_bytes if binary else sink.send_str)(message.data)
                await sink.close()

            await asyncio.gather(pump(inner, outer), pump(outer, inner))
            return outer

    app = web.Application()
    app.router.add_get(prefix + "/{rest:.*}", relay)
    return app


@pytest.mark.parametrize("scheme", ["https", "http"])
@pytest.mark.parametrize("keeps_host", [True, False])
def test_a_proxy_that_strips_a_prefix(served, scheme, keeps_host):
    """One like jupyter-server-proxy, which passes on Host, and one that puts in its target; both pass on Origin."""

    async def play(client: TestClient, server: Server) -> None:
        behind = client.make_url("/")
        host = PROXY if keeps_host else f"{behind.host}:{behind.port}"
        prefix = "/user/me/proxy/8000"
        async with TestClient(TestServer(proxying(behind, prefix, host))) as browser:
            for name in FILES:
                response = await browser.get(f"{prefix}/{server.token}/{name}")
                assert response.status == 200
                policy = dict(part.split(maxsplit=1) for part in response.headers[POLICY].split("; "))
                assert policy["frame-ancestors"] == f"https://{PROXY} http://{PROXY}"
                assert f"wss://{PROXY}" in policy["connect-src"].split()
                assert policy["default-src"] == "'self'"
            ws = f"{prefix}/{server.token}/ws"
            page = Page(await browser.ws_connect(ws, headers={"Origin": f"{scheme}://{PROXY}"}))
            assert (await page.next())["kind"] == "hello"
            step = (await page.picture())["step"]
            await page.picture(lambda picture: picture["step"] > step)
            await page.ws.close()
            while server._page is not None:
                await asyncio.sleep(0.01)
            for origin in (f"{scheme}://elsewhere.example", f"{scheme}://{PROXY}:8443", "null"):
                with pytest.raises(WSServerHandshakeError, match="403"):
                    await browser.ws_connect(ws, headers={"Origin": origin})
            assert (await browser.get(f"{prefix}/")).status == 403
            assert (await browser.get(f"{prefix}/wrong/")).status == 403

    served(play, proxy=PROXY)


@pytest.mark.parametrize("proxy", [None, PROXY, f"{PROXY}:8888"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "elsewhere.example"},
        {"Host": f"{PROXY}.elsewhere.example"},
        {"Host": f"other.{PROXY}"},
        {"Host": f"{PROXY}:9999"},
        {"Origin": "https://elsewhere.example"},
        {"Origin": f"https://{PROXY}.elsewhere.example"},
        {"Origin": f"https://{PROXY}:9999"},
        {"Origin": f"ftp://{PROXY}"},
        {"Origin": "null"},
        {"Host": "localhost:8000", "Origin": "https://localhost:8000"},
        {"Host": "localhost:8000", "X-Forwarded-Host": PROXY, "Origin": "https://elsewhere.example"},
    ],
)
def test_other_hosts_and_origins_are_refused_behind_a_proxy_too(served, proxy, headers):
    async def play(client: TestClient, server: Server) -> None:
        assert (await client.get(f"/{server.token}/", headers=headers)).status == 403
        with pytest.raises(WSServerHandshakeError, match="403"):
            await client.ws_connect(f"/{server.token}/ws", headers=headers)
        assert server._page is None

    served(play, proxy=proxy)


@pytest.mark.parametrize("headers", [{"Host": PROXY}, {"Origin": f"https://{PROXY}"}, {"Origin": f"http://{PROXY}"}])
def test_a_proxy_is_refused_unless_it_is_named(served, headers):
    async def play(client: TestClient, server: Server) -> None:
        assert (await client.get(f"/{server.token}/", headers=headers)).status == 403
        ours = await client.get(f"/{server.token}/")
        assert "frame-ancestors 'none'" in ours.headers[POLICY]

    served(play)


def test_the_proxy_needs_the_token(served):
    async def play(client: TestClient, server: Server) -> None:
        headers = {"Host": PROXY, "Origin": f"https://{PROXY}"}
        for path in ("/", "/ws", "/wrong/", "/wrong/ws"):
            response = await client.get(path, headers=headers)
            assert response.status == 403
            assert "frame-ancestors 'none'" in response.headers[POLICY]

    served(play, proxy=PROXY)


def test_a_second_page_is_refused_and_the_first_goes_on(served):
    async def play(client: TestClient, server: Server) -> None:
        first = await come(client, server)
        await first.picture()
        second = Page(await client.ws_connect(f"/{server.token}/ws"))
        assert await second.next() == {"kind": "refused", "line": TAKEN}
        assert await second.next() is None
        step = (await first.picture())["step"]
        assert (await first.picture(lambda picture: picture["step"] > step + 3))["last"] > step
        await first.ws.close()
        while server._page is not None:
            await asyncio.sleep(0.01)
        third = await come(client, server)
        await third.picture()

    served(play)


def test_nobody_there_is_a_pause(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.picture(lambda picture: picture["step"] > 3)
        page.ws._writer.transport.abort()
        while server._page is not None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # a step may have been under way
        step = server.session.now
        await asyncio.sleep(0.2)
        assert server.session.now == step
        page = await come(client, server)
        assert (await page.picture())["step"] >= step
        await page.picture(lambda picture: picture["step"] > step)

    served(play)


MALFORMED = [
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /" + 10_000 * b"x" + b" HTTP/1.1\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    b"\x16\x03\x01 GET / HTTP/9.9\r\n\r\n",
]
UPGRADE = (
    "GET /{}/ws HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


def test_no_client_makes_it_print_tracebacks(dots, tmp_path, capfd, caplog):
    """Malformed requests, and connections that are reset while a page opens."""

    async def main() -> None:
        server = Server(dots(), {}, tmp_path, rate=20.0)
        runner = make_runner(server)
        await runner.setup()
        with bind(0) as listening:
            await web.SockSite(runner, listening).start()
            port = listening.getsockname()[1]
            for request in MALFORMED:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(request)
                assert b" 40" in await reader.readline()
                writer.close()
            for _ in range(10):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(UPGRADE.format(server.token).encode())
                await writer.drain()
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
                while server._page is not None:
                    await asyncio.sleep(0.01)
            await runner.cleanup()

    asyncio.run(main())
    assert "Traceback" not in "".join(capfd.readouterr())
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


# What it shows


def test_pictures(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.do("pause", on=True)
        picture = await page.picture(lambda picture: picture["paused"])
        assert [panel["name"] for panel in picture["panels"]] == ["real", "dream"]
        (camera,) = picture["panels"][0]["cameras"]
        assert picture["panels"][0]["cameras"][camera] == [48, 48]
        assert len(picture.pixels) == 2 * 48 * 48 * 3
        session = server.session
        assert picture.pixels == b"".join(frames[camera].tobytes() for frames in session.here.pictures)
        assert [picture["believed"], picture["drawn"]] == [classes.tolist() for classes in session.classes]

    served(play)


def test_the_strips_are_whole_although_pictures_are_dropped(served):
    async def play(client: TestClient, server: Server) -> None:
        page, numbers = await come(client, server), []
        for _ in range(6):
            picture = await page.next()
            assert picture["strip"]["start"] == len(numbers)
            numbers += picture["strip"]["numbers"]
            assert len(numbers) == picture["last"] + 1
            while server.session.last < picture["last"] + 3:  # it is slow
                await asyncio.sleep(0.01)
            await page.do("shown", picture=picture["picture"])
        assert numbers == [moment.numbers for moment in server.session.moments[: len(numbers)]]

    served(play)


def test_a_page_that_shows_nothing_gets_two_pictures_and_then_the_newest(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        assert [(await page.next())["picture"] for _ in range(UNSHOWN)] == [1, 2]
        while server.session.last <= 5:
            await asyncio.sleep(0.01)
        assert server._page.sent == UNSHOWN == 2
        await page.do("shown", picture=1)
        newest = await page.next()
        assert newest["picture"] == 3
        assert newest["step"] > 5

    served(play)


def test_steps_back_and_a_new_start_begin_the_strips_anew(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.picture(lambda picture: picture["step"] > 5)
        await page.do("go", step=3)
        assert "step 3" in await page.line()
        await page.do("start", seed=4)
        picture = await page.picture(lambda picture: picture["seed"] == 4)
        assert picture["strip"]["start"] == 0
        assert picture["strip"]["begins"][0] == 0

    served(play)


# What it is told


def test_what_one_can_do(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.do("choose", source="keys")
        await page.do("act", action=[1.0, 0.0])
        await page.picture(lambda picture: picture["action"] == [1.0, 0.0] and picture["source"] == "keys")
        await page.do("rate", rate=10)
        await page.picture(lambda picture: picture["rate"] == 10)
        await page.do("branch")
        await page.picture(lambda picture: len(picture["panels"]) == 3)
        await page.do("drive", dream=1, driver="policy")
        await page.picture(lambda picture: picture["panels"][-1]["driver"] == "policy")
        await page.do("pause", on=True)
        step = (await page.picture(lambda picture: picture["paused"]))["step"]
        await page.do("step")
        assert (await page.picture(lambda picture: picture["step"] != step))["step"] == step + 1
        await page.do("force", group=0, one=1)
        picture = await page.picture(lambda picture: picture["forced"] == [[0, 1]])
        assert picture["drawn"][0] == 1
        await page.do("release")
        await page.picture(lambda picture: not picture["forced"])
        await page.do("check")
        picture = await page.picture(lambda picture: picture["drawn"] == picture["believed"])
        await page.do("save")
        assert (await page.line()).startswith("saving ")
        assert (await page.line()).startswith("saved: ")
        (file,) = server.place.glob("*.npz")
        await page.do("choose", source="recorded", name=file.stem)
        await page.picture(lambda picture: picture["source"] == "recorded" and picture["step"] == 0)
        assert "over" in await page.line()  # it is played, although the play was paused

    served(play)


MISTAKES = [
    ("not JSON", "JSON object"),
    ("[1]", "JSON object"),
    ("[" * 60_000, "JSON object"),
    ("{}", "do=null: expected one of act, choose"),
    ('{"do": "jump"}', "do=jump: expected one of act, choose"),
    ('{"do": ["act"]}', "do=[act]: expected one of act, choose"),
    ('{"do": "act"}', "action is missing"),
    ('{"do": "act", "action": [5, 0]}', "expected 2 numbers from -1 to 1; nearest: action=[1.0,0.0]"),
    ('{"do": "act", "action": [NaN, 0]}', "expected 2 numbers from -1 to 1"),
    ('{"do": "rate", "rate": 1000}', "nearest: rate=60.0"),
    ('{"do": "rate", "rate": "fast"}', "rate=fast: expected a number"),
    ('{"do": "go", "step": 99999}', "step=99999: expected from 0 to "),
    ('{"do": "go", "steps": 1}', "step is missing: expected an integer"),
    ('{"do": "go", "step": 1, "fast": true}', "fast=true: expected one of step"),
    ('{"do": "force", "group": 99, "one": 0}', "group=99: expected from 0 to 31; nearest: group=31"),
    ('{"do": "drive", "dream": 3, "driver": "same"}', "dream=3: expected at most 0"),
    ('{"do": "drive", "dream": 0, "driver": "me"}', "driver=me: expected one of same, policy, random"),
    ('{"do": "choose", "source": "recorded", "name": "../../x"}', "name=../../x: expected one of none"),
    ('{"do": "drag", "panel": 0, "name": "box", "camera": "x", "x": 1, "y": 1}', "name=box: expected one of none"),
    ('{"do": "drag", "panel": 0, "name": "box", "camera": "x", "x": NaN, "y": 1}', "x=nan"),
    ('{"do": "start", "seed": -1}', "seed=-1: expected an integer"),
    ('{"do": "shown", "picture": 7000000}', "picture=7000000: expected from "),
]


def test_what_cannot_be_done_is_one_line_and_the_play_goes_on(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        for message, expected in MISTAKES:
            await page.ws.send_str(message)
            line = await page.line()
            assert expected in line, message
            assert "\n" not in line
        await page.ws.send_bytes(b"123")
        assert await page.line() == "a message of bytes: expected JSON"
        step = (await page.picture())["step"]
        await page.picture(lambda picture: picture["step"] > step + 3)

    served(play)


def test_a_message_that_is_too_long_ends_the_page_alone(served):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.ws.send_str("x" * 100_000)
        while await page.next() is not None:
            pass
        while server._page is not None:
            await asyncio.sleep(0.01)
        await (await come(client, server)).picture()

    served(play)


def test_a_picture_that_fails_pauses_the_play_and_the_next_one_comes(served, monkeypatch):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.picture()

        def fail(*given: object) -> None:
            raise RuntimeError("out of colours")

        with monkeypatch.context() as patch:
            patch.setattr(server.session, "strip", fail)
            assert await page.line() == "RuntimeError: out of colours"
            assert server.paused
        await page.do("pause", on=False)
        step = server.session.now
        await page.picture(lambda picture: picture["step"] > step)

    served(play)


def test_a_world_that_fails_pauses_the_play(served, monkeypatch):
    async def play(client: TestClient, server: Server) -> None:
        page = await come(client, server)
        await page.picture()

        def fail(actions: object) -> None:
            raise RuntimeError("the cable is loose\nsomewhere")

        with monkeypatch.context() as patch:
            patch.setattr(server.session.envs, "step", fail)
            assert await page.line() == "RuntimeError: the cable is loose somewhere"
            await page.picture(lambda picture: picture["paused"])
        await page.do("pause", on=False)
        step = server.session.now
        await page.picture(lambda picture: picture["step"] > step)

    served(play)


# The port


@pytest.mark.parametrize(
    ("text", "goal"), [("Push the puck; slowly.\n\nMore.", "push the puck"), ("Wait", "wait"), (None, "")]
)
def test_the_goal_is_what_the_task_says_first(text, goal):
    task = type("Task", (), {"__doc__": text})()
    assert goal_of(SimpleNamespace(simulator=SimpleNamespace(task=task))) == goal
    assert goal_of(SimpleNamespace(simulator=None)) == ""


def test_a_port_that_is_taken():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InvalidOption) as error:
            bind(port)
        assert "nearest: port=" in str(error.value)
        with bind(error.value.nearest) as found:
            assert found.getsockname()[0] == "127.0.0.1"
