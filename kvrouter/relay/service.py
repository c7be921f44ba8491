"""The relay itself: engines' ZMQ streams in, NATS out; the shell of `RankStream`.

Gaps, replays and restarts of engines are dealt with here, next to them. What is dropped then is
dropped everywhere at once, by a higher epoch.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import aiohttp

from events import EventBatch, WorkerRank
from events.announce import (
    MAX_MODELS,
    MAX_RANKS,
    AnnouncedModel,
    Announcement,
    Told,
    encode_announcement,
    encode_told,
)
from events.nats_link import NatsLink, Received
from events.relayed import HEAD_S, Head, MalformedRelayed, Want, decode, encode
from events.sparingly import Sparingly
from events.stream import ResyncReason, StreamState
from events.subjects import Subjects
from events.zmq_source import EventSink
from kvrouter.config import HealthConfig, RankEvents, WorkerConfig, worker_name
from kvrouter.doubt import Doubt
from kvrouter.joining import JoinError, learn
from kvrouter.listening import EventSource, Listeners
from kvrouter.rank_state import Source
from kvrouter.relay.stream import RankStream
from kvrouter.worker_url import http_base, socket_path
from kvrouter.workers import WorkerFacts

log = logging.getLogger(__name__)

_BEATS_AN_ANNOUNCEMENT = 4
_COMPLAIN_EVERY_S = 60.0

LEASE_S = 6.0
"""How long an announced worker is believed to be there after its relay's last word."""

MakeSource = Callable[[EventSink, WorkerRank, RankEvents], EventSource]


class Relay:
    """The ranks of all engines beside this relay; the sink of their sources."""

    def __init__(self, link: NatsLink, subjects: Subjects) -> None:
        self.streams: dict[WorkerRank, RankStream] = {}
        self.published = 0
        self.published_bytes = 0
        self._link = link
        self._subjects = subjects
        self._engines: dict[str, tuple[str, WorkerFacts]] = {}
        self._complaints = Sparingly(_COMPLAIN_EVERY_S)
        link.watch(self._link_changed)
        link.subscribe(subjects.who, self._asked_who)

    def announce(self, worker: str, url: str, facts: WorkerFacts) -> None:
        """Tell routers of this worker from now on; they must be able to reach its URL."""
        self._engines[worker] = url, facts
        self._announce(worker, LEASE_S)

    def _announce(self, worker: str, lease_s: float) -> None:
        url, facts = self._engines[worker]
        announcement = Announcement(worker, url, lease_s, encode_told(self._told(worker, facts)))
        self._link.publish(self._subjects.worker(worker), encode_announcement(announcement))

    def _told(self, worker: str, facts: WorkerFacts) -> Told:
        heard = (dp_rank for dp_rank, endpoint in facts.events.items() if endpoint is not None)
        ranks = [WorkerRank(worker, dp_rank) for dp_rank in sorted(heard)]
        sizes = (self.streams[rank].block_size for rank in ranks)
        models = sorted(facts.models, key=lambda model: model.parent is not None)
        return Told(
            tuple(
                AnnouncedModel(model.id, model.root, model.parent, model.max_model_len)
                for model in models[:MAX_MODELS]
            ),
            tuple(rank.dp_rank for rank in ranks[:MAX_RANKS]),
            next((size for size in sizes if size), facts.block_size),
            facts.capacity_blocks,
        )

    def _announce_all(self, lease_s: float = LEASE_S) -> None:
        for worker in self._engines:
            self._announce(worker, lease_s)

    def _asked_who(self, message: Received) -> None:
        del message
        self._announce_all()

    def add(self, rank: WorkerRank) -> None:
        """Publish a rank from now on."""
        if rank not in self.streams:
            self.streams[rank] = RankStream(time.time_ns())
            history = self._subjects.history(rank.worker, rank.dp_rank)
            self._link.subscribe(history, partial(self._asked, rank))

    def heard(self, rank: WorkerRank, source: Source) -> None:
        """The rank is listened to, and published from now on."""
        del source
        self.add(rank)

    def unheard(self, rank: WorkerRank) -> None:
        """Nobody listens to the rank any more: it has nothing, and that is said from now on.

        Again and again: a router that missed it would believe in the rank's blocks for ever.
        """
        self.streams[rank].stream = StreamState.CONNECTING
        self.on_resync(rank, ResyncReason.RESTART)

    async def run(self) -> None:
        """Say who is there and how far we are, again and again, until cancelled."""
        beat = 0
        try:
            while True:
                self._say_heads()
                if beat % _BEATS_AN_ANNOUNCEMENT == 0:
                    self._announce_all()
                beat += 1
                await asyncio.sleep(HEAD_S)
        finally:
            self._announce_all(lease_s=0.0)

    # What engines publish

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        """Number a batch and publish it."""
        published = self.streams[rank].take(batch)
        self._publish(rank, encode(published))

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        """Begin anew."""
        log.info("%s/%d: begins anew (%s)", rank.worker, rank.dp_rank, reason)
        self._publish(rank, encode(self.streams[rank].restart()))

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        """Tell how well the engine is heard."""
        self.streams[rank].stream = state
        self._say_head(rank)

    def _publish(self, rank: WorkerRank, payload: bytes) -> None:
        self.published += 1
        self.published_bytes += len(payload)
        self._link.publish(self._subjects.events(rank.worker, rank.dp_rank), payload)

    # What routers want

    def _asked(self, rank: WorkerRank, message: Received) -> None:
        try:
            want = decode(message.payload)
        except MalformedRelayed as error:
            times = self._complaints.due(time.monotonic())
            if times:
                log.warning(
                    "%s/%d: a request that cannot be read: %s (%d such since the last line)",
                    rank.worker,
                    rank.dp_rank,
                    error,
                    times,
                )
            return
        if not isinstance(want, Want) or not message.reply:
            return
        for answer in self.streams[rank].answer(want):
            self._link.publish(message.reply, encode(answer))

    def _link_changed(self, *, connected: bool) -> None:
        if connected:
            self._say_heads()
            self._announce_all()

    def _say_heads(self) -> None:
        for rank in self.streams:
            self._say_head(rank)

    def _say_head(self, rank: WorkerRank) -> None:
        head: Head = self.streams[rank].head()
        self._publish(rank, encode(head))


class RelayedEngine:
    """One engine: learned, listened to, and learned again when it may be another.

    The sink of its own sources, since what they notice says when that is.
    """

    def __init__(
        self,
        config: WorkerConfig,
        relay: Relay,
        make_source: MakeSource,
        session: aiohttp.ClientSession,
        settings: HealthConfig,
    ) -> None:
        self.name = worker_name(config)
        self._config = config
        self._relay = relay
        self._session = session
        self._settings = settings
        self._listeners = Listeners(self.name, relay, partial(make_source, self))
        self._facts: WorkerFacts | None = None
        self._doubt = Doubt()
        self._problem = ""

    async def run(self) -> None:
        """Relay until cancelled."""
        async with self._listeners:
            while True:
                if await self._is_to_be_learned():
                    await self._learn()
                await asyncio.sleep(self._settings.interval_s)

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        """Relay it."""
        self._relay.on_batch(rank, batch)

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        """Relay it; the engine may be another."""
        self._doubt.resynced(reason)
        self._relay.on_resync(rank, reason)

    def on_state(self, rank: WorkerRank, state: StreamState) -> None:
        """Relay it; the engine may be another."""
        self._doubt.stream_changed(rank.dp_rank, state)
        self._relay.on_state(rank, state)

    async def _is_to_be_learned(self) -> bool:
        if self._facts is None:
            return True
        if await self._is_healthy():
            return self._doubt.calls_for_a_look(time.monotonic())
        self._doubt.arise()
        self._warn_once("it does not answer /health")
        return False

    async def _is_healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        url = http_base(self._config.url) + "/health"
        try:
            async with self._session.get(url, timeout=timeout) as response:
                return response.status < 500  # noqa: PLR2004  the server's errors
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _learn(self) -> None:
        """Ask what the engine publishes, listen to that, and tell routers of it."""
        self._doubt.looking()
        try:
            learned = await learn(self._session, self._config, self._facts)
        except JoinError as error:
            self._doubt.looked(time.monotonic(), answered_all=False)
            self._warn_once(str(error))
            return
        self._doubt.looked(time.monotonic(), answered_all=not learned.unanswered)
        is_new = self._facts is None
        facts = self._facts = learned.facts
        self._listeners.listen(facts)
        if all(endpoint is None for endpoint in facts.events.values()):
            self._doubt.arise()
            self._warn_once("; ".join(facts.notes))
        elif self._problem:
            log.info("engine %s: its events can be had again", self.name)
            self._problem = ""
        if socket_path(self._config.url) is None:
            self._relay.announce(self.name, self._config.url, facts)
        elif is_new:
            log.info(
                "engine %s: not announced, as no other host can reach a unix socket: "
                "routers of this host have to be given it",
                self.name,
            )

    def _warn_once(self, problem: str) -> None:
        """Say why there may be no events to relay; once, until there are again."""
        log.log(
            logging.DEBUG if self._problem else logging.WARNING,
            "engine %s (%s): its events may be missing: %s",
            self.name,
            self._config.url,
            problem,
        )
        self._problem = problem
