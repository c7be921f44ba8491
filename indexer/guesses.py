"""What is expected of one rank: blocks, each until a time of its own.

Prompts repeat and grow, so the same chain is expected again and again, a little longer each time.
Blocks in a row that last equally long are one run: expecting them again, or looking how far they
go, is to compare memory.

A run is found by its marks: its first block and each `MARK_BLOCKS`-th from there on. Hashes are
chained, so whoever shares a block with a run shares what is before it there too: the mark of a
block is at most `MARK_BLOCKS - 1` places before it, in the run and in every prompt that has it.
"""

from array import array
from collections.abc import Iterator, KeysView
from typing import TypeAlias

from indexer.hashing import HASH_BYTES
from indexer.model import InvariantError

MARK_BLOCKS = 16
"""Fewer marks cost less to note, and each look at a block that has none costs more."""
_MARK_BYTES = MARK_BLOCKS * HASH_BYTES


class _Run:
    """Hashes in a row that last until the same time."""

    __slots__ = ("hashes", "until")

    def __init__(self, hashes: bytes, until: float) -> None:
        self.hashes = hashes
        self.until = until


_Known: TypeAlias = tuple[int, _Run, int]
"""A block of a chain that is expected: its place there, in blocks; the run that has it; where, in
bytes."""


class Guesses:
    """The expected blocks of one rank. What they are found by is noted in `all_marks` too."""

    __slots__ = ("_all_marks", "_runs")

    def __init__(self, all_marks: set[int]) -> None:
        self._all_marks = all_marks
        self._runs: dict[int, _Run] = {}  # by mark

    @property
    def marks(self) -> KeysView[int]:
        """By which blocks they are found."""
        return self._runs.keys()

    def expect(self, hashes: bytes, until: float, *, start: int = 0) -> None:
        """Expect the blocks from place `start` on; one that lasts longer goes on doing so.

        What is before `start` tells where they belong: `MARK_BLOCKS - 1` blocks, if there are any.
        """
        blocks, place = blocks_of(hashes), start
        before: _Run | None = None  # lasts until then, and ends at `place`
        known = self._first_known(blocks, hashes, place)
        while place < len(blocks):
            end = len(blocks) if known is None else known[0]
            if end > place:
                new, first = hashes[place * HASH_BYTES : end * HASH_BYTES], place
                if before is None:
                    before = _Run(new, until)
                else:
                    first += -(len(before.hashes) // HASH_BYTES) % MARK_BLOCKS
                    before.hashes += new
                self._note(blocks[first:end:MARK_BLOCKS], before)
            if known is None:
                return
            place, run, at = known
            length = _agreement(run.hashes, at, hashes, place * HASH_BYTES)
            if run.until < until:
                run, at = self._part(run, at, at + length), 0
                run.until = until
            is_whole = run.until == until and at + length == len(run.hashes)
            before = run if is_whole else None
            place += length // HASH_BYTES
            known = self._next_known(blocks, hashes, place)

    def forget(self, hashes: bytes, until: float, *, start: int = 0) -> list[bytes]:
        """Expect those of the blocks from `start` on no more that would last until then at most.

        Gives the hashes of those, as far as they are in a row. Of a run of which these blocks are
        a part without a mark, and without what is before it, the part is overlooked: it lasts its
        time.
        """
        blocks = blocks_of(hashes)
        forgotten = []
        known = self._first_known(blocks, hashes, start)
        while known is not None:
            place, run, at = known
            length = _agreement(run.hashes, at, hashes, place * HASH_BYTES)
            if run.until <= until:
                run = self._part(run, at, at + length)
                self._unmark(run, 0)
                forgotten.append(run.hashes)
            # Not `_next_known`: a run of samples lacks blocks of the chain that is confirmed.
            known = self._first_known(blocks, hashes, place + length // HASH_BYTES)
        return forgotten

    def clear(self) -> None:
        """Forget all."""
        self._runs.clear()

    def leading(self, blocks: "array[int]", hashes: bytes, start: int, now: float) -> int:
        """How many blocks from place `start` on last longer than until now, up to a gap.

        `blocks` are the hashes as numbers; there are more than `start`.
        """
        known = self._known(blocks, hashes, start)
        place = start
        while known is not None and known[1].until > now:
            place, run, at = known
            place += _agreement(run.hashes, at, hashes, place * HASH_BYTES) // HASH_BYTES
            known = self._begun(blocks, hashes, place)
        return place - start

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __len__(self) -> int:
        """How many blocks are expected: counts them."""
        return sum(len(run.hashes) for run in set(self._runs.values())) // HASH_BYTES

    def __iter__(self) -> Iterator[tuple[int, float]]:
        """Each block with the time until which it is expected."""
        for run in set(self._runs.values()):
            for block in blocks_of(run.hashes):
                yield block, run.until

    def check(self) -> None:
        """Raise InvariantError unless the runs are apart, and found by their marks alone."""
        runs = set(self._runs.values())
        marks = {mark: run for run in runs for mark in marks_of(run.hashes)}
        if marks != self._runs:
            raise InvariantError("the marks are not those of the runs")
        if len({block for block, _ in self}) != len(self):
            raise InvariantError("a block is in two runs")

    def _first_known(self, blocks: "array[int]", hashes: bytes, place: int) -> _Known | None:
        """The first block from this place on that is expected."""
        runs, first = self._runs, place - MARK_BLOCKS + 1
        if runs.keys().isdisjoint(blocks[first:] if first > 0 else blocks):
            return None
        if place >= len(blocks):
            return None
        known = self._known(blocks, hashes, place)
        if known is not None:
            return known
        mark = next((at for at in range(place, len(blocks)) if blocks[at] in runs), None)
        if mark is None:
            return None
        run = runs[blocks[mark]]
        at = _find(run.hashes, hashes, mark)
        before = min(at // HASH_BYTES, mark - place)
        return mark - before, run, at - before * HASH_BYTES

    def _next_known(self, blocks: "array[int]", hashes: bytes, place: int) -> _Known | None:
        """`_first_known` right behind a block that was: of what follows that is not its run's.

        A run that goes through a block has the one before it as well, or begins there. So behind
        the end of one, whatever is expected begins with a mark.
        """
        if self._runs.keys().isdisjoint(blocks[place:]):
            return None
        known = None
        while known is None:
            known = self._begun(blocks, hashes, place)
            place += 1
        return known

    def _begun(self, blocks: "array[int]", hashes: bytes, place: int) -> _Known | None:
        """The block at this place, if there is one that is a mark."""
        run = self._runs.get(blocks[place]) if place < len(blocks) else None
        return None if run is None else (place, run, _find(run.hashes, hashes, place))

    def _known(self, blocks: "array[int]", hashes: bytes, place: int) -> _Known | None:
        """The block at this place, if it is expected."""
        runs = self._runs
        run = runs.get(blocks[place])
        if run is not None:
            return place, run, _find(run.hashes, hashes, place)
        if runs.keys().isdisjoint(blocks[max(0, place - MARK_BLOCKS + 1) : place]):
            return None
        mark = next(at for at in range(place - 1, -1, -1) if blocks[at] in runs)
        run = runs[blocks[mark]]
        at = _find(run.hashes, hashes, mark) + (place - mark) * HASH_BYTES
        has_it = run.hashes[at : at + HASH_BYTES] == hashes[place * HASH_BYTES :][:HASH_BYTES]
        return (place, run, at) if has_it else None

    def _part(self, run: _Run, start: int, end: int) -> _Run:
        """A run of this part alone, cut off from what is before and behind it; in bytes."""
        if end < len(run.hashes):
            self._cut(run, end)
        return self._cut(run, start) if start else run

    def _cut(self, run: _Run, at: int) -> _Run:
        """Cut a run at this byte; gives what is behind it, as a run of its own."""
        self._unmark(run, at)
        back = _Run(run.hashes[at:], run.until)
        run.hashes = run.hashes[:at]
        self._note(marks_of(back.hashes), back)
        return back

    def _note(self, marks: "array[int]", run: _Run) -> None:
        """Let the run be found by these."""
        self._runs.update(dict.fromkeys(marks, run))
        self._all_marks.update(marks)

    def _unmark(self, run: _Run, start: int) -> None:
        for mark in marks_of(run.hashes, start):
            self._runs.pop(mark, None)


def blocks_of(hashes: bytes) -> "array[int]":
    """The hashes as numbers: the cheapest keys that there are."""
    return array("Q", hashes)


def marks_of(hashes: bytes, start: int = 0) -> "array[int]":
    """Those blocks of a run, from this byte on, by which it is found."""
    first = -(-start // _MARK_BYTES) * MARK_BLOCKS
    return array("Q", hashes[first * HASH_BYTES :])[::MARK_BLOCKS]


def _find(run: bytes, hashes: bytes, place: int) -> int:
    """Where a run has the block at this place of the chain; it has to have it."""
    block = hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES]
    at = run.index(block)
    while at % HASH_BYTES:
        at = run.index(block, at + 1)
    return at


def _agreement(run: bytes, at: int, hashes: bytes, position: int) -> int:
    """How many bytes are the same, of a run from one place and of a chain from another on.

    The first block has to be.
    """
    length = min(len(run) - at, len(hashes) - position)
    if hashes.startswith(run[at : at + length], position):
        return length
    same, other = 1, length // HASH_BYTES
    while other - same > 1:
        middle = (same + other) // 2
        width = middle * HASH_BYTES
        if run[at : at + width] == hashes[position : position + width]:
            same = middle
        else:
            other = middle
    return same * HASH_BYTES
