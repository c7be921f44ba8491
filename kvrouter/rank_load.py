"""What is known of the load of one worker rank, as a decision sees it. Pure."""

import math

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
        if not self.prefill_rate or self.working_since >= now:
            return self.prefill_tokens
        done = self.prefill_rate * (now - self.working_since)
        return self.prefill_tokens - (min(self.oldest_tokens, done))

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


IDLE = RankLoad()


class Loads(msgspec.Struct, gc=False):
    """The loads of some ranks: as rows, and in the columns that decisions look at each time."""

    each: list[RankLoad]
    active_requests: list[int]
    prefill_tokens: list[int]
    decode_tokens: list[int]
    recency: list[float]
    prefilling: set[int]
    """The positions of those that are known to get on with what waits there."""

    @classmethod
    def of(cls, each: list[RankLoad]) -> "Loads":
        """These loads."""
        return cls(
            each,
            [load.active_requests for load in each],
            [load.prefill_tokens for load in each],
            [load.decode_tokens for load in each],
            [load.recency for load in each],
            {at for at, load in enumerate(each) if load.prefill_rate and load.oldest_tokens},
        )

    def put(self, position: int, load: RankLoad) -> None:
        """The load at this position has changed."""
        self.each[position] = load
        self.active_requests[position] = load.active_requests
        self.prefill_tokens[position] = load.prefill_tokens
        self.decode_tokens[position] = load.decode_tokens
        self.recency[position] = load.recency
        if load.prefill_rate and load.oldest_tokens:
            self.prefilling.add(position)
        else:
            self.prefilling.discard(position)

    def copy(self) -> "Loads":
        """These loads, whatever is put here later."""
        return Loads(
            self.each.copy(),
            self.active_requests.copy(),
            self.prefill_tokens.copy(),
            self.decode_tokens.copy(),
            self.recency.copy(),
            self.prefilling.copy(),
        )

    def joined(self, other: "Loads") -> "Loads":
        """Both, one behind the other."""
        return Loads.of(self.each + other.each)

    def queued_tokens(self, now: float) -> list[float]:
        """Of each rank its `queued_tokens`."""
        queued: list[float] = [*self.prefill_tokens]
        for position in self.prefilling:
            queued[position] = self.each[position].queued_tokens(now)
        return queued
