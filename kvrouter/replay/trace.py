"""Traces: when requests came, how long they were, and which prefixes they shared.

The form is that of the Mooncake project: one JSON object a line, with `timestamp` (ms),
`input_length` and `output_length` (tokens), and `hash_ids`, one for each `chunk_tokens` tokens of
the prompt; what is left over at its end may have one or not. Equal ids stand for an equal prefix
up to the end of their chunk. Without any, a prompt shares nothing.
"""

import gzip
import itertools
import zlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

CHUNK_TOKENS = 512
FIRST_OWN_TOKEN = 1 << 31
"""Token ids from here on belong to one request alone: its output, and what no chunk covers."""
GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LATEST_MS = 1e15
"""Some 30,000 years: later times would not keep their milliseconds."""


class TraceError(ValueError):
    """What was given is no trace; the message says where."""


class TraceRequest(NamedTuple):
    """One request. `chunks` are numbers below 2**31; equal numbers, equal tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    chunks: tuple[int, ...]


class Trace:
    """Requests in the order of their arrival."""

    def __init__(
        self, name: str, requests: Iterable[TraceRequest], chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        self.name = name
        self.requests = sorted(requests, key=lambda request: request.at_s)
        self.chunk_tokens = chunk_tokens

    def __len__(self) -> int:
        return len(self.requests)

    def prompt(self, number: int) -> "array[int]":
        """The token ids of a request's prompt."""
        request = self.requests[number]
        size = self.chunk_tokens
        tokens: array[int] = array("I")
        for chunk in request.chunks:
            tokens += array("I", (chunk,)) * size
        missing = request.prompt_tokens - len(tokens)
        if missing > 0:
            tokens += self._own(number) * missing
        return tokens[: request.prompt_tokens]

    def output(self, number: int) -> "array[int]":
        """The token ids of a request's output, which no other has."""
        return self._own(number) * self.requests[number].output_tokens

    def _own(self, number: int) -> "array[int]":
        return array("I", (FIRST_OWN_TOKEN + number,))

    def first(self, count: int) -> "Trace":
        """The first `count` requests only."""
        return Trace(self.name, self.requests[:count], self.chunk_tokens)

    def check_lengths(self, most_tokens: int) -> None:
        """Raise TraceError if a request, with its output, is longer than this."""
        for request in self.requests:
            if request.prompt_tokens + request.output_tokens > most_tokens:
                raise TraceError(
                    f"{self.name}: the request at {request.at_s:g} s has {request.prompt_tokens} "
                    f"prompt and {request.output_tokens} output tokens, and the cache of a worker "
                    f"holds {most_tokens}: more --blocks, or another --block-size?"
                )

    def check_times(self, speed: float) -> None:
        """Raise TraceError if its times, divided by `speed`, do not keep their milliseconds."""
        for request in self.requests[:1] + self.requests[-1:]:
            if abs(request.at_s) / speed > LATEST_MS / 1000:
                raise TraceError(
                    f"{self.name}: at --speed {speed:g} the request at {request.at_s:g} s comes "
                    "too late to count milliseconds: begin the trace's timestamps near 0"
                )

    def without_reuse(self) -> "Trace":
        """The same lengths and times, but no two requests share anything."""
        fresh = itertools.count()
        return Trace(
            f"{self.name} without reuse",
            [
                request._replace(chunks=tuple(itertools.islice(fresh, len(request.chunks))))
                for request in self.requests
            ],
            self.chunk_tokens,
        )


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=-LATEST_MS, le=LATEST_MS)]
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[int]


def read_trace(path: Path, *, chunk_tokens: int = CHUNK_TOKENS) -> Trace:
    """The trace in this file, which may be compressed with gzip.

    Raises TraceError when it cannot be read, is no trace or has no requests.
    """
    numbers: dict[int, int] = {}
    requests = [
        TraceRequest(
            line.timestamp / 1000,
            line.input_length,
            max(1, line.output_length),
            tuple([numbers.setdefault(each, len(numbers)) for each in line.hash_ids]),
        )
        for line in _lines(path, chunk_tokens)
    ]
    if not requests:
        raise TraceError(f"{path}: has no requests")
    return Trace(path.name, requests, chunk_tokens)


def _lines(path: Path, chunk_tokens: int) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    try:
        data = path.read_bytes()
        if data.startswith(GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    data = data.removeprefix(BYTE_ORDER_MARK)
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        full, rest = divmod(request.input_length, chunk_tokens)
        if request.hash_ids and not full <= len(request.hash_ids) <= full + (rest > 0):
            raise TraceError(
                f"{path}, line {number}: {len(request.hash_ids)} hash_ids do not fit "
                f"{request.input_length} tokens in chunks of {chunk_tokens}; "
                "does an id stand for another number of them (--chunk-tokens)?"
            )
        yield request
