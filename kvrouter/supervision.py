"""Long-running tasks that survive their own bugs: logged, and started again after a pause."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

RESTART_S = 1.0


@asynccontextmanager
async def background(runs: Mapping[str, Callable[[], Awaitable[None]]]) -> AsyncIterator[None]:
    """Run all of these, supervised, while the context is open; they are gone when it closes."""
    tasks = [asyncio.create_task(supervised(what, run), name=what) for what, run in runs.items()]
    try:
        yield
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
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
