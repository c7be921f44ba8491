"""The proof of a backend at start: what it compares, what it finds."""

import json
import time
from array import array

import pytest
from support.shapes import shaped
from tokenizers import Tokenizer

from kvrouter.tokenize import parity
from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.hf import HfBackend

AUTO = BackendSettings()


class Renamed:
    """A backend that is wrong about one text."""

    name = "renamed"

    def __init__(self, inner: HfBackend, wrong: str) -> None:
        self._inner = inner
        self._wrong = wrong

    def encode(self, text: str) -> "array[int]":
        ids = self._inner.encode(text)
        return ids[:-1] if text == self._wrong else ids


@pytest.mark.parametrize("name", ["gpt_2", "llama_3", "qwen", "o200k", "deepseek"])
def test_byte_level_shapes_are_proven(name: str) -> None:
    ladder = choose(HfBackend(shaped(name)), [], AUTO)
    assert ladder.name == "fastokens"
    assert "equal" in ladder.reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [("mistral", "Metaspace"), ("nfkc_metaspace", "NFKC"), ("word_piece", "BertNormalizer")],
)
def test_what_fastokens_refuses_is_encoded_by_the_reference(name: str, reason: str) -> None:
    """Its own message says why; it stands in /workers."""
    ladder = choose(HfBackend(shaped(name)), [], AUTO)
    assert ladder.name == "hf"
    assert reason in ladder.reason


def test_a_kind_that_fastokens_loads_and_gets_wrong_is_found_out() -> None:
    """BPE without a pre-tokenizer, a byte fallback and an unknown token: rare, and accepted."""
    spec = json.loads(shaped("mistral").to_str())
    spec["pre_tokenizer"] = None
    spec["model"] |= {"byte_fallback": False, "unk_token": None}
    hf = HfBackend(Tokenizer.from_str(json.dumps(spec)))
    ladder = choose(hf, [], AUTO)
    assert ladder.name == "hf"
    assert "other ids" in ladder.reason


def test_whoever_asks_for_the_reference_gets_it() -> None:
    ladder = choose(HfBackend(shaped("llama_3")), [], BackendSettings(wish="hf"))
    assert (ladder.name, ladder.reason) == ("hf", "configured")


def test_the_proof_covers_rendered_prompts_and_special_tokens() -> None:
    compared = list(parity.texts(["<|end|>"], ["rendered"]))
    assert {"", "a", "<|end|>", "x<|end|>y", "rendered"} <= set(compared)
    assert any("\r\n" in text for text in compared)
    assert any("<|end|>" in text for text in compared[-100:])


def test_the_proof_is_the_same_each_time_and_a_few_hundred_kilobytes() -> None:
    first, second = list(parity.texts()), list(parity.texts())
    assert first == second
    assert 300_000 < sum(map(len, first)) < 900_000


def test_a_difference_shows_the_place() -> None:
    hf = HfBackend(shaped("gpt_2"))
    text = "word " * 50
    found = parity.difference(hf, Renamed(hf, text), ["fine", text])
    assert found is not None
    assert len(found.text) <= 40
    assert parity.difference(hf, Renamed(hf, text), ["fine"]) is None


def test_it_takes_less_than_two_seconds_of_cpu() -> None:
    hf = HfBackend(shaped("deepseek"))
    started = time.process_time()
    choose(hf, [], AUTO)
    assert time.process_time() - started < 2
