"""F12: more clients than the router may have files: a process with a limit of its own."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from support.processes import Command, command
from support.stack import engine_settings, until

from kvrouter.sim.server import SimServer
from kvrouter.sim.timing import LinearTiming

FILES = 64
BURST = 100
BODY = b'{"model":"tiny","prompt":"hello","max_tokens":20,"stream":true}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
HEADER = b"PROXY TCP4 203.0.113.7 127.0.0.1 1000 80\r\n"
PROXY = '[server]\nproxy_protocol_from = ["127.0.0.1"]\n'


class Limited:
    """A router that may have few files."""

    def __init__(self, running: Command, clients: str, admin: str) -> None:
        self.running = running
        self.port = urlsplit(clients).port
        self.admin = admin
        self.seen: set[int] = set()
        """How its second port answered while it was watched."""

    async def streamed(self, header: bytes = b"") -> bytes:
        """The answer to a streaming request over a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            async with asyncio.timeout(60):
                writer.write(header + REQUEST)
                return await reader.read()
        finally:
            writer.close()

    async def watch(self) -> None:
        """Ask its second port again and again, over new connections."""
        while True:
            async with aiohttp.ClientSession() as session:
                self.seen.add((await session.get(f"{self.admin}/health")).status)
            await asyncio.sleep(0.01)

    async def serves(self) -> bool:
        """Whether a client is served."""
        return (await self.streamed()).startswith(b"HTTP/1.1 200")

    async def is_at_rest(self) -> bool:
        """Whether no request is booked."""
        url = f"{self.admin}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            lines = (await response.text()).splitlines()
        active = [line for line in lines if line.startswith("kvrouter_rank_active_requests{")]
        return bool(active) and all(line.endswith(" 0.0") for line in active)


@asynccontextmanager
async def limited(
    tmp_path: Path, settings: str = "", host: str = "127.0.0.1"
) -> AsyncIterator[Limited]:
    """A router before one engine; watched all the while."""
    file = tmp_path / "kvrouter.toml"
    file.write_text(settings)
    engine = SimServer(engine_settings(timing=LinearTiming(base_s=0.02)))
    await engine.start()
    limit = f"ulimit -n {FILES}; exec {Path(sys.executable).parent / 'kvrouter'}"
    ports = ("--port", "0", "--admin-port", "0")
    arguments = ("--config", str(file), "--worker", engine.url.replace("127.0.0.1", host), *ports)
    try:
        async with command("serve", *arguments, shell=limit) as running:
            clients = (await running.line_with("clients: ")).split("clients: ")[1].strip()
            admin = (await running.line_with("second port: ")).split("second port: ")[1].strip()
            await running.line_with("prompts are encoded by")
            made = Limited(running, clients, admin)
            watching = asyncio.create_task(made.watch())
            yield made
            await until(made.is_at_rest)
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):  # it did not fail
                await watching
            assert made.seen == {200}
            assert any(f"only {FILES} open files" in line for line in running.lines)
            assert await running.stop() == 0
    finally:
        await engine.stop()


async def test_clients_that_say_nothing_take_no_more_than_is_theirs(tmp_path: Path) -> None:
    async with limited(tmp_path) as router:
        idle = []
        for _ in range(60):
            try:
                async with asyncio.timeout(0.2):
                    idle.append(await asyncio.open_connection("127.0.0.1", router.port))
            except TimeoutError:
                pass  # it waits in the listening socket
        assert len(idle) > 10
        for _, writer in idle:
            writer.close()
        await until(router.serves, deadline_s=20)


@pytest.mark.parametrize(
    ("settings", "host", "header"),
    [("", "127.0.0.1", b""), ("", "localhost", b""), (PROXY, "127.0.0.1", HEADER)],
    ids=["plain", "an engine by name", "through a balancer"],
)
async def test_of_a_burst_each_is_served_or_turned_away(
    tmp_path: Path, settings: str, host: str, header: bytes
) -> None:
    async with limited(tmp_path, settings, host) as router:
        answers = await asyncio.gather(*(router.streamed(header) for _ in range(BURST)))
        whole = [answer for answer in answers if answer.startswith(b"HTTP/1.1 200 ")]
        refused = [answer for answer in answers if answer.startswith(b"HTTP/1.1 503 ")]
        assert len(whole) + len(refused) == BURST
        assert refused
        assert len(whole) >= 5  # each that was let in got a connection to the engine
        assert all(answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for answer in whole)
        assert all(b"\r\nRetry-After: 1\r\n" in answer for answer in refused)
        assert all(b"ulimit -n" in answer for answer in refused)
