"""The bus between the processes of one host: unix sockets in a directory that they share.

Each process listens on `DIRECTORY/NAME.sock` and connects to every other socket there, to speak;
what it hears comes in on its own. Nobody is in the middle, so nobody's end disturbs the others. A
process that starts is found within `look_s`, and at once by those that it connects to. The file of
a process that died is removed by whoever is refused at it.

On the wire: frames of a 4-byte big-endian length and that many bytes. The first on a connection is
the name of the process that speaks.
"""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

from events.bus import Hear
from events.sparingly import Sparingly

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 8 * 2**20
MAX_UNSENT_BYTES = 8 * 2**20
"""Above that, what a process does not read is dropped: it will see the gap and ask."""
LOOK_S = 0.5
_COMPLAIN_EVERY_S = 60.0
_LENGTH_BYTES = 4
_SUFFIX = ".sock"


class LocalBus:
    """One process's part of the bus in `directory`, which is made if there is none."""

    def __init__(self, directory: Path, name: str, *, look_s: float = LOOK_S) -> None:
        self.name = name
        self.dropped = 0
        self._directory = directory
        self._path = directory / f"{name}{_SUFFIX}"
        self._look_s = look_s
        self._look_now = asyncio.Event()
        self._speakers: dict[str, _Speaker] = {}
        self._listeners: set[_Listener] = set()
        self._runs = False
        self._complaints = Sparingly(_COMPLAIN_EVERY_S)

    @property
    def is_connected(self) -> bool:
        """Whether the socket is there."""
        return self._runs

    def others(self) -> list[str]:
        """The processes that we speak to."""
        return sorted(self._speakers)

    def publish(self, payload: bytes) -> None:
        """To all others."""
        frame = _frame(payload)
        for speaker in self._speakers.values():
            self._say(speaker, frame)

    def send(self, to: str, payload: bytes) -> None:
        """To one; nothing if it is not there."""
        speaker = self._speakers.get(to)
        if speaker is not None:
            self._say(speaker, _frame(payload))

    def _say(self, speaker: "_Speaker", frame: bytes) -> None:
        if not speaker.write(frame):
            self.dropped += 1

    async def run(self, hear: Hear) -> None:
        """Listen and speak until cancelled. Raises OSError where the directory can't be used."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        loop = asyncio.get_running_loop()
        server = await loop.create_unix_server(
            lambda: _Listener(hear, self._met, self._listeners), sock=_bound(self._path)
        )
        self._runs = True
        try:
            while True:
                self._look_now.clear()
                await self._look()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._look_s):
                        await self._look_now.wait()
        finally:
            self._runs = False
            self._path.unlink(missing_ok=True)
            server.close()
            for speaker in self._speakers.values():
                speaker.close()
            for listener in tuple(self._listeners):
                listener.close()
            self._speakers.clear()

    def _met(self, name: str) -> None:
        """Somebody has connected to us; speak to them too."""
        if name not in self._speakers:
            self._look_now.set()

    async def _look(self) -> None:
        """Connect to the sockets that are there; forget the connections that are not."""
        for name in [name for name, each in self._speakers.items() if each.is_closed]:
            del self._speakers[name]
        for path in sorted(self._directory.glob(f"*{_SUFFIX}")):
            name = path.name.removesuffix(_SUFFIX)
            if name != self.name and name not in self._speakers:
                await self._connect(name, path)

    async def _connect(self, name: str, path: Path) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, speaker = await loop.create_unix_connection(_Speaker, str(path))
        except ConnectionRefusedError:
            with contextlib.suppress(OSError):  # in a directory of many users it may have to stay
                if path.is_socket():  # noqa: ASYNC240  a local name, seen and gone at once
                    path.unlink(missing_ok=True)  # noqa: ASYNC240  likewise
            return
        except OSError as error:
            times = self._complaints.due(time.monotonic())
            if times:
                log.warning(
                    "no connection to %s: %s (%d such since the last line)", path, error, times
                )
            return
        speaker.write(_frame(self.name.encode()))
        self._speakers[name] = speaker


def _bound(path: Path) -> socket.socket:
    """A listening socket at `path`; it appears there only when it listens."""
    early = path.with_suffix(".new")
    early.unlink(missing_ok=True)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.bind(str(early))
        sock.listen(128)
        early.replace(path)
    except BaseException:
        sock.close()
        raise
    return sock


def _frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(_LENGTH_BYTES, "big") + payload


class _Speaker(asyncio.Protocol):
    """The end of a connection that we speak on."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's is none by type

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None

    @property
    def is_closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def write(self, frame: bytes) -> bool:
        """Send a frame; False where there is no room."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return False
        if transport.get_write_buffer_size() + len(frame) > MAX_UNSENT_BYTES:
            return False
        transport.write(frame)
        return True

    def close(self) -> None:
        """Send what waits, and no more."""
        if self._transport is not None:
            self._transport.close()


class _Listener(asyncio.Protocol):
    """The end of a connection on which another process speaks."""

    def __init__(self, hear: Hear, met: Callable[[str], None], alive: "set[_Listener]") -> None:
        self._hear = hear
        self._met = met
        self._alive = alive
        self._is_met = False
        self._buffer = bytearray()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._alive.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._transport = None
        self._alive.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        for payload in self._payloads():
            if self._is_met:
                self._hear(payload)
            else:
                self._is_met = True
                self._met(payload.decode("utf-8", "replace"))

    def _payloads(self) -> Iterator[bytes]:
        while len(self._buffer) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
            if end > MAX_FRAME_BYTES:
                self.close()
                return
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield payload

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
