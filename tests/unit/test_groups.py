"""The rule for models with several cache groups."""

import random
from collections.abc import Collection

import pytest

from indexer.groups import Window, usable_blocks, window_blocks


def held(blocks: int | None, positions: Collection[int]) -> Window:
    def first_missing(start: int, end: int) -> int | None:
        return next((at for at in range(start, end) if at not in positions), None)

    return Window(blocks, first_missing)


def by_trying_all(leading: int, windows: list[tuple[int | None, set[int]]]) -> int:
    def usable(length: int) -> bool:
        return all(
            set(range(0 if blocks is None else max(0, length - blocks), length)) <= positions
            for blocks, positions in windows
        )

    return max(length for length in range(leading + 1) if usable(length))


@pytest.mark.parametrize(
    ("window_tokens", "block_size", "blocks"),
    [(128, 32, 4), (129, 32, 4), (130, 32, 5), (1, 32, 0), (2, 32, 1), (33, 32, 1), (34, 32, 2)],
)
def test_a_window_reaches_back_to_the_tokens_before_the_next_one(
    window_tokens: int, block_size: int, blocks: int
) -> None:
    assert window_blocks(window_tokens, block_size) == blocks


def test_without_other_groups_all_leading_blocks_are_usable() -> None:
    assert usable_blocks(7, []) == 7


def test_a_window_held_before_the_end_leaves_the_whole_prefix_usable() -> None:
    """E15: the same prompt again; the engine kept only the tail of its windows."""
    assert usable_blocks(15, [held(4, {11, 12, 13, 14})]) == 15


def test_a_prefix_that_ends_before_the_kept_window_is_of_no_use() -> None:
    """E15: 300 of 500 tokens are shared, but the window before the 300th is gone."""
    assert usable_blocks(9, [held(4, {11, 12, 13, 14})]) == 0


def test_a_prefix_shorter_than_the_window_needs_only_itself() -> None:
    assert usable_blocks(2, [held(4, {0, 1})]) == 2
    assert usable_blocks(9, [held(4, {0, 1})]) == 2


def test_each_group_has_to_hold_its_own_window() -> None:
    windows = [held(2, {2, 3, 6, 7}), held(3, {1, 2, 3, 4, 5, 6})]
    assert usable_blocks(8, windows) == 4


def test_a_second_full_group_needs_every_block() -> None:
    assert usable_blocks(8, [held(None, {0, 1, 2, 4, 5, 6, 7})]) == 3


def test_the_rule_is_the_largest_length_that_trying_all_finds() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        leading = rng.randrange(12)
        windows = [
            (
                rng.choice([None, 0, 1, 2, 3, 5]),
                {at for at in range(12) if rng.random() < 0.75},
            )
            for _ in range(rng.randrange(4))
        ]
        found = usable_blocks(leading, [held(*window) for window in windows])
        assert found == by_trying_all(leading, windows)
