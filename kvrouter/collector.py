"""The fleet's state as Prometheus metrics, read when a scrape asks for it."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from events import SkipCause, WorkerRank
from events.stream import ResyncReason, StreamState
from kvrouter.breaker import BreakerState
from kvrouter.fleet import Fleet
from kvrouter.pool import Pool
from kvrouter.proof import Verdict
from kvrouter.rank_state import RankState
from kvrouter.report import judge
from kvrouter.tokenize import EncodingThreads
from kvrouter.workers import WorkerState

_RankRow = tuple[WorkerRank, RankState, Pool]


class FleetCollector(Collector):
    """Everything that is state rather than a count of passing requests."""

    def __init__(self, fleet: Fleet, tokenizers: EncodingThreads) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers

    def collect(self) -> Iterable[Metric]:
        """All families, for one scrape."""
        yield from self._workers()
        yield from self._ranks()
        yield from self._pools()
        yield from self._tokenizing()

    def _workers(self) -> Iterator[Metric]:
        state = GaugeMetricFamily(
            "kvrouter_worker_state", "1 for the state a worker is in", labels=["worker", "state"]
        )
        breaker = GaugeMetricFamily(
            "kvrouter_breaker_open",
            "1 while a worker's breaker lets nothing through",
            labels=["worker"],
        )
        opened = CounterMetricFamily(
            "kvrouter_breaker_opened", "Times a worker's breaker opened", labels=["worker"]
        )
        for worker in self._fleet.workers.values():
            for each in WorkerState:
                state.add_metric([worker.name, each.value], worker.state is each)
            is_open = worker.breaker.state is not BreakerState.CLOSED
            breaker.add_metric([worker.name], is_open)
            opened.add_metric([worker.name], worker.breaker.opened_total)
        yield from (state, breaker, opened)

    def _rows(self) -> list[_RankRow]:
        rows = []
        for rank, state in self._fleet.ranks.items():
            pool = self._fleet.pool_of(rank.worker)
            if pool is not None:
                rows.append((rank, state, pool))
        return rows

    def _ranks(self) -> Iterator[Metric]:
        rows = self._rows()
        now = time.monotonic()
        load = {rank: self._fleet.load.of(rank) for rank, _, _ in rows}
        gauges: dict[str, tuple[str, Callable[[WorkerRank, RankState, Pool], float]]] = {
            "active_requests": ("Booked requests", lambda r, _s, _p: load[r].active_requests),
            "prefill_tokens": (
                "Booked uncached tokens before their first output byte",
                lambda r, _s, _p: load[r].prefill_tokens,
            ),
            "decode_blocks": ("Booked active blocks", lambda r, _s, _p: load[r].decode_blocks),
            "blocks": ("Blocks that the rank holds", lambda r, _s, p: p.index.blocks(r)),
            "block_size_tokens": ("Tokens in a block", lambda r, _s, p: p.block_size_of(r)),
        }
        for name, (text, read) in gauges.items():
            yield _gauge(f"kvrouter_rank_{name}", text, rows, read)
        yield _verdicts(rows)
        for name, (text, count) in _PROOF_COUNTS.items():
            yield _counter(f"kvrouter_proof_{name}", text, rows, count)
        for name, (text, count) in _EVENT_COUNTS.items():
            yield _counter(f"kvrouter_events_{name}", text, rows, count)
        yield from _stream_metrics([row for row in rows if row[1].source is not None], now)

    def _pools(self) -> Iterator[Metric]:
        nodes = GaugeMetricFamily(
            "kvrouter_index_nodes", "Nodes of the radix tree", labels=["model"]
        )
        blocks = GaugeMetricFamily(
            "kvrouter_index_blocks", "Blocks of all ranks in the index", labels=["model"]
        )
        loaded = GaugeMetricFamily(
            "kvrouter_tokenizer_loaded", "1 if prompts of the model are tokenized", labels=["model"]
        )
        for pool in self._fleet.pools.values():
            stats = pool.index.stats()
            nodes.add_metric([pool.model], stats.nodes)
            blocks.add_metric([pool.model], stats.blocks)
            loaded.add_metric([pool.model], pool.tokenizer is not None)
        yield from (nodes, blocks, loaded)
        yield from self._backends()

    def _backends(self) -> Iterator[Metric]:
        """The encoders of the models whose tokenizers are loaded."""
        in_use = GaugeMetricFamily(
            "kvrouter_tokenizer_backend", "1 for the encoder in use", labels=["model", "backend"]
        )
        checks = CounterMetricFamily(
            "kvrouter_tokenizer_checks",
            "Prompts that were encoded again by the reference, by how that came out",
            labels=["model", "result"],
        )
        resting = GaugeMetricFamily(
            "kvrouter_tokenizer_resting_engines",
            "Engines that are not asked for tokens at present, because they did not answer",
            labels=["model"],
        )
        for pool in self._fleet.pools.values():
            if pool.tokenizer is None:
                continue
            report = pool.tokenizer.report
            resting.add_metric([pool.model], report.resting)
            in_use.add_metric([pool.model, report.name], 1)
            checks.add_metric([pool.model, "equal"], report.checked - report.mismatched)
            checks.add_metric([pool.model, "different"], report.mismatched)
            checks.add_metric([pool.model, "not_encoded"], report.failed)
        yield from (in_use, checks, resting)
        yield from self._token_counts()

    def _token_counts(self) -> Iterator[Metric]:
        counts = CounterMetricFamily(
            "kvrouter_token_counts",
            "Answers whose count of prompt tokens was compared with the router's",
            labels=["model", "result"],
        )
        degraded = GaugeMetricFamily(
            "kvrouter_tokenizer_degraded",
            "1 while the engines of a model count other prompt tokens than the router",
            labels=["model"],
        )
        for pool in self._fleet.pools.values():
            counts.add_metric([pool.model, "equal"], pool.token_counts.equal_total)
            counts.add_metric([pool.model, "different"], pool.token_counts.different_total)
            degraded.add_metric([pool.model], bool(pool.token_counts.problem))
        yield from (counts, degraded)

    def _tokenizing(self) -> Iterator[Metric]:
        prompts = CounterMetricFamily(
            "kvrouter_tokenized_prompts", "Prompts by where they were tokenized", labels=["where"]
        )
        stats = self._tokenizers.stats
        prompts.add_metric(["loop"], stats.inline)
        prompts.add_metric(["thread"], stats.pooled)
        prompts.add_metric(["rejected"], stats.rejected)
        prompts.add_metric(["expired"], stats.expired)
        yield prompts
        yield CounterMetricFamily(
            "kvrouter_tokenize_seconds", "Time spent tokenizing", value=stats.seconds
        )
        yield CounterMetricFamily(
            "kvrouter_tokenize_waited_seconds",
            "Time that prompts spent in the queue before a thread took them",
            value=stats.waited_seconds,
        )
        yield GaugeMetricFamily(
            "kvrouter_tokenize_queued", "Prompts waiting for or in a thread", value=stats.requests
        )


_PROOF_COUNTS: dict[str, tuple[str, Callable[[RankState], float]]] = {
    "compared": ("Responses whose cached tokens were compared", lambda s: s.proof.compared_total),
    "equal": ("Responses with exactly the predicted ones", lambda s: s.proof.equal_total),
    "predicted_tokens": ("Tokens predicted as cached", lambda s: s.proof.predicted_tokens_total),
    "reported_tokens": ("Tokens reported as cached", lambda s: s.proof.reported_tokens_total),
    "over_tokens": ("Predicted and not cached", lambda s: s.proof.over_tokens_total),
    "under_tokens": ("Cached and not predicted", lambda s: s.proof.under_tokens_total),
    "miscounted_prompts": (
        "Prompts whose length the engine counts differently",
        lambda s: s.proof.miscounted_prompts_total,
    ),
}

_EVENT_COUNTS: dict[str, tuple[str, Callable[[RankState], float]]] = {
    "stored_blocks": ("Blocks stored", lambda s: s.counts.stored),
    "removed_blocks": ("Blocks removed", lambda s: s.counts.removed),
    "unknown_removed_blocks": ("Removals of unknown blocks", lambda s: s.counts.unknown_removed),
    "orphan_blocks": ("Blocks with an unknown parent", lambda s: s.counts.orphans),
    "ignored_blocks": ("Blocks that say nothing about prefixes", lambda s: s.counts.ignored),
    "clears": ("Times a rank dropped all blocks", lambda s: s.counts.clears),
}


def _labels(rank: WorkerRank) -> list[str]:
    return [rank.worker, str(rank.dp_rank)]


def _gauge(
    name: str,
    text: str,
    rows: list[_RankRow],
    read: Callable[[WorkerRank, RankState, Pool], float],
) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["worker", "dp_rank"])
    for rank, state, pool in rows:
        family.add_metric(_labels(rank), read(rank, state, pool))
    return family


def _counter(
    name: str, text: str, rows: list[_RankRow], read: Callable[[RankState], float]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=["worker", "dp_rank"])
    for rank, state, _ in rows:
        family.add_metric(_labels(rank), read(state))
    return family


def _verdicts(rows: list[_RankRow]) -> Metric:
    family = GaugeMetricFamily(
        "kvrouter_rank_view",
        "1 for how far the router's view of a rank can be believed",
        labels=["worker", "dp_rank", "view"],
    )
    for rank, state, pool in rows:
        verdict, _ = judge(pool, rank, state)
        for each in Verdict:
            family.add_metric([*_labels(rank), each.value], verdict is each)
    return family


def _stream_metrics(rows: list[_RankRow], now: float) -> Iterator[Metric]:
    """What the event streams of ranks with a source went through."""
    labels = ["worker", "dp_rank"]
    state = GaugeMetricFamily(
        "kvrouter_stream_state", "1 for the state of an event stream", labels=[*labels, "state"]
    )
    age = GaugeMetricFamily(
        "kvrouter_stream_last_batch_age_seconds", "Since the last batch", labels=labels
    )
    lag = GaugeMetricFamily(
        "kvrouter_stream_lag_seconds",
        "Age of the last batch on arrival, by the clocks of engine and router",
        labels=labels,
    )
    resyncs = CounterMetricFamily(
        "kvrouter_stream_resyncs", "Times a rank's blocks were dropped", labels=[*labels, "reason"]
    )
    counts = {
        name: CounterMetricFamily(f"kvrouter_stream_{name}", text, labels=labels)
        for name, text in _STREAM_COUNTS.items()
    }
    for rank, row_state, _ in rows:
        if row_state.source is None:
            continue
        stats = row_state.source.stats
        for each in StreamState:
            state.add_metric([*_labels(rank), each.value], row_state.stream is each)
        if (age_s := stats.last_batch_age_s(now)) is not None:
            age.add_metric(_labels(rank), age_s)
        if stats.lag_s is not None:
            lag.add_metric(_labels(rank), stats.lag_s)
        for reason in ResyncReason:
            resyncs.add_metric([*_labels(rank), reason.value], stats.resyncs[reason])
        for name, family in counts.items():
            family.add_metric(_labels(rank), getattr(stats, name))
    yield from (state, age, lag, resyncs, *counts.values())
    yield _skipped_events(rows)


_STREAM_COUNTS = {
    "batches": "Batches of events applied",
    "events": "Events applied",
    "gaps": "Times batches were missing",
    "replays": "Times missing batches were asked for",
    "duplicates": "Batches that came twice",
    "malformed_frames": "Messages that are no batch",
    "malformed_payloads": "Batches that could not be read",
    "overflows": "Times too many batches waited",
}


def _skipped_events(rows: list[_RankRow]) -> Metric:
    family = CounterMetricFamily(
        "kvrouter_stream_skipped_events",
        "Events that could not be used",
        labels=["worker", "dp_rank", "cause"],
    )
    for rank, state, _ in rows:
        for cause in SkipCause:
            skipped = state.source.stats.skipped[cause] if state.source else 0
            family.add_metric([*_labels(rank), cause.value], skipped)
    return family
