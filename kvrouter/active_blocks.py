"""Which leading blocks the active requests of each rank hold.

A radix tree over the block hashes of active prompts (of one block size), shared by all ranks. A
block hash stands for the whole prefix up to its block, so a run of blocks that no active request
leaves or ends within is one node. Holding and releasing a prompt therefore costs as much as there
are branches on its way, not as many steps as it has blocks, and a prefix that a whole fleet has
in use is stored once.

Within a node all blocks have the same holders: whoever begins or ends inside of a run splits it
first. Runs are not merged again when the reason for the split is gone; there are never more of
them than distinct active blocks, and an unheld run leaves the tree at once.
"""

from bisect import bisect_left
from collections.abc import Iterator

import msgspec

from events import WorkerRank
from kvrouter.prompt import HASH_BYTES


class _Run(msgspec.Struct, eq=False):
    """Blocks in a row with the same holders. `start` and the length of `hashes` are in bytes."""

    parent: "_Run | None"
    start: int
    hashes: bytes
    children: "dict[bytes, _Run]" = {}
    active: dict[WorkerRank, int] = {}


class Hold(msgspec.Struct, frozen=True, eq=False):
    """One active prompt's place in the tree; to be handed back to it."""

    rank: WorkerRank
    leaf: _Run
    added_blocks: int
    """Blocks that were not active on the rank before."""


class ActiveBlocks:
    """The active blocks of all ranks with one block size."""

    def __init__(self) -> None:
        self._root = _Run(None, 0, b"")

    def hold(self, rank: WorkerRank, hashes: bytes) -> Hold:
        """A request with these blocks becomes active.

        Its last run ends where `hashes` do: made, or split off, where there is none.
        """
        run, position, added = self._root, 0, 0
        while position < len(hashes):
            key = hashes[position : position + HASH_BYTES]
            child = run.children.get(key)
            if child is None:
                new = _Run(run, position, hashes[position:], {}, {rank: 1})
                run.children[key] = new
                return Hold(rank, new, (added + len(hashes) - position) // HASH_BYTES)
            if not hashes.startswith(child.hashes, position):
                child = _split(run, child, _common(child.hashes, hashes[position:]))
            run = child
            length = len(run.hashes)
            position += length
            active = run.active
            count = active.get(rank, 0)
            if not count:
                added += length
            active[rank] = count + 1
        return Hold(rank, run, added // HASH_BYTES)

    def release(self, hold: Hold) -> int:
        """The request is over (to be told once). The number of blocks no longer active there."""
        rank, run, freed = hold.rank, hold.leaf, 0
        while (parent := run.parent) is not None:
            active = run.active[rank]
            if active > 1:
                run.active[rank] = active - 1
            else:
                del run.active[rank]
                freed += len(run.hashes)
                if not run.active:
                    del parent.children[run.hashes[:HASH_BYTES]]
            run = parent
        return freed // HASH_BYTES

    def leading(self, hashes: bytes) -> dict[WorkerRank, int]:
        """How many leading blocks of `hashes` are active, for each rank with any."""
        found: dict[WorkerRank, int] = {}
        for run, end in self._path(hashes):
            found.update(dict.fromkeys(run.active, end // HASH_BYTES))
        return found

    def recount(self) -> dict[WorkerRank, int]:
        """The distinct active blocks of each rank, counted anew. For checks: visits each run."""
        counted: dict[WorkerRank, int] = {}
        pending = list(self._root.children.values())
        while pending:
            run = pending.pop()
            pending += run.children.values()
            for rank in run.active:
                counted[rank] = counted.get(rank, 0) + len(run.hashes) // HASH_BYTES
        return counted

    def check(self) -> None:
        """Raise AssertionError unless the tree's invariants hold; visits each run."""
        pending = [self._root]
        while pending:
            run = pending.pop()
            pending += run.children.values()
            for key, child in run.children.items():
                _require(child.hashes[:HASH_BYTES] == key, "a run is found by its first block")
                _require(child.parent is run, "a run knows its parent")
                _require(child.start == run.start + len(run.hashes), "runs follow each other")
                _require(bool(child.active), "no unheld run stays")
                _check_counts(child, None if run is self._root else run)

    def _path(self, hashes: bytes) -> Iterator[tuple[_Run, int]]:
        """The runs that `hashes` goes through, each with the byte position of the last match."""
        position = 0
        run = self._root
        while child := run.children.get(hashes[position : position + HASH_BYTES]):
            run = child
            common = _common(run.hashes, hashes[position : position + len(run.hashes)])
            position += common
            yield run, position
            if common < len(run.hashes):
                return


def _split(parent: _Run, run: _Run, at: int) -> _Run:
    """Cut `run` at byte `at`; the new upper part. `run` stays the lower one: holds end there."""
    upper = _Run(parent, run.start, run.hashes[:at])
    upper.active = run.active.copy()
    parent.children[upper.hashes[:HASH_BYTES]] = upper
    run.parent = upper
    run.start += at
    run.hashes = run.hashes[at:]
    upper.children[run.hashes[:HASH_BYTES]] = run
    return upper


def _common(left: bytes, right: bytes) -> int:
    """The length of the common prefix in bytes. Hashes are chained, so it can be bisected."""
    if left == right:
        return len(left)
    blocks = range(min(len(left), len(right)) // HASH_BYTES)

    def differs(block: int) -> bool:
        start = block * HASH_BYTES
        return left[start : start + HASH_BYTES] != right[start : start + HASH_BYTES]

    return bisect_left(blocks, True, key=differs) * HASH_BYTES


def _check_counts(run: _Run, parent: _Run | None) -> None:
    for rank, count in run.active.items():
        _require(count > 0, "an active count is above 0")
        _require(parent is None or parent.active.get(rank, 0) >= count, "holders hold prefixes")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"active blocks: {rule}")
