"""deploy/nats/permissions.conf: enough, and no more than that."""

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.nats_cluster import DEPLOYED, RELAY, ROUTER, cluster
from support.replicas import Group, group, sharing_of
from support.stack import until

from events.nats_link import NatsLink
from kvrouter.config import parse_config
from kvrouter.demo.nats_server import NatsServer
from kvrouter.relay.service import Relay
from kvrouter.relay.wiring import relaying

SUBJECT = re.compile(r'^\s+"(kvrouter\.v1\.[^"]+)"')


def grants() -> list[int]:
    """The lines of the file that each grant something."""
    lines = (DEPLOYED / "permissions.conf").read_text().splitlines()
    return [number for number, line in enumerate(lines) if SUBJECT.match(line)]


@asynccontextmanager
async def everything(server: NatsServer) -> AsyncIterator[tuple[Group, Relay]]:
    """An engine that is discovered through its relay, by two routers that share."""
    nats = {"servers": [server.url], "discover": True}
    async with group(engines=1, routers=0, nats=nats | ROUTER, replicas={"beat_s": 0.1}) as made:
        tables = {**made.tables, "nats": {"servers": [server.url]} | RELAY}
        engines, made.engines, made.tables["workers"] = made.engines, [], []
        async with relaying(parse_config(tables)) as relay:
            await until(lambda: bool(relay.streams) and relay._link.is_connected)
            await asyncio.gather(*(made.add_router() for _ in range(2)))
            made.engines = engines
            yield made, relay


def refused(made: Group, relay: Relay) -> int:
    links: list[NatsLink | None] = [relay._link, *(router.link for router in made.routers)]
    return sum(link.stats.refused for link in links if link is not None)


async def use_everything(made: Group) -> None:
    first, second = made.routers
    await until(lambda: all(len(router.fleet.ranks) == 1 for router in made.routers))
    await until(lambda: all(p.tokenizer for r in made.routers for p in r.fleet.pools.values()))
    long = asyncio.create_task(made.chat(first, "hello " * 200, max_tokens=50))
    await until(lambda: sharing_of(second).load.others_requests == 1)
    third = await made.add_router()
    await until(lambda: sharing_of(third).load.others_requests == 1 or long.done())
    await until(lambda: all(_blocks(router) > 0 for router in made.routers))
    await long


def _blocks(router: object) -> int:
    pools = router.fleet.pools.values()  # type: ignore[attr-defined]  # a Router
    return sum(pool.index.stats().blocks for pool in pools)


async def test_the_documented_permissions_are_enough() -> None:
    async with cluster(nodes=1) as (server,), everything(server) as (made, relay):
        await use_everything(made)
        assert refused(made, relay) == 0


@pytest.mark.slow
@pytest.mark.parametrize("line", grants())
async def test_each_documented_permission_is_needed(line: int, tmp_path: Path) -> None:
    shutil.copytree(DEPLOYED, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "permissions.conf"
    lines = file.read_text().splitlines()
    del lines[line]
    file.write_text("\n".join(lines))
    async with cluster(tmp_path, nodes=1) as (server,), everything(server) as (made, relay):
        using = asyncio.create_task(use_everything(made))
        try:
            await until(lambda: refused(made, relay) > 0)
        finally:
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
