"""The index: events in, overlaps out.

The source of truth is what each engine announced, kept per worker rank in `Holdings`; the tree
and its masks are views of it that a match can walk fast. All of it may lag behind the engine or,
after a lost event, be wrong: that costs a worse choice of worker, never a client's answer.

One thread uses an index at a time: nothing here waits, and no match sees half a batch.
"""

from collections.abc import Sequence

from events import (
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    EventBatch,
    GroupKind,
    Tier,
    WorkerRank,
)
from indexer.hashing import HASH_BYTES, chain
from indexer.holdings import Group, Holdings, pairs_up, to_name, to_names
from indexer.hot import HotPrefix, hot_prefixes
from indexer.invariants import check_index
from indexer.lookup import gpu_overlaps, overlap, steps
from indexer.model import Applied, IgnoreCause, IndexStats, InvariantError, Overlap, ResyncCause
from indexer.origin import extras, origin
from indexer.tree import LABEL_BLOCKS, Node, Tree

MAX_BLOCKS = 20_000_000
"""Blocks of all ranks: about 2 GB."""

BLOCKS_PER_GPU_BLOCK = 64
"""How many blocks a rank may have on all tiers for each that its GPU has room for."""

_REMEMBERED_MASKS = 1024

_GPU = Tier.GPU  # to look a member up in its enum is a call, in Python 3.11

# Measured: a name, its place in a map and its bytes in a run; a hash; a node with its first holder;
# a name and its count in another map.
_BYTES_A_BLOCK, _BYTES_A_TREE_BLOCK, _BYTES_A_NODE, _BYTES_A_COUNT = 80, 8, 350, 60


class RadixIndex:
    """Which blocks of one model live on which worker rank.

    `label_blocks` is the longest run of blocks in one node of the tree.

    What engines may make it hold is bounded. More copies on the GPU than a rank has room for ask
    for a resync. A rank with more than `BLOCKS_PER_GPU_BLOCK` times its GPU's blocks, and, once all
    ranks together have `max_blocks`, each rank with its share of them, gets no more: what it stores
    is ignored and counted, removals go on. So the index claims too little, not too much, and the
    ranks that stay within their share are followed exactly. A block that other cache groups have
    too counts for each of them, and for `max_blocks` on each lower tier too.
    """

    def __init__(self, *, label_blocks: int = LABEL_BLOCKS, max_blocks: int = MAX_BLOCKS) -> None:
        self._tree = Tree(label_blocks)
        self._max_blocks = max_blocks
        self._counted = 0  # blocks of all ranks, and names that are counted besides
        self._beside = 0  # of these the names, of other groups and on lower tiers
        self._holdings: dict[WorkerRank, Holdings] = {}
        self._plain = 0  # mask of the ranks whose GPU blocks are the whole story
        self._ranks_of_mask: dict[int, dict[WorkerRank, None]] = {}
        self.layout = 0
        """Changes whenever a rank comes or goes, or its block size or capacity becomes another."""

    # Events

    def apply(self, rank: WorkerRank, batch: EventBatch) -> Applied:
        """Apply the events of one batch in order; a rank that is not known yet is added."""
        holdings = self._of(rank)
        applied = Applied()
        stored: list[bytes] = []
        lengthened = 0
        evicted: list[EngineHash] = []  # by the events just before: engines name one block in each
        has_room = self._has_room(holdings)
        main_group, gpu = holdings.main_group, _GPU
        for event in batch.events:
            if type(event) is BlocksRemoved:
                if event.group == main_group and event.tier is gpu:
                    evicted += event.block_hashes
                else:
                    _remove(holdings, event, applied)
                continue
            if evicted:
                _evict(holdings, evicted, applied)
                evicted = []
            if type(event) is BlocksStored:
                if not has_room:
                    applied.ignore(IgnoreCause.OVER_BUDGET, len(event.block_hashes))
                elif hashes := holdings.lengthen(event):
                    lengthened += len(hashes)
                    stored.append(hashes)
                else:
                    self._store(holdings, event, applied, stored)
                    main_group = holdings.main_group
            else:
                holdings.clear()
                main_group = holdings.main_group
                applied.cleared += 1
        if evicted:
            _evict(holdings, evicted, applied)
        applied.stored = b"".join(stored)
        applied.stored_blocks += lengthened // HASH_BYTES
        applied.resync = _doubt(holdings)
        self._settle(holdings)
        return applied

    def _has_room(self, holdings: Holdings) -> bool:
        """Whether the rank may store more; asked once a batch."""
        counted, capacity = holdings.counted, holdings.capacity
        if capacity is not None:
            most = capacity * BLOCKS_PER_GPU_BLOCK
            if counted >= most and counted - holdings.lower_names >= most:
                return False
        return self._counted < self._max_blocks or counted * len(self._holdings) < self._max_blocks

    def _store(
        self, holdings: Holdings, event: BlocksStored, applied: Applied, stored: list[bytes]
    ) -> None:
        names = to_names(event.block_hashes)
        if not names:
            return
        if _is_beside_main(holdings, event):
            _store_beside_main(holdings, event, names, applied)
        elif event.tier is not _GPU and (
            not (event.token_ids or event.hashes) or all(map(holdings.knows, names))
        ):
            _store_known(holdings, event.tier, names, applied)
        elif cause := _unusable(holdings, event):
            applied.ignore(cause, len(names))
        else:
            self._store_main(holdings, event, names, applied, stored)

    def _store_main(
        self,
        holdings: Holdings,
        event: BlocksStored,
        names: list[int],
        applied: Applied,
        stored: list[bytes],
    ) -> None:
        """Blocks of the main group with their tokens: the ones that make prefixes."""
        if event.block_size != holdings.block_size:
            holdings.adopt_block_size(event.block_size)
            self.layout += 1
            applied.adopted_block_size = event.block_size
        if event.tier is _GPU:
            holdings.main_group = event.group
        behind = self._behind(holdings, event)
        if behind is None:
            holdings.orphaned_events += 1
            applied.orphans += len(names)
            return
        node, start, previous = behind
        hashes = event.hashes or chain(previous, event.token_ids, event.block_size, extras(event))
        at = 0
        for span in self._tree.place(node, start, hashes, holdings.bit):
            holdings.store(span, names[at : at + span.blocks], event.tier)
            at += span.blocks
        applied.stored_blocks += at
        if event.tier is _GPU:
            stored.append(hashes)

    def _behind(self, holdings: Holdings, event: BlocksStored) -> tuple[Node, int, bytes] | None:
        """Where the event's blocks start, and the hash before; None if the parent is unknown."""
        if event.parent is None:
            return self._tree.root, 0, origin(event)
        place = holdings.place_of(to_name(event.parent))
        if place is None:
            return None
        node, position = place
        return node, position + 1, node.hash_at(position)

    def _settle(self, holdings: Holdings, *, join: bool = True) -> None:
        if not self._tree.is_settled:
            self._tree.settle(join=join)
        counted = holdings.blocks
        if not (holdings.lower or holdings.groups):  # a call less than `is_plain`
            self._plain |= holdings.bit
            if holdings.counted_beside:
                self._beside -= holdings.counted_beside
                holdings.counted_beside = 0
        else:
            self._plain &= ~holdings.bit
            beside = holdings.names_beside
            self._beside += beside - holdings.counted_beside
            holdings.counted_beside = beside
            counted += beside
        self._counted += counted - holdings.counted
        holdings.counted = counted

    # Life of a rank

    def held(self, rank: WorkerRank) -> Holdings | None:
        """The holdings of a known rank, for a snapshot."""
        return self._holdings.get(rank)

    def open(self, rank: WorkerRank) -> Holdings:
        """The holdings of a rank, for a snapshot to fill; `settle` has to follow."""
        return self._of(rank)

    def settle(self, rank: WorkerRank) -> None:
        """Take note of what was changed in a rank's holdings."""
        self.layout += 1
        self._settle(self._of(rank))

    def _of(self, rank: WorkerRank) -> Holdings:
        holdings = self._holdings.get(rank)
        if holdings is None:
            holdings = self._holdings[rank] = Holdings(rank, self._tree)
            self.layout += 1
            self._plain |= holdings.bit
        return holdings

    def clear(self, rank: WorkerRank) -> None:
        """Forget all blocks of a rank; it stays known."""
        holdings = self._holdings.get(rank)
        if holdings is not None:
            holdings.clear()
            self._settle(holdings, join=False)

    def remove_worker(self, name: str) -> None:
        """Forget a worker and all of its ranks."""
        for rank in [rank for rank in self._holdings if rank.worker == name]:
            self.clear(rank)
            holdings = self._holdings.pop(rank)
            self._tree.remove(holdings)
            self._plain &= ~holdings.bit
            self.layout += 1
        self._ranks_of_mask.clear()

    def set_capacity(self, rank: WorkerRank, blocks: int | None) -> None:
        """How many blocks the rank's GPU can hold, over all cache groups; None if not known."""
        self._of(rank).capacity = blocks
        self.layout += 1

    # Questions

    def match(self, hashes: bytes) -> dict[WorkerRank, Overlap]:
        """The ranks that hold leading blocks of a prompt, and how many.

        `hashes` are the prompt's `block_hashes` in the ranks' block size, already cut to what a
        cache hit can cover. Costs a step per node of the path and per place where ranks end; ranks
        with several tiers or groups are looked at one by one.
        """
        found = gpu_overlaps(self._tree.root, hashes, self._plain, self._ranks)
        if len(self._holdings) > self._plain.bit_count():
            found.update(self._special_overlaps(hashes))
        return found

    def _special_overlaps(self, hashes: bytes) -> dict[WorkerRank, Overlap]:
        path = steps(self._tree.root, hashes)
        special = (holdings for holdings in self._holdings.values() if not holdings.is_plain)
        overlaps = ((holdings.rank, overlap(path, holdings)) for holdings in special)
        return {rank: blocks for rank, blocks in overlaps if blocks.total}

    def _ranks(self, mask: int) -> dict[WorkerRank, None]:
        """The ranks of a mask, remembered: the same prefixes are asked for again and again."""
        ranks = self._ranks_of_mask.get(mask)
        if ranks is None:
            ranks = {holder.rank: None for holder in self._tree.holders_of(mask)}
            if len(self._ranks_of_mask) >= _REMEMBERED_MASKS:
                self._ranks_of_mask.clear()
            self._ranks_of_mask[mask] = ranks
        return ranks

    def ranks(self) -> list[WorkerRank]:
        """All known ranks, also those without blocks."""
        return list(self._holdings)

    def blocks(self, rank: WorkerRank) -> int:
        """How many blocks the rank has on any tier (by the engine's names; copies count once)."""
        holdings = self._holdings.get(rank)
        return holdings.blocks if holdings is not None else 0

    def block_size(self, rank: WorkerRank) -> int | None:
        """The block size of the rank's events, in tokens; None before the first one."""
        holdings = self._holdings.get(rank)
        return holdings.block_size if holdings is not None else None

    def is_gpu_only(self) -> bool:
        """Whether all overlaps are on the GPU: no rank has other tiers or groups."""
        return len(self._holdings) == self._plain.bit_count()

    def block_sizes(self, ranks: Sequence[WorkerRank]) -> list[int | None]:
        """`block_size` of each of these ranks."""
        known = map(self._holdings.get, ranks)
        return [holdings.block_size if holdings is not None else None for holdings in known]

    def capacities(self, ranks: Sequence[WorkerRank]) -> list[int | None]:
        """The capacity of each of these ranks in blocks, as it was set; None if not known."""
        known = map(self._holdings.get, ranks)
        return [holdings.capacity if holdings is not None else None for holdings in known]

    def gpu_blocks(self, ranks: Sequence[WorkerRank]) -> list[int]:
        """How many blocks each of these ranks has on its GPU, every physical copy counted."""
        known = map(self._holdings.get, ranks)
        return [holdings.gpu_copies if holdings is not None else 0 for holdings in known]

    def is_approximate(self, rank: WorkerRank) -> bool:
        """Whether the rank has cache groups or events that we can't follow (Mamba, say)."""
        holdings = self._holdings.get(rank)
        return holdings is not None and holdings.is_approximate

    def stats(self) -> IndexStats:
        """The size of the index, from counters that are kept anyway."""
        nodes, tree_blocks = self._tree.nodes, self._tree.blocks
        blocks = self._counted - self._beside
        size = nodes * _BYTES_A_NODE + tree_blocks * _BYTES_A_TREE_BLOCK + blocks * _BYTES_A_BLOCK
        size += self._beside * _BYTES_A_COUNT
        return IndexStats(len(self._holdings), nodes, tree_blocks, blocks, size)

    def hot_prefixes(self, most: int = 10) -> list[HotPrefix]:
        """The prefixes that most ranks have on any tier, and which these are."""
        return hot_prefixes(self._tree, most)

    def check(self) -> None:
        """Raise InvariantError if anything contradicts anything. Slow: for tests and doubt."""
        check_index(self._tree, self._holdings.values(), self._plain)
        blocks = sum(holdings.blocks for holdings in self._holdings.values())
        if blocks != self._counted - self._beside:
            raise InvariantError(f"{self._counted - self._beside} blocks counted, {blocks} found")
        beside = sum(holdings.names_beside for holdings in self._holdings.values())
        if beside != self._beside:
            raise InvariantError(f"{self._beside} names counted beside, {beside} found")


def _evict(holdings: Holdings, evicted: list[EngineHash], applied: Applied) -> None:
    removed = holdings.evict(evicted)
    applied.removed_blocks += removed
    if removed < len(evicted):
        applied.unknown_removed += len(evicted) - removed


def _is_beside_main(holdings: Holdings, event: BlocksStored) -> bool:
    """Whether the event belongs to another group than the one that makes prefixes."""
    if event.group == holdings.main_group:
        return False
    if event.group in holdings.groups or event.group in holdings.opaque:
        return True
    if event.group_kind is not GroupKind.FULL:
        return True
    # Offloading tiers need not number their groups.
    return holdings.main_group is not None and event.tier is _GPU


def _store_beside_main(
    holdings: Holdings, event: BlocksStored, names: list[int], applied: Applied
) -> None:
    group = holdings.groups.get(event.group) or _new_group(holdings, event)
    if group is None:
        applied.ignore(IgnoreCause.OPAQUE_GROUP, len(names))
        return
    group.store(event.tier, names)
    applied.stored_blocks += len(names)
    if event.tier is Tier.GPU:
        holdings.gpu_copies += len(names)


def _new_group(holdings: Holdings, event: BlocksStored) -> Group | None:
    """The group of a first event; None if nothing follows from its blocks, now and later."""
    is_sliding = event.group_kind is GroupKind.SLIDING
    is_clear = event.group_kind is GroupKind.FULL or (is_sliding and event.sliding_window)
    if not is_clear or not event.block_size or event.group in holdings.opaque:
        holdings.opaque.add(event.group)
        return None
    window = event.sliding_window if is_sliding else None
    group = holdings.groups[event.group] = Group(window, event.block_size)
    return group


def _store_known(holdings: Holdings, tier: Tier, names: list[int], applied: Applied) -> None:
    """Blocks of an offloading tier by name alone: what they are only a known name can tell."""
    for name in names:
        if holdings.knows(name):
            holdings.add_copy(name, tier)
            applied.stored_blocks += 1
        else:
            applied.ignore(IgnoreCause.PLACEHOLDER, 1)


def _unusable(holdings: Holdings, event: BlocksStored) -> IgnoreCause | None:
    if not pairs_up(event):
        holdings.unpaired = True
        return IgnoreCause.UNPAIRED
    if event.tier is not _GPU and event.block_size != holdings.block_size:
        return IgnoreCause.OTHER_BLOCK_SIZE
    return None


def _remove(holdings: Holdings, event: BlocksRemoved, applied: Applied) -> None:
    names = to_names(event.block_hashes)
    if event.group in holdings.opaque:
        applied.ignore(IgnoreCause.OPAQUE_GROUP, len(names))
        return
    removed = sum(holdings.remove(name, event.tier, event.group) for name in names)
    applied.removed_blocks += removed
    applied.unknown_removed += len(names) - removed


def _doubt(holdings: Holdings) -> ResyncCause | None:
    if holdings.capacity is not None and holdings.gpu_copies > holdings.capacity:
        return ResyncCause.OVER_CAPACITY
    if holdings.orphaned_events >= holdings.orphan_limit:
        holdings.orphaned_events = 0
        holdings.orphan_limit *= 2
        return ResyncCause.ORPHANS
    return None
