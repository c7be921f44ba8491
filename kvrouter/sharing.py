"""What connects this router to its replicas: the part of construction that is about them."""

import itertools
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from events import WorkerRank
from events.bus import Bus, Buses
from events.local_bus import LocalBus
from events.nats_bus import NatsBus
from events.nats_link import NatsLink, NatsSettings
from events.nats_source import NatsSource
from events.replica import Booking, IndexMessage, Ledger, LedgerSettings, Mirror, MirrorSettings
from events.stream import SubscriptionSettings
from events.subjects import Subjects
from indexer import PredictedBlocks
from indexer.hashing import RULE_VERSION
from kvrouter.config import Config, ConfigError, NatsConfig
from kvrouter.fleet import Fleet
from kvrouter.handing_over import HandingOver
from kvrouter.joint_predictions import Expectations, JointPredictions, expect_sampled
from kvrouter.load import Load
from kvrouter.replication import Replication
from kvrouter.shared_load import SharedLoad
from kvrouter.warm_start import WarmStart
from kvrouter.worker_url import MAX_PATH_BYTES


class Warmth:
    """Warm starts, both sides."""

    def __init__(self, fleet: Fleet, replication: Replication) -> None:
        self.taking = WarmStart(fleet, replication, Random())
        self.giving = HandingOver(fleet, replication)
        replication.on_index = self._hear

    def _hear(self, message: IndexMessage) -> None:
        self.taking.hear(message)
        self.giving.hear(message)


@dataclass
class Sharing:
    """The parts."""

    load: SharedLoad
    replication: Replication
    predicted: PredictedBlocks
    """What other replicas' requests make us expect, sampled."""
    warmth: Warmth | None = None

    def runs(self, fleet: Fleet) -> dict[str, Callable[[], Awaitable[None]]]:
        """What has to run as long as the router does."""
        self.replication.expect = partial(self._expect, fleet)
        runs: dict[str, Callable[[], Awaitable[None]]] = {"replicas": self.replication.run}
        if self.warmth is not None:
            runs["warm starts of others"] = self.warmth.giving.run
        return runs

    def warm_up(self, fleet: Fleet) -> None:
        """Begin with what other replicas know of the fleet's engines, and tell them likewise."""
        self.warmth = Warmth(fleet, self.replication)

    def _expect(self, fleet: Fleet, booking: Booking, now: float) -> None:
        ttl_s = fleet.prediction_ttl_s(WorkerRank(booking.worker, booking.dp_rank))
        expect_sampled(self.predicted, booking, now=now, ttl_s=ttl_s)


def share(config: Config, load: Load, link: NatsLink | None, name: str) -> Sharing | None:
    """The parts that the configuration asks for; None if this router is to be alone.

    Raises ConfigError when the directory of the local bus cannot be used.
    """
    settings = config.replicas
    if not settings.sync or not (link or settings.local_bus):
        return None
    epoch = time.time_ns()
    buses: list[Bus] = []
    if link is not None:
        buses.append(NatsBus(link, Subjects(config.nats.prefix), name))
    if settings.local_bus:
        buses.append(_local_bus(Path(settings.local_bus), name))
    lately_s = max(config.prediction.ttl_s, config.prediction.blind_ttl_s)
    ledger = Ledger(name, epoch, LedgerSettings(lately_s=lately_s))
    mirror = Mirror(name, epoch, Random(), MirrorSettings(lease_s=settings.lease_s))
    shared = SharedLoad(load, ledger)
    load.journal = shared
    bus = buses[0] if len(buses) == 1 else Buses(buses)
    replication = Replication(ledger, mirror, shared, bus, beat_s=settings.beat_s)
    return Sharing(shared, replication, PredictedBlocks())


def _local_bus(directory: Path, name: str) -> LocalBus:
    path = directory / f"{name}.sock"
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"replicas.local_bus: {path} is too long for a socket ({MAX_PATH_BYTES} bytes at most)"
        )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"replicas.local_bus: {directory}: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"replicas.local_bus: {directory}: may not be written to")
    return LocalBus(directory, name)


def joint(own: PredictedBlocks, sharing: Sharing | None) -> Expectations:
    """A model's own predictions, with what other replicas' requests make us expect."""
    return own if sharing is None else JointPredictions(own, sharing.predicted)


def replica_name() -> str:
    """A name that no other running process has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


def nats_link(config: Config, name: str) -> NatsLink | None:
    """The connection to NATS, if it is used."""
    return NatsLink(nats_settings(config.nats, name)) if config.nats.servers else None


def nats_settings(config: NatsConfig, name: str) -> NatsSettings:
    """How to connect to NATS."""
    return NatsSettings(
        servers=tuple(config.servers),
        name=name,
        learn_servers=config.learn_servers,
        user=config.user,
        password=config.password,
        token=config.token,
        credentials=config.credentials,
        nkey_seed=config.nkey_seed,
        tls_ca=config.tls_ca,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
    )


_source_numbers = itertools.count(1)


def relayed_source(
    rank: WorkerRank, fleet: Fleet, link: NatsLink, config: Config, name: str
) -> NatsSource:
    """A source of a rank's events from its relay. Each has a subject of its own for answers."""
    return NatsSource(
        rank,
        fleet,
        link,
        Subjects(config.nats.prefix),
        router=name,
        number=next(_source_numbers),
        rule=RULE_VERSION,
        settings=SubscriptionSettings(replay_timeout_s=1.0, silent_after_s=config.events.silent_s),
    )
