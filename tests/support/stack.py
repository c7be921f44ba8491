"""Simulated engines with a router before them, in one process on free ports."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvrouter.config import Config, parse_config
from kvrouter.sim.faults import Faults
from kvrouter.sim.server import Received, SimServer
from kvrouter.sim.settings import CoreSettings, SimSettings
from kvrouter.sim.timing import LinearTiming
from kvrouter.wiring import Router, running
from kvrouter.worker_url import short_name

TINYMODEL = str(Path(__file__).parent.parent / "data" / "tinymodel")
FAST = LinearTiming(base_s=0.001, prefill_token_s=1e-6, decode_sequence_s=0.0)
DEADLINE_S = 10.0


def engine_settings(**changes: Any) -> SimSettings:
    """A fast engine with the tiny tokenizer."""
    core = changes.pop("core", CoreSettings(num_blocks=1025, max_model_len=8192))
    return SimSettings(
        **{"core": core, "timing": FAST, "model": "tiny", "tokenizer": TINYMODEL} | changes
    )


def router_tables(engines: Sequence[str], changes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A configuration on free ports that notices things quickly."""
    tables: dict[str, Any] = {
        "server": {"port": 0, "admin_port": 0},
        "health": {"interval_s": 0.1, "timeout_s": 1.0},
        "timeouts": {"shutdown_s": 0.1},
        "tokenizer": {"backend": "hf", "cache_bytes": 0},  # nothing that needs a proof of a second
    }
    for section, fields in changes.items():
        tables.setdefault(section, {}).update(fields)
    tables["workers"] = [{"url": url} for url in engines]
    return tables


@dataclass
class Stack:
    """A router, its engines, and a client session."""

    engines: list[SimServer]
    router: Router
    session: aiohttp.ClientSession
    config: Config
    tokenizer: str = field(default=TINYMODEL)

    @property
    def url(self) -> str:
        """The front door."""
        return f"http://127.0.0.1:{self.router.port}"

    @property
    def admin(self) -> str:
        """The second port."""
        return f"http://127.0.0.1:{self.router.admin_port}"

    def name(self, engine: int) -> str:
        """The worker name of an engine."""
        return short_name(self.engines[engine].url)

    def posts(self, engine: int) -> list[Received]:
        """What an engine was sent, besides the router's own questions."""
        return [each for each in self.engines[engine].received if each.method == "POST"]

    async def chat(self, text: str, **fields: Any) -> aiohttp.ClientResponse:
        """A unary chat of one message, read to its end; the decision is in the headers."""
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 2,
        } | fields
        headers = {"x-kvrouter-explain": "1"}
        async with self.session.post(
            f"{self.url}/v1/chat/completions", json=body, headers=headers
        ) as response:
            await response.read()
            return response

    async def explain(self, **body: Any) -> dict[str, Any]:
        """What the second port says about a body."""
        async with self.session.post(f"{self.admin}/explain", json=body) as response:
            assert response.status == 200, await response.text()
            decision: dict[str, Any] = await response.json()
            return decision

    async def settled(self) -> None:
        """Wait until no request is booked."""
        await until(lambda: self.router.fleet.load.totals.active_requests == 0)

    async def caught_up(self) -> None:
        """Wait until the router has applied all that the engines have published."""
        await until(self._caught_up)

    def _caught_up(self) -> bool:
        for number, engine in enumerate(self.engines):
            for rank, state in self.router.fleet.ranks.items():
                if rank.worker == self.name(number) and state.source is not None:
                    publisher = engine.ranks[rank.dp_rank]._publisher
                    applied = state.source.stats.last_seqno
                    if publisher is not None and publisher._next != (applied or 0) + (
                        applied is not None
                    ):
                        return False
        return True


async def until(
    holds: Callable[[], bool | Awaitable[bool]], *, deadline_s: float = DEADLINE_S
) -> None:
    """Poll until `holds` is true. Raises AssertionError after the deadline."""
    ends_at = time.monotonic() + deadline_s
    while True:
        result = holds()
        if isinstance(result, bool):
            if result:
                return
        elif await result:
            return
        if time.monotonic() > ends_at:
            raise AssertionError(f"it did not hold within {deadline_s:g} s")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def stack(
    *engines: SimSettings, wait_ready: bool = True, **config: dict[str, Any]
) -> AsyncIterator[Stack]:
    """Start engines (two fast ones by default) and a router; check all invariants at the end."""
    settings = engines or (engine_settings(), engine_settings())
    async with AsyncExitStack() as exits:
        servers = [SimServer(each, faults=Faults(), record=1000) for each in settings]
        for server in servers:
            await server.start()
            exits.push_async_callback(server.stop)
        parsed = parse_config(router_tables([server.url for server in servers], config))
        router = await exits.enter_async_context(running(parsed))
        session = await exits.enter_async_context(aiohttp.ClientSession())
        running_stack = Stack(servers, router, session, parsed)
        if wait_ready:
            await _ready(running_stack, len(servers))
        yield running_stack
        router.fleet.check()


async def _ready(running_stack: Stack, engines: int) -> None:
    async def is_ready() -> bool:
        async with running_stack.session.get(f"{running_stack.admin}/ready") as response:
            joined = {rank.worker for rank in running_stack.router.fleet.ranks}
            return response.status == 200 and len(joined) == engines

    await until(is_ready)
