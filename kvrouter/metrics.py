"""What is counted while requests pass: Prometheus counters and histograms.

Labels are closed sets: known paths, configured workers, enums. A model name or anything else that
a client can choose is never a label.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from kvrouter.http.attempt import Attempt
from kvrouter.openai.errors import Fault
from kvrouter.policy import Decision
from kvrouter.prompt import Prompt

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_DECISION_BUCKETS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Observed:
    """How one request is going."""

    __slots__ = ("fault",)

    def __init__(self) -> None:
        self.fault: Fault | None = None
        """The router's own error, if that is the response."""


class Metrics:
    """The router's own counts."""

    def __init__(self) -> None:
        # They double the series and nobody reads them.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "kvrouter_requests",
            "Requests of clients, by the router's own verdict (engines' answers: attempts)",
            ["path", "fault"],
            registry=self.registry,
        )
        self._duration = Histogram(
            "kvrouter_request_duration_seconds",
            "From the head of a request to the end of its response",
            ["path"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._attempts = Counter(
            "kvrouter_attempts",
            "Requests sent to workers, by how they ended",
            ["worker", "outcome"],
            registry=self.registry,
        )
        self._first_byte = Histogram(
            "kvrouter_time_to_first_byte_seconds",
            "From a decision to the first byte of the engine's answer",
            ["worker"],
            buckets=_LATENCY_BUCKETS_S,
            registry=self.registry,
        )
        self._retries = Counter(
            "kvrouter_retries", "Attempts on another worker", registry=self.registry
        )
        self._decision = Histogram(
            "kvrouter_decision_seconds",
            "Time to rate all candidates, choose one and book",
            buckets=_DECISION_BUCKETS_S,
            registry=self.registry,
        )
        self._prompts = Counter(
            "kvrouter_prompts",
            "Placed prompts, by how far the router's tokens can be trusted",
            ["fidelity"],
            registry=self.registry,
        )
        self._prompt_tokens = Counter(
            "kvrouter_prompt_tokens", "Tokens of placed prompts", registry=self.registry
        )
        self._overlap_tokens = Counter(
            "kvrouter_overlap_tokens",
            "Tokens of placed prompts that the chosen rank was expected to hold",
            registry=self.registry,
        )
        self._sent_as_ids = Counter(
            "kvrouter_prompts_sent_as_ids",
            "Prompts whose engine got token ids in place of the text",
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "kvrouter_loop_lag_seconds",
            "How late the event loop ran a timer",
            buckets=_LAG_BUCKETS_S,
            registry=self.registry,
        )

    @contextmanager
    def request(self, path: str) -> Iterator[Observed]:
        """Count a request of a client from here to the end of the block."""
        started_at = time.perf_counter()
        observed = Observed()
        try:
            yield observed
        finally:
            fault = "none" if observed.fault is None else observed.fault.name.lower()
            self._requests.labels(path, fault).inc()
            self._duration.labels(path).observe(time.perf_counter() - started_at)

    def decided(self, decision: Decision, prompt: Prompt, seconds: float) -> None:
        """A worker rank was chosen."""
        self._decision.observe(seconds)
        self._prompts.labels(prompt.fidelity.value).inc()
        self._prompt_tokens.inc(prompt.prompt_tokens)
        chosen = decision.chosen
        self._overlap_tokens.inc(chosen.held_blocks * chosen.block_size)

    def attempt_ended(self, attempt: Attempt) -> None:
        """A request to a worker is over."""
        self._attempts.labels(attempt.worker.name, attempt.outcome.value).inc()
        if attempt.first_byte_at is not None:
            waited_s = attempt.first_byte_at - attempt.started_at
            self._first_byte.labels(attempt.worker.name).observe(waited_s)

    def ids_sent(self) -> None:
        """A prompt goes to its engine as token ids."""
        self._sent_as_ids.inc()

    def retried(self) -> None:
        """Another worker is tried."""
        self._retries.inc()
