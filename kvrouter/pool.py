"""One base model: its workers, what their caches hold, and how its prompts become tokens."""

from collections.abc import Collection, Mapping

from events import EventBatch, WorkerRank
from indexer import Applied, RadixIndex
from kvrouter.breaker import CLOSED
from kvrouter.joint_predictions import Expectations
from kvrouter.scheduler import DEFAULT_BLOCK_SIZE, Scheduler
from kvrouter.token_counts import TokenCounts
from kvrouter.tokenize import PromptTokenizer
from kvrouter.workers import Worker, WorkerState

READY = WorkerState.READY
NO_LAYOUT = -1


def said_block_size(workers: Mapping[str, Worker], rank: WorkerRank) -> int:
    """The block size that the rank's worker told when it joined, else vLLM's default on GPUs."""
    worker = workers.get(rank.worker)
    return (worker.facts.block_size if worker is not None else None) or DEFAULT_BLOCK_SIZE


class Pool:
    """The workers that serve one base model, under whatever names, with their common index."""

    def __init__(
        self, model: str, index: RadixIndex, predicted: Expectations, scheduler: Scheduler
    ) -> None:
        self.model = model
        self.index = index
        self.predicted = predicted
        self.scheduler = scheduler
        self.tokenizer: PromptTokenizer | None = None
        self.tokenizer_problem = ""
        """Why prompts are not tokenized: the tokenizer cannot be loaded."""
        self.token_counts = TokenCounts()
        self.workers: dict[str, Worker] = {}
        self._block_sizes: frozenset[int] = frozenset()
        self._layout = NO_LAYOUT
        """The index's, when the block sizes were looked at."""

    @property
    def tokenizer_loading(self) -> bool:
        """Whether it is not known yet if prompts can be tokenized."""
        return self.tokenizer is None and not self.tokenizer_problem

    def add(self, worker: Worker) -> None:
        """The worker serves this model; called again when it has joined anew."""
        self.workers[worker.name] = worker
        self.token_counts.doubt(worker.name)
        for rank in worker.ranks:
            self.index.set_capacity(rank, worker.facts.capacity_blocks)
        self.scheduler.look_anew()
        self._layout = NO_LAYOUT

    def remove(self, worker: str) -> None:
        """The worker does not serve this model any more."""
        self.workers.pop(worker, None)
        self._layout = NO_LAYOUT
        self.token_counts.doubt(worker)
        self.index.remove_worker(worker)
        self.predicted.drop_worker(worker)

    def forget(self, rank: WorkerRank) -> None:
        """Drop all blocks of a rank, known and expected."""
        self.index.clear(rank)
        self.predicted.drop(rank)

    def apply(self, rank: WorkerRank, batch: EventBatch) -> Applied:
        """Apply one batch of events; what it stores need not be predicted any more."""
        applied = self.index.apply(rank, batch)
        if applied.cleared:
            self.predicted.drop(rank)
        if applied.stored:
            self.predicted.confirm(rank, applied.stored)
        return applied

    def worker_with(self, model: str) -> Worker | None:
        """A worker that lists this name."""
        for worker in self.workers.values():
            if model in worker.names:
                return worker
        return None

    def lets_ids_be_sent(self) -> bool:
        """Whether the next prompt may go as token ids: all that may get it count as we do."""
        ready = (name for name, worker in self.workers.items() if worker.state is READY)
        return self.token_counts.lets_ids_be_sent(ready)

    def max_model_len(self) -> int | None:
        """The most tokens that any of the workers takes; None when one does not tell.

        May be called from any thread.
        """
        told = [
            model.max_model_len
            for worker in list(self.workers.values())
            for model in worker.facts.models
            if model.id == self.model
        ]
        known = [length for length in told if length is not None]
        return max(known) if known and len(known) == len(told) else None

    def candidates(self, model: str, excluded: Collection[str], now: float) -> list[WorkerRank]:
        """The ranks that may get a request for one of this pool's names.

        Workers that asked for a pause (429, 503) are left out unless there are no others. So are
        those with an open breaker, at a first attempt: when all are open, trying one costs a
        request that had no chance otherwise, and a few requests that make every engine fail must
        not close the door to all.
        """
        ranks: list[WorkerRank] = []
        willing: list[Worker] = []
        calm = True
        for worker in self.workers.values():
            if worker.state is READY and model in worker.names and worker.name not in excluded:
                willing.append(worker)
                ranks += worker.ranks
                breaker = worker.breaker
                calm = calm and breaker.state is CLOSED and breaker.backs_off_until <= now
        return ranks if calm else self._careful(willing, excluded, now)

    def _careful(
        self, willing: list[Worker], excluded: Collection[str], now: float
    ) -> list[WorkerRank]:
        """`candidates` where some of those that would take a request are in trouble."""
        trusted = [worker for worker in willing if worker.breaker.allows(now)]
        if not trusted and not excluded:
            trusted = willing
        rested = [worker for worker in trusted if worker.breaker.backs_off_until <= now]
        return [rank for worker in rested or trusted for rank in worker.ranks]

    def block_size_of(self, rank: WorkerRank) -> int:
        """The rank's block size in tokens: what its events say, else what it said on joining."""
        return self.index.block_size(rank) or said_block_size(self.workers, rank)

    def block_sizes(self) -> frozenset[int]:
        """The block sizes in use, in tokens; looked at again when workers or the index change."""
        if self._layout != self.index.layout:
            ranks = [rank for worker in self.workers.values() for rank in worker.ranks]
            self._block_sizes = frozenset(map(self.block_size_of, ranks))
            self._layout = self.index.layout
        return self._block_sizes
