"""Leases of announced workers."""

import pytest

from events.announce import (
    Announced,
    Announcement,
    MalformedAnnouncement,
    decode_announcement,
    encode_announcement,
)

HERE = Announcement("w", "http://w:8000", 5.0)
GONE = Announcement("w", "http://w:8000", 0.0)


def connected() -> Announced:
    announced = Announced()
    announced.connection_changed(0.0, connected=True)
    return announced


def test_a_worker_whose_engine_is_gone_is_there_until_its_lease_ends() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.heard(HERE, 3.0)
    announced.tick(7.9, ())
    assert announced.workers == {"w": "http://w:8000"}
    announced.tick(8.0, ())
    assert announced.workers == {}


def test_a_worker_whose_engine_answers_outlives_its_lease() -> None:
    """R3: its relay was killed, or NATS hangs; neither is a reason to refuse requests."""
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.tick(1000.0, {"w"})
    assert announced.workers == {"w": "http://w:8000"}
    announced.tick(1001.0, ())
    assert announced.workers == {}


def test_a_relay_that_stops_leaves_a_worker_for_one_more_lease() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    for at in (1.0, 2.0):
        announced.heard(GONE, at)
    announced.tick(5.9, {"w"})
    assert announced.workers == {"w": "http://w:8000"}
    announced.tick(6.0, {"w"})
    assert announced.workers == {}
    announced.heard(GONE, 7.0)  # of what nobody knows
    assert announced.workers == {}


def test_a_relay_that_starts_again_keeps_its_workers() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.heard(GONE, 1.0)
    announced.heard(HERE, 5.0)
    announced.tick(9.9, ())
    assert announced.workers == {"w": "http://w:8000"}


def test_a_worker_whose_relay_stops_goes_at_once_with_its_engine() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.tick(0.5, ())
    assert announced.workers
    announced.heard(GONE, 1.0)
    announced.tick(1.5, ())
    assert announced.workers == {}


def test_an_engine_with_another_name_by_now_is_not_kept_twice() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.heard(Announcement("renamed", HERE.url, 5.0), 4.0)
    announced.tick(4.9, {"w", "renamed"})
    assert set(announced.workers) == {"w", "renamed"}
    announced.tick(5.0, {"w", "renamed"})
    assert set(announced.workers) == {"renamed"}


def test_no_lease_ends_while_nothing_can_be_heard() -> None:
    """R3: NATS is down; the workers are not."""
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.connection_changed(1.0, connected=False)
    announced.tick(100.0, ())
    announced.connection_changed(100.0, connected=True)
    announced.tick(104.9, ())
    assert announced.workers
    announced.tick(105.0, ())
    assert announced.workers == {}


def test_a_worker_may_move() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.heard(Announcement("w", "http://other:8000", 5.0), 1.0)
    assert announced.workers == {"w": "http://other:8000"}


def test_an_announcement_survives_its_bytes() -> None:
    assert decode_announcement(encode_announcement(HERE)) == HERE
    with pytest.raises(MalformedAnnouncement):
        decode_announcement(b"\x93\x01")
