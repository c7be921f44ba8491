"""A fleet of workers in virtual time, driven by the real scheduler, load and index.

Deliberately coarse, so that what a test shows is the choice and not the engine: a worker prefills
one prompt after the other at a fixed rate, then streams its output in pieces whose pace falls with
the number of streams beside it. Its cache never evicts. Blocks are announced `event_lag_s` after
they were computed.
"""

import heapq
import itertools
import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.candidates import policy as policy_named

from events import BlocksStored, EventBatch, WorkerRank
from indexer import PredictedBlocks, RadixIndex
from kvrouter.load import Lease, Load, Outcome
from kvrouter.prompt import HASH_BYTES, Prompt
from kvrouter.scheduler import Scheduler

OUTPUT_PIECES = 8
CAPACITY_BLOCKS = 1 << 20
"""More than any test stores: these caches never evict."""


@dataclass(frozen=True)
class Engine:
    """How fast a worker of speed 1 is."""

    prefill_tokens_per_s: float = 10_000.0
    token_s: float = 0.01
    token_s_per_stream: float = 0.0002
    block_size: int = 16
    event_lag_s: float = 0.002


@dataclass
class Request:
    """One request, as it went."""

    prompt: Prompt
    output_tokens: int
    arrived_at: float
    lease: Lease
    cached_tokens: int = 0
    first_token_at: float = 0.0
    done_at: float = 0.0

    @property
    def rank(self) -> WorkerRank:
        return self.lease.rank

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at


@dataclass
class Worker:
    """One engine: a queue of prompts to prefill, streams, and a cache of block hashes."""

    rank: WorkerRank
    speed: float
    queue: deque[Request] = field(default_factory=deque)
    busy: bool = False
    draining: bool = False
    streams: int = 0
    cache: set[bytes] = field(default_factory=set)


class Fleet:
    """Workers `w0`, `w1`, ... behind one scheduler."""

    def __init__(
        self,
        workers: int,
        policy: str = "kv",
        *,
        w: float | None = None,
        temperature: float = 0.0,
        engine: Engine | None = None,
        slow: dict[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        self.engine = engine or Engine()
        self.now = 0.0
        self.load = Load()
        self.index = RadixIndex()
        self.predicted = PredictedBlocks()
        self.scheduler = Scheduler(
            self.index,
            self.predicted,
            self.load,
            policy_named(policy, w=w, temperature=temperature),
            random.Random(seed),
            said_block_size=lambda _: self.engine.block_size,
        )
        self.workers: dict[WorkerRank, Worker] = {}
        self.requests: list[Request] = []
        self.on_done: Callable[[Request], None] = lambda _: None
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for number in range(workers):
            self.add_worker(speed=1.0 / (slow or {}).get(number, 1.0))

    @property
    def ranks(self) -> list[WorkerRank]:
        return list(self.workers)

    def add_worker(self, speed: float = 1.0) -> WorkerRank:
        rank = WorkerRank(f"w{len(self.workers)}")
        self.workers[rank] = Worker(rank, speed)
        self.index.set_capacity(rank, CAPACITY_BLOCKS)
        return rank

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time_s, next(self._order), action))

    def send(self, time_s: float, prompt: Prompt, output_tokens: int = 1) -> None:
        """A request arrives at this time."""
        self.at(time_s, lambda: self._arrive(prompt, output_tokens))

    def run(self, until_s: float = float("inf")) -> None:
        while self._agenda and self._agenda[0][0] <= until_s:
            self.step()

    def step(self) -> bool:
        """The next thing happens; False when nothing is left to happen."""
        if not self._agenda:
            return False
        self.now, _, action = heapq.heappop(self._agenda)
        action()
        return True

    def run_one(self, prompt: Prompt, output_tokens: int = 1, pause_s: float = 0.0) -> Request:
        """Send a request alone and wait for its end and the events behind it."""
        self.send(self.now + pause_s, prompt, output_tokens)
        self.run()
        return self.requests[-1]

    def shares(self, requests: Sequence[Request] | None = None) -> list[int]:
        """How many requests each worker got."""
        counts = Counter(each.rank for each in (self.requests if requests is None else requests))
        return [counts[rank] for rank in self.workers]

    def _arrive(self, prompt: Prompt, output_tokens: int) -> None:
        candidates = [worker.rank for worker in self.workers.values() if not worker.draining]
        lease = self.scheduler.place(prompt, candidates, self.now).lease
        request = Request(prompt, output_tokens, self.now, lease)
        self.requests.append(request)
        worker = self.workers[lease.rank]
        worker.queue.append(request)
        if not worker.busy:
            self._prefill_next(worker)

    def _prefill_next(self, worker: Worker) -> None:
        worker.busy = bool(worker.queue)
        if not worker.busy:
            return
        request = worker.queue.popleft()
        request.cached_tokens = self._cached_tokens(worker, request.prompt)
        tokens = request.prompt.prompt_tokens - request.cached_tokens
        duration = tokens / (self.engine.prefill_tokens_per_s * worker.speed)
        self.at(self.now + duration, lambda: self._prefilled(worker, request))

    def _cached_tokens(self, worker: Worker, prompt: Prompt) -> int:
        hashes = prompt.reusable_hashes(self.engine.block_size)
        return _known_blocks(worker, hashes) * self.engine.block_size

    def _prefilled(self, worker: Worker, request: Request) -> None:
        request.first_token_at = self.now
        request.lease.prefill_done(self.now)
        self._store(worker, request.prompt)
        worker.streams += 1
        self._stream(worker, request, request.output_tokens)
        self._prefill_next(worker)

    def _stream(self, worker: Worker, request: Request, left: int) -> None:
        piece = min(left, max(1, request.output_tokens // OUTPUT_PIECES))
        token_s = self.engine.token_s + self.engine.token_s_per_stream * worker.streams
        self.at(
            self.now + piece * token_s / worker.speed,
            lambda: self._streamed(worker, request, piece, left - piece),
        )

    def _streamed(self, worker: Worker, request: Request, piece: int, left: int) -> None:
        request.lease.add_output_tokens(piece, self.now)
        if left:
            self._stream(worker, request, left)
            return
        worker.streams -= 1
        request.done_at = self.now
        request.lease.settle(Outcome.OK, self.now)
        self.on_done(request)

    def _store(self, worker: Worker, prompt: Prompt) -> None:
        size = self.engine.block_size
        hashes = prompt.hashes(size)
        known = _known_blocks(worker, hashes)
        new = [_at(hashes, block) for block in range(known, len(hashes) // HASH_BYTES)]
        if not new:
            return
        worker.cache.update(new)
        stored = BlocksStored(
            block_hashes=[int.from_bytes(each, "big") for each in new],
            parent=int.from_bytes(_at(hashes, known - 1), "big") if known else None,
            token_ids=list(prompt.token_ids[known * size : (known + len(new)) * size]),
            block_size=size,
        )
        batch = EventBatch(ts_s=self.now, events=[stored])
        self.at(self.now + self.engine.event_lag_s, lambda: self._announce(worker.rank, batch))

    def _announce(self, rank: WorkerRank, batch: EventBatch) -> None:
        self.predicted.confirm(rank, self.index.apply(rank, batch).stored)


def _known_blocks(worker: Worker, hashes: bytes) -> int:
    """How many leading blocks are cached. Nothing is evicted, so it can be bisected."""
    blocks = range(len(hashes) // HASH_BYTES)
    return bisect_left(blocks, True, key=lambda block: _at(hashes, block) not in worker.cache)


def _at(hashes: bytes, block: int) -> bytes:
    return hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
