"""The demo's processes: engines and routers, each with the command that a user would type."""

import asyncio
import contextlib
import ctypes
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from kvrouter.startup import StartError

MODEL_FOLDER = Path(__file__).parent / "model"
MODEL = "demo"
START_S = 60.0
PORTS = range(15_000, 30_000)
"""Below those that systems give to outgoing connections, which could take one between its choice
and its use."""
PORTS_TRIED = 100
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_S = 5.0

ENGINE_FLAGS = (
    "--num-blocks=1100",
    "--max-model-len=4096",
    "--step-ms=8",
    "--prefill-us-per-token=120",
    "--decode-us-per-sequence=150",
)
"""An engine that holds about twelve of the documents, and takes 0.13 s to read one."""


@asynccontextmanager
async def engines(count: int, *more_flags: str) -> AsyncIterator[list[str]]:
    """Engines with empty caches; gives their URLs. Raises StartError if one does not start."""
    arguments = ("engine", "--port=0", f"--model={MODEL}", f"--tokenizer={MODEL_FOLDER}")
    flags = ("--kv-events-port=0", "--replay-port=0", *ENGINE_FLAGS, *more_flags)
    async with contextlib.AsyncExitStack() as running:
        started = await asyncio.gather(
            *(running.enter_async_context(_process(*arguments, *flags)) for _ in range(count))
        )
        yield list(await asyncio.gather(*(_engine_url(process) for process in started)))


@asynccontextmanager
async def router(
    workers: Sequence[str], policy: str, port: int, admin_port: int, *more_flags: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router before these workers, ready. Raises StartError if it does not become so."""
    flags = [*more_flags, *(f"--worker={url}" for url in workers)]
    ports = (f"--port={port}", f"--admin-port={admin_port}")
    arguments = ("serve", f"--policy={policy}", "--log-level=warning", *ports, *flags)
    async with _process(*arguments) as process:
        await _ready(process, f"http://127.0.0.1:{admin_port}/ready")
        yield process


def free_port(preferred: int = 0) -> int:
    """The preferred port if nobody listens there, else any free one of `PORTS`."""
    others = random.sample(PORTS, PORTS_TRIED)
    for port in [preferred, *others] if preferred else others:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StartError("no port is free")


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvrouter",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is the demo's, which stops them in order
            preexec_fn=end_with_parent,
        )
        try:
            yield process
        except StartError as error:
            errors.seek(0)
            text = errors.read().decode("utf-8", "replace").strip()
            raise StartError(f"{error}\n{text}") from error
        finally:
            await _stop(process)


def end_with_parent() -> None:
    """Ask Linux to end this process when the demo is killed and cannot stop it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def _engine_url(process: asyncio.subprocess.Process) -> str:
    """The URL in the line that an engine prints when it is ready."""
    if process.stdout is None:
        raise RuntimeError("the engine's output is not read")
    try:
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
    except TimeoutError:
        line = ""
    url = next((word.rstrip(":") for word in line.split() if word.startswith("http://")), None)
    if url is None:
        raise StartError("a simulated engine did not start")
    return url


async def _ready(process: asyncio.subprocess.Process, url: str) -> None:
    ends_at = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < ends_at and process.returncode is None:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with session.get(url) as response:
                    if response.status == 200:  # noqa: PLR2004  # HTTP's word for yes
                        return
            await asyncio.sleep(0.05)
    raise StartError("the router did not become ready")
