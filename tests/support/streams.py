"""What tests of event streams share: batches, a sink that remembers, a publisher that errs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

from events import BlocksStored, EventBatch, WorkerRank, encode_batch
from events.stream import ResyncReason, StreamState
from events.zmq_publisher import ZmqPublisher


def batch(number: int, *, dp_rank: int | None = 0) -> EventBatch:
    """A batch that is told apart by `number`: it stores that one block."""
    stored = BlocksStored(block_hashes=[number], token_ids=[number % 2**32], block_size=1)
    return EventBatch(float(number), [stored], dp_rank)


def payload(number: int, *, dp_rank: int | None = 0) -> bytes:
    return encode_batch(batch(number, dp_rank=dp_rank))


def number_of(batch: EventBatch) -> int:
    """The number that `batch` was made with."""
    return int(batch.ts_s)


class RecordingSink:
    """Keeps what it is told: `held` are the batches since the last resync."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.resyncs: list[ResyncReason] = []
        self.states: list[StreamState] = []
        self.ranks: set[WorkerRank] = set()

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        self.ranks.add(rank)
        self.held.append(number_of(batch))

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        self.ranks.add(rank)
        self.held.clear()
        self.resyncs.append(reason)

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        self.ranks.add(rank)
        self.states.append(state)


class FaultyPublisher(ZmqPublisher):
    """A real publisher that loses, repeats and holds back what it is told to.

    `drop` and `twice` have seqnos of live messages, `late` those that are sent only after the next
    one; `forgotten` are left out of replays, `mute` leaves replay requests unanswered, and
    `endless` leaves out their end.
    """

    drop: frozenset[int] = frozenset()
    twice: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    forgotten: frozenset[int] = frozenset()
    mute = False
    endless = False
    _held: tuple[int, bytes] | None = None
    made: ClassVar[WeakSet["FaultyPublisher"]] = WeakSet()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.made.add(self)

    @classmethod
    def close_all(cls) -> None:
        """Close those that a failed test has left open: their context would wait for ever."""
        for publisher in list(cls.made):
            publisher.close()

    def _send(self, seqno: int, payload: bytes) -> None:
        if seqno in self.drop:
            return
        if seqno in self.late:
            self._held = (seqno, payload)
            return
        for _ in range(2 if seqno in self.twice else 1):
            super()._send(seqno, payload)
        if self._held is not None:
            held, self._held = self._held, None
            super()._send(*held)

    def send_raw(self, *frames: bytes) -> None:
        """Publish a message of any shape."""
        self._pub.send_multipart(frames)

    def _replies(self, start: int) -> Iterator[tuple[int, bytes]]:
        replies = super()._replies(start)
        return (reply for reply in replies if not self.mute and reply[0] not in self.forgotten)

    def _end(self, client: bytes) -> None:
        if not (self.mute or self.endless):
            super()._end(client)


class Runnable(Protocol):
    """What has a life of its own until it is cancelled."""

    async def run(self) -> None: ...


@asynccontextmanager
async def running(*parts: Runnable) -> AsyncIterator[None]:
    """Run each part's `run()` while the block runs; their failures are the block's."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(part.run()) for part in parts]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def eventually(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    """Wait until `condition()` holds; fail when it does not in time."""
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, "did not happen in time"
        await asyncio.sleep(0.005)
