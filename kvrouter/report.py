"""What the second port shows of workers and ranks: plain values, made from the fleet's state."""

import time
from typing import Any

from events import WorkerRank
from events.nats_link import NatsLink
from events.stream import StreamState
from indexer import HotPrefix
from kvrouter.fleet import Fleet
from kvrouter.pool import Pool
from kvrouter.proof import Verdict
from kvrouter.rank_state import RankState
from kvrouter.workers import Worker, WorkerState

HOT_PREFIXES = 20
"""How many prefixes are shown of each model."""


def readiness(fleet: Fleet, link: NatsLink | None = None) -> list[str]:
    """What keeps the router from being ready; empty when it is. Over `link` workers are announced.

    One ready worker will do; a model whose tokenizer is still being loaded won't, because its
    first requests would land anywhere.
    """
    if fleet.stopping:
        return ["the router is stopping"]
    if not any(worker.state is WorkerState.READY for worker in fleet.workers.values()):
        return [f"no worker is ready ({', '.join(fleet.workers) or _why_none(link)})"]
    return [
        f"the tokenizer of {pool.model} is being loaded"
        for pool in fleet.pools.values()
        if pool.tokenizer_loading
    ]


def _why_none(link: NatsLink | None) -> str:
    if link is None:
        return "none configured"
    if link.is_connected:
        return "none is announced on NATS: does a kvrouter relay run beside the engines?"
    return f"none can be announced: NATS {link.state}{link.problem and f', {link.problem}'}"


def workers(fleet: Fleet) -> dict[str, Any]:
    """Everything about workers and models, for GET /workers."""
    now = time.monotonic()
    return {
        "models": [_model(pool) for pool in fleet.pools.values()],
        "workers": [_worker(fleet, worker, now) for worker in fleet.workers.values()],
    }


def _model(pool: Pool) -> dict[str, Any]:
    return {
        "model": pool.model,
        "workers": list(pool.workers),
        "tokenizer": _tokenizer_state(pool),
        "tokenizer_backend": _backend(pool),
        "index": pool.index.stats()._asdict(),
    }


def prefixes(fleet: Fleet) -> dict[str, Any]:
    """The prefixes that most ranks of a model hold, for GET /prefixes."""
    return {
        "models": [
            {
                "model": pool.model,
                "prefixes": [_prefix(pool, each) for each in pool.index.hot_prefixes(HOT_PREFIXES)],
            }
            for pool in fleet.pools.values()
        ]
    }


def _prefix(pool: Pool, prefix: HotPrefix) -> dict[str, Any]:
    """Its tokens are counted, not told: the index has only hashes."""
    return {
        "last_hash": prefix.last_hash.hex(),
        "blocks": prefix.blocks,
        "tokens": prefix.blocks * pool.block_size_of(prefix.ranks[0]),
        "ranks": [{"worker": rank.worker, "dp_rank": rank.dp_rank} for rank in prefix.ranks],
    }


def _tokenizer_state(pool: Pool) -> str:
    differs = pool.token_counts.problem
    return f"degraded: {differs}" if differs else _tokenizer_problem(pool) or "exact"


def _backend(pool: Pool) -> dict[str, Any] | None:
    if pool.tokenizer is None:
        return None
    return pool.tokenizer.report._asdict()


def _worker(fleet: Fleet, worker: Worker, now: float) -> dict[str, Any]:
    pool = fleet.pool_of(worker.name)
    return {
        "name": worker.name,
        "url": worker.url,
        "state": worker.state.value,
        "problem": worker.problem,
        "breaker": worker.breaker.state.value,
        "models": [model.id for model in worker.facts.models],
        "notes": list(worker.facts.notes),
        "ranks": [_rank(fleet, pool, rank, now) for rank in worker.ranks] if pool else [],
    }


def _rank(fleet: Fleet, pool: Pool, rank: WorkerRank, now: float) -> dict[str, Any]:
    state = fleet.ranks[rank]
    load = fleet.load.of(rank)
    verdict, reason = judge(pool, rank, state)
    return {
        "dp_rank": rank.dp_rank,
        "view": verdict.value,
        "why": reason,
        "blocks": pool.index.blocks(rank),
        "block_size": pool.block_size_of(rank),
        "capacity_blocks": pool.workers[rank.worker].facts.capacity_blocks,
        "events": _events(state, now),
        "load": {
            "active_requests": load.active_requests,
            "prefill_tokens": load.prefill_tokens,
            "queued_tokens": load.queued_tokens(now),
            "prefill_rate": load.prefill_rate,
            "decode_blocks": load.decode_blocks,
        },
        "proof": {
            "compared": state.proof.compared_total,
            "equal": state.proof.equal_total,
            "predicted_tokens": state.proof.predicted_tokens_total,
            "reported_tokens": state.proof.reported_tokens_total,
        },
    }


def _events(state: RankState, now: float) -> dict[str, Any]:
    if state.source is None:
        return {"stream": None}
    stats = state.source.stats
    return state.source.place | {
        "stream": None if state.stream is None else state.stream.value,
        "last_seqno": stats.last_seqno,
        "last_batch_age_s": stats.last_batch_age_s(now),
        "batches": stats.batches,
        "gaps": stats.gaps,
        "resyncs": sum(stats.resyncs.values()),
        "last_resync": state.last_resync.value if state.last_resync else None,
    }


def judge(pool: Pool, rank: WorkerRank, state: RankState) -> tuple[Verdict, str]:
    """How far the view of a rank can be believed, and why not further."""
    if state.source is None:
        return Verdict.BLIND, "no KV events: prefixes are guessed from routing alone"
    if state.stream in (None, StreamState.CONNECTING):
        return Verdict.DEGRADED, state.source.absence
    problem = _STREAM_PROBLEMS.get(state.stream) or state.source.warning or _tokenizer_problem(pool)
    if problem:
        return Verdict.DEGRADED, problem
    verdict = state.proof.verdict
    if verdict is Verdict.EXACT and state.stream is StreamState.REPLAYING:
        return Verdict.STALE, "events that were missed are being asked for"
    if verdict is not Verdict.DEGRADED and pool.index.is_approximate(rank):
        return Verdict.DEGRADED, "approximate: the model has cache groups that are not understood"
    return verdict, state.proof.reason


_STREAM_PROBLEMS = {
    StreamState.SILENT: "event-silent: prompts were sent but no event came",
    StreamState.DEGRADED: "lost events cannot be had: no replay, or no answer from it or the relay",
}


def _tokenizer_problem(pool: Pool) -> str:
    if pool.tokenizer is not None:
        return pool.token_counts.problem or pool.tokenizer.chat_problem
    return f"tokenizer: {pool.tokenizer_problem or 'being loaded'}"
