"""The listening socket of the front door, and the connections that came in through it."""

import asyncio
import logging
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from kvrouter.config import Config
from kvrouter.http.accepting import Acceptor, Transports
from kvrouter.http.balanced import BalancedListener, BalancedSettings
from kvrouter.http.connection import ClientConnection, ConnectionSettings, Handler
from kvrouter.http.descriptors import NONE_LEFT, Descriptors, plenty
from kvrouter.http.request_reader import ReadLimits
from kvrouter.http.sockets import BACKLOG, opened, port_of
from kvrouter.openai.errors import Fault, RequestError
from kvrouter.tls import ServerTls

Refused = Callable[[Fault], None]

log = logging.getLogger(__name__)


class Connections:
    """The open connections of clients."""

    def __init__(
        self,
        handle: Handler,
        refused: Refused,
        settings: ConnectionSettings,
        *,
        max_connections: int = sys.maxsize,
        descriptors: Descriptors | None = None,
    ) -> None:
        self.refused = refused
        self._descriptors = descriptors or plenty()
        self._max_connections = max_connections
        self._handle = handle
        self._settings = settings
        self._draining = False
        self._open: set[ClientConnection] = set()
        self._surplus: set[ClientConnection] = set()
        """Those that were turned away, and take their leave."""
        self._gone = asyncio.Event()

    def new(self, address: str | None = None) -> ClientConnection:
        """A protocol for a connection that comes in; `address` is the client's, if it was told."""
        return ClientConnection(self._handle, self._settings, self, address)

    def opened(self, connection: ClientConnection) -> None:
        """A client is there."""
        self._open.add(connection)
        if self._draining:
            connection.shut_down()
        elif len(self._open) - len(self._surplus) > self._max_connections:
            self._turn_away(connection, f"more than {self._max_connections} connections are open")
        elif not self._descriptors.welcome(connection.descriptor):
            self._turn_away(connection, NONE_LEFT)
        self._count()

    def _turn_away(self, connection: ClientConnection, why: str) -> None:
        self._surplus.add(connection)
        connection.turn_away(RequestError(Fault.OVERLOADED, why, retry_after_s=1))

    def closed(self, connection: ClientConnection) -> None:
        """It is gone."""
        self._open.discard(connection)
        self._surplus.discard(connection)
        self._count()
        self._gone.set()

    def _count(self) -> None:
        self._descriptors.clients = len(self._open) - len(self._surplus)

    async def drain(self, patience_s: float) -> None:
        """Let running requests end, for a while; then cut them, and say how many."""
        self._draining = True
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


@asynccontextmanager
async def listening(
    handle: Handler,
    refused: Refused,
    config: Config,
    tls: ServerTls | None = None,
    *,
    inherited: Sequence[socket.socket] = (),
    descriptors: Descriptors | None = None,
) -> AsyncIterator[int]:
    """Serve clients while the context is open; gives the port that is listened on.

    On `inherited` listening sockets, where there are any, instead of new ones. `refused` is told
    why something could not be read as a request. On leaving, no connection is accepted any more
    and running requests get `shutdown_s` to finish. Raises OSError when an address cannot be bound.
    """
    descriptors = descriptors or plenty()
    connections = Connections(
        handle,
        refused,
        _settings(config),
        max_connections=config.limits.max_connections,
        descriptors=descriptors,
    )
    place = Place(connections, tls, config, descriptors)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(_drained, connections, config.timeouts.shutdown_s)
        listeners = inherited or exits.enter_context(opened(config.server))
        for each in listeners:
            await exits.enter_async_context(_accepting(each, place))
        yield port_of(listeners)


@dataclass(frozen=True, slots=True)
class Place:
    """What becomes of the connections that come in, by whichever socket."""

    connections: Connections
    tls: ServerTls | None
    config: Config
    descriptors: Descriptors

    @property
    def context(self) -> ssl.SSLContext | None:
        """For TLS, which local clients do without."""
        return None if self.tls is None else self.tls.context


@asynccontextmanager
async def _accepting(listener: socket.socket, place: Place) -> AsyncIterator[None]:
    config, at_path = place.config, listener.family == socket.AF_UNIX
    if config.server.proxy_protocol_from and not at_path:
        accepting = _balanced(listener, place)
    elif place.descriptors.suffice(config.limits.max_connections):
        accepting = _unbounded(listener, place)
    else:
        accepting = _bounded(listener, place)
    async with accepting:
        yield


@asynccontextmanager
async def _unbounded(listener: socket.socket, place: Place) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    new = place.connections.new
    if listener.family == socket.AF_UNIX:
        server = await loop.create_unix_server(new, sock=listener, backlog=BACKLOG)
    else:
        server = await loop.create_server(
            new,
            sock=listener,
            backlog=BACKLOG,
            ssl=place.context,
            ssl_handshake_timeout=None if place.tls is None else place.config.timeouts.head_s,
        )
    try:
        yield
    finally:
        server.close()


@asynccontextmanager
async def _bounded(listener: socket.socket, place: Place) -> AsyncIterator[None]:
    context = None if listener.family == socket.AF_UNIX else place.context
    transports = Transports(place.descriptors, context, place.config.timeouts.head_s)

    def came(connection: socket.socket, _peer: object) -> None:
        transports.begin(connection, place.connections.new)

    acceptor = Acceptor(listener, came, place.descriptors)
    acceptor.start()
    try:
        yield
    finally:
        acceptor.stop()
        await transports.stop()


@asynccontextmanager
async def _balanced(listener: socket.socket, place: Place) -> AsyncIterator[None]:
    config = place.config
    settings = BalancedSettings(
        balancers=config.server.proxy_protocol_from,
        patience_s=config.timeouts.head_s,
        max_waiting=config.limits.max_connections,
        tls=place.context,
        descriptors=place.descriptors,
    )
    refused = partial(place.connections.refused, Fault.BAD_PROXY_HEADER)
    balanced = BalancedListener(listener, place.connections.new, refused, settings)
    balanced.start()
    try:
        yield
    finally:
        await balanced.stop()


async def _drained(connections: Connections, patience_s: float) -> None:
    await asyncio.shield(connections.drain(patience_s))


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
