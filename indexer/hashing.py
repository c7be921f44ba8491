"""Token ids and namespace -> block hashes: the names that prompts and engines meet on.

The rule, version 1:

- the root of a namespace is 8 zero bytes for `b""`, else the XXH3-64 of the namespace (seed 2);
- a block's hash is the XXH3-64 (seed 0) of the hash before it (or the root) followed by the block's
  token ids as little-endian uint32;
- what besides tokens goes into one block (an image at this place, say) is hashed behind it: the
  XXH3-64 (seed 1) of that hash followed by the extra bytes;
- each hash is written as 8 big-endian bytes.

So an equal hash means an equal whole prefix in the same namespace, whatever the engine calls it.
Only full blocks have a hash. XXH3 is no cryptographic hash: whoever crafts a collision sends a
request to the wrong cache, which costs that request its reuse and nothing else.

Anything that changes a hash changes `RULE_VERSION`: stored hashes of another version mean nothing.
"""

import itertools
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from xxhash import xxh3_64_digest

RULE_VERSION = 1
HASH_BYTES = 8
TOKEN_BYTES = 4

_PLAIN_ROOT = bytes(HASH_BYTES)
_SEED_EXTRA = 1
_SEED_ROOT = 2
_CUT_AT_ONCE = 256
_IS_AS_IT_STANDS = sys.byteorder == "little" and array("I").itemsize == TOKEN_BYTES


def namespace(
    *, model: str | None = None, lora: str | None = None, salt: str | None = None
) -> bytes:
    """What besides tokens makes blocks differ; `b""` where nothing does.

    Two different combinations never give the same bytes: each part is tagged and carries its
    length. Text that is no valid Unicode (a lone surrogate in a client's salt) is fine.
    """
    if model is lora is salt is None:
        return b""
    parts = ((b"m", model), (b"l", lora), (b"s", salt))
    return b"".join(_tagged(tag, text) for tag, text in parts if text is not None)


def _tagged(tag: bytes, text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return tag + len(data).to_bytes(4, "big") + data


def block_hashes(
    token_ids: "Sequence[int] | array[int]", block_size: int, namespace: bytes = b""
) -> bytes:
    """The chained hashes of all full blocks, `HASH_BYTES` each.

    Raises ValueError if the block size is not positive, OverflowError if a token id is no uint32.
    """
    return chain(root(namespace), token_ids, block_size)


def root(namespace: bytes) -> bytes:
    """What stands in for "the hash before" at the first block of a namespace."""
    return xxh3_64_digest(namespace, _SEED_ROOT) if namespace else _PLAIN_ROOT


def chain(
    previous: bytes,
    token_ids: "Sequence[int] | array[int]",
    block_size: int,
    extras: Sequence[bytes] = (),
) -> bytes:
    """The hashes of the full blocks of `token_ids`, which follow the block `previous`.

    `extras` has one entry per block (empty where only tokens count), or is empty altogether.
    """
    if block_size <= 0:
        raise ValueError(f"a block size is at least 1 token, not {block_size}")
    blocks = _blocks(token_ids, block_size)
    if extras and any(extras):
        return _chain_with_extras(previous, blocks, extras)
    # One expression over ready-made slices: hashing is a large part of applying an event.
    return b"".join([previous := xxh3_64_digest(previous + block) for block in blocks])


def _chain_with_extras(previous: bytes, blocks: Iterable[bytes], extras: Sequence[bytes]) -> bytes:
    hashes = []
    for block, extra in zip(blocks, extras, strict=True):
        previous = xxh3_64_digest(previous + block)
        if extra:
            previous = xxh3_64_digest(previous + extra, _SEED_EXTRA)
        hashes.append(previous)
    return b"".join(hashes)


def _blocks(token_ids: "Sequence[int] | array[int]", block_size: int) -> Iterable[bytes]:
    """The token bytes of each full block."""
    width = block_size * TOKEN_BYTES
    data = token_bytes(token_ids)
    blocks = len(data) // width
    if blocks <= _CUT_AT_ONCE:
        return _cutter(width, blocks)(data[: blocks * width])
    piece = _CUT_AT_ONCE * width
    pieces = [data[at : at + piece] for at in range(0, blocks * width, piece)]
    cuts = (
        _cutter(width, len(data) // width)(data[: len(data) // width * width]) for data in pieces
    )
    return itertools.chain.from_iterable(cuts)


@lru_cache(maxsize=2 * _CUT_AT_ONCE)
def _cutter(width: int, blocks: int) -> Callable[[bytes], tuple[bytes, ...]]:
    """Cuts so many blocks at once: a flat tuple costs less than a step for each."""
    return struct.Struct(f"{width}s" * blocks).unpack


def token_bytes(token_ids: "Sequence[int] | array[int]") -> bytes:
    """Token ids as a hash covers them. Raises OverflowError if one is no uint32."""
    packed = token_ids if type(token_ids) is array else array("I", token_ids)
    if _IS_AS_IT_STANDS and packed.typecode == "I":
        return packed.tobytes()
    return b"".join([token.to_bytes(TOKEN_BYTES, "little") for token in packed])
