"""The head of a response to a client, as bytes. Pure.

It is built anew from status and headers, never relayed: framing and connection are ours.
"""

from http import HTTPStatus

from kvrouter.http.headers import Headers

_REASONS = {status.value: status.phrase for status in HTTPStatus}


def response_head(
    status: int, headers: Headers, *, length: int | None, chunked: bool, last: bool, http_1_0: bool
) -> bytes:
    """Status line, headers and framing, up to the blank line.

    `last` says that the connection is closed after it. A client of HTTP/1.0 has to be told when
    it is not.
    """
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, '')}"]
    lines += [f"{name}: {value}" for name, value in headers]
    if chunked:
        lines.append("Transfer-Encoding: chunked")
    elif length is not None:
        lines.append(f"Content-Length: {length}")
    if last:
        lines.append("Connection: close")
    elif http_1_0:
        lines.append("Connection: keep-alive")
    lines.append("\r\n")
    return "\r\n".join(lines).encode("latin-1")
