"""Keeps several processes: starts them, starts again what ends, replaces and stops them."""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable

from kvrouter.processes.child import Child
from kvrouter.processes.restarts import Restarts
from kvrouter.supervision import cancelled

log = logging.getLogger(__name__)

CANNOT_START = 2
"""The exit status of a process that is configured wrongly."""
READY_S = 120.0
"""For a new process to be ready to take over from an old one."""
STOP_S = 10.0
"""What a process may take to stop beyond the time that its requests get."""

Start = Callable[[int], Awaitable[Child]]


class Slot:
    """One of the processes, whichever is there at the moment."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.restarts = Restarts()


class Supervisor:
    """Keeps `count` processes that `start` starts, until it is stopped.

    `started` is called with each process that was started, while it gets ready.
    """

    def __init__(
        self,
        start: Start,
        count: int,
        *,
        shutdown_s: float,
        started: Callable[[Child], Awaitable[None]],
    ) -> None:
        self.slots = [Slot(number) for number in range(count)]
        self._start = start
        self._started = started
        self._shutdown_s = shutdown_s
        self._stop = asyncio.Event()
        self._status = 0
        self._any_was_ready = False
        self._rolling = asyncio.Lock()
        self._old: set[Child] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def children(self) -> list[Child]:
        """Those that are there, in the order of their slots."""
        return [slot.child for slot in self.slots if slot.child is not None]

    def stop(self) -> None:
        """Stop all: each takes no more connections, and its requests get their time."""
        self._stop.set()

    def signal_all(self, number: signal.Signals) -> None:
        """Pass a signal on."""
        for child in self.children:
            child.send_signal(number)

    def roll(self) -> None:
        """Replace one process after the other by a new one."""
        self._spawn(self._roll())

    async def run(self) -> int:
        """Keep them until `stop`; returns the exit status."""
        keeping = [asyncio.create_task(self._keep(slot)) for slot in self.slots]
        await self._stop.wait()
        await self._stop_all()
        await cancelled([*keeping, *self._tasks])
        return self._status

    async def _keep(self, slot: Slot) -> None:
        while not self._stop.is_set():
            child = slot.child
            if child is None:
                child = slot.child = await self._begin(slot)
            status = await child.wait()
            if slot.child is not child:
                continue  # it was replaced
            slot.child = None
            if not self._stop.is_set():
                await self._ended(slot, status, time.monotonic() - child.started_at)

    async def _begin(self, slot: Slot) -> Child:
        child = await self._start(slot.number)
        self._spawn(self._greet(child))
        return child

    async def _greet(self, child: Child) -> None:
        await self._started(child)
        self._any_was_ready |= await child.ready(READY_S)

    async def _ended(self, slot: Slot, status: int, lived_s: float) -> None:
        if status == CANNOT_START and not self._any_was_ready:
            self._status = status
            self._stop.set()
            return
        pause_s = slot.restarts.ended(lived_s)
        log.warning(
            "process %d ended by itself (status %d); it starts again in %g s",
            slot.number,
            status,
            pause_s,
        )
        try:
            async with asyncio.timeout(pause_s):
                await self._stop.wait()
        except TimeoutError:
            pass

    async def _roll(self) -> None:
        async with self._rolling:
            for slot in self.slots:
                if not await self._replace(slot):
                    return
            log.info("all processes were replaced")

    async def _replace(self, slot: Slot) -> bool:
        """Put a new process into the slot once it is ready; False if it does not get there."""
        old = slot.child
        new = await self._start(slot.number)
        await self._started(new)
        was_ready = old is not None and await old.ready(0.5)
        if was_ready and not await new.ready(READY_S):
            log.error("process %d: the new one does not get ready; the old one stays", slot.number)
            self._retire(new)
            return False
        old, slot.child = slot.child, new
        if old is not None:
            self._retire(old)
        else:
            log.warning("process %d had ended meanwhile", slot.number)
        return True

    def _retire(self, child: Child) -> None:
        self._old.add(child)
        self._spawn(self._end(child))

    async def _end(self, child: Child) -> None:
        """Let one process finish its requests; then cut it."""
        child.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(self._shutdown_s + STOP_S):
                await child.wait()
        except TimeoutError:
            log.warning("process %d did not stop in time and was killed", child.seat.number)
            child.send_signal(signal.SIGKILL)
            await child.wait()
        self._old.discard(child)

    async def _stop_all(self) -> None:
        await asyncio.gather(*map(self._end, {*self.children, *self._old}))

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
