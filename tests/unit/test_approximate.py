"""Four bytes for a token, where nobody has the tokenizer."""

from array import array
from typing import Any

import pytest
from support.tokenizers import request, said

from kvrouter.openai.body import Endpoint, parse_body
from kvrouter.prompt import Fidelity
from kvrouter.tokenize import BytesTokenizer

TEXT = "The harbour lay quiet in the morning. " * 8


def chat(*texts: str) -> "array[int]":
    body = request(messages=[said(text) for text in texts], tools=[{"type": "function"}])
    return BytesTokenizer("").prompt(body).token_ids


def test_its_length_is_estimated_and_marked() -> None:
    """T8: by bytes, if asked."""
    prompt = BytesTokenizer("").prompt(request(Endpoint.COMPLETIONS, prompt=TEXT))
    assert prompt.fidelity is Fidelity.APPROXIMATE
    assert "4 bytes" in prompt.reason
    assert prompt.prompt_tokens == (len(TEXT) + 2) // 4


def test_equal_beginnings_have_equal_ids() -> None:
    """So a burst that shares a prefix meets where the first of it went."""
    first, second = chat(TEXT, "a"), chat(TEXT, "something else")
    shared = len(TEXT) // 4
    assert first[:shared] == second[:shared]
    assert first != second


@pytest.mark.parametrize("endpoint", Endpoint)
def test_every_dialect_has_a_text(endpoint: Endpoint) -> None:
    fields: dict[str, Any] = {"prompt": TEXT, "messages": [said(TEXT)], "input": TEXT}
    prompt = BytesTokenizer("").prompt(request(endpoint, **fields), namespace=b"n")
    assert len(prompt.token_ids) >= len(TEXT) // 4
    assert prompt.namespace == b"n"


def test_ids_of_the_client_are_exact() -> None:
    prompt = BytesTokenizer("").prompt(request(Endpoint.COMPLETIONS, prompt=[7, 8, 9]))
    assert (list(prompt.token_ids), prompt.fidelity) == ([7, 8, 9], Fidelity.EXACT)
    replaced = request(messages=[said("hi")], kv_transfer_params={"prompt_token_ids": [1, 2]})
    assert list(BytesTokenizer("").prompt(replaced).token_ids) == [1, 2]


def test_a_body_that_only_the_lenient_reader_takes() -> None:
    body = parse_body(Endpoint.COMPLETIONS, b'{"prompt":"\\ud800 lone", "n": NaN}')
    assert BytesTokenizer("").prompt(body).prompt_tokens > 1


def test_without_a_prompt_it_is_one_token() -> None:
    assert BytesTokenizer("").prompt(request()).prompt_tokens == 1
