"""Replicas over a real nats-server, as far as it is about who hears whom."""

import logging
from random import Random
from typing import Any

import pytest
from support.fleets import new_fleet
from support.nats import connected, link_to, nats_server
from support.streams import eventually, running

from events import WorkerRank
from events.nats_bus import NatsBus
from events.nats_link import NatsLink, Received
from events.replica import Ledger, Mirror
from events.subjects import Subjects
from kvrouter.discovery import Discovery
from kvrouter.load import Load
from kvrouter.relay.service import Relay
from kvrouter.replication import Replication
from kvrouter.shared_load import SharedLoad

SUBJECTS = Subjects("test")


def replica(link: NatsLink, name: str, epoch: int) -> Replication:
    load, ledger, mirror = Load(), Ledger(name, epoch), Mirror(name, epoch, Random(1))
    bus = NatsBus(link, SUBJECTS, name)
    return Replication(ledger, mirror, SharedLoad(load, ledger), bus, beat_s=0.02)


async def test_two_routers_of_one_name_find_each_other_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A configuration file with `replicas.name` in it was copied to all routers."""
    caplog.set_level(logging.WARNING)
    async with nats_server() as server:
        links = [link_to(server.url) for _ in range(3)]
        one, two = (replica(link, "same", epoch) for epoch, link in enumerate(links[:2]))
        third = replica(links[2], "other", 1)
        async with connected(*links), running(one, two, third):
            counts = one.mirror.stats, two.mirror.stats
            await eventually(lambda: all(each.namesakes > 3 for each in counts))
            await eventually(lambda: third.stats.told > 5)
    assert third.mirror.stats.namesakes == 0
    lines = [each.getMessage() for each in caplog.records if "replicas.name" in each.getMessage()]
    assert len(lines) == 2, "one of each, however often they hear each other"
    assert "named same too" in lines[0]


def nobody(worker: Any) -> Any:
    """Keeps no worker: none is announced."""
    raise AssertionError(worker)


async def test_garbage_by_the_thousand_is_a_line_each_not_a_flood(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody speaks another version, again and again."""
    caplog.set_level(logging.WARNING)
    rank, garbage = WorkerRank("w"), b"\x93\x01"
    async with nats_server() as server:
        link, noise = link_to(server.url), link_to(server.url)
        heard: list[Received] = []
        begun: list[Received] = []
        relay, one = Relay(link, SUBJECTS), replica(link, "one", 1)
        relay.add(rank)
        discovery = Discovery(new_fleet(), link, SUBJECTS, nobody)
        noise.subscribe("begin", begun.append)
        async with connected(link, noise), running(one, discovery):
            await eventually(lambda: one.stats.told > 1)
            link.subscribe("end", heard.append)
            link.publish("begin", b"")  # after what is subscribed to, so it tells that all is
            await eventually(lambda: len(begun) == 1)
            for _ in range(1000):
                noise.publish(SUBJECTS.worker("w"), garbage)
                noise.publish(SUBJECTS.history("w", 0), garbage, "answers")
                noise.publish(SUBJECTS.bookings("two"), garbage)
            await eventually(lambda: one.stats.malformed == 1000)
            noise.publish("end", b"")
            await eventually(lambda: len(heard) == 1)
    words = [each.getMessage() for each in caplog.records]
    for what in ("an announcement of a worker", "a request that cannot", "a message that is none"):
        assert sum(what in each for each in words) == 1, words


async def test_a_healthy_start_is_told_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    def told(text: str) -> bool:
        return any(text in each.getMessage() for each in caplog.records)

    async with nats_server() as server:
        here, there = link_to(server.url), link_to(server.url)
        one, two = replica(here, "one", 1), replica(there, "two", 1)
        async with connected(here, there), running(one):
            await eventually(lambda: told("replicas: single (others heard: 0)"))
            async with running(two):
                await eventually(lambda: told("replicas: two has joined"))
                await eventually(lambda: told("replicas: shared (others heard: 1)"))
            await eventually(lambda: told("replicas: two is gone"))
        assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
        async with connected(here), running(one):
            await server.stop()
            await eventually(lambda: told("replicas: alone"))
    lines = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    lost = f"NATS lost: {server.url}: "
    assert any(each.startswith(lost) and len(each) > len(lost) for each in lines), "with a reason"
    assert any(each.startswith("replicas: alone") for each in lines)
