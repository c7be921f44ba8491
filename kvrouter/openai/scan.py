"""What the router learns from a response while its bytes pass by: usage, errors, the end.

The bytes themselves are relayed as they came; nothing here delays or changes them. A scanner is
right for every way in which the network may cut the stream, because it only looks at whole lines
and keeps the piece of a line that is still open.
"""

from typing import Protocol

import msgspec

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A longer line or unary body is relayed but not read."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    """What the engine says a request cost, in tokens. None: it did not say.

    `prompt_tokens` includes the cached ones, whatever the API's own habit.
    """

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None


class Scan(Protocol):
    """What is known of a response so far."""

    usage: Usage | None
    output_chunks: int
    failed: bool
    """The engine reported an error in the middle of its answer."""
    complete: bool
    """The answer came to its own end."""
    response_id: str | None

    def feed(self, data: bytes) -> int:
        """Take in the next bytes; gives how many output chunks they completed."""

    def finish(self) -> None:
        """The response ended."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """All names that the four APIs have for the same figures."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None

    def as_usage(self) -> Usage | None:
        if self.prompt_tokens is not None:
            details = self.prompt_tokens_details
            cached = None if details is None else details.cached_tokens
            return Usage(self.prompt_tokens, self.completion_tokens or 0, cached)
        if self.input_tokens is None:  # the last event of an Anthropic stream
            return None if self.output_tokens is None else Usage(0, self.output_tokens)
        if self.cache_read_input_tokens is not None:  # Anthropic's input excludes the cached part
            cached = self.cache_read_input_tokens
            return Usage(self.input_tokens + cached, self.output_tokens or 0, cached)
        details = self.input_tokens_details
        cached = None if details is None else details.cached_tokens
        return Usage(self.input_tokens, self.output_tokens or 0, cached)


class _Inner(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None


_NOTHING = msgspec.Raw(b"null")


class _Answer(msgspec.Struct):
    """A unary body or the data of one event: usage stands at the top or one level below."""

    id: str | None = None
    object: str | None = None
    type: str | None = None
    usage: _Usage | None = None
    response: _Inner | None = None
    message: _Inner | None = None
    error: msgspec.Raw = _NOTHING

    def find_usage(self) -> Usage | None:
        if self.usage is not None:
            return self.usage.as_usage()
        for holder in (self.response, self.message):
            if holder is not None and holder.usage is not None:
                return holder.usage.as_usage()
        return None

    def find_response_id(self) -> str | None:
        if self.response is not None:
            return self.response.id
        return self.id if self.object == "response" else None

    def is_error(self) -> bool:
        return self.type == "error" or bytes(self.error) != b"null"


_DECODE = msgspec.json.Decoder(_Answer).decode


class SseScan:
    """Scans a stream of server-sent events.

    Only lines that may hold something of interest are parsed; the others cost a few byte
    searches. `output_chunks` counts the events with data, which is the number of output tokens as
    far as an engine sends one token an event.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.output_chunks = 0
        self.failed = False
        self.complete = False
        self.response_id: str | None = None
        self._open_line = b""

    def feed(self, data: bytes) -> int:
        """Take in the next bytes of the stream; gives how many output chunks they completed."""
        known = self.output_chunks
        if self._open_line:
            data = self._open_line + data
        lines = data.split(b"\n")
        self._open_line = lines.pop()[: MAX_LINE_BYTES + 1]
        for line in lines:
            if line.startswith(b"data:"):
                self.output_chunks += 1
                if _is_interesting(line):
                    self._read_data(line[5:].strip())
        return self.output_chunks - known

    def finish(self) -> None:
        """The stream ended; a last line without a line break counts."""
        self.feed(b"\n")

    def _read_data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = True
            self.output_chunks -= 1
            return
        if len(data) > MAX_LINE_BYTES:
            return
        try:
            answer = _DECODE(data)
        except msgspec.MsgspecError:
            return
        if answer.is_error():
            self.failed = True
        self.usage = _newer(self.usage, answer.find_usage())
        self.response_id = self.response_id or answer.find_response_id()
        if answer.type in _LAST_EVENTS:
            self.complete = True


_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")


_SHORT = 32
"""Longer than the end of a stream, shorter than an output chunk of any API."""


def _is_interesting(line: bytes) -> bool:
    """Whether a line may hold usage, an error, an id or the end: cheap, with few false alarms."""
    if len(line) <= _SHORT:
        return True
    usage_at = line.find(b'"usage"')
    if usage_at >= 0 and b"null" not in line[usage_at + 7 : usage_at + 14]:
        return True
    head = line[:256]
    return b'"error"' in head or b'"response' in head or b'"message_stop"' in head


def _newer(known: Usage | None, found: Usage | None) -> Usage | None:
    """Usage grows along a stream; Anthropic's last event leaves the prompt's part out."""
    if found is None or known is None:
        return found or known
    cached = known.cached_tokens if found.cached_tokens is None else found.cached_tokens
    prompt_tokens = max(found.prompt_tokens, known.prompt_tokens)
    return Usage(prompt_tokens, max(found.output_tokens, known.output_tokens), cached)


class UnaryScan:
    """Scans a response that comes in one piece: JSON, read when it is whole."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.output_chunks = 0
        self.failed = False
        self.complete = False
        self.response_id: str | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> int:
        """Take in the next bytes of the body; it has no chunks."""
        self._size += len(data)
        if self._size <= MAX_LINE_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
        return 0

    def finish(self) -> None:
        """The body is whole."""
        self.complete = True
        try:
            answer = _DECODE(b"".join(self._pieces))
        except msgspec.MsgspecError:
            return
        self.usage = answer.find_usage()
        self.response_id = answer.find_response_id()
