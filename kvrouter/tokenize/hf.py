"""The `tokenizers` library: the reference that every other backend is held to."""

import contextlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer, pre_tokenizers

from kvrouter.tokenize.backend import Around
from kvrouter.tokenize.guarded import told
from kvrouter.tokenize.location import TokenizerError, TokenizerFiles
from kvrouter.tokenize.ranks import load_ranks

_PROBE = "a"
_MORE_PROBES = 20
"""Words of the vocabulary, where the tokenizer has no token for what it does not know, and in place
of those that are what it adds."""


class HfBackend:
    """The library on one tokenizer. Releases the GIL but for the conversion of the ids."""

    name = "hf"

    def __init__(self, tokenizer: Tokenizer) -> None:
        # Each prompt is encoded on the thread that asks: the library's own pool would only add
        # threads, and it warns when the process forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.around = _around(tokenizer)

    @classmethod
    def load(cls, files: TokenizerFiles) -> "HfBackend":
        """Load a `tokenizer.json`, set up as `transformers` would; raises `TokenizerError`."""
        if files.ranks is not None:
            return cls(load_ranks(files.ranks))
        try:
            tokenizer = Tokenizer.from_file(str(files.tokenizer_json))
        except BaseException as error:
            message = f"{files.tokenizer_json} can't be loaded: {told(error)}"
            raise TokenizerError(message) from error
        _add_missing_tokens(tokenizer, files.config)
        _rebuild_as_llama(tokenizer, files.config)
        return cls(tokenizer)

    @property
    def spec(self) -> str:
        """The tokenizer as set up, in the form of a `tokenizer.json`."""
        return self._tokenizer.to_str()

    def encode(self, text: str) -> "array[int]":
        """See `Backend`."""
        # The batch call without offsets is the cheapest one that the library has.
        encodings = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return array("I", encodings[0].ids)

    def encode_each(self, texts: Sequence[str]) -> list[bytes]:
        """See `Library`."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array("I", encoding.ids).tobytes() for encoding in encodings]


def _around(tokenizer: Tokenizer) -> Around:
    """What the post-processor adds, which for one text is the same whatever the text.

    Raises `TokenizerError` when nothing can be encoded.
    """
    found = None
    for text in _probes(tokenizer):
        with contextlib.suppress(Exception):  # the library raises bare ones
            plain = tokenizer.encode(text, add_special_tokens=False).ids
            whole = tokenizer.encode(text, add_special_tokens=True).ids
            added = len(whole) - len(plain)
            starts = [at for at in range(added + 1) if whole[at : at + len(plain)] == plain]
            # Where the text's own ids are not to be found, it is because there are none.
            at = starts[0] if starts and plain else added
            found = Around(array("I", whole[:at]), array("I", whole[at + len(plain) :]))
            if len(starts) == 1:
                break
    if found is None:
        raise TokenizerError("the tokenizer can't encode its own words")
    return found


def _probes(tokenizer: Tokenizer) -> Iterator[str]:
    yield _PROBE
    words = tokenizer.get_vocab(with_added_tokens=False)
    yield from sorted(words, key=words.__getitem__)[:_MORE_PROBES]


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
