"""What turns text into token ids.

One small interface, so that a faster encoder can take the place of `HfBackend` for a model for
which it is proven. A backend is used by several threads at once.
"""

import json
import os
from array import array
from typing import Any, Literal, Protocol

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

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
        _rebuild_as_llama(self._tokenizer, files.config)

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


def _rebuild_as_llama(tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """Prefix spaces as `transformers` 5 makes them for its Llama class, whatever the file says.

    It builds tokenizers of that class anew, with another rule for the space before a text.
    """
    if config.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    rules = json.loads(tokenizer.to_str()).get("normalizer") or {}
    kinds = [rule.get("type") for rule in rules.get("normalizers", [rules])]
    if "Prepend" not in kinds:
        return
    if config.get("add_prefix_space") is False:
        scheme: Literal["never", "always", "first"] = "never"
    else:
        scheme = "always" if config.get("legacy") else "first"
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
