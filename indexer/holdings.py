"""What one worker rank holds: its engine's names for blocks, and how many copies of each.

An engine keeps several physical copies of one block and announces the removal of each of them, so
every name has a count per tier and cache group. Three cases:

- The main group (the first full-attention group) on the GPU is the common one. Being in `where` is
  a count of 1; `copies` has the counts that are not 1. Its blocks stand in the tree.
- The main group on lower tiers has a count per name in `lower`. A block that is only there stands
  in the tree too, with a GPU count of 0.
- The other groups only limit how much of a prefix is usable. They use the same names, so a count
  per name is all they need, whatever the order in which the groups' events come.

A name means one place in the tree: the one where it was stored last. One place may have several
names (the engine's hash has something in it that ours has not): the first is in `where`, the others
are aliases of it.
"""

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import cast

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from events import BlocksStored, EngineHash, Tier, WorkerRank
from indexer.groups import window_blocks
from indexer.hashing import HASH_BYTES, chain, token_bytes
from indexer.run import Run
from indexer.tree import Node, Span, Tree

_GPU = Tier.GPU  # to look a member up in its enum is a call, in Python 3.11

RUN_BYTES = 512 * HASH_BYTES
"""Names after which a run does not go on into another node: adding to it copies them."""

ORPHANS_BEFORE_RESYNC = 8
"""Orphaned events after which a rank is doubted. Each resync doubles it: where a replay can't give
what is missing, clearing the rank over and over would only lose what is known."""


def to_name(engine_hash: EngineHash) -> int:
    """An engine hash as an unsigned 64-bit name."""
    if isinstance(engine_hash, bytes):
        return xxh3_64_intdigest(engine_hash)
    return engine_hash


def to_names(engine_hashes: list[EngineHash]) -> list[int]:
    """Engine hashes as names, in order; the same list where they are names already."""
    if pack(engine_hashes):
        return cast("list[int]", engine_hashes)
    return [name if type(name) is int else to_name(name) for name in engine_hashes]


def pack(names: Sequence[EngineHash]) -> bytes:
    """Names as runs have them; nothing if some are no numbers yet."""
    try:
        return struct.pack(f">{len(names)}Q", *names)
    except struct.error:
        return b""


def pairs_up(event: BlocksStored) -> bool:
    """Whether each named block comes with its tokens, or with its hash."""
    size, blocks = event.block_size, len(event.block_hashes)
    if event.hashes:
        return size > 0 and len(event.hashes) == HASH_BYTES * blocks
    return size > 0 and len(event.token_ids) == size * blocks


class Group:
    """A cache group besides the main one: counts per tier and name, and what it demands.

    `window` is in tokens; None demands every block (a second full-attention group).
    """

    __slots__ = ("block_size", "counts", "window")

    def __init__(self, window: int | None, block_size: int) -> None:
        self.window = window
        self.block_size = block_size
        self.counts: dict[Tier, dict[int, int]] = {}

    @property
    def window_blocks(self) -> int | None:
        """The blocks that have to be there before the end of a usable prefix."""
        return None if self.window is None else window_blocks(self.window, self.block_size)

    def store(self, tier: Tier, names: Iterable[int]) -> None:
        """Count one more copy of each."""
        counts = self.counts.setdefault(tier, {})
        for name in names:
            counts[name] = counts.get(name, 0) + 1

    def remove(self, tier: Tier, name: int) -> bool:
        """Count one copy less; False if there was none."""
        return take_one(self.counts.get(tier, {}), name)

    def holds(self, name: int, tiers: Iterable[Tier]) -> bool:
        """Whether there is a copy on any of these tiers."""
        return any(name in self.counts.get(tier, ()) for tier in tiers)


class Holdings:
    """One worker rank's blocks; the tree's holder. `bit` is the rank's place in bit masks."""

    __slots__ = (
        "aliases",
        "bit",
        "block_size",
        "capacity",
        "copies",
        "counted",
        "counted_beside",
        "gpu_copies",
        "groups",
        "lower",
        "main_group",
        "main_of",
        "opaque",
        "orphan_limit",
        "orphaned_events",
        "rank",
        "runs",
        "tree",
        "unpaired",
        "where",
    )

    def __init__(self, rank: WorkerRank, tree: Tree) -> None:
        self.rank = rank
        self.bit = tree.add(self)
        self.tree = tree
        self.runs: dict[Node, Run] = {}
        self.block_size: int | None = None
        self.capacity: int | None = None
        self.counted = 0  # of `blocks` and `names_beside`, in the index's total
        self.counted_beside = 0
        self.orphan_limit = ORPHANS_BEFORE_RESYNC
        self._forget_all()

    def _forget_all(self) -> None:
        self.where: dict[int, Run] = {}
        self.main_of: dict[int, int] = {}  # alias -> the name in `where`
        self.aliases: dict[int, list[int]] = {}  # the name in `where` -> its aliases
        self.copies: dict[int, int] = {}
        self.lower: dict[Tier, dict[int, int]] = {}
        self.groups: dict[int, Group] = {}
        self.main_group: int | None = None
        self.opaque: set[int] = set()
        self.unpaired = False
        self.gpu_copies = 0
        self.orphaned_events = 0

    def clear(self) -> None:
        """Forget all blocks and groups; the block size and the capacity stay.

        The groups go too: behind the same address another model may have started.
        """
        self.tree.leave_all(self)
        self._forget_all()

    def adopt_block_size(self, block_size: int) -> None:
        """Go over to another block size: the blocks and groups of the old one go.

        Prompts are hashed in one block size per rank, so old blocks would match nothing. Groups
        that came with the new size earlier in the same batch stay.
        """
        groups = {at: group for at, group in self.groups.items() if group.block_size == block_size}
        if self.block_size is not None:
            self.clear()
            self.groups = groups
            self.gpu_copies = sum(
                sum(group.counts.get(Tier.GPU, {}).values()) for group in groups.values()
            )
        self.block_size = block_size

    # What is known

    @property
    def is_plain(self) -> bool:
        """Whether the GPU blocks of the main group are the whole story."""
        return not (self.lower or self.groups)

    @property
    def is_approximate(self) -> bool:
        """Whether the rank has blocks that we can't follow."""
        foreign = any(group.block_size != self.block_size for group in self.groups.values())
        return bool(self.opaque) or self.unpaired or foreign

    @property
    def blocks(self) -> int:
        """Names of main-group blocks on any tier."""
        return len(self.where) + len(self.main_of)

    @property
    def lower_names(self) -> int:
        """Names of the main group with counts on lower tiers."""
        return sum(map(len, self.lower.values()))

    @property
    def names_beside(self) -> int:
        """Names with counts on lower tiers and in other groups: what is kept besides `blocks`."""
        tiers = [counts for group in self.groups.values() for counts in group.counts.values()]
        return self.lower_names + sum(map(len, tiers))

    def knows(self, name: int) -> bool:
        """Whether the main group has this block on any tier."""
        return name in self.where or name in self.main_of

    def gpu_count(self, name: int) -> int:
        """Copies of a known name on the GPU."""
        return self.copies.get(name, 1)

    def place_of(self, name: int) -> tuple[Node, int] | None:
        """Node and position of a block, or None if the name is not known."""
        main = self.main_of.get(name, name)
        run = self.where.get(main)
        return None if run is None else run.place(run.position(main))

    def names_of(self, main: int) -> list[int]:
        """All names of the place whose first name is `main`."""
        return [main, *self.aliases.get(main, ())]

    def uses(self, tier: Tier) -> bool:
        """Whether anything is counted on a tier below the GPU."""
        return tier in self.lower or any(tier in group.counts for group in self.groups.values())

    def is_on(self, main: int, tiers: Iterable[Tier]) -> bool:
        """Whether any name of a place has a copy on one of these lower tiers."""
        counts = [self.lower[tier] for tier in tiers if tier in self.lower]
        return any(name in held for name in self.names_of(main) for held in counts)

    # Storing

    def lengthen(self, event: BlocksStored) -> bytes:
        """Store an event's blocks where they only go on behind a leaf that is ours alone.

        Decoding does this and nothing else, a block at a time. Returns the blocks' hashes; nothing,
        and nothing is done, where the case is another one.
        """
        parent, names, size = event.parent, event.block_hashes, event.block_size
        if type(parent) is not int:
            return b""
        run = self.where.get(parent)
        if run is None:
            return b""
        node, held, blocks = run.node, run.names, len(names)
        label = node.label
        room = self.tree.label_bytes - len(label)
        if (
            node.full != self.bit
            or node.children
            or size != self.block_size
            or event.group != self.main_group
            or event.tier is not _GPU
            or self.main_of
            or blocks * HASH_BYTES > (room or self.tree.label_bytes)
            or (not room and len(held) >= RUN_BYTES)
            or (event.extra_keys is not None and any(event.extra_keys))
            or not held.endswith(parent.to_bytes(HASH_BYTES, "big"))
            or ((event.hashes or len(event.token_ids) != size * blocks) and not pairs_up(event))
        ):
            return b""
        behind = label[-HASH_BYTES:]
        if blocks == 1:
            name, where = names[0], self.where
            if type(name) is not int or name in where:
                return b""
            hashes = event.hashes or xxh3_64_digest(behind + token_bytes(event.token_ids))
            packed = name.to_bytes(HASH_BYTES, "big")
            where[name] = run
        else:
            packed = pack(names)
            hashes = packed and (event.hashes or chain(behind, event.token_ids, size))
            if not hashes or not self._name_new(cast("list[int]", names), run):
                return b""
        run.names = held + packed
        self.gpu_copies += blocks
        if room:
            node.label = label + hashes
            self.tree.blocks += blocks
        else:
            run.node = leaf = self.tree.add_leaf(node, hashes)
            leaf.full = self.bit
            self.runs[leaf] = run
        return hashes

    def store(self, span: Span, names: Sequence[int], tier: Tier) -> None:
        """Count one more copy of the blocks at `span`, which these are the names of."""
        if tier is _GPU and self._store_new(span, names):
            return
        for position, name in enumerate(names, span.start):
            self._take_place(name, span.node, position)
            self.add_copy(name, tier)

    def _run_for(self, node: Node) -> Run:
        """The run to write in at a node: ours there, the one above that ends there, or a new one.

        It is entered in the node when it is written in.
        """
        run = self.runs.get(node)
        if run is not None:
            return run
        above = self.runs.get(node.above)
        if above is not None and above.end == node.start and len(above.names) < RUN_BYTES:
            return above
        return Run(node, node.start)

    def _store_new(self, span: Span, names: Sequence[int]) -> bool:
        """The common case at once: neither a name nor a place of these is known yet."""
        node = span.node
        run = self._run_for(node)
        at = node.start + span.start - run.start
        if run.known(at, span.blocks):
            return False
        if self.main_of and not self.main_of.keys().isdisjoint(names):
            return False
        packed = struct.pack(f">{span.blocks}Q", *names)
        if not self._name_new(names, run):
            return False
        self._write(run, node, at, packed)
        self.gpu_copies += span.blocks
        return True

    def _name_new(self, names: Sequence[int], run: Run) -> bool:
        """Let these name blocks of a run, which has to get them; none if one is known already.

        Each is looked up once: where one was known, the new ones are found out afterwards.
        """
        where = self.where
        before = len(where)
        deque(map(where.setdefault, names, repeat(run)), 0)
        if len(where) == before + len(names):
            return True
        known = set(run.known_names())
        for name in set(names):
            if where[name] is run and name not in known:
                del where[name]
        return False

    def _write(self, run: Run, node: Node, at: int, names: bytes) -> None:
        """Enter names in a run and show the node; what lengthens the run is its new end."""
        self.runs[node] = run
        end = len(run.names)
        run.write(at, names)
        if len(run.names) > end:
            run.node = node
        node.show(self, run)

    def _take_place(self, name: int, node: Node, position: int) -> None:
        """Make `name` mean this place; its counts stay (none if it is new)."""
        place = self.place_of(name)
        if place == (node, position):
            return
        if place is None:
            self.copies[name] = 0
        else:
            self._leave_place(name)
        run = self._run_for(node)
        at = node.start + position - run.start
        if run.is_known(at):
            main = run.name_at(at)
            self.main_of[name] = main
            self.aliases.setdefault(main, []).append(name)
        else:
            self._write(run, node, at, name.to_bytes(HASH_BYTES, "big"))
            self.where[name] = run
        self._show(name)

    def add_copy(self, name: int, tier: Tier) -> None:
        """Count one more copy of a known name."""
        if tier is Tier.GPU:
            self.gpu_copies += 1
            self._set_gpu_count(name, self.gpu_count(name) + 1)
        else:
            counts = self.lower.setdefault(tier, {})
            counts[name] = counts.get(name, 0) + 1

    # Restoring

    def restore(self, node: Node, start: int, names: bytes, lower: int) -> tuple[Run, int]:
        """Enter blocks that nothing is known of yet; returns the run and the last position in it.

        `lower` has a bit for each that is on a lower tier only. `restore_counts` has to follow.
        """
        run = self._run_for(node)
        at = node.start + start - run.start
        self._write(run, node, at, names)
        blocks = len(names) // HASH_BYTES
        run.lower |= lower << at
        self.where.update(dict.fromkeys(struct.unpack(f">{blocks}Q", names), run))
        return run, at + blocks - 1

    def restore_counts(self, copies: dict[int, int], lower: dict[Tier, dict[int, int]]) -> None:
        """Enter the counts of all that was restored; the aliases and groups are there already."""
        self.copies, self.lower = copies, lower
        beside = [group.counts.get(Tier.GPU, {}) for group in self.groups.values()]
        more = sum(copies.values()) - len(copies)
        self.gpu_copies = self.blocks + more + sum(sum(counts.values()) for counts in beside)

    # Removing

    def evict(self, engine_hashes: list[EngineHash]) -> int:
        """Count one GPU copy less of each block of the main group; returns how many there were.

        Engines evict a prompt's last block first, so these are often the last names of a run.
        """
        removed = at = 0
        reverse = pack(engine_hashes[::-1])
        if reverse:
            names = cast("list[int]", engine_hashes)
        else:
            names = to_names(engine_hashes)
            reverse = pack(names[::-1])
        end = len(names)
        while at < end:
            count = self._evict_tail(names, at, reverse)
            if count:
                removed += count
                at += count
            else:
                removed += self._remove_from_gpu(names[at])
                at += 1
        return removed

    def _evict_tail(self, names: list[int], at: int, reverse: bytes) -> int:
        """Evict from `at` on what one run ends in; how many names, 0 if it is no plain case.

        `reverse` has the bytes of all names, the first one last.
        """
        run = self.where.get(names[at])
        if run is None or run.missing or self.main_of or self.lower:
            return 0
        held = run.names
        size = HASH_BYTES
        if len(held) > size:  # else there is only this name
            rest = reverse[: len(reverse) - at * HASH_BYTES]
            size = len(rest)
            if not held.endswith(rest):
                size = _common_end(rest, held, min(size, len(held)))
        count = size // HASH_BYTES
        gone = names if count == len(names) else names[at : at + count]
        if not count or (self.copies and not self.copies.keys().isdisjoint(gone)):
            return 0
        where = self.where
        for name in gone:
            del where[name]
        run.names = held[:-size]
        self.gpu_copies -= count
        self.tree.cut_back(self, run)
        return count

    def remove(self, name: int, tier: Tier, group: int) -> bool:
        """Count one copy less; False if there was none."""
        beside = self.groups.get(group)
        if beside is not None:
            removed = beside.remove(tier, name)
            self.gpu_copies -= removed and tier is Tier.GPU
            return removed
        if tier is not Tier.GPU:
            return self._remove_from_lower(name, tier)
        return group == self.main_group and self._remove_from_gpu(name)

    def _remove_from_lower(self, name: int, tier: Tier) -> bool:
        counts = self.lower.get(tier, {})
        if not take_one(counts, name):
            return False
        if not counts:
            del self.lower[tier]
        if self.gpu_count(name) == 0 and not self._is_lower(name):
            self._forget(name)
        return True

    def _remove_from_gpu(self, name: int) -> bool:
        count = self.gpu_count(name)
        if not count or not self.knows(name):
            return False
        self.gpu_copies -= 1
        if count > 1 or self._is_lower(name):
            self._set_gpu_count(name, count - 1)
        else:
            self._forget(name)
        return True

    def _is_lower(self, name: int) -> bool:
        return any(name in counts for counts in self.lower.values())

    def _set_gpu_count(self, name: int, count: int) -> None:
        if count == 1:
            self.copies.pop(name, None)
        else:
            self.copies[name] = count
        if count <= 1:  # else it was there and stays
            self._show(name)

    def _forget(self, name: int) -> None:
        self._leave_place(name)
        self.copies.pop(name, None)

    def _leave_place(self, name: int) -> None:
        """Take a name off its place; an alias moves up where it was the first one."""
        main = self.main_of.pop(name, None)
        if main is not None:
            self._drop_alias(main, name)
            self._show(main)
            return
        run = self.where.pop(name)
        at = run.position(name)
        heirs = self.aliases.pop(name, None)
        if heirs:
            self._inherit(run, at, heirs)
            return
        node, _ = run.place(at)
        end = len(run.names)
        run.erase(at)
        if len(run.names) < end:
            self.tree.retreat(self, run)
        else:
            node.show(self, run)

    def _drop_alias(self, main: int, name: int) -> None:
        others = self.aliases[main]
        others.remove(name)
        if not others:
            del self.aliases[main]

    def _inherit(self, run: Run, at: int, heirs: list[int]) -> None:
        heir, *others = heirs
        del self.main_of[heir]
        run.write(at, heir.to_bytes(HASH_BYTES, "big"))
        self.where[heir] = run
        if others:
            self.aliases[heir] = others
            self.main_of.update(dict.fromkeys(others, heir))
        self._show(heir)

    def _show(self, name: int) -> None:
        """Make the place of a name say whether any of its names has a copy on the GPU."""
        main = self.main_of.get(name, name)
        run = self.where[main]
        at = run.position(main)
        if any(self.gpu_count(other) for other in self.names_of(main)):
            run.lower &= ~(1 << at)
        else:
            run.lower |= 1 << at


def take_one(counts: dict[int, int], name: int) -> bool:
    """Count one less and drop what reaches 0; False if it was not there."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return count > 0


def _common_end(one: bytes, other: bytes, size: int) -> int:
    """How many of the last `size` bytes are equal, in whole names."""
    same = 0
    while (
        same < size
        and one[-same - HASH_BYTES : -same or None] == (other[-same - HASH_BYTES : -same or None])
    ):
        same += HASH_BYTES
    return same
