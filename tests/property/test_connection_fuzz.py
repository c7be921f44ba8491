"""Connections of clients and engines under whatever a network and its users may do.

The parsers' glue is driven without sockets: bytes cut anywhere, half of them changed, back-pressure
and losses at any moment.
"""

import asyncio
import os
from typing import Any

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wires import Wire, pieces, run, turns

from kvrouter.http.client import WireClient, send_whole
from kvrouter.http.connection import ClientConnection, ConnectionSettings
from kvrouter.http.engine_connection import EngineConnection, EngineError, Progress
from kvrouter.http.request_reader import ReadLimits
from kvrouter.http.server import Connections
from kvrouter.openai.errors import Fault, RequestError

EXAMPLES = int(os.environ.get("KVROUTER_FUZZ_EXAMPLES", "5000"))
TURNS = 20

REQUESTS = [
    b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n",
    b"POST /b HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"POST /d HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\nx",
    b"HEAD /e HTTP/1.0\r\n\r\n",
    b"GET /f HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
]
RESPONSES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
]


EVENTS = st.lists(st.sampled_from(["turn", "full", "room", "turn", "lose"]), max_size=4)


async def answer(client: WireClient) -> None:
    try:
        body = await client.body()
    except RequestError as error:
        send_whole(client, error.fault.status, [], error.body())
        return
    client.begin(200, [], None if client.path == "/b" else len(body))
    client.write(body)
    await turns(1)
    client.end()


async def client_side(sent: list[list[Any]]) -> None:
    refused: list[Fault] = []
    limits = ConnectionSettings(ReadLimits(max_head_bytes=1024, max_body_bytes=1000))
    owner = Connections(answer, refused.append, limits)
    connection = owner.new()
    wire = Wire(connection)
    for piece, events in sent:
        if not wire.lost:
            connection.data_received(piece)
        for event in events:
            await happen(event, connection, wire)
    await turns(TURNS)
    assert len(refused) <= 1
    if wire.written:
        check_response(wire.written)
    wire.lose()
    await turns(TURNS)
    assert not owner._open
    assert len(asyncio.all_tasks()) == 1, "no request outlives its connection"


async def happen(event: str, connection: ClientConnection, wire: Wire) -> None:
    match event:
        case "full" if not connection.full and not wire.lost:
            connection.pause_writing()
        case "room" if connection.full and not wire.lost:
            connection.resume_writing()
        case "lose":
            wire.lose()
        case _:
            await turns()


def check_response(written: bytes) -> None:
    """What was written begins with HTTP, as another implementation reads it."""
    reader = h11.Connection(h11.CLIENT)
    reader.send(h11.Request(method="GET", target="/", headers=[("Host", "a")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(written)
    while isinstance(reader.next_event(), h11.InformationalResponse):
        pass


class Keeper:
    """Hears what becomes of a connection."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def opened(self, connection: EngineConnection) -> None:
        del connection
        self.told.append("opened")

    def dropped(self, connection: EngineConnection) -> None:
        del connection
        self.told.append("dropped")


async def engine_side(sent: list[list[Any]], bodiless: bool) -> None:
    keeper = Keeper()
    connection = EngineConnection(keeper)
    wire = Wire(connection)
    connection.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"", bodiless=bodiless, patience_s=60)
    taken: list[bytes] = []

    async def read() -> None:
        await connection.reach(Progress.BODY)
        taken.append(connection.reader.take())
        if connection.progress is not Progress.END:
            connection.pass_on(taken.append)
        await connection.reach(Progress.END)

    reading = asyncio.create_task(read())
    for piece, events in sent:
        if not wire.lost:
            connection.data_received(piece)
        for event in events:
            await turns() if event != "lose" else wire.lose()
    await turns(TURNS)
    wire.lose()
    await turns(TURNS)
    assert reading.done(), "whoever waits is told"
    if reading.exception() is not None:
        assert isinstance(reading.exception(), EngineError)
    assert keeper.told == ["opened", "dropped"]
    assert not connection.reusable


def with_events(streams: list[bytes]) -> st.SearchStrategy[list[list[Any]]]:
    each = pieces(streams)
    return each.flatmap(
        lambda cut: st.lists(EVENTS, min_size=len(cut), max_size=len(cut)).map(
            lambda events: [list(pair) for pair in zip(cut, events, strict=True)]
        )
    )


@pytest.mark.parametrize("pause", range(1, 6))
def test_what_comes_behind_the_last_response_is_not_refused_again_and_again(pause: int) -> None:
    """With TLS a connection that is being closed may still deliver."""
    noise: list[list[Any]] = [[b"noise\r\n\r\n", []]] * 3
    run(lambda: client_side([[REQUESTS[5], ["turn"] * pause], *noise]))


FEW = settings(max_examples=20, deadline=None)
MANY = settings(max_examples=EXAMPLES, deadline=None, database=None)


@FEW
@given(sent=with_events(REQUESTS))
def test_a_clients_connection_survives_anything(sent: list[list[Any]]) -> None:
    run(lambda: client_side(sent))


@FEW
@given(sent=with_events(RESPONSES), bodiless=st.booleans())
def test_an_engines_connection_survives_anything(sent: list[list[Any]], bodiless: bool) -> None:
    run(lambda: engine_side(sent, bodiless))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@MANY
@given(sent=with_events(REQUESTS))
def test_a_clients_connection_survives_it_many_times(sent: list[list[Any]]) -> None:
    run(lambda: client_side(sent))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@MANY
@given(sent=with_events(RESPONSES), bodiless=st.booleans())
def test_an_engines_connection_survives_it_many_times(
    sent: list[list[Any]], bodiless: bool
) -> None:
    run(lambda: engine_side(sent, bodiless))
