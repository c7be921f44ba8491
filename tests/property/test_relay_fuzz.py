"""The whole way of a request with engines that do anything: parsers, retries, relay, bookings.

Two engines without sockets answer with right and wrong bytes, cut anywhere, lost at any moment,
before a client that reads slowly or leaves. h11 says what the engines sent and what the client got.
"""

import asyncio
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.response_corpus import RIGHT, WRONG
from support.wires import Wire, run, turns

from kvrouter.config import TimeoutConfig, parse_config
from kvrouter.http.connection import ClientConnection, ConnectionSettings
from kvrouter.http.engine import EngineClient
from kvrouter.http.engine_connection import EngineConnection
from kvrouter.http.request_reader import ReadLimits
from kvrouter.http.response_reader import ResponseReader
from kvrouter.http.server import Connections
from kvrouter.load import Load
from kvrouter.openai.errors import Fault
from kvrouter.tokenize import EncodingThreads, ThreadSettings
from kvrouter.wiring import Plane, new_fleet, plane
from kvrouter.workers import ServedModel, WorkerEvent, WorkerFacts

EXAMPLES = int(os.environ.get("KVROUTER_FUZZ_EXAMPLES", "5000"))
NAMES = ["one", "two"]
URLS = [f"http://{name}:1" for name in NAMES]
MAX_TURNS = 400
BODY = b'{"model":"m","prompt":"hello","stream":true}'
ASK = b"POST /v1/completions HTTP/1.%d\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
OWN_CODES = {fault.value[2] for fault in Fault}

Answer = list[bytes]
"""The pieces in which an engine answers one request."""


@dataclass
class Told:
    """What an engine was heard saying after one request."""

    heard: bytes = b""
    ended: bool = False


@dataclass
class Reply:
    """A response as h11 reads it."""

    status: int
    body: bytes = b""
    whole: bool = False
    wrong: bool = False
    until_close: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is an error of the router."""
        try:
            return bool(json.loads(self.body)["error"]["code"] in OWN_CODES)
        except (ValueError, KeyError, TypeError):
            return False


def read(wire: bytes, *, ended: bool, count: int = 1) -> list[Reply]:
    """So many responses of these bytes, as far as they are there."""
    reader = h11.Connection(h11.CLIENT)
    reader.receive_data(wire)
    if ended:
        reader.receive_data(b"")
    replies: list[Reply] = []
    try:
        for _ in range(count):
            reader.send(h11.Request(method="POST", target="/", headers=[("Host", "a")]))
            reader.send(h11.EndOfMessage())
            if not _read_one(reader, replies):
                break
            if reader.our_state is not h11.DONE or reader.their_state is not h11.DONE:
                break
            reader.start_next_cycle()
    except h11.RemoteProtocolError as error:
        cut = ended and "closed" in str(error).lower()
        if not cut:
            replies.append(Reply(0, str(error).encode(), wrong=True))
    return replies


def _read_one(reader: h11.Connection, replies: list[Reply]) -> bool:
    while True:
        event = reader.next_event()
        match event:
            case h11.Response():
                names = {name for name, _ in event.headers}
                framed = bool(names & {b"content-length", b"transfer-encoding"})
                bodiless = event.status_code in (204, 304)
                replies.append(Reply(event.status_code, until_close=not framed and not bodiless))
            case h11.Data():
                replies[-1].body += bytes(event.data)
            case h11.EndOfMessage():
                replies[-1].whole = True
                return True
            case h11.InformationalResponse():
                pass
            case _:
                return False


class EngineWire(Wire):
    """An engine's connection: each request of the router starts the next answer."""

    def __init__(self, connection: EngineConnection, answers: list[Answer]) -> None:
        self.told: list[Told] = []
        self._answers = deque(answers)
        self._pieces: deque[bytes] = deque()
        self._paused = False
        super().__init__(connection)

    def write(self, data: Any) -> None:
        super().write(data)
        self.told.append(Told())
        self._pieces = deque(self._answers.popleft() if self._answers else ())

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False

    def step(self) -> bool:
        """Send the next piece, if there is one; False if not."""
        if self.lost or self.is_closing() or self._paused or not self._pieces:
            return False
        piece = self._pieces.popleft()
        self.told[-1].heard += piece
        self._protocol.data_received(piece)
        return True

    def lose(self) -> None:
        if self.told and not self.lost and not self.is_closing():
            self.told[-1].ended = True
        super().lose()


class FakeEngine:
    """An engine of the test, and the connections to it."""

    def __init__(self, connections: list[list[Answer] | None]) -> None:
        self.wires: list[EngineWire] = []
        self._connections = connections

    def connect(self, connection: EngineConnection) -> None:
        answers = self._connections.pop(0) if self._connections else None
        if answers is None:
            raise ConnectionRefusedError("nobody listens")
        self.wires.append(EngineWire(connection, answers))


class Network:
    """Connects to engines of the test, in place of the loop."""

    def __init__(self, engines: dict[str, FakeEngine]) -> None:
        self._engines = engines

    async def create_connection(
        self, new: Callable[[], EngineConnection], host: str, _port: int, *, ssl: object
    ) -> tuple[object, EngineConnection]:
        assert ssl is None
        await asyncio.sleep(0)
        connection = new()
        self._engines[host].connect(connection)
        return None, connection


@dataclass
class Story:
    """What happens."""

    engines: list[list[list[Answer] | None]]
    """Of each engine the answers on each of its connections; None: it can't be reached."""
    requests: int
    last_is_1_0: bool
    events: list[str] = field(default_factory=list)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    """A response, perhaps changed, perhaps with more behind it, perhaps cut off; in pieces."""
    stream = bytearray(draw(st.sampled_from([*RIGHT, *RIGHT, *WRONG.values()])))
    if draw(st.integers(0, 9)) == 0:
        stream += draw(st.sampled_from([*RIGHT[:3], b"x", b"\r\n"]))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        stream[draw(st.integers(0, min(len(stream), 400) - 1))] = draw(st.integers(0, 255))
    if draw(st.integers(0, 3)) == 0:
        del stream[draw(st.integers(0, len(stream))) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    return [bytes(stream[a:b]) for a, b in pairwise([0, *cuts, len(stream)]) if b > a]


connections = st.lists(
    st.one_of(st.none(), st.lists(answers(), min_size=1, max_size=2)), min_size=1, max_size=3
)
stories = st.builds(
    Story,
    engines=st.lists(connections, min_size=2, max_size=2),
    requests=st.integers(1, 3),
    last_is_1_0=st.booleans(),
    events=st.lists(
        st.sampled_from(
            ["one", "two", "one", "two", "lose one", "lose two", "full", "room"] * 3 + ["leave"]
        ),
        max_size=20,
    ),
)


class Stage:
    """A router before the engines of a story, with one client."""

    def __init__(self, story: Story, threads: EncodingThreads) -> None:
        config = parse_config(
            {"workers": [{"url": url} for url in URLS], "policy": {"name": "round_robin"}}
        )
        self.fleet = new_fleet(config, Load(), None)
        for worker in map(self.fleet.add, config.workers):
            facts = WorkerFacts(models=(ServedModel("m"),), block_size=16, capacity_blocks=1000)
            self.fleet.joined(worker, facts)
            worker.happened(WorkerEvent.JOINED)
        self.engines = {
            name: FakeEngine(list(made)) for name, made in zip(NAMES, story.engines, strict=True)
        }
        network = Network(self.engines)
        loop: Any = asyncio.get_running_loop()
        loop.create_connection = network.create_connection
        self.router_side = EngineClient(TimeoutConfig())
        self.plane: Plane = plane(config, self.fleet, self.router_side, threads)
        settings = ConnectionSettings(ReadLimits())
        owner = Connections(self.plane.door.handle, self.plane.metrics.unread, settings)
        self.connection: ClientConnection = owner.new()
        self.client = Wire(self.connection)
        self.story = story

    @property
    def told(self) -> list[Told]:
        """All that the engines said."""
        return [
            told for engine in self.engines.values() for wire in engine.wires for told in wire.told
        ]

    def ask(self) -> None:
        """Send all requests at once."""
        story = self.story
        for number in range(story.requests):
            old = story.last_is_1_0 and number == story.requests - 1
            if not self.client.lost:
                self.connection.data_received(ASK % (not old, len(BODY), BODY))

    def happen(self, event: str) -> None:
        """Let one thing happen."""
        engine = event.rpartition(" ")[2]
        match event:
            case "one" | "two":
                for wire in self.engines[engine].wires[-1:]:
                    wire.step()
            case "lose one" | "lose two":
                for wire in self.engines[engine].wires[-1:]:
                    wire.lose()
            case "full" if not self.connection.full and not self.client.lost:
                self.connection.pause_writing()
            case "room" if self.connection.full and not self.client.lost:
                self.connection.resume_writing()
            case "leave":
                self.client.lose()

    async def end(self) -> None:
        """Let all come to its end: what is left is sent, and engines that say nothing are lost."""
        self.happen("room")
        for _ in range(MAX_TURNS):
            await turns(3)
            wires = [wire for engine in self.engines.values() for wire in engine.wires]
            if sum(wire.step() for wire in wires):
                continue
            if not self.connection.active:
                break
            for wire in wires:
                wire.lose()
        assert not self.connection.active, "a request ends when its engines have"
        await turns(3)
        self.client.lose()
        await turns(10)

    def check_nothing_is_left(self) -> None:
        """Of bookings, tasks, and errors of our own."""
        self.fleet.check()
        assert self.fleet.load.totals.active_requests == 0
        assert self.plane.door.active_requests == 0
        assert len(asyncio.all_tasks()) == 1
        labels = {"path": "/v1/completions", "fault": Fault.INTERNAL.label}
        assert not self.plane.metrics.registry.get_sample_value("kvrouter_requests_total", labels)
        for host in map(self.router_side.host, URLS):
            for resting in list(host._resting):
                assert resting.reusable
            host.close()

    def check_what_the_client_got(self) -> None:
        """It is what an engine said, or an error of the router; and whole only if it was."""
        told = [read(each.heard, ended=each.ended) for each in self.told]
        said = [replies[0] for replies in told if replies]
        sure = not any(each.wrong for replies in told for each in replies)
        for got in read(self.client.written, ended=True, count=self.story.requests):
            assert not got.wrong, got.body
            if got.is_own:
                continue
            if got.whole and not got.until_close:
                same = [e for e in said if e.whole and (e.status, e.body) == (got.status, got.body)]
                assert same or not sure, "a whole response is a whole one of an engine"
            elif sure:
                body = got.body.partition(b'\n\ndata: {"error"')[0]
                assert any(each.body.startswith(body) for each in said), "nothing is made up"


@contextmanager
def no_threads() -> Iterator[EncodingThreads]:
    threads = EncodingThreads(
        ThreadSettings(inline_bytes=0, threads=1, max_requests=1, max_bytes=1, deadline_s=1.0)
    )
    try:
        yield threads
    finally:
        threads.close()


async def relayed(story: Story) -> None:
    with no_threads() as threads:
        stage = Stage(story, threads)
        stage.ask()
        for event in story.events:
            await turns()
            stage.happen(event)
        await stage.end()
        stage.check_nothing_is_left()
        stage.check_what_the_client_got()


def whole(reader: ResponseReader, wire: bytes) -> bytes | None:
    """The body that the reader takes for whole."""
    reader.expect(bodiless=False)
    reader.feed(wire)
    return reader.take() if reader.complete and not reader.failure else None


@pytest.mark.parametrize("wire", WRONG.values(), ids=WRONG)
def test_a_wrong_response_is_never_whole_nor_followed_by_another(wire: bytes) -> None:
    reader = ResponseReader()
    assert whole(reader, wire + RIGHT[0]) is None
    reader.finish()
    assert reader.failure
    assert not reader.reusable


def test_each_right_response_is_relayed_as_it_is() -> None:
    """What the fuzz builds on: without anything wrong the client gets what the engine sent."""
    for response in RIGHT:
        said = read(response, ended=True)[0]
        if said.status in (429, 500, 503):
            continue
        story = Story([[[[response]]], [[[response]]]], 1, last_is_1_0=False)
        run(partial(relayed, story))


FEW = settings(max_examples=30, deadline=None)
MANY = settings(max_examples=EXAMPLES, deadline=None, database=None)


@FEW
@given(story=stories)
def test_whatever_engines_do_clients_get_what_was_said(story: Story) -> None:
    run(lambda: relayed(story))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@MANY
@given(story=stories)
def test_whatever_engines_do_many_times(story: Story) -> None:
    run(lambda: relayed(story))
