"""What turns text into token ids.

One small interface, so that a faster encoder can take the place of `HfBackend` for a model for
which it is proven. A backend is used by several threads at once.
"""

import os
from array import array
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer, processors

from kvrouter.tokenize.location import TokenizerError, TokenizerFiles

BYTES_PER_TOKEN = 4
"""What a token is taken to cost where nothing better is known."""


def estimated_tokens(size: int) -> int:
    """The tokens of a text, from its bytes alone; at least one."""
    return max(1, size // BYTES_PER_TOKEN)


class Backend(Protocol):
    """An encoder of one model."""

    name: str

    def encode(
        self, text: str, *, add_special_tokens: bool, keep_last: int | None = None
    ) -> "array[int]":
        """The ids of a text, with what the tokenizer adds around it if asked for.

        With `keep_last`, at most that many ids: the text is cut on the left, what is added stays.
        """


class HfBackend:
    """The `tokenizers` library on a `tokenizer.json`, set up as `transformers` would."""

    name = "hf"

    def __init__(self, files: TokenizerFiles) -> None:
        # Each prompt is encoded on the thread that asks: the library's own pool would only add
        # threads, and it warns when the process forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            self._tokenizer = Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(f"{files.tokenizer_json} can't be loaded: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        _add_missing_tokens(self._tokenizer, files.config)
        _set_added_ends(self._tokenizer, files)

    def encode(
        self, text: str, *, add_special_tokens: bool, keep_last: int | None = None
    ) -> "array[int]":
        """See `Backend`. Releases the GIL but for the conversion of the ids."""
        if keep_last is not None:
            return self._encode_cut(text, add_special_tokens, keep_last)
        # The batch call without offsets is the cheapest one that the library has.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encodings[0].ids)

    def _encode_cut(self, text: str, add_special_tokens: bool, keep_last: int) -> "array[int]":
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        added = self._tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        if len(encoding) + added > keep_last:
            encoding.truncate(max(0, keep_last - added), direction="left")
        if add_special_tokens:
            encoding = self._tokenizer.post_process(encoding)
        return array("I", encoding.ids)


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only the config names; in the order of their ids, so that they get these."""
    listed = config.get("added_tokens_decoder")
    tokens = sorted(listed.items(), key=lambda item: int(item[0])) if listed else []
    for _, token in tokens:
        if tokenizer.token_to_id(token["content"]) is None:
            tokenizer.add_tokens([_added_token(token)])


def _added_token(token: dict[str, Any]) -> AddedToken:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{name: token[name] for name in names if name in token})


def _set_added_ends(tokenizer: Tokenizer, files: TokenizerFiles) -> None:
    """Let the config decide what is added around a text, where it says anything about that."""
    config = files.config
    explicit = "add_bos_token" in config or "add_eos_token" in config
    if not explicit and tokenizer.post_processor is not None:
        return
    bos = files.special_tokens.get("bos_token") if config.get("add_bos_token") else None
    eos = files.special_tokens.get("eos_token") if config.get("add_eos_token") else None
    ends = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*([bos] if bos else []), "$A", *([eos] if eos else [])],
        special_tokens=[(token, number) for token, number in ends if number is not None],
    )
