"""Which blocks live on which worker rank."""

from indexer.hashing import block_hashes, namespace

__all__ = ["block_hashes", "namespace"]
