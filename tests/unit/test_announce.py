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


def connected() -> Announced:
    announced = Announced()
    announced.connection_changed(0.0, connected=True)
    return announced


def test_a_worker_is_there_until_its_lease_ends() -> None:
    announced = connected()
    assert announced.heard(HERE, 0.0)
    assert not announced.heard(HERE, 3.0)
    assert not announced.tick(7.9)
    assert announced.workers == {"w": "http://w:8000"}
    assert announced.tick(8.0)
    assert announced.workers == {}


def test_a_worker_that_is_said_to_be_gone_is() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    assert announced.heard(Announcement("w", "http://w:8000", 0.0), 1.0)
    assert announced.workers == {}


def test_no_lease_ends_while_nothing_can_be_heard() -> None:
    """R3: NATS is down; the workers are not."""
    announced = connected()
    announced.heard(HERE, 0.0)
    announced.connection_changed(1.0, connected=False)
    assert not announced.tick(100.0)
    announced.connection_changed(100.0, connected=True)
    assert not announced.tick(104.9)
    assert announced.tick(105.0)


def test_a_worker_may_move() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    assert announced.heard(Announcement("w", "http://other:8000", 5.0), 1.0)
    assert announced.workers == {"w": "http://other:8000"}


def test_an_announcement_survives_its_bytes() -> None:
    assert decode_announcement(encode_announcement(HERE)) == HERE
    with pytest.raises(MalformedAnnouncement):
        decode_announcement(b"\x93\x01")
