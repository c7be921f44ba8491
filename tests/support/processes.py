"""kvrouter's commands as processes of their own, as a user starts them."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

START_S = 100.0


class Command:
    """A running `kvrouter` command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def line_with(self, text: str) -> str:
        """The next output line that contains `text`. Raises AssertionError when none comes."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                while raw := await self.process.stdout.readline():
                    self.lines.append(raw.decode())
                    if text in self.lines[-1]:
                        return self.lines[-1]
        except TimeoutError:
            pass
        raise AssertionError(f"no {text!r} in its output:\n{''.join(self.lines)}")

    async def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait for its exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end; returns its exit status."""
        async with asyncio.timeout(START_S):
            rest = await self.process.stdout.read() if self.process.stdout else b""
            self.lines.append(rest.decode())
            return await self.process.wait()


@asynccontextmanager
async def command(*arguments: str, shell: str | None = None) -> AsyncIterator[Command]:
    """Start `kvrouter ARGUMENTS`; it is killed when the context closes.

    `shell` is a line of bash that ends in the program and gets the arguments.
    """
    program = [str(Path(sys.executable).parent / "kvrouter"), *arguments]
    if shell is not None:
        program = ["bash", "-c", shell + ' "$@"', "bash", *arguments]
    process = await asyncio.create_subprocess_exec(
        *program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        yield Command(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        transport = process._transport  # type: ignore[attr-defined]  # closes the pipe at once
        transport.close()


async def run(*arguments: str) -> tuple[int, str]:
    """Run a command to its end: exit status and output."""
    async with command(*arguments) as running, asyncio.timeout(START_S):
        output = await running.process.stdout.read() if running.process.stdout else b""
        return await running.process.wait(), output.decode()
