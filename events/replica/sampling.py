"""A prompt's block hashes, thinned out so that a message does not grow with the prompt.

Block hashes are chained: one of them stands for the whole prefix up to its block. So the hashes at
a few fixed positions are enough to see, to within the distance of two positions, how long a prefix
two prompts share. The positions are the same for all prompts: each of the first 16 blocks, then 8
for each doubling (18, 20, ... 32, 36, ...). A shared prefix of n blocks is taken for one that is
shorter by at most n / 9, and 2,048 blocks have 72 samples.
"""

from bisect import bisect_right

HASH_BYTES = 8
_DENSE_BLOCKS = 16
_PER_DOUBLING = 8
_MAX_BLOCKS = 2**24


def _positions() -> tuple[int, ...]:
    positions = list(range(_DENSE_BLOCKS + 1))
    while positions[-1] < _MAX_BLOCKS:
        doubled = positions[-1]
        positions += [doubled + doubled * step // _PER_DOUBLING for step in range(1, 9)]
    return tuple(positions)


POSITIONS = _positions()
"""How many blocks the first n samples stand for, by n."""

MAX_SAMPLES = len(POSITIONS) - 1

_CUTS = tuple(slice((at - 1) * HASH_BYTES, at * HASH_BYTES) for at in POSITIONS[1:])


def sample(hashes: bytes) -> bytes:
    """The hashes at the fixed positions."""
    count = samples_within(len(hashes) // HASH_BYTES)
    if count <= _DENSE_BLOCKS:
        return hashes[: count * HASH_BYTES]
    dense = hashes[: _DENSE_BLOCKS * HASH_BYTES]
    return dense + b"".join([hashes[cut] for cut in _CUTS[_DENSE_BLOCKS:count]])


def samples_within(blocks: int) -> int:
    """How many samples the first `blocks` blocks have."""
    if blocks <= _DENSE_BLOCKS:
        return blocks
    return bisect_right(POSITIONS, blocks) - 1


def blocks_of(samples: int) -> int:
    """How many blocks the first `samples` samples stand for."""
    return POSITIONS[samples]
