"""Which headers pass through the router, and which belong to one connection only. Pure.

Names are in lower case from the moment they are read: they mean the same in any case, and so does
a proxy for HTTP/2.
"""

from collections.abc import Iterable

Headers = list[tuple[str, str]]

_MAX_KNOWN_NAMES = 1024
KNOWN_NAMES: dict[bytes, str] = {}
"""Names of headers as they are used here, by what was read: where to look before `field_name`."""


def field_name(raw: bytes) -> str:
    """A header's name as it is used here; from now on it is known, if there is room."""
    name = raw.lower().decode("latin-1")
    if len(KNOWN_NAMES) < _MAX_KNOWN_NAMES:
        KNOWN_NAMES[raw] = name
    return name


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

_FRAMING = frozenset(("content-length",))
"""Of a response: set anew for the client's connection."""

EXPLAIN = "x-kvrouter-explain"
WORKER = "x-kvrouter-worker"
PREDICTED_CACHED_TOKENS = "x-kvrouter-predicted-cached-tokens"
REQUEST_ID = "x-request-id"
DP_RANK = "x-data-parallel-rank"


def to_engine(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers of a client's request that go on to the engine."""
    return _end_to_end(headers, _NOT_TO_ENGINE)


def to_client(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers of an engine's response that go on to the client."""
    return _end_to_end(headers, _NOT_TO_CLIENT)


_NOT_TO_ENGINE = _HOP_BY_HOP | _REWRITTEN | {EXPLAIN, DP_RANK}
_NOT_TO_CLIENT = _HOP_BY_HOP | _FRAMING


def _end_to_end(headers: Iterable[tuple[str, str]], dropped: frozenset[str]) -> Headers:
    kept: Headers = []
    named: set[str] = set()
    for pair in headers:
        if pair[0] not in dropped:
            kept.append(pair)
        elif pair[0] == "connection":
            named.update(token.strip().lower() for token in pair[1].split(","))
    if named - dropped:
        return [pair for pair in kept if pair[0] not in named]
    return kept


def retry_after_s(value: str | None) -> float | None:
    """The seconds of a Retry-After header; None where it is absent or a date."""
    return float(value) if value is not None and value.strip().isdecimal() else None
