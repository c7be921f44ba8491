"""What a policy is told of the worker ranks that a request could go to.

A decision looks at every rank of a fleet, so its facts stand in columns, one list per fact; a
row becomes an object only where somebody wants to see it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from events import WorkerRank
from indexer import Overlap
from kvrouter.prompt import Prompt
from kvrouter.rank_load import Loads, RankLoad


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


class Details(Protocol):
    """Columns of a survey that only some decisions need; made each time they are asked for."""

    def new_tokens(self, survey: "Survey") -> list[int]:
        """The request's blocks that are not active on each rank yet, in tokens."""

    def capacities(self, survey: "Survey") -> list[float]:
        """What each rank's cache can hold, in tokens; infinite where it is not known."""

    def rooms(self, survey: "Survey") -> list[float]:
        """What can be stored on each rank before something is evicted, in tokens.

        0 where that is not known.
        """


class Survey(msgspec.Struct, frozen=True, eq=False, gc=False):
    """All candidates of one decision at `now`: a sequence of rows, kept as columns."""

    now: float
    prompt: Prompt
    ranks: Sequence[WorkerRank]
    block_sizes: list[int]
    overlaps: list[Overlap]
    predicted_blocks: list[int]
    saved_blocks: Sequence[float]
    uncached_tokens: list[float]
    loads: Loads
    slowness: list[float]
    """How many times as long as elsewhere outputs take on each rank; empty if on none."""
    most_new_tokens: int
    """Bounds `new_tokens`."""
    least_capacity: float
    """Of the smallest cache, in tokens; with the bound often enough to do without details."""
    details: Details

    def new_tokens(self) -> list[int]:
        """See `Details`."""
        return self.details.new_tokens(self)

    def capacities(self) -> list[float]:
        """See `Details`."""
        return self.details.capacities(self)

    def rooms(self) -> list[float]:
        """See `Details`."""
        return self.details.rooms(self)

    @property
    def block_unit(self) -> int:
        """The smallest block size, in tokens: what blocks are counted in."""
        return min(self.block_sizes)

    def joined(self, other: "Survey") -> "Survey":
        """Both, one behind the other."""
        return Survey(
            self.now,
            self.prompt,
            [*self.ranks, *other.ranks],
            self.block_sizes + other.block_sizes,
            self.overlaps + other.overlaps,
            self.predicted_blocks + other.predicted_blocks,
            [*self.saved_blocks, *other.saved_blocks],
            self.uncached_tokens + other.uncached_tokens,
            self.loads.joined(other.loads),
            _joined_slowness(self, other),
            max(self.most_new_tokens, other.most_new_tokens),
            min(self.least_capacity, other.least_capacity),
            _Joined(self, other),
        )

    def candidate(self, position: int) -> Candidate:
        """The row at this position."""
        overlap, predicted = self.overlaps[position], self.predicted_blocks[position]
        return Candidate(
            self.ranks[position],
            self.block_sizes[position],
            overlap,
            predicted,
            self.saved_blocks[position],
            self.uncached_tokens[position],
            self.loads.each[position],
            sum(overlap) + predicted,
        )

    def __len__(self) -> int:
        return len(self.ranks)

    def __getitem__(self, position: int) -> Candidate:
        return self.candidate(position)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.candidate, range(len(self.ranks)))


class _Joined(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The details of two surveys, one behind the other."""

    one: Survey
    other: Survey

    def new_tokens(self, survey: Survey) -> list[int]:  # noqa: ARG002 - it is both
        return self.one.new_tokens() + self.other.new_tokens()

    def capacities(self, survey: Survey) -> list[float]:  # noqa: ARG002 - likewise
        return self.one.capacities() + self.other.capacities()

    def rooms(self, survey: Survey) -> list[float]:  # noqa: ARG002 - likewise
        return self.one.rooms() + self.other.rooms()


def _joined_slowness(one: Survey, other: Survey) -> list[float]:
    if not one.slowness and not other.slowness:
        return []
    return [*(one.slowness or [1.0] * len(one)), *(other.slowness or [1.0] * len(other))]
