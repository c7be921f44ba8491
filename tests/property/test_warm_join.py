"""A router that begins where another one is ends where that one ends, whatever the engine does.

The engine has no replay, may restart at any time, and reaches the two routers with delays of their
own. The oracle is the old router: the batches that it holds, in order, since its last resync. The
new one never holds others, and if the old one loses nothing any more, it loses nothing either.
"""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from support.streams import number_of, payload

from events.history import Position
from events.opening import Opening
from events.stream import Command, Deliver, Resync, SubscriptionSettings
from events.subscription import Subscription

RUN = 1000
WIRE = st.lists(st.sampled_from(["publish", "publish", "publish", "restart"]), max_size=30)


@dataclass
class Wire:
    """What is on its way to one router, in order: (engine, seqno), or a new connection (None)."""

    sent: list[tuple[int, int] | None] = field(default_factory=list)


@dataclass
class Router:
    core: Subscription
    held: list[int] = field(default_factory=list)
    wire: Wire = field(default_factory=Wire)

    def carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Deliver):
                self.held.append(number_of(command.batch))
            elif isinstance(command, Resync):
                self.held.clear()

    def take(self, sent: tuple[int, int] | None) -> None:
        if sent is None:
            self.carry_out(self.core.disconnected(0.0))
            self.carry_out(self.core.connected(0.0))
        else:
            self.carry_out(self.core.live(frames(sent), 0.0))
        while self.core.has_work:
            self.carry_out(self.core.work(0.0))

    def take_all(self) -> None:
        while self.wire.sent:
            self.take(self.wire.sent.pop(0))


def frames(sent: tuple[int, int]) -> list[bytes]:
    engine, seqno = sent
    return [b"t", seqno.to_bytes(8, "big"), payload(engine * RUN + seqno)]


def router() -> Router:
    return Router(Subscription(SubscriptionSettings(replay=False, remembered_batches=5)))


@settings(max_examples=300, deadline=None)
@given(before=WIRE, hearing=WIRE, after=WIRE, old_lag=st.integers(0, 6), idle=st.booleans())
def test_a_router_that_begins_where_another_is_ends_where_it_ends(
    before: list[str], hearing: list[str], after: list[str], old_lag: int, idle: bool
) -> None:
    engine, seqno = 0, 0
    old, new = router(), router()
    old.carry_out(old.core.connected(0.0))
    subscribed: list[Router] = [old]

    def happens(what: list[str]) -> None:
        nonlocal engine, seqno
        for each in what:
            if each == "restart":
                engine, seqno = engine + 1, 0
            for one in subscribed:
                one.wire.sent.append(None if each == "restart" else (engine, seqno))
            seqno += each == "publish"

    happens(before)
    old.take_all()
    subscribed.append(new)
    happens([] if idle else hearing)
    opening = Opening()
    for sent in new.wire.sent:
        if sent is None:
            opening = Opening()  # as news of the connection does
        else:
            opening.hold_batch(frames(sent), 0.0)
    new.wire.sent.clear()
    while len(old.wire.sent) > old_lag:
        old.take(old.wire.sent.pop(0))
    lost_by_then = old.core.stats.resyncs.total()
    was_joined = begin(new, old, opening)
    happens(after)
    happens(["publish", "publish"])
    old.take_all()
    new.take_all()
    if was_joined and old.core.stats.resyncs.total() == lost_by_then:
        assert new.core.stats.resyncs.total() == 0
        assert new.held == old.held
    if new.held:
        assert new.held == old.held[-len(new.held) :]


def begin(new: Router, old: Router, opening: Opening) -> bool:
    """Whether the new router goes on from where the old one is."""
    position: Position | None = old.core.position()
    if position is not None and opening.joins(position):
        new.core.restore(position)
        new.held = list(old.held)
    else:
        position = None
    new.carry_out(new.core.connected(0.0))
    for held in opening.behind(position):
        new.carry_out(new.core.live(held.frames, 0.0))
        while new.core.has_work:
            new.carry_out(new.core.work(0.0))
    return position is not None
