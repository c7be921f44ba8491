"""Counters and histograms that are counted for each request: plain numbers until someone scrapes.

One event loop counts, so nothing is locked, and a label's series is an entry of a dictionary that
whoever counts holds in its hands: that costs a tenth of what the client library's own classes take.
Labels must be closed sets.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """A counter: add to `counts`, by the values of the labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self.counts: defaultdict[tuple[str, ...], float] = defaultdict(float)
        if not labels:
            self.counts[()] = 0.0

    def family(self) -> Metric:
        """What a scrape gets."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for key, count in self.counts.items():
            family.add_metric(key, count)
        return family


class Row:
    """The values of one series of a histogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class Distribution:
    """A histogram: values go to its `rows`, by the values of the labels."""

    def __init__(
        self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._labels = labels
        self.rows: defaultdict[tuple[str, ...], Row] = defaultdict(lambda: Row(bounds))
        if not labels:
            self.rows[()] = Row(bounds)

    def family(self) -> Metric:
        """What a scrape gets."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for key, row in self.rows.items():
            below = 0
            buckets = []
            for name, count in zip(names, row.counts, strict=True):
                below += count
                buckets.append((name, below))
            family.add_metric(key, buckets, row.total)
        return family


class CountsCollector(Collector):
    """Makes counts readable for a registry."""

    def __init__(self, counts: Sequence[Tally | Distribution]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """All families, for one scrape."""
        return [each.family() for each in self._counts]
