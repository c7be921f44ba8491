"""The state machine of a rank that is heard through a relay."""

import pytest

from events import BlocksRemoved
from events.relayed import Answer, Batch, Head, StatePart, Want, decode, encode, to_wire
from events.relayed_stream import WHOLE_STATE, Input, Phase, RelayedStream
from events.stream import (
    Command,
    Complain,
    Deliver,
    RequestReplay,
    Resync,
    ResyncReason,
    StateChanged,
    StreamState,
    SubscriptionSettings,
)

SETTINGS = SubscriptionSettings(
    replay_timeout_s=1.0, replay_tries=2, replay_pause_s=10.0, silent_after_s=5.0
)
RELAY_SILENT_S = 20.0


def head(following: int, *, epoch: int = 1, stream: str = "live", rule: int = 1) -> Head:
    return Head(epoch, following, stream, rule)


def batch(seqno: int, *, epoch: int = 1) -> Batch:
    return Batch(epoch, seqno, 0.0, [])


def seqnos(commands: list[Command]) -> list[int]:
    return [command.seqno for command in commands if isinstance(command, Deliver)]


def asked(commands: list[Command]) -> list[RequestReplay]:
    return [command for command in commands if isinstance(command, RequestReplay)]


def resyncs(commands: list[Command]) -> list[ResyncReason]:
    return [command.reason for command in commands if isinstance(command, Resync)]


def live_at(following: int) -> RelayedStream:
    """A stream that has caught up with a relay, at 0 s."""
    core = RelayedStream(1, SETTINGS, relay_silent_s=RELAY_SILENT_S)
    (ask,) = asked(core.connected(0.0))
    bodies: list[Batch | StatePart | Head] = [StatePart(1, following, []), head(following)]
    core.answered(Answer(ask.attempt, 0, 1, bodies), 0.0)
    assert core.state is StreamState.LIVE
    return core


def test_a_relay_is_asked_for_everything_after_each_connect() -> None:
    core = live_at(5)
    core.disconnected()
    assert core.state is StreamState.CONNECTING
    assert asked(core.connected(1.0)) == [RequestReplay(5, 2)]


def test_an_answer_counts_when_all_of_it_is_there() -> None:
    core = RelayedStream(1, SETTINGS)
    (ask,) = asked(core.connected(0.0))
    assert core.answered(Answer(ask.attempt, 1, 2, [batch(1), head(2)]), 0.0) == []
    commands = core.answered(Answer(ask.attempt, 0, 2, [batch(0)]), 0.0)
    assert seqnos(commands) == [0, 1]


def test_an_answer_to_an_earlier_question_is_of_no_use() -> None:
    core = RelayedStream(1, SETTINGS)
    (first,) = asked(core.connected(0.0))
    (second,) = asked(core.tick(1.0))
    assert second.attempt > first.attempt
    assert core.answered(Answer(first.attempt, 0, 1, [batch(0), head(1)]), 1.0) == []


def test_a_relay_that_comes_back_later_than_we_do_is_asked_as_if_for_the_first_time() -> None:
    """NATS was restarted: our questions ended before the relay was there, and its blocks stay."""
    core = live_at(5)
    core.disconnected()
    core.connected(10.0)
    core.tick(11.0)  # the last of two tries
    assert asked(core.live(head(7), 11.9)) == [RequestReplay(5, 4)]
    assert asked(core.live(batch(7), 11.95)) == []
    commands = core.tick(12.9)
    assert (asked(commands), resyncs(commands)) == ([RequestReplay(5, 5)], [])
    core.answered(Answer(5, 0, 1, [batch(5), batch(6), head(8)]), 13.0)
    assert core.state is StreamState.LIVE
    assert core.stats.last_seqno == 7


def test_a_batch_from_beyond_the_end_of_its_relay_is_not_waited_for() -> None:
    """Anyone who may publish can send one: both sides would ask and answer without a pause."""
    core = live_at(5)
    (ask,) = asked(core.live(batch(2**40), 1.0))
    core.live(batch(6), 1.1)
    commands = core.answered(Answer(ask.attempt, 0, 1, [head(5)]), 1.2)
    assert any(isinstance(command, Complain) for command in commands)
    (ask,) = asked(commands)  # for 6 came after the question
    commands = core.answered(Answer(ask.attempt, 0, 1, [batch(5), head(7)]), 1.3)
    assert (seqnos(commands), asked(commands)) == ([5, 6], [])
    assert core.state is StreamState.LIVE


def test_live_batches_wait_for_what_is_missing_before_them() -> None:
    core = live_at(5)
    commands = core.live(batch(7), 1.0)
    (ask,) = asked(commands)
    assert (ask.start, seqnos(commands)) == (5, [])
    core.live(batch(8), 1.0)
    commands = core.answered(
        Answer(ask.attempt, 0, 1, [batch(5), batch(6), batch(7), head(8)]), 1.0
    )
    assert seqnos(commands) == [5, 6, 7, 8]
    assert core.stats.gaps == 1


def test_a_head_beyond_what_came_is_a_gap() -> None:
    """E5: the last batch was lost, and the engine is idle now."""
    assert asked(live_at(5).live(head(6), 1.0)) == [RequestReplay(5, 2)]


def test_a_batch_that_was_applied_is_dropped() -> None:
    core = live_at(5)
    assert seqnos(core.live(batch(5), 1.0)) == [5]
    assert core.live(batch(5), 1.0) == []
    assert core.stats.duplicates == 1


def test_a_higher_epoch_takes_the_blocks_along_and_a_lower_one_is_late() -> None:
    """E11: nothing that the old engine said may come back."""
    core = live_at(5)
    commands = core.live(batch(0, epoch=2), 1.0)
    assert resyncs(commands) == [ResyncReason.RESTART]
    assert len(asked(commands)) == 1
    assert core.live(batch(5), 1.0) == []


def test_the_older_of_two_relays_is_followed_when_the_later_one_is_silent() -> None:
    """E11: the later one was stopped, or the clock went back and the relay was started again."""
    core = live_at(5)
    core.live(head(0, epoch=3), 1.0)
    core.tick(2.0)
    assert asked(core.live(head(5), 20.9)) == []
    assert core.tick(21.0) == [StateChanged(StreamState.CONNECTING)]
    commands = core.live(head(5), 21.5)
    (ask,) = asked(commands)
    assert resyncs(commands) == [ResyncReason.RESTART]
    assert core.epoch == 1
    core.answered(Answer(ask.attempt, 0, 1, [StatePart(1, 5, []), head(5)]), 21.5)
    assert core.state is StreamState.LIVE
    assert seqnos(core.live(batch(5), 22.0)) == [5]
    assert resyncs(core.live(head(0, epoch=3), 23.0)) == [ResyncReason.RESTART]


def test_two_living_relays_of_one_engine_are_told_of_and_the_later_is_followed() -> None:
    core = live_at(5)
    (ask,) = asked(core.live(head(0, epoch=2), 1.0))
    core.answered(Answer(ask.attempt, 0, 1, [StatePart(2, 0, []), head(0, epoch=2)]), 1.0)
    assert core.live(head(5), 1.5) == []  # may be late
    core.live(head(0, epoch=2), 30.0)
    (complaint,) = core.live(head(5), 30.1)
    assert isinstance(complaint, Complain)
    assert "two relays" in complaint.detail
    assert (core.epoch, core.state, core.rival_heard_at) == (2, StreamState.LIVE, 30.1)
    core.live(head(5), 60.0)  # the later one has stopped
    assert (core.epoch, core.rival_heard_at) == (1, None)


def test_answers_of_two_relays_to_one_question_are_not_mixed() -> None:
    core = RelayedStream(1, SETTINGS)
    (ask,) = asked(core.connected(0.0))
    core.answered(Answer(ask.attempt, 0, 2, [batch(0)]), 0.0)
    core.answered(Answer(ask.attempt, 1, 2, [batch(0, epoch=2), head(1, epoch=2)]), 0.0)
    assert core.answered(Answer(ask.attempt, 1, 2, [batch(1), head(2)]), 0.0) == []
    assert core.state is StreamState.REPLAYING
    commands = core.answered(Answer(ask.attempt, 0, 2, [StatePart(2, 0, [])]), 0.0)
    assert seqnos(commands) == [0, 0]
    assert core.epoch == 2


def test_a_gap_that_nobody_fills_is_lost_after_some_tries() -> None:
    """E10: routing goes on, and the rank is asked about now and then."""
    core = live_at(5)
    core.live(batch(7), 0.0)
    core.tick(1.0)
    commands = core.tick(2.0)
    assert resyncs(commands) == [ResyncReason.REPLAY_FAILED]
    assert seqnos(commands) == [7]
    assert core.state is StreamState.DEGRADED
    assert seqnos(core.live(batch(8), 2.0)) == [8]
    assert asked(core.tick(12.0)) == [RequestReplay(WHOLE_STATE, 4)]


def test_a_second_failure_costs_no_blocks_again() -> None:
    core = live_at(5)
    core.live(batch(7), 0.0)
    core.tick(1.0)
    core.tick(2.0)
    core.tick(12.0)
    core.live(batch(8), 12.5)
    commands = core.tick(13.0)
    assert (resyncs(commands), seqnos(commands)) == ([], [8])


def test_without_any_word_there_is_no_relay() -> None:
    core = RelayedStream(1, SETTINGS)
    core.connected(0.0)
    core.tick(1.0)
    core.tick(2.0)
    assert core.state is StreamState.CONNECTING
    assert len(asked(core.live(head(0), 3.0))) == 1


@pytest.mark.parametrize("stream", ["live", "replaying"])
def test_a_relay_that_is_silent_for_long_is_lost_until_its_next_word(stream: str) -> None:
    """R5: it may have died at anything, and the engine may have restarted meanwhile."""
    core = live_at(5)
    core.live(head(5, stream=stream), 1.0)
    assert core.deadline() == 21.0
    assert core.tick(20.9) == []
    assert core.tick(21.0) == [StateChanged(StreamState.CONNECTING)]
    assert (core.silent_since, core.deadline()) == (1.0, None)
    assert len(asked(core.live(head(0, epoch=2), 60.0))) == 1
    assert core.silent_since is None
    assert core.stats.resyncs == {ResyncReason.RESTART: 1}


def test_a_relay_that_dies_while_it_is_asked_is_lost_with_what_waits() -> None:
    core = RelayedStream(1, SubscriptionSettings(replay_timeout_s=60.0), relay_silent_s=20.0)
    core.connected(0.0)
    core.live(batch(3), 1.0)
    assert core.tick(21.0) == [StateChanged(StreamState.CONNECTING)]
    (ask,) = asked(core.live(head(4), 30.0))
    commands = core.answered(Answer(ask.attempt, 0, 1, [StatePart(1, 4, []), head(4)]), 30.0)
    assert seqnos(commands) == [4]
    assert core.state is StreamState.LIVE


def test_a_connect_gives_the_relay_its_time_anew() -> None:
    core = live_at(5)
    core.disconnected()
    core.connected(100.0)
    core.tick(100.5)
    assert core.state is StreamState.REPLAYING
    assert core.silent_since is None


def test_the_worse_half_of_the_way_is_the_state() -> None:
    core = live_at(5)
    commands = core.live(head(5, stream="replaying"), 1.0)
    assert commands == [StateChanged(StreamState.REPLAYING)]
    assert core.live(head(5, stream="no such"), 1.0) == [StateChanged(StreamState.DEGRADED)]


def test_a_rank_that_should_have_spoken_is_silent_until_it_has() -> None:
    """It may have spoken while we could not hear, and the answer has it."""
    core = live_at(5)
    core.expect_blocks(1.0)
    assert core.tick(6.0) == [StateChanged(StreamState.SILENT)]
    (ask,) = asked(core.live(head(6), 7.0))
    core.answered(Answer(ask.attempt, 0, 1, [batch(5), head(6)]), 7.0)
    assert core.state is StreamState.LIVE


def test_blocks_that_are_hashed_otherwise_are_not_used() -> None:
    core = live_at(5)
    (complaint,) = core.live(head(6, rule=2), 1.0)
    assert isinstance(complaint, Complain)


def test_too_many_waiting_batches_are_a_gap_like_any_other() -> None:
    settings = SubscriptionSettings(max_waiting_batches=2)
    core = RelayedStream(1, settings)
    core.connected(0.0)
    for seqno in range(1, 5):
        core.live(batch(seqno), 0.0)
    assert core.stats.overflows == 1
    assert Want(1, 1, 0).start == 0


def test_events_that_cannot_be_read_cost_the_blocks() -> None:
    core = live_at(5)
    whole = encode(Batch(1, 5, 0.0, to_wire([BlocksRemoved(block_hashes=[1])])))
    broken = decode(whole.replace(b"\xc4\x08", b"\xc4\x07").replace(b"\x00\x01\x00", b"\x01\x00"))
    assert isinstance(broken, Batch)
    commands = core.live(broken, 1.0)
    assert resyncs(commands) == [ResyncReason.MALFORMED]
    assert core.stats.malformed_payloads == 1


def test_neither_batches_nor_answers_by_another_rule_are_used() -> None:
    """A router is updated before the relays."""
    core = RelayedStream(1, SETTINGS)
    core.connected(0.0)
    (ask,) = asked(core.live(batch(3), 0.0))
    commands = core.answered(Answer(ask.attempt, 0, 1, [StatePart(1, 3, []), head(3, rule=2)]), 0.1)
    assert seqnos(commands) == []
    assert core.other_rule == 2
    core.live(batch(4), 0.2)
    core.tick(1.0)
    assert seqnos(core.tick(2.0)) == []
    assert core.state is StreamState.CONNECTING
    core.live(head(0, epoch=2), 3.0)
    assert core.other_rule is None


def test_an_answer_without_anything_is_none() -> None:
    core = RelayedStream(1, SETTINGS)
    (ask,) = asked(core.connected(0.0))
    assert core.answered(Answer(ask.attempt, 0, 1, []), 0.0) == []
    assert core.state is StreamState.REPLAYING


def in_phase(phase: Phase) -> RelayedStream:
    """A stream in this phase, at 10 s, that has applied all before batch 5."""
    core = live_at(5)
    if phase is Phase.APART:
        core.disconnected()
    elif phase is Phase.UNHEARD:
        core.tick(RELAY_SILENT_S)
    elif phase is not Phase.FOLLOWING:
        core.live(batch(6), 8.0)
    if phase is Phase.DEGRADED:
        core.tick(9.0)
        core.tick(10.0)
    assert core._phase is phase
    return core


_P, _U, _A, _F, _D = Phase

AFTER: dict[Input, tuple[Phase, ...]] = {
    #                   APART UNHEARD ASKING FOLLOWING DEGRADED
    Input.CONNECTED: (_A, _A, _A, _A, _A),
    Input.DISCONNECTED: (_P, _P, _P, _P, _P),
    Input.HEAD: (_P, _A, _A, _F, _D),
    Input.BATCH: (_P, _A, _A, _F, _D),
    Input.OTHER_EPOCH: (_P, _A, _A, _A, _A),
    Input.OTHER_RULE: (_P, _U, _A, _F, _D),
    Input.ANSWERED: (_P, _U, _F, _F, _D),
    Input.OVERDUE: (_P, _A, _A, _F, _A),
    Input.SILENCE: (_P, _U, _U, _U, _U),
    Input.RESYNC: (_P, _A, _A, _A, _A),
}


def test_the_table_is_complete() -> None:
    assert set(RelayedStream._handlers) == {(phase, what) for phase in Phase for what in Input}
    assert set(AFTER) == set(Input)


@pytest.mark.parametrize("what", Input)
@pytest.mark.parametrize("phase", Phase)
def test_every_input_is_taken_in_every_phase(phase: Phase, what: Input) -> None:
    """The full product; what would be late or early is ignored, not an error."""
    core = in_phase(phase)
    upcoming = core._next
    fed: dict[Input, Batch | Head | Answer] = {
        Input.BATCH: batch(upcoming),
        Input.OTHER_EPOCH: batch(0, epoch=2),
        Input.OTHER_RULE: head(upcoming, rule=2),
        Input.ANSWERED: Answer(core._attempt, 0, 1, [StatePart(1, 7, []), head(7)]),
    }
    core._take(what, 10.0, fed.get(what, head(upcoming)))
    assert core._phase is AFTER[what][list(Phase).index(phase)]
    assert core._announced is core.state
    assert core._phase is Phase.ASKING or not core._waiting
    assert core._ask_again_at is not None or core._phase is not Phase.ASKING
