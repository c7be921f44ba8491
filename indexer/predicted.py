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
from array import array
from collections.abc import Iterator, Sequence
from itertools import count, groupby
from typing import TypeAlias

import msgspec

from events import WorkerRank
from indexer.guesses import MARK_BLOCKS, Guesses, blocks_of
from indexer.hashing import HASH_BYTES
from indexer.model import InvariantError

MAX_BLOCKS = 500_000
_GONE_MARKS = 256


class _Prediction(msgspec.Struct, eq=False, gc=False):
    """One prediction. `lead` of its hashes, in blocks, only tell where the others belong.

    `known` is what it was noted in; where that is not the rank's any more, nothing is left.
    """

    until: float
    rank: WorkerRank
    hashes: bytes
    lead: int
    known: Guesses

    @property
    def own(self) -> bytes:
        """The hashes of what is expected."""
        return self.hashes[self.lead * HASH_BYTES :]

    @property
    def blocks(self) -> int:
        """How many these are."""
        return len(self.hashes) // HASH_BYTES - self.lead


_Queued: TypeAlias = tuple[float, int, _Prediction]
"""In the order of the queue: by expiry, then by age."""


class PredictedBlocks:
    """Expected blocks per rank. `max_blocks` bounds the blocks of all live predictions."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._guesses: dict[WorkerRank, Guesses] = {}
        self._queue: list[_Queued] = []
        self._queued_blocks = 0
        self._age = count()
        self._marks: set[int] = set()  # of the guesses of all ranks, and of some gone ones
        self._most_marks = _GONE_MARKS

    def expect(
        self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float, start: int = 0
    ) -> None:
        """Predict that the rank will hold a prompt's blocks from `start` on.

        For `ttl_s` seconds from `now` on.
        """
        hashes, lead = self._cut(hashes, start)
        blocks = len(hashes) // HASH_BYTES - lead
        if blocks <= 0 or ttl_s <= 0:
            return
        until = now + ttl_s
        known = self._guesses.get(rank)
        if known is None:
            known = self._guesses[rank] = Guesses(self._marks)
        known.expect(hashes, until, start=lead)
        made = _Prediction(until, rank, hashes, lead, known)
        heapq.heappush(self._queue, (until, next(self._age), made))
        self._queued_blocks += blocks
        while self._queued_blocks > self._max_blocks:
            self._drop_first()
        if len(self._marks) > self._most_marks:
            self._marks.clear()
            self._marks.update(*(known.marks for known in self._guesses.values()))
            self._most_marks = 2 * len(self._marks) + _GONE_MARKS

    def confirm(self, rank: WorkerRank, hashes: bytes) -> None:
        """Events have these blocks on the rank: the index speaks for them from now on.

        They are in a row. A few from the middle of a prediction, whose first blocks have not come,
        may be overlooked (`Guesses.forget`).
        """
        known = self._guesses.get(rank)
        if known is not None:
            known.forget(hashes, math.inf)
            if not known:
                self.drop(rank)

    def withdraw(self, rank: WorkerRank, hashes: bytes, *, start: int = 0) -> None:
        """Take back a prediction of these blocks: they won't come, as the request was refused.

        What other predictions of the rank expect as well stays. Costs a look at each live
        prediction, which only what went wrong has to pay.
        """
        known = self._guesses.get(rank)
        if known is None:
            return
        hashes, lead = self._cut(hashes, start)
        own = hashes[lead * HASH_BYTES :]
        living = [queued for queued in self._queue if queued[2].known is known]
        taken = next((queued for queued in living if queued[2].own == own), None)
        if taken is None:
            return
        self._queue.remove(taken)
        living.remove(taken)
        heapq.heapify(self._queue)
        self._queued_blocks -= taken[2].blocks
        for piece in known.forget(hashes, math.inf, start=lead):
            for until, blocks in _lasting(piece, [made for _, _, made in living]):
                known.expect(blocks, until)
        if not known:
            self.drop(rank)

    def _cut(self, hashes: bytes, start: int) -> tuple[bytes, int]:
        """What is noted of a prompt's blocks, and how many of them are before `start`."""
        lead = start if start < MARK_BLOCKS else MARK_BLOCKS - 1
        return hashes[(start - lead) * HASH_BYTES : (start + self._max_blocks) * HASH_BYTES], lead

    def expire(self, now: float) -> None:
        """Forget what was expected up to `now` and has not come."""
        while self._queue and self._queue[0][0] <= now:
            self._drop_first()

    def _drop_first(self) -> None:
        """Forget the prediction that expires first, but not what a later one expects as well."""
        _, _, made = heapq.heappop(self._queue)
        self._queued_blocks -= made.blocks
        if self._guesses.get(made.rank) is not made.known:
            return
        made.known.forget(made.hashes, made.until, start=made.lead)
        if not made.known:
            self.drop(made.rank)

    def drop(self, rank: WorkerRank) -> None:
        """Forget all predictions of a rank at once: the queue sees by `known` that they are."""
        known = self._guesses.pop(rank, None)
        if known is not None:
            known.clear()

    def drop_worker(self, name: str) -> None:
        """Forget all predictions of a worker's ranks."""
        for rank in [rank for rank in self._guesses if rank.worker == name]:
            self.drop(rank)

    def leading(self, rank: WorkerRank, hashes: bytes, start: int, now: float) -> int:
        """How many blocks from position `start` on are predicted, up to the first that is not."""
        return self.leading_each([rank], hashes, [start], now)[0]

    def leading_each(
        self, ranks: Sequence[WorkerRank], hashes: bytes, starts: Sequence[int], now: float
    ) -> list[int]:
        """`leading` for each rank from its own start. Most have nothing there: that is cheap.

        `hashes` are those of a prompt from its first block on.
        """
        blocks = blocks_of(hashes)
        end = len(blocks)
        wanted = {
            start
            for start in set(starts)
            if start < end
            and not self._marks.isdisjoint(blocks[max(0, start - MARK_BLOCKS + 1) : start + 1])
        }
        if not wanted:
            return [0] * len(ranks)
        return [
            known.leading(blocks, hashes, start, now)
            if start in wanted and (known := self._guesses.get(rank)) is not None
            else 0
            for rank, start in zip(ranks, starts, strict=True)
        ]

    def __bool__(self) -> bool:
        return bool(self._guesses)

    def __len__(self) -> int:
        """Predicted blocks of all ranks: counts them."""
        return sum(map(len, self._guesses.values()))

    def check(self) -> None:
        """Raise InvariantError if anything contradicts anything."""
        predictions = [made for _, _, made in self._queue]
        queued = sum(made.blocks for made in predictions)
        _require(queued == self._queued_blocks, f"{self._queued_blocks} queued, {queued} found")
        _require(queued <= self._max_blocks, f"{queued} blocks, {self._max_blocks} allowed")
        ends = {
            (made.rank, block, made.until)
            for made in predictions
            if made.known is self._guesses.get(made.rank)
            for block in blocks_of(made.own)
        }
        for rank, known in self._guesses.items():
            known.check()
            _require(self._marks.issuperset(known.marks), f"nobody looks for what {rank} expects")
            _require(len(known) > 0, f"{rank} has an empty map")
            for block, until in known:
                _require((rank, block, until) in ends, f"{rank} block {block:x} never expires")


def _lasting(piece: bytes, predictions: Sequence[_Prediction]) -> Iterator[tuple[float, bytes]]:
    """Those of these blocks, in a row, that predictions have: the longest time, and its blocks."""
    wanted = set(blocks_of(piece))
    lasting: dict[int, float] = {}
    for made in predictions:
        for block in wanted.intersection(blocks_of(made.own)):
            lasting[block] = max(made.until, lasting.get(block, made.until))
    for until, blocks in groupby(blocks_of(piece), lasting.get):
        if until is not None:
            yield until, array("Q", blocks).tobytes()


def _require(holds: bool, story: str) -> None:
    if not holds:
        raise InvariantError(story)
