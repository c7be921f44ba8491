"""One placement of a request on a worker, from its booking to its settlement.

Whatever way it ends (answered, refused, the engine lost, the client gone, our own bug), leaving
the context settles the lease and tells the worker's breaker, once.
"""

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvrouter.breaker import CLOSED, Answer
from kvrouter.http.engine import EngineError, EngineFailure
from kvrouter.http.headers import retry_after_s
from kvrouter.load import Outcome
from kvrouter.openai.answer import Usage
from kvrouter.openai.errors import RequestError
from kvrouter.scheduler import Placement
from kvrouter.workers import Worker

log = logging.getLogger(__name__)

OK, CLIENT_GONE = Outcome.OK, Outcome.CLIENT_GONE
SUCCESS = Answer.SUCCESS
"""By names of their own: looking one up in its class costs as much as a call."""

BACKPRESSURE_STATUSES = (429, 503)
FIRST_ERROR_STATUS = 400
FAILURE_STATUSES = (500, 502, 504)
"""Of the 5xx, those that say that the engine is ill and not that it won't do this."""


class Attempt:
    """One request on one worker rank."""

    def __init__(self, worker: Worker, placement: Placement, clock: Callable[[], float]) -> None:
        self.worker = worker
        self.placement = placement
        self.started_at = clock()
        self.first_byte_at: float | None = None
        self.outcome = CLIENT_GONE
        """How it would end if the client left now; every other end is set when it is known."""
        self.usage: Usage | None = None
        self._clock = clock
        self._lease = placement.lease
        self._breaker_told = False
        self._begun = False
        """Whether the head of a good answer is here."""

    def __enter__(self) -> Self:
        if self.worker.breaker.state is not CLOSED:
            self.worker.breaker.sending(self.started_at)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        now = self._clock()
        if isinstance(error, Exception) and not isinstance(error, RequestError):
            self.outcome = Outcome.INTERNAL_ERROR
        if not self._breaker_told:
            self.worker.breaker.abandoned(now)
        self._lease.settle(self.outcome, now)

    def answered(self, status: int, retry_after: str | None) -> None:
        """The head of a response is here; it is what the breaker learns from."""
        breaker = self.worker.breaker
        if status < FIRST_ERROR_STATUS:
            self._breaker_told = self._begun = True
            breaker.record(SUCCESS, self._clock())
        elif status in FAILURE_STATUSES:
            self._fail(Outcome.ENGINE_FAILED)
        elif status in BACKPRESSURE_STATUSES:
            self._breaker_told = True
            self.outcome = Outcome.BACKPRESSURE
            pause_s = retry_after_s(retry_after)
            breaker.record(Answer.BACKPRESSURE, self._clock(), retry_after_s=pause_s)
        else:
            self._breaker_told = True
            self.outcome = Outcome.REFUSED
            breaker.record(SUCCESS, self._clock())

    def first_byte(self) -> None:
        """The first byte of the body is here: the prefill is done, unless it tells of an error."""
        if self.first_byte_at is None and self.outcome is CLIENT_GONE:
            self.first_byte_at = self._clock()
            self._lease.prefill_done(self.first_byte_at)

    def output(self, tokens: int) -> None:
        """So many more output tokens have passed."""
        if self.first_byte_at is not None:
            self._lease.add_output_tokens(tokens, self.first_byte_at)

    def relayed(self, *, failed: bool, usage: Usage | None) -> None:
        """The whole response has been passed on; `failed` if the engine said so within it."""
        self.usage = usage
        if failed:
            self._fail(Outcome.ENGINE_FAILED)
        elif self.outcome is CLIENT_GONE:
            self.outcome = OK
            self.worker.breaker.ended(self._clock(), whole=True)

    def failed(self, error: EngineError) -> None:
        """No response, or not all of it."""
        if error.failure is EngineFailure.NO_DESCRIPTORS:
            self.outcome = Outcome.INTERNAL_ERROR
        elif error.failure is EngineFailure.TIMED_OUT:
            self._fail(Outcome.TIMED_OUT)
        else:
            self._fail(Outcome.ENGINE_FAILED)

    def _fail(self, outcome: Outcome) -> None:
        self.outcome = outcome
        breaker, now = self.worker.breaker, self._clock()
        opened = breaker.opened_total
        if self._begun:
            breaker.ended(now, whole=False)
        else:
            self._breaker_told = True
            breaker.record(Answer.FAILURE, now)
        if breaker.opened_total > opened:
            log.warning("worker %s: breaker open, its requests fail", self.worker.name)
