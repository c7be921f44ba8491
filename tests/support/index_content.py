"""What an index holds, as plain values that two indexes can be compared by."""

from typing import Any

from events import WorkerRank
from indexer import RadixIndex
from indexer.hashing import HASH_BYTES
from indexer.snapshot import _held, _segments


def content(index: RadixIndex) -> dict[WorkerRank, Any]:
    """For each rank with blocks: the place of each name, and what else is known of it."""
    found = {}
    for rank in index.ranks():
        holdings = index.held(rank)
        if holdings is None or not index.blocks(rank):
            continue
        places = {}
        for segment in _segments(_held(holdings)):
            lower = int.from_bytes(segment.lower, "big")
            for at in range(len(segment.names) // HASH_BYTES):
                part = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
                places[segment.names[part]] = (segment.hashes[part], lower >> at & 1)
        counts = (dict(holdings.copies), {t: dict(c) for t, c in holdings.lower.items()})
        found[rank] = (places, holdings.block_size, *counts, sorted(holdings.opaque))
    return found
