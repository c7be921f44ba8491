"""Connections without sockets: a transport that goes nowhere, and what a bad network brings."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st


class Wire(asyncio.Transport):
    """A transport that goes nowhere. Closing it is noticed in the next turn, as of a real one."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.written = b""
        self.lost = False
        self._closing = False
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.lost, "nothing is written to a lost connection"
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self.lose)

    def abort(self) -> None:
        self.close()

    def lose(self) -> None:
        if not self.lost:
            self.lost = self._closing = True
            self._protocol.connection_lost(None)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Nobody reads it."""

    def pause_reading(self) -> None:
        """Whoever feeds asks nobody."""

    def resume_reading(self) -> None:
        """Likewise."""

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There are none."""


def pieces(messages: Sequence[bytes]) -> st.SearchStrategy[list[bytes]]:
    """Some of these behind each other, bytes of it changed, its end missing, cut anywhere."""

    @st.composite
    def made(draw: st.DrawFn) -> list[bytes]:
        stream = bytearray(b"".join(draw(st.lists(st.sampled_from(messages), max_size=4))))
        for _ in range(draw(st.integers(0, 2)) if stream else 0):
            stream[draw(st.integers(0, len(stream) - 1))] = draw(st.integers(0, 255))
        if draw(st.booleans()):
            del stream[draw(st.integers(0, len(stream))) :]
        cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=6)))
        edges = [0, *cuts, len(stream)]
        return [bytes(stream[a:b]) for a, b in pairwise(edges) if b > a]

    return made()


async def turns(count: int = 1) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    complaints: list[dict[str, Any]] = []

    async def timed() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        async with asyncio.timeout(10):
            await test()

    asyncio.run(timed())
    assert not complaints, complaints
