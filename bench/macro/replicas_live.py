"""As `replicas.py`, with real processes: routers, simulated engines, a nats-server, a client.

    python bench/macro/replicas_live.py [--requests 1000] [--seeds 4]

The engines are slow on purpose (a third of a millisecond of work takes them three), so that their
queues, and not this machine's processor, make the waiting times. First the capacity behind one
router, with all requests at once; then an open loop at 80 % of it, by one router, by three that
share over NATS, and by three that do not.

Which worker gets the second copy of a document is partly chance, and the 99th percentile of one run
rests on ten of its requests. So there are several runs, each on a fleet of its own. Given are the
figures of all requests together, and the mean of the runs' ratios to the same run of one router,
with its standard error. Prints one JSON object, after some twelve minutes for each seed.
"""

import argparse
import asyncio
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import accumulate
from pathlib import Path

import aiohttp
import msgspec

from kvrouter.demo.nats_server import NatsServer
from kvrouter.demo.processes import MODEL, engines, free_port, router
from kvrouter.demo.workload import WorkloadSettings, conversations
from kvrouter.replay.result import at

ENGINES = 8
LOAD = 0.8
ENGINE_FLAGS = ("--step-ms=20", "--prefill-us-per-token=3000", "--decode-us-per-sequence=500")
DOCUMENTS = 64
OUTPUT_TOKENS = 8
OVERLOAD_REQUESTS = 300
ROUTERS = {"one": 1, "sharing": 3, "alone": 3}


class Seen:
    """What the client sees."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.workers: dict[str, int] = {}

    def figures(self) -> dict[str, float]:
        """Reuse and waiting times."""
        ordered = sorted(self.ttft_s)
        return {
            "reuse": round(self.cached_tokens / self.prompt_tokens, 4),
            "ttft_mean_ms": round(1e3 * sum(ordered) / len(ordered)),
            "ttft_p50_ms": round(1e3 * at(ordered, 0.5)),
            "ttft_p99_ms": round(1e3 * at(ordered, 0.99)),
            "busiest_share": round(max(self.workers.values()) / sum(self.workers.values()), 3),
        }


def prompts(requests: int, seed: int) -> list[str]:
    """Questions about documents, some of which are wanted more than others."""
    rng = random.Random(seed)
    settings = WorkloadSettings(documents=DOCUMENTS, conversations=20 * DOCUMENTS, turns=1)
    talks = conversations(settings)
    documents = sorted({talk.system for talk in talks})
    weights = [1 / (4 + rank) for rank in range(len(documents))]
    chosen = rng.choices(documents, weights, k=requests)
    return [f"{document} Question {number}?" for number, document in enumerate(chosen)]


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, seen: Seen) -> None:
    """One streamed request."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": OUTPUT_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    place = len(seen.ttft_s)
    seen.ttft_s.append(0.0)
    asked_at = time.perf_counter()
    headers = {"x-kvrouter-explain": "1"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        worker = response.headers["x-kvrouter-worker"]
        seen.workers[worker] = seen.workers.get(worker, 0) + 1
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = msgspec.json.decode(line[6:])
            text = any(choice["delta"].get("content") for choice in chunk["choices"])
            if text and not seen.ttft_s[place]:
                seen.ttft_s[place] = time.perf_counter() - asked_at
            if usage := chunk.get("usage"):
                seen.prompt_tokens += usage["prompt_tokens"]
                seen.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]


@asynccontextmanager
async def fleet(routers: int, *, sync: bool) -> AsyncIterator[list[str]]:
    """The URLs of routers before engines with empty caches."""
    async with AsyncExitStack() as exits:
        server = NatsServer()
        await server.start()
        exits.push_async_callback(server.stop)
        urls = await exits.enter_async_context(engines(ENGINES, *ENGINE_FLAGS))
        folder = exits.enter_context(tempfile.TemporaryDirectory())
        config = Path(folder) / "kvrouter.toml"
        config.write_text(f"[replicas]\nsync = {str(sync).lower()}\n")
        ports = [free_port() for _ in range(routers)]
        flags = (f"--config={config}", f"--nats={server.url}")
        for port in ports:
            await exits.enter_async_context(router(urls, "kv", port, free_port(), *flags))
        await asyncio.sleep(3.0)  # the routers know each other, and have asked for what there is
        yield [f"http://127.0.0.1:{port}" for port in ports]


async def drive(urls: Sequence[str], texts: list[str], gaps_s: list[float], seed: int) -> Seen:
    """Send each request at its time, through a router by chance; wait for all answers."""
    seen, rng = Seen(), random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    started = time.perf_counter()
    async with (
        aiohttp.ClientSession(connector=connector, raise_for_status=True) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for text, due in zip(texts, accumulate(gaps_s), strict=True):
            await asyncio.sleep(max(0.0, started + due - time.perf_counter()))
            tasks.create_task(ask(session, rng.choice(urls), text, seen))
    return seen


async def warm_up(urls: Sequence[str]) -> None:
    """Fill the engines' caches."""
    await drive(urls, prompts(OVERLOAD_REQUESTS, 0), [0.2] * OVERLOAD_REQUESTS, 0)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Capacity, then each way."""
    async with fleet(1, sync=False) as urls:
        await warm_up(urls)
        started = time.perf_counter()
        await drive(urls, prompts(OVERLOAD_REQUESTS, 1), [0.0] * OVERLOAD_REQUESTS, 0)
        rate = LOAD * OVERLOAD_REQUESTS / (time.perf_counter() - started)
    results: dict[str, object] = {"rate": round(rate, 2)}
    sys.stderr.write(f"{rate:.2f} requests/s\n")
    runs: dict[str, list[Seen]] = {name: [] for name in ROUTERS}
    for seed in range(1, options.seeds + 1):
        rng = random.Random(seed)
        gaps_s = [rng.expovariate(rate) for _ in range(options.requests)]
        texts = prompts(options.requests, seed)
        for name, routers in ROUTERS.items():
            async with fleet(routers, sync=name == "sharing") as urls:
                await warm_up(urls)
                seen = await drive(urls, texts, gaps_s, seed)
            runs[name].append(seen)
            sys.stderr.write(f"{name} {seed} {seen.figures()}\n")
    for name, found in runs.items():
        results[name] = together(found).figures() | ratios(found, runs["one"])
    return results


def together(runs: Sequence[Seen]) -> Seen:
    """All requests of several runs."""
    every = Seen()
    for seen in runs:
        every.ttft_s += seen.ttft_s
        every.prompt_tokens += seen.prompt_tokens
        every.cached_tokens += seen.cached_tokens
        for worker, requests in seen.workers.items():
            every.workers[worker] = every.workers.get(worker, 0) + requests
    return every


def ratios(runs: Sequence[Seen], one: Sequence[Seen]) -> dict[str, float]:
    """Of the waiting times to those of one router."""
    found = {}
    for name in ("ttft_mean_ms", "ttft_p99_ms"):
        pairs = zip(runs, one, strict=True)
        each = [mine.figures()[name] / its.figures()[name] for mine, its in pairs]
        error = statistics.stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
        found[f"{name}_ratio"] = round(statistics.fmean(each), 3)
        found[f"{name}_ratio_error"] = round(error, 3)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {"commit": commit, "python": platform.python_version()} | vars(options)
    print(json.dumps(about | asyncio.run(measure(options)), indent=2))


if __name__ == "__main__":
    main()
