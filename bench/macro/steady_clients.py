"""Requests at a steady rate, each on time whether or not those before it are answered.

    python bench/macro/steady_clients.py PORT --rate 2000 --seconds 5

Pauses are exact: the event loop's own timers would round them to milliseconds, and so make bursts
that nobody sends. Prints the latencies as JSON.
"""

import argparse
import asyncio
import ctypes
import json
import os
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


class TimerSpec(ctypes.Structure):
    """The kernel's `itimerspec`: interval and time, each in s and ns."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class Alarm:
    """Waits until a monotonic time, as exactly as the kernel does (Linux: timerfd)."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._rings: asyncio.Future[None] | None = None
        asyncio.get_running_loop().add_reader(self._file, self._rang)

    async def wait(self, until_ns: int) -> None:
        """Wait; a time that has passed is no wait."""
        at_s, at_ns = divmod(until_ns, 1_000_000_000)
        spec = TimerSpec(0, 0, at_s, at_ns)
        self._rings = asyncio.get_running_loop().create_future()
        self._libc.timerfd_settime(self._file, 1, ctypes.byref(spec), None)  # 1: an absolute time
        await self._rings

    def _rang(self) -> None:
        os.read(self._file, 8)
        if self._rings is not None and not self._rings.done():
            self._rings.set_result(None)


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
    alarm = Alarm()
    start_ns = due_ns = time.monotonic_ns()
    while due_ns < start_ns + options.seconds * 1e9:
        due_ns += int(rng.expovariate(options.rate) * 1e9)
        if due_ns > time.monotonic_ns():
            await alarm.wait(due_ns)
        if idle:
            idle.popleft().ask(time.monotonic_ns())
        else:
            skipped += 1
    took_s = (time.monotonic_ns() - start_ns) / 1e9
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
