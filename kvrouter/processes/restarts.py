"""When a process that ended by itself starts again. Pure.

At once after a long life, then later each time: a process that cannot live must not take the
machine from those that can.
"""

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
LONG_LIFE_S = 60.0
"""After that its end is not a part of the same trouble."""


class Restarts:
    """The ends of one process so far."""

    def __init__(self) -> None:
        self.count = 0
        self._pause_s = FIRST_PAUSE_S

    def ended(self, lived_s: float) -> float:
        """It ended after so long; gives how long to wait, in seconds."""
        self.count += 1
        if lived_s >= LONG_LIFE_S:
            self._pause_s = FIRST_PAUSE_S
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s
