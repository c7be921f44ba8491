"""The hearing side: the bookings of all other replicas, and when to ask one of them.

For each replica there is the seqno that comes next. An `Ops` at it is applied; one below it is
dropped; one above it, or a beat that says that there is one, is a gap. Then the replica is asked
for its state, and until that comes `Ops` are applied as they are (better than nothing) and kept, to
be applied once more on top of the state. A state that does not join up with them is asked for
again. Questions that stay unanswered are repeated with growing pauses. A replica that gives states
from before a seqno again and again, although it was asked after that came, has never been there:
the seqno was another one's, or garbage, and the state is believed.

The beginning is no gap: a replica whose first message is its very first one has no other bookings.

Rules for epochs: a higher one is a new process of that name, and what the old one had is over; a
lower one is ignored. A replica that was not heard for `lease_s` is forgotten.
"""

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import NamedTuple, TypeAlias

import msgspec

from events.replica.messages import (
    Ask,
    Beat,
    Book,
    Booking,
    Bye,
    Grow,
    IndexMessage,
    Message,
    Op,
    Ops,
    PrefillDone,
    State,
)


class Key(NamedTuple):
    """A booking among those of all replicas and epochs."""

    replica: str
    epoch: int
    lease: int


class Added(NamedTuple):
    """A booking that was not known."""

    key: Key
    booking: Booking


class Prefilled(NamedTuple):
    """A booking waits no more."""

    key: Key


class Grown(NamedTuple):
    """A booking has so many blocks of its own."""

    key: Key
    own_blocks: int


class Dropped(NamedTuple):
    """A booking is over or forgotten."""

    key: Key


class Expected(NamedTuple):
    """A booking that was over before we knew of it; its blocks may still be unreported."""

    booking: Booking


class SendAsk(NamedTuple):
    """Ask this replica for its state."""

    replica: str


Command: TypeAlias = Added | Prefilled | Grown | Dropped | Expected | SendAsk


class MirrorSettings(msgspec.Struct, frozen=True):
    """How patient to be. Questions are repeated after `ask_again_s`, then twice as long each."""

    lease_s: float = 5.0
    ask_again_s: float = 0.25
    ask_again_max_s: float = 5.0
    max_kept: int = 1024
    """`Ops` to keep while a state is awaited; beyond that another state is needed."""
    max_older: int = 3
    """States from before the latest seqno, since that came; one more is believed."""


class MirrorStats(msgspec.Struct):
    """Counters since the start."""

    messages: int = 0
    duplicates: int = 0
    gaps: int = 0
    asked: int = 0
    states: int = 0
    expired: int = 0
    namesakes: int = 0
    """Messages of another process that has our name: two replicas must not share one."""


class _Remote:
    """One replica. `next` is the seqno to come; while `asking`, `last` is the latest seen."""

    def __init__(self, epoch: int, now: float, settings: MirrorSettings) -> None:
        self.epoch = epoch
        self.heard_at = now
        self.last = 0
        self.older_states = 0
        self.asking = False
        self.ask_at = 0.0
        self.pause_s = settings.ask_again_s
        self.kept: deque[Ops] = deque(maxlen=settings.max_kept)
        self.parts: dict[int, State] = {}
        self.leases: dict[int, Booking] = {}

    def rise(self, seqno: int) -> None:
        """So much is known to have been said."""
        self.last = seqno
        self.older_states = 0


class Mirror:
    """What is known of the other replicas. `now` is monotonic, in seconds."""

    def __init__(
        self, replica: str, epoch: int, rng: Random, settings: MirrorSettings | None = None
    ) -> None:
        self.stats = MirrorStats()
        self._own = replica
        self._epoch = epoch
        self._rng = rng
        self._settings = settings or MirrorSettings()
        self._remotes: dict[str, _Remote] = {}

    # What is known

    def replicas(self) -> dict[str, int]:
        """How many bookings each of the others has."""
        return {name: len(remote.leases) for name, remote in self._remotes.items()}

    def uncertain(self) -> list[str]:
        """The replicas whose state is awaited."""
        return [name for name, remote in self._remotes.items() if remote.asking]

    def bookings(self) -> dict[Key, Booking]:
        """All bookings of the others."""
        return {
            Key(name, remote.epoch, lease): booking
            for name, remote in self._remotes.items()
            for lease, booking in remote.leases.items()
        }

    # What happens

    def hear(self, message: Message, now: float) -> list[Command]:
        """A message has come; what follows from it."""
        if message.replica == self._own:
            self.stats.namesakes += message.epoch != self._epoch
            return []
        if isinstance(message, Ask | IndexMessage):
            return []
        self.stats.messages += 1
        out: list[Command] = []
        remote = self._remote(message, now, out)
        if remote is None:
            return out
        if isinstance(message, Ops):
            self._take_ops(message, remote, now, out)
        elif isinstance(message, Beat):
            if message.seqno > remote.last:
                self._miss(message.replica, remote, now, out)
                remote.rise(message.seqno)
        elif isinstance(message, State):
            self._take_state(message, remote, now, out)
        return out

    def _remote(self, message: Message, now: float, out: list[Command]) -> _Remote | None:
        """The sender, made or made anew where needed; None if there is no more to be done."""
        name = message.replica
        remote = self._remotes.get(name)
        if remote is not None and message.epoch < remote.epoch:
            self.stats.duplicates += 1
            return None
        if remote is not None and message.epoch > remote.epoch:
            self._forget(name, out)
            remote = None
        if isinstance(message, Bye):
            if remote is not None:
                self._forget(name, out)
            return None
        if remote is None:
            remote = self._remotes[name] = _Remote(message.epoch, now, self._settings)
            if isinstance(message, State):
                remote.asking = True
                remote.ask_at = now + remote.pause_s
        remote.heard_at = now
        return remote

    def tick(self, now: float) -> list[Command]:
        """Time has passed: forget the silent, ask again."""
        out: list[Command] = []
        for name, remote in list(self._remotes.items()):
            if now >= remote.heard_at + self._settings.lease_s:
                self.stats.expired += 1
                self._forget(name, out)
            elif remote.asking and now >= remote.ask_at:
                self._ask(name, remote, now, out)
        return out

    def _forget(self, name: str, out: list[Command]) -> None:
        remote = self._remotes.pop(name)
        out += [Dropped(Key(name, remote.epoch, lease)) for lease in remote.leases]

    # Operations

    def _take_ops(self, message: Ops, remote: _Remote, now: float, out: list[Command]) -> None:
        if message.seqno <= remote.last:
            self.stats.duplicates += 1
            return
        if message.seqno > remote.last + 1:
            self._miss(message.replica, remote, now, out)
        remote.rise(message.seqno)
        if remote.asking:
            remote.kept.append(message)
        self._apply(message.replica, remote, message.ops, out)

    def _apply(self, name: str, remote: _Remote, ops: Iterable[Op], out: list[Command]) -> None:
        leases = remote.leases
        for op in ops:
            if isinstance(op, Book):
                self._put(name, remote, op.booking, out)
                continue
            known = leases.get(op.lease)
            if known is None:
                continue
            key = Key(name, remote.epoch, op.lease)
            if isinstance(op, PrefillDone):
                if known.waiting:
                    leases[op.lease] = msgspec.structs.replace(known, waiting=False)
                    out.append(Prefilled(key))
            elif isinstance(op, Grow):
                leases[op.lease] = msgspec.structs.replace(known, own_blocks=op.own_blocks)
                out.append(Grown(key, op.own_blocks))
            else:
                del leases[op.lease]
                out.append(Dropped(key))

    def _put(self, name: str, remote: _Remote, booking: Booking, out: list[Command]) -> None:
        """Make what is known of a booking what is said of it."""
        key = Key(name, remote.epoch, booking.lease)
        known = remote.leases.get(booking.lease)
        remote.leases[booking.lease] = booking
        if known is None:
            out.append(Added(key, booking))
            return
        if known.waiting and not booking.waiting:
            out.append(Prefilled(key))
        if known.own_blocks != booking.own_blocks:
            out.append(Grown(key, booking.own_blocks))

    # Gaps

    def _miss(self, name: str, remote: _Remote, now: float, out: list[Command]) -> None:
        self.stats.gaps += 1
        if not remote.asking:
            remote.asking = True
            remote.pause_s = self._settings.ask_again_s
            self._ask(name, remote, now, out)

    def _ask(self, name: str, remote: _Remote, now: float, out: list[Command]) -> None:
        self.stats.asked += 1
        remote.ask_at = now + remote.pause_s * self._rng.uniform(0.75, 1.25)
        remote.pause_s = min(2 * remote.pause_s, self._settings.ask_again_max_s)
        out.append(SendAsk(name))

    def _take_state(self, message: State, remote: _Remote, now: float, out: list[Command]) -> None:
        """Collect the parts of the newest state; apply it when it is whole."""
        if not remote.asking:
            self.stats.duplicates += 1
            return
        held = next(iter(remote.parts.values()), None)
        if held is not None and held.seqno > message.seqno:
            return
        if held is not None and (held.seqno, held.parts) != (message.seqno, message.parts):
            remote.parts.clear()
        remote.parts[message.part] = message
        if len(remote.parts) == message.parts:
            self._take_whole(message, remote, now, out)

    def _take_whole(self, message: State, remote: _Remote, now: float, out: list[Command]) -> None:
        name = message.replica
        later = [ops for ops in remote.kept if ops.seqno > message.seqno]
        if len(later) != max(0, remote.last - message.seqno):  # they rise, up to `last`
            remote.older_states += 1
            if remote.older_states <= self._settings.max_older:
                remote.parts.clear()
                return  # it is older than the gap; the next answer won't be
            later = []
            remote.last = message.seqno
        self.stats.states += 1
        states = [remote.parts[part] for part in range(message.parts)]
        self._replace(name, remote, states, out)
        for ops in later:
            self._apply(name, remote, ops.ops, out)
        remote.asking = False
        remote.last = max(remote.last, message.seqno)
        remote.kept.clear()
        remote.parts.clear()
        remote.heard_at = now

    def _replace(self, name: str, remote: _Remote, states: list[State], out: list[Command]) -> None:
        said = {booking.lease: booking for state in states for booking in state.bookings}
        for lease in [lease for lease in remote.leases if lease not in said]:
            del remote.leases[lease]
            out.append(Dropped(Key(name, remote.epoch, lease)))
        for booking in said.values():
            self._put(name, remote, booking, out)
        out += [Expected(booking) for state in states for booking in state.lately]

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        for name, remote in self._remotes.items():
            if not remote.asking and (remote.kept or remote.parts):
                raise AssertionError(f"{name}: something is kept though nothing is asked")
            if name == self._own:
                raise AssertionError("a replica is not among the others")
