"""Workers that relays announce on NATS: kept while they are, and forgotten afterwards."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from events.announce import (
    Announced,
    Announcement,
    MalformedAnnouncement,
    Told,
    decode_announcement,
    decode_told,
)
from events.nats_link import NatsLink, Received
from events.sparingly import Sparingly
from events.subjects import Subjects
from kvrouter.config import ConfigError, RankEvents, announced_worker
from kvrouter.fleet import Fleet
from kvrouter.supervision import cancelled, supervised
from kvrouter.workers import ServedModel, Worker, WorkerFacts, WorkerState

log = logging.getLogger(__name__)

TICK_S = 0.25
_COMPLAIN_EVERY_S = 60.0

MakeKeeper = Callable[[Worker], Callable[[], Awaitable[None]]]


class Discovery:
    """Adds announced workers to the fleet, each with a keeper, and removes them.

    Workers that are configured stay what they are, whatever is announced under their names.
    """

    def __init__(
        self, fleet: Fleet, link: NatsLink, subjects: Subjects, make_keeper: MakeKeeper
    ) -> None:
        self._fleet = fleet
        self._link = link
        self._subjects = subjects
        self._make_keeper = make_keeper
        self._announced = Announced()
        self._told: dict[str, tuple[str, WorkerFacts | None]] = {}
        """What was said last of each announced worker, with its URL."""
        self._kept: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._complaints = Sparingly(_COMPLAIN_EVERY_S)

    async def run(self) -> None:
        """Follow the announcements until cancelled."""
        subscription = self._link.subscribe(self._subjects.all_workers, self._hear)
        self._link.watch(self._link_changed)
        if self._link.is_connected:
            self._link_changed(connected=True)
        try:
            while True:
                self._announced.tick(time.monotonic(), self._answering())
                await self._settle()
                await asyncio.sleep(TICK_S)
        finally:
            self._link.unwatch(self._link_changed)
            self._link.unsubscribe(subscription)
            await cancelled([task for _, task in self._kept.values()])
            self._kept.clear()

    def _link_changed(self, *, connected: bool) -> None:
        self._announced.connection_changed(time.monotonic(), connected=connected)
        if connected:
            self._link.publish(self._subjects.who, b"")

    def _hear(self, message: Received) -> None:
        try:
            announcement = decode_announcement(message.payload)
        except MalformedAnnouncement as error:
            self._complain(message, str(error))
            return
        try:
            announced_worker(announcement.worker, announcement.url)
        except ConfigError as error:
            self._complain(message, str(error))
            return
        if self._announced.heard(announcement, time.monotonic()):
            self._note(message, announcement)
        elif announcement.lease_s:
            first = self._announced.workers[announcement.worker]
            detail = f"not used: {announcement.url}, for {announcement.worker} is at {first}"
            self._complain(message, f"{detail} by another relay, one of which is to be stopped")

    def _note(self, message: Received, announcement: Announcement) -> None:
        try:
            told = decode_told(announcement)
        except MalformedAnnouncement as error:
            self._complain(message, f"what it tells of the engine is not used: {error}")
            told = None
        facts = None if told is None else _facts(told)
        self._told[announcement.worker] = announcement.url, facts
        worker = self._fleet.workers.get(announcement.worker)
        if worker is None or not worker.config.relayed or worker.config.url != announcement.url:
            return
        if worker.told != facts:
            worker.told = facts
            worker.doubt.arise()

    def _complain(self, message: Received, detail: str) -> None:
        times = self._complaints.due(time.monotonic())
        if times:
            log.warning(
                "%s: trouble with an announcement of a worker: %s (%d such since the last line)",
                message.subject,
                detail,
                times,
            )

    def _answering(self) -> set[str]:
        workers = self._fleet.workers
        return {name for name in self._kept if _answers(workers[name])}

    async def _settle(self) -> None:
        """Make the fleet what is announced."""
        wanted = self._announced.workers
        self._told = {name: said for name, said in self._told.items() if name in wanted}
        for name, (url, task) in list(self._kept.items()):
            if wanted.get(name) != url:
                await cancelled([task])
                del self._kept[name]
                self._fleet.remove(name)
                log.info("worker %s is not announced any more", name)
        for name, url in wanted.items():
            if name not in self._kept and name not in self._fleet.workers:
                worker = self._fleet.add(announced_worker(name, url))
                said_url, facts = self._told.get(name, (url, None))
                worker.told = facts if said_url == url else None
                keep = supervised(f"worker {name}", self._make_keeper(worker))
                self._kept[name] = (url, asyncio.create_task(keep))
                log.info("worker %s is announced at %s", name, url)


def _facts(told: Told) -> WorkerFacts:
    """What a relay says, as if the engine had said it."""
    at = "relay"  # sources of relayed ranks need no endpoint
    return WorkerFacts(
        models=tuple(
            ServedModel(model.id, model.root, model.parent, model.max_model_len)
            for model in told.models
        ),
        events={rank: RankEvents(endpoint=at, dp_rank=rank) for rank in told.ranks} or {0: None},
        block_size=told.block_size,
        capacity_blocks=told.capacity_blocks,
    )


def _answers(worker: Worker) -> bool:
    """Whether its engine can be reached, as far as probes tell."""
    if worker.state is WorkerState.DRAINING:
        return not worker.problem
    return worker.state is WorkerState.READY
