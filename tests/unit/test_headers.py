"""Which headers pass."""

from kvrouter.http import headers as hdr


def test_end_to_end_headers_pass_in_order_and_number() -> None:
    """F13: credentials and traces of the client reach the engine."""
    pairs = [
        ("Authorization", "Bearer k"),
        ("traceparent", "00-1-2-01"),
        ("X-Request-Id", "r1"),
        ("X-Tag", "a"),
        ("X-Tag", "b"),
    ]
    assert hdr.to_engine(pairs) == pairs


def test_hop_by_hop_headers_and_those_that_connection_names_stay_here() -> None:
    """F13."""
    pairs = [
        ("Connection", "keep-alive, X-Secret"),
        ("x-secret", "1"),
        ("Keep-Alive", "timeout=5"),
        ("Transfer-Encoding", "chunked"),
        ("TE", "trailers"),
        ("Upgrade", "h2c"),
        ("Proxy-Authorization", "Basic x"),
        ("Accept", "*/*"),
    ]
    assert hdr.to_engine(pairs) == [("Accept", "*/*")]
    assert hdr.to_client(pairs) == [("Accept", "*/*")]


def test_what_the_router_sets_anew_is_not_passed_on() -> None:
    pairs = [
        ("Host", "front"),
        ("Content-Length", "3"),
        ("Accept-Encoding", "gzip"),
        ("X-Data-Parallel-Rank", "7"),
        ("X-KVRouter-Explain", "1"),
        ("Expect", "100-continue"),
    ]
    assert hdr.to_engine(pairs) == []
    assert hdr.to_client([("Content-Length", "3")]) == [("Content-Length", "3")]


def test_retry_after_is_read_as_seconds() -> None:
    assert hdr.retry_after_s(" 7 ") == 7.0
    assert hdr.retry_after_s("Wed, 21 Oct 2026 07:28:00 GMT") is None
    assert hdr.retry_after_s("-1") is None
    assert hdr.retry_after_s(None) is None
