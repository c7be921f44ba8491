"""What a policy is told of each worker rank that a request could go to."""

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
    awaited_tokens: int
    """The part of the rank's queued prefill that computes blocks of this very prompt, which no
    candidate holds yet: wherever the request goes, it has to wait for them."""
    load: RankLoad

    @property
    def held_blocks(self) -> int:
        """Leading blocks that the rank is expected to find in its cache, on any tier."""
        return self.overlap.total + self.predicted_blocks
