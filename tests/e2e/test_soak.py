"""Two minutes of everything at once (`KVROUTER_SOAK_S=3600`: an hour), on a router of its own.

The router is a process, as a user starts it, so that what is measured is the router's alone: not
the clients', not the engines', and not what pytest keeps.
"""

import asyncio
import logging
import os
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from support.loops import on_uvloop
from support.processes import Command, command
from support.stack import engine_settings, until

from kvrouter.sim.faults import Faults
from kvrouter.sim.server import SimServer
from kvrouter.sim.timing import LinearTiming

SOAK_S = float(os.environ.get("KVROUTER_SOAK_S", "120"))
CLIENTS = 24
PAUSE_S = float(os.environ.get("KVROUTER_SOAK_PAUSE_S", "0"))
"""Between a client's visits, at most: for a long run beside other work."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SAMPLES = 60
GROWTH = 1.05
GROWTH_MB = 6.0
"""What the resident memory may gain from the first third of the time to its end."""

SETTINGS = """
[server]
port = 0
admin_port = 0

[timeouts]
shutdown_s = 1.0
idle_s = 5.0
stall_s = 5.0

[health]
interval_s = 0.2

[tokenizer]
cache_bytes = 4_000_000
hash_cache_bytes = 2_000_000
"""
WORDS = ("harbour", "lantern", "copper", "orchard", "gravel", "window", "thunder", "anchor")


class RouterProcess:
    """A router, watched from outside."""

    def __init__(self, running: Command, url: str, admin: str) -> None:
        self.url = url
        self.complaints: deque[str] = deque(maxlen=100)
        """Lines of its log that tell of an error of its own."""
        self._running = running
        self._admin = admin

    @property
    def rss_mb(self) -> float:
        """Its resident memory."""
        text = Path(f"/proc/{self._running.process.pid}/statm").read_text()
        return int(text.split()[1]) * PAGE_BYTES / 2**20

    @property
    def descriptors(self) -> int:
        """Its open files and sockets."""
        return len(list(Path(f"/proc/{self._running.process.pid}/fd").iterdir()))

    @property
    def connections(self) -> int:
        """Sockets of clients at its port, open or half closed."""
        here = f":{urlsplit(self.url).port:04X}"
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        alive = {"01", "04", "05", "08", "09"}  # ESTABLISHED, FIN_WAIT1, 2, CLOSE_WAIT, LAST_ACK
        return sum(row[1].endswith(here) and row[3] in alive for row in rows)

    async def bookings(self) -> float:
        """Requests that it counts as running."""
        return await self.metric("kvrouter_rank_active_requests")

    async def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        _, text = await self._get("/metrics")
        lines = text.splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((name + "{", name + " "))
        )

    async def is_ready(self) -> bool:
        """Whether it has taken in all engines."""
        status, _ = await self._get("/ready")
        return status == 200

    async def _get(self, path: str) -> tuple[int, str]:
        url = self._admin + path
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def listen(self) -> None:
        """Read what it logs, so that it never waits for that."""
        assert self._running.process.stdout is not None
        while raw := await self._running.process.stdout.readline():
            line = raw.decode()
            if any(sign in line for sign in (" ERROR ", "Traceback", "never retrieved")):
                self.complaints.append(line)


@asynccontextmanager
async def router(settings: Path, engines: list[SimServer]) -> AsyncIterator[RouterProcess]:
    """Start a router before these engines."""
    workers = [part for engine in engines for part in ("--worker", engine.url)]
    async with command("serve", "--config", str(settings), *workers) as running:
        url = (await running.line_with("clients:")).split("clients: ")[1].strip()
        admin = (await running.line_with("second port:")).split("second port: ")[1].strip()
        made = RouterProcess(running, url.removesuffix("/v1"), admin)
        listening = asyncio.create_task(made.listen())
        await until(made.is_ready, deadline_s=60)
        yield made
        running.process.terminate()
        async with asyncio.timeout(20):
            await listening
            assert await running.process.wait() == 0


class Crowd:
    """Clients that do what clients do, and worse."""

    def __init__(self, router: RouterProcess, engines: list[SimServer], rng: random.Random) -> None:
        self.router = router
        self.engines = engines
        self.rng = rng
        self.ends_at = time.monotonic() + SOAK_S
        self.done = 0

    async def client(self) -> None:
        while time.monotonic() < self.ends_at:
            habit = self.rng.choice([self.asks, self.asks, self.streams, self.leaves, self.dawdles])
            try:
                async with aiohttp.ClientSession() as session:
                    for _ in range(self.rng.randrange(1, 4)):
                        await habit(session)
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                pass
            self.done += 1
            if PAUSE_S:
                await asyncio.sleep(self.rng.uniform(0, PAUSE_S))

    def body(self, **fields: Any) -> dict[str, Any]:
        text = " ".join(self.rng.choice(WORDS) for _ in range(self.rng.randrange(1, 200)))
        messages = [{"role": "user", "content": text}]
        return {"model": "tiny", "messages": messages, "max_tokens": 8} | fields

    async def asks(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self.url, json=self.body()) as response:
            await response.read()

    async def streams(self, session: aiohttp.ClientSession) -> None:
        async with session.post(self.url, json=self.body(stream=True, max_tokens=60)) as response:
            await response.read()

    async def leaves(self, session: aiohttp.ClientSession) -> None:
        """In the middle of whatever it is."""
        timeout = aiohttp.ClientTimeout(total=self.rng.uniform(0.001, 0.2))
        body = self.body(stream=self.rng.random() < 0.7, max_tokens=200)
        async with session.post(self.url, json=body, timeout=timeout) as response:
            await response.content.read(self.rng.randrange(1, 3000))

    async def dawdles(self, session: aiohttp.ClientSession) -> None:
        """Reads a stream slowly, and not to its end."""
        async with session.post(self.url, json=self.body(stream=True, max_tokens=300)) as response:
            for _ in range(self.rng.randrange(1, 10)):
                await response.content.read(100)
                await asyncio.sleep(0.1)

    @property
    def url(self) -> str:
        return f"{self.router.url}/v1/chat/completions"

    async def kill_engines(self) -> None:
        while time.monotonic() < self.ends_at - 3:
            await asyncio.sleep(self.rng.uniform(2, 6))
            engine = self.rng.choice(self.engines)
            match self.rng.randrange(4):
                case 0:
                    await engine.restart()
                case 1:
                    engine.faults.die_after_chunks = 3
                case 2:
                    engine.faults.refuse_next(self.rng.choice([429, 500, 503]), times=5)
                case _:
                    engine.faults.hang_after_chunks = 2
            await asyncio.sleep(1.0)
            engine.faults.die_after_chunks = engine.faults.hang_after_chunks = None


async def sampled(router: RouterProcess) -> list[float]:
    """Its memory, each sixtieth of the time."""
    started_at = time.monotonic()
    samples = []
    for number in range(1, SAMPLES + 1):
        await asyncio.sleep(max(0.0, started_at + number * SOAK_S / SAMPLES - time.monotonic()))
        samples.append(router.rss_mb)
        print(f"{number}/{SAMPLES}: RSS {samples[-1]:.1f} MB", flush=True)  # noqa: T201
    return samples


@pytest.fixture
def silent() -> Iterator[None]:
    """No log here: pytest would keep each line of the engines about clients that left."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 120)
@pytest.mark.usefixtures("silent")
def test_after_hours_of_trouble_nothing_is_left(tmp_path: Path) -> None:
    """Clients that leave, that read slowly, engines that die: what leaks, leaks here."""
    settings = tmp_path / "kvrouter.toml"
    settings.write_text(SETTINGS)
    timing = LinearTiming(base_s=0.004, prefill_token_s=1e-6)

    async def soak() -> None:
        async with AsyncExitStack() as exits:
            engines = [SimServer(engine_settings(timing=timing), faults=Faults()) for _ in range(3)]
            for engine in engines:
                await engine.start()
                exits.push_async_callback(engine.stop)
            running = await exits.enter_async_context(router(settings, engines))
            descriptors = running.descriptors
            crowd = Crowd(running, engines, random.Random(5))
            clients = [asyncio.create_task(crowd.client()) for _ in range(CLIENTS)]
            trouble = asyncio.create_task(crowd.kill_engines())
            samples = await sampled(running)
            await asyncio.gather(*clients, trouble)
            assert crowd.done > CLIENTS
            await until(lambda: running.connections == 0)
            await until(no_bookings(running))
            await until(lambda: running.descriptors <= descriptors + len(engines), deadline_s=20)
            requests = await running.metric("kvrouter_requests_total")
            print(f"{crowd.done} sessions, {requests:g} requests, RSS {running.rss_mb:.1f} MB")  # noqa: T201
            before_mb, after_mb = samples[SAMPLES // 3 - 1], running.rss_mb
            assert after_mb < before_mb * GROWTH + GROWTH_MB, samples
            session = await exits.enter_async_context(aiohttp.ClientSession())
            async with session.post(crowd.url, json=crowd.body()) as response:
                assert response.status == 200
            assert not running.complaints, list(running.complaints)

    on_uvloop(soak(), deadline_s=SOAK_S + 100)


def no_bookings(router: RouterProcess) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return await router.bookings() == 0

    return holds
