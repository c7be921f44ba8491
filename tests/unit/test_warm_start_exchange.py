"""Who gives blocks and who takes them, over a bus in memory that can lose what it carries."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from random import Random

import pytest
from support.fleets import FakeSource, join, new_fleet
from support.index_content import content
from support.streams import eventually

from events import BlocksStored, EventBatch, WorkerRank
from events.bus import Hear
from events.history import Position
from events.replica import (
    IndexMessage,
    IndexOffer,
    IndexPart,
    IndexTake,
    Ledger,
    Mirror,
    decode_message,
)
from kvrouter.handing_over import MAX_WAITING, HandingOver
from kvrouter.load import Load
from kvrouter.replication import Replication
from kvrouter.shared_load import SharedLoad
from kvrouter.warm_start import AT_ONCE, WarmStart

WORKER = "w1"


class Air:
    """Carries what `lets_pass` does."""

    def __init__(self) -> None:
        self.hears: dict[str, Callable[[bytes], None]] = {}
        self.said: list[object] = []
        self.lets_pass: Callable[[object], bool] = lambda message: True  # noqa: ARG005  all

    def carry(self, to: str, payload: bytes) -> None:
        message = decode_message(payload)
        if isinstance(message, IndexMessage):
            self.said.append(message)
        if to in self.hears and self.lets_pass(message):
            self.hears[to](payload)


class AirBus:
    """One replica's part of it."""

    is_connected = True
    dropped = 0

    def __init__(self, air: Air, name: str) -> None:
        self._air, self._name = air, name

    def publish(self, payload: bytes) -> None:
        for name in list(self._air.hears):
            if name != self._name:
                self._air.carry(name, payload)

    def send(self, to: str, payload: bytes) -> None:
        self._air.carry(to, payload)

    async def run(self, hear: Hear) -> None:
        self._air.hears[self._name] = hear
        await asyncio.Event().wait()


class Source(FakeSource):
    def __init__(self, position: Position | None) -> None:
        super().__init__()
        self.at = position

    def position(self) -> Position | None:  # type: ignore[override]  # the fake one has none
        return self.at


class Replica:
    def __init__(self, air: Air, name: str) -> None:
        load, ledger = Load(), Ledger(name, 1)
        mirror = Mirror(name, 1, Random(1))
        shared = SharedLoad(load, ledger)
        bus = AirBus(air, name)
        self.replication = Replication(ledger, mirror, shared, bus, beat_s=0.02)
        self.fleet = new_fleet()
        self.rank = join(self.fleet, WORKER)
        self.taking = WarmStart(self.fleet, self.replication, Random(1))
        self.giving = HandingOver(self.fleet, self.replication)
        self.replication.on_index = self.hear

    def hear(self, message: IndexMessage) -> None:
        self.taking.hear(message)
        self.giving.hear(message)

    def knows(self, blocks: int, position: Position | None) -> None:
        names = list(range(1, blocks + 1))
        tokens = list(range(4 * blocks))
        stored = BlocksStored(block_hashes=[*names], token_ids=tokens, block_size=4)
        self.fleet.on_batch(self.rank, EventBatch(0.0, [stored]))
        self.fleet.ranks[self.rank].source = Source(position)

    @property
    def blocks(self) -> int:
        return self.fleet.pools["m"].index.blocks(self.rank)

    async def restore(self) -> Position | None:
        return await self.taking.restore(self.rank, lambda position: position.next > 0)


AT = Position(17, [1, 2, 3], cold=False)


@pytest.fixture
async def replicas() -> AsyncIterator[tuple[Air, Replica, Replica, Replica]]:
    air = Air()
    made = [Replica(air, name) for name in ("new", "old", "other")]
    tasks = [asyncio.create_task(each.replication.run()) for each in made]
    tasks += [asyncio.create_task(each.giving.run()) for each in made]
    await eventually(lambda: all(len(r.replication.mirror.replicas()) == 2 for r in made))
    yield air, *made  # type: ignore[misc]  # three of them
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


Replicas = tuple[Air, Replica, Replica, Replica]


async def test_blocks_come_with_the_position_that_they_are_of(replicas: Replicas) -> None:
    _, new, old, _ = replicas
    old.knows(9000, AT)
    assert await new.restore() == AT
    assert content(new.fleet.pools["m"].index) == content(old.fleet.pools["m"].index)
    new.fleet.check()


async def test_the_one_that_knows_most_is_taken_and_a_cold_one_last(replicas: Replicas) -> None:
    """Two routers have just started, a third one is old."""
    _, new, old, other = replicas
    old.knows(40, AT)
    other.knows(50, Position(17, [], cold=True))
    assert await new.restore() == AT
    assert new.blocks == 40


async def test_nobody_has_them(replicas: Replicas) -> None:
    _, new, old, _ = replicas
    old.knows(40, None)
    assert await new.restore() is None
    assert new.blocks == 0


async def test_an_answer_that_loses_a_part_leaves_nothing_and_is_asked_for_again(
    replicas: Replicas,
) -> None:
    air, new, old, _ = replicas
    old.knows(9000, AT)
    lost: list[IndexPart] = []

    def lets_pass(message: object) -> bool:
        if isinstance(message, IndexPart) and message.part == 2 and not lost:
            lost.append(message)
            assert new.blocks > 0
            return False
        if isinstance(message, IndexTake) and lost:
            assert new.blocks == 0
        return True

    air.lets_pass = lets_pass
    assert await new.restore() == AT
    assert lost
    assert new.blocks == 9000


async def test_a_position_that_is_not_joined_is_not_taken(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old router is behind what the new one hears, or hears another engine."""
    monkeypatch.setattr("kvrouter.warm_start.PATIENCE_S", 0.3)
    air, new, old, _ = replicas
    old.knows(40, Position(0, [], cold=False))
    assert await new.restore() is None
    assert not any(isinstance(message, IndexTake) for message in air.said)
    assert sum(isinstance(message, IndexOffer) for message in air.said) >= 2


async def test_a_worker_that_goes_meanwhile_leaves_no_blocks(replicas: Replicas) -> None:
    air, new, old, _ = replicas
    old.knows(9000, AT)

    def lets_pass(message: object) -> bool:
        if isinstance(message, IndexPart) and message.part == 2:
            new.fleet.remove(WORKER)
        return True

    air.lets_pass = lets_pass
    assert await new.restore() is None
    assert new.fleet.pools["m"].index.ranks() == []
    new.fleet.check()


async def test_few_ranks_begin_at_the_same_time_and_none_without_others(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published while a rank is asked for has to be kept: not of hundreds at once."""
    monkeypatch.setattr("kvrouter.warm_start.COMPANY_S", 0.0)
    _, new, _, _ = replicas
    async with AsyncExitStack() as turns:
        for _ in range(AT_ONCE):
            assert await turns.enter_async_context(new.taking.turn())
        waiting = asyncio.create_task(turns.enter_async_context(new.taking.turn()))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    lonely = Replica(Air(), "lonely")
    async with lonely.taking.turn() as is_worth_it:
        assert not is_worth_it


async def test_who_starts_with_others_waits_for_one_that_has_something(replicas: Replicas) -> None:
    """R1: the first to be heard has just started too, and answers that it has nothing."""
    air, new, old, other = replicas
    async with new.taking.turn():
        restoring = asyncio.create_task(new.restore())
        await eventually(lambda: sum(isinstance(each, IndexOffer) for each in air.said) >= 2)
        old.knows(40, AT)
        assert await restoring == AT
    assert (new.blocks, other.blocks) == (40, 0)


async def test_where_nobody_has_anything_the_wait_ends(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvrouter.warm_start.COMPANY_S", 0.1)
    _, new, _, _ = replicas
    async with new.taking.turn():
        assert await new.restore() is None


def test_more_takers_than_may_wait_are_told_to_try_again() -> None:
    """A fleet of routers is started at once."""
    air = Air()
    old = Replica(air, "old")
    old.knows(40, AT)
    for number in range(MAX_WAITING + 1):
        old.giving.hear(IndexTake(f"r{number}", 1, number, *WorkerRank(WORKER)))
    assert [message for message in air.said if isinstance(message, IndexPart)] == [
        IndexPart("old", 1, MAX_WAITING, 0, b"", None)
    ]
