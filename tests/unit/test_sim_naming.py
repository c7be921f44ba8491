"""Names of blocks: equal exactly for equal prefixes in one namespace of one engine."""

from array import array

from kvrouter.sim.naming import BlockNamer, extra_keys


def names(
    tokens: list[int], seed: int = 0, lora: str | None = None, salt: str | None = None
) -> list[int]:
    namer = BlockNamer(seed, 4, lora, salt)
    namer.extend(array("I", tokens))
    return namer.names


def test_only_full_blocks_have_names() -> None:
    assert [len(names(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_name_covers_the_whole_prefix() -> None:
    first, second = names([1, 2, 3, 4, 9, 9, 9, 9]), names([1, 2, 3, 5, 9, 9, 9, 9])
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_names_are_unsigned_64_bit_stable_and_differ_between_seeds() -> None:
    """Engines of a fleet have seeds of their own unless PYTHONHASHSEED is set."""
    assert names([1, 2, 3, 4]) == names([1, 2, 3, 4]) == [0x141FC78B01C8DCBD]
    assert names([1, 2, 3, 4]) != names([1, 2, 3, 4], seed=1)


def test_lora_and_salt_make_other_names() -> None:
    tokens = [1, 2, 3, 4]
    variants = [names(tokens), names(tokens, lora="a"), names(tokens, salt="a")]
    variants += [names(tokens, lora="b"), names(tokens, lora="a", salt="a")]
    assert len({tuple(variant) for variant in variants}) == 5


def test_lone_surrogates_in_a_salt_are_a_salt_like_any_other() -> None:
    assert names([1, 2, 3, 4], salt="\ud800") != names([1, 2, 3, 4], salt="?")


def test_growing_tokens_keep_their_names() -> None:
    namer = BlockNamer(0, 4, None, None)
    tokens = array("I", [1, 2, 3])
    namer.extend(tokens)
    tokens.extend([4, 5, 6, 7, 8])
    namer.extend(tokens)
    assert namer.names == names([1, 2, 3, 4, 5, 6, 7, 8])


def test_extra_keys_have_the_lora_on_each_block_and_the_salt_on_the_first_only() -> None:
    assert extra_keys(0, 2, "a", "s") == [["a", "s"], ["a"]]
    assert extra_keys(1, 2, "a", "s") == [["a"], ["a"]]
    assert extra_keys(0, 2, None, "s") == [["s"], None]
    assert extra_keys(0, 2, None, None) == [None, None]
