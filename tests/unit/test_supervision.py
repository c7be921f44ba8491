"""Tasks that survive their own bugs, and that end when they are told to."""

import asyncio
import subprocess
import sys
import time

from kvrouter.supervision import cancelled


async def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    """A library swallows it: without another the router would never end."""
    lost: list[str] = []

    async def stubborn() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                lost.append("swallowed")
        await asyncio.sleep(3600)

    async def failing() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise RuntimeError("in its end")

    tasks = [asyncio.create_task(stubborn()), asyncio.create_task(failing())]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await cancelled(tasks, again_s=0.01)
    assert lost == ["swallowed"] * 2
    assert all(task.done() for task in tasks)
    await cancelled([])


HANGING = """
import threading, time
from kvrouter.supervision import ended
threading.Thread(target=time.sleep, args=(60,), name="tokenize_0").start()
ended(3, within_s=0.05)
"""


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    """A tokenizer's library loops for ever over a text, and somebody presses Ctrl-C."""
    started = time.monotonic()
    process = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, check=False)
    assert process.returncode == 3
    assert b"tokenize_0" in process.stderr
    assert time.monotonic() - started < 30
