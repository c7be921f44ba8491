"""The client side: one request of a client, and the response that is written to it."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import aiohttp
from aiohttp import web

from kvrouter.http.headers import Headers
from kvrouter.openai.errors import Fault, RequestError


class ClientGone(Exception):  # noqa: N818  # it is the client's right, no error
    """The client closed its connection."""


class Client(Protocol):
    """What the life of a request needs of the client's connection."""

    method: str
    path: str
    target: str
    """Path and query as the client sent them."""
    headers: Headers
    begun: bool
    """Whether the head of a response was sent."""

    async def body(self) -> bytes:
        """The whole body. Raises RequestError when it is too large or too slow."""

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the response."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the response's body; waits while the client reads too slowly.

        Like `begin` and `end` it raises ClientGone when nobody is there to read.
        """

    async def end(self) -> None:
        """The response is whole."""

    def abort(self) -> None:
        """Close the connection, so that the client sees that its response is not whole."""


class AiohttpClient:
    """A client of the aiohttp server."""

    def __init__(self, request: web.BaseRequest, *, body_s: float, max_body_bytes: int) -> None:
        self._request = request
        self._response: web.StreamResponse | None = None
        self._body_s = body_s
        self._max_body_bytes = max_body_bytes
        self.method = request.method
        self.path = request.path
        self.target = request.raw_path
        self.headers: Headers = list(request.headers.items())
        self.begun = False

    async def body(self) -> bytes:
        """The whole body. Raises RequestError when it is too large or too slow."""
        try:
            with _client_errors():
                async with asyncio.timeout(self._body_s):
                    return await self._read_body()
        except TimeoutError as error:
            message = f"the body did not arrive within {self._body_s:g} s"
            raise RequestError(Fault.BODY_TIMEOUT, message) from error

    async def _read_body(self) -> bytes:
        limit = self._max_body_bytes
        if (self._request.content_length or 0) > limit:
            raise RequestError(Fault.BODY_TOO_LARGE, f"the body is larger than {limit} bytes")
        pieces = bytearray()
        while piece := await self._request.content.readany():
            pieces += piece
            if len(pieces) > limit:
                raise RequestError(Fault.BODY_TOO_LARGE, f"the body is larger than {limit} bytes")
        return bytes(pieces)

    async def begin(self, status: int, headers: Headers) -> None:
        """Send the head of the response."""
        response = web.StreamResponse(status=status)
        for name, value in headers:
            response.headers.add(name, value)
        self._response = response
        self.begun = True
        with _client_errors():
            await response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Send a piece of the response's body; waits while the client reads too slowly."""
        if self._response is None:
            raise RuntimeError("begin() comes before write()")
        with _client_errors():
            await self._response.write(data)

    async def end(self) -> None:
        """The response is whole."""
        if self._response is not None:
            with _client_errors():
                await self._response.write_eof()

    def abort(self) -> None:
        """Close the connection, so that the client sees that its response is not whole."""
        if self._request.transport is not None:
            self._request.transport.close()

    @property
    def response(self) -> web.StreamResponse:
        """What aiohttp wants its handler to return."""
        if self._response is None:
            raise RuntimeError("the request got no response")
        return self._response


@contextmanager
def _client_errors() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
        raise ClientGone(str(error)) from error


async def send_whole(client: Client, status: int, headers: Headers, body: bytes) -> None:
    """Send a response that is already there."""
    await client.begin(status, [*headers, ("Content-Length", str(len(body)))])
    if body and client.method != "HEAD":
        await client.write(body)
    await client.end()
