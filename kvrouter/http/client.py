"""The client side: one request of a client, and the response that is written to it."""

import asyncio
from collections.abc import Mapping
from typing import Protocol

from kvrouter.http.headers import Headers
from kvrouter.http.request_reader import Incoming
from kvrouter.http.response_head import response_head
from kvrouter.openai.errors import Fault, RequestError


class Throttled(Protocol):
    """Where the pieces of a response come from."""

    def pause(self) -> None:
        """Send no more for now: the client reads too slowly."""

    def resume(self) -> None:
        """Go on."""


class Client(Protocol):
    """What the life of a request needs of the client's connection.

    Writing never waits. What comes faster than the client reads is held back at its source.
    """

    method: str
    path: str
    target: str
    """Path and query as the client sent them."""
    headers: Headers
    fields: Mapping[str, str]
    """The first value of each header."""
    announced_bytes: int
    """The length of the body as the head tells it; 0 where it does not."""
    address: str | None
    """Where the client is, as far as that is known."""
    begun: bool
    """Whether the head of a response was sent."""

    async def body(self) -> bytes:
        """The whole body, once. Raises RequestError when it is too large, too slow or no HTTP."""

    def begin(self, status: int, headers: Headers, length: int | None) -> None:
        """Begin the response; `length` is that of its body in bytes, where it is known."""

    def add_headers(self, headers: Headers) -> None:
        """Let the response have these headers, and no others of the same names."""

    def throttle(self, source: Throttled | None) -> None:
        """Whom to pause while the client reads too slowly."""

    def write(self, data: bytes) -> None:
        """Send a piece of the response's body."""

    def end(self) -> None:
        """The response is whole."""

    def abort(self) -> None:
        """Close the connection, so that the client sees that its response is not whole."""


class Wire(Protocol):
    """What a request needs of the connection that it came on."""

    closing: bool
    """Whether this response is the last one."""
    full: bool
    """Whether the client reads too slowly."""
    address: str | None
    """Where the client is, as far as that is known."""

    def send(self, data: bytes) -> None:
        """Write bytes; those for a client that is gone are dropped."""

    def cut(self) -> None:
        """Close the connection after what was written."""


class WireClient:
    """A request on a connection of the front door, with its response."""

    __slots__ = (
        "_added",
        "_arrived",
        "_body_s",
        "_chunked",
        "_head",
        "_incoming",
        "_silent",
        "_source",
        "_wire",
        "address",
        "announced_bytes",
        "begun",
        "ended",
        "fields",
        "headers",
        "last",
        "method",
        "path",
        "target",
    )

    def __init__(self, incoming: Incoming, wire: Wire, *, body_s: float) -> None:
        self.method = incoming.method
        self.path = incoming.path
        self.target = incoming.target
        self.headers = incoming.headers
        self.fields: Mapping[str, str] = incoming.fields
        self.announced_bytes = incoming.content_length or 0
        self.address = wire.address
        self.begun = False
        self.ended = False
        """Whether the response is whole."""
        self.last = False
        """Whether the connection ends with this response, as its head says."""
        self._incoming = incoming
        self._wire = wire
        self._body_s = body_s
        self._arrived: asyncio.Future[None] | None = None
        self._source: Throttled | None = None
        self._added: Headers = []
        self._head = b""
        self._chunked = False
        self._silent = incoming.method == "HEAD"

    # The request.

    async def body(self) -> bytes:
        """The whole body, once. Raises RequestError when it is too large, too slow or no HTTP."""
        incoming = self._incoming
        if incoming.failure is None and not incoming.complete:
            await self._wait_for_body()
        if incoming.failure is not None:
            raise incoming.failure
        return incoming.take_body()

    async def _wait_for_body(self) -> None:
        incoming = self._incoming
        if incoming.expects_continue and not incoming.body_bytes:
            self._wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._arrived = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._body_s):
                await self._arrived
        except TimeoutError as error:
            message = f"the body did not arrive within {self._body_s:g} s"
            raise RequestError(Fault.BODY_TIMEOUT, message) from error
        finally:
            self._arrived = None

    def more_arrived(self) -> None:
        """More of the request may be there."""
        incoming = self._incoming
        arrived = self._arrived
        if arrived is not None and (incoming.complete or incoming.failure is not None):
            self._arrived = None
            if not arrived.done():
                arrived.set_result(None)

    # The response.

    def add_headers(self, headers: Headers) -> None:
        """Let the response have these headers, and no others of the same names."""
        self._added = headers

    def begin(self, status: int, headers: Headers, length: int | None) -> None:
        """Begin the response; the head is sent with the first piece of the body."""
        incoming = self._incoming
        if status in _BODILESS:
            self._silent = True
            length = length if status == _NOT_MODIFIED else None
        elif length is None:
            self._chunked = not incoming.http_1_0
            incoming.keep_alive = incoming.keep_alive and self._chunked
        if self._added:
            names = {name.lower() for name, _ in self._added}
            headers = [pair for pair in headers if pair[0].lower() not in names] + self._added
        self.begun = True
        self.last = self._wire.closing or not incoming.keep_alive or not incoming.complete
        self._head = response_head(
            status,
            headers,
            length=length,
            chunked=self._chunked,
            last=self.last,
            http_1_0=incoming.http_1_0,
        )

    def throttle(self, source: Throttled | None) -> None:
        """Whom to pause while the client reads too slowly."""
        self._source = source
        if source is not None and self._wire.full:
            source.pause()

    def write(self, data: bytes) -> None:
        """Send a piece of the response's body."""
        if self._silent or not data:
            return
        if self._chunked:
            size = len(data)
            line = _SIZE_LINES[size] if size < _USUAL_BYTES else b"%x\r\n" % size
            data = b"".join((line, data, b"\r\n"))
        if self._head:
            data, self._head = self._head + data, b""
        self._wire.send(data)

    def end(self) -> None:
        """The response is whole."""
        rest, self._head = self._head, b""
        if self._chunked and not self._silent:
            rest += b"0\r\n\r\n"
        if rest:
            self._wire.send(rest)
        self._source = None
        self.ended = True

    def abort(self) -> None:
        """Close the connection, so that the client sees that its response is not whole."""
        self._source = None
        self._wire.cut()

    # The connection says how fast the client reads.

    def became_full(self) -> None:
        """The client reads too slowly."""
        if self._source is not None:
            self._source.pause()

    def has_room(self) -> None:
        """The client has caught up."""
        if self._source is not None:
            self._source.resume()


_USUAL_BYTES = 2048
_SIZE_LINES = [b"%x\r\n" % size for size in range(_USUAL_BYTES)]
"""What stands before a chunk: to format it costs as much as to scan the chunk."""
_BODILESS = (204, 304)
_NOT_MODIFIED = 304


def send_whole(client: Client, status: int, headers: Headers, body: bytes) -> None:
    """Send a response that is already there."""
    client.begin(status, headers, len(body))
    if body:
        client.write(body)
    client.end()
