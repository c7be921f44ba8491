"""Listening to one worker's KV events: a source per rank that publishes any."""

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from events import WorkerRank
from kvrouter.config import RankEvents
from kvrouter.rank_state import Source
from kvrouter.supervision import cancelled, supervised
from kvrouter.workers import WorkerFacts

log = logging.getLogger(__name__)


class EventSource(Source, Protocol):
    """A source that runs: of an engine itself, or of its relay."""

    async def run(self) -> None:
        """Follow until cancelled."""


class Audience(Protocol):
    """Whoever wants to know of what is listened to: a fleet, or a relay."""

    def heard(self, rank: WorkerRank, source: Source) -> None:
        """The rank's blocks are told of by this source from now on."""

    def unheard(self, rank: WorkerRank) -> None:
        """Nobody listens to the rank any more."""


MakeSource = Callable[[WorkerRank, RankEvents], EventSource]


class Listeners:
    """The event sources of one worker. Leaving the context stops them."""

    def __init__(self, worker: str, audience: Audience, make_source: MakeSource) -> None:
        self._worker = worker
        self._audience = audience
        self._make_source = make_source
        self._heard: dict[WorkerRank, RankEvents] = {}
        self._tasks: dict[WorkerRank, asyncio.Task[None]] = {}
        self._stopped: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await cancelled(list(self._tasks.values()) + self._stopped)

    def listen(self, facts: WorkerFacts) -> None:
        """Listen to what the worker publishes now.

        A source whose endpoint is the same goes on: it notices by itself that the engine behind
        it is a new one.
        """
        wanted = {
            WorkerRank(self._worker, dp_rank): endpoint
            for dp_rank, endpoint in facts.events.items()
            if endpoint is not None
        }
        for rank in [rank for rank in self._heard if wanted.get(rank) != self._heard[rank]]:
            self._stop(rank)
        for rank, endpoint in wanted.items():
            if rank not in self._heard:
                self._start(rank, endpoint)

    def _start(self, rank: WorkerRank, endpoint: RankEvents) -> None:
        source = self._make_source(rank, endpoint)
        self._audience.heard(rank, source)
        self._heard[rank] = endpoint
        self._tasks[rank] = asyncio.create_task(
            supervised(f"events of {rank.worker}/{rank.dp_rank}", source.run)
        )

    def _stop(self, rank: WorkerRank) -> None:
        del self._heard[rank]
        task = self._tasks.pop(rank)
        task.cancel()
        self._stopped = [each for each in (*self._stopped, task) if not each.done()]
        self._audience.unheard(rank)
