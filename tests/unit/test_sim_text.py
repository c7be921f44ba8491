"""Prompts and made-up outputs of the simulated engine."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from kvrouter.openai.body import Endpoint, RequestBody, parse_body
from kvrouter.sim.text import (
    FourByteText,
    ModelText,
    Text,
    UnusablePromptError,
    natural_length,
    outputs_for,
)

TINY = str(Path(__file__).parent.parent / "data" / "tinymodel")


def body(endpoint: Endpoint, **fields: Any) -> RequestBody:
    return parse_body(endpoint, json.dumps(fields).encode())


@pytest.fixture(params=["four bytes", "model"], scope="module")
def text(request: pytest.FixtureRequest) -> Text:
    return FourByteText() if request.param == "four bytes" else ModelText(TINY)


def test_equal_prompts_get_equal_outputs_and_choices_differ(text: Text) -> None:
    prompt = array("I", range(50))
    assert outputs_for(text, prompt, 0, 20) == outputs_for(text, prompt, 0, 20)
    assert outputs_for(text, prompt, 0, 20) != outputs_for(text, prompt, 1, 20)
    assert outputs_for(text, prompt, 0, 20) != outputs_for(text, array("I", [1]), 0, 20)


def test_an_output_of_unknown_length_has_a_natural_one() -> None:
    lengths = {natural_length(array("I", [n]), 0) for n in range(100)}
    assert 32 <= min(lengths) < max(lengths) <= 256


def test_the_text_of_an_output_tokenizes_to_the_same_ids_again(text: Text) -> None:
    """Else the next turn of a chat would not find the blocks of the answer."""
    outputs = outputs_for(text, array("I", range(9)), 0, 100)
    again = text.prompt(body(Endpoint.COMPLETIONS, prompt=text.decode(outputs)))
    assert again.tolist() == outputs


def test_pieces_add_up_to_the_text(text: Text) -> None:
    outputs = outputs_for(text, array("I", range(9)), 0, 100)
    assert "".join(map(text.piece, outputs)) == text.decode(outputs)


def test_ids_are_taken_as_they_are(text: Text) -> None:
    assert text.prompt(body(Endpoint.COMPLETIONS, prompt=[5, 6, 7])).tolist() == [5, 6, 7]
    chat = body(Endpoint.CHAT, messages=[], kv_transfer_params={"prompt_token_ids": [5, 6]})
    assert text.prompt(chat).tolist() == [5, 6]


def test_a_prompt_that_is_no_prompt_is_the_clients_fault(text: Text) -> None:
    for broken in (body(Endpoint.COMPLETIONS, prompt={"a": 1}), body(Endpoint.CHAT)):
        with pytest.raises(UnusablePromptError):
            text.prompt(broken)


def test_four_bytes_are_a_token() -> None:
    prompt = FourByteText().prompt(body(Endpoint.COMPLETIONS, prompt="12345678é"))
    assert len(prompt) == 3
    assert FourByteText().decode(prompt) == "12345678é"


def test_without_a_template_all_forms_of_a_chat_are_a_transcript() -> None:
    text = FourByteText()
    message = {"role": "user", "content": "hi"}
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    system = {"role": "system", "content": "be brief"}
    forms = [
        body(Endpoint.CHAT, messages=[system, message]),
        body(Endpoint.CHAT, messages=[system, parts]),
        body(Endpoint.MESSAGES, system="be brief", messages=[message]),
        body(Endpoint.RESPONSES, instructions="be brief", input="hi"),
        body(Endpoint.RESPONSES, instructions="be brief", input=[message]),
    ]
    assert {text.decode(text.prompt(form)) for form in forms} == {"system: be brief\nuser: hi\n"}
