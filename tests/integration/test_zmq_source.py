"""Publisher and source over real sockets, with the faults that production has."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import zmq
import zmq.asyncio
from support.streams import FaultyPublisher, RecordingSink, eventually, payload, running

from events import BlocksCleared, BlocksStored, EventBatch, WorkerRank, encode_batch
from events.stream import ResyncReason, StreamState, SubscriptionSettings
from events.zmq_source import SourceSettings, ZmqSource
from indexer import RadixIndex

RANK = WorkerRank("w1")
QUICK = SubscriptionSettings(replay_timeout_s=0.3, replay_pause_s=0.5, silent_after_s=0.2)
SETTINGS = SourceSettings(reconnect_s=0.02, reconnect_max_s=0.1, subscription=QUICK)


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    FaultyPublisher.close_all()
    context.destroy(linger=0)


class Line:
    """A publisher, a source and its sink, on addresses that outlive each of them."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path) -> None:
        self.context = context
        self.endpoint = f"ipc://{folder}/events"
        self.replay_endpoint = f"ipc://{folder}/replay"
        self.sink = RecordingSink()

    def publisher(self, *, replay: bool = True, **options: Any) -> FaultyPublisher:
        replay_endpoint = self.replay_endpoint if replay else None
        return FaultyPublisher(
            self.endpoint, replay_endpoint=replay_endpoint, context=self.context, **options
        )

    def source(
        self, *, replay: bool = True, settings: SourceSettings = SETTINGS, topic: str = ""
    ) -> ZmqSource:
        return ZmqSource(
            RANK,
            self.endpoint,
            self.sink,
            replay_endpoint=self.replay_endpoint if replay else None,
            topic=topic,
            settings=settings,
            context=self.context,
        )

    def holds(self, *numbers: int) -> Callable[[], bool]:
        return lambda: self.sink.held == list(numbers)


@pytest.fixture
def line(context: zmq.asyncio.Context, tmp_path: Path) -> Line:
    return Line(context, tmp_path)


async def listening(source: ZmqSource) -> None:
    await eventually(lambda: source.state in {StreamState.LIVE, StreamState.DEGRADED})


async def heard(publisher: FaultyPublisher, line: Line) -> None:
    """Without a replay, publish until the subscription has reached the publisher."""
    await eventually(lambda: publish(publisher, 0) or bool(line.sink.held))


def publish(publisher: FaultyPublisher, *numbers: int) -> bool:
    """Publish these batches; never true, so that it can stand before an `or`."""
    for number in numbers:
        publisher.publish(payload(number))
    return False


async def test_batches_arrive_in_order(line: Line) -> None:
    publisher, source = line.publisher(topic="kv-events"), line.source(topic="kv-events")
    async with running(publisher, source):
        await listening(source)
        publish(publisher, *range(50))
        await eventually(line.holds(*range(50)))
    publisher.close()
    assert line.sink.resyncs == []
    assert line.sink.ranks == {RANK}
    assert source.stats.last_seqno == 49
    assert source.stats.lag_s is not None


@pytest.mark.parametrize("reply_topic", [True, False])
async def test_what_was_published_before_is_replayed(line: Line, reply_topic: bool) -> None:
    """E7, E12: the router restarts, its engines don't; replies of 4 frames and of 3."""
    publisher, source = line.publisher(replay_topic=reply_topic), line.source()
    publish(publisher, *range(2500))
    async with running(publisher, source):
        await eventually(line.holds(*range(2500)))
        assert source.stats.lag_s is None  # old batches say nothing about how late new ones are
        publish(publisher, 2500)
        await eventually(line.holds(*range(2501)))
    publisher.close()
    assert line.sink.resyncs == []


async def test_lost_batches_are_replayed(line: Line) -> None:
    """E5: the engine's socket dropped messages for us while we were slow."""
    publisher, source = line.publisher(), line.source()
    publisher.drop = frozenset({3, 4, 5, 8})
    async with running(publisher, source):
        await listening(source)
        publish(publisher, *range(8))
        await eventually(line.holds(*range(8)))
        publish(publisher, 8, 9)
        await eventually(line.holds(*range(10)))
    publisher.close()
    assert line.sink.resyncs == []
    assert source.stats.gaps == 2


async def test_repeated_and_reordered_batches_are_applied_once(line: Line) -> None:
    """E6: references would be counted twice."""
    publisher, source = line.publisher(), line.source()
    publisher.twice, publisher.late = frozenset({1, 2}), frozenset({5})
    async with running(publisher, source):
        await listening(source)
        publish(publisher, *range(8))
        await eventually(line.holds(*range(8)))
    publisher.close()
    assert line.sink.resyncs == []
    assert source.stats.duplicates >= 2


async def test_a_replay_that_begins_later_than_asked_costs_the_blocks(line: Line) -> None:
    """E9: the engine keeps 5 batches only."""
    publisher, source = line.publisher(buffer_steps=5), line.source()
    publish(publisher, *range(20))
    async with running(publisher, source):
        await eventually(line.holds(*range(15, 20)))
        publish(publisher, 20)
        await eventually(line.holds(*range(15, 21)))
    publisher.close()
    assert line.sink.resyncs == [ResyncReason.REPLAY_LATE]
    assert source.state is StreamState.LIVE
    assert source.stats.cold


async def test_a_replay_with_a_hole_costs_the_blocks(line: Line) -> None:
    """E9: the engine drops replies to a slow reader and sends its end marker all the same."""
    publisher, source = line.publisher(), line.source()
    publisher.forgotten = frozenset({4, 5})
    publish(publisher, *range(10))
    async with running(publisher, source):
        await eventually(line.holds(*range(6, 10)))
    publisher.close()
    assert line.sink.resyncs == [ResyncReason.REPLAY_HOLE]


BURST = 4000
BURST_BYTES = 8_000_000
"""More than the buffers of the system hold, and more messages than a default socket queues."""


class Flood(threading.Thread):
    """An engine of which nobody reads: sends until it is done, or its own queue stays full.

    It is patient for as long as the system moves anything, so that what is lost is lost because
    the reader's socket takes no more. `frames` are those of the message with a number.
    """

    def __init__(
        self, socket: "zmq.Socket[bytes]", frames: Callable[[int], list[bytes]], count: int
    ) -> None:
        super().__init__()
        self._socket = socket
        self._frames = frames
        self._count = count
        self.lost = 0

    def run(self) -> None:
        for number in range(self._count):
            if not self._send(self._frames(number)):
                self.lost = self._count - number
                return

    def _send(self, frames: list[bytes]) -> bool:
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)
            else:
                return True
        return False


def numbered(number: int) -> list[bytes]:
    """A seqno and a payload of 2 kB that decodes."""
    tokens = [number] * (BURST_BYTES // BURST // 5)
    stored = BlocksStored(block_hashes=[number], token_ids=tokens, block_size=len(tokens))
    return [number.to_bytes(8, "big"), encode_batch(EventBatch(float(number), [stored], 0))]


async def test_a_reader_that_is_slow_loses_no_live_batch(line: Line) -> None:
    """E9: the loop is held up (a large prompt, a slow disk) while an engine publishes a burst."""
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=line.context.underlying)
    with plain.socket(zmq.XPUB) as pub:
        pub.setsockopt(zmq.LINGER, 0)
        pub.setsockopt(zmq.XPUB_NODROP, 1)
        pub.bind(line.endpoint)
        source = line.source(replay=False)
        async with running(source):
            await eventually(lambda: pub.poll(0) != 0)
            flood = Flood(pub, lambda number: [b"", *numbered(number)], BURST)
            flood.start()
            flood.join()  # holds up the loop, which is the case
            assert flood.lost == 0
            await eventually(lambda: len(line.sink.held) == BURST)
    assert line.sink.held == list(range(BURST))
    assert line.sink.resyncs == []


async def test_a_reader_that_is_slow_loses_nothing_of_a_replay(line: Line) -> None:
    """E7, E9: engines drop replies to who does not read, and send the end marker all the same."""
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context(shadow=line.context.underlying)
    publisher = line.publisher(replay=False)
    with plain.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(line.replay_endpoint)
        patient = replace(SETTINGS, subscription=replace(QUICK, replay_timeout_s=20.0))
        source = line.source(settings=patient)
        async with running(publisher, source):
            await eventually(lambda: router.poll(0) != 0)
            client, *_ = router.recv_multipart()
            flood = Flood(router, lambda number: [client, b"", b"", *numbered(number)], BURST)
            flood.start()
            flood.join()
            assert flood.lost == 0
            router.send_multipart([client, b"", b"", b"\xff" * 8, b""])
            await eventually(lambda: source.state is StreamState.LIVE)
    publisher.close()
    assert line.sink.held == list(range(BURST))
    assert line.sink.resyncs == []


async def test_a_dead_replay_socket_stops_nothing(line: Line) -> None:
    """E10: the replay port is behind a firewall."""
    publisher, source = line.publisher(replay=False), line.source()
    async with running(publisher, source):
        await eventually(lambda: source.state is StreamState.DEGRADED)
        assert source.stats.replays == QUICK.replay_tries
        publish(publisher, 0, 1)
        await eventually(line.holds(0, 1))
    publisher.close()


async def test_a_silent_replay_socket_is_tried_again_later(line: Line) -> None:
    """E10: it takes requests and answers none, for a while."""
    publisher, source = line.publisher(), line.source()
    publisher.mute = True
    publish(publisher, 0, 1)
    async with running(publisher, source):
        await eventually(lambda: source.state is StreamState.DEGRADED)
        publisher.mute = False
        await eventually(line.holds(0, 1))
        await eventually(lambda: source.state is StreamState.LIVE)
    publisher.close()


async def test_a_restarted_engine_loses_its_blocks_at_once(line: Line) -> None:
    """E11, E19: it comes back idle, and only its replay socket can tell."""
    first, source = line.publisher(), line.source()
    async with running(source):
        async with running(first):
            await listening(source)
            publish(first, *range(30))
            await eventually(line.holds(*range(30)))
        first.close()
        await eventually(lambda: source.state is StreamState.CONNECTING)
        second = line.publisher()
        publish(second, 100, 101)
        async with running(second):
            await eventually(line.holds(100, 101))
            publish(second, 102)
            await eventually(line.holds(100, 101, 102))
        second.close()
    assert line.sink.resyncs == [ResyncReason.RESTART]


async def test_a_restart_without_replay_shows_with_the_first_batch(line: Line) -> None:
    """E11: seqno 900, then a low one."""
    first, source = line.publisher(replay=False), line.source(replay=False)
    async with running(source):
        await heard(first, line)
        publish(first, *range(900))
        await eventually(lambda: line.sink.held[-1] == 899)
        first.close()
        await eventually(lambda: source.state is StreamState.CONNECTING)
        line.sink.resyncs.clear()
        second = line.publisher(replay=False)
        await eventually(lambda: publish(second, 1000) or bool(line.sink.resyncs))
        await eventually(lambda: set(line.sink.held) == {1000})
        second.close()
    assert line.sink.resyncs[0] is ResyncReason.RESTART


async def test_a_lost_connection_costs_nothing_when_the_engine_lives(
    context: zmq.asyncio.Context,
) -> None:
    """E19: a network that fails for a moment; what was missed is replayed."""
    publisher = FaultyPublisher(
        "tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", context=context
    )
    sink = RecordingSink()
    async with Proxy(publisher.endpoint) as proxy:
        source = ZmqSource(
            RANK,
            proxy.endpoint,
            sink,
            replay_endpoint=publisher.replay_endpoint,
            settings=SETTINGS,
            context=context,
        )
        async with running(publisher, source):
            await listening(source)
            publish(publisher, *range(5))
            await eventually(lambda: sink.held == list(range(5)))
            proxy.cut()
            publish(publisher, 5, 6)
            await eventually(lambda: sink.held == list(range(7)))
            assert StreamState.CONNECTING in sink.states
    publisher.close()
    assert sink.resyncs == []


class Proxy:
    """Passes TCP connections on until they are cut; while `frozen` it swallows what comes."""

    frozen = False

    def __init__(self, target: str) -> None:
        self._target = int(target.rsplit(":", 1)[1])
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()

    def cut(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, up_writer]
        await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                if not self.frozen:
                    writer.write(data)
        writer.close()


async def test_an_engine_that_vanishes_without_a_word_is_missed(
    context: zmq.asyncio.Context,
) -> None:
    """E19: its host is off, or the network drops packets: no connection is ever closed."""
    publisher, sink = FaultyPublisher("tcp://127.0.0.1:*", context=context), RecordingSink()
    settings = replace(SETTINGS, heartbeat_s=0.05, heartbeat_timeout_s=0.2)
    async with Proxy(publisher.endpoint) as proxy:
        source = ZmqSource(RANK, proxy.endpoint, sink, settings=settings, context=context)
        async with running(publisher, source):
            await listening(source)
            proxy.frozen = True
            await eventually(lambda: source.state is StreamState.CONNECTING)
            proxy.frozen = False
            await listening(source)
    publisher.close()


@pytest.mark.slow
async def test_an_endpoint_that_is_not_there_is_tried_ever_more_rarely(line: Line) -> None:
    """E19: after 0, 0.05, 0.15, 0.35, 0.75 and 1.55 s: a fleet that is down is not stormed."""
    settings = replace(SETTINGS, reconnect_s=0.05, reconnect_max_s=2.0)
    source = line.source(settings=settings)
    async with running(source):
        await asyncio.sleep(0.95)  # not for a state: the length of the outage is the case
        publisher = line.publisher()
        async with running(publisher):
            with pytest.raises(AssertionError):
                await eventually(lambda: source.state is StreamState.LIVE, within_s=0.35)
            await listening(source)
    publisher.close()


async def test_an_endpoint_may_appear_later(line: Line) -> None:
    """E19: the router starts before its engines."""
    source = line.source()
    async with running(source):
        for _ in range(5):  # a few turns, in which it tries to connect
            await asyncio.sleep(0)
        assert source.state is StreamState.CONNECTING
        publisher = line.publisher()
        publish(publisher, 0)
        async with running(publisher):
            await eventually(line.holds(0))
    publisher.close()


async def test_the_engine_may_connect_to_us(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """An engine whose endpoint has no `*` connects, and keeps what we missed."""
    sink = RecordingSink()
    replay = f"ipc://{tmp_path}/replay"
    source = ZmqSource(
        RANK, "tcp://127.0.0.1:*", sink, replay_endpoint=replay, settings=SETTINGS, context=context
    )
    async with running(source):
        await eventually(lambda: not source.endpoint.endswith("*"))
        publisher = FaultyPublisher(source.endpoint, replay_endpoint=replay, context=context)
        publish(publisher, 0, 1)
        async with running(publisher):
            await eventually(lambda: sink.held == [0, 1])
            publish(publisher, 2)
            await eventually(lambda: sink.held == [0, 1, 2])
        publisher.close()
        await eventually(lambda: source.state is StreamState.CONNECTING)


async def test_malformed_messages_are_counted_and_named_once(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    """E3: 1, 2 and 4 frames, a short seqno, 1 MB of noise."""
    caplog.set_level(logging.WARNING, "events.zmq_source")
    publisher, source = line.publisher(), line.source()
    seqno = (0).to_bytes(8, "big")
    async with running(publisher, source):
        await listening(source)
        publish(publisher, 0)
        await eventually(line.holds(0))
        publisher.send_raw(b"alone")
        publisher.send_raw(b"", seqno)
        publisher.send_raw(b"", seqno, b"x", b"y")
        publisher.send_raw(b"", seqno[1:], b"x")
        publisher.send_raw(b"", b"\xff" * 8, b"x")
        publisher.send_raw(bytes(range(256)) * 4096)
        publish(publisher, 1)
        await eventually(line.holds(0, 1))
    publisher.close()
    assert source.stats.malformed_frames == 6
    assert line.sink.resyncs == []
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert "w1/0" in warnings[0]


async def test_an_unreadable_payload_costs_the_blocks(line: Line) -> None:
    """E3: what it said is lost, removals among it."""
    publisher, source = line.publisher(), line.source()
    async with running(publisher, source):
        await listening(source)
        publish(publisher, 0)
        publisher.publish(b"")
        publish(publisher, 2)
        await eventually(line.holds(2))
    publisher.close()
    assert line.sink.resyncs == [ResyncReason.MALFORMED]
    assert source.stats.malformed_payloads == 1


async def test_expected_blocks_that_do_not_come_make_a_stream_silent(line: Line) -> None:
    """Events are switched off in the engine, or go out under another topic."""
    publisher, source = line.publisher(topic="other"), line.source(topic="kv-events")
    async with running(publisher, source):
        await listening(source)
        source.expect_blocks(time.monotonic())
        publish(publisher, 0)
        await eventually(lambda: source.state is StreamState.SILENT)
        assert line.sink.states[-1] is StreamState.SILENT
        assert line.sink.held == []
    publisher.close()


async def test_a_silent_stream_is_live_again_with_its_first_batch(line: Line) -> None:
    publisher, source = line.publisher(), line.source()
    async with running(publisher, source):
        await listening(source)
        source.expect_blocks(time.monotonic())
        await eventually(lambda: source.state is StreamState.SILENT)
        publish(publisher, 0)
        await eventually(lambda: source.state is StreamState.LIVE)
    publisher.close()


async def test_a_resync_on_request_reads_the_history_again(line: Line) -> None:
    """The index has found more blocks than the engine can hold."""
    publisher, source = line.publisher(), line.source()
    async with running(publisher, source):
        await listening(source)
        publish(publisher, *range(5))
        await eventually(line.holds(*range(5)))
        source.request_resync()
        await eventually(lambda: line.sink.resyncs == [ResyncReason.REQUESTED])
        await eventually(line.holds(*range(5)))
    publisher.close()


async def test_what_the_sink_raises_ends_the_source(line: Line) -> None:
    """A bug of ours must show, not stop the stream quietly."""

    class FailingSink(RecordingSink):
        def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
            raise LookupError(f"{rank} {batch}")

    line.sink = FailingSink()
    publisher, source = line.publisher(), line.source()
    publish(publisher, 0)
    with pytest.raises(ExceptionGroup) as caught:
        async with running(publisher, source):
            await eventually(lambda: False)
    assert caught.group_contains(LookupError)
    publisher.close()


async def test_a_backlog_does_not_keep_the_loop(line: Line) -> None:
    """Thousands of batches are replayed in portions; health checks are answered meanwhile."""
    publisher, source = line.publisher(), line.source()
    count = 4000
    publish(publisher, *range(count))
    most_in_a_turn, before = 0, 0
    async with running(publisher, source), asyncio.timeout(20):
        while before < count:
            await asyncio.sleep(0)
            most_in_a_turn = max(most_in_a_turn, len(line.sink.held) - before)
            before = len(line.sink.held)
    publisher.close()
    assert line.sink.held == list(range(count))
    assert most_in_a_turn < count / 3


async def test_a_cancelled_source_leaves_no_socket_and_no_reader(line: Line) -> None:
    publisher, source = line.publisher(), line.source()
    async with running(publisher, source):
        await listening(source)
    publisher.close()
    line.context.term()  # would wait for open sockets


async def test_both_dp_ranks_are_heard(context: zmq.asyncio.Context, tmp_path: Path) -> None:
    """E17: one publisher and one source for each rank."""
    sink = RecordingSink()
    publishers, sources = [], []
    for dp_rank in range(2):
        endpoint, replay = f"ipc://{tmp_path}/e{dp_rank}", f"ipc://{tmp_path}/r{dp_rank}"
        publishers.append(FaultyPublisher(endpoint, replay_endpoint=replay, context=context))
        publishers[-1].publish(payload(dp_rank, dp_rank=dp_rank))
        rank = WorkerRank("w1", dp_rank)
        sources.append(
            ZmqSource(
                rank, endpoint, sink, replay_endpoint=replay, settings=SETTINGS, context=context
            )
        )
    async with running(*publishers, *sources):
        await eventually(lambda: sorted(sink.held) == [0, 1])
    for publisher in publishers:
        publisher.close()
    assert sink.ranks == {WorkerRank("w1", 0), WorkerRank("w1", 1)}
    assert all(source.stats.foreign_dp_rank == 0 for source in sources)


class IndexSink(RecordingSink):
    """Also keeps the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.index = RadixIndex()

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        super().on_batch(rank, batch)
        self.index.apply(rank, batch)


async def test_a_clear_of_one_dp_rank_leaves_the_other_its_blocks(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    """E13: both ranks are behind one address, and only their streams tell them apart."""
    sink = IndexSink()
    ranks = [WorkerRank("w1", dp_rank) for dp_rank in range(2)]
    publishers = [
        FaultyPublisher(f"ipc://{tmp_path}/e{n}", context=context) for n, _ in enumerate(ranks)
    ]
    sources = [
        ZmqSource(rank, publisher.endpoint, sink, settings=SETTINGS, context=context)
        for rank, publisher in zip(ranks, publishers, strict=True)
    ]
    async with running(*publishers, *sources):

        def each_holds_a_block() -> bool:
            for rank, publisher in zip(ranks, publishers, strict=True):
                publisher.publish(payload(1, dp_rank=rank.dp_rank))
            return all(sink.index.blocks(rank) for rank in ranks)

        await eventually(each_holds_a_block)
        publishers[1].publish(encode_batch(EventBatch(9.0, [BlocksCleared()], 1)))
        await eventually(lambda: sink.index.blocks(ranks[1]) == 0)
        await eventually(lambda: 9 in sink.held)
        assert sink.index.blocks(ranks[0]) > 0
    for publisher in publishers:
        publisher.close()


async def test_a_foreign_dp_rank_is_refused_where_ranks_are_known(line: Line) -> None:
    """E17: the endpoints of two ranks were mixed up."""
    strict = replace(SETTINGS, subscription=replace(QUICK, strict_dp_rank=True))
    publisher, source = line.publisher(), line.source(settings=strict)
    publisher.publish(payload(0, dp_rank=1))
    publisher.publish(payload(1, dp_rank=0))
    async with running(publisher, source):
        await eventually(line.holds(1))
    publisher.close()
    assert source.stats.foreign_dp_rank == 1


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


async def test_128_publishers_need_no_threads_no_files_but_sockets_and_lose_nothing(
    tmp_path: Path,
) -> None:
    """E20: a fleet on one router."""
    publishing, listening_context = zmq.asyncio.Context(), zmq.asyncio.Context()
    sink = RecordingSink()
    publishers = [
        FaultyPublisher(
            f"ipc://{tmp_path}/e{number}",
            replay_endpoint=f"ipc://{tmp_path}/r{number}",
            context=publishing,
        )
        for number in range(128)
    ]
    files, workers = open_files(), threads()
    sources = [
        ZmqSource(
            WorkerRank(f"w{number}"),
            publisher.endpoint,
            sink,
            replay_endpoint=publisher.replay_endpoint,
            settings=SETTINGS,
            context=listening_context,
        )
        for number, publisher in enumerate(publishers)
    ]
    async with running(*publishers, *sources):
        await eventually(lambda: all(s.state is StreamState.LIVE for s in sources), within_s=30)
        # What stays open: SUB and its monitor (three), its connection, and the engine's end of it.
        await eventually(lambda: open_files() <= files + 5 * 128 + 10, within_s=30)
        for publisher in publishers:
            publish(publisher, *range(10))
        await eventually(lambda: len(sink.held) == 1280, within_s=30)
        assert threads() <= workers + 2  # one for all I/O, one that closes sockets
        assert open_files() <= files + 5 * 128 + 10
    await eventually(lambda: open_files() <= files + 10)
    for publisher in publishers:
        publisher.close()
    for context in (publishing, listening_context):
        context.destroy(linger=0)
    assert sink.resyncs == []
    assert len(sink.ranks) == 128
