"""Bodies that carry a prompt's ids: which may, and what changes in them."""

import json
from array import array
from typing import Any

import pytest
from support.tokenizers import request, said

from kvrouter.openai.body import Endpoint
from kvrouter.openai.prompt_ids import may_send_ids, with_prompt_ids

IDS = array("I", [5, 70_000, 0])
CHAT = {"messages": [said("hi")]}


def test_a_completion_gets_ids_for_its_text_and_keeps_every_other_byte() -> None:
    body = b'{ "model" : "m", "prompt":"say \\"hi\\" \\u00e9" ,"n":1.0}'
    sent = with_prompt_ids(body, Endpoint.COMPLETIONS, IDS)
    assert sent == b'{ "model" : "m", "prompt":[5,70000,0] ,"n":1.0}'


def test_of_two_prompts_of_one_name_the_last_is_what_counts() -> None:
    body = b'{"prompt":"a","prompt":"b"}'
    assert (
        with_prompt_ids(body, Endpoint.COMPLETIONS, IDS) == b'{"prompt":"a","prompt":[5,70000,0]}'
    )


def test_a_chat_keeps_its_messages_and_gets_the_ids_beside_them() -> None:
    body = b' {\n"messages": [{"role":"user","content":"{\\"kv\\":1}"}], "x":1e400}'
    sent = with_prompt_ids(body, Endpoint.CHAT, IDS)
    added = b'"kv_transfer_params":{"prompt_token_ids":[5,70000,0]},'
    assert sent == body.replace(b"{", b"{" + added, 1)
    assert json.loads(sent)["kv_transfer_params"] == {"prompt_token_ids": [5, 70000, 0]}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Endpoint.CHAT, CHAT),
        (Endpoint.CHAT, {**CHAT, "logprobs": False, "stream": True, "tools": [], "n": 2}),
        (Endpoint.COMPLETIONS, {"prompt": "hi"}),
        (Endpoint.COMPLETIONS, {"prompt": "hi", "echo": False, "logprobs": None}),
    ],
)
def test_plain_requests_may(kind: Endpoint, fields: dict[str, Any]) -> None:
    assert may_send_ids(request(kind, **fields))


def test_a_chat_that_has_the_member_already_may_not() -> None:
    """Some clients send every field, a null where they want nothing."""
    assert not may_send_ids(request(Endpoint.CHAT, **CHAT, kv_transfer_params=None))
    assert may_send_ids(request(Endpoint.COMPLETIONS, prompt="hi", kv_transfer_params=None))


@pytest.mark.parametrize(
    "option",
    [
        *({"echo": True}, {"logprobs": 1}, {"logprobs": 0}, {"prompt_logprobs": 0}),
        *({"suffix": "x"}, {"truncate_prompt_tokens": 5}, {"use_beam_search": True}),
        *({"kv_transfer_params": {}}, {"prompt_embeds": "AA=="}, {"top_logprobs": 2}),
    ],
)
def test_options_that_concern_the_prompts_text_may_not(option: dict[str, Any]) -> None:
    assert not may_send_ids(request(Endpoint.COMPLETIONS, prompt="hi", **option))
    assert not may_send_ids(request(Endpoint.CHAT, **CHAT, **option))


@pytest.mark.parametrize("prompt", [[1, 2], ["a"], ["a", "b"], None])
def test_only_one_text_is_replaced(prompt: Any) -> None:
    assert not may_send_ids(request(Endpoint.COMPLETIONS, prompt=prompt))


@pytest.mark.parametrize("kind", [Endpoint.RESPONSES, Endpoint.MESSAGES])
def test_other_dialects_have_no_place_for_ids(kind: Endpoint) -> None:
    assert not may_send_ids(request(kind, **CHAT, input="hi"))
