"""Walking the tree with a prompt's hashes: which holder ends where."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from events import Tier
from indexer.groups import Window, usable_blocks
from indexer.hashing import HASH_BYTES
from indexer.holdings import Group, Holdings
from indexer.model import Overlap
from indexer.tree import Node, common, leading_ones, ones

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


def gpu_ends(
    path: list[Step], alive: int, by_bit: Mapping[int, Holdings]
) -> Iterator[tuple[int, int]]:
    """Masks of holders and how many leading blocks of the path each of them has on the GPU.

    `alive` are the holders that are asked for. Those without any block are left out.
    """
    end = 0
    for node, start, count in path:
        lost = alive & ~node.full
        if lost:
            for bit in bits(lost & node.some):
                yield bit, start + min(count, leading_ones(node.runs[by_bit[bit]].gpu))
            gone = lost & ~node.some
            if start and gone:
                yield gone, start
            alive ^= lost
            if not alive:
                return
        end = start + count
    if end and alive:
        yield alive, end


def bits(mask: int) -> Iterator[int]:
    """The set bits of a mask, each as a mask."""
    while mask:
        low = mask & -mask
        yield low
        mask ^= low


def overlap(path: list[Step], holdings: Holdings) -> Overlap:
    """The overlap of a holder with several tiers or cache groups."""
    view = _View(path, holdings)
    gpu, cpu, disk = (view.usable(tiers) for tiers in _LEVELS)
    return Overlap(gpu, cpu - gpu, disk - cpu)


class _View:
    """What one holder has along a path, position by position."""

    def __init__(self, path: list[Step], holdings: Holdings) -> None:
        self._holdings = holdings
        self._known = self._gpu = 0
        parts = []
        for node, start, count in path:
            run = node.runs.get(holdings)
            names = run.names[: count * HASH_BYTES] if run is not None else b""
            parts.append(names.ljust(count * HASH_BYTES, b"\0"))
            if run is not None:
                self._known |= (run.known & ones(count)) << start
                self._gpu |= (run.gpu & ones(count)) << start
        self._names = b"".join(parts)

    def usable(self, tiers: tuple[Tier, ...]) -> int:
        """How many leading blocks can be used if these tiers count."""
        own_size = self._holdings.block_size
        groups = [group for group in self._holdings.groups.values() if group.block_size == own_size]
        return usable_blocks(self._leading(tiers), [self._window(group, tiers) for group in groups])

    def _leading(self, tiers: tuple[Tier, ...]) -> int:
        at = leading_ones(self._gpu)
        while self._known >> at & 1 and (
            self._gpu >> at & 1 or self._holdings.is_on(self._main_name(at), tiers)
        ):
            at += 1
        return at

    def _window(self, group: Group, tiers: tuple[Tier, ...]) -> Window:
        return Window(group.window_blocks, lambda at: self._is_in(group, at, tiers))

    def _is_in(self, group: Group, position: int, tiers: tuple[Tier, ...]) -> bool:
        names = self._holdings.names_of(self._main_name(position))
        return any(group.holds(name, tiers) for name in names)

    def _main_name(self, position: int) -> int:
        at = position * HASH_BYTES
        return int.from_bytes(self._names[at : at + HASH_BYTES], "big")
