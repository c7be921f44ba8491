"""Connections of clients over real sockets, with a handler of our own behind them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.stack import until

from kvrouter.config import parse_config
from kvrouter.http.client import WireClient, send_whole
from kvrouter.http.server import listening
from kvrouter.openai.errors import Fault, RequestError

GET = b"GET /%b HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"

Handler = Callable[[WireClient], Awaitable[None]]


async def echo(client: WireClient) -> None:
    """Method, path and body as the response; errors as the front door gives them."""
    try:
        body = await client.body()
    except RequestError as error:
        send_whole(client, error.fault.status, [], error.body())
        return
    send_whole(client, 200, [], f"{client.method} {client.path} ".encode() + body)


async def streamed(client: WireClient) -> None:
    """Three pieces of a body without a known length."""
    await client.body()
    client.begin(200, [], None)
    for number in range(3):
        client.write(b"piece %d " % number)
        await asyncio.sleep(0)
    client.end()


class Socket:
    """A client's socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0.001)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        lines = head.split("\r\n")
        status = int(lines[0].split()[1])
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        body = b""
        if "content-length" in headers:
            body = await self.reader.readexactly(int(headers["content-length"]))
        elif "transfer-encoding" in headers:
            while size := int(await self.reader.readline(), 16):
                body += await self.reader.readexactly(size)
                await self.reader.readline()
            await self.reader.readline()
        return status, headers, body

    async def ended(self) -> bytes:
        """What comes until the connection ends."""
        async with asyncio.timeout(10):
            return await self.reader.read()


@asynccontextmanager
async def served(
    handler: Handler, *, refused: list[Fault] | None = None, **sections: dict[str, Any]
) -> AsyncIterator[Callable[[], Awaitable[Socket]]]:
    """A listening front door; gives what opens a connection to it."""
    tables: dict[str, Any] = {"server": {"port": 0}, "timeouts": {"shutdown_s": 0.1}}
    for name, fields in sections.items():
        tables[name] = tables.get(name, {}) | fields
    sockets: list[Socket] = []
    refused = [] if refused is None else refused
    async with listening(handler, refused.append, parse_config(tables)) as port:

        async def connect() -> Socket:
            sockets.append(Socket(*await asyncio.open_connection("127.0.0.1", port)))
            return sockets[-1]

        yield connect
    for socket in sockets:
        socket.writer.close()


async def test_a_connection_is_kept_for_the_next_request() -> None:
    async with served(echo) as connect:
        client = await connect()
        for number in (b"1", b"2", b"3"):
            await client.send(GET % number)
            status, headers, body = await client.response()
            assert (status, body) == (200, b"GET /" + number + b" ")
            assert "connection" not in headers


async def test_pipelined_requests_are_answered_in_order_one_after_the_other() -> None:
    running = most = 0

    async def slower_first(client: WireClient) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.03 - 0.01 * int(client.path[1:]))
        running -= 1
        await echo(client)

    async with served(slower_first) as connect:
        client = await connect()
        await client.send(b"".join(GET % number for number in (b"0", b"1", b"2")))
        for number in (b"0", b"1", b"2"):
            _, _, body = await client.response()
            assert body == b"GET /" + number + b" "
        assert most == 1


async def test_a_request_in_single_bytes_is_a_request() -> None:
    async with served(echo) as connect:
        client = await connect()
        wire = POST + b"Content-Length: 3\r\n\r\nabc"
        await client.send(*(bytes([byte]) for byte in wire))
        assert (await client.response())[2] == b"POST / abc"


async def test_a_client_is_told_to_continue_only_when_its_body_is_wanted() -> None:
    async with served(echo, limits={"max_body_bytes": 10}) as connect:
        client = await connect()
        await client.send(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abc")
        assert (await client.response())[2] == b"POST / abc"
        await client.send(POST + b"Expect: 100-continue\r\nContent-Length: 11\r\n\r\n")
        status, headers, _ = await client.response()
        assert status == 413
        assert headers["connection"] == "close"


async def test_a_body_that_is_sent_with_the_head_needs_no_100() -> None:
    async with served(echo) as connect:
        client = await connect()
        await client.send(POST + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc")
        assert (await client.response())[0] == 200


async def test_head_gets_the_head_of_the_response_only() -> None:
    async with served(echo) as connect:
        client = await connect()
        await client.send(b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"Content-Length: 8\r\n" in head
        await client.send(GET % b"y")
        assert (await client.response())[2] == b"GET /y "


async def test_http_1_0_gets_a_body_that_ends_with_the_connection() -> None:
    """Such a client knows no chunks."""
    async with served(streamed) as connect:
        client = await connect()
        await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        status, headers, _ = await client.response()
        assert status == 200
        assert "transfer-encoding" not in headers
        assert headers["connection"] == "close"
        assert await client.ended() == b"piece 0 piece 1 piece 2 "


async def test_http_1_0_may_keep_a_connection_when_lengths_are_known() -> None:
    async with served(echo) as connect:
        client = await connect()
        for _ in range(2):
            await client.send(b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
            _, headers, body = await client.response()
            assert headers["connection"] == "keep-alive"
            assert body == b"GET / "


async def test_a_body_without_a_known_length_comes_in_chunks() -> None:
    async with served(streamed) as connect:
        client = await connect()
        await client.send(GET % b"")
        _, headers, body = await client.response()
        assert headers["transfer-encoding"] == "chunked"
        assert body == b"piece 0 piece 1 piece 2 "
        await client.send(GET % b"")
        assert (await client.response())[0] == 200


@pytest.mark.parametrize("size", [1, 9, 10, 255, 256, 2047, 2048, 2049, 65_536])
async def test_chunks_of_any_size_come_whole(size: int) -> None:
    piece = bytes(number % 251 for number in range(size))

    async def twice(client: WireClient) -> None:
        await client.body()
        client.begin(200, [], None)
        client.write(piece)
        client.write(b"")  # would be the end
        client.write(piece)
        client.end()

    async with served(twice) as connect:
        client = await connect()
        await client.send(GET % b"")
        assert (await client.response())[2] == piece + piece


async def test_an_upgrade_is_answered_as_a_plain_request_and_ends_the_connection() -> None:
    async with served(echo) as connect:
        client = await connect()
        await client.send(
            b"GET /x HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        )
        status, headers, body = await client.response()
        assert (status, body) == (200, b"GET /x ")
        assert headers["connection"] == "close"
        assert await client.ended() == b""


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (POST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 3000 + b"\r\n\r\n", 431),
    ],
)
async def test_what_is_refused_gets_an_answer_and_the_connection_ends(
    wire: bytes, status: int
) -> None:
    seen: list[Fault] = []
    async with served(echo, refused=seen, limits={"max_head_bytes": 2000}) as connect:
        client = await connect()
        await client.send(wire)
        refused, headers, body = await client.response()
        assert refused == status
        assert b'"error"' in body
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/json"
        assert [fault.status for fault in seen] == [status]
        await client.send(GET % b"smuggled")
        client.writer.write_eof()
        assert await client.ended() == b""


async def test_a_refusal_comes_after_the_answers_to_what_came_before() -> None:
    async with served(echo) as connect:
        client = await connect()
        await client.send(GET % b"1" + b"nonsense\r\n\r\n")
        assert (await client.response())[2] == b"GET /1 "
        assert (await client.response())[0] == 400


async def test_an_answer_before_the_whole_body_reaches_a_client_that_goes_on_sending() -> None:
    """F2: the connection must not be reset before the client has read the 413."""
    async with served(echo, limits={"max_body_bytes": 1000}) as connect:
        client = await connect()
        await client.send(POST + b"Content-Length: 1000000\r\n\r\n")
        await client.send(*[b"x" * 50_000] * 10)
        assert (await client.response())[0] == 413


async def test_a_head_that_dribbles_in_is_given_up() -> None:
    """Slow clients that hold connections open for nothing."""
    async with served(echo, timeouts={"head_s": 0.3}) as connect:
        client = await connect()
        await client.send(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(5):
            while not client.reader.at_eof():
                client.writer.write(b"X: y\r\n")
                await asyncio.sleep(0.05)
                if client.reader._buffer:  # type: ignore[attr-defined]  # what has come
                    break
            assert (await client.response())[0] == 408


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with served(echo, timeouts={"head_s": 0.2, "keep_alive_s": 0.2}) as connect:
        silent = await connect()
        assert await silent.ended() == b""
        kept = await connect()
        await kept.send(GET % b"1")
        assert (await kept.response())[0] == 200
        assert await kept.ended() == b""


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async with served(echo, timeouts={"body_s": 0.2}) as connect:
        client = await connect()
        await client.send(POST + b"Content-Length: 3\r\n\r\na")
        assert (await client.response())[0] == 408


class Source:
    """What a response comes from; notes whether it is to wait."""

    def __init__(self) -> None:
        self.paused = False
        self.pauses = 0

    def pause(self) -> None:
        self.paused = True
        self.pauses += 1

    def resume(self) -> None:
        self.paused = False


async def test_a_slow_reader_pauses_the_source_and_bounds_what_is_held_for_it() -> None:
    """A client that reads slowly must not fill the router's memory."""
    source = Source()
    held = 0

    async def endless(client: WireClient) -> None:
        nonlocal held
        await client.body()
        client.begin(200, [], None)
        client.throttle(source)
        while held < 50_000_000:
            if source.paused:
                await asyncio.sleep(0.001)
                continue
            client.write(b"x" * 10_000)
            held += 10_000
            await asyncio.sleep(0)
        client.end()

    async with served(endless) as connect:
        client = await connect()
        await client.send(GET % b"")
        await until(lambda: source.paused)
        before = held
        await asyncio.sleep(0.1)  # not for a state: nothing may happen
        assert held == before < 40_000_000
        seen = 0
        while seen < before:
            seen += len(await client.reader.read(1_000_000))
        await until(lambda: held > before)


async def test_a_client_that_reads_nothing_is_cut_off_in_the_end() -> None:
    source = Source()
    gone = asyncio.Event()

    async def endless(client: WireClient) -> None:
        client.begin(200, [], None)
        client.throttle(source)
        try:
            while True:
                if not source.paused:
                    client.write(b"x" * 10_000)
                await asyncio.sleep(0)
        finally:
            gone.set()

    async with served(endless, timeouts={"stall_s": 0.3}) as connect:
        client = await connect()
        await client.send(GET % b"")
        async with asyncio.timeout(10):
            await gone.wait()


@pytest.mark.parametrize("half", [True, False])
async def test_a_client_that_leaves_cancels_its_request(half: bool) -> None:
    """B1. One that closes only its sending side counts as gone too."""
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(client: WireClient) -> None:
        del client
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async with served(wait) as connect:
        client = await connect()
        await client.send(GET % b"")
        await began.wait()
        client.writer.write_eof() if half else client.writer.close()
        async with asyncio.timeout(5):
            await cancelled.wait()


async def test_stopping_lets_a_response_end_and_closes_idle_connections() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def on_demand(client: WireClient) -> None:
        began.set()
        await go.wait()
        send_whole(client, 200, [], b"done")

    async with served(on_demand, timeouts={"shutdown_s": 5.0}) as connect:
        busy, idle = await connect(), await connect()
        await busy.send(GET % b"")
        await began.wait()
        asyncio.get_running_loop().call_later(0.1, go.set)
        await idle.send()
    status, headers, body = await busy.response()
    assert (status, body, headers["connection"]) == (200, b"done", "close")
    assert await busy.ended() == await idle.ended() == b""


async def test_a_response_that_has_begun_before_the_stop_ends_its_connection() -> None:
    """Its head has promised to keep the connection: a stop must not wait for an idle client."""
    go = asyncio.Event()

    async def half(client: WireClient) -> None:
        client.begin(200, [], 4)
        client.write(b"do")
        await go.wait()
        client.write(b"ne")
        client.end()

    async with asyncio.timeout(10), served(half, timeouts={"shutdown_s": 30.0}) as connect:
        busy = await connect()
        await busy.send(GET % b"")
        await busy.reader.readuntil(b"do")
        asyncio.get_running_loop().call_later(0.1, go.set)
    assert await busy.ended() == b"ne"


async def test_more_connections_than_allowed_are_turned_away_until_others_leave() -> None:
    """Clients that open connections without end must not take the descriptors of all."""
    seen: list[Fault] = []
    async with served(echo, refused=seen, limits={"max_connections": 2}) as connect:
        kept = [await connect() for _ in range(2)]
        for client in kept:
            await client.send(GET % b"1")
            assert (await client.response())[0] == 200
        surplus = await connect()
        await surplus.send(GET % b"2")
        status, headers, body = await surplus.response()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert b"overloaded" in body
        assert seen == [Fault.OVERLOADED]
        kept[0].writer.close()
        surplus.writer.close()

        async def has_room() -> bool:
            client = await connect()
            await client.send(GET % b"3")
            return (await client.response())[0] == 200

        await until(has_room)
        await kept[1].send(GET % b"4")
        assert (await kept[1].response())[0] == 200
