"""One connection to an engine: one request at a time, and its response as it comes.

What the engine sends goes on at once: whoever takes the response is called with each piece from
`data_received`. How far the response is, is a number that only grows until the next request:

    NOTHING -> HEAD -> BODY (a first piece is here) -> END

A waiter waits for one of them. Whatever goes wrong ends the connection, and the waiter gets it as
an EngineError.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, IntEnum, auto
from typing import Protocol, cast

from kvrouter.http.deadline import Deadline
from kvrouter.http.response_reader import ResponseReader

HIGH_WATER_BYTES = 1_048_576


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


class Progress(IntEnum):
    """How far a response is."""

    NOTHING = 0
    HEAD = 1
    BODY = 2
    END = 3


NOTHING, HEAD, BODY, END = Progress
"""By their own names: looking one up in its class costs as much as a call."""

Take = Callable[[bytes], None]


class Owner(Protocol):
    """Who keeps the connections. Each that was opened is dropped, once."""

    def opened(self, connection: "EngineConnection") -> None:
        """It can be used."""

    def dropped(self, connection: "EngineConnection") -> None:
        """It can be used no more."""


class EngineConnection(asyncio.Protocol):
    """A connection that carries one exchange after the other."""

    def __init__(self, owner: Owner) -> None:
        self.reader = ResponseReader()
        self.progress = END
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline(self._loop, self._expired)
        self._patience_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._awaited = NOTHING
        self._take: Take | None = None
        self._error: Exception | None = None
        self._writing = False

    # What the transport tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The engine is there."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=HIGH_WATER_BYTES)
        self._owner.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone, which may be the end of a response."""
        self._transport = None
        self._deadline.close()
        if self.progress is not END:
            self.reader.finish()
            if self.reader.complete:
                self._ended()
            else:
                self._fail(EngineFailure.LOST, str(exc or self.reader.failure))
        self.reader.close()
        self._owner.dropped(self)

    def data_received(self, data: bytes) -> None:
        """Bytes of the engine."""
        reader = self.reader
        reader.feed(data)
        if self.progress is END:
            self.close()  # nothing was asked of it
            return
        if reader.failure:
            self._fail(EngineFailure.LOST, f"no HTTP: {reader.failure}")
            return
        if reader.pieces:
            self.progress = BODY
            if self._take is not None:
                self._deadline.move(self._patience_s)
                try:
                    self._take(reader.take())
                except Exception as error:  # noqa: BLE001 - it is raised where the waiter waits
                    self._raise(error)
                    return
        elif reader.has_head and self.progress is NOTHING:
            self.progress = HEAD
        if reader.complete:
            self._ended()
        elif self._waiter is not None and self.progress >= self._awaited:
            self._wake()

    def eof_received(self) -> bool:
        """The engine sends nothing more; the transport closes itself."""
        return False

    # One exchange.

    def send(self, head: bytes, body: bytes, *, bodiless: bool, patience_s: float) -> None:
        """Send a request. The response must begin within `patience_s`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise EngineError(EngineFailure.LOST, "the connection was closed")
        self.progress = NOTHING
        self._error = None
        self.reader.expect(bodiless=bodiless)
        self._patience_s = patience_s
        self._deadline.move(patience_s)
        if len(body) <= _JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)

    async def reach(self, progress: Progress) -> None:
        """Wait until the response is so far. Raises EngineError."""
        if self._error is not None:
            raise self._error
        if self.progress >= progress:
            return
        self._awaited = progress
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def be_patient(self, seconds: float) -> None:
        """From now on the engine may be silent for so long."""
        self._patience_s = seconds
        self._deadline.move(seconds)

    def pass_on(self, take: Take) -> None:
        """Call `take` with each piece of the body from now on."""
        self._take = take

    def pause(self) -> None:
        """Take in no more for now; the engine is not expected to send either."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
            self._deadline.clear()

    def resume(self) -> None:
        """Go on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if self.progress is not END:
                self._deadline.move(self._patience_s)

    @property
    def is_open(self) -> bool:
        """Whether the engine can be reached by it, as far as is known."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent: all was said on both sides."""
        transport = self._transport
        return (
            self.progress is END
            and self.reader.reusable
            and self._error is None
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def rest(self, seconds: float) -> None:
        """The exchange is over; the connection closes unless it is used again in time."""
        self._take = None
        self._deadline.move(seconds)
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection, and with it a request that runs."""
        self._error = None  # its traceback leads here
        self._end()

    def _end(self) -> None:
        self._take = None
        self._deadline.close()
        if self._transport is not None:
            self._transport.abort()

    def _ended(self) -> None:
        """The response is whole."""
        self.progress = END
        self._deadline.clear()
        self._wake()

    def _wake(self) -> None:
        """What the waiter waits for is here."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _expired(self) -> None:
        if self.progress is END:
            self.close()  # it has rested for long enough
        else:
            self._fail(EngineFailure.TIMED_OUT, f"silent for {self._patience_s:g} s")

    def _fail(self, failure: EngineFailure, message: str) -> None:
        self._raise(EngineError(failure, message))

    def _raise(self, error: Exception) -> None:
        self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self._end()


_JOINED_BYTES = 65_536
"""Up to this size a copy is cheaper than another write."""
