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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from ssl import SSLContext
from typing import Any

from events.sparingly import Sparingly
from kvrouter.http.accepting import Acceptor, Transports
from kvrouter.http.descriptors import Descriptors
from kvrouter.http.proxy_header import MAX_BYTES, BadProxyHeaderError, parse_proxy_header

log = logging.getLogger(__name__)

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
    descriptors: Descriptors
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
        self._acceptor = Acceptor(listener, self._came, settings.descriptors)
        self._transports = Transports(settings.descriptors, settings.tls, settings.patience_s)
        self._new_protocol = new_protocol
        self._refused = refused
        self._settings = settings
        self._balancers = Balancers(settings.balancers)
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, _Waiting] = {}
        self._saying = Sparingly(SAID_EVERY_S)

    def start(self) -> None:
        """Accept from now on."""
        self._acceptor.start()

    async def stop(self) -> None:
        """Accept no more. What has not said whose it is, is closed."""
        self._acceptor.stop()
        for each in list(self._waiting.values()):
            self._forget(each)
            each.connection.close()
        await self._transports.stop()

    def _came(self, connection: socket.socket, peer: Any) -> None:
        address = peer[0]
        if address not in self._balancers:
            self._begin(connection, address)
        elif len(self._waiting) >= self._settings.max_waiting:
            connection.close()
        else:
            expiry = self._loop.call_later(self._settings.patience_s, self._expired, connection)
            self._waiting[connection] = _Waiting(connection, address, expiry)
            self._settings.descriptors.coming += 1
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
        self._settings.descriptors.coming -= 1

    def _begin(self, connection: socket.socket, client: str) -> None:
        self._transports.begin(connection, partial(self._new_protocol, client))
