"""Both readers on bytes cut anywhere, and against h11 as an independent implementation."""

from collections.abc import Sequence

import h11
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_corpus import SMUGGLING, Said, cut, requests

from kvrouter.http.request_reader import ReadLimits, RequestReader
from kvrouter.http.response_reader import ResponseReader

FRAMING = ("host", "content-length", "transfer-encoding")


def ours(pieces: Sequence[bytes]) -> tuple[list[Said], bool]:
    """What our reader makes of it, and whether it refused something."""
    reader = RequestReader(ReadLimits())
    read = [each for piece in pieces for each in reader.feed(piece)]
    said = [
        Said(
            each.method,
            each.target,
            each.take_body(),
            tuple(pair for pair in each.headers if pair[0] not in FRAMING),
        )
        for each in read
        if each.complete
    ]
    return said, reader.failure is not None


def theirs(data: bytes) -> tuple[list[Said], bool]:
    """What h11 makes of it."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    said: list[Said] = []
    body = b""
    request: h11.Request | None = None
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return said, True
        if isinstance(event, h11.Request):
            request, body = event, b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            headers = tuple(
                (name.decode(), value.decode("latin-1"))
                for name, value in request.headers
                if name.decode() not in FRAMING
            )
            said.append(Said(request.method.decode(), request.target.decode(), body, headers))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                return said, False
            connection.start_next_cycle()
        else:
            return said, False


@settings(deadline=None)
@given(st.data())
def test_right_requests_mean_the_same_to_us_and_to_h11_however_they_are_cut(
    data: st.DataObject,
) -> None:
    several = data.draw(st.lists(requests(), min_size=1, max_size=3))
    wire = b"".join(each for each, _ in several)
    said, refused = ours(data.draw(cut(wire)))
    assert said == [each for _, each in several] == theirs(wire)[0]
    assert not refused


@settings(deadline=None)
@given(st.data())
def test_what_both_accept_they_read_alike(data: st.DataObject) -> None:
    """Bytes with errors in them: we may refuse more than h11, or less, but never read other bodies.

    That is what smuggling lives on.
    """
    several = data.draw(st.lists(requests(), min_size=1, max_size=2))
    wire = bytearray(b"".join(each for each, _ in several))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(wire)))
        wire[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b"\t", b":", b"0", b"\x00", b"\xff"])
        )
    mine, mine_refused = ours(data.draw(cut(bytes(wire))))
    other, other_refused = theirs(bytes(wire))
    if not mine_refused and not other_refused:
        assert [(each.method, each.body) for each in mine] == [
            (each.method, each.body) for each in other
        ]


@settings(deadline=None)
@given(st.sampled_from(sorted(SMUGGLING)), st.data())
def test_smuggling_is_refused_however_it_is_cut(name: str, data: st.DataObject) -> None:
    said, refused = ours(data.draw(cut(SMUGGLING[name] + b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2)))
    assert refused
    assert said == []


@settings(deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6))
def test_noise_neither_breaks_nor_passes_the_request_reader(pieces: list[bytes]) -> None:
    reader = RequestReader(ReadLimits(max_head_bytes=1024))
    for piece in pieces:
        reader.feed(piece)


@settings(deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6), st.booleans())
def test_noise_does_not_break_the_response_reader(pieces: list[bytes], head: bool) -> None:
    reader = ResponseReader()
    reader.expect(bodiless=False)
    if head:
        reader.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    assert reader.complete or reader.failure


@settings(deadline=None)
@given(st.data())
def test_responses_are_the_same_however_they_are_cut(data: st.DataObject) -> None:
    """F10, one layer below the stream of events."""
    pieces = data.draw(st.lists(st.binary(min_size=1, max_size=30), max_size=4))
    body = b"".join(pieces)
    wire = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"
    framing = data.draw(st.sampled_from(["length", "chunked", "close"]))
    if framing == "length":
        wire += b"content-length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "chunked":
        wire += b"transfer-encoding: chunked\r\n\r\n"
        wire += b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in pieces) + b"0\r\n\r\n"
    else:
        wire += b"\r\n" + body
    reader = ResponseReader()
    reader.expect(bodiless=False)
    for piece in data.draw(cut(wire)):
        reader.feed(piece)
    if framing == "close":
        reader.finish()
    assert reader.complete
    assert not reader.failure
    assert reader.take() == body
    assert reader.reusable is (framing != "close")
