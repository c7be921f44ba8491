"""How slow each worker rank is, learned from the time that its outputs take. Pure.

How long an engine takes from one output token to the next depends on what it was bought as, and on
how many requests it runs at once. So what a rank takes is held against what the whole fleet takes
at that many requests: a straight line through all that was seen. A rank whose tokens take half as
long again is slow; less than that is chance, prompts between the tokens, or a cache that is fuller.

What is learned of a rank fades, and a slow one that had no output for some time gets a new chance:
a GPU that was throttled, or shared, does not stay slow for ever.
"""

from collections.abc import Sequence

from events import WorkerRank

SLOW_FROM = 1.5
"""A rank is slow from this ratio on."""
FEWEST_TOKENS = 8
"""Shorter outputs say little about the time between tokens."""
HALF_LIFE_S = 60.0
"""How fast what was seen of a rank fades."""
NEW_CHANCE_S = 120.0
"""After so long without an output a slow rank is taken to be like the others."""
DOUBT_S = 5.0
"""A rank is taken to be like the others until it was seen decoding for some times this long."""
_FADE = 0.999
"""For the fleet, per output: the latest thousand count."""
_LEAST_SHARE = 0.3
"""No number of requests is expected to take less than this share of the fleet's mean."""


class _Line:
    """A line through (active requests, seconds per token), weighted by tokens; never falling."""

    def __init__(self) -> None:
        self._tokens = self._x = self._xx = self._y = self._xy = 0.0

    def learn(self, active: int, token_s: float, tokens: int) -> float:
        """Take in what one output took; what would have been expected, in seconds per token."""
        self._tokens = self._tokens * _FADE + tokens
        self._x = self._x * _FADE + tokens * active
        self._xx = self._xx * _FADE + tokens * active * active
        self._y = self._y * _FADE + tokens * token_s
        self._xy = self._xy * _FADE + tokens * active * token_s
        mean_x, mean_y = self._x / self._tokens, self._y / self._tokens
        variance = self._xx / self._tokens - mean_x * mean_x
        covariance = self._xy / self._tokens - mean_x * mean_y
        slope = max(0.0, covariance / variance) if variance > 0 else 0.0
        return max(mean_y + slope * (active - mean_x), _LEAST_SHARE * mean_y)


class _Seen:
    """What the outputs of one rank took, and what was expected, in seconds; both fade."""

    __slots__ = ("at", "expected_s", "taken_s")

    def __init__(self, now: float) -> None:
        self.at = now
        self.taken_s = 0.0
        self.expected_s = 0.0

    def add(self, taken_s: float, expected_s: float, now: float) -> float:
        """Take in one output; the ratio by now."""
        fade = 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        self.at = now
        self.taken_s = self.taken_s * fade + taken_s
        self.expected_s = self.expected_s * fade + expected_s
        return (self.taken_s + DOUBT_S) / (self.expected_s + DOUBT_S)


class Paces:
    """The pace of all ranks."""

    def __init__(self) -> None:
        self._line = _Line()
        self._seen: dict[WorkerRank, _Seen] = {}
        self.slow: dict[WorkerRank, float] = {}
        """The slow ones, with how many times as long their outputs take."""

    def learn(
        self, rank: WorkerRank, *, active: int, tokens: int, taken_s: float, now: float
    ) -> None:
        """An output is over: `tokens` after the first took `taken_s`.

        At its end the rank had so many requests.
        """
        if tokens < FEWEST_TOKENS or taken_s <= 0:
            return
        expected_s = tokens * self._line.learn(active, taken_s / tokens, tokens)
        seen = self._seen.get(rank)
        if seen is None:
            seen = self._seen[rank] = _Seen(now)
        ratio = seen.add(taken_s, expected_s, now)
        if ratio >= SLOW_FROM:
            self.slow[rank] = ratio
        else:
            self.slow.pop(rank, None)
        if self.slow:
            self._give_new_chances(now)

    def forget(self, rank: WorkerRank) -> None:
        """The rank is gone, or to be judged anew."""
        self._seen.pop(rank, None)
        self.slow.pop(rank, None)

    def slowness(self, ranks: Sequence[WorkerRank]) -> list[float]:
        """How many times as long as elsewhere an output takes on each of these ranks.

        1 for those that are not slow; empty if none is, which is most often so.
        """
        slow = self.slow
        return [slow.get(rank, 1.0) for rank in ranks] if slow else []

    def _give_new_chances(self, now: float) -> None:
        for rank in [each for each in self.slow if self._seen[each].at + NEW_CHANCE_S < now]:
            self.forget(rank)
