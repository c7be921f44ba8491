"""Construction: the one place that makes all parts, connects them, and starts and stops them.

Start: tokenizer threads, engine connections, the second port, the front door, then one keeper per
worker. The front door listens at once and answers 503 until a worker has joined. Stop is the
reverse; running requests get `timeouts.shutdown_s` to finish.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import zmq.asyncio

from events import WorkerRank
from events.nats_link import NatsLink
from events.stream import SubscriptionSettings
from events.subjects import Subjects
from events.zmq_source import SourceSettings, ZmqSource
from indexer import PredictedBlocks, RadixIndex
from kvrouter import report
from kvrouter.admin import Admin, admin_listening
from kvrouter.asking import Sessions
from kvrouter.breaker import RetryBudget
from kvrouter.collector import FleetCollector
from kvrouter.config import Config, RankEvents
from kvrouter.discovery import Discovery
from kvrouter.explain import Explainer
from kvrouter.fleet import Fleet
from kvrouter.health import Keeper
from kvrouter.http.cors import Cors
from kvrouter.http.descriptors import Descriptors
from kvrouter.http.door import FrontDoor
from kvrouter.http.engine import EngineClient
from kvrouter.http.exchange import Exchange
from kvrouter.http.server import listening
from kvrouter.listening import EventSource, Listeners
from kvrouter.load import Load
from kvrouter.metrics import Metrics
from kvrouter.openai.paths import PathTable
from kvrouter.policy import TierCredit, build_policy
from kvrouter.pool import Pool, said_block_size
from kvrouter.processes.seat import Seat
from kvrouter.replica_report import ReplicaCollector, replicas
from kvrouter.scheduler import Scheduler
from kvrouter.sharing import Sharing, joint, nats_link, relayed_source, replica_name, share
from kvrouter.startup import file_limit
from kvrouter.sticky import ResponseOwners
from kvrouter.supervision import background
from kvrouter.tls import ServerTls, admin_tls, engine_tls, server_tls
from kvrouter.tokenize import EncodingThreads, ThreadSettings
from kvrouter.tokenizer_loading import TokenizerLoader
from kvrouter.workers import Worker

log = logging.getLogger(__name__)

TICK_S = 0.25

TAKE_OVER_S = 10.0
TAKE_OVER_POLL_S = 0.02

MAX_ZMQ_SOCKETS = 16_384
"""A source has up to four; the library's default of 1023 would end at some 250 ranks."""


@dataclass(frozen=True)
class Router:
    """A running router."""

    fleet: Fleet
    door: FrontDoor
    metrics: Metrics
    tokenizers: EncodingThreads
    sharing: Sharing | None
    link: NatsLink | None
    tls: ServerTls | None
    admin_tls: ServerTls | None
    port: int
    admin_port: int


@asynccontextmanager
async def running(config: Config, seat: Seat | None = None) -> AsyncIterator[Router]:
    """A router that serves while the context is open; in its `seat`, if it is one of several.

    Raises OSError when one of its addresses cannot be bound, and ConfigError when the files for
    TLS are not right.
    """
    config = config if seat is None else seat.configured(config)
    listeners = () if seat is None else seat.sockets()
    to_engines, to_clients = engine_tls(config.engine_tls), server_tls(config.server)
    to_admins = admin_tls(config.server) if seat is None else None
    descriptors = Descriptors(file_limit())
    load = Load()
    name = config.replicas.name or replica_name()
    link = nats_link(config, name)
    sharing = share(config, load, link, name)
    fleet = new_fleet(config, load, sharing)
    if sharing is not None and config.replicas.warm_start:
        sharing.warm_up(fleet)
    async with (
        encoding_threads(config) as tokenizers,
        EngineClient(config.timeouts, to_engines, descriptors) as engines,
        Sessions(to_engines) as probes,
    ):
        door, metrics = plane(config, fleet, engines, tokenizers)
        metrics.registry.register(FleetCollector(fleet, tokenizers))
        metrics.registry.register(ReplicaCollector(sharing, link))
        explainer = Explainer(fleet, door.prompt)
        admin = Admin(fleet, metrics, explainer, partial(replicas, sharing, link), link)
        async with (
            admin_listening(
                admin, config.server, to_admins, path=None if seat is None else seat.admin_path
            ) as admin_port,
            _connected(link, sharing, fleet),
            _keeping(
                config,
                fleet,
                probes,
                TokenizerLoader(config.tokenizer, to_engines),
                link,
                sharing,
                name,
            ),
            _ticking(fleet, metrics),
            _ready_to_take_over(fleet, seat),
            listening(
                door.handle,
                metrics.unread,
                config,
                to_clients,
                inherited=listeners,
                descriptors=descriptors,
            ) as port,
        ):
            yield Router(
                fleet=fleet,
                door=door,
                metrics=metrics,
                tokenizers=tokenizers,
                sharing=sharing,
                link=link,
                tls=to_clients,
                admin_tls=to_admins,
                port=port,
                admin_port=admin_port,
            )


@asynccontextmanager
async def _ready_to_take_over(fleet: Fleet, seat: Seat | None) -> AsyncIterator[None]:
    """Let connections to one of several processes wait, until it has workers for them.

    Without any in time it answers, if only that there is none.
    """
    if seat is not None:
        for _ in range(int(TAKE_OVER_S / TAKE_OVER_POLL_S)):
            if not report.readiness(fleet):
                break
            await asyncio.sleep(TAKE_OVER_POLL_S)
    yield


class Plane(NamedTuple):
    """The data plane without its sockets."""

    door: FrontDoor
    metrics: Metrics


def plane(
    config: Config, fleet: Fleet, engines: EngineClient, tokenizers: EncodingThreads
) -> Plane:
    """The parts that a request passes through."""
    metrics = Metrics()
    owners = ResponseOwners()
    budget = RetryBudget(config.retries.budget_ratio, config.retries.budget_reserve)
    attempts = config.retries.max_attempts
    exchange = Exchange(fleet, engines, owners, metrics, budget, max_attempts=attempts)
    paths = PathTable(config.limits.extra_paths)
    door = FrontDoor(
        fleet,
        exchange,
        tokenizers,
        owners,
        metrics,
        paths,
        cors=Cors(config.server.cors_origins),
        max_active_requests=config.limits.max_active_requests,
        max_held_bytes=config.limits.max_held_bytes,
        send_ids=config.tokenizer.send_ids,
    )
    return Plane(door, metrics)


def new_fleet(config: Config, load: Load, sharing: Sharing | None) -> Fleet:
    """A fleet without workers."""
    rng = random.Random()
    policy = build_policy(config.policy)
    credit = TierCredit(cpu=config.policy.cpu_credit, disk=config.policy.disk_credit)

    def make_pool(model: str) -> Pool:
        index, predicted = RadixIndex(), joint(PredictedBlocks(), sharing)
        scheduler = Scheduler(
            index,
            predicted,
            load if sharing is None else sharing.load,
            policy,
            rng,
            credit=credit,
            prediction_ttl_s=fleet.prediction_ttl_s,
            said_block_size=partial(said_block_size, fleet.workers),
        )
        return Pool(model, index, predicted, scheduler)

    fleet = Fleet(load, make_pool, breaker=config.breaker, prediction=config.prediction)
    return fleet


@asynccontextmanager
async def _connected(
    link: NatsLink | None, sharing: Sharing | None, fleet: Fleet
) -> AsyncIterator[None]:
    """Be connected to NATS and share bookings, where that is wanted. Stops in reverse order."""
    async with (
        background({} if link is None else {"NATS": link.run}),
        background({} if sharing is None else sharing.runs(fleet)),
    ):
        yield


@asynccontextmanager
async def encoding_threads(config: Config) -> AsyncIterator[EncodingThreads]:
    """The threads that tokenize, while the context is open."""
    settings = config.tokenizer
    threads = EncodingThreads(
        ThreadSettings(
            inline_bytes=settings.inline_bytes,
            threads=settings.threads,
            max_requests=settings.max_queued,
            max_bytes=settings.max_queued_bytes,
            deadline_s=settings.deadline_s,
            hash_bytes=settings.hash_cache_bytes,
        )
    )
    try:
        yield threads
    finally:
        threads.close()


@asynccontextmanager
async def _keeping(
    config: Config,
    fleet: Fleet,
    probes: Sessions,
    loader: TokenizerLoader,
    link: NatsLink | None,
    sharing: Sharing | None,
    name: str,
) -> AsyncIterator[None]:
    """Keep all workers, and load the tokenizers of the models that they turn out to serve."""
    warmth = None if sharing is None else sharing.warmth
    with zmq.asyncio.Context() as context:
        context.set(zmq.MAX_SOCKETS, MAX_ZMQ_SOCKETS)

        def make_source(rank: WorkerRank, events: RankEvents) -> EventSource:
            if link is not None and _is_relayed(config, fleet, rank):
                return relayed_source(rank, fleet, link, config, name)
            return ZmqSource(
                rank,
                events.endpoint,
                fleet,
                replay_endpoint=events.replay_endpoint,
                topic=events.topic,
                settings=source_settings(config, rank, fleet, bind=events.bind),
                restorer=None if warmth is None else warmth.taking,
                context=context,
            )

        def make_keeper(worker: Worker) -> Callable[[], Awaitable[None]]:
            listeners = Listeners(worker.name, fleet, make_source)
            return Keeper(worker, fleet, listeners, probes.of(worker.url), config.health).run

        runs: dict[str, Callable[[], Awaitable[None]]] = {
            f"worker {worker.name}": make_keeper(worker)
            for worker in map(fleet.add, config.workers)
        }
        if link is not None and config.nats.discover:
            subjects = Subjects(config.nats.prefix)
            runs["discovery"] = Discovery(fleet, link, subjects, make_keeper).run
        async with background({**runs, "tokenizers": lambda: loader.run(fleet)}):
            yield


def _is_relayed(config: Config, fleet: Fleet, rank: WorkerRank) -> bool:
    return config.nats.relayed or fleet.workers[rank.worker].config.relayed


def source_settings(
    config: Config, rank: WorkerRank, fleet: Fleet, *, bind: bool
) -> SourceSettings:
    """How the source of a rank attaches to its publisher, and how patient it is."""
    settings = config.events
    ranks_here = len(fleet.workers[rank.worker].ranks)
    subscription = SubscriptionSettings(
        replay_timeout_s=settings.replay_timeout_s,
        replay_tries=settings.replay_tries,
        silent_after_s=settings.silent_s,
        # An engine with one rank may be a part of a larger deployment that numbers across engines.
        strict_dp_rank=ranks_here > 1,
    )
    return SourceSettings(bind=bind, subscription=subscription)


@asynccontextmanager
async def _ticking(fleet: Fleet, metrics: Metrics) -> AsyncIterator[None]:
    """Let time pass for the fleet, and measure how late the loop is with that."""

    async def tick() -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            metrics.loop_lag.rows[()].observe(now - due)
            fleet.tick(now)

    async with background({"ticks": tick}):
        yield
