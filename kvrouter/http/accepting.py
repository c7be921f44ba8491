"""Accepting connections one by one, and no more than there are descriptors for.

The event loop's own server costs half as much for each, but knows no such limit: what it has no
descriptors for is cut off, at whichever port it arrives.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from ssl import SSLContext
from typing import Any

from events.sparingly import Sparingly
from kvrouter.http.descriptors import NONE_LEFT, Descriptors
from kvrouter.supervision import cancelled

log = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 64
REST_S = 0.05
"""Without descriptors: until they are tried again. Clients wait in the listening socket."""
LEAVE_S = 1.0
"""On leaving: for connections that are just being made."""
SAID_EVERY_S = 60.0

Came = Callable[[socket.socket, Any], None]
"""Takes a new connection, and the address of its other end."""
NewProtocol = Callable[[], asyncio.Protocol]


class Acceptor:
    """Gives new connections to `came`; rests while what is left is for others."""

    def __init__(self, listener: socket.socket, came: Came, descriptors: Descriptors) -> None:
        self._listener = listener
        self._came = came
        self._descriptors = descriptors
        self._loop = asyncio.get_running_loop()
        self._resting: asyncio.TimerHandle | None = None
        self._saying = Sparingly(SAID_EVERY_S)

    def start(self) -> None:
        """Accept from now on."""
        self._resting = None
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener, self._accept)

    def stop(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self._listener)
        if self._resting is not None:
            self._resting.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                if not self._descriptors.left_to_accept():
                    self._rest(NONE_LEFT)
                    return
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._rest(str(error))
                return
            connection.setblocking(False)
            self._came(connection, peer)

    def _rest(self, why: str) -> None:
        self._loop.remove_reader(self._listener)
        self._resting = self._loop.call_later(REST_S, self.start)
        if self._saying.due(self._loop.time()):
            log.error("new connections have to wait: %s", why)


class Transports:
    """Makes transports for connections that were accepted."""

    def __init__(
        self, descriptors: Descriptors, tls: SSLContext | None, handshake_s: float
    ) -> None:
        self._descriptors = descriptors
        self._tls = tls
        self._handshake_s = handshake_s
        self._loop = asyncio.get_running_loop()
        self._beginning: set[asyncio.Task[None]] = set()

    def begin(self, connection: socket.socket, new_protocol: NewProtocol) -> None:
        """Make the connection's transport and protocol, soon."""
        task = self._loop.create_task(_made(self._connected(connection, new_protocol)))
        self._beginning.add(task)
        self._descriptors.coming += 1
        task.add_done_callback(self._begun)

    def _begun(self, task: asyncio.Task[None]) -> None:
        self._descriptors.coming -= 1
        self._beginning.discard(task)

    async def stop(self) -> None:
        """Wait a moment for those that are being made."""
        if self._beginning:
            await asyncio.wait(self._beginning, timeout=LEAVE_S)
        await cancelled(list(self._beginning))

    def _connected(
        self, connection: socket.socket, new_protocol: NewProtocol
    ) -> Coroutine[Any, Any, object]:
        return self._loop.connect_accepted_socket(
            new_protocol,
            connection,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._handshake_s,
        )


async def _made(connecting: Coroutine[Any, Any, object]) -> None:
    try:
        await connecting
    except OSError as error:  # the client left, or its handshake failed; SSLError is one
        log.debug("a connection did not begin: %s", error)
