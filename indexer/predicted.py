"""Blocks that we expect because we routed there: what a burst can know before any event arrives.

A prediction is a guess about the near future of one rank. An event confirms it (then the index
knows better, and the guess goes), or its time runs out. Several predictions of one block are one
guess that lasts as long as the longest of them.

Expiry is ordered by a heap with one entry per prediction, so it costs nothing while nothing is due.
The number of predicted blocks is bounded: when it is reached, the predictions that would expire
first go first. A lost prediction costs one request its best worker, no more.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from events import WorkerRank
from indexer.hashing import HASH_BYTES
from indexer.model import InvariantError

MAX_BLOCKS = 500_000
_GONE_BLOCKS = 4096


class _Prediction(NamedTuple):
    """One prediction, in the order of the queue: by expiry, then by age.

    `known` is the map that it wrote in; where that is not the rank's any more, nothing is left.
    """

    until: float
    age: int
    rank: WorkerRank
    hashes: bytes
    known: dict[int, float]


class PredictedBlocks:
    """Expected blocks per rank. `max_blocks` bounds the blocks of all live predictions."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._until: dict[WorkerRank, dict[int, float]] = {}
        self._latest: dict[WorkerRank, float] = {}  # no block of the rank lasts longer
        self._queue: list[_Prediction] = []
        self._queued_blocks = 0
        self._age = count()
        self._perhaps: set[int] = set()  # all predicted blocks of any rank, and some gone ones

    def expect(self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float) -> None:
        """Predict that the rank will hold these blocks, for `ttl_s` seconds from `now` on."""
        hashes = hashes[: self._max_blocks * HASH_BYTES]
        if not hashes or ttl_s <= 0:
            return
        until = now + ttl_s
        known = self._until.setdefault(rank, {})
        expected = dict.fromkeys(_blocks(hashes), until)
        if until < self._latest.get(rank, until):
            for block in expected.keys() & known.keys():
                expected[block] = max(until, known[block])
        else:
            self._latest[rank] = until
        known.update(expected)
        self._perhaps.update(expected)
        heapq.heappush(self._queue, _Prediction(until, next(self._age), rank, hashes, known))
        self._queued_blocks += len(hashes) // HASH_BYTES
        while self._queued_blocks > self._max_blocks:
            self._drop_first()
        if len(self._perhaps) > 2 * self._queued_blocks + _GONE_BLOCKS:
            self._perhaps = set().union(*self._until.values())

    def confirm(self, rank: WorkerRank, hashes: bytes) -> None:
        """Events have these blocks on the rank: the index speaks for them from now on."""
        known = self._until.get(rank)
        if known is None:
            return
        for block in _blocks(hashes):
            known.pop(block, None)
        if not known:
            self.drop(rank)

    def withdraw(self, rank: WorkerRank, hashes: bytes) -> None:
        """Take back a prediction of these blocks: they won't come, as the request was refused.

        What other predictions of the rank expect as well stays. Costs a look at each live
        prediction, which only what went wrong has to pay.
        """
        known = self._until.get(rank)
        if known is None:
            return
        hashes = hashes[: self._max_blocks * HASH_BYTES]
        living = [made for made in self._queue if made.known is known]
        taken = next((made for made in living if made.hashes == hashes), None)
        if taken is None:
            return
        self._queue.remove(taken)
        living.remove(taken)
        heapq.heapify(self._queue)
        self._queued_blocks -= len(hashes) // HASH_BYTES
        gone = known.keys() & set(_blocks(hashes))
        for block in gone:
            del known[block]
        for made in living:
            for block in gone.intersection(_blocks(made.hashes)):
                known[block] = max(made.until, known.get(block, made.until))
        if not known:
            self.drop(rank)

    def expire(self, now: float) -> None:
        """Forget what was expected up to `now` and has not come."""
        while self._queue and self._queue[0].until <= now:
            self._drop_first()

    def _drop_first(self) -> None:
        """Forget the prediction that expires first, but not what a later one expects as well."""
        until, _, rank, hashes, known = heapq.heappop(self._queue)
        self._queued_blocks -= len(hashes) // HASH_BYTES
        if self._until.get(rank) is not known:
            return
        for block in _blocks(hashes):
            if known.get(block, math.inf) <= until:
                del known[block]
        if not known:
            self.drop(rank)

    def drop(self, rank: WorkerRank) -> None:
        """Forget all predictions of a rank at once: the queue sees by their map that they are."""
        known = self._until.pop(rank, None)
        if known is not None:
            known.clear()
            del self._latest[rank]

    def drop_worker(self, name: str) -> None:
        """Forget all predictions of a worker's ranks."""
        for rank in [rank for rank in self._until if rank.worker == name]:
            self.drop(rank)

    def leading(self, rank: WorkerRank, hashes: bytes, start: int, now: float) -> int:
        """How many blocks from position `start` on are predicted, up to the first that is not."""
        return self.leading_each([rank], hashes, [start], now)[0]

    def leading_each(
        self, ranks: Sequence[WorkerRank], hashes: bytes, starts: Sequence[int], now: float
    ) -> list[int]:
        """`leading` for each rank from its own start. Most have nothing there: that is cheap."""
        blocks = _blocks(hashes)
        end = len(blocks)
        wanted = {start for start in set(starts) if start < end and blocks[start] in self._perhaps}
        if not wanted:
            return [0] * len(ranks)
        return [
            _leading(known, blocks, start, now)
            if start in wanted and (known := self._until.get(rank)) is not None
            else 0
            for rank, start in zip(ranks, starts, strict=True)
        ]

    def __len__(self) -> int:
        """Predicted blocks of all ranks."""
        return sum(map(len, self._until.values()))

    def check(self) -> None:
        """Raise InvariantError if anything contradicts anything."""
        queued = sum(len(made.hashes) // HASH_BYTES for made in self._queue)
        _require(queued == self._queued_blocks, f"{self._queued_blocks} queued, {queued} found")
        _require(queued <= self._max_blocks, f"{queued} blocks, {self._max_blocks} allowed")
        _require(self._latest.keys() == self._until.keys(), "ranks without predictions are kept")
        ends = {
            (made.rank, block, made.until)
            for made in self._queue
            if made.known is self._until.get(made.rank)
            for block in _blocks(made.hashes)
        }
        for rank, known in self._until.items():
            _require(known.keys() <= self._perhaps, f"{rank} has blocks that nobody looks for")
            _require(bool(known), f"{rank} has an empty map")
            late = max(known.values()) > self._latest[rank]
            _require(not late, f"{rank} has blocks that last longer than it says")
            for block, until in known.items():
                _require((rank, block, until) in ends, f"{rank} block {block:x} never expires")


def _leading(known: dict[int, float], blocks: memoryview, start: int, now: float) -> int:
    length = 0
    for block in blocks[start:]:
        if known.get(block, now) <= now:
            break
        length += 1
    return length


def _blocks(hashes: bytes) -> memoryview:
    """The hashes as numbers: the cheapest keys that there are."""
    return memoryview(hashes).cast("Q")


def _require(holds: bool, story: str) -> None:
    if not holds:
        raise InvariantError(story)
