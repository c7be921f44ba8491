"""Routers that share their bookings, over NATS and over the local bus."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.nats import nats_server
from support.processes import command
from support.replicas import Group, group, sharing_of
from support.stack import engine_settings, until

from kvrouter.demo.nats_server import NatsServer
from kvrouter.replication import Company
from kvrouter.sim.timing import LinearTiming

SLOW = LinearTiming(base_s=0.05, prefill_token_s=1e-6, decode_sequence_s=0.0)
QUICK = {"beat_s": 0.1, "lease_s": 1.0}


@pytest.fixture(params=["nats", "local"])
async def way(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dict[str, Any]]:
    """The configuration of either bus."""
    if request.param == "local":
        yield {"replicas": QUICK | {"local_bus": str(tmp_path / "bus")}}
        return
    async with nats_server() as server:
        yield {"replicas": QUICK, "nats": {"servers": [server.url]}}


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as running:
        yield running


def over(server: NatsServer) -> dict[str, Any]:
    return {"replicas": QUICK, "nats": {"servers": [server.url]}}


async def burst(made: Group, count: int, **fields: Any) -> list["asyncio.Task[Any]"]:
    """Requests that are spread over the routers; they run on."""
    routers = made.routers
    return [
        asyncio.create_task(
            made.chat(routers[number % len(routers)], f"question {number} " * 20, **fields)
        )
        for number in range(count)
    ]


async def test_each_router_sees_the_requests_of_all(way: dict[str, Any]) -> None:
    settings = engine_settings(timing=SLOW)
    async with group(engines=2, routers=3, settings=settings, **way) as made:
        await made.together()
        tasks = await burst(made, 12, max_tokens=40)
        await until(lambda: sum(made.real_requests().values()) == 12 and made.agrees())
        await asyncio.gather(*tasks)
        await until(lambda: sum(made.real_requests().values()) == 0 and made.agrees())


async def test_a_burst_over_three_routers_spreads(way: dict[str, Any]) -> None:
    """R4: 100 requests at once; routers that see a third each would herd."""
    settings = engine_settings(timing=SLOW)
    async with group(engines=4, routers=3, settings=settings, **way) as made:
        await made.together()
        tasks = await burst(made, 100, max_tokens=2)
        responses = await asyncio.gather(*tasks)
        assert {response.status for response in responses} == {200}
        shares = Counter(
            {
                engine.url: sum(e.method == "POST" for e in engine.received)
                for engine in made.engines
            }
        )
        assert max(shares.values()) <= 50, shares


async def test_a_new_router_sees_the_load_of_requests_that_it_has_not_seen_begin(
    way: dict[str, Any],
) -> None:
    """R1: it asks the others when it first hears them."""
    settings = engine_settings(timing=SLOW)
    async with group(engines=2, routers=2, settings=settings, **way) as made:
        await made.together()
        tasks = await burst(made, 10, max_tokens=1000)
        await until(lambda: sum(made.real_requests().values()) == 10)
        late = await made.add_router()
        await until(lambda: sum(made.seen_requests(late).values()) == 10 and made.agrees())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: sum(made.seen_requests(late).values()) == 0)


async def test_routers_come_and_go_and_the_others_go_on(way: dict[str, Any]) -> None:
    """R1: three start at once, one ends, one restarts."""
    async with group(engines=2, routers=3, **way) as made:
        await made.together()
        await made.stop_router(made.routers[0])
        await made.together()
        await made.add_router()
        await made.together()
        responses = await asyncio.gather(*await burst(made, 12))
        assert {response.status for response in responses} == {200}
        await until(made.agrees)


async def test_a_router_that_is_killed_is_forgotten_within_its_lease(server: NatsServer) -> None:
    """R2: it dies with requests in flight and says nothing."""
    settings = engine_settings(timing=SLOW)
    async with group(engines=2, routers=1, settings=settings, **over(server)) as made:
        workers = [f"--worker={engine.url}" for engine in made.engines]
        flags = ("--port=0", "--admin-port=0", f"--nats={server.url}")
        async with command("serve", *flags, *workers) as other:
            line = await other.line_with("clients: http")
            url = line.split("clients: ")[1].strip()
            await other.line_with("prompts are encoded by")
            tasks = [
                asyncio.create_task(_ask(made, url, f"text {number} " * 30)) for number in range(20)
            ]
            shared = sharing_of(made.routers[0]).load
            await until(lambda: shared.others_requests == 20)
            await other.stop(signal.SIGKILL)
            killed_at = time.monotonic()
            await until(lambda: shared.others_requests == 0)
            assert time.monotonic() - killed_at < QUICK["lease_s"] + 1.0
            await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(made: Group, url: str, text: str) -> int:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 100}
    async with made.session.post(f"{url}/chat/completions", json=body) as response:
        await response.read()
        return response.status


async def test_routing_goes_on_without_nats_and_catches_up_with_it(server: NatsServer) -> None:
    """R3: NATS is down for a while, under load."""
    settings = engine_settings(timing=SLOW)
    async with group(engines=2, routers=2, settings=settings, **over(server)) as made:
        await made.together()
        await server.stop()
        await until(lambda: all(_company(made, at) is Company.ALONE for at in range(2)))
        tasks = await burst(made, 10, max_tokens=60)
        await until(lambda: sum(made.real_requests().values()) == 10)
        report = (await made.workers(made.routers[0]))["replicas"]
        assert (report["company"], report["nats"]["state"]) == ("alone", "lost")
        await server.start()
        await made.together()
        await until(made.agrees)
        assert sum(made.real_requests().values()) == 10
        assert {response.status for response in await asyncio.gather(*tasks)} == {200}


def _company(made: Group, at: int) -> Company:
    return sharing_of(made.routers[at]).replication.company


async def test_a_router_starts_without_nats(server: NatsServer) -> None:
    """R3: the routers are there before NATS is."""
    await server.stop()
    async with group(engines=1, routers=2, **over(server)) as made:
        response = await made.chat(made.routers[0], "hello")
        assert response.status == 200
        assert _company(made, 0) is Company.ALONE
        await server.start()
        await made.together()


async def test_equal_prompts_at_two_routers_meet_on_one_worker(server: NatsServer) -> None:
    """C6 over replicas: what one has placed, the other expects there."""
    settings = engine_settings(timing=SLOW)
    async with group(engines=4, routers=2, settings=settings, **over(server)) as made:
        await made.together()
        text = "the same long document " * 100
        first = asyncio.create_task(made.chat(made.routers[0], text, max_tokens=10))
        await until(lambda: sharing_of(made.routers[1]).load.others_requests == 1)
        second = await made.chat(made.routers[1], text)
        assert second.headers["x-kvrouter-worker"] == (await first).headers["x-kvrouter-worker"]


async def test_the_second_port_shows_the_other_replicas(server: NatsServer) -> None:
    async with group(engines=1, routers=2, **over(server)) as made:
        await made.together()
        first, second = made.routers
        report = (await made.workers(first))["replicas"]
        assert report["company"] == "shared"
        assert list(report["others"]) == [sharing_of(second).replication.ledger.replica]
        assert report["nats"]["server"] == server.url
        metrics = await made.metrics(first)
        assert 'kvrouter_replicas_company{company="shared"} 1.0' in metrics
        assert "kvrouter_replicas_others 1.0" in metrics
        assert 'kvrouter_nats_state{state="connected"} 1.0' in metrics


async def test_routers_that_are_told_not_to_share_do_not(server: NatsServer) -> None:
    async with group(engines=1, routers=0, **over(server)) as made:
        router = await made.add_router(sync=False)
        assert router.sharing is None
        assert (await made.workers(router))["replicas"]["company"] == "alone"
        await made.stop_router(router)
