"""What a worker's URL says: a host and port, or the path of a unix socket. Pure.

http://gpu1:8000        https://gpu1:8443        unix:/run/vllm.sock
"""

from urllib.parse import urlsplit

_UNIX = "unix"
MAX_PATH_BYTES = 107
"""What the kernel takes for the path of a unix socket."""


def socket_path(url: str) -> str | None:
    """The path of the unix socket that the URL names; None where it names a host."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == _UNIX else None


def http_base(url: str) -> str:
    """What HTTP clients put before a path; over a unix socket some host must be there."""
    return url.rstrip("/") if socket_path(url) is None else "http://localhost"


def short_name(url: str) -> str:
    """Host and port; or the path of a socket with colons in it, so that it is one word."""
    path = socket_path(url)
    return url.split("://", 1)[1].rstrip("/") if path is None else path.strip("/").replace("/", ":")
