"""Bytes of a client's connection -> its requests. No I/O, no clock.

The grammar is llhttp's (by `httptools`), with none of its leniencies on. On top of it are refused
here: what RFC 9112 leaves no two readings of but other software reads in two (section 11.2), and
what is larger than its limit.

    version      other than 1.0 and 1.1
    framing      Transfer-Encoding in HTTP/1.0, or anything but `chunked`; a size beyond the limit
    Host         none or several in HTTP/1.1
    head         more bytes or more headers than allowed
    overhead     a chunked body whose framing is many times its content

Obsolete line folding, bare line feeds, Content-Length twice or beside Transfer-Encoding, and bytes
after `Connection: close` are refused by llhttp. Once something was refused nothing behind it on
the connection is read: where a message that is not understood ends, nobody knows.

Trailers are read and dropped: nothing that the router serves gives them a meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import httptools

from kvrouter.http.headers import KNOWN_NAMES, Headers, field_name
from kvrouter.openai.errors import Fault, RequestError

_NOBODYS_PARSER = httptools.HttpRequestParser(None)

MAX_OVERHEAD_BYTES = 65_536
OVERHEAD_RATIO = 8
"""Framing bytes allowed per byte of a chunked body, besides `MAX_OVERHEAD_BYTES`: chunks of one
byte take six."""


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a client may send."""

    max_head_bytes: int = 65_536
    max_headers: int = 128
    max_body_bytes: int = 69_206_016


class Incoming:
    """A request, as far as it has arrived."""

    __slots__ = (
        "body_bytes",
        "complete",
        "content_length",
        "expects_continue",
        "failure",
        "fields",
        "headers",
        "http_1_0",
        "keep_alive",
        "method",
        "path",
        "pieces",
        "target",
    )

    def __init__(self, method: str, target: str, headers: Headers) -> None:
        self.method = method
        self.target = target
        """Path and query as the client sent them."""
        self.path = target.partition("?")[0]
        self.headers = headers
        self.fields = dict(reversed(headers))
        """The first value of each header."""
        self.http_1_0 = False
        self.keep_alive = True
        """Whether the connection can go on after the response."""
        self.expects_continue = False
        """Whether the client waits to be told to send the body."""
        self.content_length: int | None = None
        self.body_bytes = 0
        """So many bytes of the body have arrived."""
        self.complete = False
        """Whether all of it has."""
        self.failure: RequestError | None = None
        """Why the rest of it won't be read."""
        self.pieces: list[bytes] = []
        """Of the body."""

    def drop_body(self) -> None:
        """Forget what has come of the body."""
        self.pieces.clear()

    def take_body(self) -> bytes:
        """The body; it is not kept."""
        pieces, self.pieces = self.pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def __repr__(self) -> str:
        state = "complete" if self.complete else f"{self.body_bytes} bytes of the body"
        return f"<Incoming {self.method} {self.target} {state}>"


class _Stop(Exception):  # noqa: N818  # carries the failure out of the parser
    def __init__(self, failure: RequestError) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RequestReader:
    """Reads the requests of one connection. After a `failure` it takes in nothing more."""

    def __init__(self, limits: ReadLimits) -> None:
        self.failure: RequestError | None = None
        """Why nothing more is read from this connection."""
        self.reading = False
        """Whether a request has begun and is not complete."""
        self.upgraded = False
        """The client went on in another protocol, which is not read."""
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._incoming: Incoming | None = None
        self._begun: list[Incoming] = []
        self._url = b""
        self._headers: Headers = []
        self._head_bytes = 0
        self._raw_bytes = 0

    def feed(self, data: bytes) -> Sequence[Incoming]:
        """Take in bytes; gives the requests whose heads they completed, in order."""
        if self.failure is not None or self.upgraded:
            return ()
        begun: list[Incoming] = []
        self._begun = begun
        self._raw_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.upgraded = True
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Stop):
                raise
            self._fail(error.__context__.failure)
        except httptools.HttpParserError as error:
            self._fail(_malformed(str(error)))
        else:
            if self._raw_bytes:
                self._check_raw_bytes()
        return begun

    def close(self) -> None:
        """The connection is gone, and nothing more is read.

        Parser and reader know each other. Left so, each connection would wait for the garbage
        collector, with the last request on it.
        """
        self.failure = self.failure or _malformed("the connection is gone")
        self._parser = _NOBODYS_PARSER

    # Called by the parser, in this order.

    def on_message_begin(self) -> None:
        """A request begins."""
        self.reading = True
        self._incoming = None
        self._url = b""
        self._headers = []
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        self._url += url
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.max_head_bytes:
            raise _Stop(self._head_too_large())

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._limits.max_head_bytes:
            raise _Stop(self._head_too_large())
        if self._incoming is not None:
            return
        field = KNOWN_NAMES.get(name) or field_name(name)
        self._headers.append((field, value.decode("latin-1")))

    def on_headers_complete(self) -> None:
        """The head is whole."""
        if len(self._headers) > self._limits.max_headers:
            raise _Stop(self._head_too_large())
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise _Stop(RequestError(Fault.HTTP_VERSION, f"HTTP/{version} is not spoken here"))
        target = self._url.decode("latin-1")
        if not target.startswith("/"):
            target = _origin_form(target)
        incoming = Incoming(parser.get_method().decode("latin-1"), target, self._headers)
        incoming.http_1_0 = version == "1.0"
        incoming.keep_alive = parser.should_keep_alive() and not parser.should_upgrade()
        self._read_framing(incoming)
        self._raw_bytes = 0
        self._incoming = incoming
        self._begun.append(incoming)
        if (incoming.content_length or 0) > self._limits.max_body_bytes:
            raise _Stop(self._body_too_large())

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        incoming = self._incoming
        if incoming is not None:
            incoming.pieces.append(body)
            incoming.body_bytes += len(body)
            if incoming.body_bytes > self._limits.max_body_bytes:
                raise _Stop(self._body_too_large())

    def on_message_complete(self) -> None:
        """The request is whole."""
        self.reading = False
        self._raw_bytes = 0
        if self._incoming is not None:
            self._incoming.complete = True

    # What llhttp leaves open.

    def _read_framing(self, incoming: Incoming) -> None:
        fields = incoming.fields
        hosts = int("host" in fields)
        if len(fields) < len(self._headers):
            hosts = [name for name, _ in self._headers].count("host")
        if hosts != 1 and not (incoming.http_1_0 and hosts == 0):
            raise _Stop(_malformed("a request has exactly one Host"))
        if "content-length" in fields:
            incoming.content_length = int(fields["content-length"])
        elif "transfer-encoding" in fields:
            _check_coding(incoming, fields["transfer-encoding"])
        if "expect" in fields and not incoming.http_1_0:
            incoming.expects_continue = fields["expect"].lower() == "100-continue"

    def _check_raw_bytes(self) -> None:
        """Bound what the parser takes in without giving anything out."""
        incoming = self._incoming
        if incoming is None:
            if self._raw_bytes > 2 * self._limits.max_head_bytes:
                self._fail(self._head_too_large())
        elif self._raw_bytes > MAX_OVERHEAD_BYTES + (OVERHEAD_RATIO + 1) * incoming.body_bytes:
            self._fail(_malformed("the framing of the body is out of proportion"))

    def _fail(self, failure: RequestError) -> None:
        self.failure = failure
        incoming = self._incoming
        if incoming is not None and not incoming.complete:
            incoming.failure = failure
            incoming.drop_body()

    def _head_too_large(self) -> RequestError:
        limits = self._limits
        message = (
            f"the head has more than {limits.max_head_bytes} bytes or {limits.max_headers} headers"
        )
        return RequestError(Fault.HEAD_TOO_LARGE, message)

    def _body_too_large(self) -> RequestError:
        limit = self._limits.max_body_bytes
        return RequestError(Fault.BODY_TOO_LARGE, f"the body is larger than {limit} bytes")


def _check_coding(incoming: Incoming, value: str) -> None:
    if incoming.http_1_0:
        raise _Stop(_malformed("HTTP/1.0 has no Transfer-Encoding"))
    if value.lower() != "chunked":
        message = f"the transfer coding {value!r} is not known"
        raise _Stop(RequestError(Fault.TRANSFER_CODING, message))


def _origin_form(target: str) -> str:
    """Path and query of a target, which a client of a proxy sends as a whole URL."""
    scheme, separator, rest = target.partition("://")
    if separator and scheme.lower() in ("http", "https"):
        slash = rest.find("/")
        return rest[slash:] if slash >= 0 else "/"
    return target


def _malformed(message: str) -> RequestError:
    return RequestError(Fault.MALFORMED, f"this is not HTTP/1.1 as it should be: {message}")
