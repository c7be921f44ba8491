"""Requests at a steady rate, each on time whether or not those before it are answered.

    python bench/macro/steady_clients.py PORT --rate 2000 --seconds 5

Prints the latencies as JSON.
"""

import argparse
import asyncio
import json
import random
import time
from collections import deque

import uvloop

BODY = json.dumps(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me more about it, please. " * 30}],
        "max_tokens": 30,
    }
).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer none\r\nContent-Length: %d\r\n\r\n" % len(BODY)
) + BODY


class Client(asyncio.Protocol):
    """One connection; a response is known by the end of its body."""

    def __init__(self, idle: "deque[Client]", latencies_ns: list[int]) -> None:
        self._idle = idle
        self._latencies_ns = latencies_ns
        self._transport: asyncio.Transport | None = None
        self._due_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ready."""
        self._transport = transport  # type: ignore[assignment]  # it is one for TCP

    def ask(self, due_ns: int) -> None:
        """Send one request, which was due at this time."""
        self._due_ns = due_ns
        if self._transport is not None:
            self._transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        """The response, or a part of it."""
        if data.endswith((b"}", b"0\r\n\r\n")):
            self._latencies_ns.append(time.monotonic_ns() - self._due_ns)
            self._idle.append(self)


async def main(options: argparse.Namespace) -> None:
    """Ask at the given rate, with random pauses."""
    loop = asyncio.get_running_loop()
    idle: deque[Client] = deque()
    latencies_ns: list[int] = []
    rng = random.Random(1)
    for _ in range(options.connections):
        _, client = await loop.create_connection(
            lambda: Client(idle, latencies_ns), "127.0.0.1", options.port
        )
        idle.append(client)
    skipped = 0
    start = due = time.monotonic()
    while due < start + options.seconds:
        due += rng.expovariate(options.rate)
        pause_s = due - time.monotonic()
        if pause_s > 0:
            await asyncio.sleep(pause_s)
        if idle:
            idle.popleft().ask(time.monotonic_ns())
        else:
            skipped += 1
    took_s = time.monotonic() - start
    await asyncio.sleep(0.5)
    ordered = sorted(latencies_ns[len(latencies_ns) // 10 :])
    print(
        json.dumps(
            {
                "answered": len(ordered),
                "skipped": skipped,
                "rate": len(latencies_ns) / took_s,
                "p50_ms": ordered[len(ordered) // 2] / 1e6,
                "p99_ms": ordered[int(len(ordered) * 0.99)] / 1e6,
            }
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--rate", type=float, default=1000)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=128)
    uvloop.run(main(parser.parse_args()))
