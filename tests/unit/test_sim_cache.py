"""The paged prefix cache: who is evicted, in which order, and what can be hit."""

import pytest

from kvrouter.sim.cache import PrefixCache


def filled(cache: PrefixCache, names: list[int]) -> list[int]:
    blocks, _ = cache.take(len(names))
    for block, name in zip(blocks, names, strict=True):
        cache.name(block, name)
    return blocks


def test_one_block_is_never_used() -> None:
    assert PrefixCache(64).free == 63


def test_named_blocks_are_evicted_by_the_time_they_were_freed_and_tail_first() -> None:
    cache = PrefixCache(7)
    old = filled(cache, [1, 2, 3])
    new = filled(cache, [11, 12, 13])
    cache.release(old)
    cache.release(new)
    assert cache.take(4)[1] == [3, 2, 1, 13]
    cache.check()


def test_unnamed_blocks_are_taken_before_any_named_one() -> None:
    """A partial tail block is worth nothing to anybody."""
    cache = PrefixCache(4)
    named = filled(cache, [1, 2])
    partial, _ = cache.take(1)
    cache.release(named)
    cache.release(partial)
    assert cache.take(1)[1] == []
    assert cache.take(1)[1] == [2]


def test_a_hit_keeps_blocks_from_eviction_and_makes_them_young() -> None:
    cache = PrefixCache(5)
    first, second = filled(cache, [1, 2]), filled(cache, [11, 12])
    cache.release(first)
    cache.release(second)
    hit = cache.leading([1, 2, 3])
    assert hit == first
    assert cache.idle(hit) == 2
    cache.hold(hit)
    assert cache.idle(hit) == 0
    cache.release(hit)
    assert cache.take(3)[1] == [12, 11, 2]


def test_a_block_behind_a_missing_one_is_no_hit() -> None:
    cache = PrefixCache(5)
    filled(cache, [1, 3])
    assert len(cache.leading([1, 2, 3])) == 1


def test_one_evicted_copy_leaves_the_other() -> None:
    """A recomputed prompt end is stored twice under one name."""
    cache = PrefixCache(3)
    first, second = filled(cache, [1]), filled(cache, [1])
    cache.release(first)
    assert cache.take(1)[1] == [1]
    assert cache.leading([1]) == second
    cache.check()


def test_a_shared_block_stays_until_its_last_holder_lets_go() -> None:
    cache = PrefixCache(3)
    blocks = filled(cache, [1])
    cache.hold(blocks)
    cache.release(blocks)
    assert cache.in_use == 1
    cache.release(blocks)
    assert cache.in_use == 0


def test_a_clear_is_refused_while_blocks_are_in_use() -> None:
    cache = PrefixCache(3)
    blocks = filled(cache, [1])
    assert not cache.clear()
    assert cache.leading([1]) == blocks
    cache.release(blocks)
    assert cache.clear()
    assert cache.leading([1]) == []
    cache.check()


def test_check_finds_a_block_that_is_free_and_in_use() -> None:
    cache = PrefixCache(3)
    cache._references[1] = 1
    with pytest.raises(AssertionError, match="free line"):
        cache.check()


def test_check_finds_a_name_without_a_copy() -> None:
    cache = PrefixCache(3)
    cache._names[1] = 5
    with pytest.raises(AssertionError, match="copies"):
        cache.check()
