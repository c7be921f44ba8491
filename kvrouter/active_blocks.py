"""Which leading blocks the active requests of each rank hold, and which are still being computed.

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

from events import WorkerRank
from kvrouter.prompt import HASH_BYTES


class _Run:
    """Blocks in a row with the same holders. `start` and the length of `hashes` are in bytes."""

    __slots__ = ("active", "children", "hashes", "parent", "prefilling", "start")

    def __init__(self, parent: "_Run | None", start: int, hashes: bytes) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.children: dict[bytes, _Run] = {}
        self.active: dict[WorkerRank, int] = {}
        self.prefilling: dict[WorkerRank, int] = {}


class Hold:
    """One active prompt's place in the tree; to be handed back to it.

    `added_blocks` were not active on the rank before. From byte `cut` of its hashes on, the blocks
    are computed by this prompt's own prefill.
    """

    __slots__ = ("added_blocks", "cut", "leaf", "prefilling", "rank")

    def __init__(self, rank: WorkerRank, leaf: _Run, cut: int) -> None:
        self.rank = rank
        self.leaf = leaf
        self.cut = cut
        self.prefilling = True
        self.added_blocks = 0


class ActiveBlocks:
    """The active blocks of all ranks with one block size."""

    def __init__(self) -> None:
        self._root = _Run(None, 0, b"")

    def hold(self, rank: WorkerRank, hashes: bytes, cached_blocks: int) -> Hold:
        """A request with these blocks becomes active; all but the first `cached_blocks` prefill."""
        cut = min(cached_blocks * HASH_BYTES, len(hashes))
        middle = self._descend(self._root, hashes, 0, cut)
        hold = Hold(rank, self._descend(middle, hashes, cut, len(hashes)), cut)
        for run in _upwards(hold.leaf):
            active = run.active.get(rank, 0)
            run.active[rank] = active + 1
            if not active:
                hold.added_blocks += len(run.hashes) // HASH_BYTES
            if run.start >= cut:
                run.prefilling[rank] = run.prefilling.get(rank, 0) + 1
        return hold

    def computed(self, hold: Hold) -> None:
        """The prefill of `hold` is over. Again, or after its release: no effect."""
        if not hold.prefilling:
            return
        hold.prefilling = False
        for run in _upwards(hold.leaf):
            if run.start >= hold.cut:
                _count_down(run.prefilling, hold.rank)

    def release(self, hold: Hold) -> int:
        """The request is over (to be told once). The number of blocks no longer active there."""
        self.computed(hold)
        freed = 0
        for run in _upwards(hold.leaf):
            if _count_down(run.active, hold.rank):
                freed += len(run.hashes) // HASH_BYTES
            if not run.active and run.parent is not None:
                del run.parent.children[run.hashes[:HASH_BYTES]]
        return freed

    def leading(self, hashes: bytes) -> dict[WorkerRank, int]:
        """How many leading blocks of `hashes` are active, for each rank with any."""
        found: dict[WorkerRank, int] = {}
        for run, end in self._path(hashes):
            found.update(dict.fromkeys(run.active, end // HASH_BYTES))
        return found

    def prefilling(self, hashes: bytes, start_block: int) -> dict[WorkerRank, int]:
        """How many blocks of `hashes` from `start_block` on are being computed, by rank."""
        found: dict[WorkerRank, int] = {}
        for run, end in self._path(hashes):
            if run.prefilling:
                blocks = end // HASH_BYTES - max(run.start // HASH_BYTES, start_block)
                for rank in run.prefilling if blocks > 0 else ():
                    found[rank] = found.get(rank, 0) + blocks
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

    def _descend(self, run: _Run, hashes: bytes, position: int, end: int) -> _Run:
        """The run that ends at byte `end` of `hashes`; made, or split off, where there is none."""
        while position < end:
            key = hashes[position : position + HASH_BYTES]
            child = run.children.get(key)
            if child is None:
                child = run.children[key] = _Run(run, position, hashes[position:end])
            else:
                common = _common(child.hashes, hashes[position:end])
                if common < len(child.hashes):
                    child = _split(run, child, common)
            position += len(child.hashes)
            run = child
        return run

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


def _upwards(run: _Run) -> Iterator[_Run]:
    """`run` and its ancestors, without the root."""
    while run.parent is not None:
        yield run
        run = run.parent


def _split(parent: _Run, run: _Run, at: int) -> _Run:
    """Cut `run` at byte `at`; the new upper part. `run` stays the lower one: holds end there."""
    upper = _Run(parent, run.start, run.hashes[:at])
    upper.active = run.active.copy()
    upper.prefilling = run.prefilling.copy()
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


def _count_down(counts: dict[WorkerRank, int], rank: WorkerRank) -> bool:
    """One less; whether that was the last."""
    if counts[rank] > 1:
        counts[rank] -= 1
        return False
    del counts[rank]
    return True


def _check_counts(run: _Run, parent: _Run | None) -> None:
    for rank, count in run.active.items():
        _require(count > 0, "an active count is above 0")
        _require(parent is None or parent.active.get(rank, 0) >= count, "holders hold prefixes")
    for rank, count in run.prefilling.items():
        _require(0 < count <= run.active.get(rank, 0), "only active blocks are being computed")


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise AssertionError(f"active blocks: {rule}")
