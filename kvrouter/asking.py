"""The router's own questions to workers: one session for all hosts, one for each socket."""

import ssl
from types import TracebackType
from typing import Self

import aiohttp

from kvrouter.worker_url import socket_path


class Sessions:
    """HTTP sessions by the URL of a worker; all are closed with the context."""

    def __init__(self, tls: ssl.SSLContext, *, timeout_s: float | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        connector = aiohttp.TCPConnector(ssl=tls)
        self._to_hosts = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        self._to_sockets: dict[str, aiohttp.ClientSession] = {}

    def of(self, url: str) -> aiohttp.ClientSession:
        """The session for this worker."""
        path = socket_path(url)
        if path is None:
            return self._to_hosts
        session = self._to_sockets.get(path)
        if session is None:
            connector = aiohttp.UnixConnector(path)
            session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
            self._to_sockets[path] = session
        return session

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for session in (self._to_hosts, *self._to_sockets.values()):
            await session.close()
