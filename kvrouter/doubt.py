"""Whether an engine may be another one than the one that was learned, and when to ask it. Pure.

An engine that restarts may be away for less than probes notice, and be back with fewer ranks,
another model or another cache. What shows of that proves nothing: the connection to its events
comes or goes, a stream begins anew, a request or a probe fails. So the engine is asked again, and
nothing happens if it is what it was.
"""

from events.stream import ResyncReason, StreamState

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 60.0
"""Before an engine that has not answered all is asked once more."""


class Doubt:
    """About one engine. `now` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._is_open = False
        self._not_before = float("-inf")
        self._pause_s = FIRST_PAUSE_S
        self._heard: dict[int, bool] = {}
        """Whether there is a connection to a rank's stream, as far as that is known."""

    def arise(self) -> None:
        """Something happened that also happens when another engine takes an address."""
        self._is_open = True
        self._not_before = float("-inf")

    def stream_changed(self, dp_rank: int, state: StreamState) -> None:
        """The state of a rank's stream is another one.

        That something is asked for says nothing: relays that may not be there are asked, too.
        """
        is_heard = state is not StreamState.CONNECTING
        if state is not StreamState.REPLAYING and is_heard != self._heard.get(dp_rank, False):
            self._heard[dp_rank] = is_heard
            self.arise()

    def resynced(self, reason: ResyncReason) -> None:
        """What was known of a rank's blocks is not true any more."""
        if reason is ResyncReason.RESTART:
            self.arise()

    def calls_for_a_look(self, now: float) -> bool:
        """Whether the engine is to be asked what it is."""
        return self._is_open and now >= self._not_before

    def looking(self) -> None:
        """The engine is being asked; what arises from here on calls for another look."""
        self._is_open = False

    def looked(self, now: float, *, answered_all: bool) -> None:
        """It was asked. What it left open is asked again, after a pause that grows."""
        if answered_all:
            self._pause_s = FIRST_PAUSE_S
        elif not self._is_open:
            self.arise()
            self._not_before = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
