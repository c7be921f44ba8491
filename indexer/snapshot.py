"""Index <-> bytes: for a warm start, and for a router that joins others.

A snapshot is a sequence of chunks, each small enough to be made or taken in a few milliseconds, so
that whoever sends or loads it goes on with other work in between:

- the head: format version and the version of the hash rule;
- for each worker rank its blocks, a few thousand a chunk, then what is counted of them (copies,
  lower tiers, other cache groups, other names), then what else is known of it;
- the end.

Each chunk begins with a checksum over itself and the checksum before it, so a chunk that is lost,
changed or out of order is noticed at once.

A rank is dumped as it is at one moment: what it has in each node is noted before its first chunk is
made (about a microsecond a node), and the chunks are made of that, whatever happens to the tree
meanwhile. Ranks that come later in the snapshot are of a later moment, and one that is removed
before is left out.
`mark` says which moment it was: the seqno of the rank's last batch, say, from which whoever loads
the snapshot goes on.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import msgpack
from xxhash import xxh3_64_intdigest

from events import Tier, WorkerRank
from indexer.hashing import HASH_BYTES, RULE_VERSION
from indexer.holdings import Group, Holdings
from indexer.radix import RadixIndex
from indexer.run import Run, ones
from indexer.tree import Node, Span

FORMAT_VERSION = 2
CHUNK_BLOCKS = 2048
CHUNK_SEGMENTS = 256


class SnapshotError(ValueError):
    """The chunks are no snapshot that this version can load, or not the whole of one."""


class _Head(msgspec.Struct, array_like=True, tag="head"):
    format_version: int
    rule_version: int


class _Segment(msgspec.Struct, array_like=True, gc=False):
    """Blocks that a rank has one behind the other, in one node.

    They follow the last block of the rank's segment number `behind` (-1: the root), with the
    blocks of the hashes `lead` in between, which the rank has not. `lower` is a bitmap of those
    that are on a lower tier only, as big-endian bytes.
    """

    behind: int
    lead: bytes
    hashes: bytes
    names: bytes
    lower: bytes


class _Blocks(msgspec.Struct, array_like=True, tag="blocks"):
    rank: WorkerRank
    segments: list[_Segment]


class _Counts(msgspec.Struct, array_like=True, tag="counts"):
    """Copies by name, of some names: of the main group (None) or of one beside it, on one tier.

    Of the main group on the GPU only the counts that are not 1.
    """

    rank: WorkerRank
    group: int | None
    tier: Tier
    counts: dict[int, int]


class _Aliases(msgspec.Struct, array_like=True, tag="aliases"):
    """Further names of places, each with the name that stands in the segments."""

    rank: WorkerRank
    main_of: dict[int, int]


class _Group(msgspec.Struct, array_like=True):
    window: int | None
    block_size: int


class _Rest(msgspec.Struct, array_like=True, tag="rest"):
    """What else is known of a rank; with this it is complete."""

    rank: WorkerRank
    mark: int | None
    block_size: int | None
    main_group: int | None
    groups: dict[int, _Group]
    opaque: list[int]
    unpaired: bool


class _End(msgspec.Struct, array_like=True, tag="end"):
    ranks: int


_Part: TypeAlias = _Head | _Blocks | _Counts | _Aliases | _Rest | _End
_decoder: msgpack.Decoder[_Part] = msgpack.Decoder(_Part)


def dump(
    index: RadixIndex,
    mark: Callable[[WorkerRank], int | None] = lambda _: None,
    *,
    ranks: Sequence[WorkerRank] | None = None,
) -> Iterator[bytes]:
    """The chunks of a snapshot of these ranks, or all. The index may change meanwhile."""
    checksum = 0
    for part in _parts(index, index.ranks() if ranks is None else ranks, mark):
        body = msgpack.encode(part)
        checksum = xxh3_64_intdigest(body, checksum)
        yield checksum.to_bytes(HASH_BYTES, "big") + body


def _parts(
    index: RadixIndex, ranks: Sequence[WorkerRank], mark: Callable[[WorkerRank], int | None]
) -> Iterator[_Part]:
    yield _Head(FORMAT_VERSION, RULE_VERSION)
    dumped = 0
    for rank in ranks:
        holdings = index.held(rank)
        if holdings is not None:
            held, rest = _held(holdings), _rest(holdings, mark(rank))
            counts, main_of = _counts(holdings), dict(holdings.main_of)
            yield from (_Blocks(rank, share) for share in _shares(_segments(held)))
            for group, tier, of_names in counts:
                yield from (_Counts(rank, group, tier, part) for part in _cut(of_names))
            yield from (_Aliases(rank, part) for part in _cut(main_of))
            yield rest
            dumped += 1
    yield _End(dumped)


class _Held(NamedTuple):
    """What a rank has in a node, at one moment: the node's place and label, and the rank's run.

    `above` is the nearest node above that the rank is in (or the root), and `lead` has the hashes
    between the two. The nodes themselves go on changing, so they only serve as keys.
    """

    node: Node
    start: int
    label: bytes
    above: Node
    lead: bytes
    run_start: int
    names: bytes
    missing: int
    lower: int


def _held(holdings: Holdings) -> dict[Node, _Held]:
    """What a rank has in each of its nodes."""
    runs = holdings.runs
    held = {}
    for node, run in runs.items():
        above, lead = node.above, b""
        while above not in runs and above.parent is not None:
            above, lead = above.parent, above.label + lead
        held[node] = _Held(
            node, node.start, node.label, above, lead, run.start, run.names, run.missing, run.lower
        )
    return held


def _segments(held: dict[Node, _Held]) -> Iterator[_Segment]:
    """A rank's blocks, those nearer to the root first."""
    ends: dict[Node, tuple[int, int]] = {}  # the last segment in a node, and the position behind it
    number = 0
    for part in sorted(held.values(), key=attrgetter("start")):
        offset = part.start - part.run_start
        blocks = min(len(part.label), len(part.names) - offset * HASH_BYTES) // HASH_BYTES
        for start, end in _stretches(ones(blocks) & ~(part.missing >> offset)):
            behind, lead = _way(part, start, held, ends)
            names = part.names[(offset + start) * HASH_BYTES : (offset + end) * HASH_BYTES]
            hashes = part.label[start * HASH_BYTES : end * HASH_BYTES]
            lower = part.lower >> (offset + start) & ones(end - start)
            ends[part.node] = number, end
            number += 1
            yield _Segment(
                behind, lead, hashes, names, lower.to_bytes(-(-lower.bit_length() // 8), "big")
            )


def _stretches(known: int) -> Iterator[tuple[int, int]]:
    """Where the bits are set without a gap: from and to."""
    at = 0
    while known:
        gap = (known & -known).bit_length() - 1
        known >>= gap
        length = (~known & (known + 1)).bit_length() - 1
        known >>= length
        yield at + gap, at + gap + length
        at += gap + length


def _way(
    part: _Held, start: int, held: dict[Node, _Held], ends: dict[Node, tuple[int, int]]
) -> tuple[int, bytes]:
    """The nearest segment on the way to the root, and the hashes from its end to the position."""
    lead = part.label[: start * HASH_BYTES]
    if part.node in ends:
        number, end = ends[part.node]
        return number, lead[end * HASH_BYTES :]
    lead = part.lead + lead
    while above := held.get(part.above):
        part = above
        if part.node in ends:
            number, end = ends[part.node]
            return number, part.label[end * HASH_BYTES :] + lead
        lead = part.lead + part.label + lead
    return -1, lead


def _counts(holdings: Holdings) -> list[tuple[int | None, Tier, dict[int, int]]]:
    """All counts of a rank that its blocks don't tell, by group (None: the main one) and tier."""
    of_main = {Tier.GPU: holdings.copies} | holdings.lower
    beside = {number: group.counts for number, group in holdings.groups.items()}
    counts: list[tuple[int | None, Tier, dict[int, int]]] = [
        (None, tier, dict(of_names)) for tier, of_names in of_main.items()
    ]
    for number, tiers in beside.items():
        counts += [(number, tier, dict(of_names)) for tier, of_names in tiers.items()]
    return counts


def _cut(of_names: dict[int, int]) -> Iterator[dict[int, int]]:
    """Shares of a map, each small enough for a chunk."""
    items = iter(of_names.items())
    while share := dict(islice(items, CHUNK_BLOCKS)):
        yield share


def _rest(holdings: Holdings, mark: int | None) -> _Rest:
    return _Rest(
        holdings.rank,
        mark,
        holdings.block_size,
        holdings.main_group,
        {
            number: _Group(group.window, group.block_size)
            for number, group in holdings.groups.items()
        },
        list(holdings.opaque),
        holdings.unpaired,
    )


def _shares(segments: Iterable[_Segment]) -> Iterator[list[_Segment]]:
    share: list[_Segment] = []
    blocks = 0
    for segment in segments:
        share.append(segment)
        blocks += (len(segment.names) + len(segment.lead)) // HASH_BYTES
        if blocks >= CHUNK_BLOCKS or len(share) >= CHUNK_SEGMENTS:
            yield share
            share, blocks = [], 0
    if share:
        yield share


class Loader:
    """Takes a snapshot's chunks in order and puts the ranks into an index.

    What the index has of a rank is replaced. A rank is complete with its last chunk: hold back its
    events until it stands in `marks`, which has what the dump said of it.
    """

    def __init__(self, index: RadixIndex) -> None:
        self._index = index
        self._checksum = 0
        self._started = False
        self._loading: _Loading | None = None
        self.marks: dict[WorkerRank, int | None] = {}
        self.is_complete = False

    def feed(self, chunk: bytes) -> None:
        """Take the next chunk.

        Raises SnapshotError if it is not the next one or not understood; no more can be taken then,
        and the rank that is not complete is empty.
        """
        try:
            self._take(self._part(chunk))
        except SnapshotError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """No more chunks come: drop the rank that is not complete."""
        self.is_complete = True
        if self._loading is not None:
            self._index.clear(self._loading.rank)
            self._loading = None

    def _part(self, chunk: bytes) -> _Part:
        body = chunk[HASH_BYTES:]
        self._checksum = xxh3_64_intdigest(body, self._checksum)
        if self._checksum.to_bytes(HASH_BYTES, "big") != chunk[:HASH_BYTES] or self.is_complete:
            raise SnapshotError("a chunk is damaged or not the next one")
        try:
            return _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise SnapshotError(f"a chunk is not understood: {error}") from error

    def _take(self, part: _Part) -> None:
        if not self._started:
            if part != _Head(FORMAT_VERSION, RULE_VERSION):
                raise SnapshotError(f"not a snapshot of format {FORMAT_VERSION}: {part}")
            self._started = True
        elif isinstance(part, _Blocks):
            self._open(part.rank).add(part.segments)
        elif isinstance(part, _Counts):
            self._open(part.rank).count(part)
        elif isinstance(part, _Aliases):
            self._open(part.rank).name(part.main_of)
        elif isinstance(part, _Rest):
            self._open(part.rank).finish(part)
            self._loading = None
            self._index.settle(part.rank)
            self.marks[part.rank] = part.mark
        elif self._loading is not None or part != _End(len(self.marks)):
            raise SnapshotError("this is not how a snapshot ends")
        else:
            self.is_complete = True

    def _open(self, rank: WorkerRank) -> "_Loading":
        if self._loading is None:
            self._index.clear(rank)
            self._loading = _Loading(self._index.open(rank))
        elif self._loading.rank != rank:
            raise SnapshotError(f"{self._loading.rank} is not complete, but here is {rank}")
        return self._loading


class _Loading:
    """A rank of which some blocks are there."""

    def __init__(self, holdings: Holdings) -> None:
        self.rank = holdings.rank
        self._holdings = holdings
        self._ends: list[tuple[Run, int]] = []  # by segment: a run and the last position in it
        self._of_main: dict[Tier, dict[int, int]] = {Tier.GPU: {}}
        self._beside: dict[int, dict[Tier, dict[int, int]]] = {}
        self._main_of: dict[int, int] = {}
        self._aliases: dict[int, list[int]] = {}

    def add(self, segments: list[_Segment]) -> None:
        """Put segments in their places."""
        try:
            self._ends.extend(map(self._add, segments))
        except (IndexError, LookupError) as error:
            raise SnapshotError(f"a segment does not go with those before it: {error}") from error

    def _add(self, segment: _Segment) -> tuple[Run, int]:
        size = len(segment.hashes)
        if not size or size % HASH_BYTES or len(segment.names) != size:
            raise SnapshotError("a segment has other hashes than names")
        tree = self._holdings.tree
        node, start = tree.root, 0
        if segment.behind >= 0:
            run, position = self._ends[segment.behind]
            node, start = run.place(position)
            start += 1
        spans = tree.place(node, start, segment.lead + segment.hashes, self._holdings.bit)
        at, lower = 0, int.from_bytes(segment.lower, "big")
        for node, start, blocks in _behind(spans, len(segment.lead) // HASH_BYTES):
            names = segment.names[at * HASH_BYTES : (at + blocks) * HASH_BYTES]
            end = self._holdings.restore(node, start, names, lower >> at & ones(blocks))
            at += blocks
        return end

    def count(self, part: _Counts) -> None:
        """Take counts of some names."""
        tiers = self._of_main if part.group is None else self._beside.setdefault(part.group, {})
        tiers.setdefault(part.tier, {}).update(part.counts)

    def name(self, main_of: dict[int, int]) -> None:
        """Take further names of places."""
        self._main_of.update(main_of)
        for other, main in main_of.items():
            self._aliases.setdefault(main, []).append(other)

    def finish(self, rest: _Rest) -> None:
        """Take what else there is to know."""
        groups = {}
        for number, group in rest.groups.items():
            groups[number] = Group(group.window, group.block_size)
            groups[number].counts = self._beside.get(number, {})
        holdings = self._holdings
        holdings.main_group, holdings.groups = rest.main_group, groups
        holdings.opaque, holdings.unpaired = set(rest.opaque), rest.unpaired
        holdings.block_size = rest.block_size
        holdings.aliases, holdings.main_of = self._aliases, self._main_of
        copies = self._of_main.pop(Tier.GPU)
        holdings.restore_counts(copies, self._of_main)


def _behind(spans: list[Span], lead: int) -> Iterator[Span]:
    """The spans without their first `lead` blocks."""
    for node, start, blocks in spans:
        passed = min(lead, blocks)
        lead -= passed
        if passed < blocks:
            yield Span(node, start + passed, blocks - passed)
