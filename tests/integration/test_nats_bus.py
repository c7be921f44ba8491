"""Replicas over a real nats-server, as far as it is about who hears whom."""

import logging
from random import Random

import pytest
from support.nats import connected, link_to, nats_server
from support.streams import eventually, running

from events.nats_bus import NatsBus
from events.nats_link import NatsLink
from events.replica import Ledger, Mirror
from events.subjects import Subjects
from kvrouter.load import Load
from kvrouter.replication import Replication
from kvrouter.shared_load import SharedLoad


def replica(link: NatsLink, name: str, epoch: int) -> Replication:
    load, ledger, mirror = Load(), Ledger(name, epoch), Mirror(name, epoch, Random(1))
    bus = NatsBus(link, Subjects("test"), name)
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
