"""How late the event loop is while eight new prompts of 128k tokens are tokenized at once.

    python bench/micro/loop_lag.py [--tokenizer tests/data/tinymodel] [--rounds 20] [--seed 1]

The loop sleeps 2 ms at a time, as if it served others, and notes how late it woke up. Each round
brings eight texts, other slices of Python's library, through the threads as the router has them:
parse, render, encode, hash; the interpreter switches threads as often as there. `idle` is the same
loop on the same machine without prompts, for as long. `own` leaves out what that thread waited
for a processor, by the kernel's count: on a machine that others keep busy that is most of `late`.

Prints one JSON object, milliseconds.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import NamedTuple

import uvloop
from tokenizing import Corpus, about, user

from kvrouter.commands.serve import SWITCH_S
from kvrouter.openai.body import Endpoint, RequestBody, parse_body
from kvrouter.prompt import Fidelity
from kvrouter.tokenize import BackendSettings, EncodingThreads, ModelTokenizer, ThreadSettings

PROMPTS = 8
TOKENS = 128_000
STEP_S = 0.002
BLOCK_SIZE = 16


class Lag(NamedTuple):
    """How late the loop was, in seconds."""

    late_s: float
    own_s: float
    """Of that, what was not waiting for a processor."""


async def lags_during(work: Coroutine[None, None, None]) -> list[Lag]:
    """How late the loop woke up each time while this ran, in seconds."""
    lags = []
    task = asyncio.create_task(work)
    while not task.done():
        due, queued_s = time.perf_counter() + STEP_S, in_run_queue_s()
        await asyncio.sleep(STEP_S)
        late_s = time.perf_counter() - due
        lags.append(Lag(late_s, max(0.0, late_s - (in_run_queue_s() - queued_s))))
    await task
    return lags


def in_run_queue_s() -> float:
    """How long this thread could have run and had no processor, since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def shown(lags: list[Lag]) -> dict[str, dict[str, float]]:
    """Percentiles in milliseconds."""
    return {
        "late": percentiles([lag.late_s for lag in lags]),
        "own": percentiles([lag.own_s for lag in lags]),
    }


def percentiles(values_s: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(values_s)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    figures = {
        name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 2)
        for name, share in places.items()
    }
    return {**figures, "samples": len(ordered)}


async def measure(tokenizer: ModelTokenizer, bodies: list[list[bytes]]) -> dict[str, object]:
    """The loop's lag, over all rounds."""
    threads = EncodingThreads(ThreadSettings(deadline_s=120))
    lags: list[Lag] = []
    took_s: list[float] = []
    for round_of_bodies in bodies:
        requests = [parse_body(Endpoint.CHAT, body) for body in round_of_bodies]
        started = time.perf_counter()
        lags += await lags_during(all_of(threads, tokenizer, requests))
        took_s.append(time.perf_counter() - started)
    threads.close()
    idle = await lags_during(asyncio.sleep(min(10.0, sum(took_s))))
    return {"lag": shown(lags), "idle": shown(idle), "round_s": round(min(took_s), 2)}


async def all_of(
    threads: EncodingThreads, tokenizer: ModelTokenizer, requests: list[RequestBody]
) -> None:
    """Tokenize all at once."""
    prompts = await asyncio.gather(
        *(threads.prompt(tokenizer, each, block_sizes=[BLOCK_SIZE]) for each in requests)
    )
    if any(p.fidelity is not Fidelity.EXACT or p.prompt_tokens < TOKENS for p in prompts):
        raise AssertionError(prompts)


def main() -> None:
    """Measure both backends."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokenizer", default="tests/data/tinymodel")
    parser.add_argument("--characters", type=int, default=480_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    corpus = Corpus(options.seed)
    bodies = [
        [
            json.dumps({"messages": user(corpus.take(options.characters))}).encode()
            for _ in range(PROMPTS)
        ]
        for _ in range(options.rounds)
    ]
    results = {}
    for wish in ("auto", "hf"):
        settings = BackendSettings(wish, check_every=0)
        tokenizer = ModelTokenizer.load(options.tokenizer, backends=settings)
        results[tokenizer.backend.name] = uvloop.run(measure(tokenizer, bodies))
    print(json.dumps({**about(options.seed), "unit": "ms", "results": results}, indent=2))


if __name__ == "__main__":
    main()
