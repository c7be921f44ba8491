"""What is a message of a replica, and what only looks like one."""

import random
from typing import Any

import msgspec
import pytest

from events.history import Position
from events.replica import (
    Ask,
    Beat,
    Booking,
    IndexOffer,
    IndexPart,
    IndexQuestion,
    MalformedMessage,
    Message,
    Mirror,
    Ops,
    State,
    decode_message,
    encode_message,
)
from events.replica.messages import Book, Grow
from events.replica.sampling import POSITIONS, sample

RIGHT = Booking(1, "w", 0, 16, 100, waiting=True, own_blocks=2, cached_samples=1, samples=bytes(16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"block_size": -16},
        {"block_size": 2**40},
        {"lease": -1},
        {"worker": ""},
        {"dp_rank": -1},
        {"prefill_tokens": -1},
        {"own_blocks": -1},
        {"cached_samples": -1},
        {"cached_samples": 3},
        {"samples": bytes(15)},
        {"samples": bytes(8 * len(POSITIONS))},
        {"age_ms": -1},
    ],
    ids=str,
)
def test_a_booking_that_cannot_be_is_malformed_wherever_it_stands(wrong: dict[str, Any]) -> None:
    booking = msgspec.structs.replace(RIGHT, **wrong)
    for message in (
        Ops("r", 1, 1, [Book(RIGHT), Book(booking)]),
        State("r", 1, 1, 0, 1, [RIGHT, booking], []),
        State("r", 1, 1, 0, 1, [], [booking]),
    ):
        with pytest.raises(MalformedMessage):
            decode_message(encode_message(message))


@pytest.mark.parametrize(
    "message",
    [
        Ops("r", 1, 1, [Grow(1, -1)]),
        Ops("r", 1, -1, []),
        Ops("", 1, 1, []),
        Beat("r", -1, 1),
        Beat("r", 1, 2**63),
        Beat("r" * 2000, 1, 1),
        Beat("r\n", 1, 1),
        Beat("r\n2026 ERROR all is lost", 1, 1),
        Beat("r\x1b[31m", 1, 1),
        Ask("", 1),
        State("r", 1, 1, 0, 0, [], []),
        State("r", 1, 1, 2, 2, [], []),
        State("r", 1, 1, -1, 2, [], []),
        IndexQuestion("r", 1, 1, "w", -1),
        IndexOffer("r", 1, 1, -1, None),
        IndexOffer("r", 1, 1, 1, Position(-1, [], cold=False)),
        IndexPart("r", 1, 1, -1, b"", None),
        IndexPart("r", 1, 1, 0, b"", Position(1, [1, 2], cold=False)),
    ],
    ids=str,
)
def test_a_message_with_a_number_or_a_name_that_cannot_be_is_malformed(message: Message) -> None:
    with pytest.raises(MalformedMessage):
        decode_message(encode_message(message))


def test_the_longest_prompt_there_can_be_is_a_booking() -> None:
    samples = sample(bytes(8 * POSITIONS[100]))
    booking = msgspec.structs.replace(RIGHT, samples=samples, cached_samples=100)
    message = Ops("r", 1, 1, [Book(RIGHT), Book(booking)])
    assert decode_message(encode_message(message)) == message


def test_a_beat_from_far_ahead_costs_no_more_than_any_other() -> None:
    """What it says was missed cannot be counted out one by one."""
    mirror = Mirror("me", 1, random.Random(1))
    mirror.hear(Beat("r", 1, 2**62), 0.0)
    mirror.hear(State("r", 1, 5, 0, 1, [RIGHT], []), 0.0)
    assert mirror.uncertain() == ["r"]
