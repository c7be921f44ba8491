"""What a relay publishes makes the same index as what the engine published, at any time."""

from collections.abc import Iterator
from random import Random

import pytest
from support import captures
from support.naive_index import NaiveIndex
from support.odd_engines import TRUNKS, Engine, draw_traits

from events import BlocksStored, EventBatch, WorkerRank, decode_batch
from indexer import RadixIndex, block_hashes, namespace
from kvrouter.relay.copy import RankCopy

RANK = WorkerRank("w")
SPACES: list[tuple[str | None, str | None]] = [(None, None), ("a", None), (None, "s"), ("a", "s")]


class Three:
    """An index fed by the engine, one fed by the relay, and one that starts from its state."""

    def __init__(self) -> None:
        self.copy = RankCopy()
        self.plain, self.relayed, self.late = RadixIndex(), RadixIndex(), RadixIndex()
        self.questions: list[bytes] = []

    def apply(self, batch: EventBatch) -> None:
        self.plain.apply(RANK, batch)
        published = EventBatch(batch.ts_s, self.copy.apply(batch), batch.dp_rank)
        self.relayed.apply(RANK, published)
        self.late.apply(RANK, published)

    def start_late(self) -> None:
        """A router starts now, and is told the state in small batches."""
        self.late = RadixIndex()
        events = self.copy.state()
        for at in range(0, len(events), 3):
            self.late.apply(RANK, EventBatch(0.0, events[at : at + 3]))
        self.late.check()

    def check(self, questions: list[bytes]) -> None:
        for hashes in questions:
            expected = self.plain.match(hashes)
            assert self.relayed.match(hashes) == expected
            assert self.late.match(hashes) == expected
        for index in (self.relayed, self.late):
            index.check()
            assert index.blocks(RANK) == self.plain.blocks(RANK)
            assert index.is_approximate(RANK) == self.plain.is_approximate(RANK)
            assert index.block_size(RANK) == self.plain.block_size(RANK)
            assert index.stats().tree_blocks == self.plain.stats().tree_blocks


def questions(rng: Random) -> Iterator[bytes]:
    for _ in range(6):
        tokens = [*rng.choice(TRUNKS)[: rng.randint(0, 24)]]
        tokens += [rng.randint(1, 2) for _ in range(rng.randint(0, 3))]
        lora, salt = rng.choice(SPACES)
        yield block_hashes(tokens, rng.choice([1, 2]), namespace(lora=lora, salt=salt))


@pytest.mark.parametrize("seed", range(60))
def test_a_relayed_index_is_equal_whatever_an_engine_does(seed: int) -> None:
    """R5: holes, copies, aliases, tiers, sliding groups, clears, other block sizes."""
    rng = Random(seed)
    engine, naive, three = Engine(draw_traits(rng)), NaiveIndex(), Three()
    for _ in range(rng.randint(5, 60)):
        event = engine.next_event(naive.rank(RANK), rng)
        naive.apply(RANK, event)
        three.apply(EventBatch(0.0, [event]))
        if rng.random() < 0.2:
            three.start_late()
        three.check([*questions(rng)])


@pytest.mark.parametrize("name", captures.names())
def test_a_relayed_index_is_equal_on_every_recording(name: str) -> None:
    """The streams of real engines, as two routers would hear them."""
    three = Three()
    rng = Random(1)
    asked: list[bytes] = []
    for event in captures.load(name).events:
        batch = decode_batch(event.payload)
        three.apply(batch)
        asked += [
            block_hashes(stored.token_ids, stored.block_size)
            for stored in batch.events
            if isinstance(stored, BlocksStored) and stored.token_ids and stored.block_size
        ]
        if rng.random() < 0.05:
            three.start_late()
            three.check(asked[-20:])
    three.check(asked[-200:])
    three.start_late()
    three.check(asked[-200:])
