"""The fleet: which worker ranks hold which model's blocks, and what is known of each.

One `Pool` per base model has that model's index, predictions, scheduler and tokenizer. A worker
belongs to the pool of its first base model; the other names that it lists (more served names,
LoRA adapters) lead to the same pool. A pool outlives its workers, so that a known model without
any is told apart from an unknown one.

This is the sink of all event sources: batches go into the index of the rank's pool at once, on
the event loop, which is the only writer.
"""

import logging
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from events import EventBatch, WorkerRank
from events.stream import ResyncReason, StreamState
from indexer import ResyncCause, namespace
from kvrouter.config import BreakerConfig, PredictionConfig, WorkerConfig
from kvrouter.load import Load, Outcome
from kvrouter.openai.answer import Usage
from kvrouter.openai.errors import Fault, RequestError
from kvrouter.pool import Pool
from kvrouter.prompt import HASH_BYTES, Fidelity, Prompt
from kvrouter.proof import Measurement
from kvrouter.rank_state import RankState, Source
from kvrouter.scheduler import Placement
from kvrouter.workers import Worker, WorkerFacts

log = logging.getLogger(__name__)


NAMED_MODELS = 20
MODEL_CHARACTERS = 200
"""What an error says at most of models that exist, and of the name of one that doesn't."""


OK = Outcome.OK


class Route(NamedTuple):
    """Where requests for one model name go. `lora` is the adapter's name, if it is one."""

    pool: Pool
    model: str
    lora: str | None = None

    def namespace(self, cache_salt: str | None) -> bytes:
        """The namespace of the blocks of such a request."""
        return namespace(lora=self.lora, salt=cache_salt)


class Fleet:
    """All workers, pools and ranks; the sink of all KV events."""

    def __init__(
        self,
        load: Load,
        make_pool: Callable[[str], Pool],
        *,
        breaker: BreakerConfig,
        prediction: PredictionConfig,
    ) -> None:
        self.load = load
        self.workers: dict[str, Worker] = {}
        self.pools: dict[str, Pool] = {}
        self.ranks: dict[WorkerRank, RankState] = {}
        self._routes: dict[str, Route] = {}
        """Those that were asked for, until a worker comes or goes."""
        self._make_pool = make_pool
        self._breaker = breaker
        self._prediction = prediction
        self.stopping = False
        """Whether the router takes no more requests."""

    @property
    def has_tokenizers(self) -> bool:
        """Whether prompts of any model are tokenized."""
        return any(pool.tokenizer is not None for pool in self.pools.values())

    # Workers come and go.

    def add(self, config: WorkerConfig) -> Worker:
        """A worker that is to be kept from now on."""
        worker = Worker(config, self._breaker)
        self.workers[worker.name] = worker
        return worker

    def joined(self, worker: Worker, facts: WorkerFacts) -> None:
        """The worker said what it is; its ranks can be routed to from now on.

        Ranks and models that it had before and has no more are forgotten with their blocks. What
        was heard of ranks that stay was said of the model before, so they are asked for it anew.
        """
        model = facts.base_model
        if model is None:
            raise ValueError(f"worker {worker.name} has no base model")
        self._routes.clear()
        before = self.pool_of(worker.name)
        is_moved = before is not None and before.model != model
        if before is not None and is_moved:
            before.remove(worker.name)
        worker.facts = facts
        pool = self.pools.get(model)
        if pool is None:
            pool = self.pools[model] = self._make_pool(model)
        pool.add(worker)
        for rank in [r for r in self.ranks if r.worker == worker.name and r not in worker.ranks]:
            self._forget(rank, pool)
        for rank in worker.ranks:
            state = self.ranks.setdefault(rank, RankState())
            if is_moved:
                self._begin_anew(rank, state, ResyncReason.RESTART)
                if state.source is not None:
                    state.source.request_resync()

    def remove(self, name: str) -> None:
        """The worker is gone for good; its running requests end on their own."""
        self._routes.clear()
        pool = self.pool_of(name)
        if pool is not None:
            pool.remove(name)
        for rank in [rank for rank in self.ranks if rank.worker == name]:
            self._forget(rank, pool)
        self.workers.pop(name, None)

    def pool_of(self, worker: str) -> Pool | None:
        """The pool that a worker belongs to; None before it joined."""
        return next((pool for pool in self.pools.values() if worker in pool.workers), None)

    def _forget(self, rank: WorkerRank, pool: Pool | None) -> None:
        del self.ranks[rank]
        self.load.remove(rank)
        if pool is not None:
            pool.forget(rank)

    # Requests ask where to go and tell how it went.

    def route(self, model: str | None) -> Route:
        """Where requests for this model go; without a name, to the only model there is.

        Raises RequestError when there is no such model, or none to be known yet.
        """
        known = self._routes.get(model or "")
        if known is not None:
            return known
        if not any(pool.workers for pool in self.pools.values()):
            names = ", ".join(self.workers) or "none"
            message = f"no worker is there (known: {names})"
            raise RequestError(Fault.NO_WORKER, message, retry_after_s=1)
        if model is None:
            if len(self.pools) == 1:
                return Route(next(iter(self.pools.values())), next(iter(self.pools)))
            raise RequestError(Fault.BAD_REQUEST, "several models are served here: name one")
        for pool in self.pools.values():
            worker = pool.worker_with(model)
            if worker is not None:
                route = self._routes[model] = Route(pool, model, worker.names[model])
                return route
        raise RequestError(Fault.NO_SUCH_MODEL, self._no_such_model(model))

    def _no_such_model(self, model: str) -> str:
        known = sorted(
            {
                name
                for pool in self.pools.values()
                for w in pool.workers.values()
                for name in w.names
            }
        )
        more = f" and {len(known) - NAMED_MODELS} more" if len(known) > NAMED_MODELS else ""
        there_are = f"; there are: {', '.join(known[:NAMED_MODELS])}{more}" if known else ""
        return f"the model {model[:MODEL_CHARACTERS]!r} does not exist{there_are}"

    def route_to(self, worker: str) -> Route:
        """The route of a worker's own model. Raises RequestError when it has not joined."""
        pool = self.pool_of(worker)
        if pool is None:
            raise RequestError(Fault.NO_WORKER, f"worker {worker} has not joined", retry_after_s=1)
        return Route(pool, pool.model)

    def attempt_ended(
        self, placement: Placement, outcome: Outcome, usage: Usage | None, prompt: Prompt
    ) -> None:
        """Compare what was predicted with what the engine reports; expect events.

        What was placed before the rank's blocks were dropped (its engine has restarted) went by
        what was known of another.
        """
        chosen = placement.decision.chosen
        state = self.ranks.get(chosen.rank)
        if outcome is not OK:
            self._without_result(placement, outcome, prompt)
            return
        if state is None or placement.lease.booked_at < state.known_since:
            return
        full_blocks = len(prompt.hashes(chosen.block_size)) // HASH_BYTES
        if full_blocks > chosen.held_blocks:
            state.expect_blocks(since=placement.lease.booked_at, now=time.monotonic())
        if prompt.fidelity is not Fidelity.EXACT or usage is None:
            return
        pool = self.pool_of(chosen.rank.worker)
        if pool is not None and usage.prompt_tokens:
            self._compare_counts(pool, prompt, usage, chosen.rank.worker)
        if usage.cached_tokens is not None:
            measured = Measurement(
                predicted_cached=chosen.held_blocks * chosen.block_size,
                reported_cached=usage.cached_tokens,
                prompt_tokens=prompt.prompt_tokens,
                reported_prompt_tokens=usage.prompt_tokens,
            )
            state.proof.observe(measured)

    def _without_result(self, placement: Placement, outcome: Outcome, prompt: Prompt) -> None:
        """A request that got no output has computed nothing, or events tell what it has."""
        worker = self.workers.get(placement.lease.rank.worker)
        pool = self.pool_of(placement.lease.rank.worker)
        if worker is not None and outcome is Outcome.ENGINE_FAILED:
            worker.doubt.arise()
            if pool is not None:
                pool.token_counts.doubt(worker.name)
        if pool is not None and placement.lease.prefill_done_at is None:
            pool.scheduler.withdraw(prompt, placement)

    def _compare_counts(self, pool: Pool, prompt: Prompt, usage: Usage, worker: str) -> None:
        """An engine that got ids counts those: only that it did not says something."""
        if prompt.ids_sent and prompt.prompt_tokens == usage.prompt_tokens:
            return
        if pool.token_counts.observe(prompt.prompt_tokens, usage.prompt_tokens, worker):
            log.error("model %s: degraded: %s", pool.model, pool.token_counts.problem)

    def models(self) -> dict[str, Any]:
        """The union of the workers' models, in the form of OpenAI's /v1/models."""
        entries: dict[str, dict[str, Any]] = {}
        for worker in self.workers.values():
            for model in worker.facts.models:
                entries.setdefault(
                    model.id,
                    {
                        "id": model.id,
                        "object": "model",
                        "owned_by": "vllm",
                        "root": model.root,
                        "parent": model.parent,
                        "max_model_len": model.max_model_len,
                    },
                )
        return {"object": "list", "data": list(entries.values())}

    # Engines tell what their caches hold.

    def on_batch(self, rank: WorkerRank, batch: EventBatch) -> None:
        """Apply one batch of a rank's events."""
        state, pool = self.ranks.get(rank), self.pool_of(rank.worker)
        if state is None or pool is None:
            return  # the worker was removed while its last events were on the way
        applied = pool.apply(rank, batch)
        state.counts.add(applied)
        self._note_block_size(rank, applied.adopted_block_size)
        if applied.resync is not None:
            self._mistrust(rank, state, pool, applied.resync)

    def _mistrust(self, rank: WorkerRank, state: RankState, pool: Pool, cause: ResyncCause) -> None:
        """What is known of the rank can't be true: take its history anew, or let it go.

        A history that has led to the same contradiction just now would do so again.
        """
        if state.may_ask_for_resync(time.monotonic()) and state.source is not None:
            log.warning("worker %s: its events do not add up (%s)", _name(rank), cause)
            state.source.request_resync()
        else:
            pool.forget(rank)

    def _note_block_size(self, rank: WorkerRank, adopted: int | None) -> None:
        expected = self.workers[rank.worker].facts.block_size
        if adopted is not None and adopted != expected:
            log.warning(
                "worker %s: its events have blocks of %d tokens, not %s; adopted",
                _name(rank),
                adopted,
                expected or "known before",
            )

    def on_resync(self, rank: WorkerRank, reason: ResyncReason) -> None:
        """Drop the rank's blocks: what is known of them is not true any more."""
        state = self.ranks.get(rank)
        if state is not None:
            self._begin_anew(rank, state, reason)
            self.workers[rank.worker].doubt.resynced(reason)

    def heard(self, rank: WorkerRank, source: Source) -> None:
        """The rank's blocks are told of by this source from now on."""
        self.ranks[rank].source = source

    def unheard(self, rank: WorkerRank) -> None:
        """Nobody listens to the rank any more: nothing would tell of blocks that it loses."""
        state = self.ranks.get(rank)
        if state is not None:
            state.source = state.stream = None
            self._begin_anew(rank, state, ResyncReason.RESTART)

    def _begin_anew(self, rank: WorkerRank, state: RankState, reason: ResyncReason) -> None:
        state.begin_anew(reason, time.monotonic())
        pool = self.pool_of(rank.worker)
        if pool is not None:
            pool.forget(rank)
            if reason is ResyncReason.RESTART:
                pool.token_counts.doubt(rank.worker)

    def on_state(self, rank: WorkerRank, stream: StreamState) -> None:
        """The state of a rank's event stream has changed."""
        state = self.ranks.get(rank)
        if state is not None:
            state.stream = stream
            self.workers[rank.worker].doubt.stream_changed(rank.dp_rank, stream)

    # Time passes.

    def prediction_ttl_s(self, rank: WorkerRank) -> float:
        """How long blocks are expected on a rank to which a prompt was sent."""
        state = self.ranks.get(rank)
        heard = state is not None and state.hears_events
        return self._prediction.ttl_s if heard else self._prediction.blind_ttl_s

    def tick(self, now: float) -> None:
        """Drop predictions that nothing has confirmed."""
        for pool in self.pools.values():
            pool.predicted.expire(now)

    def check(self) -> None:
        """Raise AssertionError unless all parts agree with themselves and each other."""
        self.load.check()
        for pool in self.pools.values():
            pool.index.check()
            pool.predicted.check()
            stray = {rank.worker for rank in pool.index.ranks()} - set(pool.workers)
            if stray:
                raise AssertionError(f"pool {pool.model} has blocks of strangers: {stray}")


def describe(workers: Collection[Worker]) -> str:
    """Why none of these workers takes requests, in words."""
    if not workers:
        return "none has joined"
    return "; ".join(
        f"{worker.name} {worker.state}, breaker {worker.breaker.state}"
        + (f" ({worker.problem})" if worker.problem else "")
        for worker in workers
    )


def _name(rank: WorkerRank) -> str:
    return f"{rank.worker} (dp rank {rank.dp_rank})" if rank.dp_rank else rank.worker
