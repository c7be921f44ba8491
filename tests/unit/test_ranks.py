"""Rank files give the ids that `tiktoken` gives."""

import base64
import json
from functools import cache
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from support.shapes import shaped
from support.texts import TEXTS

from kvrouter.tokenize import ModelTokenizer, TokenizerError
from kvrouter.tokenize.choice import BackendSettings, choose
from kvrouter.tokenize.hf import HfBackend
from kvrouter.tokenize.ranks import (
    HARMONY_TOKENS,
    O200K_PATTERN,
    _byte_names,
    read_ranks,
    tokenizer_of,
)


@cache
def ranks() -> dict[bytes, int]:
    """Those of a small vocabulary: single bytes first, then merges in their order."""
    model = json.loads(shaped("o200k").to_str())["model"]
    letters = {name: byte for byte, name in enumerate(_byte_names())}
    single = {bytes([byte]): byte for byte in range(256)}
    merged = ("".join(pair) for pair in model["merges"])
    tokens = dict.fromkeys(bytes(letters[letter] for letter in token) for token in merged)
    return single | {token: 256 + place for place, token in enumerate(tokens)}


def special() -> dict[str, int]:
    """Right behind the ranks, as harmony has them."""
    return {"<|start|>": len(ranks()), "<|end|>": len(ranks()) + 1}


@cache
def both() -> tuple[tiktoken.Encoding, HfBackend]:
    theirs = tiktoken.Encoding(
        "small", pat_str=O200K_PATTERN, mergeable_ranks=ranks(), special_tokens=special()
    )
    return theirs, HfBackend(tokenizer_of(ranks(), O200K_PATTERN, special()))


@given(TEXTS)
@settings(deadline=None)  # the first call trains the vocabulary
def test_ids_are_those_of_tiktoken(text: str) -> None:
    theirs, ours = both()
    assert ours.encode(text).tolist() == theirs.encode(text, allowed_special="all")


def test_they_are_encoded_fast() -> None:
    _, ours = both()
    assert choose(ours, [], BackendSettings()).name == "fastokens"


def written(folder: Path, name: str) -> Path:
    lines = (f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks().items())
    path = folder / name
    path.write_text("\n".join(lines))
    return path


def test_a_file_is_read_by_its_name(tmp_path: Path) -> None:
    path = written(tmp_path, "o200k_base.tiktoken")
    assert read_ranks(path) == ranks()
    tokenizer = ModelTokenizer.load(str(path))
    assert list(tokenizer.backend.encode("<|start|>a<|message|>")) == [200006, 97, 200008]
    assert "no chat template" in tokenizer.chat_problem


def test_harmony_has_its_special_tokens() -> None:
    assert HARMONY_TOKENS["<|return|>"] == 200002
    assert HARMONY_TOKENS["<|reserved_200000|>"] == 200000
    assert len(HARMONY_TOKENS) == 201088 - 199998


@pytest.mark.parametrize("name", ["cl100k_base.tiktoken", "other.tiktoken"])
def test_unknown_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(TokenizerError, match="known by name"):
        ModelTokenizer.load(str(written(tmp_path, name)))


def test_a_broken_file_is_said_to_be_broken(tmp_path: Path) -> None:
    path = tmp_path / "o200k_base.tiktoken"
    path.write_text("YQ== 0\nbroken\n")
    with pytest.raises(TokenizerError, match="can't be read"):
        ModelTokenizer.load(str(path))
