"""`kvrouter engine` as a process."""

import asyncio
import re
import signal
import socket
import sys

import aiohttp


async def test_a_port_for_events_that_is_taken_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        events = ["--kv-events-port", str(taken.getsockname()[1])]
        command = [sys.executable, "-m", "kvrouter", "engine", "--port", "0", *events]
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        async with asyncio.timeout(30):
            _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"Address already in use" in errors
    assert b"Traceback" not in errors


async def test_the_engine_says_when_it_is_ready_and_ends_on_sigterm() -> None:
    command = [sys.executable, "-m", "kvrouter", "engine", "--port", "0", "--kv-events-port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(30):
            line = (await process.stdout.readline()).decode()
            found = re.match(r"simulated engine ready on (http://127\.0\.0\.1:\d+): ", line)
            assert found, line
            body = {"prompt": "hello", "max_tokens": 3}
            async with (
                aiohttp.ClientSession() as session,
                session.post(found[1] + "/v1/completions", json=body) as response,
            ):
                assert (await response.json())["usage"]["completion_tokens"] == 3
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
