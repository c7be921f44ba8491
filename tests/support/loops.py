"""The event loop that `kvrouter serve` runs on, for tests of what differs there."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import uvloop

DEADLINE_S = 30.0


def on_uvloop(test: Coroutine[Any, Any, None], *, deadline_s: float = DEADLINE_S) -> None:
    """Run a test there. Raises TimeoutError after a while: signals don't end it."""

    async def timed() -> None:
        async with asyncio.timeout(deadline_s):
            await test

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(timed())
