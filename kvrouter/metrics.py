"""What is counted while requests pass.

Labels are closed sets: known paths, configured workers, enums. A model name or anything else that
a client can choose is never a label.
"""

from prometheus_client import CollectorRegistry

from kvrouter.counts import CountsCollector, Distribution, Tally
from kvrouter.http.attempt import Attempt
from kvrouter.openai.errors import Fault
from kvrouter.policy import Decision
from kvrouter.prompt import Prompt

_LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 600)
_DECISION_BUCKETS_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2)
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The router's own counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Tally(
            "kvrouter_requests",
            "Requests of clients, by the router's own verdict (engines' answers: attempts)",
            ["path", "fault"],
        )
        self._duration = Distribution(
            "kvrouter_request_duration_seconds",
            "From the head of a request to the end of its response",
            _LATENCY_BUCKETS_S,
            ["path"],
        )
        self._attempts = Tally(
            "kvrouter_attempts",
            "Requests sent to workers, by how they ended",
            ["worker", "outcome"],
        )
        self._first_byte = Distribution(
            "kvrouter_time_to_first_byte_seconds",
            "From a decision to the first byte of the engine's answer",
            _LATENCY_BUCKETS_S,
            ["worker"],
        )
        self._retries = Tally("kvrouter_retries", "Attempts on another worker")
        self._decision = Distribution(
            "kvrouter_decision_seconds",
            "Time to rate all candidates, choose one and book",
            _DECISION_BUCKETS_S,
        )
        self._prompts = Tally(
            "kvrouter_prompts",
            "Placed prompts, by how far the router's tokens can be trusted",
            ["fidelity"],
        )
        self._prompt_tokens = Tally("kvrouter_prompt_tokens", "Tokens of placed prompts")
        self._overlap_tokens = Tally(
            "kvrouter_overlap_tokens",
            "Tokens of placed prompts that the chosen rank was expected to hold",
        )
        self._sent_as_ids = Tally(
            "kvrouter_prompts_sent_as_ids",
            "Prompts whose engine got token ids in place of the text",
        )
        self.loop_lag = Distribution(
            "kvrouter_loop_lag_seconds", "How late the event loop ran a timer", _LAG_BUCKETS_S
        )
        self.registry.register(
            CountsCollector(
                [
                    self._requests,
                    self._duration,
                    self._attempts,
                    self._first_byte,
                    self._retries,
                    self._decision,
                    self._prompts,
                    self._prompt_tokens,
                    self._overlap_tokens,
                    self._sent_as_ids,
                    self.loop_lag,
                ]
            )
        )

    def request_ended(self, path: str, fault: Fault | None, seconds: float) -> None:
        """A client's request is over; `fault` is the router's own error, if that was the answer."""
        self._requests.counts[path, "none" if fault is None else fault.label] += 1
        self._duration.rows[path,].observe(seconds)

    def unread(self, fault: Fault) -> None:
        """What a client sent could not be read as a request."""
        self._requests.counts["unread", fault.label] += 1

    def decided(self, decision: Decision, prompt: Prompt, seconds: float) -> None:
        """A worker rank was chosen."""
        self._decision.rows[()].observe(seconds)
        self._prompts.counts[prompt.fidelity,] += 1
        self._prompt_tokens.counts[()] += prompt.prompt_tokens
        chosen = decision.chosen
        self._overlap_tokens.counts[()] += chosen.held_blocks * chosen.block_size

    def attempt_ended(self, attempt: Attempt) -> None:
        """A request to a worker is over."""
        worker = attempt.worker.name
        self._attempts.counts[worker, attempt.outcome] += 1
        if attempt.first_byte_at is not None:
            self._first_byte.rows[worker,].observe(attempt.first_byte_at - attempt.started_at)

    def ids_sent(self) -> None:
        """A prompt goes to its engine as token ids."""
        self._sent_as_ids.counts[()] += 1

    def retried(self) -> None:
        """Another worker is tried."""
        self._retries.counts[()] += 1
