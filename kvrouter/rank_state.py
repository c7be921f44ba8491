"""What is known of one worker rank besides its blocks and its load."""

from typing import Protocol

from events.history import Position
from events.stream import ResyncReason, StreamState, StreamStats
from indexer import Applied
from kvrouter.proof import Proof

RESYNC_PAUSE_S = 60.0
"""Between two requests for a rank's whole history because its events contradict themselves."""


class Source(Protocol):
    """What the fleet needs of an event source."""

    @property
    def stats(self) -> StreamStats:
        """Counters since the start."""

    @property
    def absence(self) -> str:
        """Why there is no connection to the stream, in words."""

    @property
    def warning(self) -> str:
        """Why the events may not be the engine's although they are heard; empty if they should."""

    @property
    def place(self) -> dict[str, str | None]:
        """Where it listens, for people."""

    def position(self) -> Position | None:
        """How far the engine itself is followed, for another router; None where it is not."""

    def expect_blocks(self, now: float) -> None:
        """A request that makes the rank store blocks was sent."""

    def request_resync(self) -> None:
        """Start the rank's view again."""


class EventCounts:
    """Totals of what a rank's events did to the index, in blocks."""

    def __init__(self) -> None:
        self.stored = 0
        self.removed = 0
        self.unknown_removed = 0
        self.orphans = 0
        self.ignored = 0
        self.clears = 0

    def add(self, applied: Applied) -> None:
        """Add what one batch did."""
        self.stored += applied.stored_blocks
        self.removed += applied.removed_blocks
        self.unknown_removed += applied.unknown_removed
        self.orphans += applied.orphans
        self.ignored += sum(applied.ignored.values())
        self.clears += applied.cleared


class RankState:
    """One worker rank. `source` is None while no one listens to its events."""

    def __init__(self) -> None:
        self.source: Source | None = None
        self.stream: StreamState | None = None
        self.last_resync: ResyncReason | None = None
        self.known_since = float("-inf")
        """Since when what is known of it is of the engine that is there: monotonic, in seconds."""
        self.counts = EventCounts()
        self._resync_asked_at = float("-inf")
        self.proof = Proof()

    def begin_anew(self, reason: ResyncReason, now: float) -> None:
        """What was known of the rank is not true any more, nor what was measured by it."""
        self.last_resync = reason
        self.known_since = now
        self.proof.forget()

    def expect_blocks(self, *, since: float, now: float) -> None:
        """A request that was sent at `since` has made the rank store blocks.

        Its events may have come before its response.
        """
        if self.source is not None:
            heard_at = self.source.stats.last_batch_at
            if heard_at is None or heard_at < since:
                self.source.expect_blocks(now)

    def may_ask_for_resync(self, now: float) -> bool:
        """Whether the rank's history may be asked for again; takes the permission if so."""
        if now - self._resync_asked_at < RESYNC_PAUSE_S:
            return False
        self._resync_asked_at = now
        return True

    @property
    def hears_events(self) -> bool:
        """Whether the rank's events can be counted on to confirm a prediction."""
        return self.source is not None and self.stream in _HEARING


_HEARING = frozenset(StreamState) - {StreamState.CONNECTING, StreamState.SILENT}
