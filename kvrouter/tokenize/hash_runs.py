"""Block hashes that are not computed again for a prompt whose beginning was hashed before.

A hash depends on all tokens before it, so a prompt is hashed block after block, in Python 0.2 us
each. Here that is remembered for runs of blocks, long ones first: a run is known by the hash before
it and a digest of its tokens, which costs a fiftieth of hashing its blocks. The digest is no
cryptographic one; whoever crafts a collision sends a request to the wrong cache, as with the hashes
themselves.
"""

import threading
from array import array
from collections import OrderedDict

from xxhash import xxh3_128_digest

from indexer.hashing import HASH_BYTES, TOKEN_BYTES, block_hashes, chain, root

RUNS = (512, 128, 32)
"""Blocks of a run. The shorter ones are for what is left behind the longer ones."""
_ENTRY_BYTES = 300
"""What a run takes besides its hashes, about: its key and the dictionary's slot."""
_Key = tuple[int, bytes, bytes]


class HashRuns:
    """Hashes of runs of blocks; the least recently used go first. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._runs: OrderedDict[_Key, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What is remembered, in bytes."""
        return self._bytes

    def block_hashes(self, ids: "array[int]", block_size: int, namespace: bytes = b"") -> bytes:
        """The same as `indexer.block_hashes`."""
        if len(ids) < RUNS[-1] * block_size:
            return block_hashes(ids, block_size, namespace)
        packed = memoryview(ids).cast("B")
        previous = root(namespace)
        hashes: list[bytes] = []
        start = 0
        for blocks in RUNS:
            width = blocks * block_size * TOKEN_BYTES
            while start + width <= len(packed):
                known = self._run(previous, packed[start : start + width], block_size)
                hashes.append(known)
                previous = known[-HASH_BYTES:]
                start += width
        hashes.append(chain(previous, ids[start // TOKEN_BYTES :], block_size))
        return b"".join(hashes)

    def _run(self, previous: bytes, run: memoryview, block_size: int) -> bytes:
        key = (block_size, previous, xxh3_128_digest(run))
        with self._lock:
            known = self._runs.get(key)
            if known is not None:
                self._runs.move_to_end(key)
                return known
        made = chain(previous, array("I", bytes(run)), block_size)
        with self._lock:
            if key not in self._runs:  # another thread may have met the same run
                self._runs[key] = made
                self._bytes += len(made) + _ENTRY_BYTES
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._runs.popitem(last=False)[1]) + _ENTRY_BYTES
        return made
