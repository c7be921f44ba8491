"""CPU of the whole router for one chat of 32 KB whose beginning it has seen.

    python bench/macro/long_prompts.py [--rounds 40] [--turns 25] [--clients 1 8] [--seed 1]

A real `kvrouter serve` with the kv policy before one worker that answers at once with a canned
completion, and announces no blocks: all that is expected of its cache stays a prediction. In each
round so many clients send a document each (not counted), then again and again with 200 characters
more at its end, one request after the other. The CPU time of a round is what all threads of the
router have run meanwhile, by the kernel's count, and its share of system time. `1 KB` is the same
for short chats: what a request costs besides its tokens. One client alone lets the router wait
between requests, and find the processor's caches filled by others; on a busy machine the least
says more than the median.

`steady` is the median of those parts of rounds, `PART_TURNS` turns of each client, before and after
which a probe (see `bench/micro/steady.py`) found the processors that the router ran on undisturbed
by others, and their share. Those are the ones its threads were on, or all where a thread has moved
meanwhile or the kernel does not tell. Undisturbed is measured by the least probe of the run so far.
Who comes and goes within a part is not seen.

Prints one JSON object, milliseconds of CPU for a request: least and median of the rounds.
"""

import argparse
import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from operator import sub
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

sys.path.insert(0, str(Path(__file__).parent.parent / "micro"))
from steady import probe_us, undisturbed, warm_up
from tokenizing import BACKENDS, Corpus, about, user

MORE = 200
PART_TURNS = 5
PROBES = 3
WARM_UP_S = 2.0
START_S = 60.0
MOVES = re.compile(r"nr_migrations\s*:\s*(\d+)")
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


class Thread(NamedTuple):
    """What the kernel counts of a thread: its CPU time, how often it has moved, and where it is."""

    ran_ns: int
    moves: int | None
    processor: int


def threads(pid: int) -> dict[str, Thread]:
    """All threads of a process, by their ids."""
    return {task.name: _thread(task) for task in Path(f"/proc/{pid}/task").iterdir()}


def _thread(task: Path) -> Thread:
    sched = task / "sched"
    moves = MOVES.search(sched.read_text()) if sched.exists() else None
    return Thread(
        int((task / "schedstat").read_text().split()[0]),
        int(moves[1]) if moves else None,
        int((task / "stat").read_text().rpartition(")")[2].split()[36]),
    )


def cpu_ms(of: dict[str, Thread]) -> float:
    """CPU time of all threads."""
    return sum(thread.ran_ns for thread in of.values()) / 1e6


def ran_on(before: dict[str, Thread], after: dict[str, Thread]) -> set[int] | None:
    """The processors that threads ran on meanwhile; None if one moved, so that nobody knows."""
    found = set()
    for name, thread in after.items():
        then = before.get(name)
        if then is None or thread.moves is None or thread.moves != then.moves:
            return None
        if thread.ran_ns > then.ran_ns:
            found.add(thread.processor)
    return found


def ticks(pid: int) -> tuple[int, int]:
    """User and system time of a process so far, in ticks of the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]), int(fields[12])


class Processors:
    """Probes on each processor that this process may use, and the least of all so far."""

    def __init__(self) -> None:
        self.least_us = warm_up(WARM_UP_S)

    def probes_us(self) -> dict[int, float]:
        """The probe of each now, the median of a few."""
        mine = os.sched_getaffinity(0)
        found = {}
        try:
            for processor in mine:
                os.sched_setaffinity(0, {processor})
                found[processor] = statistics.median(probe_us() for _ in range(PROBES))
        finally:
            os.sched_setaffinity(0, mine)
        self.least_us = min(self.least_us, *found.values())
        return found


class Part(NamedTuple):
    """Some turns of all clients: requests, the router's time, the slowest probe."""

    requests: int
    spent_ms: float
    probe_us: float


def per_request(parts: Sequence[Part]) -> float:
    """Milliseconds."""
    return sum(part.spent_ms for part in parts) / sum(part.requests for part in parts)


def steady(parts: Sequence[Part], least_us: float) -> dict[str, float | None]:
    """The median of the parts that nobody disturbed, and their share."""
    kept = undisturbed(parts, [part.probe_us for part in parts], least_us)
    median = round(statistics.median(per_request([part]) for part in kept), 3) if kept else None
    return {"median": median, "share": round(len(kept) / len(parts), 3), "parts": len(parts)}


async def measure(
    backend: str, size: int, clients: int, processors: Processors, options: argparse.Namespace
) -> dict[str, Any]:
    """Milliseconds of CPU for a request."""
    corpus = Corpus(options.seed)
    rounds: list[list[Part]] = []
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

        async def go_on(text: str, turns: int) -> str:
            for _ in range(turns):
                text += corpus.take(MORE)
                await send(text)
            return text

        async def measured(texts: list[str], turns: int) -> tuple[list[str], Part]:
            before_us, before = processors.probes_us(), threads(pid)
            texts = await asyncio.gather(*(go_on(text, turns) for text in texts))
            after, after_us = threads(pid), processors.probes_us()
            spent_ms = cpu_ms(after) - cpu_ms(before)
            where = ran_on(before, after) or set(before_us)
            slowest_us = max(max(before_us[each], after_us[each]) for each in where)
            return texts, Part(clients * turns, spent_ms, slowest_us)

        await send(corpus.take(500))
        ticks_before = ticks(pid)
        for _ in range(options.rounds):
            texts = [corpus.take(size) for _ in range(clients)]
            await asyncio.gather(*map(send, texts))
            parts = []
            for at in range(0, options.turns, PART_TURNS):
                texts, part = await measured(texts, min(PART_TURNS, options.turns - at))
                parts.append(part)
            rounds.append(parts)
        user_ticks, system_ticks = map(sub, ticks(pid), ticks_before)
    spent_ms = list(map(per_request, rounds))
    return {
        "min": round(min(spent_ms), 3),
        "median": round(statistics.median(spent_ms), 3),
        "steady": steady([part for parts in rounds for part in parts], processors.least_us),
        "system": round(system_ticks / max(1, user_ticks + system_ticks), 2),
    }


async def main() -> None:
    """Measure both backends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="tests/data/tinymodel")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--backend", choices=BACKENDS, nargs="+", default=BACKENDS)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    processors = Processors()
    results = {
        f"{backend}, {clients} clients": {
            label: await measure(backend, size, clients, processors, options)
            for label, size in (("1 KB", 1_000), ("32 KB", 32_768))
        }
        for backend in options.backend
        for clients in options.clients
    }
    told = {"unit": "ms of CPU", "probe_us": round(processors.least_us, 1), "results": results}
    print(json.dumps({**about(options.seed), **told}, indent=2))


if __name__ == "__main__":
    asyncio.run(main())
