"""Keeping a worker: what probes of its health make of it."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.fleets import FakeSource, new_fleet
from support.prompts import prompt_of
from support.stack import until

from events import BlocksStored, EventBatch, WorkerRank
from events.stream import ResyncReason, StreamState
from kvrouter.breaker import Answer
from kvrouter.config import BreakerConfig, HealthConfig, RankEvents, WorkerConfig
from kvrouter.fleet import Fleet
from kvrouter.health import Keeper
from kvrouter.listening import EventSource, Listeners
from kvrouter.load import Outcome
from kvrouter.proof import Measurement
from kvrouter.supervision import background
from kvrouter.workers import ServedModel, Worker, WorkerEvent, WorkerFacts, WorkerState

MODELS, SOURCES, METRICS, HEALTH = "/v1/models", "/kv_event_sources", "/metrics", "/health"
CACHE = 'vllm:cache_config_info{block_size="%d",num_gpu_blocks="%d"} 1.0\n'


def sources(*ports: int) -> dict[str, dict[str, Any]]:
    """What an engine tells of ranks that publish at these ports."""
    return {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
            "replay_endpoint": f"tcp://*:{port + 1000}",
        }
        for rank, port in enumerate(ports)
    }


@dataclass
class Engine:
    """Answers probes with the next of `statuses`, and with 200 when there is none.

    What else it is asked, with what it says, or with the status in `failing`; a 0 there is no
    answer at all.
    """

    model: str = "m"
    sources: dict[str, dict[str, Any]] | None = None
    metrics: str = CACHE % (16, 101)
    statuses: deque[int] = field(default_factory=deque)
    failing: dict[str, int] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)

    @property
    def joined(self) -> int:
        return self.asked[MODELS]

    @property
    def probed(self) -> int:
        return self.asked[HEALTH]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] += 1
        if request.path == HEALTH:
            return web.Response(status=self.statuses.popleft() if self.statuses else 200)
        status = self.failing.get(request.path)
        if status is not None:
            if not status:
                await asyncio.sleep(60)
            return web.Response(status=status)
        if request.path == MODELS:
            return web.json_response({"data": [{"id": self.model}]})
        if request.path == METRICS:
            return await self._metrics_in_pieces(request)
        return web.Response(status=404) if self.sources is None else web.json_response(self.sources)

    async def _metrics_in_pieces(self, request: web.Request) -> web.StreamResponse:
        """As they come over a network: the important part last."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"# a long page of others\n" * 10)
        await asyncio.sleep(0.005)
        await response.write(self.metrics.encode())
        return response


class Source(FakeSource):
    """Runs for ever."""

    async def run(self) -> None:
        await asyncio.Event().wait()


@dataclass
class Kept:
    """A worker, who keeps it, and the sources that were made for it."""

    engine: Engine
    worker: Worker
    fleet: Fleet
    sources: list[tuple[WorkerRank, Source]]

    async def looked_at(self) -> None:
        """Cast doubt on the worker and wait until it was looked at, and probed once more."""
        asked = self.engine.joined
        self.worker.doubt.arise()
        await until(lambda: self.engine.joined > asked)
        await self.probed()

    async def probed(self) -> None:
        probed = self.engine.probed
        await until(lambda: self.engine.probed > probed + 1)


@asynccontextmanager
async def keeping(
    engine: Engine,
    *,
    failures: int = 1,
    timeout_s: float = 10.0,
    told: WorkerFacts | None = None,
    **config: Any,
) -> AsyncIterator[Kept]:
    """An engine and the worker that is kept for it, once it has joined."""
    app, fleet = web.Application(), new_fleet()
    app.router.add_get("/{path:.*}", engine.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    worker = fleet.add(WorkerConfig(url=url, **config))
    worker.told = told
    made: list[tuple[WorkerRank, Source]] = []

    def make_source(rank: WorkerRank, events: RankEvents) -> EventSource:
        del events
        made.append((rank, Source()))
        return made[-1][1]

    settings = HealthConfig(interval_s=0.01, failures=failures, timeout_s=timeout_s)
    listeners = Listeners(worker.name, fleet, make_source)
    async with aiohttp.ClientSession() as session:
        keeper = Keeper(worker, fleet, listeners, session, settings)
        async with background({"keeper": keeper.run}):
            try:
                await until(lambda: worker.state is WorkerState.READY)
                yield Kept(engine, worker, fleet, made)
                fleet.check()
            finally:
                await runner.cleanup()


@asynccontextmanager
async def kept(
    failures: int = 1, block_size: int | None = None, capacity_blocks: int | None = None
) -> AsyncIterator[tuple[Engine, Worker]]:
    """An engine without events."""
    async with keeping(
        Engine(), failures=failures, block_size=block_size, capacity_blocks=capacity_blocks
    ) as made:
        yield made.engine, made.worker


async def test_probes_that_fail_now_and_then_are_no_outage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only so many in a row are; an engine is busy at times."""
    async with kept(failures=3) as (engine, worker):
        engine.statuses.extend([503, 503, 200] * 5)
        await until(lambda: not engine.statuses)
        probed = engine.probed
        await until(lambda: engine.probed > probed + 1)
        assert worker.state is WorkerState.READY
        assert "unreachable" not in caplog.text


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


# Looking again


def stored(*names: int) -> EventBatch:
    tokens = list(range(16 * len(names)))
    return EventBatch(
        0.0, [BlocksStored(block_hashes=list(names), token_ids=tokens, block_size=16)]
    )


PROMPT = range(1000, 1033)


class Known:
    """What is known of a worker's ranks, and two requests that run there."""

    def __init__(self, kept: Kept) -> None:
        fleet = self.fleet = kept.fleet
        self.ranks = kept.worker.ranks
        self.states = dict(fleet.ranks)
        self.leases = []
        pool = self.pool = fleet.pools["m"]
        for rank in self.ranks:
            fleet.on_batch(rank, stored(1, 2))
            fleet.on_state(rank, StreamState.LIVE)
            fleet.ranks[rank].proof.observe(Measurement(32, 32, 40, 40))
            placement = pool.scheduler.place(prompt_of(PROMPT), [rank], 0.0)
            self.leases.append(placement.lease)
        kept.worker.breaker.record(Answer.FAILURE, 0.0)
        self.sources = list(kept.sources)

    def stays(self, rank: WorkerRank) -> bool:
        """Whether all of it is still so."""
        state = self.fleet.ranks.get(rank)
        decision = self.pool.scheduler.decide(prompt_of(PROMPT), [rank], 0.0)
        return (
            state is self.states[rank]
            and state.proof.verdict == "exact"
            and state.stream is StreamState.LIVE
            and self.pool.index.blocks(rank) == 2
            and decision.chosen.held_blocks > 0
            and self.fleet.load.of(rank).active_requests == 1
            and (rank, state.source) in self.sources
        )

    def settle(self) -> None:
        """The requests end; each counts once."""
        settled = self.fleet.load.totals.settled.get(Outcome.OK, 0)
        for lease in self.leases:
            assert lease.settle(Outcome.OK, 1.0)
        totals = self.fleet.load.totals
        assert totals.settled[Outcome.OK] == settled + len(self.leases)
        assert (totals.active_requests, totals.prefill_tokens, totals.decode_tokens) == (0, 0, 0)


async def test_nothing_happens_to_a_worker_that_is_what_it_was() -> None:
    """A blip of the network: its events were lost for a moment, and are there again."""
    async with keeping(Engine(sources=sources(5557, 5558)), failures=99) as made:
        known = Known(made)
        await made.looked_at()
        assert all(known.stays(rank) for rank in known.ranks)
        assert made.sources == known.sources
        assert not any(source.resyncs for _, source in made.sources)
        for _ in range(BreakerConfig().failures - 1):
            made.worker.breaker.record(Answer.FAILURE, 0.0)
        assert made.worker.breaker.state == "open"  # it remembers the one before
        known.settle()


@pytest.mark.parametrize(
    ("path", "status"),
    [(SOURCES, 503), (SOURCES, 429), (SOURCES, 0), (METRICS, 500), (METRICS, 0)],
)
async def test_a_question_that_fails_for_a_moment_costs_nothing_and_is_asked_again(
    path: str, status: int
) -> None:
    """A busy engine: no answer in time, or that it has none now."""
    engine, timeout_s = Engine(sources=sources(5557, 5558)), 10.0 if status else 0.5
    async with keeping(engine, failures=99, timeout_s=timeout_s) as made:
        known, facts = Known(made), made.worker.facts
        made.engine.failing[path] = status
        await made.looked_at()
        assert made.worker.facts == facts
        assert all(known.stays(rank) for rank in known.ranks)
        made.engine.failing.clear()
        made.engine.sources, made.engine.metrics = sources(5557), CACHE % (16, 201)
        await until(lambda: len(made.worker.ranks) == 1)
        await until(lambda: made.worker.facts.capacity_blocks == 200)
        known.settle()


async def test_models_that_cannot_be_had_for_a_moment_cost_nothing() -> None:
    async with keeping(Engine(sources=sources(5557)), failures=2) as made:
        known, facts = Known(made), made.worker.facts
        made.engine.failing[MODELS] = 503
        await made.looked_at()
        await made.probed()
        assert (made.worker.state, made.worker.facts) == (WorkerState.READY, facts)
        assert known.stays(made.worker.ranks[0])
        made.engine.failing.clear()
        made.engine.model = "n"
        await until(lambda: made.worker.facts.base_model == "n")


async def test_a_refusal_is_an_answer() -> None:
    """Another engine, an older one: it has no such route."""
    async with keeping(Engine(sources=sources(5557, 5558))) as made:
        made.engine.failing[SOURCES] = 404
        await made.looked_at()
        assert made.worker.facts.events == {0: None}
        assert "no KV events" in made.worker.facts.notes[0]
        assert made.fleet.ranks[made.worker.ranks[0]].source is None


async def test_a_rank_that_is_gone_goes_with_all_that_was_known_of_it_and_the_others_stay() -> None:
    """Its request runs on, if anywhere, and its booking is settled once."""
    async with keeping(Engine(sources=sources(5557, 5558)), failures=99) as made:
        known = Known(made)
        first, second = known.ranks
        made.engine.sources = sources(5557)
        await made.looked_at()
        assert known.stays(first)
        assert made.worker.ranks == (first,)
        assert list(made.fleet.ranks) == [first]
        assert known.pool.index.blocks(second) == 0
        assert made.fleet.load.of(second).active_requests == 0
        assert known.pool.candidates("m", (), 0.0) == [first]
        made.engine.sources = sources(5557, 5558)
        await made.looked_at()
        assert made.fleet.ranks[second] is not known.states[second]
        decision = known.pool.scheduler.decide(prompt_of(PROMPT), [second], 0.0)
        assert decision.chosen.held_blocks == 0
        known.settle()


async def test_another_model_behind_the_same_address_begins_with_what_the_engine_tells_again() -> (
    None
):
    """What it stored before it was learned anew went to the old model's index."""
    async with keeping(Engine(sources=sources(5557)), failures=99) as made:
        known = Known(made)
        (rank,) = known.ranks
        made.engine.model = "n"
        await made.looked_at()
        assert made.fleet.pool_of(made.worker.name) is made.fleet.pools["n"]
        assert known.pool.index.blocks(rank) == 0
        assert made.sources == known.sources
        assert made.sources[0][1].resyncs == 1
        made.fleet.on_resync(rank, ResyncReason.REQUESTED)
        assert made.fleet.ranks[rank].proof.verdict == "blind"
        assert made.fleet.load.of(rank).active_requests == 1
        known.settle()


async def test_a_worker_that_joined_without_all_answers_is_asked_again() -> None:
    """It was busy when the router started."""
    engine = Engine(sources=sources(5557, 5558), failing={SOURCES: 503, METRICS: 503})
    async with keeping(engine) as made:
        assert made.worker.facts.events == {0: None}
        assert [SOURCES in note or METRICS in note for note in made.worker.facts.notes] == [
            True
        ] * 2
        engine.failing.clear()
        await until(lambda: len(made.worker.ranks) == 2)
        assert made.worker.facts.notes == ()
        assert (made.worker.facts.block_size, made.worker.facts.capacity_blocks) == (16, 100)


async def test_what_is_no_worker_any_more_gets_nothing() -> None:
    """Another server took its address: it is well, but wants a key that we don't have."""
    async with keeping(Engine(sources=sources(5557)), failures=2) as made:
        made.engine.failing[MODELS] = 401
        made.worker.doubt.arise()
        await until(lambda: made.worker.state is not WorkerState.READY)
        assert "API key" in made.worker.problem
        made.engine.failing.clear()
        await until(lambda: made.worker.state is WorkerState.READY)


async def test_a_drained_worker_is_learned_anew_when_it_is_back() -> None:
    """It gets no requests meanwhile; what it is made into is nobody's business until then."""
    async with keeping(Engine(sources=sources(5557, 5558))) as made:
        made.worker.happened(WorkerEvent.DRAIN)
        made.engine.sources = sources(5557)
        made.worker.doubt.arise()
        await made.probed()
        assert made.engine.joined == 1
        assert made.worker.state is WorkerState.DRAINING
        made.worker.happened(WorkerEvent.RESUME)
        await until(lambda: made.worker.state is WorkerState.READY)
        assert len(made.worker.ranks) == 1
        await made.probed()
        assert made.engine.joined == 2


async def test_configured_events_are_believed_whatever_the_engine_says() -> None:
    events = [RankEvents(endpoint=f"tcp://h:{rank}", dp_rank=rank) for rank in (0, 1)]
    async with keeping(Engine(sources=sources(5557)), kv_events=events) as made:
        known = Known(made)
        made.engine.failing[SOURCES] = 500
        await made.looked_at()
        await made.probed()
        assert all(known.stays(rank) for rank in known.ranks)
        assert made.engine.joined == 2  # nothing is missing
        made.engine.metrics = CACHE % (16, 201)
        await made.looked_at()
        assert made.worker.facts.capacity_blocks == 200
        assert all(known.stays(rank) for rank in known.ranks)
        known.settle()


TOLD = WorkerFacts(
    models=(ServedModel("m"),),
    events={rank: RankEvents(endpoint="relay", dp_rank=rank) for rank in (0, 1)},
    block_size=16,
)


async def test_a_relays_word_is_taken_where_the_engine_refuses_and_followed_when_it_changes() -> (
    None
):
    async with keeping(Engine(failing={MODELS: 401}), told=TOLD) as made:
        known = Known(made)
        first, _ = known.ranks
        await made.looked_at()
        assert all(known.stays(rank) for rank in known.ranks)
        made.worker.told = replace(TOLD, events={0: TOLD.events[0]})
        await made.looked_at()
        assert made.worker.ranks == (first,)
        assert known.stays(first)
        known.settle()


async def test_a_relays_word_is_not_taken_for_a_worker_that_does_not_answer_for_a_moment() -> None:
    """Its events would be looked for elsewhere, and all its blocks go."""
    async with keeping(Engine(sources=sources(5557, 5558)), told=TOLD) as made:
        known, facts = Known(made), made.worker.facts
        made.engine.failing[MODELS] = 500
        await made.looked_at()
        assert made.worker.facts == facts
        assert all(known.stays(rank) for rank in known.ranks)
