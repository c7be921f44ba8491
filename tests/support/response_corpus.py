"""Responses of engines as bytes: right ones, and wrong ones."""

EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
FAILED = b'data: {"error":{"message":"gone","type":"InternalServerError","code":500}}\n\n'
DONE = b"data: [DONE]\n\n"
UNARY = (
    b'{"id":"c","choices":[{"text":"b"}],"usage":{"prompt_tokens":3,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":2}}}'
)
OK = b"HTTP/1.1 200 OK\r\n"
SSE = OK + b"content-type: text/event-stream; charset=utf-8\r\n"


def chunked(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """A body in the transfer coding."""
    return b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + end


def sized(status: bytes, body: bytes, *headers: bytes) -> bytes:
    """A whole response with a length."""
    lines = [b"HTTP/1.1 " + status, b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
RIGHT = [
    sized(b"200 OK", UNARY, b"content-type: application/json"),
    SSE + CHUNKED + chunked(EVENT, EVENT, USAGE, DONE),
    SSE + CHUNKED + chunked(EVENT + EVENT, FAILED, DONE),
    SSE + CHUNKED + chunked(EVENT, DONE, end=b"0\r\nx-trailer: 1\r\n\r\n"),
    SSE + b"Transfer-Encoding:   Chunked  \r\n\r\n" + b"000A;a=b\r\n0123456789\r\n0\r\n\r\n",
    SSE + b"connection: close\r\n\r\n" + EVENT + DONE,
    OK + b"\r\nuntil the end",
    b"HTTP/1.0 200 OK\r\ncontent-length: 3\r\nconnection: keep-alive\r\n\r\nabc",
    b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"200 OK", UNARY),
    b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"
    + (SSE + CHUNKED + chunked(EVENT, DONE)),
    sized(b"200 OK", b""),
    OK + CHUNKED + chunked(),
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 304 Not Modified\r\ncontent-length: 5\r\n\r\n",
    sized(b"400 Bad Request", b'{"error":{"message":"too long","code":400}}'),
    sized(b"429 Too Many Requests", b"later", b"retry-after: 0"),
    sized(b"500 Internal Server Error", b'{"error":{"message":"ill","code":500}}'),
    sized(b"503 Service Unavailable", b"", b"retry-after: Wed, 21 Oct 2026 07:28:00 GMT"),
    sized(b"200 OK", b"x" * 70_000),
    sized(b"200 OK", b"abc", b"set-cookie: a=b", b"set-cookie: c=d", b"connection: x-gone, close"),
]

WRONG = {
    "length beside chunked": OK + b"content-length: 5\r\n" + CHUNKED + chunked(b"ab"),
    "chunked beside length": OK + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\nab",
    "two lengths": OK + b"content-length: 2\r\ncontent-length: 3\r\n\r\nabc",
    "a list of lengths": OK + b"content-length: 2, 2\r\n\r\nab",
    "a length with a sign": OK + b"content-length: +2\r\n\r\nab",
    "a negative length": OK + b"content-length: -2\r\n\r\nab",
    "a hexadecimal length": OK + b"content-length: 0x2\r\n\r\nab",
    "an empty length": OK + b"content-length:\r\n\r\nab",
    "a length beyond 64 bits": OK + b"content-length: 99999999999999999999\r\n\r\nab",
    "another coding": OK + b"transfer-encoding: gzip\r\n\r\nab",
    "a second coding": OK + b"transfer-encoding: gzip, chunked\r\n\r\n" + chunked(b"ab"),
    "chunked twice": OK + b"transfer-encoding: chunked, chunked\r\n\r\n" + chunked(b"ab"),
    "two coding headers": OK
    + b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n\r\n"
    + chunked(b"ab"),
    "a space before the colon": OK + b"content-length : 2\r\n\r\nab",
    "a chunk size with a sign": OK + CHUNKED + b"+2\r\nab\r\n0\r\n\r\n",
    "a chunk size with a prefix": OK + CHUNKED + b"0x2\r\nab\r\n0\r\n\r\n",
    "a chunk size that overflows": OK + CHUNKED + b"10000000000000002\r\nab\r\n0\r\n\r\n",
    "more data than the chunk says": OK + CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    "a line without a colon": OK + b"nothing\r\n\r\n",
    "a null in a value": OK + b"x: a\x00b\r\n\r\n",
    "a bare carriage return": OK + b"x: a\rtransfer-encoding: chunked\r\n\r\n",
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\n"
    b"upgrade: x\r\n\r\n",
    "HTTP/2": b"HTTP/2.0 200 OK\r\n\r\n",
    "another service": b"ICY 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a TLS alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "SSH": b"SSH-2.0-OpenSSH_9.2\r\n",
}
"""Nothing of these may reach a client as a whole response."""
