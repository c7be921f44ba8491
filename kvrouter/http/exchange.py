"""The life of one request: read, tokenize, decide and book, send, relay, settle.

    body -> route (which model) -> prompt (which blocks) -> attempt, attempt, ... -> response

Another worker is tried only until the first byte of a response goes to the client, within the
retry budget; the bytes that go to the engines are the same each time.
"""

import time

import msgspec

from events import WorkerRank
from kvrouter import access
from kvrouter.breaker import RetryBudget
from kvrouter.fleet import Fleet, Route, describe
from kvrouter.http import headers as hdr
from kvrouter.http.attempt import BACKPRESSURE_STATUSES, FAILURE_STATUSES, Attempt
from kvrouter.http.client import Client
from kvrouter.http.descriptors import NONE_LEFT
from kvrouter.http.engine import (
    EngineClient,
    EngineError,
    EngineFailure,
    EngineRequest,
    EngineResponse,
)
from kvrouter.metrics import Metrics
from kvrouter.openai.body import Endpoint
from kvrouter.openai.errors import Fault, RequestError, error_event
from kvrouter.openai.scan import Scan, SseScan, UnaryScan
from kvrouter.prompt import Prompt
from kvrouter.sticky import ResponseOwners


class Job(msgspec.Struct):
    """A request that is ready to be placed."""

    route: Route
    prompt: Prompt
    method: str
    target: str
    headers: hdr.Headers
    body: bytes
    path: str
    """As a metric label: one of a closed set."""
    request_id: str
    explain: bool
    """Whether the client asked which worker answered."""
    pinned: str | None
    """The one worker that can serve it."""
    tried: set[str]
    """The workers that got it."""


class Exchange:
    """Carries jobs out."""

    def __init__(
        self,
        fleet: Fleet,
        engines: EngineClient,
        owners: ResponseOwners,
        metrics: Metrics,
        budget: RetryBudget,
        *,
        max_attempts: int,
    ) -> None:
        self._fleet = fleet
        self._engines = engines
        self._owners = owners
        self._metrics = metrics
        self._budget = budget
        self._max_attempts = max_attempts

    async def run(self, client: Client, job: Job) -> None:
        """Get the client its response. Raises RequestError when there is none to pass on."""
        self._budget.earn()
        while True:
            attempt = self._place(job)
            try:
                with attempt:
                    if await self._try(client, job, attempt):
                        return
            finally:
                self._metrics.attempt_ended(attempt)
                access.note(client.address, job.request_id, job.path, job.route.model, attempt)
                self._fleet.attempt_ended(
                    attempt.placement, attempt.outcome, attempt.usage, job.prompt
                )
            self._metrics.retried()

    def _place(self, job: Job) -> Attempt:
        """Decide and book. Raises RequestError when no worker can take the job."""
        now = time.monotonic()
        candidates = self._candidates(job, now)
        if not candidates:
            raise self._no_worker(job)
        placement = job.route.pool.scheduler.place(job.prompt, candidates, now)
        worker = self._fleet.workers[placement.decision.winner.worker]
        job.tried.add(worker.name)
        attempt = Attempt(worker, placement, time.monotonic)
        self._metrics.decided(placement.decision, job.prompt, attempt.started_at - now)
        return attempt

    def _candidates(self, job: Job, now: float) -> list[WorkerRank]:
        ranks = job.route.pool.candidates(job.route.model, job.tried, now)
        if job.pinned is None:
            return ranks
        return [rank for rank in ranks if rank.worker == job.pinned]

    async def _try(self, client: Client, job: Job, attempt: Attempt) -> bool:
        """Send the job to one worker; True when the client has its response."""
        try:
            response = await self._engines.send(_engine_request(job, attempt))
        except EngineError as error:
            attempt.failed(error)
            return self._unanswered(job, attempt, error)
        try:
            attempt.answered(response.status, response.fields.get("retry-after"))
            if response.status in _RETRIED_STATUSES and self._may_retry(job):
                return False
            first = response.came
            if first is None:
                first = await response.first()
            await self._relay(client, job, attempt, response, first)
        except EngineError as error:
            attempt.failed(error)
            if not client.begun:
                return self._unanswered(job, attempt, error)
            _break_off(client, response, error)
        finally:
            response.close()
        return True

    def _unanswered(self, job: Job, attempt: Attempt, error: EngineError) -> bool:
        """The client has nothing yet: False if another worker is to be tried, else RequestError."""
        if error.failure in _RETRIED_FAILURES and self._may_retry(job):
            return False
        raise _request_error(error, attempt) from error

    async def _relay(
        self, client: Client, job: Job, attempt: Attempt, response: EngineResponse, first: bytes
    ) -> None:
        """Pass the response on: each piece goes to the client at once, then it is looked at."""
        typed = job.path not in _UNTYPED
        scan: Scan = SseScan(typed=typed) if response.is_event_stream else UnaryScan()

        def take(piece: bytes) -> None:
            client.write(piece)
            chunks = scan.feed(piece)
            if chunks:
                attempt.output(chunks)

        headers = _client_headers(job, attempt, response)
        client.begin(response.status, headers, response.content_length)
        if not response.complete:
            client.throttle(response)
        if first:
            attempt.first_byte()
            take(first)
        if not response.complete:
            await response.pass_on(take)
        scan.finish()
        if scan.response_id:
            self._owners.remember(scan.response_id, attempt.worker.name)
        attempt.relayed(failed=scan.failed, usage=scan.usage)
        client.end()

    def _may_retry(self, job: Job) -> bool:
        """Whether another worker may be tried now; takes it from the budget."""
        if len(job.tried) >= self._max_attempts or not self._candidates(job, time.monotonic()):
            return False
        return self._budget.spend()

    def _no_worker(self, job: Job) -> RequestError:
        if job.pinned is not None and job.pinned not in self._fleet.workers:
            return RequestError(Fault.NO_SUCH_RESPONSE, "the worker of this response is gone")
        reasons = describe(job.route.pool.workers.values())
        message = f"no worker for {job.route.model!r} is ready: {reasons}"
        return RequestError(Fault.NO_WORKER, message, retry_after_s=1)


_UNTYPED = (Endpoint.CHAT.value, Endpoint.COMPLETIONS.value)
"""Paths whose events have no type: their streams end with `[DONE]`."""
_RETRIED_STATUSES = (*BACKPRESSURE_STATUSES, *FAILURE_STATUSES)
_RETRIED_FAILURES = (EngineFailure.UNREACHABLE, EngineFailure.LOST)
"""Not a time-out: the engine may be at work on it, and the client has waited long enough."""


def _engine_request(job: Job, attempt: Attempt) -> EngineRequest:
    headers = job.headers
    if len(attempt.worker.ranks) > 1:
        headers = [*headers, (hdr.DP_RANK, str(attempt.placement.decision.winner.dp_rank))]
    return EngineRequest(job.method, attempt.worker.url, job.target, headers, job.body)


def _client_headers(job: Job, attempt: Attempt, response: EngineResponse) -> hdr.Headers:
    headers = hdr.to_client(response.headers)
    if hdr.REQUEST_ID not in response.fields:
        headers.append((hdr.REQUEST_ID, job.request_id))
    if job.explain:
        chosen = attempt.placement.decision.chosen
        cached_tokens = chosen.held_blocks * chosen.block_size
        headers.append((hdr.WORKER, attempt.worker.name))
        headers.append((hdr.DP_RANK, str(chosen.rank.dp_rank)))
        headers.append((hdr.PREDICTED_CACHED_TOKENS, str(cached_tokens)))
    return headers


def _break_off(client: Client, response: EngineResponse, error: EngineError) -> None:
    """Tell a client in the middle of its response that the rest won't come."""
    if response.is_event_stream:
        client.write(error_event(Fault.ENGINE_FAILED, f"the engine was lost: {error}"))
    client.abort()


def _request_error(error: EngineError, attempt: Attempt) -> RequestError:
    name = attempt.worker.name
    match error.failure:
        case EngineFailure.TIMED_OUT:
            return RequestError(Fault.ENGINE_TIMEOUT, f"worker {name} did not answer: {error}")
        case EngineFailure.NO_DESCRIPTORS:
            return RequestError(Fault.OVERLOADED, NONE_LEFT, retry_after_s=1)
        case _:
            return RequestError(
                Fault.ENGINE_FAILED, f"worker {name} failed: {error}", retry_after_s=1
            )
