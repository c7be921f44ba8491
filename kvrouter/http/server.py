"""The listening socket of the front door, on aiohttp's server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from kvrouter.config import Config
from kvrouter.http.client import AiohttpClient
from kvrouter.http.door import FrontDoor


@asynccontextmanager
async def listening(door: FrontDoor, config: Config) -> AsyncIterator[int]:
    """Serve clients while the context is open; gives the port that is listened on.

    On leaving, no connection is accepted any more and running requests get `shutdown_s` to
    finish. Raises OSError when the address cannot be bound.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        client = AiohttpClient(
            request,
            body_s=config.timeouts.body_s,
            max_body_bytes=config.limits.max_body_bytes,
        )
        await door.handle(client)
        return client.response

    # A request of a client that has gone is cancelled, which aborts the engine's request.
    server = web.Server(handle, handler_cancellation=True, auto_decompress=False, access_log=None)
    runner = web.ServerRunner(server, shutdown_timeout=config.timeouts.shutdown_s)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.server.host, config.server.port, backlog=1024)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await asyncio.shield(runner.cleanup())
