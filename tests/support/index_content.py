"""What an index holds, as plain values that two indexes can be compared by."""

from typing import Any

from events import WorkerRank
from indexer import RadixIndex
from indexer.hashing import HASH_BYTES
from indexer.snapshot import _rest, _segments


def content(index: RadixIndex) -> dict[WorkerRank, Any]:
    """For each rank with blocks: the place of each name, and what else is known of it."""
    found = {}
    for rank in index.ranks():
        holdings = index.held(rank)
        if holdings is None or not index.blocks(rank):
            continue
        places = {}
        for segment in _segments(holdings):
            lower = int.from_bytes(segment.lower, "big")
            for at in range(len(segment.names) // HASH_BYTES):
                part = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
                places[segment.names[part]] = (segment.hashes[part], lower >> at & 1)
        rest = _rest(holdings, None)
        found[rank] = (places, rest.block_size, rest.copies, rest.lower, rest.opaque)
    return found
