"""The `fastokens` library: several times faster, for the tokenizers that it gets right.

It knows fewer kinds than `tokenizers` and is wrong about some that it takes, so nothing here is
trusted before `parity` has compared the two.
"""

import itertools
import os
import struct
from array import array
from collections.abc import Sequence

# Each prompt is encoded on the thread that asks. The library would spread a long one over all
# cores, each with a cache of words of its own to fill; it reads this once, when it is first used.
os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")

import fastokens  # type: ignore[import-untyped]  # it has none

from kvrouter.tokenize.backend import ID_BYTES
from kvrouter.tokenize.guarded import told
from kvrouter.tokenize.location import TokenizerError


class FastBackend:
    """The library on one tokenizer. It hands out bytes: no Python object for a token."""

    name = "fastokens"

    def __init__(self, spec: str) -> None:
        """Build from the text of a `tokenizer.json`; raises `TokenizerError` when it refuses."""
        try:
            self._tokenizer = fastokens.Tokenizer.from_json_str(spec)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except BaseException as error:
            raise TokenizerError(f"fastokens can't load it: {told(error)}") from error

    def encode(self, text: str) -> "array[int]":
        """See `Backend`."""
        ids = array("I")
        ids.frombytes(self._tokenizer.encode_batch_flat([text])[0])
        return ids

    def encode_each(self, texts: Sequence[str]) -> list[bytes]:
        """See `Library`."""
        ids, offsets = self._tokenizer.encode_batch_flat(list(texts))
        edges = [at * ID_BYTES for at in struct.unpack(f"<{len(texts) + 1}Q", offsets)]
        return [ids[start:end] for start, end in itertools.pairwise(edges)]
