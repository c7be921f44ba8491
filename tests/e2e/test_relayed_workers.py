"""Routers that hear engines through relays: alone, and beside others that hear them directly."""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from support.nats import nats_server
from support.processes import command
from support.replicas import Group, group
from support.stack import engine_settings, router_tables, until

from events import WorkerRank
from events.announce import Announcement, encode_announcement
from events.stream import StreamState
from events.subjects import Subjects
from kvrouter.config import parse_config
from kvrouter.demo.nats_server import NatsServer
from kvrouter.joining import learn
from kvrouter.relay.service import Relay
from kvrouter.relay.wiring import relaying
from kvrouter.sim.server import SimServer
from kvrouter.wiring import Router, running

IMPOSSIBLE = (
    ("local", "unix:/run/other.sock"),  # of somebody's host, not ours
    ("brackets", "http://["),
    ("", "http://127.0.0.1:9"),
    ("long", f"http://{'h' * 100_000}"),
)
SERVICE = "kvrouter.relay.service"
TEXT = "a document that is asked about again and again " * 40


@pytest.fixture
async def server() -> AsyncIterator[NatsServer]:
    async with nats_server() as running:
        yield running


@asynccontextmanager
async def relay_for(made: Group, server: NatsServer) -> AsyncIterator[Relay]:
    """A relay beside all engines."""
    tables = router_tables(
        [engine.url for engine in made.engines], {"nats": {"servers": [server.url]}}
    )
    async with relaying(parse_config(tables)) as relay:
        yield relay


def relayed(server: NatsServer, **nats: Any) -> dict[str, Any]:
    return {"nats": {"servers": [server.url], "relayed": True} | nats}


def hears(router: Router) -> bool:
    return all(state.stream is StreamState.LIVE for state in router.fleet.ranks.values())


def blocks(router: Router) -> dict[WorkerRank, int]:
    return {
        rank: pool.index.blocks(rank)
        for pool in router.fleet.pools.values()
        for rank in pool.index.ranks()
    }


async def test_a_prompt_is_found_again_through_a_relay(server: NatsServer) -> None:
    async with group(engines=2, routers=1, **relayed(server)) as made, relay_for(made, server):
        (router,) = made.routers
        await until(lambda: hears(router))
        for worker in (await made.workers(router))["workers"]:
            events = worker["ranks"][0]["events"]
            assert worker["name"].rpartition(":")[2] in events["subject"]
            assert "endpoint" not in events  # where its relay listens, not we
        first = await made.chat(router, TEXT)
        await until(lambda: sum(blocks(router).values()) > 10)
        second = await made.chat(router, TEXT)
        assert second.headers["x-kvrouter-worker"] == first.headers["x-kvrouter-worker"]
        assert int(second.headers["x-kvrouter-predicted-cached-tokens"]) > 0
        usage = (await second.json())["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert int(second.headers["x-kvrouter-predicted-cached-tokens"]) == cached


async def test_routers_that_hear_directly_and_through_relays_know_the_same(
    server: NatsServer,
) -> None:
    """A mixed fleet: each way has the same blocks, also at a router that starts late."""
    async with group(engines=2, routers=1, **relayed(server)) as made, relay_for(made, server):
        made.tables["nats"] = {"servers": [server.url]}
        await made.add_router()
        await until(lambda: all(hears(router) for router in made.routers))
        for number in range(10):
            await made.chat(made.routers[number % 2], f"{number} {TEXT}")
        made.tables["nats"] = {"servers": [server.url], "relayed": True}
        await made.add_router()
        await until(lambda: sum(blocks(made.routers[1]).values()) > 100)
        first, second, late = made.routers
        await until(lambda: blocks(first) == blocks(second) == blocks(late))


async def test_a_worker_may_be_heard_through_a_relay_and_another_not(server: NatsServer) -> None:
    async with group(engines=2, routers=0, nats={"servers": [server.url]}) as made:
        made.tables["workers"][1]["relayed"] = True
        router = await made.add_router()
        first, second = router.fleet.ranks.values()
        await until(lambda: first.stream is StreamState.LIVE)
        assert second.stream is not StreamState.LIVE
        async with relay_for(made, server):
            await until(lambda: hears(router))


async def test_the_relay_command_relays(server: NatsServer) -> None:
    """As a user starts it; killed, and started again beside a warm engine."""
    async with group(engines=1, routers=0, **relayed(server)) as made:
        made.tables["workers"] = [{"url": made.engines[0].url, "name": "gpu1"}]
        flags = [f"--engine=gpu1={made.engines[0].url}", f"--nats={server.url}"]
        router = await made.add_router()
        async with command("relay", *flags) as relay:
            await relay.line_with(f"relaying {made.engines[0].url} as worker gpu1")
            await until(lambda: hears(router))
            await made.chat(router, TEXT)
            await until(lambda: sum(blocks(router).values()) > 10)
            before = blocks(router)
            await relay.stop(signal.SIGKILL)
        async with command("relay", *flags) as relay:
            await relay.line_with("relaying")
            await made.chat(router, "something else " * 40)
            await until(lambda: sum(blocks(router).values()) > sum(before.values()))
            assert hears(router)


async def test_an_engine_that_restarts_leaves_no_phantoms(server: NatsServer) -> None:
    """R5: it restarts on the same address while a new router starts."""
    async with group(engines=1, routers=1, **relayed(server)) as made, relay_for(made, server):
        (router,) = made.routers
        await until(lambda: hears(router))
        await made.chat(router, TEXT)
        await until(lambda: sum(blocks(router).values()) > 10)
        (engine,) = made.engines
        starting = asyncio.create_task(made.add_router())
        await engine.restart()
        late = await starting
        await until(lambda: sum(blocks(router).values()) == 0)
        await until(lambda: sum(blocks(late).values()) == 0)
        await made.chat(router, "after the restart " * 30)
        await until(lambda: 0 < sum(blocks(router).values()) == sum(blocks(late).values()))


async def test_an_engine_whose_events_moved_leaves_no_phantoms(server: NatsServer) -> None:
    """E19: it is back at its URL, but publishes at other ports; the relay must let go as well."""
    async with group(engines=1, routers=1, **relayed(server)) as made, relay_for(made, server):
        (router,) = made.routers
        await until(lambda: hears(router))
        await made.chat(router, TEXT)
        await until(lambda: sum(blocks(router).values()) > 10)
        (old,) = made.engines
        await old.kill()
        (worker,) = router.fleet.workers.values()
        await until(lambda: worker.state == "unreachable")
        moved = SimServer(replace(old.settings, port=old.port))
        await moved.start()
        try:
            await until(lambda: worker.state == "ready" and hears(router))
            await until(lambda: sum(blocks(router).values()) == 0)
            await made.chat(router, "after the move " * 30)
            await until(lambda: sum(blocks(router).values()) > 5)
            late = await made.add_router()
            await until(lambda: blocks(late) == blocks(router))
        finally:
            await moved.stop()


@pytest.mark.parametrize("api_key", [None, "key"])
async def test_an_engine_that_is_back_at_once_with_fewer_ranks_is_announced_so(
    server: NatsServer, api_key: str | None
) -> None:
    """E19: routers that ask it learn that, and those that only know it from its relay."""
    settings = engine_settings(dp_size=2, api_key=api_key)
    async with group(engines=1, routers=0, settings=settings, nats={}) as made:
        (old,) = made.engines
        tables = router_tables([old.url], {"nats": {"servers": [server.url]}})
        tables["workers"][0]["api_key"] = api_key
        tables["health"]["failures"] = 100
        discovering = tables | {"workers": []}
        discovering["nats"] = {"servers": [server.url], "discover": True}
        async with (
            relaying(parse_config(tables)) as relay,
            running(parse_config(discovering)) as router,
        ):
            await until(lambda: len(router.fleet.ranks) == 2 and hears(router))
            first, second = router.fleet.ranks
            (worker,) = router.fleet.workers.values()
            index = router.fleet.pools["tiny"].index
            await _stored(old)
            await until(lambda: index.blocks(first) > 0 < index.blocks(second))
            await old.kill()
            fewer = SimServer(replace(old.settings, port=old.port, dp_size=1))
            fewer._ports = old._ports
            await fewer.start()
            try:
                await until(lambda: worker.ranks == (first,))
                assert worker.state == "ready"
                await until(lambda: blocks(router).get(first) == 0 and hears(router))
                assert index.blocks(second) == 0
                async with running(parse_config(discovering)) as late:
                    await until(lambda: list(late.fleet.ranks) == [first] and hears(late))
                await _stored(fewer)
                await until(lambda: index.blocks(first) > 0)
                assert relay.streams[second].blocks == 0
            finally:
                await fewer.stop()


async def _stored(engine: SimServer) -> None:
    """Make all ranks of an engine store something."""
    headers = {"Authorization": f"Bearer {engine.settings.api_key}"}
    async with aiohttp.ClientSession(engine.url, headers=headers) as session:
        for number in range(len(engine.ranks)):
            async with session.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": TEXT, "max_tokens": 1},
                headers={"X-data-parallel-rank": str(number)},
            ) as response:
                assert response.status == 200


async def test_a_relay_says_once_that_an_engine_is_gone_and_when_it_is_back(
    server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger=SERVICE)

    def lines(level: int) -> list[str]:
        return [
            record.getMessage()
            for record in caplog.records
            if record.name == SERVICE and record.levelno == level and "engine" in record.msg
        ]

    async with group(engines=1, routers=0, **relayed(server)) as made:
        (engine,) = made.engines
        await engine.kill()
        async with relay_for(made, server):
            await until(lambda: len(lines(logging.DEBUG)) > 1)  # it has tried again and again
            (warning,) = lines(logging.WARNING)
            assert engine.url in warning
            assert "/v1/models" in warning
            await engine.restart()
            await until(lambda: len(lines(logging.INFO)) == 1)
            await engine.kill()
            await until(lambda: len(lines(logging.DEBUG)) > 3)
            assert "/health" in lines(logging.WARNING)[1]
            await engine.restart()
            await until(lambda: len(lines(logging.INFO)) == 2)
        assert len(lines(logging.WARNING)) == 2


async def test_workers_come_and_go_as_relays_announce_them(server: NatsServer) -> None:
    """A router without any configured worker, before and after there is a relay."""
    async with group(
        engines=2, routers=0, nats={"servers": [server.url], "discover": True}
    ) as made:
        engines, made.tables["workers"] = made.tables["workers"], []
        made.engines, hidden = [], made.engines
        router = await made.add_router()
        made.engines, made.tables["workers"] = hidden, engines
        assert not router.fleet.workers
        assert router.link is not None
        subjects = Subjects("kvrouter")
        for name, url in IMPOSSIBLE:
            announcement = encode_announcement(Announcement(name, url, 60.0))
            router.link.publish(subjects.worker("somebody"), announcement)
        async with relay_for(made, server):
            await until(lambda: len(router.fleet.ranks) == 2 and hears(router))
            made.tables["workers"] = []
            late = await made.add_router()
            await until(lambda: len(late.fleet.ranks) == 2 and hears(late))
            await until(lambda: router.fleet.pools["tiny"].tokenizer is not None)
            assert (await made.chat(router, TEXT)).status == 200
        assert (await made.chat(router, TEXT)).status == 200  # the relay may be about to return
        async with relay_for(made, server):
            await until(lambda: hears(router) and hears(late))
        for engine in made.engines:
            await engine.stop()
        await until(lambda: not router.fleet.workers and not late.fleet.workers)
        assert (await made.chat(router, TEXT)).status == 503


async def test_an_engine_without_events_is_announced_too(server: NatsServer) -> None:
    """There is nothing to relay, but it can take requests."""
    silent = replace(engine_settings(), kv_events_port=None)
    discover = {"servers": [server.url], "discover": True}
    async with (
        group(engines=1, routers=0, settings=silent, nats=discover) as made,
        relay_for(made, server),
    ):
        made.tables["workers"] = []
        router = await made.add_router()
        await until(lambda: len(router.fleet.ranks) == 1)
        await until(lambda: router.fleet.pools["tiny"].tokenizer is not None)
        assert (await made.chat(router, TEXT)).status == 200


async def test_a_worker_that_does_not_tell_what_it_is_is_known_from_its_relay(
    server: NatsServer,
) -> None:
    """The engine wants a key: the relay beside it has it, and the routers don't."""
    async with group(
        engines=1, routers=0, nats={"servers": [server.url], "discover": True}
    ) as made:
        (engine,) = made.engines
        engine.settings = replace(engine.settings, api_key="key")
        tables = router_tables([engine.url], {"nats": {"servers": [server.url]}})
        tables["workers"][0]["api_key"] = "key"
        made.tables["workers"] = []
        async with relaying(parse_config(tables)) as relay:
            router = await made.add_router()
            (worker,) = router.fleet.workers.values()
            await until(lambda: hears(router))
            known = worker.facts
            relay.announce(worker.name, engine.url, replace(known, capacity_blocks=7))
            await until(lambda: worker.facts.capacity_blocks == 7)
            relay.announce(worker.name, engine.url, known)
            await until(lambda: worker.facts == known)
            assert any("401" in note and "its relay" in note for note in worker.facts.notes)
            engine.settings = replace(engine.settings, api_key=None)
            assert (await made.chat(router, TEXT)).status == 200
            await until(lambda: sum(blocks(router).values()) > 0)
            told = worker.facts
            plain = (await learn(made.session, worker.config)).facts
        assert (told.models, told.block_size) == (plain.models, plain.block_size)
        assert (told.capacity_blocks, set(told.events)) == (
            plain.capacity_blocks,
            set(plain.events),
        )


@pytest.mark.slow
async def test_a_nats_that_hangs_costs_no_request_of_announced_workers(server: NatsServer) -> None:
    """R3: for longer than a lease lasts, and than it takes to see that it hangs."""
    async with group(
        engines=2, routers=0, nats={"servers": [server.url], "discover": True}
    ) as made:
        engines, made.tables["workers"] = made.tables["workers"], []
        made.engines, hidden = [], made.engines
        router = await made.add_router()
        made.engines, made.tables["workers"] = hidden, engines
        async with relay_for(made, server):
            await until(lambda: len(router.fleet.ranks) == 2 and hears(router))
            server.send_signal(signal.SIGSTOP)
            ends_at = time.monotonic() + 20.0
            try:
                while time.monotonic() < ends_at:
                    assert (await made.chat(router, TEXT)).status == 200
                    await asyncio.sleep(0.1)
            finally:
                server.send_signal(signal.SIGCONT)
            await until(lambda: hears(router), deadline_s=30.0)
            assert len(router.fleet.workers) == 2
