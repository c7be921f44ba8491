"""Many clients that read paced streams, and how late each chunk came.

    python bench/macro/stream_clients.py PORT --clients 256 --chunks 100 --pace-ms 10 --seconds 5

Late is the time from the engine's write (it stands in the chunk) to its arrival here. Prints JSON.
"""

import argparse
import asyncio
import json
import time

import uvloop

MARK = b'"system_fingerprint":"'
STAMP_DIGITS = 20


class Client(asyncio.Protocol):
    """One client: a request, its stream, the next request."""

    def __init__(self, request: bytes, tally: "Tally") -> None:
        self._request = request
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        self._transport = transport  # type: ignore[assignment]  # it is one for TCP
        transport.write(self._request)  # type: ignore[attr-defined]

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the other side."""
        del exc
        self._tally.lost += not self._tally.over
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """A part of a stream."""
        now = time.monotonic_ns()
        at = data.find(MARK)
        while at >= 0:
            stamp = data[at + len(MARK) : at + len(MARK) + STAMP_DIGITS]
            if len(stamp) == STAMP_DIGITS and stamp.isdigit():
                self._tally.late_ns.append(now - int(stamp))
            at = data.find(MARK, at + 1)
        if (self._tail + data).endswith(b"0\r\n\r\n"):
            self._tally.streams += 1
            if not self._tally.over and self._transport is not None:
                self._transport.write(self._request)
        self._tail = data[-8:]


class Tally:
    """What all clients saw."""

    def __init__(self) -> None:
        self.late_ns: list[int] = []
        self.streams = 0
        self.lost = 0
        self.over = False


def request(chunks: int, pace_ms: float) -> bytes:
    """A streamed chat of about a kilobyte."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me more about it, please. " * 30}],
        "max_tokens": chunks,
        "pace_ms": pace_ms,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def main(options: argparse.Namespace) -> None:
    """Run the clients and print what they saw."""
    loop = asyncio.get_running_loop()
    tally = Tally()
    asked = request(options.chunks, options.pace_ms)
    made = [
        await loop.create_connection(lambda: Client(asked, tally), "127.0.0.1", options.port)
        for _ in range(options.clients)
    ]
    await asyncio.sleep(options.warm_up)
    tally.late_ns.clear()
    tally.streams = 0
    await asyncio.sleep(options.seconds)
    tally.over = True
    late = sorted(tally.late_ns)
    for transport, _ in made:
        transport.abort()
    print(
        json.dumps(
            {
                "chunks": len(late),
                "streams": tally.streams,
                "lost": tally.lost,
                "late_p50_ms": late[len(late) // 2] / 1e6 if late else None,
                "late_p99_ms": late[int(len(late) * 0.99)] / 1e6 if late else None,
                "late_max_ms": late[-1] / 1e6 if late else None,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=100)
    parser.add_argument("--pace-ms", type=float, default=10)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--warm-up", type=float, default=1)
    uvloop.run(main(parser.parse_args()))
