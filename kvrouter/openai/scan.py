"""What the router learns from a response while its bytes pass by: usage, errors, the end.

The bytes themselves are relayed as they came; nothing here delays or changes them. A scanner is
right for every way in which the network may cut the stream, because it only looks at whole lines
and keeps the piece of a line that is still open.
"""

from typing import Protocol

from kvrouter.openai.answer import Usage, read_answer

MAX_LINE_BYTES = 4 * 1024 * 1024
"""A longer line or unary body is relayed but not read."""


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


class SseScan:
    """Scans a stream of server-sent events.

    Only lines that may hold something of interest are parsed; the others cost a few byte
    searches. `output_chunks` counts the events with data, which is the number of output tokens as
    far as an engine sends one token an event.
    """

    def __init__(self, *, typed: bool) -> None:
        """`typed` says that each event has a `type`, which is how such a stream ends."""
        self.usage: Usage | None = None
        self.output_chunks = 0
        self.failed = False
        self.complete = False
        self.response_id: str | None = None
        self._typed = typed
        self._open_line = b""

    def feed(self, data: bytes) -> int:
        """Take in the next bytes of the stream; gives how many output chunks they completed."""
        known = self.output_chunks
        if self._open_line:
            data = self._open_line + data
        elif data.startswith(b"data:") and data.find(b"\n") == len(data) - 2 and data[-1] == _LF:
            self._take_data(data)  # one event, as engines write them
            return self.output_chunks - known
        lines = data.split(b"\n")
        self._open_line = lines.pop()[: MAX_LINE_BYTES + 1]
        for line in lines:
            if line.startswith(b"data:"):
                self._take_data(line)
        return self.output_chunks - known

    def finish(self) -> None:
        """The stream ended; a last line without a line break counts."""
        self.feed(b"\n")

    def _take_data(self, line: bytes) -> None:
        self.output_chunks += 1
        if self._is_interesting(line):
            self._read_data(line[5:].strip())

    def _is_interesting(self, line: bytes) -> bool:
        """Whether a line may hold usage, an error, an id or the end: cheap, few false alarms.

        By `find`: `in` costs three times as much, for it asks first whether it is given a number,
        and that fails with an exception.
        """
        if len(line) <= _SHORT:
            return True
        usage_at = line.find(b'"usage"')
        if usage_at >= 0 and line.find(b"null", usage_at + 7, usage_at + 14) < 0:
            return True
        if line.find(b'"error"', 0, _HEAD) >= 0:
            return True
        return self._typed and (
            line.find(b'"response', 0, _HEAD) >= 0 or line.find(b'"message_stop"', 0, _HEAD) >= 0
        )

    def _read_data(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.complete = True
            self.output_chunks -= 1
            return
        if len(data) > MAX_LINE_BYTES:
            return
        answer = read_answer(data)
        if answer is None:
            return
        if answer.is_error():
            self.failed = True
        self.usage = _newer(self.usage, answer.find_usage())
        self.response_id = self.response_id or answer.find_response_id()
        if answer.type in _LAST_EVENTS:
            self.complete = True


_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")


_LF = 10
_SHORT = 32
"""Longer than the end of a stream, shorter than an output chunk of any API."""
_HEAD = 256
"""Bytes of a line in which something of interest is named, if there is any."""


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
        answer = read_answer(b"".join(self._pieces))
        if answer is not None:
            self.usage = answer.find_usage()
            self.response_id = answer.find_response_id()
