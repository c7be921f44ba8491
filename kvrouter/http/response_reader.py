"""Bytes of an engine's connection -> its responses. No I/O, no clock.

The grammar is llhttp's (by `httptools`). A body is delimited by its length, by chunks, or by the
end of the connection; interim responses (1xx) are passed over; trailers are dropped.
"""

import httptools

from kvrouter.http.headers import KNOWN_NAMES, Headers, field_name

MAX_HEAD_BYTES = 262_144
_NOBODYS_PARSER = httptools.HttpResponseParser(None)
_VERSIONS = ("1.1", "1.0")
FINAL_STATUS = 200
"""The lowest one; those below are interim."""


class ResponseReader:
    """Reads the responses of one connection, one after the other: `expect` comes before each."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.content_length: int | None = None
        self.fields: dict[str, str] = {}
        """The first value of each header, by its name in lower case."""
        self.has_head = False
        """Whether the head of the final response is whole."""
        self.complete = True
        """Whether the response is whole, or none is expected."""
        self.failure = ""
        """Why this is no HTTP; nothing more is read then."""
        self.reusable = True
        """Whether another response may follow on this connection."""
        self.pieces: list[bytes] = []
        """What came of the body and was not taken yet."""
        self._parser = httptools.HttpResponseParser(self)
        self._bodiless = False
        self._until_close = False
        self._chunked = False
        self._head_bytes = 0

    def expect(self, *, bodiless: bool) -> None:
        """A request was sent; `bodiless` says that its response has a head only (to HEAD)."""
        self.has_head = False
        self.complete = False
        self.pieces.clear()  # of a response that nobody wanted
        self._bodiless = bodiless

    def feed(self, data: bytes) -> None:
        """Take in bytes."""
        if self.failure:
            return
        if self.complete:
            self._surplus()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("it changed the protocol unasked")
        except httptools.HttpParserError as error:
            if self.complete:
                self._surplus()
            else:
                self._fail(str(error))
            return
        if not self.has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._fail("its head does not end")

    def finish(self) -> None:
        """The connection ended; that may be how the body ends."""
        self.reusable = False
        if self.complete or self.failure:
            return
        if self.has_head and self._until_close:
            self.complete = True
        else:
            self._fail("the connection was closed")

    def close(self) -> None:
        """The connection is gone, and nothing more is read: lets go of the parser, as the other."""
        self.failure = self.failure or "the connection is gone"
        self._parser = _NOBODYS_PARSER

    def take(self) -> bytes:
        """What came of the body since it was last taken."""
        pieces = self.pieces
        if len(pieces) == 1:
            return pieces.pop()
        whole = b"".join(pieces)
        pieces.clear()
        return whole

    # Called by the parser, in this order.

    def on_message_begin(self) -> None:
        """A response begins."""
        if self.complete:
            self._surplus()  # what was read stays: it may not have been looked at
            return
        self.status = 0
        self.headers = []
        self.content_length = None
        self.fields = {}
        self._chunked = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer."""
        if self.has_head or self.complete:
            return
        field, said = KNOWN_NAMES.get(name) or field_name(name), value.decode("latin-1")
        self.headers.append((field, said))
        self.fields.setdefault(field, said)
        if field == "content-length":
            self.content_length = int(value)
        elif field == "transfer-encoding":
            self._chunked = True
            if said.lower() != "chunked":
                self._fail(f"the transfer coding {said!r} is not known")

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if self.complete:
            return
        if self._parser.get_http_version() not in _VERSIONS:
            self._fail("it is of another HTTP version")
        self.status = self._parser.get_status_code()
        if self.status < FINAL_STATUS:
            return
        self.has_head = True
        self._head_bytes = 0
        self._until_close = self.content_length is None and not self._chunked
        self.reusable = self.reusable and self._parser.should_keep_alive()
        if self._bodiless:
            self.complete = True
            self.reusable = False  # the parser would take what follows for its body

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        if not self.complete:
            self.pieces.append(body)

    def on_message_complete(self) -> None:
        """A response is whole."""
        if self.has_head:
            self.complete = True

    def _surplus(self) -> None:
        """Bytes that belong to no response: whatever comes here now can't be trusted."""
        self.reusable = False

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.reusable = False
