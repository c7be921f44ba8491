"""The telling side of replicas: what is said of own bookings."""

import pytest

from events import WorkerRank
from events.replica import Ledger, LedgerSettings, Ops, encode_message
from events.replica.messages import Book, Grow, PrefillDone, Settle


def ledger_with(lease: int = 1, *, blocks: int = 4, hashed: int = 3) -> Ledger:
    ledger = Ledger("r", 1, LedgerSettings(grow_blocks=8))
    book(ledger, lease, blocks=blocks, hashed=hashed)
    return ledger


def book(ledger: Ledger, lease: int, *, blocks: int = 4, hashed: int = 3) -> None:
    ledger.book(
        lease,
        WorkerRank("w", 1),
        hashes=bytes(8 * hashed),
        cached_blocks=2,
        all_blocks=blocks,
        block_size=16,
        prefill_tokens=30,
        now=0.0,
    )


def said(ledger: Ledger) -> list[object]:
    return [op for ops in ledger.flush() for op in ops.ops]


def test_a_burst_is_one_message() -> None:
    ledger = ledger_with(1)
    book(ledger, 2)
    ledger.settle(1)
    (ops,) = ledger.flush()
    assert isinstance(ops, Ops)
    assert [type(op) for op in ops.ops] == [Book, Book, Settle]
    assert ops.seqno == ledger.beat().seqno == 1
    assert ledger.flush() == []


def test_a_long_burst_is_several_messages() -> None:
    ledger = Ledger("r", 1, LedgerSettings(max_ops=2))
    for lease in range(5):
        book(ledger, lease)
    assert [(ops.seqno, len(ops.ops)) for ops in ledger.flush()] == [(1, 2), (2, 2), (3, 1)]


def test_the_blocks_that_no_sample_stands_for_are_the_bookings_own() -> None:
    ledger = Ledger("r", 1)
    book(ledger, 1, hashed=19, blocks=21)
    (op,) = said(ledger)
    assert isinstance(op, Book)
    assert len(op.booking.samples) == 8 * 17  # 1 to 16, and 18
    assert op.booking.own_blocks == 3
    assert op.booking.cached_samples == 2


def test_output_is_told_in_steps() -> None:
    ledger = ledger_with(1, blocks=4, hashed=3)
    said(ledger)
    for blocks in range(5, 30):
        ledger.grow(1, blocks)
    assert said(ledger) == [Grow(1, 9), Grow(1, 17), Grow(1, 25)]


def test_a_prefill_is_done_once_and_a_booking_over_once() -> None:
    ledger = ledger_with(1)
    said(ledger)
    for _ in range(2):
        ledger.prefill_done(1)
    for _ in range(2):
        ledger.settle(1)
    ledger.prefill_done(1)
    ledger.grow(1, 100)
    assert said(ledger) == [PrefillDone(1), Settle(1)]
    assert len(ledger) == 0


def test_a_state_has_all_bookings_and_those_that_ended_lately() -> None:
    ledger = Ledger("r", 1, LedgerSettings(part_bookings=2, lately_s=10.0))
    for lease in range(4):
        book(ledger, lease)
    ledger.settle(0)
    ledger.flush()
    parts = ledger.state(5.0)
    assert [each.lease for part in parts for each in part.bookings] == [1, 2, 3]
    assert [each.lease for part in parts for each in part.lately] == [0]
    assert {(part.parts, part.seqno) for part in parts} == {(2, 1)}
    assert parts[0].bookings[0].age_ms == 5000
    assert ledger.state(11.0)[0].lately == []


def test_a_state_without_bookings_is_still_an_answer() -> None:
    (state,) = Ledger("r", 1).state(0.0)
    assert (state.parts, state.bookings) == (1, [])


def test_a_state_is_as_of_the_last_flush() -> None:
    with pytest.raises(ValueError, match="seqno"):
        ledger_with(1).state(0.0)


def test_a_booking_of_128k_tokens_fits_into_a_kilobyte() -> None:
    ledger = ledger_with(1, hashed=8192, blocks=8193)
    (ops,) = ledger.flush()
    assert len(encode_message(ops)) < 1024
