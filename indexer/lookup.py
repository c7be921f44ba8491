"""Walking the tree with a prompt's hashes: which holder ends where."""

import struct
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple

from events import Tier, WorkerRank
from indexer.groups import Window, usable_blocks
from indexer.hashing import HASH_BYTES
from indexer.holdings import Group, Holdings
from indexer.model import OVERLAPS, Overlap
from indexer.tree import Node, common

_AT_ONCE = 128  # names: a gap costs a look at so many again

_LEVELS = ((Tier.GPU,), (Tier.GPU, Tier.CPU), (Tier.GPU, Tier.CPU, Tier.DISK))


class Step(NamedTuple):
    """A node on a prompt's path: its first `blocks` blocks are the prompt's from `start` on."""

    node: Node
    start: int
    blocks: int


def steps(root: Node, hashes: bytes) -> list[Step]:
    """The nodes that a prompt runs through, to where the tree parts from it."""
    path: list[Step] = []
    node, at = root, 0
    while child := node.children.get(hashes[at : at + HASH_BYTES]):
        node = child
        size = len(node.label)
        if not hashes.startswith(node.label, at):
            size = common(node.label, 0, hashes, at) * HASH_BYTES
        path.append(Step(node, at // HASH_BYTES, size // HASH_BYTES))
        at += size
        if size < len(node.label):
            break
    return path


def gpu_overlaps(
    root: Node, hashes: bytes, alive: int, ranks_of: Callable[[int], dict[WorkerRank, None]]
) -> dict[WorkerRank, Overlap]:
    """How many leading blocks of a prompt each holder of the mask `alive` has on the GPU.

    Those without any are left out. One step per node: whoever has all of it goes on.
    """
    found: dict[WorkerRank, Overlap] = {}
    at = 0
    children = root.children
    while node := children.get(hashes[at : at + HASH_BYTES]):
        label = node.label
        size = len(label)
        if not hashes.startswith(label, at):
            size = common(label, 0, hashes, at) * HASH_BYTES
        going_on = alive & node.full
        if going_on != alive:
            ended = alive ^ going_on
            if ended & node.some:
                found.update(_ends(node, ended, at, size, ranks_of))
                ended &= ~node.some
            if ended and at:
                found.update(dict.fromkeys(ranks_of(ended), OVERLAPS[at // HASH_BYTES]))
            alive = going_on
            if not alive:
                return found
        at += size
        if size < len(label):
            break
        children = node.children
    if not at:
        return found
    rest = dict.fromkeys(ranks_of(alive), OVERLAPS[at // HASH_BYTES])
    if not found:
        return rest
    found.update(rest)
    return found


def _ends(
    node: Node, ended: int, at: int, size: int, ranks_of: Callable[[int], dict[WorkerRank, None]]
) -> dict[WorkerRank, Overlap]:
    """Where those of the mask end that have a part of a node.

    The prompt comes to it at byte `at` of its hashes and goes `size` bytes into it.
    """
    ends = node.ends or {}
    if size < len(node.label):
        most = OVERLAPS[(at + size) // HASH_BYTES]
        ends = {rank: end if end.gpu < most.gpu else most for rank, end in ends.items()}
    if others := node.some & ~ended:
        gone = ranks_of(others)
        ends = {rank: end for rank, end in ends.items() if rank not in gone}
    if not at:
        ends = {rank: end for rank, end in ends.items() if end.gpu}
    return ends


def overlap(path: list[Step], holdings: Holdings) -> Overlap:
    """The overlap of a holder with several tiers or cache groups."""
    view = _View(path, holdings)
    gpu = cpu = disk = view.usable(_LEVELS[0])
    if holdings.uses(Tier.CPU):
        cpu = disk = view.usable(_LEVELS[1])
    if holdings.uses(Tier.DISK):
        disk = view.usable(_LEVELS[2])
    return Overlap(gpu, cpu - gpu, disk - cpu)


class _View:
    """What one holder has along a path, position by position."""

    def __init__(self, path: list[Step], holdings: Holdings) -> None:
        self._holdings = holdings
        self._known = self._gpu = 0
        parts = []
        for node, start, count in path:
            run = holdings.runs.get(node)
            names = b""
            if run is not None:
                at = node.start - run.start
                names = run.names[at * HASH_BYTES : (at + count) * HASH_BYTES]
                known = run.known(at, count)
                self._known |= known << start
                self._gpu |= (known & ~(run.lower >> at)) << start
            parts.append(names.ljust(count * HASH_BYTES, b"\0"))
        packed = b"".join(parts)
        self._names = struct.unpack(f">{len(packed) // HASH_BYTES}Q", packed)

    def usable(self, tiers: tuple[Tier, ...]) -> int:
        """How many leading blocks can be used if these tiers count."""
        own_size = self._holdings.block_size
        groups = [group for group in self._holdings.groups.values() if group.block_size == own_size]
        return usable_blocks(self._leading(tiers), [self._window(group, tiers) for group in groups])

    def _leading(self, tiers: tuple[Tier, ...]) -> int:
        on_gpu, known = _leading_ones(self._gpu), _leading_ones(self._known)
        lower = [counts for tier, counts in self._holdings.lower.items() if tier in tiers]
        if not lower:
            return on_gpu
        return _first_without(
            self._names,
            on_gpu,
            known,
            lower,
            lambda at: self._gpu >> at & 1 or self._holdings.is_on(self._names[at], tiers),
        )

    def _window(self, group: Group, tiers: tuple[Tier, ...]) -> Window:
        held = [counts for tier, counts in group.counts.items() if tier in tiers]

        def first_missing(start: int, end: int) -> int | None:
            at = _first_without(
                self._names, start, end, held, lambda at: self._is_in(group, self._names[at], tiers)
            )
            return at if at < end else None

        return Window(group.window_blocks, first_missing)

    def _is_in(self, group: Group, main: int, tiers: tuple[Tier, ...]) -> bool:
        return any(group.holds(name, tiers) for name in self._holdings.names_of(main))


def _first_without(
    names: tuple[int, ...],
    start: int,
    end: int,
    maps: list[dict[int, int]],
    is_else: Callable[[int], object],
) -> int:
    """The first position from `start` on that no map has and `is_else` denies, or `end`.

    What one map has without a gap is passed at once, with no step for each.
    """
    at = start
    while at < end:
        before = at
        for counts in maps:
            waiting = names[at : min(at + _AT_ONCE, end)]
            at += len(list(takewhile(counts.__contains__, waiting)))
        if at == before:
            if not is_else(at):
                return at
            at += 1
    return at


def _leading_ones(bits: int) -> int:
    """How many of the lowest bits are set without a gap."""
    return (~bits & (bits + 1)).bit_length() - 1
