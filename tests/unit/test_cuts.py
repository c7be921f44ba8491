"""Which tokenizers may be cut where."""

import json
from typing import Any

import pytest
from support.shapes import LLAMA_3, shaped
from tokenizers import AddedToken, Tokenizer

from kvrouter.tokenize.cuts import UNCUT, cuts_of


def spec(name: str, **changed: Any) -> dict[str, Any]:
    return {**json.loads(shaped(name).to_str()), **changed}


def with_token(name: str, content: str, **flags: bool) -> dict[str, Any]:
    tokenizer = Tokenizer.from_str(json.dumps(spec(name)))
    tokenizer.add_tokens([AddedToken(content, **{"normalized": False, **flags})])
    return dict(json.loads(tokenizer.to_str()))


WITHIN = ("gpt_2", "llama_3", "qwen", "o200k", "deepseek", "mistral", "gemma", "nfkc_metaspace")


@pytest.mark.parametrize("name", WITHIN)
def test_kinds_that_are_cut_within_segments(name: str) -> None:
    assert cuts_of(spec(name)).within


@pytest.mark.parametrize("name", ["llama_2", "word_piece"])
def test_kinds_that_are_cut_at_special_tokens_only(name: str) -> None:
    """Prepend puts its sign before every piece; WordPiece is not argued for."""
    cuts = cuts_of(spec(name))
    assert not cuts.within
    assert cuts.plain_ids


def test_an_unknown_regex_is_not_cut() -> None:
    changed = spec("llama_3")
    split = changed["pre_tokenizer"]["pretokenizers"][0]
    assert split["pattern"] == {"Regex": LLAMA_3}
    split["pattern"] = {"Regex": LLAMA_3 + r"|\w+ \w+"}
    assert not cuts_of(changed).within


def test_a_regex_without_words_is_not_cut() -> None:
    changed = spec("llama_3")
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"\s+"}
    assert not cuts_of(changed).within


def test_a_vocabulary_that_merges_over_spaces_is_not_cut() -> None:
    changed = spec("mistral")
    changed["model"]["vocab"]["of▁the"] = 9999
    assert not cuts_of(changed).within


@pytest.mark.parametrize(
    "model", [{"dropout": 0.1}, {"type": "Unigram"}, {"continuing_subword_prefix": "##"}]
)
def test_other_models_are_not_cut(model: dict[str, Any]) -> None:
    changed = spec("llama_3")
    changed["model"] |= model
    assert not cuts_of(changed).within


@pytest.mark.parametrize(
    "normalizer", [{"type": "Strip"}, {"type": "Prepend", "prepend": "▁"}, {"type": "Nmt"}]
)
def test_other_normalizers_are_not_cut(normalizer: dict[str, Any]) -> None:
    assert not cuts_of(spec("llama_3", normalizer=normalizer)).within


@pytest.mark.parametrize("content", ["two words", "\uff54wo \uff57ords"])
def test_a_token_over_the_place_forbids_it(content: str) -> None:
    assert not cuts_of(with_token("llama_3", content)).within


def test_a_token_that_swallows_white_space_behind_a_letter_forbids_it() -> None:
    assert not cuts_of(with_token("llama_3", "word", rstrip=True)).within
    assert cuts_of(with_token("llama_3", "<word>", rstrip=True)).within


def test_a_token_that_swallows_white_space_is_no_place_to_cut() -> None:
    cuts = cuts_of(spec("phi_3"))
    assert "<|user|>" not in cuts.plain_ids
    assert cuts.tokens is not None
    assert cuts.tokens.search("<|user|>")


def test_whole_words_look_at_their_neighbours() -> None:
    assert cuts_of(with_token("llama_3", "<x>", single_word=True)) == UNCUT


def test_white_space_tokens_next_to_those_that_swallow_it() -> None:
    changed = spec("gemma")
    assert cuts_of(changed) != UNCUT
    changed["added_tokens"][0]["rstrip"] = True
    assert cuts_of(changed) == UNCUT


def test_the_longest_token_is_found_first() -> None:
    cuts = cuts_of(with_token("llama_3", "<|end|>s"))
    assert cuts.tokens is not None
    assert cuts.tokens.findall("<|end|>s<|end|>") == ["<|end|>s", "<|end|>"]


def test_the_leading_token_is_no_beginning_of_another() -> None:
    cuts = cuts_of(with_token("llama_3", "<|begin|>x"))
    assert cuts.lead == "<|start|>"


def test_without_tokens_there_is_no_lead() -> None:
    cuts = cuts_of(spec("gpt_2", added_tokens=[]))
    assert (cuts.lead, cuts.within) == (None, True)
