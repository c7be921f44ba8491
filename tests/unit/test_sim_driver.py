"""The driver: a core in real time."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from events import BlocksStored, Event
from kvrouter.sim import CoreSettings, EngineCore, EngineRequest, LinearTiming
from kvrouter.sim.driver import Driver, EngineDiedError
from kvrouter.sim.engine import RequestTooLongError
from kvrouter.sim.faults import Faults


def request(name: str, length: int = 9, outputs: int = 3) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=range(length), outputs=range(outputs))


@asynccontextmanager
async def driver(
    speed: float = math.inf, faults: Faults | None = None, step_s: float = 0.005
) -> AsyncIterator[tuple[Driver, list[Event]]]:
    events: list[Event] = []
    core = EngineCore(CoreSettings(block_size=4, num_blocks=17, max_model_len=64))
    timing = LinearTiming(base_s=step_s, prefill_token_s=0, decode_sequence_s=0)
    running = Driver(core, timing, speed=speed, faults=faults or Faults(), publish=events.extend)
    task = asyncio.create_task(running.run())
    try:
        yield running, events
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        core.check()


async def test_outputs_of_several_requests_come_as_one_stream() -> None:
    requests = [request("a"), request("b")]
    async with driver() as (running, _), running.running(requests) as outputs:
        seen = [(o.request_id, o.position) async for o in outputs]
    assert sorted(seen) == [(name, position) for name in "ab" for position in range(3)]


async def test_events_are_published_before_the_outputs_of_their_step() -> None:
    async with driver() as (running, events), running.running([request("a")]) as outputs:
        await anext(outputs)
        assert any(isinstance(event, BlocksStored) for event in events)


async def test_leaving_early_aborts_what_is_left() -> None:
    async with driver() as (running, _):
        async with running.running([request("a", outputs=50)]) as outputs:
            await anext(outputs)
        assert await running.call(lambda core: core.running) == 0
        assert running.core.counters.aborted == 1


async def test_a_command_waits_for_the_end_of_the_step() -> None:
    one = [request("a", outputs=1)]
    async with driver(speed=1.0, step_s=0.05) as (running, _), running.running(one) as outputs:
        await asyncio.sleep(0)
        assert await running.call(lambda core: core.clear_cache())
        assert (await anext(outputs)).finished


async def test_a_step_takes_its_time_divided_by_the_speed() -> None:
    loop = asyncio.get_running_loop()
    async with driver(speed=2.0, step_s=0.02) as (running, _):
        start = loop.time()
        async with running.running([request("a", outputs=10)]) as outputs:
            assert len([output async for output in outputs]) == 10
        assert loop.time() - start >= 0.1


async def test_a_slowed_engine_takes_longer() -> None:
    loop = asyncio.get_running_loop()
    async with driver(speed=1.0, step_s=0.01, faults=Faults(slow_factor=10)) as (running, _):
        start = loop.time()
        async with running.running([request("a", outputs=1)]) as outputs:
            await anext(outputs)
        assert loop.time() - start >= 0.1


async def test_time_spent_idle_is_not_caught_up() -> None:
    loop = asyncio.get_running_loop()
    async with driver(speed=1.0, step_s=0.02) as (running, _):
        await asyncio.sleep(0.05)
        start = loop.time()
        async with running.running([request("a", outputs=1)]) as outputs:
            await anext(outputs)
        assert loop.time() - start >= 0.02


async def test_a_dying_engine_tells_its_requests() -> None:
    async with driver(speed=0.001) as (running, _), running.running([request("a")]) as outputs:
        running.die()
        with pytest.raises(EngineDiedError):
            await anext(outputs)


async def test_a_request_that_cannot_run_starts_none_of_its_siblings() -> None:
    async with driver() as (running, _):
        with pytest.raises(RequestTooLongError):
            async with running.running([request("a"), request("b", length=99)]):
                pytest.fail("it started")
        assert await running.call(lambda core: core.idle)
