"""What is read of a request body, and how much nonsense it takes."""

import json
from typing import Any

import pytest

from kvrouter.openai.body import (
    READ_AT_ONCE_BYTES,
    BadBody,
    Endpoint,
    RequestBody,
    parse_body,
    without_surrogates,
)


def read(body: bytes | dict[str, Any], kind: Endpoint = Endpoint.CHAT) -> RequestBody:
    return parse_body(kind, body if isinstance(body, bytes) else json.dumps(body).encode())


def test_the_fields_that_routing_needs_are_read() -> None:
    body = read(
        {
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": 7,
            "n": 3,
            "cache_salt": "s",
            "session_id": "sess",
            "previous_response_id": "resp_1",
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function"}],
            "vllm_xargs": {"kv_cache_report_mode": "full"},
            "kv_transfer_params": {"prompt_token_ids": [1, 2]},
        }
    )
    assert (body.model, body.stream, body.include_usage) == ("m", True, True)
    assert (body.max_tokens, body.n, body.cache_salt) == (7, 3, "s")
    assert (body.session_id, body.previous_response_id) == ("sess", "resp_1")
    assert body.has_report_mode
    assert body.messages == [{"role": "user", "content": "hi"}]
    assert body.tools == [{"type": "function"}]
    assert body.prompt_token_ids == [1, 2]


def test_an_empty_object_reads_as_all_defaults() -> None:
    """The engine takes a body without `model`; everything else it will refuse by itself."""
    body = read(b" {} ")
    assert (body.model, body.stream, body.max_tokens, body.n) == (None, False, None, 1)
    assert (body.messages, body.prompt, body.prompt_token_ids) == (None, None, None)
    assert not body.has_report_mode


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, 2),
        ({"max_output_tokens": 3}, 3),
        ({"max_tokens": 0}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": "5"}, None),
    ],
)
def test_the_wanted_output_tokens_are_read_by_each_name(
    fields: dict[str, Any], expected: int | None
) -> None:
    assert read(fields).max_tokens == expected


@pytest.mark.parametrize("wrong", [5, [], {}, "", None, 1.5, True])
def test_a_value_of_the_wrong_type_counts_as_absent(wrong: object) -> None:
    """A careless client sends it; the engine will answer 400, the router must not answer 500."""
    names = ("model", "cache_salt", "stream_options", "vllm_xargs", "kv_transfer_params")
    body = read(dict.fromkeys(names, wrong))
    assert (body.model, body.cache_salt, body.include_usage) == (None, None, False)
    assert (body.has_report_mode, body.prompt_token_ids) == (False, None)


def test_of_duplicate_keys_the_last_one_wins() -> None:
    """F1: as in the engine's parser."""
    assert read(b'{"model":"a","model":"b","mod\\u0065l":"c"}').model == "c"


@pytest.mark.parametrize(
    "extra",
    [
        b'"x":1e400',
        b'"x":NaN',
        b'"x":123456789012345678901234567890',
        b'"x":"\\ud800"',
        b'"\\ud800":1',
        b'"x":"\xff"',
        b'"x":' + b"[" * 500 + b"]" * 500,
    ],
)
def test_odd_values_in_unknown_fields_do_no_harm(extra: bytes) -> None:
    """F1: they reach the engine as they are."""
    assert read(b'{"model":"m",' + extra + b',"prompt":"p"}').prompt == "p"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_encodings_that_the_engine_reads_are_read(encoding: str) -> None:
    assert read('{"model":"m"}'.encode(encoding)).model == "m"


def test_a_lone_surrogate_in_a_prompt_is_kept_and_in_a_name_replaced() -> None:
    """T2: JSON can say it, UTF-8 can't; a model or salt with one could not be hashed."""
    body = read(b'{"model":"m\\ud800","prompt":"a\\ud800b"}', Endpoint.COMPLETIONS)
    assert body.prompt == "a\ud800b"
    assert body.model == "m\ufffd"


@pytest.mark.parametrize("value", ["", "plain", "\U0001f600", "é\ufffd"])
def test_text_without_surrogates_stays_as_it_is(value: str) -> None:
    assert without_surrogates(value) == value


def test_two_halves_of_one_character_are_joined() -> None:
    assert without_surrogates("\ud83d\ude00 \ude00") == "\U0001f600 \ufffd"


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b"null", b"{} x", b'{"a":tru}', b"hello", b'"text"', b"\xff\xff", b"[" * 200_000],
)
def test_what_is_no_json_object_is_the_clients_fault(body: bytes) -> None:
    with pytest.raises(BadBody):
        read(body)


def test_a_field_that_no_parser_takes_reads_as_absent() -> None:
    """Python refuses to turn more than 4,300 digits into an int."""
    assert read(b'{"prompt":[' + b"9" * 5000 + b"]}").prompt is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": "caf\\u00e9"}], "prompt": [1, 2], "n": 2}',
        b'{"messages": [{"content": "\\ud83d"}], "model": "m"}',
        b'{"messages": [NaN, 1e999], "prompt": "p", "stream": true}',
        b'{"messages": [123456789012345678901234567890], "prompt": null}',
        b'{"prompt": "first", "prompt": "last", "messages": 7}',
        b'\xef\xbb\xbf{"prompt": "behind a mark"}',
        b'{"prompt": "\xff"}',
        b'{"messages": ' + b"[" * 400 + b"]" * 400 + b"}",
        b'{"prompt": "' + b"x" * READ_AT_ONCE_BYTES + b'"}',
        b"{}",
    ],
    ids=str,
)
def test_read_for_its_prompt_a_body_says_the_same(body: bytes) -> None:
    whole = parse_body(Endpoint.CHAT, body, for_prompt=True)
    plain = parse_body(Endpoint.CHAT, body)
    names = ("messages", "prompt", "model", "n", "stream", "max_tokens", "size")
    assert [repr(getattr(whole, name)) for name in names] == [
        repr(getattr(plain, name)) for name in names
    ]


BESIDE: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "chat_template": "x",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "documents": [],
    "kv_transfer_params": {},
    "reasoning_effort": "low",
    "tool_choice": None,
    "tools": [],
    "truncate_prompt_tokens": 5,
}


@pytest.mark.parametrize("for_prompt", [True, False])
def test_messages_are_alone_unless_something_is_beside_them(for_prompt: bool) -> None:
    plain = {"model": "m", "messages": [], "max_tokens": 3, "stream": True, "temperature": 0}
    alone = parse_body(Endpoint.CHAT, json.dumps(plain).encode(), for_prompt=for_prompt)
    assert alone.has_messages_alone
    for name, value in BESIDE.items():
        body = json.dumps({**plain, name: value}).encode()
        assert not parse_body(Endpoint.CHAT, body, for_prompt=for_prompt).has_messages_alone, name


@pytest.mark.parametrize("size", [10, READ_AT_ONCE_BYTES])
def test_the_json_of_a_field_is_that_of_the_client(size: int) -> None:
    """However long the body: the beginning of a conversation stays the same when it has grown."""
    written = '[{"role":"user", "content":"caf\\u00e9 é'.encode() + b"x" * size + b'"}]'
    body = b'{"messages": ' + written + b', "prompt" :1.50}'
    read_at_once = parse_body(Endpoint.CHAT, body, for_prompt=True)
    assert read_at_once.raw("messages") == written
    assert (read_at_once.raw("prompt"), read_at_once.raw("tools")) == (b"1.50", b"")


def test_the_size_is_that_of_the_body_in_bytes() -> None:
    assert read('{"model":"é"}'.encode()).size == 14
