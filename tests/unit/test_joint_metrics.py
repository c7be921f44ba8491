"""One scrape from those of several processes."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvrouter.processes.joint_metrics import joined


def scrape(requests: int, blocks: int, seconds: float) -> str:
    registry = CollectorRegistry()
    Counter("requests", "so many", ["path"], registry=registry).labels("/a").inc(requests)
    Gauge("blocks", "now", registry=registry).set(blocks)
    Histogram("took", "so long", buckets=[1.0], registry=registry).observe(seconds)
    return generate_latest(registry).decode()


def test_what_is_counted_is_summed_and_what_is_now_is_told_apart() -> None:
    lines = joined({"0": scrape(3, 10, 0.5), "1": scrape(4, 20, 2.0)}).decode().splitlines()
    assert 'requests_total{path="/a"} 7.0' in lines
    assert 'blocks{process="0"} 10.0' in lines
    assert 'blocks{process="1"} 20.0' in lines
    assert 'took_bucket{le="1.0"} 1.0' in lines
    assert 'took_bucket{le="+Inf"} 2.0' in lines
    assert "took_sum 2.5" in lines
    assert lines.count("# TYPE requests_total counter") == 1


def test_no_process_makes_an_empty_scrape() -> None:
    assert joined({}) == b""
