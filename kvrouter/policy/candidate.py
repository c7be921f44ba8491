"""What a policy is told of the worker ranks that a request could go to.

A decision looks at every rank of a fleet, so its facts stand in columns, one list per fact; a
row becomes an object only where somebody wants to see it.
"""

from collections.abc import Iterator, Sequence
from typing import overload

import msgspec

from events import WorkerRank
from indexer import Overlap
from kvrouter.load import RankLoad


class TierCredit(msgspec.Struct, frozen=True):
    """The share of a block's prefill that is saved where the block is not on the GPU.

    Loading it costs time too; from host memory less than from disk.
    """

    cpu: float = 0.75
    disk: float = 0.25


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One rank and this request: facts only, what they cost is a scorer's business."""

    rank: WorkerRank
    block_size: int
    overlap: Overlap
    predicted_blocks: int
    """Behind the overlap: expected there, not reported yet."""
    saved_blocks: float
    """Overlap and predicted blocks, with their credit: what the rank need not prefill."""
    uncached_tokens: float
    """What the rank would prefill for this request: the prompt without `saved_blocks`."""
    new_tokens: int
    """The request's blocks that are not active there yet, in tokens."""
    capacity_tokens: float
    """What the rank's cache can hold; infinite where it is not known."""
    room_tokens: float
    """What can be stored there before something is evicted; 0 where that is not known."""
    load: RankLoad

    @property
    def held_blocks(self) -> int:
        """Leading blocks that the rank is expected to find in its cache, on any tier."""
        return self.overlap.total + self.predicted_blocks


class Survey(Sequence[Candidate]):
    """All candidates of one decision at `now`: a sequence of rows, kept as columns."""

    __slots__ = (
        "block_sizes",
        "capacities",
        "loads",
        "new_tokens",
        "now",
        "overlaps",
        "predicted_blocks",
        "ranks",
        "rooms",
        "saved_blocks",
        "uncached_tokens",
    )

    def __init__(
        self,
        now: float,
        ranks: Sequence[WorkerRank],
        block_sizes: list[int],
        overlaps: list[Overlap],
        predicted_blocks: list[int],
        saved_blocks: list[float],
        uncached_tokens: list[float],
        new_tokens: list[int],
        capacities: list[float],
        rooms: list[float],
        loads: list[RankLoad],
    ) -> None:
        self.now = now
        self.ranks = ranks
        self.block_sizes = block_sizes
        self.overlaps = overlaps
        self.predicted_blocks = predicted_blocks
        self.saved_blocks = saved_blocks
        self.uncached_tokens = uncached_tokens
        self.new_tokens = new_tokens
        self.capacities = capacities
        self.rooms = rooms
        self.loads = loads

    @classmethod
    def of(cls, candidates: Sequence[Candidate], now: float = 0.0) -> "Survey":
        """The columns of these rows."""
        return cls(
            now,
            [each.rank for each in candidates],
            [each.block_size for each in candidates],
            [each.overlap for each in candidates],
            [each.predicted_blocks for each in candidates],
            [each.saved_blocks for each in candidates],
            [each.uncached_tokens for each in candidates],
            [each.new_tokens for each in candidates],
            [each.capacity_tokens for each in candidates],
            [each.room_tokens for each in candidates],
            [each.load for each in candidates],
        )

    def extend(self, other: "Survey") -> None:
        """Put another survey's rows behind these."""
        self.ranks = [*self.ranks, *other.ranks]
        self.block_sizes += other.block_sizes
        self.overlaps += other.overlaps
        self.predicted_blocks += other.predicted_blocks
        self.saved_blocks += other.saved_blocks
        self.uncached_tokens += other.uncached_tokens
        self.new_tokens += other.new_tokens
        self.capacities += other.capacities
        self.rooms += other.rooms
        self.loads += other.loads

    @property
    def block_unit(self) -> int:
        """The smallest block size, in tokens: what all are counted in."""
        return min(self.block_sizes)

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, position: int) -> Candidate: ...
    @overload
    def __getitem__(self, position: slice) -> list[Candidate]: ...
    def __getitem__(self, position: int | slice) -> Candidate | list[Candidate]:
        if isinstance(position, slice):
            return [self[each] for each in range(*position.indices(len(self)))]
        return Candidate(
            self.ranks[position],
            self.block_sizes[position],
            self.overlaps[position],
            self.predicted_blocks[position],
            self.saved_blocks[position],
            self.uncached_tokens[position],
            self.new_tokens[position],
            self.capacities[position],
            self.rooms[position],
            self.loads[position],
        )

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.__getitem__, range(len(self)))
