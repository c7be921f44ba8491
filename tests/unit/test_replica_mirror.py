"""The hearing side of replicas: what follows from each message."""

import itertools
import random

import pytest

from events.replica import (
    Added,
    Ask,
    Beat,
    Booking,
    Bye,
    Dropped,
    Expected,
    MalformedMessage,
    Mirror,
    MirrorSettings,
    Ops,
    Prefilled,
    SendAsk,
    State,
    decode_message,
    encode_message,
)
from events.replica.messages import Book, PrefillDone, Settle
from events.replica.mirror import Command, Key


def booking(lease: int, *, waiting: bool = True) -> Booking:
    return Booking(lease, "w", 0, 16, 100, waiting, 2, 0, bytes(16))


def ops(seqno: int, *what: Book | PrefillDone | Settle, epoch: int = 1) -> Ops:
    return Ops("other", epoch, seqno, list(what))


def state(seqno: int, *leases: int, part: int = 0, parts: int = 1, epoch: int = 1) -> State:
    return State("other", epoch, seqno, part, parts, [booking(lease) for lease in leases], [])


class Hearing:
    """A mirror, and the time."""

    def __init__(self, settings: MirrorSettings | None = None) -> None:
        self.mirror = Mirror("me", 7, random.Random(1), settings)
        self.now = 0.0

    def hear(self, message: Ops | Beat | State | Bye | Ask) -> list[Command]:
        commands = self.mirror.hear(decode_message(encode_message(message)), self.now)
        self.mirror.check()
        return commands

    def wait(self, seconds: float) -> list[Command]:
        self.now += seconds
        return self.mirror.tick(self.now)

    def leases(self) -> set[int]:
        return {key.lease for key in self.mirror.bookings()}


def test_a_replica_that_begins_is_followed_without_a_question() -> None:
    hearing = Hearing()
    assert hearing.hear(Beat("other", 1, 0)) == []
    assert hearing.hear(ops(1, Book(booking(5)))) == [Added(Key("other", 1, 5), booking(5))]
    assert hearing.mirror.uncertain() == []


def test_a_replica_that_has_bookings_already_is_asked_for_them() -> None:
    """R1: this router is the one that has just started."""
    hearing = Hearing()
    assert hearing.hear(Beat("other", 1, 9)) == [SendAsk("other")]
    hearing.hear(state(9, 1, 2))
    assert hearing.leases() == {1, 2}


def test_a_lost_last_message_is_seen_from_the_next_beat() -> None:
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(5))))
    assert hearing.hear(Beat("other", 1, 2)) == [SendAsk("other")]


def test_what_comes_while_a_state_is_awaited_is_applied_on_top_of_it() -> None:
    hearing = Hearing()
    hearing.hear(ops(3, Book(booking(3))))
    hearing.hear(ops(4, Settle(1), Book(booking(4))))
    commands = hearing.hear(state(3, 1, 3))
    assert hearing.leases() == {3, 4}
    assert commands[-1] == Added(Key("other", 1, 4), booking(4))


def test_a_state_from_before_the_gap_is_not_enough() -> None:
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(1))))
    hearing.hear(ops(4, Book(booking(4))))
    hearing.hear(state(2, 1))
    assert hearing.mirror.uncertain() == ["other"]
    assert SendAsk("other") in hearing.wait(1.0)
    hearing.hear(state(4, 4))
    assert hearing.leases() == {4}


@pytest.mark.parametrize("never_said", [Beat("other", 1, 10**9), ops(10**9, Book(booking(66)))])
def test_a_seqno_that_the_replica_was_never_at_is_not_waited_for(never_said: Beat | Ops) -> None:
    """R3: garbage, or a namesake; what it says when asked is from before, each time."""
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(1))))
    assert SendAsk("other") in hearing.hear(never_said)
    for _ in range(4):
        hearing.wait(10.0)
        hearing.hear(state(2, 1, 2))
    assert (hearing.leases(), hearing.mirror.uncertain()) == ({1, 2}, [])
    hearing.hear(ops(3, Settle(1)))
    assert hearing.leases() == {2}


def test_a_state_in_parts_counts_when_it_is_whole() -> None:
    hearing = Hearing()
    hearing.hear(Beat("other", 1, 9))
    hearing.hear(state(9, 2, part=1, parts=2))
    assert hearing.leases() == set()
    hearing.hear(state(9, 1, part=0, parts=2))
    assert hearing.leases() == {1, 2}


def test_parts_of_two_states_are_not_mixed() -> None:
    hearing = Hearing()
    hearing.hear(Beat("other", 1, 9))
    hearing.hear(state(9, 1, part=0, parts=2))
    hearing.hear(ops(10, Settle(1)))
    hearing.hear(state(10, 2, part=1, parts=2))
    hearing.hear(state(9, 3, part=1, parts=2))
    assert hearing.leases() == set()
    hearing.hear(state(10, part=0, parts=2))
    assert hearing.leases() == {2}


def test_a_question_is_repeated_with_growing_pauses() -> None:
    hearing = Hearing(MirrorSettings(lease_s=1000.0, ask_again_s=1.0, ask_again_max_s=4.0))
    hearing.hear(Beat("other", 1, 9))
    asked = [hearing.now]
    while len(asked) < 6:
        if hearing.wait(0.05):
            asked.append(hearing.now)
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    for pause, nominal in zip(pauses, (1.0, 2.0, 4.0, 4.0, 4.0), strict=True):
        assert 0.75 * nominal <= pause <= 1.25 * nominal + 0.1


def test_a_silent_replica_is_forgotten_with_its_bookings() -> None:
    """R2: a router died with requests in flight."""
    hearing = Hearing(MirrorSettings(lease_s=5.0))
    hearing.hear(ops(1, Book(booking(1)), Book(booking(2))))
    assert hearing.wait(4.9) == []
    gone = {Dropped(Key("other", 1, 1)), Dropped(Key("other", 1, 2))}
    assert set(hearing.wait(0.2)) == gone
    assert hearing.mirror.replicas() == {}


def test_a_replica_that_says_goodbye_is_forgotten_at_once() -> None:
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(1))))
    assert hearing.hear(Bye("other", 1)) == [Dropped(Key("other", 1, 1))]


def test_a_new_process_of_the_same_name_ends_the_old_ones_bookings() -> None:
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(1))))
    commands = hearing.hear(ops(1, Book(booking(1)), epoch=2))
    assert commands == [Dropped(Key("other", 1, 1)), Added(Key("other", 2, 1), booking(1))]
    assert hearing.hear(ops(2, Book(booking(2)), epoch=1)) == []
    assert hearing.leases() == {1}


@pytest.mark.parametrize("again", [1, 2])
def test_a_message_that_comes_again_changes_nothing(again: int) -> None:
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(1))))
    hearing.hear(ops(2, PrefillDone(1)))
    assert hearing.hear(ops(again, Book(booking(1)))) == []
    assert hearing.mirror.stats.duplicates == 1


def test_bookings_that_ended_lately_are_told_to_a_new_replica() -> None:
    """Their blocks are on the engine, but its events may still be on the way."""
    hearing = Hearing()
    hearing.hear(Beat("other", 1, 9))
    late = booking(1)
    assert hearing.hear(State("other", 1, 9, 0, 1, [], [late])) == [Expected(late)]


def test_an_answer_to_everybodys_question_needs_no_own_one() -> None:
    hearing = Hearing()
    commands = hearing.hear(state(9, 1))
    assert commands == [Added(Key("other", 1, 1), booking(1))]
    assert hearing.mirror.uncertain() == []


def test_a_prefill_that_is_done_is_told_once() -> None:
    hearing = Hearing()
    hearing.hear(ops(1, Book(booking(1))))
    assert hearing.hear(ops(2, PrefillDone(1))) == [Prefilled(Key("other", 1, 1))]
    assert hearing.hear(ops(3, PrefillDone(1))) == []


def test_our_own_messages_are_not_heard_but_a_namesake_is_noticed() -> None:
    hearing = Hearing()
    assert hearing.hear(Beat("me", 7, 3)) == []
    assert hearing.mirror.stats.namesakes == 0
    assert hearing.hear(Beat("me", 8, 3)) == []
    assert hearing.mirror.stats.namesakes == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\xa3ops\xa1r\x01", b"\x91\xa4what"])
def test_bytes_that_are_no_message_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_message(payload)
