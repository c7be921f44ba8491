"""One of several processes, as the one that keeps them sees it."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from kvrouter.processes.seat import Seat

ASK_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True)
class Reply:
    """What a process's second port answered."""

    status: int
    content_type: str
    body: bytes


NO_REPLY = Reply(503, "text/plain", b"the process does not answer\n")


class Child:
    """A running process."""

    def __init__(self, process: asyncio.subprocess.Process, seat: Seat) -> None:
        self.seat = seat
        self.started_at = time.monotonic()
        self.pid = process.pid
        self._process = process

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, if it is there."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def ask(self, method: str, target: str, body: bytes = b"") -> Reply:
        """Ask its second port; 503 where it does not answer."""
        connector = aiohttp.UnixConnector(self.seat.admin_path)
        timeout = aiohttp.ClientTimeout(total=ASK_S)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.request(method, f"http://process{target}", data=body) as response,
            ):
                content_type = response.headers.get("Content-Type", "text/plain")
                return Reply(response.status, content_type, await response.read())
        except (aiohttp.ClientError, OSError, TimeoutError):
            return NO_REPLY

    async def ready(self, patience_s: float) -> bool:
        """Wait until it has a worker for its requests; False if it has none by then."""
        ends_at = time.monotonic() + patience_s
        while time.monotonic() < ends_at and self._process.returncode is None:
            if (await self.ask("GET", "/ready")).status == HTTPStatus.OK:
                return True
            await asyncio.sleep(POLL_S)
        return False


async def start(arguments: Sequence[str], seat: Seat) -> Child:
    """Start a process for this seat. Raises OSError."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvrouter", *arguments, "--seat", seat.encode()),
        pass_fds=(*seat.listeners, seat.alive),
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    return Child(process, seat)
