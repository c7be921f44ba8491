"""The engine side: one request to a worker and its response, piece by piece.

All errors of the HTTP library end here, as an `EngineError` that says what happened, because what
happened decides whether another worker may be tried.
"""

import asyncio
import errno
import io
from dataclasses import dataclass
from enum import Enum, auto
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp
from yarl import URL

from kvrouter.config import TimeoutConfig
from kvrouter.http.headers import Headers

POOL_KEEPALIVE_S = 4.0
"""Shorter than the 5 s after which vLLM's server closes an idle connection."""

LARGE_BODY_BYTES = 256 * 1024


class EngineFailure(Enum):
    """What became of a request that has no (whole) response."""

    UNREACHABLE = auto()
    """No connection: the engine has not seen the request."""
    LOST = auto()
    """The connection broke, or the response was no HTTP."""
    TIMED_OUT = auto()
    """Nothing came in time."""
    NO_DESCRIPTORS = auto()
    """This process may open no more files: not the worker's fault."""


class EngineError(Exception):
    """A request to a worker failed."""

    def __init__(self, failure: EngineFailure, message: str) -> None:
        super().__init__(message)
        self.failure = failure


@dataclass(slots=True, frozen=True)
class EngineRequest:
    """What goes to a worker; `url` is whole and already encoded."""

    method: str
    url: str
    headers: Headers
    body: bytes


class EngineResponse:
    """The response of a worker. `close()` must be called; before the end it aborts the request."""

    def __init__(self, response: aiohttp.ClientResponse, timeouts: TimeoutConfig) -> None:
        self._response = response
        self._patience_s = timeouts.first_byte_s  # an engine may send the head at once
        self._idle_s = timeouts.idle_s
        self.status = response.status
        self.headers: Headers = list(response.headers.items())

    def header(self, name: str) -> str | None:
        """The first value of a header."""
        return self._response.headers.get(name)

    @property
    def is_event_stream(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return self._response.headers.get("Content-Type", "").startswith("text/event-stream")

    async def read(self) -> bytes:
        """The next piece of the body, as it came; empty at its end. Raises EngineError."""
        patience_s, self._patience_s = self._patience_s, self._idle_s
        try:
            async with asyncio.timeout(patience_s):
                return await self._response.content.readany()
        except TimeoutError as error:
            raise EngineError(EngineFailure.TIMED_OUT, f"silent for {patience_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(EngineFailure.LOST, _describe(error)) from error

    def close(self) -> None:
        """Give the connection back if the response is at its end, else cut it."""
        self._response.close() if not self._response.content.is_eof() else self._response.release()


class EngineClient:
    """Connections to all workers, kept alive between requests."""

    def __init__(self, timeouts: TimeoutConfig) -> None:
        self._timeouts = timeouts
        self._pooled: aiohttp.ClientSession | None = None
        self._fresh: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._pooled = self._session(
            aiohttp.TCPConnector(limit=0, keepalive_timeout=POOL_KEEPALIVE_S)
        )
        self._fresh = self._session(aiohttp.TCPConnector(limit=0, force_close=True))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for session in (self._pooled, self._fresh):
            if session is not None:
                await session.close()

    async def send(self, request: EngineRequest) -> EngineResponse:
        """Send a request; returns at the head of the response. Raises EngineError.

        A connection from the pool may have been closed by the engine just now. Nothing was
        processed then, so the request goes out once more over a fresh connection.
        """
        if self._pooled is None or self._fresh is None:
            raise RuntimeError("use EngineClient as a context manager")
        trace = SimpleNamespace(reused=False)
        try:
            return await self._send(self._pooled, request, trace)
        except EngineError as error:
            if error.failure is not EngineFailure.LOST or not trace.reused:
                raise
        return await self._send(self._fresh, request, trace)

    async def _send(
        self, session: aiohttp.ClientSession, request: EngineRequest, trace: SimpleNamespace
    ) -> EngineResponse:
        try:
            async with asyncio.timeout(self._timeouts.first_byte_s):
                response = await session.request(
                    request.method,
                    URL(request.url, encoded=True),
                    data=_payload(request.body),
                    headers=request.headers,
                    allow_redirects=False,
                    trace_request_ctx=trace,
                )
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise EngineError(_failure(error), _describe(error)) from error
        return EngineResponse(response, self._timeouts)

    def _session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_note_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._timeouts.connect_s),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            trace_configs=[trace],
        )


async def _note_reuse(
    session: aiohttp.ClientSession,
    context: SimpleNamespace,
    params: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    del session, params
    context.trace_request_ctx.reused = True


def _payload(body: bytes) -> bytes | io.BytesIO | None:
    """A large body is written in pieces, so that the event loop goes on meanwhile."""
    return io.BytesIO(body) if len(body) > LARGE_BODY_BYTES else body or None


def _failure(error: Exception) -> EngineFailure:
    os_error = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(os_error, OSError) and os_error.errno in (errno.EMFILE, errno.ENFILE):
        return EngineFailure.NO_DESCRIPTORS
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
        return EngineFailure.UNREACHABLE
    if isinstance(error, TimeoutError):
        return EngineFailure.TIMED_OUT
    return EngineFailure.LOST


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
