"""A listening socket some of whose connections come through load balancers.

Those begin with a PROXY header. It is read from the socket before a transport gets it, and not a
byte more, so that what follows may be anything: HTTP, or the handshake of TLS.

    accepted -> from a balancer: its header, in time -> a transport, with the client's address
                from elsewhere: a transport at once
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any

from events.sparingly import Sparingly
from kvrouter.http.proxy_header import MAX_BYTES, BadProxyHeaderError, parse_proxy_header
from kvrouter.supervision import cancelled

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
REST_S = 0.5
"""Without descriptors: until they are tried again."""
LEAVE_S = 1.0
"""On leaving: for connections that are just being made."""
SAID_EVERY_S = 60.0

NewProtocol = Callable[[str], asyncio.Protocol]


@dataclass(frozen=True, slots=True)
class BalancedSettings:
    """Who sends headers, and what is granted to them."""

    balancers: Sequence[str]
    """Addresses and networks."""
    patience_s: float
    """For the header; and for the handshake."""
    max_waiting: int
    """Connections whose header is not there yet; further ones are closed."""
    tls: SSLContext | None = None


class Balancers:
    """The load balancers, by their addresses."""

    def __init__(self, balancers: Sequence[str]) -> None:
        self._networks = [ipaddress.ip_network(each) for each in balancers]

    def __contains__(self, address: str) -> bool:
        peer = ipaddress.ip_address(address)
        return any(peer in network for network in self._networks)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A connection whose header has not come yet."""

    connection: socket.socket
    balancer: str
    expiry: asyncio.TimerHandle
    came: bytes = field(default=b"")


class BalancedListener:
    """Accepts connections and gives each a protocol, made with the client's address.

    `refused` is called for each that had no header although it came from a balancer.
    """

    def __init__(
        self,
        listener: socket.socket,
        new_protocol: NewProtocol,
        refused: Callable[[], None],
        settings: BalancedSettings,
    ) -> None:
        self._listener = listener
        self._new_protocol = new_protocol
        self._refused = refused
        self._settings = settings
        self._balancers = Balancers(settings.balancers)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._beginning: set[asyncio.Task[None]] = set()
        self._resting: asyncio.TimerHandle | None = None
        self._saying = Sparingly(SAID_EVERY_S)

    def start(self) -> None:
        """Accept from now on."""
        self._resting = None
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    async def stop(self) -> None:
        """Accept no more. What has not said whose it is, is closed."""
        self._loop.remove_reader(self._listener)
        if self._resting is not None:
            self._resting.cancel()
        for each in list(self._waiting.values()):
            self._forget(each)
            each.connection.close()
        if self._beginning:
            await asyncio.wait(self._beginning, timeout=LEAVE_S)
        await cancelled(list(self._beginning))

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept connections: %s", error)  # noqa: TRY400 - says it all
                self._loop.remove_reader(self._listener)
                self._resting = self._loop.call_later(REST_S, self.start)
                return
            connection.setblocking(False)
            self._came(connection, address[0])

    def _came(self, connection: socket.socket, address: str) -> None:
        if address not in self._balancers:
            self._begin(connection, address)
        elif len(self._waiting) >= self._settings.max_waiting:
            connection.close()
        else:
            expiry = self._loop.call_later(self._settings.patience_s, self._expired, connection)
            self._waiting[connection] = _Waiting(connection, address, expiry)
            self._loop.add_reader(connection, self._readable, connection)

    def _readable(self, connection: socket.socket) -> None:
        """Read what belongs to the header, and leave the rest in the socket."""
        waiting = self._waiting[connection]
        before_bytes = len(waiting.came)
        try:
            seen = connection.recv(MAX_BYTES, socket.MSG_PEEK)
            if not seen:
                raise BadProxyHeaderError("the connection ended before it")  # noqa: TRY301
            header = parse_proxy_header(waiting.came + seen)
            ours = len(seen) if header is None else header.size_bytes - before_bytes
            waiting.came += connection.recv(ours)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._refuse(waiting, str(error))
        except BadProxyHeaderError as error:
            self._refuse(waiting, str(error))
        else:
            if header is not None:
                self._forget(waiting)
                self._begin(connection, header.client or waiting.balancer)

    def _expired(self, connection: socket.socket) -> None:
        self._refuse(self._waiting[connection], f"none within {self._settings.patience_s:g} s")

    def _refuse(self, waiting: _Waiting, why: str) -> None:
        self._forget(waiting)
        waiting.connection.close()
        self._refused()
        times = self._saying.due(self._loop.time())
        if times:
            message = "closed %d connections without a PROXY header, the last from %s: %s"
            log.warning(message, times, waiting.balancer, why)

    def _forget(self, waiting: _Waiting) -> None:
        waiting.expiry.cancel()
        self._loop.remove_reader(waiting.connection)
        del self._waiting[waiting.connection]

    def _begin(self, connection: socket.socket, client: str) -> None:
        task = self._loop.create_task(_begun(self._connected(connection, client)))
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _connected(self, connection: socket.socket, client: str) -> Coroutine[Any, Any, object]:
        tls = self._settings.tls
        return self._loop.connect_accepted_socket(
            lambda: self._new_protocol(client),
            connection,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._settings.patience_s,
        )


async def _begun(connecting: Coroutine[Any, Any, object]) -> None:
    try:
        await connecting
    except OSError as error:  # the client left, or its handshake failed; SSLError is one
        log.debug("a connection did not begin: %s", error)
