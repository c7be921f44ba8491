"""Connections to engines, which here say exactly what a test wants."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from support.stack import until

from kvrouter.config import TimeoutConfig
from kvrouter.http.descriptors import Descriptors, lowest_free, plenty
from kvrouter.http.engine import EngineClient, EngineError, EngineFailure, EngineRequest

OK = b"HTTP/1.1 200 OK\r\n"
WHOLE = OK + b"Content-Length: 2\r\n\r\nok"

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """One request of the router: head and body."""
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.split(b":")[1]))
    return head


class Engine:
    """A scripted engine; `script` is called for each connection with its number."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0


@asynccontextmanager
async def engine(script: Script) -> AsyncIterator[Engine]:
    made = Engine()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.connections += 1
        try:
            await script(reader, writer, made.connections)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield made


def replies(*responses: bytes) -> Script:
    """Answers each request of each connection with the next of these, then closes."""

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        for response in responses:
            await read_request(reader)
            writer.write(response)
            await writer.drain()

    return script


async def ask(
    client: EngineClient, url: str, *, method: str = "POST", body: bytes = b"{}"
) -> tuple[int, bytes]:
    """Send one request and read all of the response."""
    response = await client.send(EngineRequest(method, url, "/x", [("a", "b")], body))
    pieces = []
    try:
        pieces.append(await response.first())
        await response.pass_on(pieces.append)
    finally:
        response.close()
    return response.status, b"".join(pieces)


def client(**timeouts: float) -> EngineClient:
    return EngineClient(TimeoutConfig(**timeouts))


async def test_a_connection_is_used_again() -> None:
    async with engine(replies(*[WHOLE] * 5)) as made, client() as engines:
        for _ in range(5):
            assert await ask(engines, made.url) == (200, b"ok")
        assert made.connections == 1


async def test_the_request_is_sent_with_our_own_framing() -> None:
    seen: list[bytes] = []

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        for _ in range(2):
            seen.append(await read_request(reader))
            writer.write(WHOLE)

    async with engine(script) as made, client() as engines:
        await ask(engines, made.url, body=b"abc")
        await ask(engines, made.url, method="GET", body=b"")
        host = made.url.removeprefix("http://").encode()
        head = b"POST /x HTTP/1.1\r\nHost: %b\r\na: b\r\n" % host
        assert seen[0] == head + b"Content-Length: 3\r\n\r\nabc"
        assert seen[1] == head.replace(b"POST", b"GET") + b"\r\n"


@pytest.mark.parametrize(
    ("wire", "keeps"),
    [
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nX: 1\r\n\r\n", True),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + WHOLE, True),
        (OK + b"\r\nok", False),
        (OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", False),
    ],
)
async def test_each_framing_is_understood_and_decides_whether_the_connection_stays(
    wire: bytes, keeps: bool
) -> None:
    async with engine(replies(wire)) as made, client() as engines:
        assert await ask(engines, made.url) == (200, b"ok")
        assert await ask(engines, made.url) == (200, b"ok")
        assert made.connections == 2
    if keeps:
        async with engine(replies(wire, wire)) as made, client() as engines:
            assert await ask(engines, made.url) == (200, b"ok")
            assert await ask(engines, made.url) == (200, b"ok")
            assert made.connections == 1


async def test_a_connection_that_the_engine_closed_meanwhile_costs_no_error() -> None:
    """F4: noticed before the next request, or by its loss."""
    async with engine(replies(WHOLE)) as made, client() as engines:
        for number in range(20):
            assert await ask(engines, made.url) == (200, b"ok")
            await asyncio.sleep(0.0005 * (number % 3))


async def test_a_loss_at_the_very_moment_of_the_next_request_is_made_good() -> None:
    """F4: the close crosses the request."""

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(WHOLE)
        await read_request(reader)  # reads the next one, and is gone without an answer

    async with engine(script) as made, client() as engines:
        for _ in range(5):
            assert await ask(engines, made.url) == (200, b"ok")


async def test_a_loss_after_the_response_began_is_an_error() -> None:
    async with engine(replies(WHOLE, OK + b"Content-Length: 5\r\n\r\nab")) as made:
        async with client() as engines:
            await ask(engines, made.url)
            with pytest.raises(EngineError) as caught:
                await ask(engines, made.url)
            assert caught.value.failure is EngineFailure.LOST
        assert made.connections == 1


async def test_a_new_connection_that_is_lost_is_an_error() -> None:
    async with engine(replies(b"")) as made, client() as engines:
        with pytest.raises(EngineError) as caught:
            await ask(engines, made.url)
        assert caught.value.failure is EngineFailure.LOST


@pytest.mark.parametrize(
    "wire",
    [
        b"<html>",
        OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_a_lost_engine(wire: bytes) -> None:
    async with engine(replies(wire + b" " * 50)) as made, client() as engines:
        with pytest.raises(EngineError) as caught:
            await ask(engines, made.url)
        assert caught.value.failure is EngineFailure.LOST


async def test_an_answer_that_was_not_asked_for_never_reaches_a_client() -> None:
    """An engine that answers twice would answer the next request with the second."""

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(WHOLE)
        await writer.drain()
        await asyncio.sleep(0.01)
        writer.write(OK + b"Content-Length: 4\r\n\r\nevil")
        await reader.read()

    async with engine(script) as made, client() as engines:
        assert await ask(engines, made.url) == (200, b"ok")
        await asyncio.sleep(0.05)  # not for a state: time for the surplus to come
        assert await ask(engines, made.url) == (200, b"ok")
        assert made.connections == 2


async def test_an_early_answer_is_passed_on_and_ends_the_connection() -> None:
    """An engine refuses a large body before it has read it."""

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        await asyncio.sleep(0.3)

    async with engine(script) as made, client() as engines:
        assert await ask(engines, made.url, body=b"x" * 30_000_000) == (413, b"no")
        assert await ask(engines, made.url) == (413, b"no")
        assert made.connections == 2


async def test_the_response_to_head_has_no_body() -> None:
    async with engine(replies(OK + b"Content-Length: 2\r\n\r\n")) as made, client() as engines:
        assert await ask(engines, made.url, method="HEAD", body=b"") == (200, b"")


async def test_closing_early_aborts_the_request_at_the_engine() -> None:
    """B1: an engine notices by the end of the connection."""
    noticed = asyncio.Event()

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        try:
            await reader.read()
        finally:
            noticed.set()

    async with engine(script) as made, client() as engines:
        response = await engines.send(EngineRequest("POST", made.url, "/x", [], b""))
        assert await response.first() == b"x"
        response.close()
        async with asyncio.timeout(5):
            await noticed.wait()


@pytest.mark.parametrize("after", [b"", OK + b"Transfer-Encoding: chunked\r\n\r\n"])
async def test_the_deadline_of_the_first_byte_goes_on_after_an_early_head(after: bytes) -> None:
    """F11: some engines send the head of a stream at once."""

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(after)
        await reader.read()

    async with engine(script) as made, client(first_byte_s=0.2, idle_s=30.0) as engines:
        with pytest.raises(EngineError) as caught:
            await ask(engines, made.url)
        assert caught.value.failure is EngineFailure.TIMED_OUT


async def test_a_silent_stream_times_out_and_a_paused_one_does_not() -> None:
    """F11: while the client reads slowly, the engine is not to blame."""

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await reader.read()

    async with engine(script) as made, client(idle_s=0.2) as engines:
        response = await engines.send(EngineRequest("POST", made.url, "/x", [], b""))
        await response.first()
        ending = asyncio.create_task(response.pass_on(lambda _: None))
        await asyncio.sleep(0)
        response.pause()
        await asyncio.sleep(0.4)  # not for a state: nothing may happen
        assert not ending.done()
        response.resume()
        with pytest.raises(EngineError) as caught:
            await ending
        assert caught.value.failure is EngineFailure.TIMED_OUT
        response.close()


async def test_pausing_stops_the_engine_from_sending() -> None:
    """Back-pressure from end to end: the sockets fill, then the engine waits."""
    sent = 0

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(OK + b"\r\n")
        while sent < 200_000_000:
            writer.write(b"x" * 100_000)
            await writer.drain()
            sent += 100_000

    async with engine(script) as made, client() as engines:
        response = await engines.send(EngineRequest("POST", made.url, "/x", [], b""))
        await response.first()
        seen = 0

        def take(piece: bytes) -> None:
            nonlocal seen
            seen += len(piece)
            if seen > 1_000_000:
                response.pause()

        passing = asyncio.create_task(response.pass_on(take))
        await until(lambda: seen > 1_000_000)
        await asyncio.sleep(0.3)  # not for a state: nothing may happen
        assert seen < 3_000_000
        assert sent < 60_000_000
        passing.cancel()
        response.close()


async def test_an_engine_that_is_not_there_is_unreachable() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        async with client(connect_s=1.0) as engines:
            with pytest.raises(EngineError) as caught:
                await ask(engines, url)
            assert caught.value.failure is EngineFailure.UNREACHABLE


async def test_an_error_in_what_takes_the_pieces_is_raised_and_ends_the_connection() -> None:
    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        await asyncio.sleep(0.05)
        writer.write(b"1\r\ny\r\n")
        await reader.read()

    def fail(piece: bytes) -> None:
        raise ValueError(piece)

    async with engine(script) as made, client() as engines:
        response = await engines.send(EngineRequest("POST", made.url, "/x", [], b""))
        await response.first()
        with pytest.raises(ValueError, match="y"):
            await response.pass_on(fail)
        response.close()


VLLM_KEEP_ALIVE_S = 5.0
"""After which vLLM's HTTP server closes an idle connection."""


@pytest.mark.parametrize(("idle_s", "connections"), [(3.0, 1), (VLLM_KEEP_ALIVE_S - 0.3, 2)])
async def test_a_connection_that_an_engine_is_about_to_close_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, connections: int
) -> None:
    """F4: the request and the engine's close would cross each other."""
    loop = asyncio.get_running_loop()
    skipped_s = 0.0
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + skipped_s)
    async with engine(replies(*[WHOLE] * 2)) as made, client() as engines:
        await ask(engines, made.url)
        skipped_s = idle_s
        await asyncio.sleep(0)  # a turn, in which timers that are due run
        await asyncio.sleep(0)
        assert await ask(engines, made.url) == (200, b"ok")
        assert made.connections == connections


async def test_idle_connections_do_not_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gets no requests any more costs no descriptors."""
    monkeypatch.setattr("kvrouter.http.engine.POOL_KEEPALIVE_S", 0.1)
    closed = asyncio.Event()

    async def script(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await read_request(reader)
        writer.write(WHOLE)
        assert await reader.read() == b""
        closed.set()

    async with engine(script) as made, client() as engines:
        await ask(engines, made.url)
        async with asyncio.timeout(5):
            await closed.wait()


async def test_connections_are_counted_while_they_are_open() -> None:
    """F12: whoever accepts clients knows how many have yet to get one."""
    descriptors = plenty()
    engines = EngineClient(TimeoutConfig(), descriptors=descriptors)
    async with engine(replies(WHOLE)) as made, engines:
        response = await engines.send(EngineRequest("POST", made.url, "/x", [], b"{}"))
        assert descriptors.engines == 1
        await response.first()
        response.close()
        assert descriptors.engines == 1, "it rests"
        with pytest.raises(EngineError):
            await engines.send(EngineRequest("POST", "http://127.0.0.1:1", "/x", [], b"{}"))
    await until(lambda: descriptors.engines == 0)


async def test_without_descriptors_for_it_no_connection_is_made() -> None:
    engines = EngineClient(TimeoutConfig(), descriptors=Descriptors(lowest_free()))
    async with engine(replies(WHOLE)) as made, engines:
        with pytest.raises(EngineError) as caught:
            await ask(engines, made.url)
        assert caught.value.failure is EngineFailure.NO_DESCRIPTORS
        assert made.connections == 0
