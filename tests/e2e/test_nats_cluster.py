"""Three routers, a relay and engines on the cluster of deploy/nats, while things break."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from support.nats_cluster import RELAY, ROUTER, Wire, cluster
from support.processes import command
from support.replicas import Group, group, sharing_of
from support.stack import engine_settings, until

from events.stream import StreamState
from kvrouter.config import parse_config
from kvrouter.demo.nats_server import NatsServer
from kvrouter.relay.service import Relay
from kvrouter.relay.wiring import relaying
from kvrouter.replication import Company
from kvrouter.sim.timing import LinearTiming
from kvrouter.wiring import Router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

CALM = LinearTiming(base_s=0.01, prefill_token_s=1e-5, decode_sequence_s=0.0)
CUT_S = 30.0
BUSY_S = 60.0
"""For some dozens of answers where the machine has other things to do."""


class Load:
    """Clients that go on asking, each through its own router."""

    def __init__(self, made: Group) -> None:
        self._made = made
        self.statuses: Counter[int] = Counter()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, clients: int) -> None:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(clients)]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _client(self, number: int) -> None:
        asked = 0
        while self._made.routers and not self._stopping:
            asked += 1
            routers = self._made.routers
            router = routers[number % len(routers)]
            text = f"document {number % 5} " * 60 + f" question {asked % 20}"
            response = await self._made.chat(router, text, max_tokens=8)
            self.statuses[response.status] += 1


class Site:
    """All of it."""

    def __init__(self, nodes: list[NatsServer], wires: list[Wire], made: Group) -> None:
        self.nodes = nodes
        self.wires = wires
        self.made = made

    def blocks(self, router: Router) -> dict[Any, int]:
        return {
            rank: pool.index.blocks(rank)
            for pool in router.fleet.pools.values()
            for rank in pool.index.ranks()
        }

    def same_blocks(self) -> bool:
        first, *others = [self.blocks(router) for router in self.made.routers]
        return bool(sum(first.values())) and all(other == first for other in others)

    def all_live(self) -> bool:
        states = [s.stream for r in self.made.routers for s in r.fleet.ranks.values()]
        return all(state is StreamState.LIVE for state in states)

    async def whole(self) -> None:
        """Everybody sees everybody and everything."""
        await self.made.together()
        await until(self.all_live)
        await until(self.same_blocks, deadline_s=20.0)
        await until(self.made.agrees)


@asynccontextmanager
async def relay_of(site: Site) -> AsyncIterator[Relay]:
    servers = [node.url for node in site.nodes]
    tables = {**site.made.tables, "nats": {"servers": servers} | RELAY}
    async with relaying(parse_config(tables)) as relay:
        yield relay


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    """The last router hears the engines itself: what the others know is held against it."""
    async with cluster() as nodes, AsyncExitStack() as exits:
        wires = [Wire(node.port) for node in nodes]
        urls = []
        for wire in wires:
            urls.append(await wire.start())
            exits.push_async_callback(wire.stop)
        config = {"replicas": {"beat_s": 0.2, "lease_s": 3.0}}
        settings = engine_settings(timing=CALM)
        made = await exits.enter_async_context(
            group(engines=2, routers=0, settings=settings, **config)
        )
        for at in range(3):
            relayed = at < 2
            # The second has one way in, which can be cut.
            servers = [urls[at]] if at == 1 else [node.url for node in nodes]
            nats = {"servers": servers, "learn_servers": at != 1, "relayed": relayed}
            made.tables["nats"] = nats | ROUTER
            await made.add_router()
        yield Site(nodes, wires, made)


async def test_nothing_that_happens_to_nats_fails_a_request(site: Site) -> None:
    """R1, R3: the node of a router is killed, and later comes back; another is cut off for 30 s."""
    made = site.made
    async with relay_of(site):
        await site.made.together()
        load = Load(made)
        load.start(9)
        await until(lambda: load.statuses[200] > 100, deadline_s=BUSY_S)
        link = made.routers[0].link
        assert link is not None
        used = next(node for node in site.nodes if node.url == link.server)
        if used is site.nodes[1]:
            used = site.nodes[0]
        await used.stop(signal.SIGKILL)
        await until(lambda: link.is_connected)
        before = load.statuses[200]
        await until(lambda: load.statuses[200] > before + 100, deadline_s=BUSY_S)
        await used.start()
        site.wires[1].cut()
        cut_off = sharing_of(made.routers[1]).replication
        started = time.monotonic()
        await until(lambda: cut_off.company is Company.ALONE, deadline_s=CUT_S)
        await asyncio.sleep(max(0.0, CUT_S - (time.monotonic() - started)))
        others = sharing_of(made.routers[0]).replication.mirror.replicas()
        assert cut_off.ledger.replica not in others
        site.wires[1].mend()
        await until(lambda: cut_off.company is Company.SHARED, deadline_s=20.0)
        await load.stop()
        assert load.statuses.keys() == {200}
        await site.whole()


async def test_relays_and_engines_restart_under_load(site: Site) -> None:
    """E9 to E12, R5: at the end, routers behind relays know what one beside the engines knows."""
    made = site.made
    load = Load(made)
    async with relay_of(site):
        await site.made.together()
        load.start(6)
        await until(lambda: load.statuses[200] > 60, deadline_s=BUSY_S)
    async with relay_of(site):
        before = load.statuses[200]
        await until(lambda: load.statuses[200] > before + 60, deadline_s=BUSY_S)
        assert load.statuses.keys() == {200}
        await made.engines[0].restart()
        before = load.statuses[200]
        await until(lambda: load.statuses[200] > before + 60, deadline_s=BUSY_S)
        late = await made.add_router()
        await until(lambda: len(late.fleet.ranks) == 2)
        await load.stop()
        await site.whole()


async def test_a_router_is_killed_with_100_requests_in_flight(site: Site) -> None:
    """R2: its bookings go with its lease; the others' requests go on."""
    made = site.made
    flags = [f"--worker={engine.url}" for engine in made.engines]
    config = {"user": ROUTER["user"], "password": ROUTER["password"]}
    urls = [
        node.url.replace("//", f"//{config['user']}:{config['password']}@") for node in site.nodes
    ]
    flags += [f"--nats={url}" for url in urls]
    async with command("serve", "--port=0", "--admin-port=0", *flags) as other:
        url = (await other.line_with("clients: http")).split("clients: ")[1].strip()
        await other.line_with("prompts are encoded by")
        await made.together_with(1)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x " * 50}]}
        tasks = [
            asyncio.create_task(_ask(made, url, body | {"max_tokens": 2000})) for _ in range(100)
        ]
        shares = [sharing_of(router).load for router in made.routers]
        await until(lambda: all(share.others_requests >= 100 for share in shares), deadline_s=20)
        await other.stop(signal.SIGKILL)
        await until(lambda: all(share.others_requests == 0 for share in shares), deadline_s=5)
        responses = [await made.chat(router, "still there") for router in made.routers]
        assert {response.status for response in responses} == {200}
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(made.agrees)


async def _ask(made: Group, url: str, body: dict[str, Any]) -> int:
    async with made.session.post(f"{url}/chat/completions", json=body) as response:
        await response.read()
        return response.status
