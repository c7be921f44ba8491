"""Several routers before the same engines: that they agree, and what becomes of one that is killed.

Streams go through all routers in turn and stay open, so that there is something to agree about.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import aiohttp

from kvrouter.demo.nats_server import NatsServer
from kvrouter.demo.processes import MODEL, engines, free_port, router
from kvrouter.demo.workload import WorkloadSettings, conversations
from kvrouter.startup import StartError
from kvrouter.supervision import cancelled

STREAMS_PER_ROUTER = 8
STEP_MS = 50
STREAM_TOKENS = 1500
"""More than a minute of output: longer than what is shown takes."""
AGREE_S = 20.0
"""Longer than the lease of a router that was killed."""

Say: TypeAlias = Callable[[str], None]


@dataclass
class Site:
    """The routers' ports, the engines' URLs, and whose streams are open. Routers count from 0."""

    nats: NatsServer
    engines: list[str]
    ports: list[int]
    admin_ports: list[int]
    session: aiohttp.ClientSession
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)
    streams: list[list["asyncio.Task[None]"]] = field(default_factory=list)
    exits: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def start_router(self, number: int) -> asyncio.subprocess.Process:
        """A router that is ready. Raises StartError if it does not become so."""
        ports = (self.ports[number], self.admin_ports[number])
        running = router(self.engines, "kv", *ports, f"--nats={self.nats.url}")
        return await self.exits.enter_async_context(running)

    def open_streams(self, number: int) -> None:
        """Long answers through this router."""
        texts = [
            f"Stream {number}-{place}: tell me a story." for place in range(STREAMS_PER_ROUTER)
        ]
        self.streams.append([asyncio.create_task(self._stream(number, text)) for text in texts])

    async def _stream(self, number: int, text: str) -> None:
        try:
            await self.ask(number, text, max_tokens=STREAM_TOKENS)
        except (aiohttp.ClientError, OSError):
            return  # its router was killed

    async def close_streams(self) -> None:
        """The clients leave."""
        await cancelled([task for tasks in self.streams for task in tasks])

    async def ask(self, number: int, text: str, max_tokens: int) -> tuple[str, int]:
        """A question; the engine that answered, and the cached tokens that were expected there."""
        url = f"http://127.0.0.1:{self.ports[number]}/v1/chat/completions"
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": True,
        }
        headers = {"x-kvrouter-explain": "1"}
        async with self.session.post(url, json=body, headers=headers) as response:
            async for _ in response.content:
                pass
            chosen = response.headers["x-kvrouter-worker"]
            return chosen, int(response.headers["x-kvrouter-predicted-cached-tokens"])

    async def view(self, number: int) -> "View":
        """What a router knows."""
        url = f"http://127.0.0.1:{self.admin_ports[number]}/workers"
        async with self.session.get(url) as response:
            return read_view(await response.json())

    async def views(self, numbers: Sequence[int], *, own: Sequence[int]) -> "list[View]":
        """What these routers know, as soon as they agree.

        Then each has placed as many requests as `own` says, and sees those of all. Raises
        StartError if that takes too long.
        """
        ends_at = time.monotonic() + AGREE_S
        while True:
            views = [await self.view(number) for number in numbers]
            if [view.placed for view in views] == list(own) and agree(views):
                return views
            if time.monotonic() > ends_at:
                raise StartError("the routers do not agree:\n" + table(numbers, views))
            await asyncio.sleep(0.05)


@dataclass(frozen=True)
class View:
    """What one router knows of requests in flight: its own, and everybody's, by engine."""

    placed: int
    seen: dict[str, int]


def read_view(report: dict[str, Any]) -> View:
    """The view in a reply of GET /workers."""
    own = {
        worker["name"]: sum(rank["load"]["active_requests"] for rank in worker["ranks"])
        for worker in report["workers"]
    }
    seen = dict(own)
    for load in report["replicas"]["load_of_others"]:
        seen[load["worker"]] += load["active_requests"]
    return View(sum(own.values()), seen)


def agree(views: Sequence[View]) -> bool:
    """Whether each sees all that they have placed together, on the same engines."""
    placed = sum(view.placed for view in views)
    first = views[0].seen
    return sum(first.values()) == placed and all(view.seen == first for view in views)


def table(numbers: Sequence[int], views: Sequence[View]) -> str:
    """What each router has placed and sees, as text."""
    names = list(views[0].seen)
    heads = "".join(f"{f'engine {at}':>10}" for at in range(1, len(names) + 1))
    lines = [f"{'':<10}{'placed':>8}   sees: {heads}{'all':>6}"]
    for number, view in zip(numbers, views, strict=True):
        cells = "".join(f"{view.seen[name]:>10}" for name in names)
        total = sum(view.seen.values())
        lines.append(f"{f'router {number + 1}':<10}{view.placed:>8}{'':>9}{cells}{total:>6}")
    return "\n".join(lines) + "\n"


@asynccontextmanager
async def site(replicas: int, engine_count: int, port: int, admin_port: int) -> AsyncIterator[Site]:
    """NATS, engines and routers, while the context is open. Raises StartError."""
    async with AsyncExitStack() as exits:
        server = NatsServer()
        await server.start()
        exits.push_async_callback(server.stop)
        urls = await exits.enter_async_context(engines(engine_count, f"--step-ms={STEP_MS}"))
        session = await exits.enter_async_context(aiohttp.ClientSession())
        ports = [free_port(port), *(free_port() for _ in range(replicas - 1))]
        admin_ports = [free_port(admin_port), *(free_port() for _ in range(replicas - 1))]
        made = Site(server, urls, ports, admin_ports, session)
        await exits.enter_async_context(made.exits)
        starting = [made.start_router(number) for number in range(replicas)]
        made.processes = list(await asyncio.gather(*starting))
        exits.push_async_callback(made.close_streams)
        yield made


async def show(
    replicas: int,
    engine_count: int,
    port: int,
    admin_port: int,
    say: Say,
    linger: Callable[[Site], Awaitable[None]],
) -> None:
    """The whole show, then `linger`. Raises StartError when something does not come about."""
    say(f"{replicas} routers, {engine_count} simulated engines, and a nats-server between them.\n")
    async with site(replicas, engine_count, port, admin_port) as made:
        everybody = list(range(replicas))
        placed = [STREAMS_PER_ROUTER] * replicas
        await _agree_on_load(made, everybody, placed, say)
        await _agree_on_prefixes(made, say)
        await _lose_one(made, everybody, placed, say)
        await made.close_streams()
        await linger(made)


async def _agree_on_load(
    made: Site, everybody: Sequence[int], placed: Sequence[int], say: Say
) -> None:
    for number in everybody:
        made.open_streams(number)
    views = await made.views(everybody, own=placed)
    say(
        f"\n1. {STREAMS_PER_ROUTER} streams through each router. "
        "Each knows of all, and where they run:\n\n" + table(everybody, views)
    )


async def _agree_on_prefixes(made: Site, say: Say) -> None:
    document = conversations(WorkloadSettings(conversations=1))[0].system
    say("\n2. A document that no engine has seen, to router 1; then to each of the others:\n\n")
    for number in range(len(made.ports)):
        name, cached = await made.ask(number, f"{document} Question {number}?", max_tokens=2)
        engine = made.engines.index(f"http://{name}") + 1
        say(
            f"router {number + 1} chose engine {engine}, where it expected {cached} cached tokens\n"
        )


async def _lose_one(made: Site, everybody: Sequence[int], placed: Sequence[int], say: Say) -> None:
    last = everybody[-1]
    rest = everybody[:-1]
    made.processes[last].kill()
    killed_at = time.monotonic()
    views = await made.views(rest, own=placed[:-1])
    took_s = time.monotonic() - killed_at
    say(
        f"\n3. Router {last + 1} is killed (-9) with its {STREAMS_PER_ROUTER} streams. "
        f"After {took_s:.1f} s the others have forgotten them:\n\n" + table(rest, views)
    )
    made.processes[last] = await made.start_router(last)
    started_at = time.monotonic()
    views = await made.views(everybody, own=[*placed[:-1], 0])
    took_s = time.monotonic() - started_at
    say(
        f"\n4. It is started again, and knows {took_s:.1f} s after it is ready what the others do:"
        "\n\n" + table(everybody, views)
    )
