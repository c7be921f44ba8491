"""Listening sockets."""

import contextlib
import errno
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvrouter.config import ServerConfig

BACKLOG = 1024
ALL_ADDRESSES = "*"

_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
"""A machine without IPv6 may still have a name for it."""


@contextlib.contextmanager
def opened(server: ServerConfig, *, shared: bool = False) -> Iterator[list[socket.socket]]:
    """All sockets of the front door, until the context closes. Raises OSError."""
    with contextlib.ExitStack() as exits:
        sockets = listen(server.host, server.port, shared=shared)
        for each in sockets:
            exits.callback(each.close)
        if server.unix_socket is not None:
            at_path = listen_at_path(server.unix_socket)
            exits.callback(Path(server.unix_socket).unlink, missing_ok=True)
            exits.callback(at_path.close)
            sockets.append(at_path)
        yield sockets


def port_of(sockets: Sequence[socket.socket]) -> int:
    """The port that they listen on."""
    ports = [each.getsockname()[1] for each in sockets if each.family != socket.AF_UNIX]
    return int(ports[0])


def listen(host: str, port: int, *, shared: bool = False) -> list[socket.socket]:
    """Listening sockets for each address of `host`, `*` for all; with port 0 for the same free one.

    `shared` ones may be opened again: the kernel spreads connections over them. Raises OSError.
    """
    name = None if host == ALL_ADDRESSES else host
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    with contextlib.ExitStack() as opened:
        for family, _, _, _, address in dict.fromkeys(found):
            try:
                made = _bound(family, (address[0], port, *address[2:]), shared=shared)
            except OSError as error:
                if error.errno in _NO_FAMILY and len(found) > 1:
                    continue
                raise
            opened.callback(made.close)
            sockets.append(made)
            port = made.getsockname()[1]
        if not sockets:
            raise OSError(errno.EADDRNOTAVAIL, f"{host} has no address here")
        opened.pop_all()
    return sockets


def listen_at_path(path: str) -> socket.socket:
    """A listening unix socket; one that a dead process left there is replaced. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.ExitStack() as opened:
        opened.callback(made.close)
        remove(path)
        made.bind(path)
        made.listen(BACKLOG)
        opened.pop_all()
    return made


def remove(path: str) -> None:
    """Remove a unix socket's path, unless somebody listens there. Raises OSError then."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except FileNotFoundError:
            return
        else:
            raise OSError(errno.EADDRINUSE, f"somebody listens at {path}")


def _bound(family: int, address: Sequence[str | int | bytes], *, shared: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    with contextlib.ExitStack() as opened:
        opened.callback(made.close)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(tuple(address))
        made.listen(BACKLOG)
        opened.pop_all()
    return made
