"""Bookings at the front door: settled once, for every way in which a request can end."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.stack import Stack, engine_settings, stack, until

import kvrouter.http.engine
from kvrouter.http.engine import EngineResponse
from kvrouter.load import Outcome
from kvrouter.sim.timing import LinearTiming

SLOW = LinearTiming(base_s=0.03, prefill_token_s=0.0, decode_sequence_s=0.0)


def settled(running: Stack, outcome: Outcome) -> int:
    return running.router.fleet.load.totals.settled.get(outcome, 0)


def active(running: Stack) -> int:
    return running.router.fleet.load.totals.active_requests


@asynccontextmanager
async def raw_request(
    running: Stack, *, stream: bool, content: str = "go", max_tokens: int = 200
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A chat sent over a plain socket, which the test can close when it likes."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "stream": stream,
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", running.router.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    try:
        yield reader, writer
    finally:
        writer.close()


async def gone(running: Stack) -> None:
    """Nothing is booked, and the engines have stopped working."""
    await running.settled()
    await until(lambda: all(engine.active == 0 for engine in running.engines))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_byte(stream: bool) -> None:
    """B1: the engine is still at the prompt."""
    async with stack(engine_settings()) as running:
        running.engines[0].faults.hang_before_first_byte = True
        async with raw_request(running, stream=stream):
            await until(lambda: active(running) == 1 and running.engines[0].active == 1)
        await gone(running)
        assert settled(running, Outcome.CLIENT_GONE) == 1


async def test_a_client_that_leaves_in_mid_stream_aborts_the_engines_request() -> None:
    """B1: the reader closes the browser tab."""
    async with stack(engine_settings(timing=SLOW)) as running:
        async with raw_request(running, stream=True) as (reader, _):
            await reader.readuntil(b"data: ")
            await reader.readuntil(b"data: ")
            assert active(running) == 1
        await gone(running)
        assert running.engines[0].aborted == 1
        assert settled(running, Outcome.CLIENT_GONE) == 1


async def test_a_client_that_leaves_at_the_last_chunk() -> None:
    """B1: the answer is whole, the client closes before it has read the end."""
    async with stack(engine_settings()) as running:
        for _ in range(20):
            async with raw_request(running, stream=True, max_tokens=1) as (reader, _):
                await reader.readuntil(b"finish_reason")
        await gone(running)
        total = settled(running, Outcome.OK) + settled(running, Outcome.CLIENT_GONE)
        assert total == 20


async def test_a_client_that_leaves_while_its_prompt_waits_to_be_tokenized() -> None:
    """B1: queued; such a request must never reach an engine."""
    tokenizer = {"threads": 1, "inline_bytes": 0}
    async with stack(engine_settings(), tokenizer=tokenizer) as running:
        queue = running.router.tokenizers
        free = threading.Event()
        busy = queue._threads.submit(free.wait, 30)  # the only thread
        try:
            async with raw_request(running, stream=True, content="LEAVES " * 1000):
                await until(lambda: queue.stats.requests == 1)
            await until(lambda: running.router.door.active_requests == 0)
        finally:
            free.set()
        await asyncio.wrap_future(busy)
        await until(lambda: queue.stats.requests == 0)
        await gone(running)
        assert not any(b"LEAVES" in each.body for each in running.posts(0))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_during_a_retry(stream: bool) -> None:
    """B1: the first worker refused, the second hangs."""
    async with stack() as running:
        first, second = (engine.faults for engine in running.engines)
        first.hang_before_first_byte = second.hang_before_first_byte = True
        second.refuse = first.refuse  # one refusal, by whoever is asked first
        first.refuse_next(503)
        async with raw_request(running, stream=stream):
            await until(lambda: sum(engine.active for engine in running.engines) == 1)
            await until(lambda: settled(running, Outcome.BACKPRESSURE) == 1)
            await until(lambda: active(running) == 1)
            assert len(running.posts(0)) == len(running.posts(1)) == 1
        await gone(running)
        assert settled(running, Outcome.CLIENT_GONE) == 1
        assert sum(engine.aborted for engine in running.engines) == 1


async def test_a_long_stream_stays_booked_and_grows() -> None:
    """B2: nothing expires while a client is being served."""
    async with stack(engine_settings(timing=SLOW)) as running:
        fleet = running.router.fleet
        async with raw_request(running, stream=True, max_tokens=60) as (reader, _):
            await reader.readuntil(b"data: ")
            before = fleet.load.totals.decode_tokens
            assert fleet.load.totals.prefill_tokens == 0
            await until(lambda: fleet.load.totals.decode_tokens >= before + 32)
            assert active(running) == 1
        await gone(running)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_that_is_silent_stays_booked(
    begun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: ten minutes without a byte, by the clock of every timer: a long prompt, a stuck tool."""
    skipped_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + skipped_s)
    async with stack(engine_settings()) as running:
        faults = running.engines[0].faults
        faults.hang_before_first_byte, faults.hang_after_chunks = not begun, 3
        async with raw_request(running, stream=begun) as (reader, _):
            await until(lambda: active(running) == running.engines[0].active == 1)
            if begun:
                await reader.readuntil(b"data: ")
            for _ in range(11):
                skipped_s += 60.0
                await asyncio.sleep(0.01)  # not for a state: turns, in which timers run
            assert active(running) == running.engines[0].active == 1
            assert running.router.fleet.load.totals.settled == {}
        await gone(running)
        assert settled(running, Outcome.CLIENT_GONE) == 1


async def test_a_worker_that_leaves_and_returns_while_requests_run() -> None:
    """B3: counts never become negative and end at 0."""
    async with stack(engine_settings(timing=SLOW)) as running:
        fleet = running.router.fleet
        async with raw_request(running, stream=True) as (reader, _):
            await reader.readuntil(b"data: ")
            worker = fleet.workers[running.name(0)]
            facts = worker.facts
            fleet.remove(worker.name)
            assert active(running) == 0
            fleet.workers[worker.name] = worker
            fleet.joined(worker, facts)
            response = await running.chat("next")
            assert response.status == 200
            fleet.check()
        await gone(running)
        assert fleet.load.totals.prefill_tokens == 0
        assert fleet.load.totals.decode_tokens == 0


async def test_health_checks_book_nothing() -> None:
    """B4."""
    async with stack() as running:
        for _ in range(100):
            async with running.session.get(running.url + "/health") as response:
                assert response.status == 200
        totals = running.router.fleet.load.totals
        assert totals.active_requests == 0
        assert not totals.settled


@pytest.mark.skipif(
    kvrouter.http.engine.__file__.endswith(".so"), reason="compiled methods can't be replaced"
)
async def test_an_error_while_the_engines_connection_is_closed_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B5: a bug of ours, or of the HTTP library, at the worst place."""

    def fail(_response: EngineResponse) -> None:
        raise RuntimeError("close failed")

    async with stack(engine_settings()) as running:
        monkeypatch.setattr(EngineResponse, "close", fail)
        async with raw_request(running, stream=True, max_tokens=2) as (reader, _):
            assert b"[DONE]" in await reader.read()
        monkeypatch.undo()
        await gone(running)
        assert settled(running, Outcome.INTERNAL_ERROR) == 1
        assert (await running.chat("hello")).status == 200


async def test_bookings_are_zero_after_a_storm_of_clients_that_leave_at_random() -> None:
    """B1, many times over, at moments that no one has thought of."""
    async with stack(engine_settings(timing=SLOW), engine_settings()) as running:

        async def one(number: int) -> None:
            async with raw_request(running, stream=number % 2 == 0, max_tokens=20) as (reader, _):
                try:
                    async with asyncio.timeout(0.003 * (number % 40)):
                        await reader.read(1000)
                except TimeoutError:
                    pass

        await asyncio.gather(*(one(number) for number in range(120)))
        await gone(running)
        assert sum(running.router.fleet.load.totals.settled.values()) <= 120
        assert running.router.door.active_requests == 0


async def test_a_refused_prompt_leaves_nothing_behind() -> None:
    """F7, C1: a client that sends too much, cuts it and sends it again."""
    async with stack() as running:
        prompt = list(range(300, 9300))
        url = f"{running.url}/v1/completions"
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
        async with running.session.post(url, json=body) as response:
            assert response.status == 400
        await running.settled()
        explained = await running.explain(**body | {"prompt": prompt[:4000]})
        assert [each["predicted_blocks"] for each in explained["candidates"]] == [0, 0]
        first, second = (each["cost"] for each in explained["candidates"])
        assert first == second
        for rank in running.router.fleet.ranks:
            load = running.router.fleet.load.of(rank)
            assert (load.prefill_rate, load.dispatched_tokens) == (0.0, 0.0)
        for number in range(20):
            await running.chat(f"{number} words of its own " * 20)
        assert min(len(running.posts(engine)) for engine in range(2)) >= 8


async def test_an_engine_that_is_too_busy_is_not_expected_to_hold_the_prompt() -> None:
    async with stack(engine_settings()) as running:
        running.engines[0].faults.refuse_next(503, 1)
        response = await running.chat("words " * 200)
        assert response.status == 503
        await running.settled()
        assert all(len(pool.predicted) == 0 for pool in running.router.fleet.pools.values())
