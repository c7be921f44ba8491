"""Scorers rate candidates: terms whose sum is the cost; lower is better.

The terms are named, so that a decision can be explained by what it was made from. A scorer sees
all candidates at once: a term may depend on what the others have.
"""

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import msgspec

from kvrouter.policy.candidate import Candidate

Terms: TypeAlias = tuple[float, ...]


class Scorer(Protocol):
    """Rates candidates."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """What the terms are called, each with its unit."""

    def rate(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """The terms of each candidate, weighted: their sum is its cost."""


class KvCost(msgspec.Struct, frozen=True):
    """`cost = miss_weight * own prefill + queue_weight * queued prefill + decode`, in blocks.

    With both weights equal this is the plain `w * prefill_blocks + decode_blocks`:

        own prefill     tokens of this prompt that the rank does not hold
        queued prefill  booked there and not yet at their first output byte, without what they
                        compute of this very prompt and nobody holds yet. That part has to be
                        waited for on every rank, so it would only hide that going elsewhere
                        means to compute it twice: of 16 equal prompts within milliseconds each
                        would look best on a rank of its own.
        decode          distinct active blocks there, with this request's own new ones

    Prefill is not rounded to blocks: prompts shorter than one still cost their share. Where
    workers have different block sizes, all is counted in blocks of the smallest size.
    """

    miss_weight: float
    queue_weight: float

    @property
    def term_names(self) -> tuple[str, ...]:
        """Each term in blocks, with its weight."""
        return ("own_prefill_blocks", "queued_prefill_blocks", "decode_blocks")

    def rate(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """The three terms of each candidate."""
        unit = min([each.block_size for each in candidates])
        miss = self.miss_weight / unit
        queue = self.queue_weight / unit
        return [
            (
                miss * each.uncached_tokens,
                queue * (each.load.prefill_tokens - each.awaited_tokens),
                (each.load.decode_tokens + each.new_tokens) / unit,
            )
            for each in candidates
        ]


class LastTurn(msgspec.Struct, frozen=True):
    """The rank whose latest booking is longest ago costs least: round robin.

    Turns are numbered over all ranks, so the rotation stays fair when ranks come and go: one that
    joins or returns gets one turn at once and then its place, never a burst to catch up.
    """

    @property
    def term_names(self) -> tuple[str, ...]:
        """A number without a unit; 0 for a rank that never had a turn."""
        return ("last_turn",)

    def rate(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """The number of each candidate's latest booking."""
        return [(float(each.load.last_turn),) for each in candidates]


class ActiveRequests(msgspec.Struct, frozen=True):
    """Requests in flight."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """In requests."""
        return ("active_requests",)

    def rate(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """The requests in flight of each candidate."""
        return [(float(each.load.active_requests),) for each in candidates]


class ActiveTokens(msgspec.Struct, frozen=True):
    """Tokens in flight: still to be prefilled, and held for decoding."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """In tokens."""
        return ("prefill_tokens", "decode_tokens")

    def rate(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """The tokens in flight of each candidate."""
        return [
            (float(each.load.prefill_tokens), float(each.load.decode_tokens)) for each in candidates
        ]


class Indifferent(msgspec.Struct, frozen=True):
    """All cost the same."""

    @property
    def term_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def rate(self, candidates: Sequence[Candidate]) -> list[Terms]:
        """No terms."""
        return [()] * len(candidates)
