"""The beginning of a source: what it hears while another router is asked how far it is."""

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from events.history import Message, Position
from events.model import WorkerRank
from events.stream import Command
from events.subscription import SEQNO_BYTES


class Restorer(Protocol):
    """Whoever can get a rank's blocks from elsewhere when a source begins."""

    def turn(self) -> AbstractAsyncContextManager[bool]:
        """A place among the few that begin at the same time; whether it is worth a try at all."""

    async def restore(self, rank: WorkerRank, joins: Callable[[Position], bool]) -> Position | None:
        """Put the rank's blocks where the sink would; the position that they are of.

        None, and no blocks, where there are none to be had. `joins` tells whether what was heard
        meanwhile goes on from a position.
        """


class Held(NamedTuple):
    """What was read: a published message, or news of the connection."""

    frames: list[bytes]
    is_news: bool
    batch: Message | None


MAX_BATCHES = 4096
MAX_BYTES = 2 * 2**20


class Opening:
    """Keeps what is read until it is known where to begin, in order.

    Of batches the newest only, for hundreds of sources may wait for their turn: older ones are not
    needed behind a position that is as new, and without one are a gap like any other.
    """

    def __init__(self, max_batches: int = MAX_BATCHES, max_bytes: int = MAX_BYTES) -> None:
        self.heard = asyncio.Event()
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._news: deque[tuple[int, Held]] = deque()
        self._batches: deque[tuple[int, Held]] = deque()
        self._order = itertools.count()
        self._bytes = 0

    def hold_batch(self, frames: list[bytes], now: float) -> list[Command]:
        """Keep a published message."""
        del now
        is_batch = len(frames) == 3 and len(frames[1]) == SEQNO_BYTES  # noqa: PLR2004  the wire's
        batch = Message(int.from_bytes(frames[1], "big"), frames[2]) if is_batch else None
        self._batches.append((next(self._order), Held(frames, is_news=False, batch=batch)))
        self._bytes += sum(map(len, frames))
        while len(self._batches) > self._max_batches or self._bytes > self._max_bytes:
            _, oldest = self._batches.popleft()
            self._bytes -= sum(map(len, oldest.frames))
        self.heard.set()
        return []

    def hold_news(self, frames: list[bytes], now: float) -> list[Command]:
        """Keep the news that the connection has come or gone.

        With a connection goes what was heard on it: it may be of an engine that is no more.
        """
        del now
        if parse_monitor_message(frames)["event"] == zmq.Event.DISCONNECTED:
            self._batches.clear()
            self._bytes = 0
        self._news.append((next(self._order), Held(frames, is_news=True, batch=None)))
        return []

    def joins(self, position: Position) -> bool:
        """Whether that is how far one is who hears the same engine: it has a batch that we have.

        Of an idle engine there is none, and its next one will show it.
        """
        batches = [held.batch for _, held in self._batches if held.batch is not None]
        return not batches or any(map(position.has, batches))

    def behind(self, position: Position | None) -> Iterator[Held]:
        """All that is held, without the batches that are too old to be compared with it."""
        first = 0 if position is None else position.first
        for _, held in heapq.merge(self._news, self._batches):
            if held.batch is None or held.batch.seqno >= first:
                yield held
