"""Block hashes that are not computed again for a prompt whose beginning was hashed before.

A hash depends on all tokens before it, so a prompt is hashed block after block, in Python 0.2 us
each. Here that is remembered for runs of blocks: a run is known by a digest of the hash before it
and of its tokens, which costs a tenth of hashing its blocks. The digest is no cryptographic one;
whoever crafts a collision sends a request to the wrong cache, as with the hashes themselves.
"""

import threading
from array import array
from collections import OrderedDict

from xxhash import xxh3_128_digest

from indexer.hashing import HASH_BYTES, TOKEN_BYTES, chain, root

RUN_BLOCKS = 64
_RUN_BYTES = RUN_BLOCKS * HASH_BYTES + 200
"""What a run takes: its hashes and, about, its key and the dictionary's slot."""


class HashRuns:
    """Hashes of runs of blocks; the least recently used go first. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._runs: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """What is remembered, in bytes."""
        return len(self._runs) * _RUN_BYTES

    def block_hashes(self, ids: "array[int]", block_size: int, namespace: bytes = b"") -> bytes:
        """The same as `indexer.block_hashes`."""
        run_bytes = RUN_BLOCKS * block_size * TOKEN_BYTES
        packed = memoryview(ids.tobytes())
        previous = root(namespace)
        hashes = []
        for start in range(0, len(packed) - run_bytes + 1, run_bytes):
            run = packed[start : start + run_bytes]
            known = self._run(previous, run, block_size)
            hashes.append(known)
            previous = known[-HASH_BYTES:]
        rest = len(packed) // run_bytes * RUN_BLOCKS * block_size
        return b"".join([*hashes, chain(previous, ids[rest:], block_size)])

    def _run(self, previous: bytes, run: memoryview, block_size: int) -> bytes:
        key = (block_size, xxh3_128_digest(previous + run))
        with self._lock:
            known = self._runs.get(key)
            if known is not None:
                self._runs.move_to_end(key)
                return known
        made = chain(previous, array("I", bytes(run)), block_size)
        with self._lock:
            self._runs[key] = made
            while self.size_bytes > self._max_bytes:
                self._runs.popitem(last=False)
        return made
