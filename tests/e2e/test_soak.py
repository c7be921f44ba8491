"""Two minutes of everything at once, on the loop that routers run on."""

import asyncio
import gc
import logging
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.loops import on_uvloop
from support.stack import Stack, engine_settings, stack, until

from kvrouter.sim.timing import LinearTiming

SOAK_S = float(os.environ.get("KVROUTER_SOAK_S", "120"))
CLIENTS = 24
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
WORDS = ("harbour", "lantern", "copper", "orchard", "gravel", "window", "thunder", "anchor")


def rss_mb() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES / 2**20


class Crowd:
    """Clients that do what clients do, and worse."""

    def __init__(self, running: Stack, rng: random.Random) -> None:
        self.running = running
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
        return f"{self.running.url}/v1/chat/completions"

    async def kill_engines(self) -> None:
        while time.monotonic() < self.ends_at - 3:
            await asyncio.sleep(self.rng.uniform(2, 6))
            engine = self.rng.choice(self.running.engines)
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


@pytest.fixture
def silent() -> Iterator[None]:
    """No log: pytest would keep each record with its traceback, and all that hangs on it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 120)
@pytest.mark.usefixtures("silent")
def test_after_hours_of_trouble_nothing_is_left() -> None:
    """Clients that leave, that read slowly, engines that die: what leaks, leaks here."""
    complaints: list[dict[str, Any]] = []
    settings = [
        engine_settings(timing=LinearTiming(base_s=0.004, prefill_token_s=1e-6)) for _ in range(3)
    ]
    timeouts = {"shutdown_s": 0.1, "idle_s": 5.0, "stall_s": 5.0}

    async def soak() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        async with stack(*settings, timeouts=timeouts) as running:
            crowd = Crowd(running, random.Random(5))
            clients = [asyncio.create_task(crowd.client()) for _ in range(CLIENTS)]
            trouble = asyncio.create_task(crowd.kill_engines())
            await asyncio.sleep(SOAK_S / 3)
            before_mb = rss_mb()
            await asyncio.gather(*clients, trouble)
            assert crowd.done > CLIENTS
            await running.settled()
            await until(lambda: running.router.door.active_requests == 0)
            after_mb = rss_mb()
            print(f"{crowd.done} sessions; RSS {before_mb:.1f} MB, then {after_mb:.1f} MB")  # noqa: T201
            assert after_mb < before_mb * 1.15 + 10, (before_mb, after_mb)
            gc.collect()
            requests = [t for t in asyncio.all_tasks() if t.get_name() == "request"]
            assert not requests
            assert (await running.chat("is anybody there?")).status == 200

    on_uvloop(soak(), deadline_s=SOAK_S + 60)
    assert not complaints, complaints[:3]
