"""The radix tree: which blocks exist, and which worker ranks hold them.

A node stands for a run of blocks that always follow one another. Its label is the concatenation of
their hashes, so that matching a whole run is one comparison of bytes. All namespaces share one root
with an empty label: the first hash of a path already differs between them.

A holder (one worker rank) has one `Run` in each node of which it knows blocks: the engine's names
of those blocks and two bitmaps over the label. Where the label is cut, each run is cut with it;
`Holder.where` finds the run of a name, and a search in the run's names finds the position, so that
a cut re-points the names of the shorter side only.

Two bit masks per node answer most of a match: `full` (holders with every block of the label on the
GPU) and `some` (holders with at least the first one, but not all). They are derived from the runs.

Changes come in two steps. While a batch is applied, runs and labels change and every node that
they change in is noted in `touched`; `settle` then derives the masks anew, trims labels that nobody
reaches the end of, detaches what is empty and joins what needs no branch any more. In between, dead
nodes may stand around, but no block is at a wrong place.

Nodes know their parent, and runs their node: cycles, but ones that are cut whenever a node leaves
the tree, so that nothing is left to the garbage collector.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from indexer.hashing import HASH_BYTES

LABEL_BLOCKS = 128
"""The longest label by default. It bounds what a cut costs, and the size of the bitmaps."""

JOIN_BUDGET = 4096
"""Names that joining two nodes may re-point at most; dearer pairs stay two nodes."""


class Run:
    """What one holder knows of one node's blocks.

    `known` has a bit for each position whose block the holder has on any tier, `gpu` for those on
    the GPU. `names` has the engine's name (8 bytes) of each position up to the last known one; at
    positions that are not known it means nothing.
    """

    __slots__ = ("gpu", "known", "names", "node")

    def __init__(self, node: "Node") -> None:
        self.node = node
        self.names = b""
        self.known = 0
        self.gpu = 0

    def position(self, name: int) -> int:
        """Where in the label the block of this name stands; it must be known."""
        wanted = name.to_bytes(HASH_BYTES, "big")
        at = self.names.find(wanted)
        while at % HASH_BYTES or not self.known >> at // HASH_BYTES & 1:
            at = self.names.find(wanted, at + 1)
            if at < 0:
                raise LookupError(f"block {name} is not in the run that should have it")
        return at // HASH_BYTES

    def name_at(self, position: int) -> int:
        """The name at a known position."""
        at = position * HASH_BYTES
        return int.from_bytes(self.names[at : at + HASH_BYTES], "big")

    def write(self, start: int, names: bytes) -> None:
        """Put names at the positions from `start` on and mark them as known."""
        at = start * HASH_BYTES
        behind = self.names[at + len(names) :]
        self.names = self.names[:at].ljust(at, b"\0") + names + behind
        self.known |= ones(len(names) // HASH_BYTES) << start

    def trim(self) -> None:
        """Drop the names behind the last known position."""
        self.names = self.names[: self.known.bit_length() * HASH_BYTES]

    def known_names(self) -> Iterator[int]:
        """The names of all known positions."""
        count = len(self.names) // HASH_BYTES
        names = struct.unpack(f">{count}Q", self.names)
        if self.known == ones(count):
            return iter(names)
        return (name for at, name in enumerate(names) if self.known >> at & 1)


class Holder(Protocol):
    """What the tree needs of a worker rank's holdings."""

    bit: int
    where: dict[int, Run]


class Node:
    """A run of blocks, its holders, and the branches behind its last block."""

    __slots__ = ("children", "full", "label", "parent", "runs", "some")

    def __init__(self, label: bytes, parent: "Node | None") -> None:
        self.label = label
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.runs: dict[Holder, Run] = {}
        self.full = 0
        self.some = 0

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

    def run_of(self, holder: Holder) -> Run:
        """The holder's run, made if there is none."""
        run = self.runs.get(holder)
        if run is None:
            run = self.runs[holder] = Run(self)
        return run

    def derive_masks(self, holder: Holder) -> None:
        """Bring the masks up to date with what the holder's run says."""
        run = self.runs.get(holder)
        leading = leading_ones(run.gpu) if run is not None else 0
        self.full &= ~holder.bit
        self.some &= ~holder.bit
        if leading == self.blocks:
            self.full |= holder.bit
        elif leading:
            self.some |= holder.bit

    def __repr__(self) -> str:
        return f"<Node {self.blocks} blocks, {len(self.runs)} holders, {len(self.children)} behind>"


class Span(NamedTuple):
    """Positions of one node: `blocks` of them from `start` on."""

    node: Node
    start: int
    blocks: int


class Tree:
    """Places for chains of blocks; see the module's text for the rules.

    `label_blocks` is the longest label. Longer runs are several nodes.
    """

    def __init__(self, label_blocks: int = LABEL_BLOCKS) -> None:
        self.label_blocks = label_blocks
        self.root = Node(b"", None)
        self.nodes = 0
        self.blocks = 0
        self.touched: dict[Node, bool] = {}  # whether blocks went from it

    def place(self, node: Node, start: int, hashes: bytes, holder: Holder) -> list[Span]:
        """The places of blocks that follow position `start - 1` of `node`, made where missing.

        The caller gives the holder's run names at these places before it settles the tree.
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
                break
            child = node.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                spans += self._append(node, hashes[at:], holder)
                break
            node, start = child, 0
        for span in spans:
            self.touched.setdefault(span.node, False)
        return spans

    def _append(self, node: Node, hashes: bytes, holder: Holder) -> Iterator[Span]:
        """New places behind the last block of `node`.

        A leaf that nobody else is in grows in place: decoding adds one block at a time.
        """
        if holder in node.runs and len(node.runs) == 1 and not node.children:
            room = self.label_blocks - node.blocks
            grown, hashes = hashes[: room * HASH_BYTES], hashes[room * HASH_BYTES :]
            if grown:
                yield Span(node, node.blocks, len(grown) // HASH_BYTES)
                node.label += grown
                self.blocks += len(grown) // HASH_BYTES
        width = self.label_blocks * HASH_BYTES
        for at in range(0, len(hashes), width):
            node = self._add_leaf(node, hashes[at : at + width])
            yield Span(node, 0, node.blocks)

    def _add_leaf(self, parent: Node, label: bytes) -> Node:
        leaf = Node(label, parent)
        parent.children[leaf.first] = leaf
        self.nodes += 1
        self.blocks += leaf.blocks
        return leaf

    def _cut(self, node: Node, at: int) -> Node:
        """Cut a node in two before position `at`; the upper part is new and returned."""
        parent = node.parent
        if parent is None:
            raise LookupError("only a node in the tree can be cut")
        upper = parent.children[node.first] = Node(node.label[: at * HASH_BYTES], parent)
        node.label = node.label[at * HASH_BYTES :]
        node.parent = upper
        upper.children[node.first] = node
        upper.full = node.full
        runs, node.runs = node.runs, {}
        for holder, run in runs.items():
            _cut_run(holder, run, upper, node, at)
            if not node.full & holder.bit:
                upper.derive_masks(holder)
                node.derive_masks(holder)
        self.nodes += 1
        self.touched[upper] = self.touched.get(node, False)
        self.touched.setdefault(node, False)
        return upper

    def settle(self, holder: Holder, *, join: bool = True) -> None:
        """Derive what depends on the holder's runs in all touched nodes, and tidy them up."""
        for node in self.touched:
            run = node.runs.get(holder)
            if run is not None and not run.known:
                del node.runs[holder]
            elif run is not None:
                run.trim()
            node.derive_masks(holder)
        for node, shrunk in self.touched.items():
            if shrunk:
                self._tidy(node, join=join)
        self.touched.clear()

    def _tidy(self, node: Node, *, join: bool) -> None:
        """Detach or trim a leaf that nobody needs to its end; join a node with its only child."""
        while node.parent is not None and not node.children:
            reach = max((run.known.bit_length() for run in node.runs.values()), default=0)
            if reach:
                self._shorten(node, reach)
                return
            node = self._detach(node)
        if join and node.parent is not None and len(node.children) == 1:
            (child,) = node.children.values()
            if self._can_join(node, child):
                self._join(node, child)

    def _shorten(self, node: Node, blocks: int) -> None:
        if blocks == node.blocks:
            return
        self.blocks -= node.blocks - blocks
        node.label = node.label[: blocks * HASH_BYTES]
        for holder in node.runs:
            node.derive_masks(holder)

    def _detach(self, node: Node) -> Node:
        """Take an empty leaf out of the tree; returns what it hung on."""
        parent = node.parent
        if parent is None:
            raise LookupError("only a node in the tree can be detached")
        del parent.children[node.first]
        node.parent = None
        self.nodes -= 1
        self.blocks -= node.blocks
        return parent

    def _can_join(self, node: Node, child: Node) -> bool:
        """Whether the same holders have both nodes in full, and joining them is cheap."""
        shorter = min(node.blocks, child.blocks)
        return (
            node.blocks + child.blocks <= self.label_blocks
            and node.full == child.full
            and node.full.bit_count() == len(node.runs) == len(child.runs)
            and shorter * len(node.runs) <= JOIN_BUDGET
        )

    def _join(self, node: Node, child: Node) -> None:
        """Make one node of a node and its only child; the child stays, as it has the branches."""
        for holder, lower in child.runs.items():
            child.runs[holder] = _join_runs(holder, node.runs[holder], lower, node.blocks)
        child.label = node.label + child.label
        child.parent = node.parent
        if child.parent is not None:
            child.parent.children[child.first] = child
        node.parent = None
        node.children.clear()
        node.runs.clear()
        self.nodes -= 1


def _cut_run(holder: Holder, run: Run, upper: Node, lower: Node, at: int) -> None:
    """Share a run out to the two parts of its node; the fuller part keeps the object."""
    head, tail = Run(upper), Run(lower)
    head.known, tail.known = run.known & ones(at), run.known >> at
    head.gpu, tail.gpu = run.gpu & ones(at), run.gpu >> at
    head.names, tail.names = run.names[: at * HASH_BYTES], run.names[at * HASH_BYTES :]
    head.trim()
    keep_head = head.known.bit_count() >= tail.known.bit_count()
    kept, moved = (head, tail) if keep_head else (tail, head)
    if moved.known:
        moved.node.runs[holder] = moved
        holder.where.update(dict.fromkeys(moved.known_names(), moved))
    run.node, run.names, run.known, run.gpu = kept.node, kept.names, kept.known, kept.gpu
    run.node.runs[holder] = run


def _join_runs(holder: Holder, upper: Run, lower: Run, at: int) -> Run:
    """One run of two; the longer one keeps its object, and all its names their place."""
    kept, moved = (upper, lower) if at > len(lower.names) // HASH_BYTES else (lower, upper)
    holder.where.update(dict.fromkeys(moved.known_names(), kept))
    kept.names = upper.names + lower.names
    kept.known = upper.known | lower.known << at
    kept.gpu = upper.gpu | lower.gpu << at
    kept.node = lower.node
    return kept


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


def ones(count: int) -> int:
    """The lowest `count` bits set."""
    return (1 << count) - 1


def leading_ones(bits: int) -> int:
    """How many of the lowest bits are set without a gap."""
    return (~bits & (bits + 1)).bit_length() - 1
