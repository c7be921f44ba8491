"""Tokens and text of the simulated engine.

Prompts are tokenized as the router's own tokenizer does it; without a tokenizer a token is four
bytes of UTF-8, so that the engine runs standalone. What it "generates" is a random walk over words,
seeded by the prompt: equal prompts get equal outputs, as with greedy sampling, and the text of an
output tokenizes to the very same ids again, so that the next turn of a chat finds the blocks.
"""

import random
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from tokenizers import Tokenizer

from kvrouter.openai.body import Endpoint, RequestBody
from kvrouter.prompt import Fidelity
from kvrouter.tokenize import ModelTokenizer
from kvrouter.tokenize.location import find_tokenizer

_BYTES_PER_TOKEN = 4
_SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
_WORD_STARTS = "Ġ▁"  # how byte-level and sentencepiece vocabularies mark a space before a word
_MAX_WORDS = 512


class UnusablePromptError(ValueError):
    """The prompt can't be tokenized: the client's fault."""


class Text(Protocol):
    """Tokenizes prompts and makes up outputs."""

    def prompt(self, body: RequestBody) -> "array[int]":
        """Return the ids of a body with one prompt; raises UnusablePromptError."""
        ...

    def words(self) -> Sequence[int]:
        """Return the ids that outputs are made of."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids."""
        ...

    def piece(self, token: int) -> str:
        """Return the text that this id adds to the ids before it."""
        ...


def load_text(tokenizer: str | None) -> Text:
    """Load a tokenizer by folder or hub id; without one, four bytes are a token.

    Raises TokenizerError.
    """
    return FourByteText() if tokenizer is None else ModelText(tokenizer)


def outputs_for(text: Text, prompt: "array[int]", choice: int, count: int) -> list[int]:
    """Return `count` output ids: the same for the same prompt and choice."""
    return _dice(prompt, choice).choices(text.words(), k=count)


def natural_length(prompt: "array[int]", choice: int) -> int:
    """Return how many tokens an answer has if the client doesn't say: 32 to 256."""
    return _dice(prompt, choice).randint(32, 256)


def _dice(prompt: "array[int]", choice: int) -> random.Random:
    seed = blake2b(prompt.tobytes(), digest_size=8, salt=choice.to_bytes(8, "big")).digest()
    return random.Random(seed)


class FourByteText:
    """One token for each four bytes; a chat is rendered as lines of `role: content`."""

    def __init__(self) -> None:
        words = [f" {syllable}{end}" for syllable in _SYLLABLES for end in "nr"]
        self._words = [self._ids(word)[0] for word in words]

    def prompt(self, body: RequestBody) -> "array[int]":
        """Return the ids of the prompt's text, or the ids that the body has."""
        completion = body.endpoint is Endpoint.COMPLETIONS
        ids = body.prompt if completion else body.prompt_token_ids
        if isinstance(ids, list) and ids and all(_is_id(item) for item in ids):
            return array("I", ids)
        text = body.prompt if completion else _transcript(body)
        if not isinstance(text, str):
            raise UnusablePromptError("the prompt is neither text nor token ids")
        return self._ids(text)

    def words(self) -> Sequence[int]:
        """Return three-letter words with the space before them."""
        return self._words

    def decode(self, ids: Sequence[int]) -> str:
        """Return the bytes' text; the last token of a prompt can stand for fewer than four."""
        data = b"".join(i.to_bytes(_BYTES_PER_TOKEN, "big").lstrip(b"\0") for i in ids)
        return data.decode(errors="replace")

    def piece(self, token: int) -> str:
        """Return the text of this id."""
        return self.decode([token])

    @staticmethod
    def _ids(text: str) -> "array[int]":
        data = text.encode(errors="replace")
        starts = range(0, len(data), _BYTES_PER_TOKEN)
        return array("I", [int.from_bytes(data[i : i + _BYTES_PER_TOKEN], "big") for i in starts])


class ModelText:
    """A model's own tokenizer and chat template, from its folder or hub id."""

    def __init__(self, folder_or_id: str) -> None:
        self._prompts = ModelTokenizer.load(folder_or_id)
        files = find_tokenizer(folder_or_id)
        self._tokenizer = Tokenizer.from_file(str(files.tokenizer_json))
        self._words = _words_of(self._tokenizer)
        self._pieces: dict[int, str] = {}

    def prompt(self, body: RequestBody) -> "array[int]":
        """Return the ids that the router would compute, which are vLLM's."""
        prompt = self._prompts.prompt(body)
        if prompt.fidelity is Fidelity.BLIND:
            raise UnusablePromptError(prompt.reason)
        return prompt.token_ids

    def words(self) -> Sequence[int]:
        """Return ids of whole words with the space before them, at most 512."""
        return self._words

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these ids, special tokens left out."""
        return str(self._tokenizer.decode(list(ids)))

    def piece(self, token: int) -> str:
        """Return what the id adds behind a word (some decoders strip the text's first space)."""
        piece = self._pieces.get(token)
        if piece is None:
            anchor = self._words[:1]
            piece = self.decode([*anchor, token])[len(self.decode(anchor)) :]
            self._pieces[token] = piece
        return piece


def _words_of(tokenizer: Tokenizer) -> list[int]:
    """Pick ids that stay themselves when the text they make is tokenized again."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    candidates = sorted(
        (index, token[1:])
        for token, index in vocabulary.items()
        if token[0:1] in _WORD_STARTS and token[1:].isascii() and token[1:].isalpha()
    )[-2 * _MAX_WORDS :]
    words = [
        index
        for index, word in candidates
        if tokenizer.encode(f" {word} {word}", add_special_tokens=False).ids == [index, index]
    ]
    return words[-_MAX_WORDS:] or sorted(vocabulary.values())[-_MAX_WORDS:]


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32


def _transcript(body: RequestBody) -> str:
    lines: list[tuple[object, object]] = [
        ("system", body.get(key)) for key in ("system", "instructions") if body.get(key)
    ]
    messages = body.messages if body.messages is not None else body.get("input")
    if isinstance(messages, str):
        lines.append(("user", messages))
    elif isinstance(messages, list) and messages:
        lines += [(m.get("role"), m.get("content")) for m in messages if isinstance(m, dict)]
    else:
        raise UnusablePromptError("there are no messages")
    return "".join(f"{role}: {_content(content)}\n" for role, content in lines)


def _content(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text")) for part in content if isinstance(part, dict))
    return str(content)
