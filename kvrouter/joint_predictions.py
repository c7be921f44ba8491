"""Blocks that are expected because some replica routed there: own guesses, and sampled ones. Pure.

An own prediction has every block. What other replicas tell has the sampled ones (`events.replica`),
and the blocks between two of them are there if the second one is: hashes are chained.
"""

from collections.abc import Sequence
from typing import Protocol

from events import WorkerRank
from events.replica import Booking, blocks_of
from events.replica.sampling import samples_within
from indexer import PredictedBlocks
from kvrouter.shared_load import Sampler


class Expectations(Protocol):
    """The predictions of one model, whoever made them."""

    def expect(
        self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float, start: int = 0
    ) -> None:
        """Expect a prompt's blocks from `start` on for so long."""

    def leading_each(
        self, ranks: Sequence[WorkerRank], hashes: bytes, starts: Sequence[int], now: float
    ) -> list[int]:
        """How many blocks are expected on each rank, from its start to the first that is not."""

    def confirm(self, rank: WorkerRank, hashes: bytes) -> None:
        """Events have these blocks."""

    def withdraw(self, rank: WorkerRank, hashes: bytes, *, start: int = 0) -> None:
        """Take back a prediction of a prompt's blocks from `start` on."""

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""

    def drop(self, rank: WorkerRank) -> None:
        """Forget all predictions of a rank."""

    def drop_worker(self, name: str) -> None:
        """Forget all predictions of a worker's ranks."""

    def __len__(self) -> int:
        """Predicted blocks of all ranks."""

    def check(self) -> None:
        """Raise InvariantError if anything contradicts anything."""


class JointPredictions:
    """Own and others' predictions of one model, as if they were of one kind."""

    def __init__(self, own: PredictedBlocks, others: PredictedBlocks) -> None:
        self._own = own
        self._others = others
        self._sample = Sampler()

    def expect(
        self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float, start: int = 0
    ) -> None:
        """Expect blocks because this router has routed there."""
        self._own.expect(rank, hashes, now=now, ttl_s=ttl_s, start=start)

    def leading_each(
        self, ranks: Sequence[WorkerRank], hashes: bytes, starts: Sequence[int], now: float
    ) -> list[int]:
        """How many blocks are expected on each rank, from its start to the first that is not."""
        own = self._own.leading_each(ranks, hashes, starts, now)
        if not self._others:
            return own
        firsts = [samples_within(start) for start in starts]
        counts = self._others.leading_each(ranks, self._sample(hashes), firsts, now)
        return [
            max(length, blocks_of(first + count) - start) if count else length
            for length, start, first, count in zip(own, starts, firsts, counts, strict=True)
        ]

    def confirm(self, rank: WorkerRank, hashes: bytes) -> None:
        """Events have these blocks."""
        self._own.confirm(rank, hashes)
        self._others.confirm(rank, hashes)

    def withdraw(self, rank: WorkerRank, hashes: bytes, *, start: int = 0) -> None:
        """Take back an own prediction; what others were told of runs out by itself."""
        self._own.withdraw(rank, hashes, start=start)

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""
        self._own.expire(now)
        self._others.expire(now)

    def drop(self, rank: WorkerRank) -> None:
        """Forget all predictions of a rank."""
        self._own.drop(rank)
        self._others.drop(rank)

    def drop_worker(self, name: str) -> None:
        """Forget all predictions of a worker's ranks."""
        self._own.drop_worker(name)
        self._others.drop_worker(name)

    def __len__(self) -> int:
        """Predicted blocks; of others' the sampled ones."""
        return len(self._own) + len(self._others)

    def check(self) -> None:
        """Raise InvariantError if anything contradicts anything."""
        self._own.check()
        self._others.check()


def expect_sampled(others: PredictedBlocks, booking: Booking, *, now: float, ttl_s: float) -> None:
    """Expect what another replica's booking has computed, for the rest of its time."""
    rank = WorkerRank(booking.worker, booking.dp_rank)
    others.expect(
        rank,
        booking.samples,
        now=now,
        ttl_s=ttl_s - booking.age_ms / 1000,
        start=booking.cached_samples,
    )
