"""How the simulated engine names its blocks: the engine hashes of its events.

Like vLLM's, a name covers all tokens up to the end of its block and what else makes the block
differ, and all names depend on the engine's hash seed. They are not vLLM's values, on purpose: a
router that tried to compute engine hashes instead of taking them from the events would fail here.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from xxhash import xxh3_64_digest

_SEED = 0x5EED
"""Another one than the router's, so that no name can equal one of its hashes but by chance."""


def token_array(ids: Sequence[int]) -> "array[int]":
    """Return a copy of these token ids (each below 2**32) in a compact form."""
    return array("I", ids)


class BlockNamer:
    """Names the blocks of one sequence, as its tokens become known.

    `names` holds one unsigned 64-bit name for each full block so far.
    """

    __slots__ = ("_block_size", "_extra", "_link", "names")

    def __init__(self, seed: int, block_size: int, lora_name: str | None, salt: str | None) -> None:
        self._block_size = block_size
        self._extra = (
            b"" if lora_name is None else b"lora\0" + lora_name.encode(errors="surrogatepass")
        )
        root = b"seed\0%d" % seed
        if salt is not None:
            root += b"\0salt\0" + salt.encode(errors="surrogatepass")
        self._link = xxh3_64_digest(root, _SEED)
        self.names: list[int] = []

    def extend(self, tokens: "array[int]") -> None:
        """Name the blocks of `tokens` (the whole sequence) that are full and have no name yet."""
        known, width = len(self.names), self._block_size * tokens.itemsize
        data = tokens[known * self._block_size :].tobytes()
        link, extra = self._link, self._extra
        for start, end in pairwise(range(0, len(data) + 1, width)):
            link = xxh3_64_digest(link + data[start:end] + extra, _SEED)
            self.names.append(int.from_bytes(link, "big"))
        self._link = link


def extra_keys(
    first: int, count: int, lora_name: str | None, salt: str | None
) -> list[list[Any] | None]:
    """Return what besides tokens went into the names of `count` blocks from block `first` on.

    vLLM's events carry the LoRA name on each block and the salt on the very first one only.
    """
    if lora_name is None and (first or salt is None):
        return [None] * count
    lora: list[Any] = [] if lora_name is None else [lora_name]
    keys: list[list[Any] | None] = [list(lora) or None for _ in range(count)]
    if first == 0 and count and salt is not None:
        keys[0] = [*lora, salt]
    return keys
