"""What is over is freed at once: nothing of a request waits for the garbage collector.

The collector looks at what has lived for a while rarely, because the index is large; requests that
live long would pile up for it.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import aiohttp
import pytest
from support.loops import on_uvloop
from support.stack import Stack, engine_settings, stack, until

from kvrouter.http.attempt import Attempt
from kvrouter.http.client import WireClient
from kvrouter.http.connection import ClientConnection
from kvrouter.http.engine import EngineResponse
from kvrouter.http.engine_connection import EngineConnection
from kvrouter.http.exchange import Job
from kvrouter.http.request_reader import Incoming, RequestReader
from kvrouter.http.response_reader import ResponseReader
from kvrouter.load import Lease

OF_A_REQUEST = (
    *(ClientConnection, WireClient, RequestReader, Incoming, Job, Attempt, Lease),
    *(EngineConnection, EngineResponse, ResponseReader),
)


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in OF_A_REQUEST)


async def good(made: Stack, session: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "stream": True}
    async with session.post(f"{made.url}/v1/completions", json=body) as response:
        assert b"[DONE]" in await response.read()


async def refused(made: Stack, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{made.url}/v1/completions", data=b"{") as response:
        assert response.status == 400


async def malformed(made: Stack, session: aiohttp.ClientSession) -> None:
    del session
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.port)
    writer.write(b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n")
    assert b"400" in await reader.read()
    writer.close()


async def left(made: Stack, session: aiohttp.ClientSession) -> None:
    """The client goes in the middle of its stream."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4000, "stream": True}
    async with session.post(f"{made.url}/v1/completions", json=body) as response:
        await response.content.readany()
        response.close()
    await made.settled()


async def lost(made: Stack, session: aiohttp.ClientSession) -> None:
    """The engine goes in the middle of a stream."""
    made.engines[0].faults.die_after_chunks = 1
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 50, "stream": True}
    async with session.post(f"{made.url}/v1/completions", json=body) as response:
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()
    made.engines[0].faults.die_after_chunks = None


async def retried(made: Stack, session: aiohttp.ClientSession) -> None:
    made.engines[0].faults.refuse_next(500, times=10)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
    async with session.post(f"{made.url}/v1/completions", json=body) as response:
        assert response.status == 500
    made.engines[0].faults.refuse_next(500, times=0)


@pytest.mark.usefixtures("uncollected")
def test_no_request_waits_for_the_garbage_collector() -> None:
    async def test() -> None:
        async with stack(engine_settings(), timeouts={"shutdown_s": 0.1}) as made:
            for kind in (good, refused, malformed, left, lost, retried):
                for _ in range(3):
                    async with aiohttp.ClientSession() as session:
                        await kind(made, session)
            connections = [each for each in gc.get_objects() if isinstance(each, EngineConnection)]
            for each in connections:
                each.close()
            del connections, each
            await until(lambda: not alive())

    on_uvloop(test())
