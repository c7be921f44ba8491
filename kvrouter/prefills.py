"""What a rank has to prefill, oldest first, and how fast it was seen to do that. Pure."""

import math
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

RATE_HALF_LIFE_S = 30.0
"""How fast a learned prefill rate forgets, in seconds in which the rank had prefills waiting. Long
enough to average over some dozens of prompts, short enough to notice within a minute that a GPU
throttles."""

K = TypeVar("K", bound=Hashable)


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A request without a first output byte."""

    tokens: int
    booked_at: float


NOBODY = Waiting(0, math.inf)


class Prefills(Generic[K]):
    """The requests of one rank that wait for their first output byte, by whatever names them.

    Only those of all routers together show how fast a rank is: who sees a third of them takes it
    for three times as slow.
    """

    __slots__ = (
        *("_prefilled_s", "_prefilled_tokens", "oldest", "rate", "tokens", "waiting"),
        "working_since",
    )

    def __init__(self) -> None:
        self.waiting: OrderedDict[K, Waiting] = OrderedDict()
        """Oldest first (its first is found in O(1))."""
        self.oldest = NOBODY
        """The request that has waited longest."""
        self.tokens = 0
        """Of all that wait."""
        self.working_since = 0.0
        """When the rank can have begun with the oldest."""
        self.rate = 0.0
        """Tokens per second; 0 if not known yet."""
        self._prefilled_tokens = 0.0
        self._prefilled_s = 0.0

    def add(self, name: K, tokens: int, booked_at: float) -> None:
        """A request is booked."""
        waiting = Waiting(tokens, booked_at)
        if not self.waiting:
            self.oldest = waiting
            self.working_since = booked_at
        self.waiting[name] = waiting
        self.tokens += tokens

    def done(self, name: K, now: float) -> int:
        """Its first output byte is here; its tokens, 0 if it did not wait.

        Tokens and time are summed, so prefills that an engine batches, and which end together,
        count as one.
        """
        tokens = self._remove(name)
        if tokens:
            elapsed_s = max(0.0, now - self.working_since)
            decay = 0.5 ** (elapsed_s / RATE_HALF_LIFE_S)
            self._prefilled_tokens = self._prefilled_tokens * decay + tokens
            self._prefilled_s = self._prefilled_s * decay + elapsed_s
            if self._prefilled_s > 0:
                self.rate = self._prefilled_tokens / self._prefilled_s
            self.working_since = now
        return tokens

    def drop(self, name: K, now: float) -> int:
        """It waits no more, without an output; its tokens, 0 if it did not wait.

        What was spent on it says nothing about the next one.
        """
        if next(iter(self.waiting), None) == name:
            self.working_since = now
        return self._remove(name)

    def _remove(self, name: K) -> int:
        waited = self.waiting.pop(name, NOBODY)
        if waited is self.oldest:
            self.oldest = next(iter(self.waiting.values()), NOBODY)
        self.tokens -= waited.tokens
        return waited.tokens
