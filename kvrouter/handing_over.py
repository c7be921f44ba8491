"""Giving a rank's blocks to a router that starts: the other side of `warm_start`.

One after the other, and for no more than a small share of the time: routers that start together,
or one that restarts in a loop, disturb nobody. Who has to wait too long for a place does without.
"""

import asyncio
import itertools
import time
from collections import deque

from events import WorkerRank
from events.history import Position
from events.replica import IndexMessage, IndexOffer, IndexPart, IndexQuestion, IndexTake
from indexer.snapshot import dump
from kvrouter.fleet import Fleet
from kvrouter.replication import Replication

SHARE = 0.1
"""Of our time, what making chunks may take."""
MAX_WAITING = 8
"""Routers that may wait for their turn; more are told to try again."""


class HandingOver:
    """Offers what this router knows of ranks, and gives it to those who take it."""

    def __init__(self, fleet: Fleet, replication: Replication) -> None:
        self.given = 0
        """Ranks that were given as a whole."""
        self._fleet = fleet
        self._replication = replication
        self._waiting: deque[IndexTake] = deque()
        self._wake = asyncio.Event()

    def hear(self, message: IndexMessage) -> None:
        """Answer a question at once; take note of who takes an offer, or has to try again."""
        if isinstance(message, IndexQuestion):
            self._offer(message)
        elif isinstance(message, IndexTake):
            if len(self._waiting) >= MAX_WAITING:
                self._send_part(message, 0, b"")
            else:
                self._waiting.append(message)
                self._wake.set()

    def _offer(self, question: IndexQuestion) -> None:
        rank = WorkerRank(question.worker, question.dp_rank)
        pool, own = self._fleet.pool_of(rank.worker), self._replication.ledger
        position = None if pool is None else self._position(rank)
        blocks = 0 if pool is None else pool.index.blocks(rank)
        offer = IndexOffer(own.replica, own.epoch, question.number, blocks, position)
        self._replication.send(question.replica, offer)

    def _position(self, rank: WorkerRank) -> Position | None:
        """How far the rank is followed; None while that is in doubt, or it is not by ourselves."""
        state = self._fleet.ranks.get(rank)
        source = None if state is None else state.source
        return None if source is None else source.position()

    async def run(self) -> None:
        """Give until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._give(self._waiting.popleft())

    async def _give(self, take: IndexTake) -> None:
        """The rank's blocks as they are now, then the end; only the end if there are none."""
        rank = WorkerRank(take.worker, take.dp_rank)
        pool, position = self._fleet.pool_of(rank.worker), self._position(rank)
        number = 0
        if pool is not None and position is not None:
            chunks = dump(pool.index, ranks=[rank])
            began = time.thread_time()
            # The head and the first blocks in one go: what they are of is the position.
            together = [next(chunks), next(chunks)]
            for chunk in itertools.chain(together, chunks):
                self._send_part(take, number, chunk, position if not number else None)
                number += 1
                if number >= len(together):
                    await asyncio.sleep((time.thread_time() - began) * (1 / SHARE - 1))
                    began = time.thread_time()
            self.given += 1
        self._send_part(take, number, b"")

    def _send_part(
        self, take: IndexTake, number: int, chunk: bytes, position: Position | None = None
    ) -> None:
        own = self._replication.ledger
        part = IndexPart(own.replica, own.epoch, take.number, number, chunk, position)
        self._replication.send(take.replica, part)
