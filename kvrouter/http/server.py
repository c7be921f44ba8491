"""The listening socket of the front door, and the connections that came in through it."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrouter.config import Config
from kvrouter.http.connection import ClientConnection, ConnectionSettings, Handler, Refused
from kvrouter.http.request_reader import ReadLimits

log = logging.getLogger(__name__)

BACKLOG = 1024


class Connections:
    """The open connections of clients."""

    def __init__(self, handle: Handler, refused: Refused, settings: ConnectionSettings) -> None:
        self._handle = handle
        self._refused = refused
        self._settings = settings
        self._open: set[ClientConnection] = set()
        self._gone = asyncio.Event()

    def new(self) -> ClientConnection:
        """A protocol for a connection that comes in."""
        connection = ClientConnection(self._handle, self._refused, self._settings, self._closed)
        self._open.add(connection)
        return connection

    async def drain(self, patience_s: float) -> None:
        """Let running requests end, for a while; then cut them, and say how many."""
        for connection in list(self._open):
            connection.shut_down()
        try:
            async with asyncio.timeout(patience_s):
                await self._all_gone()
        except TimeoutError:
            cut = sum(connection.active for connection in self._open)
            if cut:
                log.warning("%d requests did not end within %g s and were cut", cut, patience_s)
            for connection in list(self._open):
                connection.abort()
            await self._all_gone()

    async def _all_gone(self) -> None:
        while self._open:
            self._gone.clear()
            await self._gone.wait()

    def _closed(self, connection: ClientConnection) -> None:
        self._open.discard(connection)
        self._gone.set()


@asynccontextmanager
async def listening(handle: Handler, refused: Refused, config: Config) -> AsyncIterator[int]:
    """Serve clients while the context is open; gives the port that is listened on.

    `refused` is told why something could not be read as a request.
    On leaving, no connection is accepted any more and running requests get `shutdown_s` to
    finish. Raises OSError when the address cannot be bound.
    """
    loop = asyncio.get_running_loop()
    connections = Connections(handle, refused, _settings(config))
    address = config.server.host, config.server.port
    server = await loop.create_server(connections.new, *address, backlog=BACKLOG)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        await asyncio.shield(connections.drain(config.timeouts.shutdown_s))


def _settings(config: Config) -> ConnectionSettings:
    timeouts, limits = config.timeouts, config.limits
    return ConnectionSettings(
        limits=ReadLimits(
            max_head_bytes=limits.max_head_bytes,
            max_headers=limits.max_headers,
            max_body_bytes=limits.max_body_bytes,
        ),
        head_s=timeouts.head_s,
        body_s=timeouts.body_s,
        keep_alive_s=timeouts.keep_alive_s,
        stall_s=timeouts.stall_s,
    )
