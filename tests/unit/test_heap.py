"""What is frozen, and when."""

import gc
from collections.abc import Iterator

import pytest

from kvrouter.heap import GROWTH_BLOCKS, Heap


@pytest.fixture
def heap() -> Iterator[Heap]:
    thresholds = gc.get_threshold()
    yield Heap()
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def freezes(heap: Heap, blocks: int) -> bool:
    before = gc.get_freeze_count()
    kept = [[] for _ in range(10)]  # type: ignore[var-annotated]  # anything that is new
    heap.tick(blocks)
    return bool(kept) and gc.get_freeze_count() > before


def test_what_a_router_is_made_of_is_frozen_at_its_start(heap: Heap) -> None:
    gc.unfreeze()
    heap.start()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] > 10_000


def test_an_index_that_has_grown_much_is_frozen(heap: Heap) -> None:
    heap.start()
    assert not freezes(heap, GROWTH_BLOCKS - 1)
    assert freezes(heap, GROWTH_BLOCKS)
    assert not freezes(heap, GROWTH_BLOCKS)
    assert freezes(heap, 10 * GROWTH_BLOCKS)
    assert freezes(heap, 11 * GROWTH_BLOCKS)


def test_an_index_that_shrank_is_frozen_when_it_grows_again(heap: Heap) -> None:
    heap.start()
    heap.tick(10 * GROWTH_BLOCKS)
    assert not freezes(heap, 0)
    assert freezes(heap, GROWTH_BLOCKS)
