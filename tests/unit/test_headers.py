"""Which headers pass."""

from kvrouter.http import headers as hdr


def test_end_to_end_headers_pass_in_order_and_number() -> None:
    """F13: credentials and traces of the client reach the engine."""
    pairs = [
        ("authorization", "Bearer k"),
        ("traceparent", "00-1-2-01"),
        ("x-request-id", "r1"),
        ("x-tag", "a"),
        ("x-tag", "b"),
    ]
    assert hdr.to_engine(pairs) == pairs


def test_hop_by_hop_headers_and_those_that_connection_names_stay_here() -> None:
    """F13."""
    pairs = [
        ("connection", "keep-alive, X-Secret"),
        ("x-secret", "1"),
        ("keep-alive", "timeout=5"),
        ("transfer-encoding", "chunked"),
        ("te", "trailers"),
        ("upgrade", "h2c"),
        ("proxy-authorization", "Basic x"),
        ("accept", "*/*"),
    ]
    assert hdr.to_engine(pairs) == [("accept", "*/*")]
    assert hdr.to_client(pairs) == [("accept", "*/*")]


def test_what_the_router_sets_anew_is_not_passed_on() -> None:
    pairs = [
        ("host", "front"),
        ("content-length", "3"),
        ("accept-encoding", "gzip"),
        ("x-data-parallel-rank", "7"),
        ("x-kvrouter-explain", "1"),
        ("expect", "100-continue"),
    ]
    assert hdr.to_engine(pairs) == []
    assert hdr.to_client([("content-length", "3"), ("server", "x")]) == [("server", "x")]


def test_retry_after_is_read_as_seconds() -> None:
    assert hdr.retry_after_s(" 7 ") == 7.0
    assert hdr.retry_after_s("Wed, 21 Oct 2026 07:28:00 GMT") is None
    assert hdr.retry_after_s("-1") is None
    assert hdr.retry_after_s(None) is None
