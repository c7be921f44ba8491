"""Routers that start before engines whose past no engine can tell them: others do."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.index_content import content
from support.nats import nats_server
from support.replicas import Group, group, sharing_of
from support.stack import engine_settings, until

from events.stream import StreamState
from kvrouter.replication import Company
from kvrouter.sharing import Warmth
from kvrouter.wiring import Router

WITHOUT_REPLAY = engine_settings(replay_port=None)
QUICK = {"beat_s": 0.1, "lease_s": 1.0}


@pytest.fixture
def local(tmp_path: Path) -> dict[str, Any]:
    return {"replicas": QUICK | {"local_bus": str(tmp_path / "bus")}}


def known(router: Router) -> dict[Any, Any]:
    return {model: content(pool.index) for model, pool in router.fleet.pools.items()}


def blocks(router: Router) -> int:
    return sum(pool.index.stats().blocks for pool in router.fleet.pools.values())


def hears(router: Router) -> bool:
    return all(state.stream is StreamState.LIVE for state in router.fleet.ranks.values())


def warmth_of(router: Router) -> Warmth:
    warmth = sharing_of(router).warmth
    assert warmth is not None
    return warmth


async def traffic(made: Group, count: int) -> None:
    routers = list(made.routers)
    for number in range(count):
        text = f"document {number % 7} " * 80 + f" question {number}"
        await made.chat(routers[number % len(routers)], text)


@pytest.mark.parametrize("busy", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_new_router_knows_what_an_old_one_does(
    local: dict[str, Any], busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines have no replay: nobody else can tell what they stored before it came."""
    monkeypatch.setattr("kvrouter.warm_start.COMPANY_S", 0.0)
    async with group(engines=2, routers=1, settings=WITHOUT_REPLAY, **local) as made:
        (old,) = made.routers
        await until(lambda: hears(old))
        monkeypatch.undo()
        await traffic(made, 20)
        await until(lambda: blocks(old) > 100)
        asking = asyncio.create_task(traffic(made, 60 if busy else 0))
        new = await made.add_router()
        await until(lambda: hears(new))
        assert warmth_of(new).taking.taken == 2
        await asking
        await until(lambda: known(new) == known(old))
        await traffic(made, 10)
        await until(lambda: known(new) == known(old))


@pytest.mark.slow
async def test_what_an_engine_can_replay_no_more_is_known_too(local: dict[str, Any]) -> None:
    """E9 at the start: the engine has run for hours, its buffer holds minutes."""
    settings = engine_settings(buffer_steps=4)
    async with group(engines=1, routers=1, settings=settings, **local) as made:
        (old,) = made.routers
        await until(lambda: hears(old))
        await traffic(made, 20)
        await until(lambda: blocks(old) > 100)
        new = await made.add_router()
        await until(lambda: hears(new) and known(new) == known(old))
        lonely = await made.add_router(warm_start=False)
        await until(lambda: hears(lonely))
        assert blocks(lonely) < blocks(new)
        await traffic(made, 10)
        await until(lambda: known(new) == known(old))


@pytest.mark.slow
async def test_over_nats_too() -> None:
    async with nats_server() as server:
        config = {"replicas": QUICK, "nats": {"servers": [server.url]}}
        async with group(engines=1, routers=1, settings=WITHOUT_REPLAY, **config) as made:
            await until(lambda: hears(made.routers[0]))
            await traffic(made, 5)
            new = await made.add_router()
            await until(lambda: known(new) == known(made.routers[0]) and blocks(new) > 0)


@pytest.mark.slow
async def test_an_engine_that_restarts_meanwhile_leaves_no_phantoms(local: dict[str, Any]) -> None:
    """R5 without replay: what the new router was given is of an engine that is no more."""
    async with group(engines=1, routers=1, settings=WITHOUT_REPLAY, **local) as made:
        (old,) = made.routers
        await until(lambda: hears(old))
        await traffic(made, 10)
        await until(lambda: blocks(old) > 50)
        starting = asyncio.create_task(made.add_router())
        await made.engines[0].restart()
        new = await starting
        await until(lambda: hears(new))

        async def is_served() -> bool:
            return (await made.chat(old, "after the restart " * 30)).status == 200

        await until(is_served)
        await until(lambda: known(new) == known(old) and 0 < blocks(new) < 50)


@pytest.mark.slow
async def test_routers_that_start_together_or_in_a_loop_disturb_nobody(
    local: dict[str, Any],
) -> None:
    """R1, point 37: three at once, and one that is restarted again and again."""
    async with group(engines=3, routers=2, settings=WITHOUT_REPLAY, **local) as made:
        await until(lambda: all(map(hears, made.routers)))
        await traffic(made, 30)
        await made.together()
        old, other = made.routers
        asking = asyncio.create_task(traffic(made, 200))
        together = await asyncio.gather(*(made.add_router() for _ in range(3)))
        for _ in range(4):
            await made.stop_router(await made.add_router())
        await asking
        warm = [router for router in together if warmth_of(router).taking.taken == 3]
        assert warm
        await until(lambda: all(known(router) == known(old) for router in (other, *warm)))
        for router in (old, other):
            replication = sharing_of(router).replication
            assert replication.mirror.stats.gaps == 0
            assert replication.company is Company.SHARED


@pytest.mark.slow
async def test_a_router_that_is_told_to_begins_without_the_others(local: dict[str, Any]) -> None:
    async with group(engines=1, routers=1, settings=WITHOUT_REPLAY, **local) as made:
        await until(lambda: hears(made.routers[0]))
        await traffic(made, 5)
        new = await made.add_router(warm_start=False)
        await until(lambda: hears(new))
        assert sharing_of(new).warmth is None
        assert blocks(new) == 0
