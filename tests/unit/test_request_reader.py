"""What is read of a client's bytes, and what is refused."""

import pytest
from support.http_corpus import CHUNKED, HEAD, SMUGGLING

from kvrouter.http.request_reader import Incoming, ReadLimits, RequestReader
from kvrouter.openai.errors import Fault

LIMITS = ReadLimits()


def read(*pieces: bytes, limits: ReadLimits = LIMITS) -> tuple[list[Incoming], RequestReader]:
    reader = RequestReader(limits)
    return [each for piece in pieces for each in reader.feed(piece)], reader


def fault(*pieces: bytes, limits: ReadLimits = LIMITS) -> Fault | None:
    _, reader = read(*pieces, limits=limits)
    return None if reader.failure is None else reader.failure.fault


def fault_of(request: Incoming) -> Fault | None:
    return None if request.failure is None else request.failure.fault


def test_a_request_is_read_with_its_body() -> None:
    requests, reader = read(HEAD + b"X-A: 1\r\nx-a: 2\r\nContent-Length: 3\r\n\r\nabc")
    (request,) = requests
    assert (request.method, request.path, request.target) == ("POST", "/v1/x", "/v1/x")
    assert request.headers == [("host", "a"), ("x-a", "1"), ("x-a", "2"), ("content-length", "3")]
    assert request.fields["x-a"] == "1"
    assert request.complete
    assert request.take_body() == b"abc"
    assert request.keep_alive
    assert not reader.reading


def test_path_and_query_are_told_apart() -> None:
    (request,), _ = read(b"GET /v1/x?a=/?b HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (request.path, request.target) == ("/v1/x", "/v1/x?a=/?b")


@pytest.mark.parametrize(
    ("target", "expected"),
    [("http://h/v1/x?a=1", "/v1/x?a=1"), ("HTTP://h:1", "/"), ("*", "*")],
)
def test_the_target_that_a_client_of_a_proxy_sends_is_brought_into_form(
    target: str, expected: str
) -> None:
    method = b"OPTIONS" if target == "*" else b"GET"
    (request,), _ = read(method + f" {target} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
    assert request.target == expected


def test_chunks_are_joined_and_trailers_dropped() -> None:
    wire = b"3;name=value\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\nHost: evil\r\n\r\n"
    requests, reader = read(CHUNKED + wire + b"GET /next HTTP/1.1\r\nHost: b\r\n\r\n")
    assert [request.take_body() for request in requests] == [b"abcde", b""]
    assert requests[0].headers == [("host", "a"), ("transfer-encoding", "chunked")]
    assert requests[1].headers == [("host", "b")]
    assert reader.failure is None


def test_pipelined_requests_are_read_in_order() -> None:
    one = b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
    requests, _ = read(b"".join(one % number for number in range(5)))
    assert [request.path for request in requests] == ["/0", "/1", "/2", "/3", "/4"]


@pytest.mark.parametrize(
    ("head", "keeps"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", True),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\n\r\n", False),
        (b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", True),
    ],
)
def test_whether_the_connection_can_be_kept(head: bytes, keeps: bool) -> None:
    (request,), _ = read(head)
    assert request.keep_alive is keeps


def test_expecting_100_is_noted_but_not_from_http_1_0() -> None:
    expect = b"Expect: 100-Continue\r\nContent-Length: 3\r\n\r\n"
    (request,), _ = read(HEAD + expect)
    assert request.expects_continue
    (request,), _ = read(b"POST / HTTP/1.0\r\n" + expect)
    assert not request.expects_continue


@pytest.mark.parametrize("headers", [b"Upgrade: websocket\r\n", b"Upgrade: h2c\r\n"])
def test_an_upgrade_is_not_followed_and_nothing_behind_it_is_read(headers: bytes) -> None:
    wire = b"GET /v1/x HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\n" + headers + b"\r\n"
    requests, reader = read(wire + b"GET /admin HTTP/1.1\r\nHost: a\r\n\r\n", b"\x00\x01")
    assert [request.path for request in requests] == ["/v1/x"]
    assert requests[0].complete
    assert not requests[0].keep_alive
    assert reader.upgraded


def test_connect_opens_no_tunnel() -> None:
    requests, reader = read(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n")
    assert [request.path for request in requests] == ["a:1"]
    assert reader.upgraded


@pytest.mark.parametrize("wire", SMUGGLING.values(), ids=SMUGGLING)
def test_what_can_be_read_in_two_ways_is_refused(wire: bytes) -> None:
    """RFC 9112, section 11.2: no such request reaches a handler whole, nor anything behind it."""
    behind = b"GET /admin HTTP/1.1\r\nHost: a\r\n\r\n" * 2
    for pieces in ([wire + behind], [wire, behind], [bytes([byte]) for byte in wire + behind]):
        requests, reader = read(*pieces)
        assert reader.failure is not None, requests
        assert reader.failure.fault.status in (400, 413, 431, 501, 505)
        assert not any(request.complete for request in requests)
        assert reader.feed(behind) == ()


def test_bytes_after_a_last_request_are_refused() -> None:
    requests, reader = read(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\nGET / HTTP")
    assert [request.complete for request in requests] == [True]
    assert reader.failure is not None


def test_the_head_is_bounded_in_bytes_and_in_headers() -> None:
    """A client that sends headers for ever."""
    limits = ReadLimits(max_head_bytes=2048, max_headers=10)
    assert fault(HEAD + b"A: b\r\n" * 9 + b"\r\n", limits=limits) is None
    assert fault(HEAD + b"A: b\r\n" * 10 + b"\r\n", limits=limits) is Fault.HEAD_TOO_LARGE
    assert fault(HEAD + b"A: " + b"b" * 2048 + b"\r\n\r\n", limits=limits) is Fault.HEAD_TOO_LARGE
    assert fault(b"GET /" + b"a" * 2100, limits=limits) is Fault.HEAD_TOO_LARGE
    endless = [HEAD, b"A: ", *[b"b" * 500] * 10]
    assert fault(*endless, limits=limits) is Fault.HEAD_TOO_LARGE
    assert fault(*[b"\r\n" * 500] * 10, limits=limits) is Fault.HEAD_TOO_LARGE
    trailers = [CHUNKED + b"0\r\n", *[b"X: " + b"b" * 500 + b"\r\n"] * 10]
    assert fault(*trailers, limits=limits) is Fault.HEAD_TOO_LARGE


def test_the_body_is_bounded_before_and_while_it_comes() -> None:
    """F2."""
    limits = ReadLimits(max_body_bytes=10)
    (request,), _ = read(HEAD + b"Content-Length: 11\r\n\r\n", limits=limits)
    assert fault_of(request) is Fault.BODY_TOO_LARGE
    (request,), reader = read(CHUNKED + b"a\r\n0123456789\r\n", limits=limits)
    assert fault_of(request) is None
    reader.feed(b"1\r\nx\r\n")
    assert fault_of(request) is Fault.BODY_TOO_LARGE


def test_framing_out_of_proportion_is_refused() -> None:
    """Chunk extensions carry nothing that anybody keeps."""
    endless = [CHUNKED + b"1;", *[b"a" * 10_000] * 8]
    assert fault(*endless) is Fault.MALFORMED
    tiny = b"".join([CHUNKED, b"1\r\nx\r\n" * 50_000, b"0\r\n\r\n"])
    requests, reader = read(*(tiny[at : at + 1000] for at in range(0, len(tiny), 1000)))
    assert reader.failure is None
    assert requests[0].take_body() == b"x" * 50_000


def test_a_body_that_turns_out_malformed_fails_the_request_that_it_belongs_to() -> None:
    (request,), reader = read(CHUNKED + b"3\r\nabc\r\n")
    assert fault_of(request) is None
    reader.feed(b"zz\r\n")
    assert fault_of(request) is Fault.MALFORMED
    assert not request.complete


def test_a_failure_behind_a_whole_request_leaves_that_one_alone() -> None:
    requests, reader = read(b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET bad\r\n\r\n")
    assert [request.complete for request in requests] == [True]
    assert requests[0].failure is None
    assert reader.failure is not None
