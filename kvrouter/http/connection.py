"""One connection of a client: requests in, one at a time and in order; responses out.

    waiting for a request   keep_alive_s between requests; head_s once one has begun
    handling one            no deadline here, but stall_s while the client reads nothing
    lingering               the last response is out, and the client still sends: what it sends is
                            thrown away for a moment, because closing at once would reset the
                            connection and could take the response with it

A client that closes its sending side while it is being served counts as gone, as with other HTTP
servers: most that do so have closed the socket, and the engine should not go on for them.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, cast

from kvrouter.http.client import WireClient, send_whole
from kvrouter.http.deadline import Deadline
from kvrouter.http.request_reader import Incoming, ReadLimits, RequestReader
from kvrouter.openai.errors import Fault, RequestError

HIGH_WATER_BYTES = 65_536
LOW_WATER_BYTES = 16_384
"""Of bytes that the client has not read: where its source is paused, and where it goes on."""

LINGER_S = 2.0
LINGER_BYTES = 16_777_216

Handler = Callable[[WireClient], Awaitable[None]]


class Owner(Protocol):
    """Who keeps the connections. With TLS one may be closed that was never opened."""

    def opened(self, connection: "ClientConnection") -> None:
        """A client is there."""

    def closed(self, connection: "ClientConnection") -> None:
        """It is gone."""

    def refused(self, fault: Fault) -> None:
        """What a client sent could not be read as a request."""


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """Limits and patience, in seconds."""

    limits: ReadLimits
    body_s: float = 120.0
    head_s: float = 30.0
    keep_alive_s: float = 75.0
    stall_s: float = 300.0


class ClientConnection(asyncio.Protocol):
    """Serves one connection with `handle`."""

    def __init__(
        self,
        handle: Handler,
        settings: ConnectionSettings,
        owner: Owner,
        address: str | None = None,
    ) -> None:
        self.address = address
        """The client's, without its port; None for a unix socket."""
        self.closing = False
        self.full = False
        self._handle = handle
        self._settings = settings
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = RequestReader(settings.limits)
        self._deadline = Deadline(self._loop, self._expired)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[Incoming] = deque()
        self._client: WireClient | None = None
        self._task: asyncio.Task[None] | None = None
        """Serves one request after the other, from the first one on."""
        self._more: asyncio.Future[None] | None = None
        """What it waits for in between."""
        self._idle = False
        """Whether a response is out and nothing of another request has come."""
        self._lingering = False
        self._lingered_bytes = 0

    @property
    def active(self) -> bool:
        """Whether a request is being served."""
        return self._client is not None

    @property
    def descriptor(self) -> int:
        """Its socket's, -1 where there is none."""
        opened = self._transport and self._transport.get_extra_info("socket")
        return opened.fileno() if opened else -1

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here."""
        self._transport = cast("asyncio.Transport", transport)
        if self.address is None:
            peer = transport.get_extra_info("peername")
            # A client may be gone, or at a path or an abstract name.
            self.address = peer[0] if isinstance(peer, tuple) else None
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES, low=LOW_WATER_BYTES)
        self._deadline.move(self._settings.head_s)
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone; so is its request."""
        del exc
        self._transport = None
        self._waiting.clear()
        self._deadline.close()
        task, self._task = self._task, None
        if self._client is None:
            self._go_on()
        elif task is not None:
            task.cancel()
        self._client = None  # a task that has not begun with it does not come to its end
        self._reader.close()
        self._owner.closed(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of the client."""
        if self._lingering:
            self._lingered_bytes += len(data)
            if self._lingered_bytes > LINGER_BYTES:
                self._close()
            return
        begun = self._reader.feed(data)
        if begun:
            self._waiting.extend(begun)
        if self._client is not None:
            self._client.more_arrived()
            if self._waiting and self._transport is not None:
                self._transport.pause_reading()
        else:
            self._next()

    def eof_received(self) -> bool:
        """The client sends nothing more; the transport closes itself."""
        return False

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.full = True
        self._deadline.move(self._settings.stall_s)
        if self._client is not None:
            self._client.became_full()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.full = False
        if self._client is not None:
            self._deadline.clear()
            self._client.has_room()

    # What a request asks for.

    def send(self, data: bytes) -> None:
        """Write bytes; those for a client that is gone are dropped."""
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def cut(self) -> None:
        """Close the connection after what was written."""
        self.closing = True
        self._close()

    # One request after the other.

    def shut_down(self) -> None:
        """Take no more requests: an idle connection ends now, another with its response."""
        self.closing = True
        if self._client is None:
            self._close()

    def turn_away(self, failure: RequestError) -> None:
        """Answer this to whatever the client is going to ask, and end the connection."""
        self._reader.failure = failure
        self._refuse(failure)

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        """Serve the next request, if there is one; no other is being served."""
        if self._waiting:
            self._deadline.move(self._settings.stall_s) if self.full else self._deadline.clear()
            self._client = WireClient(self._waiting.popleft(), self, body_s=self._settings.body_s)
            if self._task is None:
                self._task = asyncio.Task(self._serve(), loop=self._loop, name="requests")
            else:
                self._go_on()
        elif self._reader.failure is not None:
            self._refuse(self._reader.failure)
        elif self._idle and self._reader.reading:
            self._idle = False
            self._deadline.move(self._settings.head_s)

    def _go_on(self) -> None:
        """Let the task see that there is a request, or that the client is gone."""
        more, self._more = self._more, None
        if more is not None and not more.done():
            more.set_result(None)

    async def _serve(self) -> None:
        """Serve what comes; ends with the connection."""
        try:
            while self._transport is not None:
                client = self._client
                if client is None:
                    self._more = self._loop.create_future()
                    await self._more
                    continue
                try:
                    await self._handle(client)
                finally:
                    self._client = None
                    self._served(client)
        finally:
            self._task = None  # how it ended knows of this connection

    def _served(self, client: WireClient) -> None:
        transport = self._transport
        if transport is None:
            return
        if not client.ended:
            self._close()
        elif client.last or self.closing:
            self._finish()
        else:
            if not self._waiting:
                transport.resume_reading()
                self._idle = True
                self._deadline.move(self._settings.keep_alive_s)
            self._next()

    def _refuse(self, failure: RequestError) -> None:
        """Answer what could not be read as a request."""
        if self._transport is None or self._transport.is_closing():
            return
        self.closing = True
        self._owner.refused(failure.fault)
        incoming = Incoming("", "", [])
        incoming.complete = True
        client = WireClient(incoming, self, body_s=0.0)
        send_whole(client, failure.fault.status, list(failure.headers().items()), failure.body())
        self._finish()

    def _expired(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing() or self.full:
            self.abort()
        elif self._lingering or not self._reader.reading:
            self._close()
        else:
            message = f"the request did not arrive within {self._settings.head_s:g} s"
            self._refuse(RequestError(Fault.HEAD_TIMEOUT, message))

    def _finish(self) -> None:
        """The last response is written."""
        transport = self._transport
        reader = self._reader
        if transport is None or transport.is_closing():
            return
        if not reader.reading and reader.failure is None and not reader.upgraded:
            self._close()
            return
        self._lingering = True
        self._waiting.clear()
        self._deadline.move(LINGER_S)
        transport.resume_reading()
        if transport.can_write_eof():
            transport.write_eof()

    def _close(self) -> None:
        """Close after what was written; a client that does not read it is cut off."""
        if self._transport is not None:
            self._transport.close()
            self._deadline.move(self._settings.stall_s)
