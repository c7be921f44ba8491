"""Block hashes: equal only for an equal whole prefix in the same namespace."""

from array import array
from itertools import combinations, product

import pytest

from indexer import block_hashes, namespace
from indexer.hashing import HASH_BYTES, chain, root


def test_only_full_blocks_have_a_hash() -> None:
    for tokens, blocks in [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)]:
        assert len(block_hashes(list(range(tokens)), 16)) == blocks * HASH_BYTES


def test_a_longer_prompt_starts_with_the_hashes_of_its_prefix() -> None:
    ids = list(range(100))
    assert block_hashes(ids, 16).startswith(block_hashes(ids[:50], 16))


def test_a_block_behind_another_prefix_has_another_hash() -> None:
    first = block_hashes([1, 2, 3, 4], 2)
    second = block_hashes([9, 2, 3, 4], 2)
    assert first[HASH_BYTES:] != second[HASH_BYTES:]


def test_equal_tokens_in_another_block_size_have_other_hashes() -> None:
    ids = [7] * 64
    found = [block_hashes(ids, size) for size in (1, 2, 16, 32, 64)]
    blocks = [hashes[at : at + 8] for hashes in found for at in range(0, len(hashes), 8)]
    assert len(set(blocks)) == len(blocks)


def test_lists_arrays_and_ranges_hash_alike() -> None:
    expected = block_hashes(list(range(40)), 8)
    assert block_hashes(array("I", range(40)), 8) == expected
    assert block_hashes(array("q", range(40)), 8) == expected
    assert block_hashes(range(40), 8) == expected


def test_a_chain_goes_on_from_any_block() -> None:
    """Events name only the block before theirs."""
    ids = list(range(64))
    whole = block_hashes(ids, 16)
    assert chain(whole[8:16], ids[32:], 16) == whole[16:]
    assert chain(root(b""), ids, 16) == whole


def test_what_stands_on_one_block_changes_it_and_all_behind_it() -> None:
    """I7: an image in the middle of a prompt."""
    ids = list(range(64))
    plain = block_hashes(ids, 16)
    image = chain(root(b""), ids, 16, [b"", b"image", b"", b""])
    assert image[:8] == plain[:8]
    assert all(image[at : at + 8] != plain[at : at + 8] for at in (8, 16, 24))
    assert image != chain(root(b""), ids, 16, [b"", b"other", b"", b""])


def test_each_namespace_has_its_own_hashes() -> None:
    """I7: LoRA, salt and model with equal tokens."""
    spaces = [b"", *(namespace(**{key: "a"}) for key in ("model", "lora", "salt"))]
    found = [block_hashes([1, 2], 1, space) for space in spaces]
    assert len(set(found)) == len(spaces)


def test_nothing_special_is_the_empty_namespace() -> None:
    assert namespace() == b""
    assert namespace(lora="", salt=None) != b""


def test_no_two_combinations_are_one_namespace() -> None:
    """A client that chooses its salt must not get at another tenant's blocks."""
    texts = [None, "", "a", "ab", "b", "s\0\0\0\1a", "\ud800", "é"]
    combined = list(product(texts, repeat=3))
    spaces = [namespace(model=m, lora=lo, salt=s) for m, lo, s in combined]
    assert all(one != other for one, other in combinations(spaces, 2))


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        block_hashes([1, 2], block_size)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_uint32_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes([token], 1)
