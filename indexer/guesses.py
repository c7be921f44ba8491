"""What is expected of one rank: blocks, each until a time of its own.

Prompts repeat and grow, so the same chain is expected again and again, a little longer each time.
Blocks in a row that last equally long are one run: expecting them again, or looking how far they
go, is to compare memory. Only where runs begin, end or are cut do single blocks cost anything.
"""

from collections.abc import Iterator, KeysView

from indexer.hashing import HASH_BYTES
from indexer.model import InvariantError


class _Run:
    """Hashes in a row that last until the same time."""

    __slots__ = ("hashes", "until")

    def __init__(self, hashes: bytes, until: float) -> None:
        self.hashes = hashes
        self.until = until


class Guesses:
    """The expected blocks of one rank."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}

    def expect(self, hashes: bytes, until: float) -> None:
        """Expect these blocks; one that lasts longer goes on doing so."""
        runs, blocks = self._runs, blocks_of(hashes)
        before: _Run | None = None  # lasts until then, and ends at `position`
        position = 0
        while position < len(hashes):
            run = runs.get(blocks[position // HASH_BYTES])
            if run is None:
                if before is None:
                    before = _Run(b"", until)
                end = position + HASH_BYTES * self._lead_unknown(
                    blocks[position // HASH_BYTES :], before
                )
                before.hashes += hashes[position:end]
                position = end
                continue
            at, length = _agreement(run.hashes, hashes, position)
            if run.until < until:
                run = self._part(run, at, at + length)
                run.until = until
                at = 0
            is_whole = run.until == until and at + length == len(run.hashes)
            before = run if is_whole else None
            position += length

    def forget(self, hashes: bytes, until: float) -> None:
        """Expect those of these blocks no more that would last until then at most."""
        runs, blocks = self._runs, blocks_of(hashes)
        if runs.keys().isdisjoint(blocks):
            return
        position = 0
        while position < len(hashes):
            run = runs.get(blocks[position // HASH_BYTES])
            if run is None:
                position += HASH_BYTES
                continue
            at, length = _agreement(run.hashes, hashes, position)
            if run.until <= until:
                self._remove(self._part(run, at, at + length))
            position += length

    def clear(self) -> None:
        """Forget all."""
        self._runs.clear()

    def leading(self, blocks: memoryview, hashes: bytes, start: int, now: float) -> int:
        """How many blocks from position `start` on last longer than until now, up to a gap.

        `blocks` are the hashes as numbers.
        """
        position = start * HASH_BYTES
        while position < len(hashes):
            run = self._runs.get(blocks[position // HASH_BYTES])
            if run is None or run.until <= now:
                break
            position += _agreement(run.hashes, hashes, position)[1]
        return position // HASH_BYTES - start

    def __len__(self) -> int:
        """How many blocks are expected."""
        return len(self._runs)

    @property
    def blocks(self) -> KeysView[int]:
        """The blocks that are expected, until whenever."""
        return self._runs.keys()

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Each block with the time until which it is expected."""
        return ((block, run.until) for block, run in self._runs.items())

    def check(self) -> None:
        """Raise InvariantError unless each block is found in the one run that has it."""
        for run in set(self._runs.values()):
            if any(self._runs.get(block) is not run for block in blocks_of(run.hashes)):
                raise InvariantError("a run has a block that leads to another")
        if sum(len(run.hashes) for run in set(self._runs.values())) != len(self) * HASH_BYTES:
            raise InvariantError("a block leads to a run that does not have it")

    def _lead_unknown(self, blocks: memoryview, run: _Run) -> int:
        """Let the blocks up to the next known one lead to this run; gives how many there are."""
        runs = self._runs
        new = dict.fromkeys(blocks, run)
        if runs.keys().isdisjoint(new):
            runs.update(new)
            return len(blocks)
        end = next(at for at, block in enumerate(blocks) if block in runs)
        runs.update(dict.fromkeys(blocks[:end], run))
        return end

    def _part(self, run: _Run, start: int, end: int) -> _Run:
        """A run of this part alone, cut off from what is before and behind it."""
        if end < len(run.hashes):
            run = self._cut(run, end)[0]
        return self._cut(run, start)[1] if start else run

    def _cut(self, run: _Run, at: int) -> tuple[_Run, _Run]:
        """Both parts of a run. The shorter one is the new one, as its blocks have to lead to it."""
        front, back = run.hashes[:at], run.hashes[at:]
        other = _Run(min(front, back, key=len), run.until)
        self._lead(other.hashes, other)
        run.hashes = max(back, front, key=len)
        return (other, run) if other.hashes is front else (run, other)

    def _lead(self, hashes: bytes, run: _Run) -> None:
        self._runs.update(dict.fromkeys(blocks_of(hashes), run))

    def _remove(self, run: _Run) -> None:
        for block in blocks_of(run.hashes):
            del self._runs[block]


def blocks_of(hashes: bytes) -> memoryview:
    """The hashes as numbers: the cheapest keys that there are."""
    return memoryview(hashes).cast("Q")


def _agreement(run: bytes, hashes: bytes, position: int) -> tuple[int, int]:
    """Where a run has the block at `position`, and how many bytes are the same from there on.

    It has to have it.
    """
    block = hashes[position : position + HASH_BYTES]
    at = run.find(block)
    while at % HASH_BYTES:
        at = run.find(block, at + 1)
    length = min(len(run) - at, len(hashes) - position)
    if run[at : at + length] == hashes[position : position + length]:
        return at, length
    same, other = 1, length // HASH_BYTES
    while other - same > 1:
        middle = (same + other) // 2
        width = middle * HASH_BYTES
        if run[at : at + width] == hashes[position : position + width]:
            same = middle
        else:
            other = middle
    return at, same * HASH_BYTES
