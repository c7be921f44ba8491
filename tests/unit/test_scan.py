"""What is learned from responses, at every place where the network may cut them."""

import json
import re

import pytest
from support.captures import load

from kvrouter.openai.answer import Usage
from kvrouter.openai.scan import SseScan, UnaryScan

CHAT = (
    b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"delta":{"role":"assistant",'
    b'"content":""}}],"usage":null}\n\n'
    b'data: {"id":"c","choices":[{"delta":{"content":"\\"usage\\": {\\"prompt_tokens\\": 1}"'
    b"}}]}\n\n"
    b": a comment\n\n"
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":12,"total_tokens":14,'
    b'"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":8}}}\r\n\r\n'
    b"data: [DONE]\n\n"
)
MESSAGES = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","usage":'
    b'{"input_tokens":4,"output_tokens":0,"cache_read_input_tokens":8}}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"hi"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","usage":{"output_tokens":2}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
RESPONSES = (
    b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_7",'
    b'"usage":null}}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}'
    b"\n\n"
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"resp_7",'
    b'"usage":{"input_tokens":12,"output_tokens":2,"input_tokens_details":{"cached_tokens":8}}}}'
    b"\n\n"
)
DYING = (
    b'data: {"id":"c","choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n'
    b"data: [DONE]\n\n"
)


KNOWN = ("usage", "output_chunks", "failed", "complete", "response_id")


def scanned(*pieces: bytes, typed: bool = True) -> SseScan:
    scan = SseScan(typed=typed)
    for piece in pieces:
        scan.feed(piece)
    scan.finish()
    return scan


@pytest.mark.parametrize(
    "stream", [CHAT, MESSAGES, RESPONSES], ids=["chat", "messages", "responses"]
)
def test_a_stream_cut_at_every_byte_tells_the_same(stream: bytes) -> None:
    """F10: the network cuts where it likes."""
    for at in range(len(stream) + 1):
        scan = scanned(stream[:at], stream[at:])
        assert scan.usage == Usage(12, 2, 8)
        assert scan.complete
        assert not scan.failed
    whole = scanned(stream)
    single_bytes = scanned(*(bytes([byte]) for byte in stream))
    assert single_bytes.output_chunks == whole.output_chunks
    assert single_bytes.usage == whole.usage


@pytest.mark.parametrize("stream", [CHAT, DYING], ids=["chat", "dying"])
def test_a_stream_without_types_tells_the_same_where_none_are_looked_for(stream: bytes) -> None:
    typed, untyped = scanned(stream), scanned(stream, typed=False)
    for known in KNOWN:
        assert getattr(typed, known) == getattr(untyped, known), known
    assert untyped.complete


@pytest.mark.parametrize(
    "stream",
    [CHAT, MESSAGES, RESPONSES, DYING, CHAT.replace(b"\n", b"\r\n"), b"data:\n\r"],
    ids=["chat", "messages", "responses", "dying", "with CR", "half an end"],
)
def test_pieces_of_whole_events_tell_what_single_bytes_tell(stream: bytes) -> None:
    """The way in which most streams come."""
    events = re.findall(rb".+?\n\r?\n|.+\Z", stream, re.DOTALL)
    assert b"".join(events) == stream
    by_event = scanned(*events)
    by_byte = scanned(*(bytes([byte]) for byte in stream))
    for known in KNOWN:
        assert getattr(by_event, known) == getattr(by_byte, known), known


def test_the_id_of_a_stored_response_is_found() -> None:
    assert scanned(RESPONSES).response_id == "resp_7"
    assert scanned(CHAT).response_id is None


def test_an_error_chunk_before_done_is_a_failure() -> None:
    """F6: a dying vLLM sends an error and then [DONE], with status 200."""
    for at in range(len(DYING) + 1):
        scan = scanned(DYING[:at], DYING[at:])
        assert scan.failed
        assert scan.complete


def test_the_word_error_in_generated_text_is_none() -> None:
    assert not scanned(b'data: {"choices":[{"delta":{"content":"\\"error\\": x"}}]}\n\n').failed
    assert not scanned(b'data: {"error": null, "choices":[]}\n\n').failed


def test_a_stream_without_usage_has_none() -> None:
    assert scanned(b'data: {"choices":[],"usage":null}\n\ndata: [DONE]\n\n').usage is None


def test_an_endless_line_is_not_kept() -> None:
    """An engine that never sends a line break must not fill the memory."""
    scan = SseScan(typed=False)
    for _ in range(12):
        scan.feed(b"data: " + b"x" * 1_000_000)
    assert len(scan._open_line) < 6_000_000


@pytest.mark.parametrize("name", ["c_chat", "c2_chat_roundtrip", "m_batch", "b_repeat"])
def test_recorded_responses_are_read(name: str) -> None:
    """Streams and bodies of a real vLLM tell the usage that they hold."""
    read = 0
    for request in load(name).requests:
        if request.sse:
            scan = scanned(b"".join(line.encode() + b"\n" for _, line in request.sse))
            assert scan.complete
            read += scan.usage is not None
        elif (
            request.response and isinstance(request.response, dict) and "usage" in request.response
        ):
            unary = UnaryScan()
            unary.feed(json.dumps(request.response).encode())
            unary.finish()
            reported = request.response["usage"]
            assert unary.usage is not None
            assert unary.usage.prompt_tokens == reported["prompt_tokens"]
            read += 1
    assert read >= 3


def test_a_unary_body_that_is_no_json_is_passed_over() -> None:
    scan = UnaryScan()
    scan.feed(b"<html>")
    scan.finish()
    assert scan.usage is None
    assert scan.complete
