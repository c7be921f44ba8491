"""An engine that costs nearly nothing: it answers at once, or streams chunks at a given pace.

    python bench/macro/trivial_engine.py PORT

`max_tokens` chunks are sent `pace_ms` apart (0: as fast as the socket takes them). Each carries the
time at which it was written, so that whoever reads it knows how long it was under way (both on one
machine). Streams are served in a few phases, as engines do whose batches step together.
"""

import asyncio
import itertools
import json
import sys
import time

import httptools
import uvloop

PHASES = 4
MODELS = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello there. " * 10},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 250, "completion_tokens": 30, "total_tokens": 280},
    }
).encode()
CHUNK = (
    'data: {"id":"chatcmpl-9f3ab1a3bd1d4a0b","object":"chat.completion.chunk","created":1785542400,'
    '"system_fingerprint":"%020d",'
    '"model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,'
    '"finish_reason":null,"token_ids":null}]}\n\n'
)
USAGE = (
    b'data: {"id":"chatcmpl-9f3ab1a3bd1d4a0b","object":"chat.completion.chunk","created":1,'
    b'"model":"m","choices":[],"usage":{"prompt_tokens":250,"completion_tokens":100,'
    b'"total_tokens":350}}\n\ndata: [DONE]\n\n'
)
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sat, 01 Aug 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def whole(body: bytes, status: str = "200 OK") -> bytes:
    """A response of one piece."""
    head = (
        f"HTTP/1.1 {status}\r\ndate: Sat, 01 Aug 2026 00:00:00 GMT\r\nserver: uvicorn\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


ROUTES = {
    b"/health": whole(b""),
    b"/v1/models": whole(MODELS),
    b"/v1/chat/completions": whole(ANSWER),
}
NOT_FOUND = whole(b"{}", "404 Not Found")


def framed(data: bytes) -> bytes:
    """One chunk of the transfer coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Pacer:
    """Ticks for all streams of one pace."""

    def __init__(self, pace_ms: float) -> None:
        self.phases: list[dict[Engine, int]] = [{} for _ in range(PHASES)]
        self._next_phase = itertools.cycle(range(PHASES))
        self._task = asyncio.create_task(self._run(pace_ms / 1000 / PHASES))

    def add(self, engine: "Engine", chunks: int) -> None:
        """Stream so many chunks."""
        self.phases[next(self._next_phase)][engine] = chunks

    async def _run(self, pause_s: float) -> None:
        due = time.monotonic()
        for phase in itertools.cycle(self.phases):
            due += pause_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            data = framed((CHUNK % time.monotonic_ns()).encode())
            for engine, left in list(phase.items()):
                if left and engine.transport is not None:
                    engine.transport.write(data)
                    phase[engine] = left - 1
                else:
                    engine.end()
                    del phase[engine]


PACERS: dict[float, Pacer] = {}


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here."""
        self.transport = transport  # type: ignore[assignment]  # it is one for TCP

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        del exc
        self.transport = None

    def data_received(self, data: bytes) -> None:
        """Bytes of it."""
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        """The target."""
        self._url, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer."""
        if b'"stream": true' in self._body or b'"stream":true' in self._body:
            self._stream(json.loads(self._body))
        elif self.transport is not None:
            self.transport.write(ROUTES.get(self._url, NOT_FOUND))

    def end(self) -> None:
        """The stream is over."""
        if self.transport is not None:
            self.transport.write(framed(USAGE) + b"0\r\n\r\n")

    def _stream(self, asked: dict[str, float]) -> None:
        if self.transport is None:
            return
        self.transport.write(STREAM_HEAD)
        pace_ms = asked.get("pace_ms", 10.0)
        pacer = PACERS.get(pace_ms)
        if pacer is None:
            pacer = PACERS[pace_ms] = Pacer(pace_ms)
        pacer.add(self, int(asked["max_tokens"]))


async def main(port: int) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Engine, "127.0.0.1", port, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
