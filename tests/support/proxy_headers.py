"""PROXY protocol headers as load balancers write them."""

import ipaddress

SIGNATURE = b"\r\n\r\n\x00\r\nQUIT\n"
TCP4, TCP6 = 0x11, 0x21
LOCAL, PROXIED = 0x20, 0x21


def line(client: str, server: str = "10.0.0.1") -> bytes:
    """Version 1."""
    version = ipaddress.ip_address(client).version
    return f"PROXY TCP{version} {client} {server} 51234 8000\r\n".encode()


def binary(client: str, server: str = "10.0.0.1", *, more: bytes = b"") -> bytes:
    """Version 2; `more` are its optional fields."""
    addresses = [ipaddress.ip_address(each) for each in (client, server)]
    body = b"".join(each.packed for each in addresses) + b"\xc8\x22\x1f\x40" + more
    return raw_binary(PROXIED, TCP4 if addresses[0].version == 4 else TCP6, body)


def raw_binary(command: int, family: int, body: bytes) -> bytes:
    """Version 2 with anything in it."""
    return SIGNATURE + bytes((command, family)) + len(body).to_bytes(2, "big") + body
