"""Requests as bytes: right ones with what they say, and wrong ones."""

from dataclasses import dataclass

from hypothesis import strategies as st


@dataclass(frozen=True)
class Said:
    """What a request says, whoever reads it."""

    method: str
    target: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


HEAD = b"POST /v1/x HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

SMUGGLING: dict[str, bytes] = {
    "length beside chunked": HEAD
    + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked beside length": HEAD
    + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "the same length twice": HEAD + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nabcd",
    "a list of lengths": HEAD + b"Content-Length: 4, 4\r\n\r\nabcd",
    "a length with a sign": HEAD + b"Content-Length: +4\r\n\r\nabcd",
    "a negative length": HEAD + b"Content-Length: -4\r\n\r\nabcd",
    "a hexadecimal length": HEAD + b"Content-Length: 0x4\r\n\r\nabcd",
    "a length with an underscore": HEAD + b"Content-Length: 1_0\r\n\r\nabcdefghij",
    "an empty length": HEAD + b"Content-Length:\r\n\r\nabcd",
    "a length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a space before the colon": HEAD + b"Content-Length : 4\r\n\r\nabcd",
    "a tab before the colon": HEAD + b"Transfer-Encoding\t: chunked\r\n\r\n0\r\n\r\n",
    "another last coding": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "a second coding": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding in quotes": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "chunked twice": HEAD + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "two coding headers": HEAD
    + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a vertical tab in the coding": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a folded coding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a folded header": HEAD + b"X: a\r\n b\r\n\r\n",
    "a bare line feed": b"POST /v1/x HTTP/1.1\nHost: a\nContent-Length: 0\n\n",
    "a bare carriage return": HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n",
    "a null in a value": HEAD + b"X: a\x00b\r\n\r\n",
    "a null in a name": HEAD + b"X\x00Y: b\r\n\r\n",
    "a name that is empty": HEAD + b": b\r\n\r\n",
    "a line without a colon": HEAD + b"GET /admin HTTP/1.1\r\n\r\n",
    "a space before the first header": b"POST /v1/x HTTP/1.1\r\n Host: a\r\n\r\n",
    "chunks that end with a line feed": CHUNKED + b"3\nabc\n0\n\n",
    "a chunk size with a sign": CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n",
    "a chunk size with a prefix": CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
    "a chunk size with a space before it": CHUNKED + b" 3\r\nabc\r\n0\r\n\r\n",
    "a chunk size with an underscore": CHUNKED + b"1_0\r\nabcdefghijklmnop\r\n0\r\n\r\n",
    "a chunk size that overflows": CHUNKED + b"10000000000000003\r\nabc\r\n0\r\n\r\n",
    "an empty chunk size": CHUNKED + b"\r\nabc\r\n0\r\n\r\n",
    "more data than the chunk says": CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    "less data than the chunk says": CHUNKED + b"3\r\nab\r\n0\r\n\r\n",
    "a bare line feed in an extension": CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /v1/x HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no host": b"POST /v1/x HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "two hosts": HEAD + b"Host: b\r\n\r\n",
    "HTTP/0.9": b"GET /v1/x\r\n\r\n",
    "HTTP/2.0": b"GET /v1/x HTTP/2.0\r\nHost: a\r\n\r\n",
    "HTTP/1.2": b"GET /v1/x HTTP/1.2\r\nHost: a\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space in the target": b"GET /v1/x y HTTP/1.1\r\nHost: a\r\n\r\n",
    "a byte beyond ASCII in the target": b"GET /v1/\xff HTTP/1.1\r\nHost: a\r\n\r\n",
    "an unknown method": b"SMUGGLE /v1/x HTTP/1.1\r\nHost: a\r\n\r\n",
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40,
    "noise": bytes(range(128, 256)),
}
"""What other software reads in two ways, or not at all. None of them may reach a handler whole."""


_names = st.sampled_from(["accept", "user-agent", "x-one", "x-two", "authorization", "cookie"])
_values = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=12
).map(str.strip)
_targets = st.sampled_from(["/", "/v1/models", "/v1/chat/completions?a=1", "/v1/x/%20y"])


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, Said]:
    """A right request as bytes, and what it says."""
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE"]))
    target = draw(_targets)
    headers = draw(st.lists(st.tuples(_names, _values), max_size=4))
    lines = [f"{method} {target} HTTP/1.1", "host: a", *(f"{n}: {v}" for n, v in headers)]
    body = b""
    framing = draw(st.sampled_from(["none", "length", "chunked"]))
    wire = b""
    if framing == "length":
        body = wire = draw(st.binary(max_size=60))
        lines.append(f"content-length: {len(body)}")
    elif framing == "chunked":
        pieces = draw(st.lists(st.binary(min_size=1, max_size=30), max_size=4))
        body = b"".join(pieces)
        trailer = draw(st.sampled_from([b"", b"x-trailer: 1\r\n"]))
        wire = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        wire += b"0\r\n" + trailer + b"\r\n"
        lines.append("transfer-encoding: chunked")
    head = "\r\n".join([*lines, "", ""]).encode()
    return head + wire, Said(method, target, body, tuple(headers))


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The same bytes in pieces."""
    points = sorted(draw(st.sets(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *points], [*points, len(data)], strict=True) if a < b]
