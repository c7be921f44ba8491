"""From an engine through its relay and a real nats-server into a router's index."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support import captures
from support.nats import connected, link_to, nats_server
from support.streams import eventually

from events import BlocksRemoved, BlocksStored, EventBatch, WorkerRank, decode_batch
from events.nats_link import NatsLink
from events.nats_source import NatsSource
from events.relayed import RELAY_SILENT_S, Head, encode
from events.stream import ResyncReason, StreamState, SubscriptionSettings
from events.subjects import Subjects
from indexer import RadixIndex, block_hashes
from indexer.hashing import RULE_VERSION
from kvrouter.demo.nats_server import NatsServer
from kvrouter.relay.service import Relay

RANK = WorkerRank("10.0.0.1:8000", 1)
SUBJECTS = Subjects("test")
SETTINGS = SubscriptionSettings(replay_timeout_s=0.3, replay_pause_s=0.5)


class Sink:
    """A router's index and what happened to it."""

    def __init__(self) -> None:
        self.index = RadixIndex()
        self.resyncs: list[ResyncReason] = []
        self.states: list[StreamState] = []

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        self.index.apply(rank, batch)

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        self.index.clear(rank)
        self.resyncs.append(reason)

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        del rank
        self.states.append(state)


@dataclass
class FaultyLink:
    """Loses, repeats and holds back what a relay publishes; the rest is a real link's."""

    link: NatsLink
    lose: Callable[[int], bool] = lambda _: False
    twice: Callable[[int], bool] = lambda _: False
    count: int = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.link, name)

    def publish(self, subject: str, payload: bytes, reply: str = "") -> bool:
        self.count += 1
        if self.lose(self.count):
            return False
        if self.twice(self.count):
            self.link.publish(subject, payload, reply)
        return self.link.publish(subject, payload, reply)


@dataclass
class Rig:
    """A server, a relay that is fed by hand, and the index that an engine's own stream makes."""

    server: NatsServer
    link: FaultyLink
    relay: Relay
    truth: RadixIndex = field(default_factory=RadixIndex)
    published: int = 0
    relay_silent_s: float = RELAY_SILENT_S
    rule: int = RULE_VERSION

    def publish(self, batch: EventBatch) -> None:
        self.truth.apply(RANK, batch)
        self.relay.on_batch(RANK, batch)

    def publish_some(self, count: int) -> None:
        """Blocks of chains, some of which go again."""
        for _ in range(count):
            self.published += 1
            tokens = [self.published % 7, self.published]
            stored = BlocksStored(
                block_hashes=[self.published * 2, self.published * 2 + 1],
                token_ids=tokens,
                block_size=1,
            )
            gone = BlocksRemoved(block_hashes=[self.published])
            self.publish(EventBatch(float(self.published), [stored, gone]))

    def equals(self, sink: Sink) -> bool:
        prompts = [block_hashes([n % 7, n], 1) for n in range(1, self.published + 1)]
        same = all(sink.index.match(p) == self.truth.match(p) for p in prompts)
        return same and sink.index.blocks(RANK) == self.truth.blocks(RANK)

    @asynccontextmanager
    async def source(self, **settings: int) -> AsyncIterator[tuple[NatsSource, Sink]]:
        sink, link = Sink(), link_to(self.server.url, **settings)
        source = NatsSource(
            RANK,
            sink,
            link,
            SUBJECTS,
            router="r",
            number=1,
            rule=self.rule,
            settings=SETTINGS,
            relay_silent_s=self.relay_silent_s,
        )
        async with connected(link):
            task = asyncio.create_task(source.run())
            yield source, sink
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with nats_server() as server:
        link = FaultyLink(link_to(server.url))
        relay = Relay(link, SUBJECTS)  # type: ignore[arg-type]  # it is one, as far as is needed
        relay.add(RANK)
        relay.on_state(RANK, StreamState.LIVE)
        async with connected(link.link):
            heads = asyncio.create_task(relay.run())
            yield Rig(server, link, relay)
            heads.cancel()
            await asyncio.gather(heads, return_exceptions=True)


async def test_what_an_engine_publishes_reaches_the_index(rig: Rig) -> None:
    async with rig.source() as (source, sink):
        rig.publish_some(100)
        await eventually(lambda: rig.equals(sink))
        assert source.state is StreamState.LIVE
        assert source.stats.last_seqno == 99
        assert sink.resyncs == []


async def test_a_router_that_starts_late_has_the_same_index(rig: Rig) -> None:
    """E12, R5: the engine has run for long, and no other router is there."""
    rig.publish_some(5000)
    async with rig.source() as (_, sink):
        await eventually(lambda: rig.equals(sink))
        rig.publish_some(10)
        await eventually(lambda: rig.equals(sink))


@pytest.mark.parametrize("name", captures.names())
async def test_every_recording_makes_the_same_index(rig: Rig, name: str) -> None:
    events = captures.load(name).events[:400]
    prompts: list[bytes] = []
    async with rig.source() as (_, sink):
        for event in events:
            batch = decode_batch(event.payload)
            rig.publish(batch)
            prompts += [
                block_hashes(each.token_ids, each.block_size)
                for each in batch.events
                if isinstance(each, BlocksStored) and each.token_ids and each.block_size
            ]
        stream = rig.relay.streams[RANK]
        await eventually(lambda: sink.index.blocks(RANK) == rig.truth.blocks(RANK))
        await eventually(
            lambda: all(sink.index.match(p) == rig.truth.match(p) for p in prompts[-300:])
        )
        assert stream.next == len(events)


async def test_batches_that_are_lost_are_asked_for(rig: Rig) -> None:
    """E5: one in ten is lost on the way."""
    async with rig.source() as (source, sink):
        await eventually(lambda: source.state is StreamState.LIVE)
        rig.link.lose = lambda count: count % 10 == 0
        rig.publish_some(200)
        rig.link.lose = lambda _: False
        await eventually(lambda: rig.equals(sink))
        assert source.stats.gaps > 0
        assert sink.resyncs == []


async def test_a_lost_last_batch_is_noticed(rig: Rig) -> None:
    async with rig.source() as (source, sink):
        await eventually(lambda: source.state is StreamState.LIVE)
        rig.link.lose = lambda _: True
        rig.publish_some(1)
        rig.link.lose = lambda _: False
        await eventually(lambda: rig.equals(sink))


async def test_batches_that_come_twice_count_once(rig: Rig) -> None:
    """E6: copies of blocks are counted, so a batch must not be."""
    async with rig.source() as (source, sink):
        await eventually(lambda: source.state is StreamState.LIVE)
        rig.link.twice = lambda count: count % 3 == 0
        rig.publish_some(100)
        await eventually(lambda: rig.equals(sink) and source.stats.duplicates > 0)


async def test_an_engine_that_restarts_takes_its_blocks_along(rig: Rig) -> None:
    """E11, R5: no phantom blocks, neither at old routers nor at new ones."""
    async with rig.source() as (_, sink):
        rig.publish_some(50)
        await eventually(lambda: rig.equals(sink))
        rig.relay.on_resync(RANK, ResyncReason.RESTART)
        rig.truth.clear(RANK)
        await eventually(lambda: sink.index.blocks(RANK) == 0)
        rig.publish_some(20)
        await eventually(lambda: rig.equals(sink))
        assert sink.resyncs == [ResyncReason.RESTART]
    async with rig.source() as (_, fresh):
        await eventually(lambda: rig.equals(fresh))


async def test_a_rank_that_is_gone_has_no_blocks_even_if_the_word_of_it_was_lost(rig: Rig) -> None:
    """E19: its engine is back with fewer ranks."""
    async with rig.source() as (source, sink):
        rig.publish_some(50)
        await eventually(lambda: rig.equals(sink))
        rig.link.lose = lambda _: True
        rig.relay.unheard(RANK)
        rig.link.lose = lambda _: False
        await eventually(lambda: source.state is StreamState.CONNECTING)
        assert sink.index.blocks(RANK) == 0
        assert "its relay has none to the engine" in source.absence
    async with rig.source() as (source, sink):
        await eventually(lambda: source.stats.replays > 0 and "its relay has" in source.absence)
        assert sink.index.blocks(RANK) == 0


async def test_a_relay_that_restarts_begins_anew(rig: Rig) -> None:
    """Its ZMQ side asks the engine for its history; here there is none."""
    async with rig.source() as (source, sink):
        rig.publish_some(50)
        await eventually(lambda: rig.equals(sink))
        again = Relay(rig.link, SUBJECTS)  # type: ignore[arg-type]  # as above
        rig.relay.streams.clear()
        again.add(RANK)
        again.on_state(RANK, StreamState.LIVE)
        rig.truth.clear(RANK)
        rig.relay = again
        rig.publish_some(20)
        await eventually(lambda: rig.equals(sink) and source.state is StreamState.LIVE)
        assert ResyncReason.RESTART in sink.resyncs


async def test_a_server_that_restarts_costs_nothing(rig: Rig) -> None:
    """R3: what was published meanwhile was lost, and nothing told."""
    async with rig.source() as (source, sink):
        rig.publish_some(50)
        await eventually(lambda: rig.equals(sink))
        await rig.server.stop(signal.SIGKILL)
        rig.publish_some(50)
        await rig.server.start()
        await eventually(lambda: rig.equals(sink) and source.state is StreamState.LIVE)
        assert sink.resyncs == []


async def test_a_slow_router_misses_batches_and_gets_them(rig: Rig) -> None:
    """The client library drops what is not taken in time."""
    async with rig.source(max_untaken=16) as (source, sink):
        await eventually(lambda: source.state is StreamState.LIVE)
        rig.publish_some(3000)
        await eventually(lambda: rig.equals(sink), within_s=30)
        assert source.stats.gaps > 0


async def test_a_relay_without_an_answer_leaves_the_rank_degraded_and_routed_to(rig: Rig) -> None:
    """E10: it publishes, but its answers don't come through."""
    async with rig.source() as (source, sink):
        await eventually(lambda: source.state is StreamState.LIVE)
        rig.relay.streams[RANK].answer = lambda want: []  # type: ignore[method-assign]  # noqa: ARG005  mute
        rig.link.lose = lambda count: count % 2 == 0
        rig.publish_some(2)
        rig.link.lose = lambda _: False
        rig.publish_some(1)
        await eventually(lambda: source.state is StreamState.DEGRADED)
        assert sink.resyncs == [ResyncReason.REPLAY_FAILED]
        del rig.relay.streams[RANK].answer
        await eventually(lambda: rig.equals(sink) and source.state is StreamState.LIVE)


async def test_a_relay_that_is_heard_and_never_answers_is_not_said_to_be_missing(rig: Rig) -> None:
    """Its answers are above `max_payload`, say, or permissions keep the question from it."""
    rig.publish_some(1)
    rig.relay.streams[RANK].answer = lambda want: []  # type: ignore[method-assign]  # noqa: ARG005  mute
    async with rig.source() as (source, _):
        await eventually(
            lambda: source.state is StreamState.CONNECTING and "not answer" in source.absence
        )


async def test_no_relay_is_no_connection(rig: Rig) -> None:
    rig.relay.streams.clear()
    async with rig.source() as (source, _):
        await asyncio.sleep(0)
        assert source.state is not StreamState.LIVE
        await eventually(lambda: source.state is StreamState.CONNECTING)
        assert f"no relay publishes it as {RANK.worker}" in source.absence


async def test_a_relay_with_another_hash_rule_is_not_used_and_that_is_said(rig: Rig) -> None:
    """Relay and router are of different versions."""
    rig.rule = RULE_VERSION + 1
    rig.publish_some(20)
    async with rig.source() as (source, sink):
        await eventually(
            lambda: source.state is StreamState.CONNECTING and "rule" in source.absence
        )
        assert f"by rule {RULE_VERSION}, not {rig.rule}" in source.absence
        assert sink.index.blocks(RANK) == 0


async def test_a_relay_that_falls_silent_is_lost_and_its_engines_old_blocks_go_when_it_is_back(
    rig: Rig,
) -> None:
    """R5: the engine restarts while no relay is there to tell."""
    rig.relay_silent_s = 0.8
    async with rig.source() as (source, sink):
        rig.publish_some(20)
        await eventually(lambda: rig.equals(sink) and source.state is StreamState.LIVE)
        rig.link.lose = lambda _: True
        await eventually(lambda: source.state is StreamState.CONNECTING)
        assert "its relay is silent since 20" in source.absence
        rig.relay.on_resync(RANK, ResyncReason.RESTART)
        rig.link.lose = lambda _: False
        await eventually(lambda: sink.index.blocks(RANK) == 0 and source.state is StreamState.LIVE)


async def test_two_relays_of_one_rank_are_told_of_for_as_long_as_there_are_two(rig: Rig) -> None:
    rig.relay_silent_s = 0.5
    older = encode(Head(1, 0, "live", rig.rule))
    async with rig.source() as (source, _):
        await eventually(lambda: source.state is StreamState.LIVE)

        def hears_both() -> bool:
            rig.link.publish(SUBJECTS.events(RANK.worker, RANK.dp_rank), older)
            return "two relays publish" in source.warning

        await eventually(hears_both)
        await eventually(lambda: not source.warning)
        assert source.state is StreamState.LIVE


async def test_how_the_relay_hears_the_engine_is_seen_at_the_router(rig: Rig) -> None:
    async with rig.source() as (source, sink):
        await eventually(lambda: source.state is StreamState.LIVE)
        rig.relay.on_state(RANK, StreamState.DEGRADED)
        await eventually(lambda: sink.states[-1] is StreamState.DEGRADED)
        rig.relay.on_state(RANK, StreamState.CONNECTING)
        await eventually(lambda: source.state is StreamState.CONNECTING)
        assert "its relay has none to the engine" in source.absence
        rig.relay.on_state(RANK, StreamState.LIVE)
        await eventually(lambda: sink.states[-1] is StreamState.LIVE)


async def test_routers_that_start_together_share_one_state(rig: Rig) -> None:
    """R1: or one that restarts in a loop: the relay makes no state for each."""
    rig.publish_some(2000)
    for _ in range(5):
        async with rig.source() as (_, sink):
            await eventually(lambda sink=sink: rig.equals(sink))  # type: ignore[misc]  # bound now
    assert rig.relay.streams[RANK].states_made == 1


async def test_a_resync_that_the_index_asks_for_brings_the_state(rig: Rig) -> None:
    async with rig.source() as (source, sink):
        rig.publish_some(50)
        await eventually(lambda: rig.equals(sink))
        sink.index.clear(RANK)
        source.request_resync()
        await eventually(lambda: rig.equals(sink))
        assert sink.resyncs == [ResyncReason.REQUESTED]
