"""What is known of the load of one worker rank, as a decision sees it. Pure."""

import math
from collections.abc import Sequence

import msgspec

RECENT_HALF_LIFE_S = 10.0
"""How fast recent tokens fade. Longer than the pauses of one client's sequential requests, which
must find a difference; much shorter than what makes a rank that was busy long ago look busy."""


class RankLoad(msgspec.Struct, frozen=True, gc=False):
    """The load of one rank since its last change; what else depends on time asks for `now`.

    `block_size` is that of its latest booking.
    """

    active_requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    last_turn: int = 0
    """The number of its latest booking among those of all ranks; 0 if it never had one."""
    block_size: int = 1
    prefill_rate: float = 0.0
    """Tokens per second that it was seen to prefill while requests waited; 0 if not known yet."""
    oldest_tokens: int = 0
    """The prefill tokens of the oldest request without a first output byte; 0 if there is none."""
    oldest_at: float = math.inf
    """When that request was booked."""
    working_since: float = math.inf
    """When the rank can have begun with it."""
    dispatched_tokens: float = 0.0
    """Uncached tokens of its bookings, decayed, at the time of the latest one."""
    dispatched_at: float = 0.0
    half_life_s: float = RECENT_HALF_LIFE_S
    recency: float = -math.inf
    """Orders ranks by their recent tokens, at whatever time: see `recency`."""

    @property
    def decode_blocks(self) -> float:
        """`decode_tokens` in blocks; whole ones unless the rank's block size has changed."""
        return self.decode_tokens / self.block_size

    def queued_tokens(self, now: float) -> float:
        """`prefill_tokens` without the likely progress of the oldest of them."""
        return queued_tokens([self], now)[0]

    def recent_tokens(self, now: float) -> float:
        """Uncached tokens of its latest bookings, decayed."""
        return decayed(self.dispatched_tokens, now - self.dispatched_at, self.half_life_s)

    def oldest_prefill_age_s(self, now: float) -> float:
        """Since the oldest request without a first output byte was booked; 0 if none."""
        return max(0.0, now - self.oldest_at)


def decayed(tokens: float, age_s: float, half_life_s: float) -> float:
    """What is left of a sum after so long."""
    return tokens * 0.5 ** (age_s / half_life_s) if age_s > 0 else tokens


def recency(tokens: float, at: float, half_life_s: float) -> float:
    """Where a sum that decays from `tokens` at this time stands among others of its half-life.

    Decay keeps their order, so it can be found once and compared at any later time.
    """
    return math.log2(tokens) + at / half_life_s if tokens > 0 else -math.inf


def queued_tokens(loads: Sequence[RankLoad], now: float) -> list[float]:
    """For each rank its prefill tokens without the likely progress of the oldest."""
    return [
        load.prefill_tokens
        if not load.prefill_rate or load.working_since >= now
        else load.prefill_tokens - done
        if (done := load.prefill_rate * (now - load.working_since)) < load.oldest_tokens
        else load.prefill_tokens - load.oldest_tokens
        for load in loads
    ]


IDLE = RankLoad()
