"""PROXY headers: what is one, how long it is, and whom it names."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.proxy_headers import LOCAL, PROXIED, SIGNATURE, TCP4, TCP6, binary, line, raw_binary

from kvrouter.http.proxy_header import (
    MAX_BYTES,
    BadProxyHeaderError,
    ProxyHeader,
    parse_proxy_header,
)

TLV = b"\x02\x00\x04host\x20\x00\x02\x01\x00"
GOOD = {
    line("203.0.113.7"): "203.0.113.7",
    line("2001:db8::7", "2001:db8::1"): "2001:db8::7",
    b"PROXY UNKNOWN\r\n": None,
    b"PROXY UNKNOWN ffff:f...f:ffff ffff 65535 65535\r\n": None,
    b"PROXY TCP4 255.255.255.255 255.255.255.255 0 65535\r\n": "255.255.255.255",
    binary("203.0.113.7"): "203.0.113.7",
    binary("203.0.113.7", more=TLV): "203.0.113.7",
    binary("2001:db8::7", "2001:db8::1"): "2001:db8::7",
    raw_binary(LOCAL, 0x00, b""): None,
    raw_binary(LOCAL, TCP4, b"\x01" * 12): None,
    raw_binary(LOCAL, 0xFF, TLV): None,
    raw_binary(PROXIED, 0x00, TLV): None,
    raw_binary(PROXIED, 0x31, b"/run/a.sock".ljust(216, b"\x00")): None,
    raw_binary(PROXIED, 0x12, b"\x01" * 12): None,
}
REQUEST = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
BAD = [
    REQUEST,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS handshake
    b"proxy TCP4 1.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY\r\n",
    b"PROXY \r\n",
    b"PROXY TCP4\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2 3\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 2\n",
    b"PROXY TCP4  1.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 1 65536\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 01 2\r\n",
    b"PROXY TCP4 1.2.3.4 1.2.3.4 -1 2\r\n",
    "PROXY TCP4 1.2.3.4 1.2.3.4 ٣ 2\r\n".encode(),
    b"PROXY TCP4 1.2.3.256 1.2.3.4 1 2\r\n",
    b"PROXY TCP4 01.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY TCP4 ::1 ::1 1 2\r\n",
    b"PROXY TCP6 1.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY TCP6 ::1 1.2.3.4 1 2\r\n",
    b"PROXY UDP4 1.2.3.4 1.2.3.4 1 2\r\n",
    b"PROXY UNKNOWN" + b" " * 100 + b"\r\n",
    b"PROXY TCP4 " + b"1" * 200,
    raw_binary(0x11, TCP4, b"\x01" * 12),
    raw_binary(0x22, TCP4, b"\x01" * 12),
    raw_binary(PROXIED, TCP4, b"\x01" * 11),
    raw_binary(PROXIED, TCP6, b"\x01" * 35),
    raw_binary(PROXIED, 0x41, b"\x01" * 12),
    raw_binary(PROXIED, TCP4, b"\x01" * MAX_BYTES),
    SIGNATURE[:-1] + b"X",
]


@pytest.mark.parametrize("behind", [b"", REQUEST, SIGNATURE, b"PROXY TCP4 9.9.9.9 9.9.9.9 1 1\r\n"])
def test_a_header_ends_where_it_says_and_names_the_client(behind: bytes) -> None:
    for header, client in GOOD.items():
        assert parse_proxy_header(header + behind) == ProxyHeader(len(header), client)


def test_a_part_of_a_header_is_none_yet() -> None:
    for header in GOOD:
        for size in range(len(header)):
            assert parse_proxy_header(header[:size]) is None


def test_what_is_not_exactly_a_header_is_refused() -> None:
    for data in BAD:
        with pytest.raises(BadProxyHeaderError):
            parse_proxy_header(data)


@settings(max_examples=50)
@given(st.sampled_from([b"", b"PROXY ", b"PROXY TCP4 ", SIGNATURE]), st.binary(max_size=200))
def test_whatever_comes_it_is_a_header_or_none_or_refused_soon(begin: bytes, rest: bytes) -> None:
    """Never another error, and never a wait beyond the limit."""
    data = begin + rest
    try:
        header = parse_proxy_header(data)
        longest = parse_proxy_header(data.ljust(MAX_BYTES, b"\x00"))
    except BadProxyHeaderError:
        return
    assert longest is not None
    assert header is None or 0 < header.size_bytes <= len(data)
