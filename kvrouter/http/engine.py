"""The engine side: one request to a worker and its response, piece by piece.

Connections are kept and used again, last in first out. One that an engine closed meanwhile is
noticed at once or, where the close crosses the request, by a loss before anything of the response
came: then the request is sent again on a new connection, and nobody is any the wiser.
"""

import asyncio
import errno
import ssl
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import msgspec

from kvrouter.config import TimeoutConfig
from kvrouter.http.descriptors import Descriptors, plenty
from kvrouter.http.engine_connection import (
    BODY,
    END,
    HEAD,
    NOTHING,
    EngineConnection,
    EngineError,
    EngineFailure,
    Take,
)
from kvrouter.http.headers import Headers
from kvrouter.worker_url import http_base, socket_path

__all__ = [
    "EngineClient",
    "EngineError",
    "EngineFailure",
    "EngineRequest",
    "EngineResponse",
    "lacks_descriptors",
]

POOL_KEEPALIVE_S = 4.0
"""Shorter than the 5 s after which vLLM's server closes an idle connection."""

FULL_SOCKET_S = 0.01
"""Until a unix socket with too many waiting connections is tried again."""


class EngineRequest(msgspec.Struct):
    """What goes to a worker at `url` (its base); `target` is already encoded."""

    method: str
    url: str
    target: str
    headers: Headers
    body: bytes


class EngineResponse:
    """The response of a worker. `close()` must be called; before the end it aborts the request."""

    __slots__ = (
        "_connection",
        "_host",
        "_idle_s",
        "came",
        "complete",
        "content_length",
        "fields",
        "headers",
        "status",
    )

    def __init__(self, connection: EngineConnection, host: "Host", idle_s: float) -> None:
        reader = connection.reader
        self.status = reader.status
        self.headers = reader.headers
        self.content_length = reader.content_length
        self.fields = reader.fields
        """The first value of each header, by its name in lower case."""
        self.came = reader.take() if connection.progress >= BODY else None
        """The first piece of the body, if it came with the head; empty if the body has none."""
        self.complete = connection.progress is END
        """Whether that was all."""
        self._connection: EngineConnection | None = connection
        self._host = host
        self._idle_s = idle_s

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self.fields.get("content-type", "").startswith("text/event-stream")

    async def first(self) -> bytes:
        """What comes first of the body; empty where it has none. Raises EngineError."""
        if self.came is None:
            connection = self._open()
            await connection.reach(BODY)
            self.came = connection.reader.take()
        return self.came

    async def pass_on(self, take: Take) -> None:
        """Call `take` with each further piece, as it comes; returns at the end.

        Raises EngineError when the end does not come, and what `take` raises.
        """
        connection = self._open()
        if connection.progress is not END:
            connection.be_patient(self._idle_s)
            connection.pass_on(take)
        await connection.reach(END)

    def pause(self) -> None:
        """Let the engine wait."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Let it go on."""
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        """Give the connection back if the response is at its end, else cut it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._host.give_back(connection)

    def _open(self) -> EngineConnection:
        if self._connection is None:
            raise RuntimeError("the response is closed")
        return self._connection


class EngineClient:
    """Connections to all workers, kept alive between requests."""

    def __init__(
        self,
        timeouts: TimeoutConfig,
        tls: ssl.SSLContext | None = None,
        descriptors: Descriptors | None = None,
    ) -> None:
        self._timeouts = timeouts
        self._tls = tls
        self._descriptors = descriptors or plenty()
        self._hosts: dict[str, Host] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for host in self._hosts.values():
            host.close()

    async def send(self, request: EngineRequest) -> EngineResponse:
        """Send a request and wait for the head of its response. Raises EngineError."""
        host = self._hosts.get(request.url) or self.host(request.url)
        head = _head(request, host.name)
        patience_s = self._timeouts.first_byte_s
        rested = host.rested()
        connection = rested or await host.connect()
        while True:
            try:
                bodiless = request.method == "HEAD"
                connection.send(head, request.body, bodiless=bodiless, patience_s=patience_s)
                await connection.reach(HEAD)
                break
            except BaseException as error:
                connection.close()
                if connection is not rested or not _is_unseen(connection, error):
                    raise
            connection = await host.connect()
        if connection.progress is not END:
            connection.be_patient(patience_s)  # an engine may send the head at once
        return EngineResponse(connection, host, self._timeouts.idle_s)

    def host(self, url: str) -> "Host":
        """The connections to one worker."""
        host = self._hosts.get(url)
        if host is None:
            connect_s = self._timeouts.connect_s
            host = Host(url, connect_s, self._tls, descriptors=self._descriptors)
            self._hosts[url] = host
        return host


class Host:
    """One worker's address, and the connections to it that rest."""

    def __init__(
        self,
        url: str,
        connect_s: float,
        tls: ssl.SSLContext | None = None,
        *,
        descriptors: Descriptors,
    ) -> None:
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        self.name = urlsplit(http_base(url)).netloc
        """For the Host header."""
        self._path = socket_path(url)
        self._address = (parts.hostname or "", parts.port or (443 if is_tls else 80))
        self._tls = (tls or ssl.create_default_context()) if is_tls else None
        self._connect_s = connect_s
        self._descriptors = descriptors
        self._resting: dict[EngineConnection, None] = {}

    def rested(self) -> EngineConnection | None:
        """A connection that can be used at once, if there is one."""
        while self._resting:
            connection, _ = self._resting.popitem()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> EngineConnection:
        """A new connection. Raises EngineError."""
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._connected()
        except TimeoutError as error:
            message = f"no connection within {self._connect_s:g} s"
            raise EngineError(EngineFailure.UNREACHABLE, message) from error
        except OSError as error:
            failure = (
                EngineFailure.NO_DESCRIPTORS
                if lacks_descriptors(error)
                else EngineFailure.UNREACHABLE
            )
            raise EngineError(failure, str(error) or type(error).__name__) from error

    async def _connected(self) -> EngineConnection:
        """Raises OSError."""
        if not self._descriptors.left_to_connect():
            raise OSError(errno.EMFILE, "hardly any file descriptors are left")
        loop = asyncio.get_running_loop()
        if self._path is None:
            _, connection = await loop.create_connection(
                self.new_connection, *self._address, ssl=self._tls
            )
            return connection
        while True:
            try:
                _, connection = await loop.create_unix_connection(self.new_connection, self._path)
            except BlockingIOError:  # the engine has yet to accept others, and no event tells when
                await asyncio.sleep(FULL_SOCKET_S)
            else:
                return connection

    def give_back(self, connection: EngineConnection) -> None:
        """An exchange is over: keep the connection if it is good for another."""
        if connection.reusable:
            connection.rest(POOL_KEEPALIVE_S)
            self._resting[connection] = None
        else:
            connection.close()

    def close(self) -> None:
        """Close what rests."""
        for connection in list(self._resting):
            connection.close()

    def new_connection(self) -> EngineConnection:
        """A protocol for a connection that is about to be made."""
        return EngineConnection(self)

    def opened(self, connection: EngineConnection) -> None:
        """A connection is there."""
        del connection
        self._descriptors.engines += 1

    def dropped(self, connection: EngineConnection) -> None:
        """It is gone."""
        self._descriptors.engines -= 1
        self._resting.pop(connection, None)


def _is_unseen(connection: EngineConnection, error: BaseException) -> bool:
    """Whether a request was lost before anything of its response came."""
    lost = isinstance(error, EngineError) and error.failure is EngineFailure.LOST
    return lost and connection.progress is NOTHING


def _head(request: EngineRequest, host: str) -> bytes:
    lines = [f"{request.method} {request.target} HTTP/1.1\r\nHost: {host}"]
    lines += [f"{name}: {value}" for name, value in request.headers]
    if request.body or request.method == "POST":
        lines.append(f"Content-Length: {len(request.body)}")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("latin-1")


def lacks_descriptors(error: Exception) -> bool:
    """Whether a connection failed because this process may open no more files."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
