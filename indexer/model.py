"""The values that the index hands out."""

from enum import StrEnum
from typing import NamedTuple

import msgspec


class InvariantError(AssertionError):
    """The index contradicts itself; the message tells where. A bug of ours, never of an engine."""


class Overlap(NamedTuple):
    """How many leading blocks of a prompt a worker rank holds, by the tier that they end in.

    `gpu` blocks are resident on the GPU; the `cpu` blocks right behind them on GPU or CPU; the
    `disk` blocks right behind those anywhere.
    """

    gpu: int
    cpu: int = 0
    disk: int = 0

    @property
    def total(self) -> int:
        """Leading blocks on any tier."""
        return self.gpu + self.cpu + self.disk


class _Overlaps(dict[int, Overlap]):
    def __missing__(self, blocks: int) -> Overlap:
        made = self[blocks] = Overlap(blocks)
        return made


OVERLAPS = _Overlaps()
"""The overlap of so many GPU blocks; each is made once. As many as the deepest path has blocks."""


class IgnoreCause(StrEnum):
    """Why blocks of a readable event say nothing to the index."""

    OPAQUE_GROUP = "opaque_group"
    UNPAIRED = "unpaired"
    PLACEHOLDER = "placeholder"
    OTHER_BLOCK_SIZE = "other_block_size"
    OVER_BUDGET = "over_budget"


class ResyncCause(StrEnum):
    """Why what we hold of a rank can't be what the rank holds."""

    OVER_CAPACITY = "over_capacity"
    ORPHANS = "orphans"


class Applied(msgspec.Struct):
    """What one batch did to the index. All counts are blocks (copies), except `cleared`.

    `stored` has the hashes of the blocks that became resident on the GPU, 8 bytes each.
    `adopted_block_size` is set when the batch brought a block size that is new for the rank; what
    the rank held in blocks of another size is gone then. `resync` asks the caller to have the
    rank's source resynchronised and to clear the rank.
    """

    stored_blocks: int = 0
    removed_blocks: int = 0
    unknown_removed: int = 0
    orphans: int = 0
    cleared: int = 0
    ignored: dict[IgnoreCause, int] = msgspec.field(default_factory=dict)
    stored: bytes = b""
    adopted_block_size: int | None = None
    resync: ResyncCause | None = None

    def ignore(self, cause: IgnoreCause, blocks: int) -> None:
        """Count blocks that say nothing."""
        self.ignored[cause] = self.ignored.get(cause, 0) + blocks


class IndexStats(NamedTuple):
    """The size of the index. `blocks` counts each rank's, `tree_blocks` what is shared once.

    `estimated_bytes` is what the index takes of memory, as measured for ranks of 20,000 blocks.
    """

    ranks: int
    nodes: int
    tree_blocks: int
    blocks: int
    estimated_bytes: int
