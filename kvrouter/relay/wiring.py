"""Construction of a relay: one link, and what it takes for each engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import zmq.asyncio

from events import WorkerRank
from events.nats_link import NatsLink
from events.subjects import Subjects
from events.zmq_source import EventSink, SourceSettings, ZmqSource
from kvrouter.asking import Sessions
from kvrouter.config import Config, RankEvents
from kvrouter.relay.service import Relay, RelayedEngine
from kvrouter.sharing import nats_settings, replica_name
from kvrouter.supervision import background
from kvrouter.tls import engine_tls


@asynccontextmanager
async def relaying(config: Config) -> AsyncIterator[Relay]:
    """A relay for the configured workers that runs while the context is open."""
    link = NatsLink(nats_settings(config.nats, f"relay-{replica_name()}"))
    relay = Relay(link, Subjects(config.nats.prefix))
    with zmq.asyncio.Context() as context:

        def make_source(sink: EventSink, rank: WorkerRank, events: RankEvents) -> ZmqSource:
            return ZmqSource(
                rank,
                events.endpoint,
                sink,
                replay_endpoint=events.replay_endpoint,
                topic=events.topic,
                settings=SourceSettings(bind=events.bind),
                context=context,
            )

        async with Sessions(engine_tls(config.engine_tls)) as sessions:
            engines = [
                RelayedEngine(worker, relay, make_source, sessions.of(worker.url), config.health)
                for worker in config.workers
            ]
            runs = {f"engine {engine.name}": engine.run for engine in engines}
            # In this order, so that the last words of the inner ones still go out.
            async with background({"NATS": link.run}), background({"heads": relay.run} | runs):
                yield relay
