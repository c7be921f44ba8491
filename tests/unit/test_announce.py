"""Leases of announced workers."""

import msgspec
import pytest

from events.announce import (
    Announced,
    AnnouncedModel,
    Announcement,
    MalformedAnnouncement,
    Told,
    decode_announcement,
    decode_told,
    encode_announcement,
    encode_told,
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


def test_a_worker_may_move_when_nobody_announces_it_where_it_was() -> None:
    announced = connected()
    announced.heard(HERE, 0.0)
    assert announced.heard(Announcement("w", "http://other:8000", 5.0), 5.0)
    assert announced.workers == {"w": "http://other:8000"}
    assert announced.heard(Announcement("w", "http://other:8000", 0.0), 6.0)
    assert announced.heard(HERE, 6.1), "its relay has stopped"
    assert announced.workers == {"w": "http://w:8000"}


def test_a_worker_that_two_relays_announce_at_two_urls_stays_at_the_first() -> None:
    """One spells its host otherwise: the worker would lose its bookings each second."""
    announced = connected()
    for at in (0.0, 2.0, 4.0, 6.0):
        assert announced.heard(HERE, at)
        assert not announced.heard(Announcement("w", "http://localhost:8000", 5.0), at + 1.0)
        announced.tick(at + 1.0, {"w"})
        assert announced.workers == {"w": "http://w:8000"}
    assert not announced.heard(Announcement("w", "http://localhost:8000", 0.0), 7.0)
    announced.tick(8.0, ())
    assert announced.workers == {"w": "http://w:8000"}


def test_an_announcement_survives_its_bytes() -> None:
    assert decode_announcement(encode_announcement(HERE)) == HERE
    with pytest.raises(MalformedAnnouncement):
        decode_announcement(b"\x93\x01")


@pytest.mark.parametrize("lease_s", [float("inf"), 1e308, float("nan"), -1.0])
def test_a_lease_that_would_not_end_is_refused(lease_s: float) -> None:
    """Nothing but a restart would take such a worker away again."""
    with pytest.raises(MalformedAnnouncement):
        decode_announcement(msgspec.msgpack.encode(("worker", "w", "http://w:8000", lease_s)))


TOLD = Told((AnnouncedModel("m", "/models/m"), AnnouncedModel("l", parent="m")), (0, 1), 16, 100)


def with_told(told: object) -> Announcement:
    raw = msgspec.Raw(msgspec.msgpack.encode(told))
    return decode_announcement(encode_announcement(Announcement("w", "http://w:8000", 5.0, raw)))


def test_what_a_relay_knows_of_its_engine_survives_its_bytes() -> None:
    made = Announcement("w", "http://w:8000", 5.0, encode_told(TOLD))
    assert decode_told(decode_announcement(encode_announcement(made))) == TOLD


def test_relays_and_routers_of_other_versions_understand_the_rest() -> None:
    older = msgspec.msgpack.encode(["worker", "w", "http://w:8000", 5.0])
    assert encode_announcement(HERE) == older
    assert decode_told(decode_announcement(older)) is None
    newer = ["worker", "w", "http://w:8000", 5.0, [*msgspec.to_builtins(TOLD), "more"], "more"]
    assert decode_told(decode_announcement(msgspec.msgpack.encode(newer))) == TOLD


@pytest.mark.parametrize(
    "told",
    [
        7,
        None,
        [[["m"]], [-1]],
        [[["m"]], [0], 0],
        [[["m"]], [0], 16, 2**50],
        [[["m"]], [0], "16"],
        [[[""]]],
        [[["m" * 1000]]],
        [[["a\nb"]]],
        [[["lora", None, "m"]]],
        [[], list(range(2000))],
    ],
)
def test_what_makes_no_sense_of_an_engine_is_refused_and_the_worker_is_not(told: object) -> None:
    announcement = with_told(told)
    assert announcement.url == "http://w:8000"
    with pytest.raises(MalformedAnnouncement):
        decode_told(announcement)
