"""Engines that refuse, hang, die and come back; what clients notice of it."""

import asyncio
import errno
import json
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from support.stack import Stack, engine_settings, stack, until

from kvrouter.load import Outcome
from kvrouter.sim.faults import Faults
from kvrouter.sim.server import SimServer
from kvrouter.sim.settings import CoreSettings
from kvrouter.sim.timing import LinearTiming

SLOW = LinearTiming(base_s=0.02, prefill_token_s=0.0, decode_sequence_s=0.0)
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def outcomes(running: Stack, outcome: str) -> float:
    """How many attempts ended so, over all workers."""
    return sum(
        running.router.metrics.registry.get_sample_value(
            "kvrouter_attempts_total", {"worker": running.name(number), "outcome": outcome}
        )
        or 0.0
        for number in range(len(running.engines))
    )


async def stream(running: Stack, **fields: object) -> tuple[list[str], BaseException | None]:
    """The data lines of a streamed chat, and how its connection ended if not well."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "max_tokens": 20}
    lines: list[str] = []
    async with running.session.post(
        f"{running.url}/v1/chat/completions", json=body | STREAM | fields
    ) as response:
        try:
            async for line in response.content:
                if line.startswith(b"data: "):  # a list that grows: what came before an error
                    lines += [line.decode().removeprefix("data: ").strip()]
        except aiohttp.ClientError as error:
            return lines, error
    return lines, None


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_another_worker_gets_the_same_bytes_when_the_first_answers_badly(status: int) -> None:
    """F5: the first worker answers only after it has read the body."""
    async with stack() as running:
        for engine in running.engines:
            engine.faults.refuse_next(status)
        response = await running.chat("hello")
        refused = sum(1 - len(engine.faults.refuse) for engine in running.engines)
        assert refused == 2
        assert response.status == status
        for engine in running.engines:
            engine.faults.refuse.clear()
        running.engines[0].faults.refuse_next(status)
        running.engines[1].faults.refuse_next(status)
        running.engines[1].faults.refuse.clear()
        await until(lambda: not any(_backs_off(running, number) for number in (0, 1)))
        responses = [await running.chat(f"again {number}") for number in range(4)]
        assert [each.status for each in responses] == [200] * 4
        bodies = [each.body for number in (0, 1) for each in running.posts(number)]
        assert any(bodies.count(body) == 2 for body in bodies)


def _backs_off(running: Stack, engine: int) -> bool:
    worker = running.router.fleet.workers[running.name(engine)]
    return worker.breaker.backs_off_until > time.monotonic()


async def test_a_full_engine_is_backpressure_and_its_answer_is_passed_on() -> None:
    """F8: with one worker there is nobody else to ask."""
    async with stack(engine_settings()) as running:
        running.engines[0].faults.retry_after_s = 7
        running.engines[0].faults.refuse_next(503, times=20)
        for _ in range(20):
            response = await running.chat("hello")
            assert response.status == 503
            assert response.headers["Retry-After"] == "7"
        worker = running.router.fleet.workers[running.name(0)]
        assert worker.breaker.state == "closed"
        assert outcomes(running, "backpressure") == 20
        response = await running.chat("hello")
        assert response.status == 200


async def test_prompts_that_are_too_long_trip_nothing_and_are_not_retried() -> None:
    """F7: 400 is the client's fault, fifty times over."""
    short = engine_settings(core=CoreSettings(num_blocks=65, max_model_len=64))
    async with stack(short, short) as running:
        for _ in range(50):
            response = await running.chat("word " * 70)
            assert response.status == 400
        assert len(running.posts(0)) + len(running.posts(1)) == 50
        assert all(w.breaker.state == "closed" for w in running.router.fleet.workers.values())
        assert outcomes(running, "refused") == 50


async def test_an_engine_lost_in_mid_stream_ends_in_an_error_event_and_never_in_done() -> None:
    """F6: the connection breaks after three chunks."""
    async with stack(engine_settings()) as running:
        running.engines[0].faults.die_after_chunks = 3
        lines, error = await stream(running)
        assert json.loads(lines[-1])["error"]["code"] == "engine_failed"
        assert "[DONE]" not in lines
        assert error is not None
        assert outcomes(running, "engine_failed") == 1
        await running.settled()


async def test_a_dying_engines_error_chunk_and_done_are_passed_on_and_counted() -> None:
    """F6: a vLLM whose core dies says so in the stream, with status 200 and [DONE]."""
    async with stack(engine_settings()) as running:
        running.engines[0].faults.die_after_chunks = 3
        running.engines[0].faults.error_chunk = True
        lines, error = await stream(running)
        assert error is None
        assert lines[-1] == "[DONE]"
        assert "error" in json.loads(lines[-2])
        assert outcomes(running, "engine_failed") == 1


@pytest.mark.parametrize("how", ["lost", "error chunk", "silent"])
async def test_a_worker_whose_streams_all_break_off_is_left_alone_after_a_while(how: str) -> None:
    """F6: each begins well, and none is of any use."""
    breaker = {"failures": 2, "open_s": 30.0}
    async with stack(breaker=breaker, timeouts={"idle_s": 0.1}) as running:
        faults = running.engines[0].faults
        if how == "silent":
            faults.hang_after_chunks = 3
        else:
            faults.die_after_chunks, faults.error_chunk = 3, how == "error chunk"
        worker = running.router.fleet.workers[running.name(0)]
        for number in range(20):
            await stream(running, messages=[{"role": "user", "content": f"{number}"}])
            if worker.breaker.state == "open":
                break
        assert outcomes(running, "engine_failed") + outcomes(running, "timed_out") == 2
        for number in range(4):
            lines, error = await stream(
                running, messages=[{"role": "user", "content": f"{number} more"}]
            )
            assert (lines[-1], error) == ("[DONE]", None)
            assert "error" not in json.loads(lines[-2])
        assert len(running.posts(0)) == 2


async def test_a_unary_answer_that_breaks_off_is_no_whole_answer() -> None:
    """The engine dies while it sends a long body; the client must not take it for complete."""

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        writer.close()

    async with (
        stack(engine_settings()) as running,
        await asyncio.start_server(cut, "127.0.0.1", 0) as server,
    ):
        port = server.sockets[0].getsockname()[1]
        running.router.fleet.workers[running.name(0)].url = f"http://127.0.0.1:{port}"
        with pytest.raises(aiohttp.ClientPayloadError):
            await running.chat("hello")
        reader, writer = await asyncio.open_connection("127.0.0.1", running.router.port)
        body = b'{"model":"tiny","prompt":"a"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % len(body) + body)
        received = await reader.read()
        writer.close()
        assert received.endswith(b"\r\n\r\n{"), received  # no event in the middle of JSON


async def test_a_worker_that_is_lost_before_it_answers_is_made_good_by_another() -> None:
    """F6: it crashes over this very request, or is killed with it in its queue."""
    async with stack() as running:
        lost = 0

        async def vanish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal lost
            await reader.readuntil(b"\r\n\r\n")
            lost += 1
            writer.close()

        async with await asyncio.start_server(vanish, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            running.router.fleet.workers[running.name(0)].url = f"http://127.0.0.1:{port}"
            responses = [await running.chat(f"{number} hello") for number in range(4)]
        assert [each.status for each in responses] == [200] * 4
        assert lost >= 1
        assert len(running.posts(1)) == 4


async def test_a_dead_worker_is_passed_over_and_comes_back() -> None:
    """E19, at the front door: a worker is killed and started again at the same address."""
    async with stack() as running:
        await running.engines[0].kill()
        responses = [await running.chat(f"{number} hello") for number in range(10)]
        assert [each.status for each in responses] == [200] * 10
        worker = running.router.fleet.workers[running.name(0)]
        await until(lambda: worker.state == "unreachable")
        await running.engines[0].start()
        await until(lambda: worker.state == "ready" and worker.breaker.allows(time.monotonic()))
        names = set()
        for number in range(20):
            response = await running.chat(f"{number} back again")
            assert response.status == 200
            names.add(response.headers["x-kvrouter-worker"])
        assert names == {running.name(0), running.name(1)}


async def test_a_worker_whose_events_moved_is_heard_at_their_new_place_and_starts_cold() -> None:
    """E19: unreachable, then up elsewhere: the same URL, but events at other ports."""
    text = "what the old engine held " * 20
    async with stack(engine_settings()) as running:
        await running.chat(text)
        await running.caught_up()
        old = running.engines[0]
        fleet = running.router.fleet
        rank, state = next(iter(fleet.ranks.items()))
        worker, index = fleet.workers[rank.worker], fleet.pools["tiny"].index
        assert index.blocks(rank) > 0
        await old.kill()
        await until(lambda: state.stream == "connecting" and worker.state == "unreachable")
        moved = SimServer(replace(old.settings, port=old.port))
        running.engines[0] = moved
        await moved.start()
        try:
            assert not {each.ports for each in moved.ranks} & set(old._ports)
            await until(lambda: worker.state == "ready" and state.stream == "live")
            assert index.blocks(rank) == 0
            for cached in (False, True):
                response = await running.chat(text)
                usage = (await response.json())["usage"]
                reported = usage["prompt_tokens_details"]["cached_tokens"]
                assert int(response.headers["x-kvrouter-predicted-cached-tokens"]) == reported
                assert (reported > 0) == cached
                await running.caught_up()
        finally:
            await moved.stop()


@asynccontextmanager
async def replaced(running: Stack, **changes: Any) -> AsyncIterator[SimServer]:
    """Another engine at the address of the first, and with its event ports."""
    old = running.engines[0]
    await old.kill()
    new = SimServer(replace(old.settings, port=old.port, **changes), faults=Faults(), record=1000)
    new._ports = old._ports
    running.engines[0] = new
    await new.start()
    try:
        yield new
    finally:
        await new.stop()


async def test_an_engine_that_comes_back_at_once_with_fewer_ranks_is_learned_anew() -> None:
    """E19: away for less than probes notice; requests for the rank that is gone would fail."""
    health = {"interval_s": 0.1, "failures": 100}
    async with stack(engine_settings(dp_size=2), health=health) as running:
        fleet = running.router.fleet
        await until(lambda: all(each.stream == "live" for each in fleet.ranks.values()))
        worker = fleet.workers[running.name(0)]
        states = dict(fleet.ranks)
        async with replaced(running, dp_size=1):
            await until(lambda: len(worker.ranks) == 1)
            assert list(fleet.ranks) == list(worker.ranks)
            assert fleet.ranks[worker.ranks[0]] is states[worker.ranks[0]]
            for number in range(4):
                assert (await running.chat(f"{number} hello")).status == 200


async def test_an_engine_that_comes_back_at_once_with_another_model_is_heard_from_its_start() -> (
    None
):
    """E19: what it stored before it was learned anew is known of the new model, too."""
    text = "a text that two models may be asked about " * 20
    health = {"interval_s": 0.5, "failures": 100}
    async with stack(engine_settings(), health=health) as running:
        assert (await running.chat(text)).status == 200
        await running.caught_up()
        fleet = running.router.fleet
        async with replaced(running, model="other") as engine:
            body = {"model": "other", "prompt": text, "max_tokens": 1}
            async with running.session.post(f"{engine.url}/v1/completions", json=body) as response:
                assert response.status == 200
            await until(lambda: "other" in fleet.pools)
            (rank,) = fleet.ranks
            assert fleet.pools["tiny"].index.blocks(rank) == 0
            await until(lambda: fleet.pools["other"].index.blocks(rank) > 5)
            await until(lambda: fleet.pools["other"].tokenizer is not None)
            response = await running.chat(text, model="other")
            assert response.status == 200


async def test_requests_that_run_on_a_rank_end_well_when_it_is_learned_to_be_gone() -> None:
    """An engine that is scaled down lets its last requests finish."""
    slow = engine_settings(dp_size=2, timing=SLOW)
    async with stack(slow) as running:
        fleet, (engine,) = running.router.fleet, running.engines
        streams = [asyncio.create_task(stream(running)) for _ in range(2)]
        await until(
            lambda: (
                all(fleet.load.of(rank).active_requests == 1 for rank in fleet.ranks)
                and engine.active == 2
            )
        )
        gone = engine.ranks.pop()
        (worker,) = fleet.workers.values()
        worker.doubt.arise()
        try:
            await until(lambda: len(worker.ranks) == 1)
            assert not any(each.done() for each in streams)
            for lines, error in await asyncio.gather(*streams):
                assert (lines[-1], error) == ("[DONE]", None)
                assert len(lines) > 20
        finally:
            engine.ranks.append(gone)
        assert outcomes(running, "ok") == 2
        assert fleet.load.totals.settled[Outcome.OK] == 2
        await running.settled()


async def test_a_restarted_engine_has_no_blocks_until_it_stores_some() -> None:
    """E11, at the front door: an engine restarts; its old blocks would attract prompts for ever."""
    text = "the same long prompt again and again " * 20
    async with stack(engine_settings()) as running:
        await running.chat(text)
        await running.caught_up()
        assert (await running.explain(model="tiny", prompt=text)) is not None
        fleet = running.router.fleet
        rank = next(iter(fleet.ranks))
        assert fleet.pools["tiny"].index.blocks(rank) > 0
        await running.engines[0].restart()
        await until(lambda: fleet.pools["tiny"].index.blocks(rank) == 0)
        await until(lambda: fleet.workers[rank.worker].state == "ready")
        response = await running.chat(text)
        assert response.status == 200
        assert response.headers["x-kvrouter-predicted-cached-tokens"] == "0"
        await running.caught_up()
        response = await running.chat(text)
        reported = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert int(response.headers["x-kvrouter-predicted-cached-tokens"]) == reported > 0


async def test_a_clear_that_is_not_published_yet_makes_the_rank_stale() -> None:
    """E14: an engine tells of a cleared cache only with its next step."""
    text = "a prompt that will be forgotten " * 20
    async with stack(engine_settings()) as running:
        await running.chat(text)
        await running.caught_up()
        async with running.session.post(running.engines[0].url + "/reset_prefix_cache") as reset:
            assert (await reset.json())["success"]
        state = next(iter(running.router.fleet.ranks.values()))
        response = await running.chat(text)
        assert int(response.headers["x-kvrouter-predicted-cached-tokens"]) > 0
        assert state.proof.verdict == "stale"
        await running.caught_up()
        await running.chat(text)
        assert state.proof.verdict == "exact"


async def test_each_deadline_is_its_own_and_others_are_unaffected() -> None:
    """F11: one worker accepts requests and never answers."""
    timeouts = {"first_byte_s": 0.5, "idle_s": 0.3, "connect_s": 0.2}
    async with stack(timeouts=timeouts) as running:
        running.engines[0].faults.hang_before_first_byte = True
        responses = await asyncio.gather(*(running.chat(f"{number}") for number in range(8)))
        statuses = sorted(each.status for each in responses)
        assert set(statuses) == {200, 504}
        assert all(
            each.headers["x-kvrouter-worker"] == running.name(1)
            for each in responses
            if each.status == 200
        )
        assert outcomes(running, "timed_out") == statuses.count(504)


async def test_a_stream_that_falls_silent_is_ended() -> None:
    """F11: the idle deadline, in the middle of a stream."""
    async with stack(engine_settings(), timeouts={"idle_s": 0.3}) as running:
        running.engines[0].faults.hang_after_chunks = 3
        lines, _ = await stream(running)
        assert "silent" in json.loads(lines[-1])["error"]["message"]
        assert outcomes(running, "timed_out") == 1
        await until(lambda: running.engines[0].active == 0)


async def test_a_black_holed_worker_costs_the_connect_deadline_and_then_another_is_tried() -> None:
    """F11: packets to a worker vanish; connections are never made."""
    connect_s = 0.4
    async with stack(timeouts={"connect_s": connect_s}) as running:
        blocked = _black_hole()
        try:
            address = blocked[0].getsockname()
            worker = running.router.fleet.workers[running.name(0)]
            worker.url = f"http://127.0.0.1:{address[1]}"
            delayed = 0
            for number in range(4):
                lost, started_at = outcomes(running, "engine_failed"), time.monotonic()
                response = await running.chat(f"{number} x")
                took_s = time.monotonic() - started_at
                assert response.status == 200
                assert response.headers["x-kvrouter-worker"] == running.name(1)
                if outcomes(running, "engine_failed") > lost:
                    delayed += 1
                    assert connect_s <= took_s < 4 * connect_s
                else:
                    assert took_s < connect_s
            assert delayed >= 1
            assert running.posts(0) == []
            assert len(running.posts(1)) == 4
        finally:
            for each in blocked:
                each.close()


def _black_hole() -> list[socket.socket]:
    """A listening socket whose queue of connections is full."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listener.getsockname())
        fillers.append(filler)
    return [listener, *fillers]


async def test_idle_connections_that_engines_close_cost_no_client_an_error() -> None:
    """F4: engines close idle connections just when the next burst comes."""
    async with stack(engine_settings(keep_alive_s=0.2)) as running:
        for burst in range(12):
            responses = await asyncio.gather(
                *(running.chat(f"{burst} {number}") for number in range(8))
            )
            assert [each.status for each in responses] == [200] * 8
            await asyncio.sleep(0.19 + 0.002 * burst)  # not for a state: the pause is the case


async def test_a_trial_whose_client_leaves_frees_the_way_for_the_next_one() -> None:
    """A broken worker's one trial request is given up by its client: that must not be the last."""
    breaker = {"failures": 1, "open_s": 0.05, "max_open_s": 0.05}
    async with stack(breaker=breaker) as running:
        breakers = [worker.breaker for worker in running.router.fleet.workers.values()]
        for engine in running.engines:
            engine.faults.refuse_next(500)
        assert (await running.chat("both break")).status == 500
        await until(lambda: all(each.allows(time.monotonic()) for each in breakers))
        for engine in running.engines:
            engine.faults.hang_before_first_byte = True
        trials = [asyncio.create_task(running.chat(f"trial {number}")) for number in range(2)]
        await until(lambda: [engine.active for engine in running.engines] == [1, 1])
        assert [each.state for each in breakers] == ["half_open"] * 2
        for trial in trials:
            trial.cancel()
        await running.settled()
        assert all(each.allows(time.monotonic()) for each in breakers)
        for engine in running.engines:
            engine.faults.hang_before_first_byte = False
        responses = [await running.chat(f"{number} again") for number in range(6)]
        assert {each.status for each in responses} == {200}
        assert len({each.headers["x-kvrouter-worker"] for each in responses}) == 2
        assert [each.state for each in breakers] == ["closed"] * 2


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engines_retry_after_keeps_requests_away_for_as_long_as_it_says(
    status: int,
) -> None:
    """F8: it is full and knows for how long; another worker answers meanwhile."""
    async with stack(breaker={"backoff_s": 0.01}) as running:
        full, other = running.engines
        full.faults.retry_after_s = 7
        full.faults.refuse_next(status, times=100)
        asked_at = time.monotonic()
        responses = [await running.chat(f"{number} hello") for number in range(12)]
        assert {each.status for each in responses} == {200}
        assert len(full.faults.refuse) == 99
        assert len(running.posts(1)) == 12
        breaker = running.router.fleet.workers[running.name(0)].breaker
        assert breaker.backs_off_until > asked_at + 6.9
        assert breaker.backs_off_until <= time.monotonic() + 7.1
        assert breaker.state == "closed"
        assert other.faults == Faults()


async def test_a_router_out_of_descriptors_blames_itself_and_no_worker() -> None:
    """F12: no socket for a new connection; the workers are well, and stay so for everybody."""

    async def no_connection(*_: object, sock: socket.socket | None = None, **__: object) -> None:
        if sock is not None:
            sock.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with stack(engine_settings(keep_alive_s=0.01), breaker={"failures": 2}) as running:
        worker = running.router.fleet.workers[running.name(0)]
        assert (await running.chat("makes the client's connection")).status == 200
        refused = 0

        async def is_refused() -> bool:
            nonlocal refused
            response = await running.chat("hello")
            if response.status == 200:
                return False  # over a connection that has rested
            refused += 1
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert "ulimit" in (await response.json())["error"]["message"]
            return True

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.get_running_loop(), "create_connection", no_connection)
            await until(is_refused)
            for _ in range(20):  # longer than it takes to find a worker unreachable by probes
                assert await is_refused()
                await asyncio.sleep(0.02)  # not for a state: time for probes
            assert worker.breaker.state == "closed"
            assert worker.state == "ready"
            assert worker.problem == ""
        assert outcomes(running, "internal_error") == refused
        assert outcomes(running, "engine_failed") == 0
        assert (await running.chat("hello")).status == 200


async def test_a_worker_that_never_answers_in_time_is_left_alone_after_a_while() -> None:
    """F11: each of its requests costs a client the whole deadline."""
    async with stack(
        timeouts={"first_byte_s": 0.1}, breaker={"failures": 2, "open_s": 30.0}
    ) as running:
        running.engines[0].faults.hang_before_first_byte = True
        worker = running.router.fleet.workers[running.name(0)]
        statuses = []
        for number in range(20):
            statuses.append((await running.chat(f"{number}")).status)
            if worker.breaker.state == "open":
                break
        assert statuses.count(504) == 2
        assert [(await running.chat(f"{number} more")).status for number in range(6)] == [200] * 6


async def test_a_slow_breaker_opens_and_requests_go_elsewhere_at_once() -> None:
    async with stack(breaker={"failures": 2, "open_s": 30.0}) as running:
        running.engines[0].faults.refuse_next(500, times=100)
        for number in range(12):
            assert (await running.chat(f"{number}")).status == 200
        worker = running.router.fleet.workers[running.name(0)]
        assert worker.breaker.state == "open"
        assert 100 - len(running.engines[0].faults.refuse) == 2


async def test_a_request_is_tried_so_often_and_no_more() -> None:
    """It may be the request that makes engines fail: it must not visit all of them."""
    engines = (engine_settings(), engine_settings(), engine_settings())
    async with stack(*engines, retries={"max_attempts": 2}) as running:
        for engine in running.engines:
            engine.faults.refuse_next(500)
        assert (await running.chat("hello")).status == 500
        assert sum(len(running.posts(number)) for number in range(3)) == 2


async def test_the_retry_budget_bounds_what_an_outage_multiplies() -> None:
    retries = {"budget_ratio": 0.0, "budget_reserve": 3.0}
    async with stack(retries=retries, breaker={"failures": 1000}) as running:
        for engine in running.engines:
            engine.faults.refuse_next(500, times=1000)
        for number in range(10):
            assert (await running.chat(f"{number}")).status == 500
        assert len(running.posts(0)) + len(running.posts(1)) == 13
