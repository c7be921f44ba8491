"""Long-running tasks that survive their own bugs: logged, and started again after a pause."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

RESTART_S = 1.0

CANCEL_AGAIN_S = 5.0
"""Longer than what a task does in order to end well."""


@asynccontextmanager
async def background(runs: Mapping[str, Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    """Run all of these, supervised, while the context is open; they are gone when it closes."""
    tasks = [asyncio.create_task(supervised(what, run), name=what) for what, run in runs.items()]
    try:
        yield
    finally:
        await cancelled(tasks)


async def cancelled(
    tasks: Sequence[asyncio.Task[None]], *, again_s: float = CANCEL_AGAIN_S
) -> None:
    """Cancel tasks and wait until they have ended, whatever comes between.

    One cancellation can be lost: to `asyncio.wait_for` before Python 3.12, when what it waits for
    comes in the same moment, and to libraries. A router would then never end.
    """
    waiting = set(tasks)
    while waiting:
        for task in waiting:
            task.cancel()
        _, waiting = await asyncio.wait(waiting, timeout=again_s)
    await asyncio.gather(*tasks, return_exceptions=True)


async def supervised(what: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run `run` until it returns or is cancelled; an exception is logged and it runs again."""
    while True:
        try:
            await run()
        except Exception:
            log.exception("%s failed; it starts again in %g s", what, RESTART_S)
            await asyncio.sleep(RESTART_S)
        else:
            return
