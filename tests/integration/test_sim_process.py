"""`kvrouter engine` as a process."""

import asyncio
import re
import signal
import sys

import aiohttp


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
