"""What a source holds while another router is asked how far it is."""

import struct

import zmq
from support.streams import payload

from events.history import History, Message, Position
from events.opening import Opening


def frames(number: int) -> list[bytes]:
    return [b"t", number.to_bytes(8, "big"), payload(number)]


def opening(*numbers: int, max_batches: int = 100) -> Opening:
    made = Opening(max_batches, 10_000)
    for number in numbers:
        made.hold_batch(frames(number), 0.0)
    return made


def position(next_: int, *, of: int = 0, remembered: int = 4) -> Position:
    history = History(remembered)
    for seqno in range(next_):
        history.add(Message(seqno, payload(of + seqno)))
    return history.position(cold=False)


def held(made: Opening, at: Position | None) -> list[int]:
    return [each.batch.seqno for each in made.behind(at) if each.batch is not None]


def news(event: int) -> list[bytes]:
    return [struct.pack("=hi", event, 0), b""]


def test_a_position_is_joined_by_a_batch_in_common() -> None:
    assert opening(5, 6).joins(position(6))
    assert opening(5, 6).joins(position(9))


def test_a_position_before_the_first_batch_is_not_joined() -> None:
    """What lies between them, nobody has heard."""
    assert not opening(5, 6).joins(position(5))
    assert not opening(5, 6).joins(position(3))


def test_a_position_of_another_engine_is_not_joined() -> None:
    assert not opening(5, 6).joins(position(8, of=1000))


def test_a_position_so_far_ahead_that_nothing_can_be_compared_is_not_joined() -> None:
    assert not opening(5, 6).joins(position(20))


def test_any_position_is_joined_where_an_engine_is_idle() -> None:
    assert opening().joins(position(20))


def test_batches_that_cannot_be_compared_are_left_out() -> None:
    assert held(opening(5, 6, 7, 8, 9), position(11)) == [7, 8, 9]
    assert held(opening(5, 6), None) == [5, 6]


def test_what_was_heard_goes_with_its_connection() -> None:
    """An engine restarts just when the router does."""
    made = opening(5, 6)
    made.hold_news(news(zmq.Event.DISCONNECTED), 0.0)
    made.hold_batch(frames(0), 0.0)
    assert held(made, None) == [0]
    assert [each.is_news for each in made.behind(None)] == [True, False]


def test_the_newest_are_kept_when_there_are_too_many() -> None:
    """A rank waits for its turn among hundreds: a position that is as new as they are will do."""
    made = opening(5, 6, 7, 8, max_batches=2)
    assert held(made, None) == [7, 8]
    assert made.joins(position(9))
    assert not made.joins(position(7))
    assert held(Opening(100, 1), None) == []
