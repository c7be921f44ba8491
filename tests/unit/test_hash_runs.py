"""Block hashes out of runs that were hashed before are those of `block_hashes`."""

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import block_hashes
from kvrouter.tokenize.hash_runs import RUNS, HashRuns

NAMESPACES = st.sampled_from([b"", b"lora", b"salt"])


def ids_of(seed: int, count: int) -> "array[int]":
    rng = random.Random(seed)
    return array("I", [rng.getrandbits(17) for _ in range(count)])


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3000),
            st.integers(0, 3000),
            st.sampled_from([1, 4, 16]),
        ),
        max_size=6,
    ),
    NAMESPACES,
)
def test_prompts_that_share_beginnings_are_hashed_as_each_by_itself(
    prompts: list[tuple[int, int, int, int]], namespace: bytes
) -> None:
    runs = HashRuns(1_000_000)
    for seed, shared, own, block_size in prompts:
        ids = ids_of(seed, shared) + ids_of(shared + 9, own)
        expected = block_hashes(ids, block_size, namespace)
        assert runs.block_hashes(ids, block_size, namespace) == expected
        assert runs.block_hashes(ids, block_size, namespace) == expected


@pytest.mark.parametrize(
    "tokens", [0, 1, *(n + more for n in RUNS for more in (-1, 0, 1)), sum(RUNS)]
)
def test_short_prompts_and_whole_runs(tokens: int) -> None:
    ids = ids_of(1, tokens)
    assert HashRuns(10_000).block_hashes(ids, 1) == block_hashes(ids, 1)


def test_memory_stays_within_its_bound() -> None:
    """Unique prompts for days."""
    runs = HashRuns(10_000)
    for seed in range(40):
        runs.block_hashes(ids_of(seed, RUNS[-1] * 16 * 3), 16)
    assert runs.size_bytes <= 10_000
    assert runs.size_bytes > 5_000


def test_without_memory_prompts_are_hashed_each_time() -> None:
    runs = HashRuns(0)
    ids = ids_of(3, 4 * RUNS[-1])
    assert runs.block_hashes(ids, 1) == block_hashes(ids, 1)
    assert runs.size_bytes == 0
