"""The recorded streams of tests/data/captures: what a real engine was asked and what it published.

`load(name)` reads one of them. Times are unix seconds of the recording machine, one clock for
events and requests, so that "what had been published before this request" can be asked.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "data" / "captures"


@dataclass(frozen=True)
class RecordedEvent:
    """One message as a subscriber received it; `decoded` is the payload for reading."""

    t: float
    src: str
    frames: list[bytes]
    decoded: list[Any]

    @property
    def topic(self) -> bytes:
        return self.frames[0]

    @property
    def seqno(self) -> int:
        return int.from_bytes(self.frames[-2], "big")

    @property
    def payload(self) -> bytes:
        return self.frames[-1]


@dataclass(frozen=True)
class RecordedRequest:
    """One HTTP request and its response.

    `concurrent`: it overlaps others. Those have no method or headers of their own on record (they
    were plain POSTs), and some have no times (`t0` and `t1` are None). `sse` has (seconds since
    `t0`, line) for a stream; `tokenize_ids` the engine's own ids, where it was asked for them.
    """

    tag: str
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    t0: float | None
    t1: float | None
    status: int | None
    response: Any
    sse: list[tuple[float, str]]
    tokenize_ids: list[int] | None
    concurrent: bool

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The JSON objects of the response: one, or one for each chunk of a stream."""
        if not self.sse:
            return [self.response] if isinstance(self.response, dict) else []
        data = [line.removeprefix("data: ") for _, line in self.sse if line.startswith("data: {")]
        return [json.loads(text) for text in data]

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last `usage` of the response."""
        found = [answer["usage"] for answer in self.answers if answer.get("usage")]
        return found[-1] if found else None

    @property
    def cached_tokens(self) -> int | None:
        """What the engine says it found in its cache; None where it does not say."""
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return None if cached is None else int(cached)

    @property
    def prompt_ids(self) -> list[int] | None:
        """The prompt's ids as the engine reports them, of the first choice."""
        for answer in self.answers:
            choices = answer.get("choices") or [{}]
            ids = answer.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
            if ids:
                return list(ids)
        return None


@dataclass(frozen=True)
class RecordedReplay:
    """One replay request and the replies as the DEALER received them, the end marker included."""

    tag: str
    t: float
    request: list[bytes]
    start: int
    replies: list[list[bytes]]


@dataclass(frozen=True)
class SocketChange:
    """The subscriber's socket to `src` became "connected" or "disconnected"."""

    t: float
    src: str
    what: str


@dataclass(frozen=True)
class Capture:
    """One recorded scenario; every list is in the order of time."""

    name: str
    meta: dict[str, Any]
    events: list[RecordedEvent] = field(default_factory=list)
    requests: list[RecordedRequest] = field(default_factory=list)
    replays: list[RecordedReplay] = field(default_factory=list)
    sockets: list[SocketChange] = field(default_factory=list)

    def events_before(self, t: float, src: str | None = None) -> list[RecordedEvent]:
        """The messages received before `t`, of one source or of all."""
        return [e for e in self.events if e.t < t and src in (None, e.src)]

    def timeline(self) -> list[RecordedEvent | RecordedRequest]:
        """Messages by arrival and requests by their start; requests without times left out."""
        timed: list[tuple[float, RecordedEvent | RecordedRequest]] = [(e.t, e) for e in self.events]
        timed += [(r.t0, r) for r in self.requests if r.t0 is not None]
        return [item for _, item in sorted(timed, key=lambda pair: pair[0])]


def names() -> list[str]:
    """All captures, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


@cache
def load(name: str) -> Capture:
    """Read one capture. It is shared between tests: don't change it."""
    records = list(_records(name))
    capture = Capture(name, next(record for record in records if record["k"] == "meta"))
    for record in records:
        _file(capture, record)
    capture.events.sort(key=lambda event: event.t)
    capture.requests.sort(key=lambda request: request.t0 or 0.0)
    return capture


def _records(name: str) -> Iterator[dict[str, Any]]:
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _file(capture: Capture, record: dict[str, Any]) -> None:
    kind = record["k"]
    if kind == "ev":
        frames = _bytes(record["frames"])
        capture.events.append(RecordedEvent(record["t"], record["src"], frames, record["dec"]))
    elif kind == "http":
        capture.requests.append(_request(record))
    elif kind == "replay":
        capture.replays.append(_replay(record))
    elif kind == "sock":
        capture.sockets.append(SocketChange(record["t"], record["src"], record["what"]))


def _request(record: dict[str, Any]) -> RecordedRequest:
    tokenized = record.get("tokenize")
    return RecordedRequest(
        tag=record["tag"],
        method=record.get("method", "POST"),
        path=record["path"],
        headers=record.get("headers", {}),
        body=record.get("body"),
        t0=record.get("t0"),
        t1=record.get("t1"),
        status=record.get("status"),
        response=record.get("resp"),
        sse=[(seconds, line) for seconds, line in record.get("sse", [])],
        tokenize_ids=tokenized["tokens"] if tokenized else None,
        concurrent="method" not in record,
    )


def _replay(record: dict[str, Any]) -> RecordedReplay:
    replies = [_bytes(reply) for reply in record["replies"]]
    request = _bytes(record["request"])
    return RecordedReplay(record["tag"], record["t"], request, record["start"], replies)


def _bytes(frames: list[str]) -> list[bytes]:
    return [base64.b64decode(frame) for frame in frames]
