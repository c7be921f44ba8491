"""The telling side: a replica's own bookings, as the messages that it owes the others.

Told of each booking as it changes, it keeps what has to be said until `flush` is called, which the
shell does once per turn of its loop: a burst costs one message.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from events.model import WorkerRank
from events.replica.messages import (
    Beat,
    Book,
    Booking,
    Bye,
    Grow,
    Op,
    Ops,
    PrefillDone,
    Settle,
    State,
)
from events.replica.sampling import HASH_BYTES, blocks_of, sample, samples_within


class LedgerSettings(msgspec.Struct, frozen=True):
    """How coarse output is told, and how much one message holds.

    Output is told when it has grown by `grow_blocks` since the last time: the others see a stream
    too small by half of that on average. `lately_s` is how long a settled booking is of interest to
    a replica that starts, `max_lately` how many of them are kept.
    """

    grow_blocks: int = 8
    max_ops: int = 256
    part_bookings: int = 128
    lately_s: float = 10.0
    max_lately: int = 1024


class _Told:
    """An own booking and what the others know of it."""

    __slots__ = ("booked_at", "booking", "own_blocks", "sampled_blocks")

    def __init__(self, booking: Booking, sampled_blocks: int, booked_at: float) -> None:
        self.booking = booking
        self.sampled_blocks = sampled_blocks
        self.own_blocks = booking.own_blocks
        self.booked_at = booked_at


class Ledger:
    """The own bookings of `replica` in this `epoch`."""

    def __init__(self, replica: str, epoch: int, settings: LedgerSettings | None = None) -> None:
        self.replica = replica
        self.epoch = epoch
        self.seqno = 0
        self._settings = settings or LedgerSettings()
        self._told: dict[int, _Told] = {}
        self._lately: deque[_Told] = deque(maxlen=self._settings.max_lately)
        self._ops: list[Op] = []

    @property
    def has_news(self) -> bool:
        """Whether `flush` has something to say."""
        return bool(self._ops)

    def __len__(self) -> int:
        """The bookings in flight."""
        return len(self._told)

    # What happens to bookings

    def book(
        self,
        lease: int,
        rank: WorkerRank,
        *,
        hashes: bytes,
        cached_blocks: int,
        all_blocks: int,
        block_size: int,
        prefill_tokens: int,
        now: float,
    ) -> Booking:
        """A request was placed; `all_blocks` are its blocks, with those that have no hash."""
        samples = sample(hashes)
        sampled_blocks = blocks_of(len(samples) // HASH_BYTES)
        booking = Booking(
            lease,
            rank.worker,
            rank.dp_rank,
            block_size,
            prefill_tokens,
            waiting=True,
            own_blocks=all_blocks - sampled_blocks,
            cached_samples=samples_within(min(cached_blocks, sampled_blocks)),
            samples=samples,
        )
        self._told[lease] = _Told(booking, sampled_blocks, now)
        self._ops.append(Book(booking))
        return booking

    def prefill_done(self, lease: int) -> None:
        """The first output byte is here."""
        told = self._told.get(lease)
        if told is not None and told.booking.waiting:
            told.booking = msgspec.structs.replace(told.booking, waiting=False)
            self._ops.append(PrefillDone(lease))

    def grow(self, lease: int, all_blocks: int) -> None:
        """The request has so many blocks by now."""
        told = self._told.get(lease)
        if told is None:
            return
        own_blocks = all_blocks - told.sampled_blocks
        if own_blocks >= told.own_blocks + self._settings.grow_blocks:
            told.own_blocks = own_blocks
            self._ops.append(Grow(lease, own_blocks))

    def settle(self, lease: int) -> None:
        """The request is over."""
        told = self._told.pop(lease, None)
        if told is not None:
            self._lately.append(told)
            self._ops.append(Settle(lease))

    # What is to be said

    def flush(self) -> list[Ops]:
        """What happened since the last call."""
        ops, self._ops = self._ops, []
        width = self._settings.max_ops
        return [self._next(ops[at : at + width]) for at in range(0, len(ops), width)]

    def _next(self, ops: list[Op]) -> Ops:
        self.seqno += 1
        return Ops(self.replica, self.epoch, self.seqno, ops)

    def beat(self) -> Beat:
        """A sign of life."""
        return Beat(self.replica, self.epoch, self.seqno)

    def bye(self) -> Bye:
        """The last message."""
        return Bye(self.replica, self.epoch)

    def state(self, now: float) -> list[State]:
        """All bookings, in parts, as of the last flush. Flush first."""
        if self._ops:
            raise ValueError("a state without its last operations has no seqno")
        while self._lately and self._lately[0].booked_at + self._settings.lately_s < now:
            self._lately.popleft()
        bookings = [_aged(told, now) for told in self._told.values()]
        lately = [_aged(told, now) for told in self._lately]
        width = self._settings.part_bookings
        parts = max(1, -(-max(len(bookings), len(lately)) // width))
        return [
            State(
                self.replica,
                self.epoch,
                self.seqno,
                part,
                parts,
                _slice(bookings, part, width),
                _slice(lately, part, width),
            )
            for part in range(parts)
        ]


def _slice(bookings: Sequence[Booking], part: int, width: int) -> list[Booking]:
    return list(bookings[part * width : (part + 1) * width])


def _aged(told: _Told, now: float) -> Booking:
    age_ms = max(0, round((now - told.booked_at) * 1000))
    return msgspec.structs.replace(told.booking, own_blocks=told.own_blocks, age_ms=age_ms)
