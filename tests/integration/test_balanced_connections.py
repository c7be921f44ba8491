"""Connections that come through load balancers, over real sockets, on both event loops."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme
from support.loops import on_uvloop
from support.proxy_headers import LOCAL, binary, line, raw_binary
from support.stack import until

from kvrouter.config import ConfigError, parse_config
from kvrouter.http import accepting
from kvrouter.http.client import WireClient, send_whole
from kvrouter.http.descriptors import plenty
from kvrouter.http.server import listening
from kvrouter.openai.errors import Fault
from kvrouter.tls import server_tls

ASKED = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
Test = Coroutine[Any, Any, None]

on_each_loop = pytest.mark.parametrize("run", [asyncio.run, on_uvloop])


async def tell_address(client: WireClient) -> None:
    await client.body()
    send_whole(client, 200, [], str(client.address).encode())


class Door:
    """A listening front door."""

    def __init__(self, port: int, refused: list[Fault]) -> None:
        self.port = port
        self.refused = refused

    async def ask(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        """What comes back for these bytes until the connection ends, which we half close."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause_s)
            async with asyncio.timeout(10):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def address(self, *pieces: bytes, pause_s: float = 0.0) -> str:
        """The address that a request behind these bytes is said to come from."""
        asked = ASKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        answer = await self.ask(*pieces[:-1], pieces[-1] + asked, pause_s=pause_s)
        assert answer.startswith(b"HTTP/1.1 200"), answer
        return answer.rpartition(b"\r\n\r\n")[2].decode()


@asynccontextmanager
async def door(balancers: str = "127.0.0.0/8", **sections: dict[str, Any]) -> AsyncIterator[Door]:
    tables: dict[str, Any] = {
        "server": {"port": 0, "proxy_protocol_from": [balancers]},
        "timeouts": {"shutdown_s": 0.1},
    }
    for name, fields in sections.items():
        tables[name] = tables.get(name, {}) | fields
    config = parse_config(tables)
    refused: list[Fault] = []
    tls = server_tls(config.server)
    async with listening(tell_address, refused.append, config, tls) as port:
        yield Door(port, refused)


@on_each_loop
def test_the_client_is_who_the_balancer_says(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async with door() as made:
            assert await made.address(line("203.0.113.7")) == "203.0.113.7"
            assert await made.address(binary("203.0.113.8", more=b"\x04\x00\x01x")) == "203.0.113.8"
            assert await made.address(binary("2001:db8::9", "::1")) == "2001:db8::9"
            assert await made.address(raw_binary(LOCAL, 0, b"")) == "127.0.0.1"
            assert await made.address(b"PROXY UNKNOWN\r\n") == "127.0.0.1"
            assert made.refused == []

    run(test())


@on_each_loop
def test_a_header_may_come_in_single_bytes(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async with door() as made:
            for header in (line("203.0.113.7"), binary("203.0.113.7")):
                bytes_of_it = [bytes([byte]) for byte in header]
                assert await made.address(*bytes_of_it, pause_s=0.0005) == "203.0.113.7"

    run(test())


NO_HEADERS = [
    ASKED,
    b"PROXY TCP4 nobody nobody 1 1\r\n" + ASKED,
    b"PROXY TCP4 " + b"1" * 5000,
    raw_binary(0x21, 0x11, b"x" * 60_000),
    binary("203.0.113.7")[:20],
    b"\x16\x03\x01" + b"\x00" * 100,
]


@on_each_loop
def test_without_a_header_the_connection_is_closed_and_counted(
    run: Callable[[Test], None],
) -> None:
    """A balancer that forgot `send-proxy`, or somebody beside it: no answer, no harm to others."""

    async def test() -> None:
        async with door(timeouts={"head_s": 0.1}) as made:
            before, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(line("203.0.113.7") + ASKED)
            await before.readuntil(b"203.0.113.7")
            for number, sent in enumerate(NO_HEADERS, start=1):
                assert await made.ask(sent) == b""
                assert made.refused == [Fault.BAD_PROXY_HEADER] * number
                writer.write(ASKED)
                await before.readuntil(b"203.0.113.7")
            writer.close()

    run(test())


@on_each_loop
def test_a_header_has_a_deadline_and_those_who_wait_are_bounded(
    run: Callable[[Test], None],
) -> None:
    async def test() -> None:
        async with door(timeouts={"head_s": 0.2}, limits={"max_connections": 3}) as made:
            silent = [await asyncio.open_connection("127.0.0.1", made.port) for _ in range(3)]
            assert await made.ask() == b"", "no room for a fourth"
            assert made.refused == []
            assert {await reader.read() for reader, _ in silent} == {b""}
            assert made.refused == [Fault.BAD_PROXY_HEADER] * 3
            assert await made.address(line("203.0.113.7")) == "203.0.113.7"
            for _, writer in silent:
                writer.close()

    run(test())


@on_each_loop
def test_only_balancers_may_name_a_client(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async with door("192.0.2.0/24") as made:
            answer = await made.ask(line("203.0.113.7") + ASKED)
            assert answer.startswith(b"HTTP/1.1 400")
            assert made.refused == [Fault.MALFORMED]
            assert await made.address(b"") == "127.0.0.1"

    run(test())


@on_each_loop
def test_a_second_header_is_no_part_of_the_first(run: Callable[[Test], None]) -> None:
    """A client behind a balancer that sends one of its own."""

    async def test() -> None:
        async with door() as made:
            answer = await made.ask(line("203.0.113.7") + line("198.51.100.1") + ASKED)
            assert answer.startswith(b"HTTP/1.1 400")
            answer = await made.ask(binary("203.0.113.7") + binary("198.51.100.1") + ASKED)
            assert answer.startswith(b"HTTP/1.1 400")

    run(test())


@on_each_loop
def test_who_leaves_before_the_header_leaves_nothing(run: Callable[[Test], None]) -> None:
    async def test() -> None:
        async with door() as made:
            for part in (b"", b"PROXY TC"):
                _, writer = await asyncio.open_connection("127.0.0.1", made.port)
                writer.write(part)
                writer.close()
            await until(lambda: len(made.refused) == 2)
            stays = [await asyncio.open_connection("127.0.0.1", made.port) for _ in range(2)]
        for reader, writer in stays:
            assert await reader.read() == b"", "the door has closed it"
            writer.close()

    run(test())


class Exhausted(socket.socket):
    """A listening socket of a process that may open no more files, for a moment."""

    failures = 1

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def test_without_descriptors_connections_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "REST_S", 0.01)
    listener = Exhausted()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = parse_config({"server": {"proxy_protocol_from": ["127.0.0.1"]}})
    refused: list[Fault] = []
    with listener:
        async with listening(tell_address, refused.append, config, inherited=[listener]) as port:
            assert await Door(port, refused).address(line("203.0.113.7")) == "203.0.113.7"
    assert not listener.failures


async def test_connections_are_counted_from_their_beginning_to_their_end() -> None:
    """F12: a client that was accepted may soon need a second descriptor."""
    descriptors = plenty()
    config = parse_config(
        {"server": {"port": 0, "proxy_protocol_from": ["127.0.0.1"]}, "timeouts": {"head_s": 0.2}}
    )
    refused: list[Fault] = []
    async with listening(tell_address, refused.append, config, descriptors=descriptors) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: descriptors.coming == 1)
        writer.write(line("203.0.113.7"))
        await until(lambda: descriptors.clients == 1)
        assert descriptors.coming == 0
        _, silent = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: descriptors.coming == 1)
        await until(lambda: descriptors.coming == 0)  # it said nothing in time
        writer.close()
        silent.close()
        await until(lambda: descriptors.clients == 0)


class TlsClient:
    """TLS by hand, so that the header and the handshake's first bytes leave together."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname="127.0.0.1")

    async def ask(self, port: int, header: bytes) -> bytes:
        """The answer to a request behind a header."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(header)
        await self._until_done(self._tls.do_handshake, reader, writer)
        self._tls.write(ASKED)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += await self._until_done(self._tls.read, reader, writer)
        writer.close()
        return answer

    async def _until_done(
        self, step: Callable[[], Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Any:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                writer.write(self._out.read())
                data = await reader.read(65_536)
                assert data, "the connection was closed"
                self._in.write(data)


@on_each_loop
def test_the_header_comes_before_tls(run: Callable[[Test], None], tmp_path: Path) -> None:
    authority = trustme.CA()
    cert = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(cert))
    context = ssl.create_default_context()
    authority.configure_trust(context)

    async def test() -> None:
        async with door(server={"tls_cert": str(cert)}, timeouts={"head_s": 0.15}) as made:
            for header in (line("203.0.113.7"), binary("203.0.113.7")):
                assert b"203.0.113.7" in await TlsClient(context).ask(made.port, header)
            with pytest.raises((AssertionError, ConnectionError)):
                await TlsClient(context).ask(made.port, b"")
            assert made.refused == [Fault.BAD_PROXY_HEADER]
            await made.ask(line("203.0.113.7") + b"no handshake")
            await made.ask(line("203.0.113.7"))  # silent behind the header
            assert b"203.0.113.7" in await TlsClient(context).ask(made.port, line("203.0.113.7"))

    run(test())


def test_balancers_are_addresses_or_networks() -> None:
    for wrong in ("balancer", "10.0.0.1/8", "10.0.0.0/33", ""):
        with pytest.raises(ConfigError, match=r"server\.proxy_protocol_from\[0\]"):
            parse_config({"server": {"proxy_protocol_from": [wrong]}})
