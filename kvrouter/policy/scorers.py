"""Scorers rate candidates: terms whose sum is the cost; lower is better.

The terms are named, so that a decision can be explained by what it was made from. Like the survey
that they are made from, they stand in columns: one list per term.
"""

from typing import Protocol, TypeAlias

import msgspec

from kvrouter.policy.candidate import Survey

Terms: TypeAlias = tuple[list[float], ...]
"""A column per term, each with an entry per candidate; an empty one if it is 0 for all."""


def row_of(terms: Terms, position: int) -> list[float]:
    """What a candidate's cost is the sum of."""
    return [column[position] if column else 0.0 for column in terms]


class Scorer(Protocol):
    """Rates candidates."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """What the terms are called, each with its unit."""

    def rate(self, survey: Survey) -> Terms:
        """The terms of all candidates, weighted: the sum of its terms is a candidate's cost."""


class BlockCost(msgspec.Struct, frozen=True):
    """`miss_weight * own prefill + queue_weight * queued prefill + decode`, in blocks.

    With both weights equal this is the plain `w * prefill_blocks + decode_blocks`:

        own prefill     tokens of this prompt that the rank does not hold
        queued prefill  booked there and not yet at their first output byte, without the likely
                        progress of the oldest
        decode          distinct active blocks there, with this request's own new ones

    A miss costs more than its own prefill: it makes a second copy, which evicts something that
    another request will miss. That is why its weight is the larger one.

    Prefill is not rounded to blocks: prompts shorter than one still cost their share. Where
    workers have different block sizes, all is counted in blocks of the smallest size.
    """

    miss_weight: float
    queue_weight: float

    @property
    def term_names(self) -> tuple[str, ...]:
        """Each term in blocks, with its weight."""
        return ("own_prefill_blocks", "queued_prefill_blocks", "decode_blocks")

    def rate(self, survey: Survey) -> Terms:
        """The three terms of each candidate."""
        unit = survey.block_unit
        miss, queue = self.miss_weight / unit, self.queue_weight / unit
        return (
            [miss * tokens for tokens in survey.uncached_tokens],
            [queue * tokens for tokens in survey.loads.queued_tokens(survey.now)],
            [
                (active + tokens) / unit
                for active, tokens in zip(
                    survey.loads.decode_tokens, survey.new_tokens(), strict=True
                )
            ],
        )


class TokenCost(msgspec.Struct, frozen=True):
    """What the request waits for, what it costs others, and how full the rank is, in tokens.

        wait       queued prefill, without the likely progress of the oldest
        prefill    tokens of this prompt that the rank does not hold
        copy       `copy_weight` times the tokens that the best holder has and this rank would
                   compute and store a second time for nothing: because they are being computed at
                   this moment and nobody has them yet (a burst of equal prompts), or because the
                   copy evicts something that another request will miss
        requests   `request_tokens` for each active request: it slows every step
        overfill   active tokens, with this request's own new ones, above `fill_limit` of the cache
        slowness   on a rank whose outputs take s times as long as elsewhere, s - 1 times its wait,
                   prefill and requests, and `slow_tokens` for the request's own output; less, the
                   fuller the fleet is, for above `fill_limit` it needs the memory of all

    What nobody has has to be computed wherever the request goes, so it costs no more than itself.
    A copy in a cache with room evicts nothing: so a worker that joins is used at once, and a prefix
    that all want spreads over caches that are large enough for it.
    """

    copy_weight: float
    request_tokens: float
    fill_limit: float
    slow_tokens: float

    @property
    def term_names(self) -> tuple[str, ...]:
        """Each term in tokens of prefill, with its weight."""
        return (
            "wait_tokens",
            "own_prefill_tokens",
            "copy_tokens",
            "active_request_tokens",
            "overfill_tokens",
            "slowness_tokens",
        )

    def rate(self, survey: Survey) -> Terms:
        """The six terms of each candidate."""
        request = self.request_tokens
        wait = survey.loads.queued_tokens(survey.now)
        requests = [request * active for active in survey.loads.active_requests]
        return (
            wait,
            survey.uncached_tokens,
            self._copies(survey),
            requests,
            self._overfill(survey),
            self._slowness(survey, wait, requests),
        )

    def _copies(self, survey: Survey) -> list[float]:
        uncached, weight = survey.uncached_tokens, self.copy_weight
        least = min(uncached)
        if max(uncached) == least:
            return []
        making = _least_without_predictions(survey) - least
        return [
            weight * _wasted(tokens, tokens - least, making, room) if tokens > least else 0.0
            for tokens, room in zip(uncached, survey.rooms(), strict=True)
        ]

    def _overfill(self, survey: Survey) -> list[float]:
        limit, decode_tokens = self.fill_limit, survey.loads.decode_tokens
        if max(decode_tokens) + survey.most_new_tokens <= limit * survey.least_capacity:
            return []
        return [
            max(0.0, active + tokens - limit * capacity)
            for active, tokens, capacity in zip(
                decode_tokens, survey.new_tokens(), survey.capacities(), strict=True
            )
        ]

    def _slowness(self, survey: Survey, wait: list[float], requests: list[float]) -> list[float]:
        if not survey.slowness:
            return []
        tokens = sum(survey.loads.decode_tokens)
        limit = self.fill_limit * sum(survey.capacities())
        share = 1.0 - tokens / limit if tokens < limit else 0.0
        return [
            share * (factor - 1.0) * (queued + own + active + self.slow_tokens)
            for factor, queued, own, active in zip(
                survey.slowness, wait, survey.uncached_tokens, requests, strict=True
            )
        ]


def _wasted(uncached: float, copied: float, in_the_making: float, room: float) -> float:
    """Of `copied` tokens, those in the making and the share of the others that evicts something."""
    made = min(copied, in_the_making)
    evicting = 1.0 - min(1.0, room / uncached)
    return made + evicting * (copied - made)


def _least_without_predictions(survey: Survey) -> float:
    """The uncached tokens of the best holder by what engines have reported."""
    if not any(survey.predicted_blocks):
        return min(survey.uncached_tokens)
    return min(
        [
            tokens + blocks * size
            for tokens, blocks, size in zip(
                survey.uncached_tokens, survey.predicted_blocks, survey.block_sizes, strict=True
            )
        ]
    )


class LastTurn(msgspec.Struct, frozen=True):
    """The rank whose latest booking is longest ago costs least: round robin.

    Turns are numbered over all ranks, so the rotation stays fair when ranks come and go: one that
    joins or returns gets one turn at once and then its place, never a burst to catch up.
    """

    @property
    def term_names(self) -> tuple[str, ...]:
        """A number without a unit; 0 for a rank that never had a turn."""
        return ("last_turn",)

    def rate(self, survey: Survey) -> Terms:
        """The number of each candidate's latest booking."""
        return ([float(load.last_turn) for load in survey.loads.each],)


class ActiveRequests(msgspec.Struct, frozen=True):
    """Requests in flight."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """In requests."""
        return ("active_requests",)

    def rate(self, survey: Survey) -> Terms:
        """The requests in flight of each candidate."""
        return (list(map(float, survey.loads.active_requests)),)


class ActiveTokens(msgspec.Struct, frozen=True):
    """Tokens in flight: still to be prefilled, and held for decoding."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """In tokens."""
        return ("prefill_tokens", "decode_tokens")

    def rate(self, survey: Survey) -> Terms:
        """The tokens in flight of each candidate."""
        return (
            list(map(float, survey.loads.prefill_tokens)),
            list(map(float, survey.loads.decode_tokens)),
        )


class Indifferent(msgspec.Struct, frozen=True):
    """All cost the same."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def rate(self, survey: Survey) -> Terms:
        """No terms."""
        del survey
        return ()
