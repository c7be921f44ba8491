"""What the second port shows of other replicas, and of the connection to them."""

import datetime as dt
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from events.nats_link import LinkState, NatsLink
from kvrouter.replication import Company, Replication
from kvrouter.sharing import Sharing, Warmth


def replicas(sharing: Sharing | None, link: NatsLink | None) -> dict[str, Any]:
    """For GET /workers."""
    report = _company(sharing)
    if link is not None:
        report["nats"] = {
            "state": link.state.value,
            "since": _time(link.state_since),
            "server": link.server,
            "problem": link.problem,
        }
    return report


def _company(sharing: Sharing | None) -> dict[str, Any]:
    if sharing is None:
        return {"company": Company.ALONE.value, "why": "this router shares with no other"}
    replication = sharing.replication
    return {
        "name": replication.ledger.replica,
        "company": replication.company.value,
        "since": _time(replication.company_since),
        "others": replication.mirror.replicas(),
        "awaited": replication.mirror.uncertain(),
        "load_of_others": _loads(sharing),
    }


def _loads(sharing: Sharing) -> list[dict[str, Any]]:
    loads = {rank: sharing.load.of_others(rank) for rank in sharing.load.ranks_of_others()}
    return [
        {
            "worker": rank.worker,
            "dp_rank": rank.dp_rank,
            "active_requests": load.active_requests,
            "prefill_tokens": load.prefill_tokens,
            "decode_blocks": load.decode_blocks,
        }
        for rank, load in loads.items()
    ]


def _time(unix_s: float) -> str:
    return dt.datetime.fromtimestamp(unix_s, dt.UTC).isoformat(timespec="seconds")


class ReplicaCollector(Collector):
    """The same for Prometheus. Names of replicas are no labels: they are new with each start."""

    def __init__(self, sharing: Sharing | None, link: NatsLink | None) -> None:
        self._sharing = sharing
        self._link = link

    def collect(self) -> Iterable[Metric]:
        """All families, for one scrape."""
        if self._sharing is not None:
            yield from _replication_metrics(self._sharing.replication)
            if self._sharing.warmth is not None:
                yield from _warmth_metrics(self._sharing.warmth)
        if self._link is not None:
            yield from _link_metrics(self._link)


def _replication_metrics(replication: Replication) -> Iterator[Metric]:
    company = GaugeMetricFamily(
        "kvrouter_replicas_company", "1 for whether others are heard", labels=["company"]
    )
    for each in Company:
        company.add_metric([each.value], replication.company is each)
    yield company
    others = replication.mirror.replicas()
    yield _gauge("others", "Other replicas that are heard", len(others))
    yield _gauge("others_requests", "Booked requests of the others", sum(others.values()))
    for stats, counts in (
        (replication.mirror.stats, _MIRROR_COUNTS),
        (replication.stats, _REPLICATION_COUNTS),
        (replication.bus, _BUS_COUNTS),
    ):
        for name, text in counts.items():
            yield CounterMetricFamily(f"kvrouter_replicas_{name}", text, value=getattr(stats, name))


def _warmth_metrics(warmth: Warmth) -> Iterator[Metric]:
    for name, text, value in (
        ("ranks_taken", "Ranks begun with another replica's blocks", warmth.taking.taken),
        ("ranks_given", "Times a rank's blocks were given to another replica", warmth.giving.given),
    ):
        yield CounterMetricFamily(f"kvrouter_replicas_{name}", text, value=value)


def _link_metrics(link: NatsLink) -> Iterator[Metric]:
    state = GaugeMetricFamily(
        "kvrouter_nats_state", "1 for the state of the connection", labels=["state"]
    )
    for each in LinkState:
        state.add_metric([each.value], link.state is each)
    yield state
    for name, text in _LINK_COUNTS.items():
        yield CounterMetricFamily(f"kvrouter_nats_{name}", text, value=getattr(link.stats, name))


_MIRROR_COUNTS = {
    "messages": "Messages of other replicas",
    "duplicates": "Messages that were known or too old",
    "gaps": "Times messages of a replica were missing",
    "asked": "Times a replica was asked for its bookings",
    "states": "Times a replica's bookings came as a whole",
    "expired": "Replicas that were not heard any more",
    "namesakes": "Messages of another process that has our name",
}
_REPLICATION_COUNTS = {
    "told": "Messages to all others",
    "told_bytes": "Bytes of messages to all others",
    "states_told": "Times our bookings were sent as a whole",
    "malformed": "Messages that could not be read",
}
_BUS_COUNTS = {"dropped": "Messages that could not be sent"}
_LINK_COUNTS = {
    "connects": "Connections to a server",
    "failed_connects": "Servers that could not be connected to",
    "unsent": "Messages that were dropped without a connection",
    "slow": "Messages that came faster than they were taken, and were dropped",
    "refused": "Subjects that the server does not allow",
}


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvrouter_replicas_{name}", text, value=value)
