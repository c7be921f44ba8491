"""The tree of active blocks: what is shared, what is let go."""

import pytest

from events import WorkerRank
from kvrouter.active_blocks import ActiveBlocks

A = WorkerRank("a")
B = WorkerRank("b")


def chain(*numbers: int) -> bytes:
    """Block hashes by number; equal leading numbers stand for an equal prefix."""
    return b"".join(number.to_bytes(8, "big") for number in numbers)


@pytest.fixture
def tree() -> ActiveBlocks:
    return ActiveBlocks()


def test_blocks_that_two_requests_of_a_rank_share_count_once(tree: ActiveBlocks) -> None:
    first = tree.hold(A, chain(1, 2, 3))
    second = tree.hold(A, chain(1, 2, 4, 5))
    assert (first.added_blocks, second.added_blocks) == (3, 2)
    assert tree.recount() == {A: 5}


def test_blocks_stay_active_until_the_last_holder_lets_go(tree: ActiveBlocks) -> None:
    first = tree.hold(A, chain(1, 2, 3))
    second = tree.hold(A, chain(1, 2))
    assert tree.release(first) == 1
    assert tree.leading(chain(1, 2, 3)) == {A: 2}
    assert tree.release(second) == 2
    assert tree.recount() == {}


def test_ranks_share_runs_but_not_counts(tree: ActiveBlocks) -> None:
    first = tree.hold(A, chain(1, 2, 3))
    tree.hold(B, chain(1, 2))
    assert tree.leading(chain(1, 2, 3)) == {A: 3, B: 2}
    tree.release(first)
    assert tree.leading(chain(1, 2, 3)) == {B: 2}


def test_a_match_ends_within_a_run(tree: ActiveBlocks) -> None:
    tree.hold(A, chain(1, 2, 3, 4))
    assert tree.leading(chain(1, 2, 9)) == {A: 2}
    assert tree.leading(chain(1, 2)) == {A: 2}
    assert tree.leading(chain(9)) == {}
    assert tree.leading(b"") == {}


def test_a_split_run_keeps_its_holders(tree: ActiveBlocks) -> None:
    long = tree.hold(A, chain(1, 2, 3, 4))
    short = tree.hold(B, chain(1, 2))
    tree.check()
    assert tree.leading(chain(1, 2, 3, 4)) == {A: 4, B: 2}
    assert tree.release(long) == 4
    assert tree.release(short) == 2
    tree.check()
    assert tree.recount() == {}


def test_a_fork_in_a_run_keeps_both_branches(tree: ActiveBlocks) -> None:
    first = tree.hold(A, chain(1, 2, 3, 4))
    assert tree.hold(A, chain(1, 2, 8, 9)).added_blocks == 2
    tree.check()
    assert tree.leading(chain(1, 2, 3, 4)) == {A: 4}
    assert tree.release(first) == 2
