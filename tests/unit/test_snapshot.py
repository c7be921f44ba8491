"""Snapshots: what goes out comes in again, and what is damaged does not."""

from random import Random

import pytest
from msgspec import msgpack
from support.index_comparison import counts
from support.index_content import content
from support.naive_index import NaiveIndex
from support.odd_engines import Engine, draw_traits
from xxhash import xxh3_64_intdigest

from events import (
    BlocksRemoved,
    BlocksStored,
    Event,
    EventBatch,
    GroupKind,
    Tier,
    WorkerRank,
)
from indexer import Overlap, RadixIndex, block_hashes
from indexer.hashing import RULE_VERSION
from indexer.snapshot import (
    FORMAT_VERSION,
    Loader,
    SnapshotError,
    _Blocks,
    _Head,
    _Segment,
    dump,
)

W1, W2 = WorkerRank("w1"), WorkerRank("w2", 1)
IDS = list(range(4000))


def stored(names: list[int], parent: int | None = None, at: int = 0) -> BlocksStored:
    ids = IDS[at * 4 : (at + len(names)) * 4]
    return BlocksStored(block_hashes=list(names), parent=parent, token_ids=ids, block_size=4)


def batch(*events: Event) -> EventBatch:
    return EventBatch(0.0, list(events))


def loaded(chunks: list[bytes], index: RadixIndex | None = None) -> RadixIndex:
    index = index or RadixIndex()
    loader = Loader(index)
    for chunk in chunks:
        loader.feed(chunk)
    assert loader.is_complete
    index.check()
    return index


@pytest.fixture
def index() -> RadixIndex:
    made = RadixIndex()
    made.apply(W1, batch(stored(list(range(1, 301))), BlocksRemoved(block_hashes=[40, 41, 129])))
    made.apply(W2, batch(stored(list(range(501, 541))), stored([900], 520, at=100)))
    return made


def test_a_loaded_index_answers_as_the_one_that_was_dumped(index: RadixIndex) -> None:
    other = loaded(list(dump(index)))
    hashes = block_hashes(IDS, 4)
    assert other.match(hashes) == index.match(hashes) != {}
    assert other.stats().blocks == index.stats().blocks
    assert other.block_size(W1) == 4


def test_blocks_behind_a_hole_come_back_with_the_missing_one(index: RadixIndex) -> None:
    """A restarted router hears that the engine has stored an evicted block again."""
    other = loaded(list(dump(index)))
    other.apply(W1, batch(stored([40, 41], 39, at=39), stored([129], 128, at=128)))
    assert other.match(block_hashes(IDS, 4))[W1].gpu == 300
    other.check()


def test_what_an_index_had_of_a_rank_is_replaced(index: RadixIndex) -> None:
    other = RadixIndex()
    other.apply(W1, batch(stored([7, 8, 9])))
    other.apply(WorkerRank("w3"), batch(stored([7, 8, 9])))
    loaded(list(dump(index)), other)
    found = other.match(block_hashes(IDS, 4))
    assert found == index.match(block_hashes(IDS, 4)) | {WorkerRank("w3"): (3, 0, 0)}


def test_marks_tell_the_moment_of_each_rank(index: RadixIndex) -> None:
    loader = Loader(RadixIndex())
    for chunk in dump(index, {W1: 17, W2: 4}.get):
        loader.feed(chunk)
    assert loader.marks == {W1: 17, W2: 4}


def test_an_index_may_change_while_it_is_dumped(index: RadixIndex) -> None:
    """Each rank is as it was at one moment, whatever is cut and joined meanwhile."""
    chunks = []
    for number, chunk in enumerate(dump(index)):
        chunks.append(chunk)
        index.apply(W2, batch(stored([2000 + number], 510 + number, at=200 + number)))
        if number == 1:
            index.remove_worker("w1")
    other = loaded(chunks)
    assert index.ranks() == [W2]
    assert other.match(block_hashes(IDS, 4))[W1].gpu == 39
    assert other.blocks(W2) >= 41


def test_chunks_are_small() -> None:
    index = RadixIndex()
    for prompt in range(30):
        names = list(range(prompt * 1000, prompt * 1000 + 1000))
        ids = [prompt] * 4000
        event = BlocksStored(block_hashes=list(names), token_ids=ids, block_size=4)
        index.apply(W1, batch(event))
    chunks = list(dump(index))
    assert len(chunks) > 5
    assert max(map(len, chunks)) < 200_000
    assert loaded(chunks).blocks(W1) == 30_000


def test_chunks_are_small_whatever_is_counted_of_the_blocks() -> None:
    """Offloaded blocks, a sliding window, names of several copies, two names of each block.

    A message of NATS takes 1 MiB: the counts of a large cache in one chunk would never arrive.
    """
    index, count = RadixIndex(), 6_000
    names, others = ([2**60 + at + start for at in range(count)] for start in (0, count))
    ids = [at >> 2 for at in range(4 * count)]
    for of_names in (names, names, others):
        event = BlocksStored(block_hashes=list(of_names), token_ids=ids, block_size=4)
        index.apply(W1, batch(event))
    index.apply(W1, batch(BlocksStored(block_hashes=list(names), tier=Tier.CPU)))
    window = BlocksStored(
        block_hashes=list(names),
        block_size=4,
        group=1,
        group_kind=GroupKind.SLIDING,
        sliding_window=8,
    )
    index.apply(W1, batch(window))
    chunks = list(dump(index))
    assert max(map(len, chunks)) < 40_000
    other = loaded(chunks)
    hashes = block_hashes(ids, 4)
    assert other.match(hashes) == index.match(hashes) == {W1: Overlap(count)}
    other.apply(W1, batch(BlocksRemoved(block_hashes=[*names, *names, *others])))
    assert other.match(hashes) == {W1: Overlap(0, count)}
    other.apply(W1, batch(BlocksRemoved(block_hashes=list(names), tier=Tier.CPU)))
    assert (other.blocks(W1), other.stats().nodes) == (0, 0)


class Story:
    """Two engines of any kind, and an index that hears them."""

    def __init__(self, seed: int) -> None:
        self.index = RadixIndex(label_blocks=4)
        self._rng = Random(seed)
        self._naive = NaiveIndex()
        self._engines = {rank: Engine(draw_traits(self._rng)) for rank in (W1, W2)}

    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            rank = self._rng.choice([W1, W2])
            event = self._engines[rank].next_event(self._naive.rank(rank), self._rng)
            self._naive.apply(rank, event)
            self.index.apply(rank, batch(event))


def test_a_rank_is_dumped_as_it_was_whatever_comes_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks are made one by one while events go on to cut, join and empty the same nodes."""
    monkeypatch.setattr("indexer.snapshot.CHUNK_BLOCKS", 2)
    for seed in range(30):
        story = Story(seed)
        story.go_on(40)
        expected = content(story.index).get(W1)
        chunks = []
        for number, chunk in enumerate(dump(story.index, ranks=[W1])):
            chunks.append(chunk)
            if number:
                story.go_on(3)
        assert content(loaded(chunks, RadixIndex(label_blocks=4))).get(W1) == expected


@pytest.mark.parametrize("damage", ["flip", "lose", "swap", "twice", "cut"])
def test_a_damaged_snapshot_is_noticed(index: RadixIndex, damage: str) -> None:
    chunks = list(dump(index))
    if damage == "flip":
        chunks[1] = chunks[1][:-1] + bytes([chunks[1][-1] ^ 1])
    elif damage == "lose":
        del chunks[2]
    elif damage == "swap":
        chunks[1], chunks[3] = chunks[3], chunks[1]
    elif damage == "twice":
        chunks.insert(2, chunks[1])
    else:
        chunks[3] = chunks[3][:5]
    loader = Loader(other := RadixIndex())

    def load() -> None:
        for chunk in chunks:
            loader.feed(chunk)

    with pytest.raises(SnapshotError):
        load()
    other.check()
    with pytest.raises(SnapshotError):
        loader.feed(chunks[0])


@pytest.mark.parametrize("names", [b"", b"x" * 8, b"x" * 17])
def test_a_segment_whose_names_do_not_fit_its_hashes_leaves_no_nodes(names: bytes) -> None:
    """Of a sender that is wrong itself, not of a bad line: the checksum fits."""
    loader = Loader(other := RadixIndex())
    segment = _Segment(-1, b"", b"h" * 16, names, b"")
    checksum = 0
    head, bad = map(msgpack.encode, (_Head(FORMAT_VERSION, RULE_VERSION), _Blocks(W1, [segment])))
    checksum = xxh3_64_intdigest(head, checksum)
    loader.feed(checksum.to_bytes(8, "big") + head)
    checksum = xxh3_64_intdigest(bad, checksum)
    with pytest.raises(SnapshotError):
        loader.feed(checksum.to_bytes(8, "big") + bad)
    other.check()
    assert other.stats().nodes == 0


def test_another_version_is_refused(index: RadixIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of another rule mean nothing."""
    chunks = list(dump(index))
    monkeypatch.setattr("indexer.snapshot.RULE_VERSION", 99)
    with pytest.raises(SnapshotError, match="not a snapshot of format 2"):
        Loader(RadixIndex()).feed(chunks[0])


def test_a_snapshot_that_breaks_off_leaves_no_half_of_a_rank(index: RadixIndex) -> None:
    loader = Loader(other := RadixIndex())
    for chunk in list(dump(index))[:2]:
        loader.feed(chunk)
    loader.abandon()
    other.check()
    assert (other.blocks(W1), other.blocks(W2)) == (0, 0)


def test_after_any_events_a_loaded_index_goes_on_as_the_other() -> None:
    """Tiers, groups, aliases, holes, copies: all that an engine may have told."""
    for seed in range(40):
        rng = Random(seed)
        naive, index = NaiveIndex(), RadixIndex(label_blocks=4)
        engines = {rank: Engine(draw_traits(rng)) for rank in (W1, W2)}
        for step in range(60):
            rank = rng.choice([W1, W2])
            event = engines[rank].next_event(naive.rank(rank), rng)
            expected = naive.apply(rank, event)
            assert counts(index.apply(rank, batch(event))) == +expected
            if step % 20 == 19:
                index = loaded(list(dump(index)), RadixIndex(label_blocks=4))
