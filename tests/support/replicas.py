"""Several routers before the same simulated engines, sharing their bookings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from support.stack import engine_settings, router_tables, until

from events import WorkerRank
from kvrouter.config import parse_config
from kvrouter.replication import Company
from kvrouter.sharing import Sharing
from kvrouter.sim.faults import Faults
from kvrouter.sim.server import SimServer
from kvrouter.sim.settings import SimSettings
from kvrouter.wiring import Router, running


def sharing_of(router: Router) -> Sharing:
    """The router's part in sharing; it must have one."""
    assert router.sharing is not None
    return router.sharing


@dataclass
class Group:
    """Engines, the routers before them, and a client."""

    engines: list[SimServer]
    tables: dict[str, Any]
    session: aiohttp.ClientSession
    routers: list[Router] = field(default_factory=list)
    _exits: list[AsyncExitStack] = field(default_factory=list)

    async def add_router(self, **changes: Any) -> Router:
        """One more router, ready."""
        tables = {**self.tables, "replicas": self.tables.get("replicas", {}) | changes}
        exits = AsyncExitStack()
        router = await exits.enter_async_context(running(parse_config(tables)))
        self._exits.append(exits)
        self.routers.append(router)
        await until(lambda: self._is_ready(router), deadline_s=30.0)
        return router

    def _is_ready(self, router: Router) -> bool:
        fleet = router.fleet
        loaded = all(pool.tokenizer is not None for pool in fleet.pools.values())
        return len(fleet.ranks) == len(self.engines) and loaded

    async def stop_router(self, router: Router) -> None:
        at = self.routers.index(router)
        del self.routers[at]
        await self._exits.pop(at).aclose()

    async def stop(self) -> None:
        for router in list(self.routers):
            await self.stop_router(router)

    async def chat(self, router: Router, text: str, **fields: Any) -> aiohttp.ClientResponse:
        """A chat of one message through one of the routers, read to its end."""
        url = f"http://127.0.0.1:{router.port}/v1/chat/completions"
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        headers = {"x-kvrouter-explain": "1"}
        async with self.session.post(url, json=body | fields, headers=headers) as response:
            await response.read()
            return response

    async def workers(self, router: Router) -> dict[str, Any]:
        """What the second port shows."""
        async with self.session.get(f"http://127.0.0.1:{router.admin_port}/workers") as response:
            report: dict[str, Any] = await response.json()
            return report

    async def metrics(self, router: Router) -> str:
        async with self.session.get(f"http://127.0.0.1:{router.admin_port}/metrics") as response:
            return await response.text()

    async def together(self) -> None:
        """Wait until every router knows all others exactly."""
        await self.together_with(0)

    async def together_with(self, strangers: int) -> None:
        """The same, with so many routers that were started elsewhere."""
        others = len(self.routers) - 1 + strangers
        await until(
            lambda: all(
                len(sharing_of(router).replication.mirror.replicas()) == others
                and sharing_of(router).replication.company in (Company.SHARED, Company.SINGLE)
                for router in self.routers
            )
        )

    def seen_requests(self, router: Router) -> dict[WorkerRank, int]:
        """The active requests of each rank as a router's decisions see them."""
        ranks = sorted(router.fleet.ranks)
        loads = sharing_of(router).load.of_each(ranks)
        return dict(zip(ranks, loads.active_requests, strict=True))

    def real_requests(self) -> dict[WorkerRank, int]:
        """The active requests of each rank, added up over the routers' own bookings."""
        ranks = sorted(self.routers[0].fleet.ranks)
        return {
            rank: sum(router.fleet.load.of(rank).active_requests for router in self.routers)
            for rank in ranks
        }

    def agrees(self) -> bool:
        """Whether every router sees all that is booked, no more and no less."""
        real = self.real_requests()
        return all(self.seen_requests(router) == real for router in self.routers)


def _is_loading(router: Router) -> bool:
    warmth = sharing_of(router).warmth
    return warmth is not None and warmth.taking.loading > 0


@asynccontextmanager
async def group(
    engines: int = 2, routers: int = 2, *, settings: SimSettings | None = None, **config: Any
) -> AsyncIterator[Group]:
    """Engines and routers; the sections of `config` say how they share."""
    async with AsyncExitStack() as exits:
        servers = [
            SimServer(settings or engine_settings(), faults=Faults(), record=2000)
            for _ in range(engines)
        ]
        for server in servers:
            await server.start()
            exits.push_async_callback(server.stop)
        session = await exits.enter_async_context(aiohttp.ClientSession())
        tables = router_tables([server.url for server in servers], config)
        made = Group(servers, tables, session)
        exits.push_async_callback(made.stop)
        await asyncio.gather(*(made.add_router() for _ in range(routers)))
        yield made
        await until(lambda: not any(map(_is_loading, made.routers)))
        for router in made.routers:
            router.fleet.check()
            sharing_of(router).load.check()
            sharing_of(router).replication.mirror.check()
