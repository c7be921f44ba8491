"""Which headers pass through the router, and which belong to one connection only. Pure."""

from collections.abc import Iterable

Headers = list[tuple[str, str]]

_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
"""RFC 9110 section 7.6.1, with the older names that it lists."""

_REWRITTEN = frozenset(("host", "content-length", "expect", "accept-encoding"))
"""Of a request: set anew for the engine's connection.

`accept-encoding` because a compressed response could not be scanned.
"""

EXPLAIN = "x-kvrouter-explain"
WORKER = "x-kvrouter-worker"
PREDICTED_CACHED_TOKENS = "x-kvrouter-predicted-cached-tokens"
REQUEST_ID = "x-request-id"
DP_RANK = "x-data-parallel-rank"


def to_engine(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers of a client's request that go on to the engine."""
    return _end_to_end(headers, _REWRITTEN | {EXPLAIN, DP_RANK})


def to_client(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers of an engine's response that go on to the client; Content-Length stays."""
    return _end_to_end(headers, frozenset())


def _end_to_end(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> Headers:
    pairs = list(headers)
    named_by_connection = {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for token in value.split(",")
    }
    dropped = dropped | _HOP_BY_HOP | named_by_connection
    return [(name, value) for name, value in pairs if name.lower() not in dropped]


def retry_after_s(value: str | None) -> float | None:
    """The seconds of a Retry-After header; None where it is absent or a date."""
    return float(value) if value is not None and value.strip().isdecimal() else None
