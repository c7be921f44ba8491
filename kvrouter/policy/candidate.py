"""What a policy is told of the worker ranks that a request could go to.

A decision looks at every rank of a fleet, so its facts stand in columns, one list per fact; a
row becomes an object only where somebody wants to see it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import overload

import msgspec

from events import WorkerRank
from indexer import Overlap
from kvrouter.rank_load import RankLoad


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
    load: RankLoad
    held_blocks: int
    """Leading blocks that the rank is expected to find in its cache, on any tier."""


class Survey(Sequence[Candidate]):
    """All candidates of one decision at `now`: a sequence of rows, kept as columns.

    `most_new_tokens` bounds `new_tokens`, and `least_capacity` (in tokens) is that of the smallest
    cache: often enough to do without the columns that are made when they are first asked for.
    `slowness` is how many times as long as elsewhere outputs take on each rank; empty if on none.
    """

    def __init__(
        self,
        now: float,
        ranks: Sequence[WorkerRank],
        block_sizes: list[int],
        overlaps: list[Overlap],
        predicted_blocks: list[int],
        saved_blocks: Sequence[float],
        uncached_tokens: list[float],
        loads: list[RankLoad],
        *,
        slowness: list[float],
        most_new_tokens: int,
        least_capacity: float,
        new_tokens: Callable[[], list[int]],
        capacities: Callable[[], list[float]],
        rooms: Callable[[], list[float]],
    ) -> None:
        self.now = now
        self.ranks = ranks
        self.block_sizes = block_sizes
        self.overlaps = overlaps
        self.predicted_blocks = predicted_blocks
        self.saved_blocks = saved_blocks
        self.uncached_tokens = uncached_tokens
        self.loads = loads
        self.active_requests = [load.active_requests for load in loads]
        self.slowness = slowness
        self.most_new_tokens = most_new_tokens
        self.least_capacity = least_capacity
        self._new_tokens = new_tokens
        self._capacities = capacities
        self._rooms = rooms

    @cached_property
    def new_tokens(self) -> list[int]:
        """The request's blocks that are not active on each rank yet, in tokens."""
        return self._new_tokens()

    @cached_property
    def capacities(self) -> list[float]:
        """What each rank's cache can hold, in tokens; infinite where it is not known."""
        return self._capacities()

    @cached_property
    def rooms(self) -> list[float]:
        """What can be stored on each rank before something is evicted, in tokens.

        0 where that is not known.
        """
        return self._rooms()

    @property
    def block_unit(self) -> int:
        """The smallest block size, in tokens: what blocks are counted in."""
        return min(self.block_sizes)

    def joined(self, other: "Survey") -> "Survey":
        """Both, one behind the other."""
        return Survey(
            self.now,
            [*self.ranks, *other.ranks],
            self.block_sizes + other.block_sizes,
            self.overlaps + other.overlaps,
            self.predicted_blocks + other.predicted_blocks,
            [*self.saved_blocks, *other.saved_blocks],
            self.uncached_tokens + other.uncached_tokens,
            self.loads + other.loads,
            slowness=_joined_slowness(self, other),
            most_new_tokens=max(self.most_new_tokens, other.most_new_tokens),
            least_capacity=min(self.least_capacity, other.least_capacity),
            new_tokens=lambda: self.new_tokens + other.new_tokens,
            capacities=lambda: self.capacities + other.capacities,
            rooms=lambda: self.rooms + other.rooms,
        )

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, position: int) -> Candidate: ...
    @overload
    def __getitem__(self, position: slice) -> list[Candidate]: ...
    def __getitem__(self, position: int | slice) -> Candidate | list[Candidate]:
        if isinstance(position, slice):
            return [self[each] for each in range(*position.indices(len(self)))]
        overlap, predicted = self.overlaps[position], self.predicted_blocks[position]
        return Candidate(
            self.ranks[position],
            self.block_sizes[position],
            overlap,
            predicted,
            self.saved_blocks[position],
            self.uncached_tokens[position],
            self.loads[position],
            sum(overlap) + predicted,
        )

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.__getitem__, range(len(self)))


def _joined_slowness(one: Survey, other: Survey) -> list[float]:
    if not one.slowness and not other.slowness:
        return []
    return [*(one.slowness or [1.0] * len(one)), *(other.slowness or [1.0] * len(other))]
