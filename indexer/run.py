"""What one holder knows of a stretch of one path: the engine's names of its blocks, in order.

A run may pass through several nodes. It counts positions by depth (blocks from the root), so a
node that is cut or joined in the middle of it costs the run nothing.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING

from indexer.hashing import HASH_BYTES

if TYPE_CHECKING:  # a run and its node know each other
    from indexer.tree import Node


class Run:
    """`names` has the engine's names, 8 bytes each, of the blocks from depth `start` on.

    `missing` has a bit for each position whose block is gone, `lower` for each whose block is not
    on the GPU but on a lower tier; both are 0 nearly always. The last position is never missing.
    `node` is the node that the last position is in; the others are in it or above it.
    """

    __slots__ = ("lower", "missing", "names", "node", "start")

    def __init__(self, node: "Node", start: int) -> None:
        self.node = node
        self.start = start
        self.names = b""
        self.missing = 0
        self.lower = 0

    @property
    def end(self) -> int:
        """The depth behind the last position."""
        return self.start + len(self.names) // HASH_BYTES

    def position(self, name: int) -> int:
        """Where in the run the block of this name stands; it must be known."""
        wanted = name.to_bytes(HASH_BYTES, "big")
        if self.names.endswith(wanted):
            return len(self.names) // HASH_BYTES - 1
        at = self.names.find(wanted)
        while at % HASH_BYTES or self.missing >> at // HASH_BYTES & 1:
            at = self.names.find(wanted, at + 1)
            if at < 0:
                raise LookupError(f"block {name} is not in the run that should have it")
        return at // HASH_BYTES

    def place(self, position: int) -> "tuple[Node, int]":
        """The node of a position, and the position there."""
        depth = self.start + position
        node = self.node
        while node.start > depth:
            node = node.above
        return node, depth - node.start

    def name_at(self, position: int) -> int:
        """The name at a known position."""
        at = position * HASH_BYTES
        return int.from_bytes(self.names[at : at + HASH_BYTES], "big")

    def is_known(self, position: int) -> bool:
        """Whether the holder has the block of this position on any tier."""
        return position * HASH_BYTES < len(self.names) and not self.missing >> position & 1

    def write(self, position: int, names: bytes) -> None:
        """Put names at the positions from `position` on and make them known."""
        at = position * HASH_BYTES
        if at == len(self.names):
            self.names += names
            return
        gap = position - len(self.names) // HASH_BYTES
        if gap > 0:
            self.missing |= ones(gap) << (position - gap)
            self.names = self.names.ljust(at, b"\0")
        behind = self.names[at + len(names) :]
        self.names = self.names[:at] + names + behind
        self.missing &= ~(ones(len(names) // HASH_BYTES) << position)

    def erase(self, position: int) -> None:
        """The block of a known position is gone; the end moves to the last one that is not."""
        self.missing |= 1 << position
        self.lower &= ~(1 << position)
        if (position + 1) * HASH_BYTES == len(self.names):
            self.trim()

    def trim(self) -> None:
        """Drop the names behind the last known position."""
        kept = self.known(0, len(self.names) // HASH_BYTES).bit_length()
        self.names = self.names[: kept * HASH_BYTES]
        self.missing &= ones(kept)

    def known(self, position: int, count: int) -> int:
        """A bit for each of `count` positions from `position` on that is known."""
        count = max(0, min(count, len(self.names) // HASH_BYTES - position))
        return ones(count) & ~(self.missing >> position)

    def leading(self, position: int) -> int:
        """How many blocks are there from `position` on, up to the first that is missing."""
        missing = self.missing >> position
        if missing:
            return (missing & -missing).bit_length() - 1
        return len(self.names) // HASH_BYTES - position

    def known_names(self) -> Iterator[int]:
        """The names of all known positions."""
        names = struct.unpack(f">{len(self.names) // HASH_BYTES}Q", self.names)
        if not self.missing:
            return iter(names)
        return (name for at, name in enumerate(names) if not self.missing >> at & 1)


def ones(count: int) -> int:
    """The lowest `count` bits set."""
    return (1 << count) - 1
