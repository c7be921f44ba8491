"""CPU of the whole router for one chat of 32 KB whose beginning it has seen.

    python bench/macro/long_prompts.py [--rounds 16] [--turns 25] [--seed 1]

A real `kvrouter serve` with the kv policy before one worker that answers at once with a canned
completion, and announces no blocks: all that is expected of its cache stays a prediction. Each
document is sent once (not counted), then again and again with 200 characters more at its end, one
request after the other. The CPU time of a request is what all threads of the router have run, by
the kernel's count, from before it to before the next. `1 KB` is the same for short chats: what a
request costs besides its tokens. On a busy machine the least says more than the median.

Prints one JSON object, milliseconds of CPU for a request.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent / "micro"))
from tokenizing import Corpus, about, user

MORE = 200
START_S = 60.0
ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}}],
}


@asynccontextmanager
async def worker(tokenizer: str) -> AsyncIterator[str]:
    """An engine that knows one answer; gives its URL."""
    model = {"id": "m", "object": "model", "root": tokenizer}

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(ANSWER)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [model]})

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.get("/health", health), web.get("/v1/models", models)])
    app.add_routes([web.post("/v1/chat/completions", answer)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def router(url: str, backend: str, tokenizer: str) -> AsyncIterator[tuple[int, str]]:
    """A router before it, ready; gives its process id and URL."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "kvrouter.toml"
        config.write_text(f'[tokenizer]\nbackend = "{backend}"\n')
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvrouter", "serve", "--port=0", "--admin-port=0"),
            *(f"--worker={url}", f"--config={config}", f"--tokenizer={tokenizer}"),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(START_S):
                url = await _url_when_ready(process)
            yield process.pid, url
        finally:
            process.terminate()
            await process.wait()


async def _url_when_ready(process: asyncio.subprocess.Process) -> str:
    """Its log says where clients go, and when prompts can be encoded."""
    found = ""
    while process.stderr is not None and (line := (await process.stderr.readline()).decode()):
        if "clients: " in line:
            found = line.split("clients: ")[1].strip().removesuffix("/v1")
        if "prompts are encoded by" in line:
            break
    return found


def cpu_s(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def measure(backend: str, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of CPU for each counted request."""
    corpus = Corpus(options.seed)
    spent_ms = []
    async with (
        worker(options.tokenizer) as url,
        router(url, backend, options.tokenizer) as (pid, front),
        aiohttp.ClientSession() as session,
    ):

        async def send(text: str) -> None:
            body = json.dumps({"model": "m", "messages": user(text), "max_tokens": 1}).encode()
            async with session.post(f"{front}/v1/chat/completions", data=body) as response:
                await response.read()
                response.raise_for_status()

        await send(corpus.take(500))
        for _ in range(options.rounds):
            text = corpus.take(size)
            await send(text)
            before_s = cpu_s(pid)
            for _ in range(options.turns):
                text += corpus.take(MORE)
                await send(text)
                after_s = cpu_s(pid)
                spent_ms.append((after_s - before_s) * 1e3)
                before_s = after_s
    spent_ms.sort()
    return {"min": round(spent_ms[0], 3), "median": round(spent_ms[len(spent_ms) // 2], 3)}


async def main() -> None:
    """Measure both backends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="tests/data/tinymodel")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    results = {
        backend: {
            label: await measure(backend, size, options)
            for label, size in (("1 KB", 1_000), ("32 KB", 32_768))
        }
        for backend in ("auto", "hf")
    }
    print(json.dumps({**about(options.seed), "unit": "ms of CPU", "results": results}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
