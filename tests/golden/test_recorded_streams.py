"""Recorded streams, restarts and replays of a real vLLM through a subscription."""

from support import captures
from support.captures import Capture, RecordedEvent, RecordedReplay, SocketChange

from events.stream import (
    Command,
    Deliver,
    RequestReplay,
    Resync,
    ResyncReason,
    StreamState,
    SubscriptionSettings,
)
from events.subscription import Subscription


def delivered(commands: list[Command]) -> list[int]:
    return [command.seqno for command in commands if isinstance(command, Deliver)]


def resyncs(commands: list[Command]) -> list[ResyncReason]:
    return [command.reason for command in commands if isinstance(command, Resync)]


def replay(core: Subscription, commands: list[Command], recorded: RecordedReplay) -> list[Command]:
    """Answer the replay that `commands` ask for with a recorded one."""
    (request,) = [command for command in commands if isinstance(command, RequestReplay)]
    assert request.start == recorded.start
    out: list[Command] = []
    for frames in recorded.replies:
        out += core.replayed(request.attempt, frames, 0)
    return out


def walk(core: Subscription, capture: Capture) -> list[Command]:
    """Everything that the recorder's sockets saw, in the order of time."""
    out: list[Command] = []
    timeline: list[SocketChange | RecordedEvent] = [*capture.sockets, *capture.events]
    for seen in sorted(timeline, key=lambda seen: seen.t):
        if isinstance(seen, RecordedEvent):
            out += core.live(seen.frames, seen.t)
        elif seen.what == "connected":
            out += core.connected(seen.t)
        else:
            out += core.disconnected(seen.t)
    return out


def test_an_engine_that_restarts_twice_is_noticed_twice() -> None:
    """E11: recorded: the seqno begins at 0 again and nothing else tells."""
    capture = captures.load("h_restart")
    core = Subscription(SubscriptionSettings(replay=False))
    out = walk(core, capture)
    assert delivered(out) == [event.seqno for event in capture.events]
    assert resyncs(out)[0] is ResyncReason.GAP
    assert resyncs(out).count(ResyncReason.RESTART) == 2


def test_a_late_subscriber_takes_what_the_buffer_still_has() -> None:
    """E9: recorded: 30 batches, 16 kept; asked from 0, the replay begins at 14."""
    capture = captures.load("i_replay")
    core = Subscription()
    out = replay(core, core.connected(0), capture.replays[0])
    assert delivered(out) == list(range(14, 30))
    assert resyncs(out) == [ResyncReason.REPLAY_LATE]
    assert core.state is StreamState.LIVE


def test_a_replay_while_events_flow_leaves_no_gap() -> None:
    """E6: recorded: live batches overlap the replies."""
    capture = captures.load("i_replay")
    flowing = next(r for r in capture.replays if r.tag == "while events flow")
    core = Subscription()
    commands = core.connected(0)
    out: list[Command] = []
    during = [event for event in capture.events if event.t > flowing.t - 0.05]
    for event in during:
        out += core.live(event.frames, 0)
    out += replay(core, commands, flowing)
    while core.has_work:
        out += core.work(0)
    seqnos = delivered(out)
    assert seqnos == list(range(seqnos[0], during[-1].seqno + 1))
    assert resyncs(out) == [ResyncReason.REPLAY_LATE]


def test_batches_queued_by_an_engine_that_connects_are_not_applied_twice() -> None:
    """E12: recorded: seqnos 2, 3, 4 were sent when the new subscriber had bound the port."""
    capture = captures.load("t_connect_2")
    core = Subscription()
    out = core.connected(0)
    for event in capture.events:
        out += core.live(event.frames, 0)
    out += replay(core, out, capture.replays[0])
    assert delivered(out) == list(range(capture.events[-1].seqno + 1))
    assert resyncs(out) == []
