"""Which blocks live on which worker rank."""

from indexer.hashing import block_hashes, namespace
from indexer.hot import HotPrefix
from indexer.model import Applied, IgnoreCause, IndexStats, InvariantError, Overlap, ResyncCause
from indexer.predicted import PredictedBlocks
from indexer.radix import RadixIndex

__all__ = [
    "Applied",
    "HotPrefix",
    "IgnoreCause",
    "IndexStats",
    "InvariantError",
    "Overlap",
    "PredictedBlocks",
    "RadixIndex",
    "ResyncCause",
    "block_hashes",
    "namespace",
]
