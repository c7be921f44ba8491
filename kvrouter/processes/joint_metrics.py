"""One scrape from the scrapes of several processes. Pure.

Counters and histograms are summed: who made them does not matter. What has a value at a moment
(gauges) is a fact about one process, and gets the label `process`.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

_SUMMED = ("counter", "histogram", "summary")


def joined(scrapes: Mapping[str, str]) -> bytes:
    """The scrape that stands for these, by the name of the process. In Prometheus's text format."""
    return generate_latest(_Joined(scrapes))


class _Joined(Collector):
    def __init__(self, scrapes: Mapping[str, str]) -> None:
        self._scrapes = scrapes

    def collect(self) -> Iterable[Metric]:
        families: dict[str, list[tuple[str, Metric]]] = {}
        for process, text in self._scrapes.items():
            for family in text_string_to_metric_families(text):
                families.setdefault(family.name, []).append((process, family))
        return map(_joined_family, families.values())


def _joined_family(family: list[tuple[str, Metric]]) -> Metric:
    first = family[0][1]
    metric = Metric(first.name, first.documentation, first.type)
    adds = _sums if first.type in _SUMMED else _each
    for name, labels, value in adds(family):
        metric.add_sample(name, labels, value)
    return metric


def _sums(family: list[tuple[str, Metric]]) -> Iterator[tuple[str, dict[str, str], float]]:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for _, metric in family:
        for sample in metric.samples:
            key = sample.name, tuple(sample.labels.items())
            sums[key] = sums.get(key, 0.0) + sample.value
    for (name, labels), value in sums.items():
        yield name, dict(labels), value


def _each(family: list[tuple[str, Metric]]) -> Iterator[tuple[str, dict[str, str], float]]:
    for process, metric in family:
        for sample in metric.samples:
            yield sample.name, {"process": process, **sample.labels}, sample.value
