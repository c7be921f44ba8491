"""The words between a subscription and those who carry out or watch what it decides."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import TypeAlias

from events.model import EventBatch, SkipCause


class StreamState(StrEnum):
    """How well we hear a publisher.

    CONNECTING: no connection. REPLAYING: missed batches were asked for, live ones wait.
    CATCHING_UP: the waiting ones are being applied. LIVE: batches are applied as they come.
    DEGRADED: likewise, but missed batches could not be asked for (no replay socket, or it does not
    answer). SILENT: connected, but nothing comes although it should.
    """

    CONNECTING = auto()
    REPLAYING = auto()
    CATCHING_UP = auto()
    LIVE = auto()
    DEGRADED = auto()
    SILENT = auto()


class ResyncReason(StrEnum):
    """Why a rank's blocks had to be dropped."""

    GAP = auto()  # batches were missed and nobody can be asked for them
    REPLAY_LATE = auto()  # the replay began after the first missing batch
    REPLAY_HOLE = auto()  # the replay left batches out
    REPLAY_FAILED = auto()  # the replay socket did not answer
    RESTART = auto()  # another engine process answers at this address
    MALFORMED = auto()  # a batch could not be read
    REQUESTED = auto()  # the index asked for it


@dataclass(frozen=True)
class Deliver:
    """Apply this batch."""

    seqno: int
    batch: EventBatch
    replayed: bool


@dataclass(frozen=True)
class Resync:
    """Drop the rank's blocks, now and before any later command."""

    reason: ResyncReason
    detail: str


@dataclass(frozen=True)
class RequestReplay:
    """Ask for the batches from `start` on and feed the replies with this `attempt`.

    Replies to earlier attempts are of no use any more.
    """

    start: int
    attempt: int


@dataclass(frozen=True)
class CloseReplay:
    """No replies are wanted any more."""


@dataclass(frozen=True)
class StateChanged:
    """The stream's state is another one."""

    state: StreamState


@dataclass(frozen=True)
class Complain:
    """The publisher sent something that it should not have sent; worth a (rate-limited) line."""

    detail: str


Command: TypeAlias = Deliver | Resync | RequestReplay | CloseReplay | StateChanged | Complain


@dataclass
class StreamStats:
    """Counters of one stream since its start; read-only for others.

    `last_batch_at` is the monotonic time of the last live batch, `lag_s` how old it was on arrival
    by the wall clocks of the two machines (the shell sets it). `cold`: blocks that the engine holds
    may be unknown to us, because of a resync.
    """

    batches: int = 0
    events: int = 0
    skipped: Counter[SkipCause] = field(default_factory=Counter)
    duplicates: int = 0
    gaps: int = 0
    replays: int = 0
    resyncs: Counter[ResyncReason] = field(default_factory=Counter)
    malformed_frames: int = 0
    malformed_payloads: int = 0
    foreign_dp_rank: int = 0
    overflows: int = 0
    last_seqno: int | None = None
    last_batch_at: float | None = None
    lag_s: float | None = None
    cold: bool = False

    def last_batch_age_s(self, now: float) -> float | None:
        """Seconds since the last live batch; None before the first."""
        return None if self.last_batch_at is None else now - self.last_batch_at


@dataclass(frozen=True)
class SubscriptionSettings:
    """How patient a subscription is, and how much it keeps.

    With `strict_dp_rank` a batch that names another dp rank than `dp_rank` is not applied; without
    it, the publisher that we asked for is believed more than what it says (an engine behind an
    external load balancer counts its ranks over all of them).
    """

    replay: bool = True
    replay_timeout_s: float = 5.0
    replay_total_s: float = 120.0
    replay_tries: int = 3
    replay_pause_s: float = 30.0
    replay_max_pause_s: float = 600.0
    silent_after_s: float = 30.0
    max_waiting_batches: int = 20_000
    max_waiting_bytes: int = 64 * 2**20
    remembered_batches: int = 256
    overlap_batches: int = 8
    work_portion: int = 32
    dp_rank: int = 0
    strict_dp_rank: bool = False
