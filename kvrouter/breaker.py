"""A circuit breaker per worker: whether requests may be sent there. Pure.

Three outcomes, because a full engine is not a broken one: an answer is a SUCCESS whatever its
4xx says, 429 and 503 are BACKPRESSURE, and a lost connection or another 5xx is a FAILURE.

    CLOSED     requests flow; `failures` FAILUREs in a row open it, and as many answers in a row
               that begin well and break off
    OPEN       no request, until `open_s` have passed (doubled per failed trial, up to a limit)
    HALF_OPEN  one trial request is under way; its outcome decides

Backpressure never counts against a worker, and it ends a trial well: the engine is there. But it
makes the worker *backing off* for as long as its Retry-After asks, which a caller treats as a
wish, not as a ban (when all workers back off, the least bad one still gets the request).
"""

from enum import StrEnum

from kvrouter.config import BreakerConfig


class BreakerState(StrEnum):
    """Whether requests flow to a worker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Answer(StrEnum):
    """What one attempt says about the worker's health."""

    SUCCESS = "success"
    BACKPRESSURE = "backpressure"
    FAILURE = "failure"


CLOSED, OPEN, HALF_OPEN = BreakerState
FAILURE, BACKPRESSURE = Answer.FAILURE, Answer.BACKPRESSURE
"""By names of their own: looking one up in its class costs as much as a call."""


class Breaker:
    """The state of one worker's breaker."""

    def __init__(self, settings: BreakerConfig) -> None:
        self._settings = settings
        self.state: BreakerState = CLOSED
        """The present one; OPEN lasts until a trial begins, even when its time is over."""
        self._failures_in_row = 0
        self._broken_off_in_row = 0
        self._open_s = settings.open_s
        self._retry_at = 0.0
        self.backs_off_until = 0.0
        """The worker asked to be left alone until then."""
        self.opened_total = 0

    def allows(self, now: float) -> bool:
        """Whether a request may be sent at `now`."""
        if self.state is CLOSED:
            return True
        return self.state is OPEN and now >= self._retry_at

    def sending(self, now: float) -> None:
        """A request is about to be sent; after OPEN's time it is the trial.

        A trial whose answer never comes back (its client left first) must not close the door for
        good, so HALF_OPEN turns into OPEN again by the same clock.
        """
        if self.state is OPEN and now >= self._retry_at:
            self.state = HALF_OPEN

    def abandoned(self, now: float) -> None:
        """The attempt ended without saying anything about the worker (its client left)."""
        if self.state is HALF_OPEN:
            self.state = OPEN
            self._retry_at = now

    def record(self, answer: Answer, now: float, *, retry_after_s: float | None = None) -> None:
        """Take in how an attempt ended. `retry_after_s` comes with BACKPRESSURE."""
        if answer is FAILURE:
            self._record_failure(now)
            return
        self.state = CLOSED
        self._failures_in_row = 0
        self._open_s = self._settings.open_s
        if answer is BACKPRESSURE:
            wait_s = self._settings.backoff_s if retry_after_s is None else retry_after_s
            self.backs_off_until = now + min(wait_s, self._settings.max_open_s)

    def ended(self, now: float, *, whole: bool) -> None:
        """An answer that was a SUCCESS when it began has come to its end, or broken off.

        Counted apart: that others begin says nothing about how they end, and that old ones end
        well says nothing about new ones.
        """
        self._broken_off_in_row = 0 if whole else self._broken_off_in_row + 1
        if self.state is CLOSED and self._broken_off_in_row >= self._settings.failures:
            self._open(now)

    def _record_failure(self, now: float) -> None:
        self._failures_in_row += 1
        if self.state is OPEN:
            return  # a request that was sent before it opened
        if self.state is HALF_OPEN:
            self._open_s = min(2 * self._open_s, self._settings.max_open_s)
            self._open(now)
        elif self._failures_in_row >= self._settings.failures:
            self._open(now)

    def _open(self, now: float) -> None:
        self.state = OPEN
        self._retry_at = now + self._open_s
        self.opened_total += 1


class RetryBudget:
    """How many retries the whole router may still make. Pure.

    Each request earns `ratio` of a retry, up to `reserve`; without it, an outage of one worker
    would multiply the load on the others just when they need it least.
    """

    def __init__(self, ratio: float, reserve: float) -> None:
        self._ratio = ratio
        self._reserve = reserve
        self._left = reserve

    def earn(self) -> None:
        """A request came in."""
        self._left = min(self._reserve, self._left + self._ratio)

    def spend(self) -> bool:
        """Take one retry; False when none is left."""
        if self._left < 1:
            return False
        self._left -= 1
        return True
