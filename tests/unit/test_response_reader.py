"""What is read of an engine's bytes."""

import pytest

from kvrouter.http.response_reader import ResponseReader

OK = b"HTTP/1.1 200 OK\r\n"


def read(*pieces: bytes, bodiless: bool = False, eof: bool = False) -> ResponseReader:
    reader = ResponseReader()
    reader.expect(bodiless=bodiless)
    for piece in pieces:
        reader.feed(piece)
    if eof:
        reader.finish()
    return reader


def test_a_response_with_a_length() -> None:
    reader = read(OK + b"Content-Type: a/b\r\nContent-Length: 3\r\n\r\nabc")
    assert (reader.status, reader.content_length) == (200, 3)
    assert reader.headers == [("content-type", "a/b"), ("content-length", "3")]
    assert reader.fields["content-type"] == "a/b"
    assert reader.take() == b"abc"
    assert reader.complete
    assert reader.reusable


def test_a_response_in_chunks_with_trailers() -> None:
    reader = read(
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\nX: 1\r\n\r\n"
    )
    assert reader.take() == b"abcde"
    assert reader.headers == [("transfer-encoding", "chunked")]
    assert reader.complete
    assert reader.reusable


def test_a_response_until_the_connection_closes() -> None:
    assert not read(OK + b"\r\nabc", b"de").complete
    reader = read(OK + b"\r\nabc", b"de", eof=True)
    assert reader.complete
    assert reader.take() == b"abcde"
    assert not reader.reusable


@pytest.mark.parametrize(
    "wire",
    [b"", OK, OK + b"Content-Length: 3\r\n\r\nab", OK + b"Transfer-Encoding: chunked\r\n\r\n"],
)
def test_a_connection_that_closes_too_early_is_a_failure(wire: bytes) -> None:
    reader = read(wire, eof=True)
    assert reader.failure
    assert not reader.complete


def test_interim_responses_are_passed_over() -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    reader = read(b"HTTP/1.1 100 Continue\r\n\r\n" + hints)
    assert not reader.has_head
    reader.feed(OK + b"Content-Length: 0\r\n\r\n")
    assert (reader.status, reader.complete) == (200, True)
    assert reader.headers == [("content-length", "0")]


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_some_statuses_have_no_body(status: bytes) -> None:
    assert read(b"HTTP/1.1 " + status + b"\r\n\r\n").complete


def test_the_response_to_head_has_no_body_whatever_it_says() -> None:
    reader = read(OK + b"Content-Length: 300\r\n\r\n", bodiless=True)
    assert reader.complete
    assert reader.content_length == 300
    assert not reader.reusable


@pytest.mark.parametrize(
    "wire",
    [
        OK + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        OK + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
        OK + b"Transfer-Encoding: gzip\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        OK + b"bad header\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"<html>not HTTP at all</html>",
        b"\x00\x01\x02",
    ],
)
def test_what_is_no_right_response_is_a_failure(wire: bytes) -> None:
    assert read(wire + b"  " * 20).failure


def test_a_head_without_end_is_a_failure() -> None:
    assert "head" in read(OK, *[b"X: " + b"a" * 60_000 + b"\r\n"] * 6).failure


@pytest.mark.parametrize("surplus", [b"x", OK + b"Content-Length: 0\r\n\r\n", b"\r\n\r\n"])
def test_bytes_that_belong_to_no_response_end_the_trust_in_a_connection(surplus: bytes) -> None:
    """An engine that answers twice would answer the next client with it."""
    whole = OK + b"Content-Length: 3\r\n\r\nabc"
    reader = read(whole)
    reader.feed(surplus)
    assert not reader.reusable
    assert reader.complete
    assert reader.take() == b"abc"
    if surplus.strip():
        together = read(whole + surplus)
        assert not together.reusable
        assert (together.status, together.content_length) == (200, 3)
        assert together.take() == b"abc"


def test_a_response_that_nobody_read_leaves_nothing_for_the_next() -> None:
    reader = read(OK + b"Content-Length: 3\r\n\r\nabc")
    reader.expect(bodiless=False)
    reader.feed(OK + b"Content-Length: 2\r\n\r\nde")
    assert reader.take() == b"de"


def test_a_connection_that_is_to_be_closed_is_not_reusable() -> None:
    assert not read(OK + b"Connection: close\r\nContent-Length: 0\r\n\r\n").reusable
    assert not read(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n").reusable
