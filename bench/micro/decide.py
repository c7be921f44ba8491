"""CPU time of one decision with its booking: overlap, predictions, cost, choice, expect, book.

    python bench/micro/decide.py [--workers 8 64 512] [--replicas 1 3] [--requests 500] [--seed 1]

Each prompt has 1,024 tokens with its hashes in hand: half of it is a system prompt that every
worker holds, half is its own. Each worker has four requests in flight, none of them at its first
token yet, which is the dearest case. With `--replicas 3` two thirds of all requests are booked by
other routers, and what they tell is heard before each decision (that is not counted in it). The
garbage collector is set as the router sets it.

Decisions beside which nobody disturbed the processor, by a probe before and after each (see
`steady.py`), are told apart as `steady`, with their share of all. Where fewer than `ENOUGH` were
undisturbed, all is done again from the beginning, for `MORE_S` or so; that counts for each figure.
Prints one JSON object.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import time
from array import array
from collections import deque
from typing import NamedTuple

from steady import probe_us, undisturbed, warm_up

from events import BlocksStored, EventBatch, WorkerRank
from events.replica import Added, Dropped, Ledger, Mirror
from indexer import PredictedBlocks, RadixIndex
from kvrouter.config import PolicyConfig
from kvrouter.heap import Heap
from kvrouter.load import Lease, Load, Outcome
from kvrouter.policy import build_policy
from kvrouter.prompt import Prompt
from kvrouter.scheduler import Scheduler
from kvrouter.shared_load import SharedLoad

BLOCK_SIZE = 16
SHARED_TOKENS = 512
OWN_TOKENS = 512
ACTIVE_PER_WORKER = 4
WARM_UP_S = 2.0
MORE_S = 15.0
ENOUGH = 200


def prompt_of(number: int) -> Prompt:
    """The shared half and a half of this number's own."""
    start = 100_000 + number * OWN_TOKENS
    ids = array("I", range(SHARED_TOKENS)) + array("I", range(start, start + OWN_TOKENS))
    prompt = Prompt(ids)
    prompt.prehash([BLOCK_SIZE])
    return prompt


def warm_index(ranks: list[WorkerRank]) -> RadixIndex:
    """An index in which every rank holds the shared half."""
    index = RadixIndex()
    for rank in ranks:
        stored = BlocksStored(
            block_hashes=list(range(SHARED_TOKENS // BLOCK_SIZE)),
            token_ids=list(range(SHARED_TOKENS)),
            block_size=BLOCK_SIZE,
        )
        index.apply(rank, EventBatch(ts_s=0.0, events=[stored]))
    return index


class Others:
    """Another router, and this one's view of the load of both."""

    def __init__(self) -> None:
        self.ledger, self.own = Ledger("other", 1), Ledger("own", 1)
        self.told = SharedLoad(Load(), self.ledger)
        self.told.load.journal = self.told
        self.view = SharedLoad(Load(), self.own)
        self.view.load.journal = self.view
        self._mirror = Mirror("own", 1, random.Random(1))

    def book(self, rank: WorkerRank, prompt: Prompt, now: float) -> Lease:
        """It places a request."""
        shared = SHARED_TOKENS // BLOCK_SIZE
        return self.told.book(rank, prompt, overlap_blocks=shared, block_size=BLOCK_SIZE, now=now)

    def tell(self, now: float) -> None:
        """What it did arrives here; what this one did is not told to anybody."""
        self.own.flush()
        for ops in self.ledger.flush():
            for command in self._mirror.hear(ops, now):
                if isinstance(command, Added):
                    self.view.add(command.key, command.booking, now)
                elif isinstance(command, Dropped):
                    self.view.drop(command.key, now)


class Times(NamedTuple):
    """Microseconds of thread time of each placement, and the slower one of the probes around it."""

    place_us: list[float]
    settle_us: list[float]
    probes_us: list[float]


def decide(workers: int, replicas: int, requests: int, seed: int, times: Times) -> None:
    """Place so many requests after those that are in flight from the beginning."""
    ranks = [WorkerRank(f"worker-{number}:8000") for number in range(workers)]
    others = Others()
    scheduler = Scheduler(
        warm_index(ranks),
        PredictedBlocks(),
        others.view if replicas > 1 else Load(),
        build_policy(PolicyConfig()),
        random.Random(seed),
    )
    active: deque[Lease] = deque()
    before = workers * ACTIVE_PER_WORKER
    for number in range(before + requests * replicas):
        prompt, now = prompt_of(number), number * 1e-3
        if number % replicas:
            active.append(others.book(ranks[number % workers], prompt, now))
            if number >= before:
                active.popleft().settle(Outcome.OK, now)
            others.tell(now)
            continue
        probed_us = probe_us()
        started = time.thread_time()
        active.append(scheduler.place(prompt, ranks, now).lease)
        placed = time.thread_time()
        if number >= before:
            active.popleft().settle(Outcome.OK, now)
            times.settle_us.append((time.thread_time() - placed) * 1e6)
            times.place_us.append((placed - started) * 1e6)
            times.probes_us.append(max(probed_us, probe_us()))


def measure(
    workers: int, replicas: int, requests: int, seed: int, least_us: float
) -> dict[str, object]:
    """The figures of one fleet size; `least_us` is the least probe that was seen before."""
    times = Times([], [], [])
    end = time.monotonic() + MORE_S
    kept: list[float] = []
    while not times.place_us or (len(kept) < ENOUGH and time.monotonic() < end):
        decide(workers, replicas, requests, seed, times)
        kept = undisturbed(times.place_us, times.probes_us, min([least_us, *times.probes_us]))
    return {
        "workers": workers,
        "replicas": replicas,
        "place_us_min": round(min(times.place_us), 1),
        "place_us_median": round(statistics.median(times.place_us), 1),
        "settle_us_median": round(statistics.median(times.settle_us), 1),
        "steady": {
            "place_us_median": round(statistics.median(kept), 1) if kept else None,
            "share": round(len(kept) / len(times.place_us), 3),
            "decisions": len(kept),
        },
    }


def commit() -> str:
    """The commit that is measured."""
    command = ("git", "rev-parse", "--short", "HEAD")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure each fleet size and print the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    Heap().start()
    least_us = warm_up(WARM_UP_S)
    results = [
        measure(workers, replicas, options.requests, options.seed, least_us)
        for workers in options.workers
        for replicas in options.replicas
    ]
    about = {"commit": commit(), "seed": options.seed, "python": platform.python_version()}
    print(json.dumps({**about, "decide": results}, indent=2))


if __name__ == "__main__":
    main()
