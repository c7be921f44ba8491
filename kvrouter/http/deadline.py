"""One moving deadline on one timer.

Deadlines move with every request and every piece, and almost never pass. So moving one later costs
a store: the timer that runs is left alone, and looks at the deadline when it fires.
"""

import asyncio
from collections.abc import Callable

NEVER = float("inf")


def _nobody() -> None:
    pass


class Deadline:
    """Calls `expired` when the deadline passes. `close` it when it is needed no more."""

    __slots__ = ("_at", "_expired", "_fires_at", "_loop", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._at = NEVER
        self._fires_at = NEVER
        self._timer: asyncio.TimerHandle | None = None

    def move(self, seconds: float) -> None:
        """The deadline is `seconds` from now."""
        self._at = at = self._loop.time() + seconds
        if at < self._fires_at:
            self._start(at)

    def clear(self) -> None:
        """There is no deadline for now."""
        self._at = NEVER

    def close(self) -> None:
        """There is none any more, and nobody to tell."""
        self._at = self._fires_at = NEVER
        self._expired = _nobody  # whoever owns it would else be garbage in a cycle
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = at
        self._timer = self._loop.call_at(at, self._fired)

    def _fired(self) -> None:
        self._timer = None
        self._fires_at = NEVER
        if self._at == NEVER:
            return
        if self._at <= self._loop.time():
            self._at = NEVER
            self._expired()
        else:
            self._start(self._at)
