"""nats-servers and links for tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.streams import eventually, running

from events.nats_link import NatsLink, NatsSettings
from kvrouter.demo.nats_server import NatsServer


@asynccontextmanager
async def nats_server(*arguments: str, port: int | None = None) -> AsyncIterator[NatsServer]:
    """A server that is there while the block runs."""
    server = NatsServer(*arguments, port=port)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def link_to(*urls: str, **changes: Any) -> NatsLink:
    """A link that tries again quickly."""
    return NatsLink(NatsSettings(servers=urls, retry_s=0.05, retry_max_s=0.1, **changes))


@asynccontextmanager
async def connected(*links: NatsLink) -> AsyncIterator[None]:
    """Run links while the block runs; they are connected when it begins."""
    async with running(*links):
        await eventually(lambda: all(link.is_connected for link in links))
        yield
