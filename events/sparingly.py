"""Saying something seldom that happens often. Pure."""

import math

TOLD_AT_ONCE = 6
"""Of what is usual a few times in a row, such as the steps of a restart."""


class Sparingly:
    """Allows so many lines at once, and then one in `every_s` seconds."""

    def __init__(self, every_s: float, *, burst: int = 1) -> None:
        self._every_s = every_s
        self._burst = float(burst)
        self._left = 0.0
        self._at = -math.inf
        self._unsaid = 0

    def due(self, now: float) -> int:
        """It happened; how often since it was last said, or 0 if it is not to be said now."""
        self._unsaid += 1
        self._left = min(self._burst, self._left + (now - self._at) / self._every_s)
        self._at = now
        if self._left < 1.0:
            return 0
        self._left -= 1.0
        times, self._unsaid = self._unsaid, 0
        return times
