"""A starting router's blocks from another router: faster than from the engine, and more of them.

Engines keep a bounded history of their events, or none; what a router has heard for hours no engine
can tell a new one. So a source that begins asks the other replicas first, and goes on from where
one of them is, as if it were that one and had just lost the connection: `events.subscription` then
finds out whether it still is the same engine, and closes the gap or drops the blocks. What comes of
it is the other's view of the rank, or what there would be without it.

A few ranks at a time, each from the replica that knows most of it.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from typing import NamedTuple, TypeAlias

from events import WorkerRank
from events.history import Position
from events.replica import IndexMessage, IndexOffer, IndexPart, IndexQuestion, IndexTake
from indexer.snapshot import Loader, SnapshotError
from kvrouter.fleet import Fleet
from kvrouter.pool import Pool
from kvrouter.replication import Replication

log = logging.getLogger(__name__)

AT_ONCE = 16
"""Ranks that begin at the same time."""
COMPANY_S = 2.0
"""How long after the start to wait for other replicas, besides a beat: for a sign of any, and for
one that has something. Who starts at the same time is heard first, and has nothing."""
OFFERS_S = 0.3
QUESTIONS = 5
"""How often to ask replicas that don't answer: a busy one may be late, an older one never will."""
PART_S = 3.0
PATIENCE_S = 15.0
"""For one rank, with all that goes wrong. Its engine's events are held meanwhile."""
AGAIN_S = 0.1
_LOOK_S = 0.02

Joins: TypeAlias = Callable[[Position], bool]


class _Offer(NamedTuple):
    """What a replica knows of a rank."""

    replica: str
    blocks: int
    position: Position


class WarmStart:
    """Gets ranks' blocks from other replicas; the `Restorer` of event sources."""

    def __init__(self, fleet: Fleet, replication: Replication, rng: Random) -> None:
        self.taken = 0
        """Ranks that were begun with another replica's blocks."""
        self._fleet = fleet
        self._replication = replication
        self._rng = rng
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Queue[IndexOffer | IndexPart]] = {}
        self.loading = 0
        """Ranks that have a part of their blocks."""
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._company_by: float | None = None

    def hear(self, message: IndexMessage) -> None:
        """An answer has come; what nobody waits for any more is dropped."""
        if isinstance(message, IndexOffer | IndexPart):
            answers = self._answers.get(message.number)
            if answers is not None:
                answers.put_nowait(message)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[bool]:
        """A place among the few; false without other replicas. See `Restorer`."""
        if not await self._has_company():
            yield False
            return
        async with self._turns:
            yield True

    async def restore(self, rank: WorkerRank, joins: Joins) -> Position | None:
        """The rank's blocks, from whoever has most; see `Restorer`."""
        patience_until = time.monotonic() + PATIENCE_S
        unanswered = 0
        while self._replicas and time.monotonic() < patience_until:
            offers, is_all = await self._offers(rank)
            unanswered += not is_all
            nobody = not offers and (is_all or unanswered >= QUESTIONS)
            if (nobody and self._all_heard()) or rank not in self._fleet.ranks:
                return None
            joined = [offer for offer in offers if joins(offer.position)]
            if joined:
                best = max(joined, key=self._worth)
                position = await self._take(rank, best.replica, joins, patience_until)
                if position is not None:
                    return position
            await asyncio.sleep(AGAIN_S * self._rng.uniform(0.5, 1.5))
        return None

    def _worth(self, offer: "_Offer") -> tuple[bool, int, float]:
        return not offer.position.cold, offer.blocks, self._rng.random()

    async def _has_company(self) -> bool:
        """Whether another replica is heard; at the start, as soon as one is."""
        now = time.monotonic()
        if self._company_by is None:
            self._company_by = now + COMPANY_S + self._replication.beat_s
        while not self._replicas and time.monotonic() < self._company_by:  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(_LOOK_S)
        return self._replicas > 0

    def _all_heard(self) -> bool:
        """Whether each other replica has had the time to be heard since the start."""
        return self._company_by is None or time.monotonic() >= self._company_by

    @property
    def _replicas(self) -> int:
        return len(self._replication.mirror.replicas())

    async def _offers(self, rank: WorkerRank) -> tuple[list[_Offer], bool]:
        """What the other replicas have of the rank, and whether all have answered."""
        answered = 0
        offers: list[_Offer] = []
        own = self._replication.ledger
        with self._answered() as (number, answers):
            question = IndexQuestion(own.replica, own.epoch, number, rank.worker, rank.dp_rank)
            self._replication.publish(question)
            with suppress(TimeoutError):
                async with asyncio.timeout(OFFERS_S):
                    while answered < self._replicas:
                        answer = await answers.get()
                        if isinstance(answer, IndexOffer):
                            answered += 1
                            if answer.position is not None:
                                offers.append(
                                    _Offer(answer.replica, answer.blocks, answer.position)
                                )
        return offers, answered >= self._replicas

    async def _take(
        self, rank: WorkerRank, replica: str, joins: Joins, until: float
    ) -> Position | None:
        """Take an offer and load what comes; None, and no blocks, where that breaks off."""
        pool = self._fleet.pool_of(rank.worker)
        if pool is None:
            return None
        began = time.monotonic()
        loader = Loader(pool.index)
        self.loading += 1
        position = None
        own = self._replication.ledger
        try:
            with self._answered() as (number, answers):
                take = IndexTake(own.replica, own.epoch, number, rank.worker, rank.dp_rank)
                self._replication.send(replica, take)
                while not loader.is_complete:
                    # Others may be before us, but who has begun with us goes on.
                    patience_s = PART_S if position else max(PART_S, until - time.monotonic())
                    async with asyncio.timeout(patience_s):
                        part = await answers.get()
                    if not isinstance(part, IndexPart) or not part.chunk:
                        return None
                    position = part.position or position
                    if position is None or not joins(position) or not self._has(rank, pool):
                        return None
                    loader.feed(part.chunk)
        except (TimeoutError, SnapshotError) as error:
            log.info("%s: no blocks from %s: %r", _name(rank), replica, error)
            return None
        finally:
            self.loading -= 1
            if not loader.is_complete:
                loader.abandon()
        if rank not in loader.marks:
            return None
        self.taken += 1
        log.info(
            "%s: %d blocks from %s in %.2f s",
            _name(rank),
            pool.index.blocks(rank),
            replica,
            time.monotonic() - began,
        )
        return position

    def _has(self, rank: WorkerRank, pool: Pool) -> bool:
        """Whether the rank still is one of this pool."""
        return rank in self._fleet.ranks and self._fleet.pool_of(rank.worker) is pool

    @contextmanager
    def _answered(self) -> Iterator[tuple[int, "asyncio.Queue[IndexOffer | IndexPart]"]]:
        """A number for a question, and the answers to it."""
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        try:
            yield number, self._answers[number]
        finally:
            del self._answers[number]


def _name(rank: WorkerRank) -> str:
    return f"{rank.worker}/{rank.dp_rank}"
