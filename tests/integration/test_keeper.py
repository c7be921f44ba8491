"""Keeping a worker: what probes of its health make of it."""

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from support.fleets import new_fleet
from support.stack import until

from events import WorkerRank
from kvrouter.config import HealthConfig, RankEvents, WorkerConfig
from kvrouter.health import Keeper
from kvrouter.listening import EventSource, Listeners
from kvrouter.supervision import background
from kvrouter.workers import Worker, WorkerState


class Engine:
    """Answers probes with the next of `statuses`, and with 200 when there is none."""

    def __init__(self) -> None:
        self.statuses: deque[int] = deque()
        self.joined = 0
        self.probed = 0

    async def models(self, _request: web.Request) -> web.Response:
        self.joined += 1
        return web.json_response({"data": [{"id": "m"}]})

    async def metrics(self, _request: web.Request) -> web.Response:
        return web.Response(
            text='vllm:cache_config_info{block_size="16",num_gpu_blocks="101"} 1.0\n'
        )

    async def health(self, _request: web.Request) -> web.Response:
        self.probed += 1
        return web.Response(status=self.statuses.popleft() if self.statuses else 200)


@asynccontextmanager
async def kept(
    failures: int = 1, block_size: int | None = None, capacity_blocks: int | None = None
) -> AsyncIterator[tuple[Engine, Worker]]:
    """An engine and the worker that is kept for it, once it has joined."""
    engine, app, fleet = Engine(), web.Application(), new_fleet()
    for path, answer in (
        ("/v1/models", engine.models),
        ("/metrics", engine.metrics),
        ("/health", engine.health),
    ):
        app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    worker = fleet.add(
        WorkerConfig(url=url, block_size=block_size, capacity_blocks=capacity_blocks)
    )

    def make_source(rank: WorkerRank, events: RankEvents) -> EventSource:
        raise AssertionError(f"{rank} has no events, not even {events}")

    settings = HealthConfig(interval_s=0.01, failures=failures)
    listeners = Listeners(worker.name, fleet, make_source)
    async with aiohttp.ClientSession() as session:
        keeper = Keeper(worker, fleet, listeners, session, settings)
        async with background({"keeper": keeper.run}):
            try:
                await until(lambda: worker.state is WorkerState.READY)
                yield engine, worker
            finally:
                await runner.cleanup()


async def test_probes_that_fail_now_and_then_are_no_outage() -> None:
    """Only so many in a row are; an engine is busy at times."""
    async with kept(failures=3) as (engine, worker):
        engine.statuses.extend([503, 503, 200] * 5)
        await until(lambda: not engine.statuses)
        probed = engine.probed
        await until(lambda: engine.probed > probed + 1)
        assert worker.state is WorkerState.READY
        assert engine.joined == 1


async def test_an_engine_that_says_it_is_ill_gets_nothing_until_it_is_well_and_learned_anew() -> (
    None
):
    async with kept(failures=3) as (engine, worker):
        engine.statuses.extend([500] * 8)
        await until(lambda: worker.state is WorkerState.UNREACHABLE)
        assert "500" in worker.problem
        assert len(engine.statuses) <= 5
        await until(lambda: worker.state is WorkerState.READY)
        assert not engine.statuses
        assert engine.joined == 2
        assert worker.problem == ""


@pytest.mark.parametrize(
    ("configured", "known"), [((None, None), (16, 100)), ((32, 7), (32, 7)), ((None, 7), (16, 7))]
)
async def test_what_is_configured_goes_before_what_the_engine_says(
    configured: tuple[int | None, int | None], known: tuple[int, int]
) -> None:
    """A hybrid model's metrics name another block size than its events have."""
    async with kept(block_size=configured[0], capacity_blocks=configured[1]) as (_, worker):
        assert (worker.facts.block_size, worker.facts.capacity_blocks) == known


async def test_a_health_route_that_is_missing_is_no_illness() -> None:
    """It answers, so it is there."""
    async with kept(failures=1) as (engine, worker):
        engine.statuses.extend([404] * 3)
        await until(lambda: not engine.statuses)
        assert worker.state is WorkerState.READY
        assert engine.joined == 1
