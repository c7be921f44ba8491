r"""What a load balancer sends before all else: whose connection it passes on. Pure.

The PROXY protocol of HAProxy, which others speak too: version 1 is a line, version 2 is binary.

    PROXY TCP4 203.0.113.7 10.0.0.1 51234 8000\r\n
    12 fixed bytes; version and command; family; length; addresses; more that is not read here

A balancer that speaks for itself (its health checks) says so, and one may not know the client:
then the header gives no address. Whatever is not exactly a header is none: a guess here would let
anybody choose the address that is logged.
"""

import ipaddress
from dataclasses import dataclass

MAX_LINE_BYTES = 107
"""Of version 1, as its specification says."""
MAX_BYTES = 4096
"""Of version 2, whose length field would allow 64 KiB."""

_LINE_BEGINS = b"PROXY "
_SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
_FIXED_BYTES = 16
_LOCAL, _PROXIED = 0x20, 0x21
_ADDRESS_BYTES = {0x11: (4, 12), 0x21: (16, 36)}
"""TCP over IPv4 and IPv6: the length of the client's address, and of both with their ports."""
_WITHOUT_ADDRESS = frozenset((0x00, 0x12, 0x22, 0x31, 0x32))
"""Families that the specification knows, but that lead to no address of a TCP client."""
_MAX_PORT = 65_535


class BadProxyHeaderError(Exception):
    """These bytes do not begin a PROXY header."""


@dataclass(frozen=True, slots=True)
class ProxyHeader:
    """A whole header."""

    size_bytes: int
    client: str | None
    """The client's address; None where the connection is the balancer's own."""


def parse_proxy_header(data: bytes) -> ProxyHeader | None:
    """The header that `data` begins with; None as long as all of it can be a part of one.

    Raises BadProxyHeaderError.
    """
    if data.startswith(_LINE_BEGINS):
        return _line(data)
    if data.startswith(_SIGNATURE):
        return _binary(data)
    if _LINE_BEGINS.startswith(data) or _SIGNATURE.startswith(data):
        return None
    raise BadProxyHeaderError("it does not begin like one")


def _line(data: bytes) -> ProxyHeader | None:
    end = data.find(b"\n", 0, MAX_LINE_BYTES)
    if end < 0:
        if len(data) >= MAX_LINE_BYTES:
            raise BadProxyHeaderError("its line does not end")
        return None
    if data[end - 1 : end] != b"\r":
        raise BadProxyHeaderError("its line ends without a carriage return")
    words = data[: end - 1].decode("latin-1").split(" ")
    if words[1] == "UNKNOWN":
        return ProxyHeader(end + 1, None)
    try:
        _, family, client, server, *ports = words
        version = {"TCP4": ipaddress.IPv4Address, "TCP6": ipaddress.IPv6Address}[family]
        version(server)
        address = str(version(client))
    except (ValueError, KeyError) as error:
        raise BadProxyHeaderError("its line lacks two addresses of one family") from error
    if len(ports) != 2 or not all(map(_is_port, ports)):  # noqa: PLR2004 - of client and server
        raise BadProxyHeaderError("its line lacks two ports")
    return ProxyHeader(end + 1, address)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and text == str(int(text)) and int(text) <= _MAX_PORT


def _binary(data: bytes) -> ProxyHeader | None:
    if len(data) < _FIXED_BYTES:
        return None
    command, family = data[12], data[13]
    length = int.from_bytes(data[14:_FIXED_BYTES], "big")
    if command not in (_LOCAL, _PROXIED):
        raise BadProxyHeaderError("its version or command is not known")
    size_bytes = _FIXED_BYTES + length
    if size_bytes > MAX_BYTES:
        raise BadProxyHeaderError(f"it is longer than {MAX_BYTES} bytes")
    if len(data) < size_bytes:
        return None
    if command == _LOCAL or family in _WITHOUT_ADDRESS:
        return ProxyHeader(size_bytes, None)
    if family not in _ADDRESS_BYTES:
        raise BadProxyHeaderError("its address family is not known")
    address_bytes, needed_bytes = _ADDRESS_BYTES[family]
    if length < needed_bytes:
        raise BadProxyHeaderError("it is too short for its addresses")
    packed = data[_FIXED_BYTES : _FIXED_BYTES + address_bytes]
    return ProxyHeader(size_bytes, str(ipaddress.ip_address(packed)))
