"""Long-running tasks that survive their own bugs: logged, and started again after a pause.

And the end of the process, which waits for no thread that hangs.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

log = logging.getLogger(__name__)

RESTART_S = 1.0

CANCEL_AGAIN_S = 5.0
"""Longer than what a task does in order to end well."""

HANGING_S = 2.0
"""How long the end of the process waits for threads."""


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


def ended(status: int, *, within_s: float = HANGING_S) -> int:
    """The exit status, when all threads have ended; the process ends here where some do not.

    A tokenizer may hang on a text, and the interpreter would wait for its thread.
    """
    deadline = time.monotonic() + within_s
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    waiting = [each for each in others if not each.daemon]
    for thread in waiting:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = [thread.name for thread in waiting if thread.is_alive()]
    if hanging:
        log.warning("ending although threads hang: %s", ", ".join(hanging))
        logging.shutdown()
        os._exit(status)
    return status
