"""The radix tree: which blocks exist, and which worker ranks hold them.

A node stands for a run of blocks that always follow one another. Its label is the concatenation of
their hashes, so that matching a whole run is one comparison of bytes. All namespaces share one root
with an empty label: the first hash of a path already differs between them.

A node knows its holders (worker ranks) in two forms that answer a match at once: `full` is a bit
mask of those with every block of the label; `ends` has all others, each with the overlap of a
prompt that goes on behind it. So a match costs a step per node and takes over the ends as they are,
whatever the number of blocks. Which tier a block is on is the holder's business.

A holder's names for its blocks are in its `Run`s, one for each node that it has blocks in. A run
goes on through several nodes, so a cut only enters the holders in the new node.

A leaf grows in place where that takes the full label from one other holder at most: decoding adds
one block at a time, and ranks that end at depths of their own share long labels. A node is joined
with its only child when the same holders have both in full and their runs go through.

While a batch is applied, labels may be longer than anyone reaches and nodes may be empty, but no
block is at a wrong place; `settle` then trims, detaches and joins what has lost blocks.

Nodes know their parent: cycles, but ones that are cut when a node leaves the tree, so that nothing
is left to the garbage collector.
"""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple, Protocol, TypeVar, cast

from events import WorkerRank
from indexer.hashing import HASH_BYTES
from indexer.model import OVERLAPS, Overlap
from indexer.run import Run

T = TypeVar("T")

LABEL_BLOCKS = 128
"""The longest label by default: it bounds what growing and cutting copy."""


class Holder(Protocol):
    """What the tree needs of a worker rank's holdings: its bit, and its run in each node."""

    rank: WorkerRank
    bit: int
    runs: "dict[Node, Run]"


_NO_CHILDREN: "dict[bytes, Node]" = {}  # what leaves share; never written to


class Node:
    """A run of blocks, its holders, and the branches behind its last block.

    `start` is the depth of the first block; `some` is the mask of the holders in `ends`.
    """

    __slots__ = ("children", "ends", "full", "label", "parent", "some", "start")

    def __init__(self, label: bytes, parent: "Node | None", start: int) -> None:
        self.label = label
        self.parent = parent
        self.start = start
        self.children = _NO_CHILDREN
        self.full = 0
        self.some = 0
        self.ends: dict[WorkerRank, Overlap] | None = None

    @property
    def above(self) -> "Node":
        """The parent of a node that is in the tree."""
        if self.parent is None:
            raise LookupError("this node has nothing above it")
        return self.parent

    @property
    def first(self) -> bytes:
        """The first block's hash: the node's key among its siblings."""
        return self.label[:HASH_BYTES]

    @property
    def blocks(self) -> int:
        """The length of the label."""
        return len(self.label) // HASH_BYTES

    def hash_at(self, position: int) -> bytes:
        """The hash of the block at a position."""
        return self.label[position * HASH_BYTES : (position + 1) * HASH_BYTES]

    def show(self, holder: Holder, run: Run) -> None:
        """Make the node say of a holder what its run here says."""
        leading = run.leading(self.start - run.start)
        if leading >= self.blocks:
            if not self.full & holder.bit:
                self.forget(holder)
                self.full |= holder.bit
            return
        self.full &= ~holder.bit
        self.some |= holder.bit
        if self.ends is None:
            self.ends = {}
        self.ends[holder.rank] = OVERLAPS[self.start + leading]

    def forget(self, holder: Holder) -> None:
        """The holder has nothing here."""
        if self.full & holder.bit:
            self.full ^= holder.bit
        elif self.some & holder.bit and self.ends is not None:
            self.some ^= holder.bit
            del self.ends[holder.rank]
            if not self.ends:
                self.ends = None

    def __repr__(self) -> str:
        holders = (self.full | self.some).bit_count()
        return f"<Node {self.blocks} blocks, {holders} holders, {len(self.children)} behind>"


class Span(NamedTuple):
    """Positions of one node: `blocks` of them from `start` on."""

    node: Node
    start: int
    blocks: int


class Tree:
    """Places for chains of blocks; see the module's text for the rules.

    `label_blocks` is the longest label. Longer runs of blocks are several nodes.
    """

    def __init__(self, label_blocks: int = LABEL_BLOCKS) -> None:
        self.label_bytes = label_blocks * HASH_BYTES
        self.root = Node(b"", None, 0)
        self.holders: list[Holder | None] = []  # by the number of their bit
        self.nodes = 0
        self.blocks = 0
        self._shrunk: dict[Node, None] = {}

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to tidy up."""
        return not self._shrunk

    def add(self, holder: Holder) -> int:
        """Enter a holder; returns the bit that is its own from now on."""
        if None in self.holders:
            number = self.holders.index(None)
            self.holders[number] = holder
        else:
            number = len(self.holders)
            self.holders.append(holder)
        return 1 << number

    def remove(self, holder: Holder) -> None:
        """A holder that has no blocks any more goes; its bit may become another's."""
        self.holders[holder.bit.bit_length() - 1] = None

    def holders_of(self, mask: int) -> Iterator[Holder]:
        """The holders of a mask."""
        return cast("Iterator[Holder]", select(self.holders, mask))

    # Growing

    def place(self, node: Node, start: int, hashes: bytes, bit: int) -> list[Span]:
        """The places of blocks that follow position `start - 1` of `node`, made where missing.

        The caller enters the holder of that bit there.
        """
        spans: list[Span] = []
        at = 0
        while True:
            same = common(node.label, start, hashes, at)
            at += same * HASH_BYTES
            end = start + same
            if at < len(hashes) and end < node.blocks:
                node = self._cut(node, end)
            if same:
                spans.append(Span(node, start, same))
            if at == len(hashes):
                return spans
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                spans += self._append(node, hashes[at:], bit)
                return spans
            node, start = child, 0

    def _append(self, node: Node, hashes: bytes, bit: int) -> Iterator[Span]:
        """New places behind the last block of `node`."""
        others = node.full & ~bit
        if not node.children and not others & (others - 1) and node.parent is not None:
            room = self.label_bytes - len(node.label)
            grown, hashes = hashes[:room], hashes[room:]
            if grown:
                yield self._grow(node, grown)
        for at in range(0, len(hashes), self.label_bytes):
            node = self.add_leaf(node, hashes[at : at + self.label_bytes])
            yield Span(node, 0, node.blocks)

    def _grow(self, leaf: Node, hashes: bytes) -> Span:
        """Lengthen a leaf; who had it in full has only a part of it now."""
        span = Span(leaf, leaf.blocks, len(hashes) // HASH_BYTES)
        leaf.label += hashes
        self.blocks += span.blocks
        for holder in self.holders_of(leaf.full):
            leaf.show(holder, holder.runs[leaf])
        return span

    def add_leaf(self, parent: Node, label: bytes) -> Node:
        """A new node behind the last block of another, for its caller to enter the holder."""
        leaf = Node(label, parent, parent.start + parent.blocks)
        if not parent.children:
            parent.children = {}
        parent.children[leaf.first] = leaf
        self.nodes += 1
        self.blocks += leaf.blocks
        return leaf

    def _cut(self, node: Node, at: int) -> Node:
        """Cut a node in two before position `at`; the upper part is new and returned.

        The lower part stays what it was to the runs that end in it and to the nodes behind it.
        """
        parent = node.above
        upper = parent.children[node.first] = Node(
            node.label[: at * HASH_BYTES], parent, node.start
        )
        node.label = node.label[at * HASH_BYTES :]
        node.parent = upper
        node.start += at
        upper.children = {node.first: node}
        self.nodes += 1
        upper.full = node.full
        for holder in self.holders_of(node.full):
            holder.runs[upper] = holder.runs[node]
        for holder in self.holders_of(node.some):
            run = holder.runs[upper] = holder.runs[node]
            upper.show(holder, run)
            if run.end > node.start:
                node.show(holder, run)
            else:
                self._leave(node, holder)
                run.node = upper
        return upper

    # Shrinking

    def _leave(self, node: Node, holder: Holder) -> None:
        if node.full & holder.bit:  # a call less in the common case
            node.full ^= holder.bit
        else:
            node.forget(holder)
        del holder.runs[node]

    def retreat(self, holder: Holder, run: Run) -> None:
        """A run became shorter: its holder leaves the nodes that the run does not reach any more.

        An empty run leaves all of its nodes.
        """
        node, end = run.node, run.end
        while node.start >= end and node.parent is not None:
            self._leave(node, holder)
            self._shrunk[node] = None
            node = node.parent
        if run.names:
            run.node = node
            node.show(holder, run)
            self._shrunk[node] = None

    def cut_back(self, holder: Holder, run: Run) -> None:
        """`retreat` where no block waits for its holder to be entered, as in evictions.

        Leaves that are the holder's alone are trimmed and detached at once, without settling.
        """
        node, end = run.node, run.start + len(run.names) // HASH_BYTES
        while node.full == holder.bit and not node.some and not node.children:
            if node.start < end:
                run.node = node
                self._trim(node, end - node.start)
                return
            del holder.runs[node]
            node = self._detach(node)
        run.node = node
        if node.parent is not None:
            self._shrunk[node] = None
            self.retreat(holder, run)

    def leave_all(self, holder: Holder) -> None:
        """The holder has no blocks any more."""
        for node in holder.runs:
            node.forget(holder)
        self._shrunk.update(dict.fromkeys(holder.runs))
        holder.runs = {}

    def settle(self, *, join: bool = True) -> None:
        """Tidy up the nodes that have lost blocks since the last time."""
        for node in self._shrunk:
            self._tidy(node, join=join)
        self._shrunk = {}

    def _tidy(self, node: Node, *, join: bool) -> None:
        """Detach or trim a leaf that nobody needs to its end; join a node with its only child."""
        while not node.children and node.parent is not None:
            if node.full:
                return
            if node.some:
                self._shorten(node)
                return
            node = self._detach(node)
        if join and len(node.children) == 1 and node.parent is not None:
            (child,) = node.children.values()
            if self._can_join(node, child):
                self._join(node, child)

    def _detach(self, leaf: Node) -> Node:
        """Take a leaf off the tree; returns what was above it."""
        parent = leaf.above
        del parent.children[leaf.label[:HASH_BYTES]]
        leaf.parent = None
        self.nodes -= 1
        self.blocks -= len(leaf.label) // HASH_BYTES
        return parent

    def _trim(self, leaf: Node, blocks: int) -> None:
        self.blocks -= len(leaf.label) // HASH_BYTES - blocks
        leaf.label = leaf.label[: blocks * HASH_BYTES]

    def _shorten(self, leaf: Node) -> None:
        """Cut off what is behind the last block that somebody has."""
        runs = {holder: holder.runs[leaf] for holder in self.holders_of(leaf.some)}
        reach = max(run.end for run in runs.values()) - leaf.start
        if reach < leaf.blocks:
            self._trim(leaf, reach)
            for holder, run in runs.items():
                leaf.show(holder, run)

    def _can_join(self, node: Node, child: Node) -> bool:
        """Whether the same holders have both nodes in full, each in one run."""
        return (
            node.full == child.full
            and not node.some
            and not child.some
            and len(node.label) + len(child.label) <= self.label_bytes
            and all(
                holder.runs[node] is holder.runs[child] for holder in self.holders_of(node.full)
            )
        )

    def _join(self, node: Node, child: Node) -> None:
        """Make one node of a node and its only child; the child stays, as runs end in it."""
        for holder in self.holders_of(node.full):
            del holder.runs[node]
        parent = node.above
        child.label = node.label + child.label
        child.start = node.start
        child.parent = parent
        parent.children[child.first] = child
        node.parent = None
        node.children = _NO_CHILDREN
        self.nodes -= 1


_TO_BITS = bytes.maketrans(b"01", b"\0\1")


def select(things: Sequence[T], mask: int) -> Iterator[T]:
    """The things at the places of the mask's bits, by way of the mask's digits: no step per bit."""
    return compress(things, f"{mask:b}"[::-1].encode().translate(_TO_BITS))


def common(label: bytes, start: int, hashes: bytes, at: int) -> int:
    """How many blocks of `label` from block `start` on equal `hashes` from byte `at` on."""
    begin = start * HASH_BYTES
    low, high = 0, min(len(label) - begin, len(hashes) - at) // HASH_BYTES
    if label.startswith(hashes[at : at + high * HASH_BYTES], begin):
        return high
    while high - low > 1:  # the first `low` blocks are equal, the first `high` are not
        middle = (low + high) // 2
        if label.startswith(hashes[at : at + middle * HASH_BYTES], begin):
            low = middle
        else:
            high = middle
    return low
