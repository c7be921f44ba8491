"""What the data plane itself costs, without sockets: one request after the other through all of it.

    python bench/micro/plane.py [--policy kv] [--profile]

A client's connection and an engine's are driven with bytes in one process, so that no system call
and no other process is in the figure. CPU time; the least of many short runs.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import pstats
import time
from pathlib import Path
from typing import Any, cast

import uvloop

from kvrouter.config import Config, parse_config
from kvrouter.fleet import Fleet
from kvrouter.http.connection import ClientConnection, ConnectionSettings
from kvrouter.http.engine import EngineClient
from kvrouter.http.request_reader import ReadLimits
from kvrouter.http.server import Connections
from kvrouter.load import Load
from kvrouter.tokenize import ModelTokenizer
from kvrouter.tokenize.choice import BackendSettings
from kvrouter.wiring import Plane, encoding_threads, new_fleet, plane
from kvrouter.workers import ServedModel, WorkerEvent, WorkerFacts

TOKENIZER = Path(__file__).parent.parent.parent / "tests" / "data" / "tinymodel"
RUNS, REQUESTS, CHUNKS = 60, 100, 100

ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"content": "Hello there. " * 10}}],
        "usage": {"prompt_tokens": 250, "completion_tokens": 30, "total_tokens": 280},
    }
).encode()
HEAD = b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Aug 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
UNARY = (
    HEAD + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER
)
STREAM = HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNK = (
    b'data: {"id":"chatcmpl-9f3ab1a3bd1d4a0b","object":"chat.completion.chunk","created":17855424,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    b'"finish_reason":null,"token_ids":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"


def framed(data: bytes) -> bytes:
    """One chunk of the transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Pipe:
    """A transport that calls back with what is written, and counts it."""

    def __init__(self) -> None:
        self.written = 0
        self.wrote: Any = None

    def write(self, data: bytes) -> None:
        """Take bytes."""
        self.written += len(data)
        if self.wrote is not None:
            self.wrote()

    def is_closing(self) -> bool:
        """Never."""
        return False

    def get_extra_info(self, name: str) -> None:
        """Nothing is known of the other side."""

    def get_write_buffer_size(self) -> int:
        """All was taken."""
        return 0

    def set_write_buffer_limits(self, high: int, low: int | None = None) -> None:
        """There are none."""

    def pause_reading(self) -> None:
        """Nothing to pause."""

    def resume_reading(self) -> None:
        """Nothing to resume."""

    def abort(self) -> None:
        """Nothing to end."""


def request(*, stream: bool) -> bytes:
    """A chat of about a kilobyte."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me more about it, please. " * 30}],
        "max_tokens": 30,
        "stream": stream,
    }
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer none\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


class Bench:
    """A router with one ready worker, one client and one engine connection."""

    def __init__(self, made: Plane, fleet: Fleet, engines: EngineClient, config: Config) -> None:
        self._loop = asyncio.get_running_loop()
        worker = fleet.add(config.workers[0])
        facts = WorkerFacts(models=(ServedModel("m"),), block_size=16, capacity_blocks=100_000)
        fleet.joined(worker, facts)
        worker.happened(WorkerEvent.JOINED)
        self.pool = fleet.pools["m"]
        self.pool.tokenizer_problem = "not wanted"
        host = engines.host(worker.url)
        self._engine = host.new_connection()
        self._engine_pipe = Pipe()
        self._engine.connection_made(cast("asyncio.Transport", self._engine_pipe))
        host.give_back(self._engine)
        self._client = ClientConnection(
            made.door.handle,
            ConnectionSettings(ReadLimits()),
            Connections(made.door.handle, made.metrics.unread, ConnectionSettings(ReadLimits())),
        )
        self._client_pipe = Pipe()
        self._client.connection_made(cast("asyncio.Transport", self._client_pipe))

    async def unary(self, count: int) -> float:
        """CPU seconds of so many requests."""
        asked = request(stream=False)
        answer = self._engine
        self._engine_pipe.wrote = lambda: self._loop.call_soon(answer.data_received, UNARY)
        return await self._timed(asked, count)

    async def streams(self, count: int, chunks: int) -> float:
        """CPU seconds of so many streams with so many chunks each."""
        pieces = [STREAM, *[framed(CHUNK)] * chunks, framed(DONE) + b"0\r\n\r\n"]
        engine = self._engine
        loop = self._loop

        def feed(left: list[bytes]) -> None:
            engine.data_received(left.pop())
            if left:
                loop.call_soon(feed, left)

        self._engine_pipe.wrote = lambda: loop.call_soon(feed, pieces[::-1])
        return await self._timed(request(stream=True), count)

    async def _timed(self, asked: bytes, count: int) -> float:
        began = time.process_time()
        for _ in range(count):
            self._client.data_received(asked)
            while self._client.active or not self._engine.reusable:  # noqa: ASYNC110 - the loop is measured too
                await asyncio.sleep(0)
        return time.process_time() - began


async def main(options: argparse.Namespace) -> None:
    """Measure and print."""
    tables = {"workers": [{"url": "http://127.0.0.1:1"}], "policy": {"name": options.policy}}
    config = parse_config(tables)
    async with EngineClient(config.timeouts) as engines, encoding_threads(config) as tokenizers:
        fleet = new_fleet(config, Load(), None)
        made = plane(config, fleet, engines, tokenizers)
        bench = Bench(made, fleet, engines, config)
        if options.policy == "kv":
            settings = BackendSettings(check_every=0)
            bench.pool.tokenizer = ModelTokenizer.load(str(TOKENIZER), backends=settings)
        await bench.unary(REQUESTS)
        gc.collect()
        gc.freeze()
        if options.profile:
            profile = cProfile.Profile(time.process_time)
            profile.enable()
            await (bench.streams(20, 200) if options.profile == "streams" else bench.unary(2000))
            profile.disable()
            pstats.Stats(profile).sort_stats("tottime").print_stats(140)
            return
        unary_s = [await bench.unary(REQUESTS) / REQUESTS for _ in range(RUNS)]
        stream_s = [await bench.streams(5, CHUNKS) / 5 for _ in range(RUNS)]
        short_s = [await bench.streams(20, 1) / 20 for _ in range(RUNS)]
    figures = {
        "bench": "plane",
        "policy": options.policy,
        "us_per_request": round(min(unary_s) * 1e6, 2),
        "us_per_request_median": round(sorted(unary_s)[RUNS // 2] * 1e6, 2),
        "us_per_stream": round(min(short_s) * 1e6, 2),
        "us_per_chunk": round((min(stream_s) - min(short_s)) / (CHUNKS - 1) * 1e6, 2),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="round_robin")
    parser.add_argument("--profile", choices=("unary", "streams"))
    uvloop.run(main(parser.parse_args()))
