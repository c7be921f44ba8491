"""The index: what each kind of event does to what a match says."""

import gc
import random
import tracemalloc
from typing import Any

import pytest

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    EventBatch,
    GroupKind,
    Tier,
    WorkerRank,
)
from indexer import (
    Applied,
    IgnoreCause,
    InvariantError,
    Overlap,
    RadixIndex,
    ResyncCause,
    block_hashes,
    namespace,
)

W1 = WorkerRank("w1", 0)
W2 = WorkerRank("w2", 0)
SIZE = 4
IDS = list(range(100, 140))
NAMES: list[EngineHash] = list(range(1, 11))


class Bench:
    """An index and short ways to speak to it; checks all invariants after each batch."""

    def __init__(self) -> None:
        self.index = RadixIndex()

    def apply(self, rank: WorkerRank, *events: Event) -> Applied:
        applied = self.index.apply(rank, EventBatch(ts_s=0.0, events=list(events)))
        self.index.check()
        return applied

    def overlap(self, rank: WorkerRank, ids: list[int] = IDS, **space: str) -> Overlap:
        hashes = block_hashes(ids, SIZE, namespace(**space))
        return self.index.match(hashes).get(rank, Overlap(0))

    def gpu(self, rank: WorkerRank, ids: list[int] = IDS, **space: str) -> int:
        return self.overlap(rank, ids, **space).gpu


@pytest.fixture
def bench() -> Bench:
    return Bench()


def stored(names: list[EngineHash], ids: list[int] = IDS, **fields: Any) -> BlocksStored:
    """The first blocks of `ids` under these names (or the ones that `ids` begins with)."""
    defaults: dict[str, Any] = {"block_size": SIZE, "token_ids": ids[: len(names) * SIZE]}
    return BlocksStored(block_hashes=names, **defaults | fields)


def removed(*names: EngineHash, **fields: Any) -> BlocksRemoved:
    return BlocksRemoved(block_hashes=list(names), **fields)


# One rank


def test_stored_blocks_overlap_as_far_as_the_prompt_goes_with_them(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:5]))
    assert bench.gpu(W1) == 5
    assert bench.gpu(W1, IDS[:12]) == 3
    assert bench.gpu(W1, [*IDS[:8], 0, 0, 0, 0, *IDS[12:]]) == 2
    assert bench.gpu(W1, [0, *IDS]) == 0
    assert bench.index.match(b"") == {}


def test_a_match_never_exceeds_the_prompt(bench: Bench) -> None:
    """I11: a prompt of exactly n blocks that is fully cached is worth n-1."""
    bench.apply(W1, stored(NAMES))
    hashes = block_hashes(IDS, SIZE)
    for blocks in range(len(NAMES)):
        found = bench.index.match(hashes[: blocks * 8])
        assert found == ({W1: Overlap(blocks)} if blocks else {})


def test_blocks_follow_their_parent_wherever_it_stands(bench: Bench) -> None:
    """Chunked prefill and decoding: each event goes on where an earlier one ended."""
    bench.apply(W1, stored(NAMES[:3]))
    bench.apply(W1, stored(NAMES[3:5], IDS[12:], parent=NAMES[2]))
    bench.apply(W1, stored([77], [1, 2, 3, 4], parent=NAMES[0]))
    assert bench.gpu(W1) == 5
    assert bench.gpu(W1, [*IDS[:4], 1, 2, 3, 4]) == 2


def test_a_removed_middle_block_hides_what_is_behind_it_until_it_is_back(bench: Bench) -> None:
    """I2: remove block 2 of 3, then store it again."""
    bench.apply(W1, stored(NAMES[:3]))
    bench.apply(W1, removed(2))
    assert bench.gpu(W1) == 1
    bench.apply(W1, stored([2], IDS[4:8], parent=1))
    assert bench.gpu(W1) == 3


def test_a_middle_block_is_back_under_another_name_too(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:3]), removed(2))
    bench.apply(W1, stored([22], IDS[4:8], parent=1))
    assert bench.gpu(W1) == 3


def test_a_block_stored_twice_is_gone_after_its_second_removal(bench: Bench) -> None:
    """I3: an exact repeat recomputes its last block, a second physical copy of it."""
    bench.apply(W1, stored(NAMES[:3]))
    bench.apply(W1, stored([3], IDS[8:12], parent=2))
    bench.apply(W1, removed(3))
    assert bench.gpu(W1) == 3
    bench.apply(W1, removed(3))
    assert bench.gpu(W1) == 2
    assert bench.apply(W1, removed(3)).unknown_removed == 1


def test_blocks_behind_a_hole_do_not_count(bench: Bench) -> None:
    """I4: blocks 0, 1 and 3."""
    bench.apply(W1, stored(NAMES[:4]), removed(3))
    assert bench.gpu(W1) == 2


def test_an_unknown_block_in_a_removal_does_not_save_the_others(bench: Bench) -> None:
    """I5: remove [known, unknown, known]."""
    bench.apply(W1, stored(NAMES[:4]))
    applied = bench.apply(W1, removed(3, 999, 4))
    assert (applied.removed_blocks, applied.unknown_removed) == (2, 1)
    assert bench.gpu(W1) == 2


def test_blocks_with_an_unknown_parent_are_no_root(bench: Bench) -> None:
    """I6: the engine was running before we subscribed, and has no replay."""
    applied = bench.apply(W1, stored(NAMES[:3], parent=999), stored([4], IDS[12:16], parent=3))
    assert (applied.orphans, applied.stored_blocks, applied.stored) == (4, 0, b"")
    assert bench.gpu(W1) == 0
    assert bench.index.stats().nodes == 0


def test_repeated_orphans_ask_for_a_resync_ever_more_rarely(bench: Bench) -> None:
    orphan = stored(NAMES[:1], parent=999)
    asked = [at for at in range(1, 60) if bench.apply(W1, orphan).resync is ResyncCause.ORPHANS]
    assert asked == [8, 24, 56]


def test_the_order_of_events_in_a_batch_counts(bench: Bench) -> None:
    """I10: the same block removed and stored, stored and removed, in one batch."""
    bench.apply(W1, stored(NAMES[:2]))
    bench.apply(W1, removed(2), stored([2], IDS[4:8], parent=1))
    assert bench.gpu(W1) == 2
    bench.apply(W1, stored([3], IDS[8:12], parent=2), removed(3))
    assert bench.gpu(W1) == 2


def test_a_clear_resets_the_counts(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:2]), stored(NAMES[:2]))
    assert bench.apply(W1, BlocksCleared()).cleared == 1
    assert bench.gpu(W1) == 0
    bench.apply(W1, stored(NAMES[:2]), removed(2))
    assert bench.gpu(W1) == 1


def test_a_clear_within_a_batch_spares_what_comes_behind_it(bench: Bench) -> None:
    """E14: an engine publishes a clear with its next step, before that step's blocks."""
    bench.apply(W1, stored(NAMES[:5]))
    bench.apply(W1, BlocksCleared(), stored(NAMES[:2]))
    assert bench.gpu(W1) == 2


def test_a_removal_before_a_clear_does_not_touch_what_comes_behind_it(bench: Bench) -> None:
    """I10: evicted, cleared and stored again within one batch."""
    bench.apply(W1, stored(NAMES[:3]))
    applied = bench.apply(W1, removed(3), BlocksCleared(), stored(NAMES[:3]))
    assert (applied.removed_blocks, applied.unknown_removed) == (1, 0)
    assert bench.gpu(W1) == 3


@pytest.mark.parametrize("name", [0, 2**63, 2**64 - 1, b"\x01" * 32, b""])
def test_any_name_is_met_again_by_its_removal(bench: Bench, name: EngineHash) -> None:
    bench.apply(W1, stored([name, 5]))
    assert bench.gpu(W1) == 2
    assert bench.apply(W1, removed(name)).removed_blocks == 1
    assert bench.gpu(W1) == 0


def test_one_of_two_names_of_a_block_can_go(bench: Bench) -> None:
    """Salted blocks before vLLM 0.17: equal tokens, and nothing on the wire tells them apart."""
    bench.apply(W1, stored([1, 2, 3]), stored([11, 12, 13]))
    assert bench.gpu(W1) == 3
    bench.apply(W1, removed(2), removed(3))
    assert bench.gpu(W1) == 3
    bench.apply(W1, stored([4], IDS[12:16], parent=13))
    assert bench.gpu(W1) == 4
    bench.apply(W1, removed(12))
    assert bench.gpu(W1) == 1


def test_a_name_means_the_place_where_it_was_stored_last(bench: Bench) -> None:
    """Two blocks with one hash: nothing may break, and no more is claimed than may be there."""
    bench.apply(W1, stored([1, 2, 3]))
    bench.apply(W1, stored([2], [9, 9, 9, 9], parent=3))
    assert bench.gpu(W1) == 1
    assert bench.apply(W1, removed(2, 2)).removed_blocks == 2
    assert bench.index.blocks(W1) == 2


def test_a_name_at_two_places_of_a_rank_is_gone_from_both_after_its_removals(bench: Bench) -> None:
    """One hash at two places: the second one has both copies, and what is behind it goes on."""
    bench.apply(W1, stored([1, 2, 3]))
    bench.apply(W1, stored([3], [9] * SIZE, parent=1), stored([4], [8] * SIZE, parent=3))
    other = [*IDS[:4], *[9] * SIZE, *[8] * SIZE]
    assert (bench.gpu(W1), bench.gpu(W1, other)) == (2, 3)
    bench.apply(W1, removed(3))
    assert (bench.gpu(W1), bench.gpu(W1, other)) == (2, 3)
    bench.apply(W1, removed(3))
    assert (bench.gpu(W1), bench.gpu(W1, other)) == (2, 1)
    bench.apply(W1, stored([3], IDS[8:12], parent=2))
    assert (bench.gpu(W1), bench.gpu(W1, other)) == (3, 1)


def test_a_second_name_of_a_block_may_become_the_first_of_another(bench: Bench) -> None:
    bench.apply(W1, stored([1]), stored([2]))
    other = [7] * SIZE
    bench.apply(W1, stored([2], other))
    assert (bench.gpu(W1), bench.gpu(W1, other)) == (1, 1)
    bench.apply(W1, removed(1))
    assert (bench.gpu(W1), bench.gpu(W1, other)) == (0, 1)


def test_a_name_that_is_gone_may_come_back_together_with_one_that_moves(bench: Bench) -> None:
    """Its bytes still stand in the run; it is as new there as any other."""
    bench.apply(W1, stored([1, 2, 3]), removed(2))
    bench.apply(W1, stored([2, 1], IDS[12:20], parent=3))
    assert (bench.gpu(W1), bench.index.blocks(W1)) == (0, 3)
    bench.apply(W1, stored([4, 5], IDS[:8]))
    assert (bench.gpu(W1), bench.index.blocks(W1)) == (5, 5)


def test_one_name_for_all_blocks_of_an_event_breaks_nothing(bench: Bench) -> None:
    bench.apply(W1, stored([7] * 5))
    assert bench.index.blocks(W1) == 1
    bench.apply(W1, removed(7, 7, 7, 7, 7))
    assert bench.index.stats().nodes == 0


def test_more_copies_than_the_engine_has_room_for_ask_for_a_resync(bench: Bench) -> None:
    """A client's report mode "full" makes an engine announce hits as if they were new copies."""
    bench.index.set_capacity(W1, 6)
    assert bench.apply(W1, stored(NAMES[:5])).resync is None
    assert bench.apply(W1, stored([1])).resync is None
    assert bench.apply(W1, stored([1])).resync is ResyncCause.OVER_CAPACITY
    bench.index.clear(W1)
    assert bench.apply(W1, stored(NAMES[:6])).resync is None
    bench.index.set_capacity(W1, None)
    assert bench.apply(W1, stored(NAMES[:6])).resync is None


def test_applied_names_our_hashes_of_what_became_resident(bench: Bench) -> None:
    hashes = block_hashes(IDS, SIZE)
    applied = bench.apply(W1, stored(NAMES[:3]), stored([4], IDS[12:16], parent=3))
    assert applied.stored == hashes[: 4 * 8]
    assert bench.apply(W1, removed(4)).stored == b""


# Several ranks


def test_engines_with_different_hash_seeds_meet(bench: Bench) -> None:
    """I1: two engines, two seeds, one prompt."""
    bench.apply(W1, stored([1, 2, 3]))
    bench.apply(W2, stored([501, 502]))
    assert bench.index.match(block_hashes(IDS, SIZE)) == {W1: Overlap(3), W2: Overlap(2)}
    bench.apply(W2, removed(1))
    assert bench.gpu(W1) == 3


def test_a_clear_of_one_rank_leaves_the_other(bench: Bench) -> None:
    """E13: a data-parallel rank resets its cache."""
    other = WorkerRank("w1", 1)
    bench.apply(W1, stored(NAMES[:3]))
    bench.apply(other, stored(NAMES[:3]))
    bench.apply(other, BlocksCleared())
    assert (bench.gpu(W1), bench.gpu(other)) == (3, 0)


def test_a_removed_worker_takes_all_its_ranks_and_returns_empty(bench: Bench) -> None:
    """I12: removed, then back under the same name."""
    for rank in (W1, WorkerRank("w1", 1), W2):
        bench.apply(rank, stored(NAMES[:3]))
    bench.index.remove_worker("w1")
    bench.index.check()
    assert bench.index.ranks() == [W2]
    assert bench.index.match(block_hashes(IDS, SIZE)) == {W2: Overlap(3)}
    applied = bench.apply(W1, stored([4], IDS[12:16], parent=3))
    assert applied.orphans == 1
    assert bench.gpu(W1) == 0


def test_a_new_worker_in_the_place_of_a_removed_one_is_not_mistaken_for_it(bench: Bench) -> None:
    """Ranks of masks are remembered between matches."""
    bench.apply(W1, stored(NAMES[:3]))
    assert bench.gpu(W1) == 3
    bench.index.remove_worker("w1")
    bench.apply(W2, stored(NAMES[:3]))
    assert bench.index.match(block_hashes(IDS, SIZE)) == {W2: Overlap(3)}


def test_every_rank_is_found_at_its_own_depth(bench: Bench) -> None:
    ranks = [WorkerRank(f"w{number}") for number in range(1, 11)]
    for blocks, rank in enumerate(ranks, 1):
        bench.apply(rank, stored(NAMES[:blocks]))
    assert bench.index.match(block_hashes(IDS, SIZE)) == {
        rank: Overlap(blocks) for blocks, rank in enumerate(ranks, 1)
    }


def test_a_shorter_prompt_finds_what_the_longer_one_finds_of_it() -> None:
    """A policy may look at the first blocks only: what it sees is what a full look would say."""
    rng = random.Random(3)
    index = RadixIndex(label_blocks=16)
    ranks = [WorkerRank(f"w{number}") for number in range(20)]
    for number, rank in enumerate(ranks):
        own = [rng.getrandbits(64) for _ in range(rng.randint(1, 40))]
        ids = [*range(rng.randint(9, 40) * SIZE), *[number % 7] * 160][: len(own) * SIZE]
        gone: list[Event] = [removed(rng.choice(own))] if number % 3 == 0 else []
        index.apply(rank, EventBatch(ts_s=0.0, events=[stored(list(own), ids), *gone]))
    index.check()
    hashes = block_hashes(range(40 * SIZE), SIZE)
    whole = index.match(hashes)
    assert len(set(whole.values())) > 5
    for blocks in range(41):
        least = {rank: Overlap(min(blocks, found.gpu)) for rank, found in whole.items()}
        assert index.match(hashes[: blocks * 8]) == (least if blocks else {})


def test_a_match_needs_no_memory_for_the_length_of_the_prompt() -> None:
    """Prompts of 128k tokens are asked for like short ones."""
    index = RadixIndex()
    hashes = block_hashes(range(8192), 1)
    for rank in (W1, W2):
        names: list[EngineHash] = list(range(1, 8193))
        event = BlocksStored(block_hashes=names, token_ids=list(range(8192)), block_size=1)
        index.apply(rank, EventBatch(0.0, [event]))
    peaks = []
    for blocks in (256, 8192):
        prompt = hashes[: blocks * 8]
        index.match(prompt)  # what is remembered, and made once
        tracemalloc.start()
        index.match(prompt)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 256


# Namespaces


def test_equal_tokens_of_other_adapters_do_not_match(bench: Bench) -> None:
    """I7: LoRA A, LoRA B and the base model; the name stands on each block."""
    keys: list[Any] = [["A"], ["A"], ["A"]]
    bench.apply(W1, stored(NAMES[:3], lora_name="A", extra_keys=keys))
    bench.apply(W1, stored([4], IDS[12:16], parent=3, lora_name="A", extra_keys=[["A"]]))
    assert bench.gpu(W1, lora="A") == 4
    assert bench.gpu(W1, lora="B") == bench.gpu(W1) == bench.gpu(W1, salt="A") == 0


def test_equal_tokens_of_other_salts_do_not_match(bench: Bench) -> None:
    """I7: the salt stands on the first block only, and reaches the others by their parents."""
    bench.apply(W1, stored(NAMES[:3], extra_keys=[["S"], None, None]))
    bench.apply(W1, stored([4], IDS[12:16], parent=3, extra_keys=[None]))
    assert bench.gpu(W1, salt="S") == 4
    assert bench.gpu(W1, salt="T") == bench.gpu(W1) == bench.gpu(W1, lora="S") == 0


def test_a_salt_on_every_block_of_an_event_is_the_same_salt(bench: Bench) -> None:
    """I7: extra keys on each block instead of the first only."""
    bench.apply(W1, stored(NAMES[:3], extra_keys=[["S"], ["S"], ["S"]]))
    assert bench.gpu(W1, salt="S") == 3
    assert bench.gpu(W1) == 0


def test_salt_and_adapter_go_together(bench: Bench) -> None:
    keys: list[Any] = [["A", "S"], ["A"], ["A"]]
    bench.apply(W1, stored(NAMES[:3], lora_name="A", extra_keys=keys))
    assert bench.gpu(W1, lora="A", salt="S") == 3
    assert bench.gpu(W1, lora="A") == bench.gpu(W1, salt="S") == 0


@pytest.mark.parametrize("key", [["image-1", 3], "image-1", b"\x00\x01"])
def test_a_prompt_matches_up_to_its_first_image_only(bench: Bench, key: object) -> None:
    """I7: an image (or prompt embeddings) on the second block; a plain prompt has the same ids."""
    keys = [None, [key], None]
    bench.apply(W1, stored(NAMES[:3], extra_keys=keys))
    bench.apply(W1, stored([4], IDS[12:16], parent=3))
    assert bench.gpu(W1) == 1


def test_an_image_on_the_first_block_hides_all(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:3], extra_keys=[[["image-1", 0], "S"], None, None]))
    assert bench.gpu(W1) == bench.gpu(W1, salt="S") == 0


def test_extra_keys_may_be_fewer_or_more_than_blocks(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:3], extra_keys=[None, [["image", 0]]]))
    bench.apply(W2, stored(NAMES[:1], extra_keys=[["S"], ["S"]]))
    assert (bench.gpu(W1), bench.gpu(W2), bench.gpu(W2, salt="S")) == (1, 0, 1)


def test_nothing_is_left_of_a_namespace_whose_blocks_are_gone(bench: Bench) -> None:
    """Per-tenant salts come and go for months."""
    for tenant in range(50):
        keys: list[Any] = [[f"tenant {tenant}"], None]
        bench.apply(W1, stored([1, 2], extra_keys=keys), removed(2), removed(1))
    assert bench.index.stats().nodes == 0
    assert not bench.index._tree.root.children


# Block size


def test_the_block_size_comes_from_the_events(bench: Bench) -> None:
    """E16: 768 on the wire, whatever was configured."""
    assert bench.index.block_size(W1) is None
    ids = list(range(768 * 2))
    applied = bench.apply(W1, stored([1, 2], ids, block_size=768, token_ids=ids))
    assert (applied.adopted_block_size, bench.index.block_size(W1)) == (768, 768)
    assert bench.index.match(block_hashes(ids, 768)) == {W1: Overlap(2)}
    assert bench.apply(W1, removed(2)).adopted_block_size is None


def test_blocks_of_an_old_block_size_go_when_a_new_one_comes(bench: Bench) -> None:
    """E16: a worker comes back with another setting, unnoticed."""
    bench.apply(W1, stored(NAMES[:3]))
    applied = bench.apply(W1, stored([50], IDS, block_size=8, token_ids=IDS[:8]))
    assert applied.adopted_block_size == 8
    assert bench.gpu(W1) == 0
    assert bench.index.match(block_hashes(IDS, 8)) == {W1: Overlap(1)}
    assert bench.index.blocks(W1) == 1


def test_groups_that_came_with_the_new_block_size_stay(bench: Bench) -> None:
    """A hybrid model restarts with other blocks; its sliding groups come before the full one."""
    bench.apply(W1, sliding([2, 3]), stored(NAMES[:3], group=1))
    small = stored([50, 51], IDS, block_size=2, token_ids=IDS[:4], group=1)
    bench.apply(W1, sliding([50, 51], group=2, window=3, block_size=2), small)
    assert bench.index.match(block_hashes(IDS, 2)) == {W1: Overlap(2)}
    bench.apply(W1, removed(51, group=2))
    assert bench.index.match(block_hashes(IDS, 2)) == {W1: Overlap(1)}


# Tiers


def test_tiers_continue_the_gpu_prefix(bench: Bench) -> None:
    """E18: the tail was offloaded to the CPU and to disk, then evicted from the GPU."""
    bench.apply(W1, stored(NAMES[:6]))
    bench.apply(W1, stored(NAMES[2:5], IDS[8:20], parent=2, tier=Tier.CPU))
    bench.apply(W1, stored(NAMES[4:6], IDS[16:24], parent=4, tier=Tier.DISK))
    assert bench.overlap(W1) == Overlap(6)
    bench.apply(W1, removed(6, 5, 4, 3))
    assert bench.overlap(W1) == Overlap(2, 3, 1)
    assert bench.overlap(W1).total == 6
    bench.apply(W1, removed(4, tier=Tier.CPU))
    assert bench.overlap(W1) == Overlap(2, 1)
    bench.apply(W1, stored([4], IDS[12:16], parent=3))
    assert bench.overlap(W1) == Overlap(2, 3, 1)


def test_blocks_on_a_lower_tier_only_are_found_too(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:3]), stored(NAMES[:3], tier=Tier.CPU), removed(3, 2, 1))
    assert bench.overlap(W1) == Overlap(0, 3)
    bench.apply(W1, removed(1, 2, 3, tier=Tier.CPU))
    assert bench.index.match(block_hashes(IDS, SIZE)) == {}
    assert bench.index.stats().nodes == 0


def test_a_removal_from_one_tier_leaves_the_others(bench: Bench) -> None:
    """E18: remove from CPU what is on the GPU."""
    bench.apply(W1, stored(NAMES[:3]))
    assert bench.apply(W1, removed(2, tier=Tier.CPU)).unknown_removed == 1
    bench.apply(W1, stored([2], IDS[4:8], parent=1, tier=Tier.CPU), removed(2, tier=Tier.CPU))
    assert bench.overlap(W1) == Overlap(3)


def test_a_placeholder_counts_for_a_known_name_only(bench: Bench) -> None:
    """E18: an offloading tier announces bare hashes: no tokens, block size 0."""
    bench.apply(W1, stored(NAMES[:3]))
    bare = BlocksStored(block_hashes=[2, 3, 999], tier=Tier.CPU)
    applied = bench.apply(W1, bare)
    assert (applied.stored_blocks, applied.ignored) == (2, {IgnoreCause.PLACEHOLDER: 1})
    assert (bench.overlap(W1), bench.index.block_size(W1)) == (Overlap(3), SIZE)
    bench.apply(W1, removed(3, 2))
    assert bench.overlap(W1) == Overlap(1, 2)


def test_another_block_size_on_a_lower_tier_does_not_cost_the_gpu_its_blocks(
    bench: Bench,
) -> None:
    bench.apply(W1, stored(NAMES[:3]))
    large = stored([50], block_size=8, token_ids=IDS[:8], tier=Tier.CPU)
    assert bench.apply(W1, large).ignored == {IgnoreCause.OTHER_BLOCK_SIZE: 1}
    assert bench.gpu(W1) == 3


# Groups


def sliding(
    names: list[EngineHash], group: int = 0, window: int = 9, **fields: Any
) -> BlocksStored:
    """A sliding group names only the tail of what its tokens cover."""
    defaults: dict[str, Any] = {"token_ids": IDS, "block_size": SIZE, "parent": None}
    return BlocksStored(
        block_hashes=names,
        group=group,
        group_kind=GroupKind.SLIDING,
        sliding_window=window,
        **defaults | fields,
    )


def test_a_sliding_group_limits_the_overlap_to_where_its_window_is(bench: Bench) -> None:
    """E15: the full group is not group 0, and its event comes behind those of the others."""
    bench.apply(W1, sliding([9, 10]), stored(NAMES, group=1))
    assert bench.gpu(W1) == 10
    assert bench.gpu(W1, IDS[:20]) == 0
    bench.apply(W1, sliding([4, 5]))
    assert bench.gpu(W1, IDS[:20]) == 5
    assert bench.gpu(W1, IDS[:24]) == 5
    bench.apply(W1, removed(10))
    assert bench.gpu(W1) == 5
    bench.apply(W1, removed(1, group=1))
    assert bench.gpu(W1) == 0


def test_a_window_is_held_under_any_name_of_its_block(bench: Bench) -> None:
    bench.apply(W1, stored([1, 2, 3], group=1), stored([11, 12, 13], group=1), sliding([12, 13]))
    assert bench.gpu(W1) == 3
    bench.apply(W1, removed(1, 2, 3, group=1))
    assert bench.gpu(W1) == 3


def test_groups_count_their_own_copies(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:3], group=1), sliding([2, 3]), sliding([2, 3]))
    bench.apply(W1, removed(3))
    assert bench.gpu(W1) == 3
    applied = bench.apply(W1, removed(3), removed(3))
    assert (applied.removed_blocks, applied.unknown_removed) == (1, 1)
    assert bench.gpu(W1) == 0


def test_removals_are_of_the_main_group_that_the_same_batch_brought(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:4]))
    another = stored(NAMES[:4], group=1)
    applied = bench.apply(W1, BlocksCleared(), another, removed(4), removed(3, group=1))
    assert (applied.removed_blocks, applied.unknown_removed) == (1, 1)
    assert (bench.gpu(W1), bench.index.blocks(W1)) == (2, 3)


def test_a_second_full_group_has_to_hold_the_block_too(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:4], group=0), stored(NAMES[:4], group=1))
    bench.apply(W1, removed(3, group=1))
    assert bench.gpu(W1) == 2
    bench.apply(W1, removed(2, group=0))
    assert bench.gpu(W1) == 1


def test_opaque_groups_are_ignored_and_mark_the_rank(bench: Bench) -> None:
    """E15: a Mamba group with 3840 tokens and one hash."""
    mamba = BlocksStored(
        block_hashes=[1],
        token_ids=[5] * 3840,
        block_size=3840,
        group=1,
        group_kind=GroupKind.OPAQUE,
    )
    bench.apply(W1, stored(NAMES[:3]))
    assert not bench.index.is_approximate(W1)
    applied = bench.apply(W1, mamba, removed(1, group=1))
    assert applied.ignored == {IgnoreCause.OPAQUE_GROUP: 2}
    assert bench.index.is_approximate(W1)
    assert (bench.gpu(W1), bench.index.block_size(W1)) == (3, SIZE)


def test_tokens_and_hashes_that_do_not_pair_are_never_paired(bench: Bench) -> None:
    """E15: before 0.22 nothing says that a group is a sliding one."""
    applied = bench.apply(W1, stored([9, 10], token_ids=IDS))
    assert applied.ignored == {IgnoreCause.UNPAIRED: 2}
    assert bench.index.match(block_hashes(IDS, SIZE)) == {}
    assert bench.index.is_approximate(W1)
    assert bench.apply(W1, stored([1], token_ids=[], block_size=0)).ignored


def test_an_event_without_blocks_does_nothing(bench: Bench) -> None:
    """E15: a hybrid model's sliding groups send 32 tokens and no hash while decoding."""
    empty = stored([], token_ids=IDS[:4], parent=999)
    assert bench.apply(W1, empty, sliding([])) == Applied()
    assert bench.index.block_size(W1) is None


def test_the_groups_of_another_model_behind_the_same_address_are_forgotten(bench: Bench) -> None:
    bench.apply(W1, sliding([9, 10]), stored(NAMES, group=1))
    bench.index.clear(W1)
    bench.apply(W1, stored(NAMES[:3]))
    assert bench.gpu(W1) == 3


# Size


def test_a_full_index_takes_no_more_from_ranks_that_have_their_share() -> None:
    """One engine reports ever more blocks; the others go on as before."""
    index = RadixIndex(max_blocks=20)

    def apply(rank: WorkerRank, *events: Event) -> Applied:
        applied = index.apply(rank, EventBatch(0.0, list(events)))
        index.check()
        return applied

    apply(W1, stored(NAMES), stored([20 + at for at in range(10)], [1] * 40))
    apply(W2)
    assert apply(W1, stored([99], [2] * SIZE)).ignored == {IgnoreCause.OVER_BUDGET: 1}
    assert apply(W2, stored(NAMES[:3])).stored_blocks == 3
    assert index.match(block_hashes(IDS, SIZE)) == {W1: Overlap(10), W2: Overlap(3)}
    apply(W1, removed(*range(20, 30)))
    assert apply(W1, stored([99], [2] * SIZE)).stored_blocks == 1


def test_lower_tiers_of_a_rank_are_bounded_by_the_size_of_its_gpu(bench: Bench) -> None:
    bench.index.set_capacity(W1, 1)
    for at in range(80):
        bench.apply(W1, stored([at], [at] * SIZE, tier=Tier.CPU, block_size=SIZE))
    assert bench.index.blocks(W1) == 0  # the block size is not known yet
    bench.apply(W1, stored([1000], [7] * SIZE))
    for at in range(80):
        bench.apply(W1, stored([at], [at] * SIZE, tier=Tier.CPU))
    assert bench.index.blocks(W1) == 64


@pytest.mark.parametrize("capacity", [None, 1])
def test_names_of_other_cache_groups_are_bounded_too(capacity: int | None) -> None:
    """An engine that stores for a window group, or offloads for it, and never tells a removal."""
    index = RadixIndex(max_blocks=64)
    index.set_capacity(W1, capacity)

    def stored_in_window(name: EngineHash, rank: WorkerRank, tier: Tier) -> Applied:
        event = stored([name], tier=tier, group=1, group_kind=GroupKind.SLIDING, sliding_window=9)
        applied = index.apply(rank, EventBatch(0.0, [event]))
        index.check()
        return applied

    tier = Tier.GPU if capacity is None else Tier.CPU
    for at in range(64):
        assert stored_in_window(at, W1, tier).stored_blocks == 1
    assert stored_in_window(64, W1, tier).ignored == {IgnoreCause.OVER_BUDGET: 1}
    assert index.stats().blocks == 0
    assert index.stats().estimated_bytes >= 64 * 40
    assert stored_in_window(64, W2, tier).stored_blocks == 1
    event = removed(*range(40), group=1, tier=tier)
    assert index.apply(W1, EventBatch(0.0, [event])).removed_blocks == 40
    assert stored_in_window(64, W1, tier).stored_blocks == 1
    index.clear(W1)
    index.check()


def test_the_size_is_counted_as_it_changes(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES))
    bench.apply(W2, stored(NAMES[:4]))
    stats = bench.index.stats()
    assert (stats.ranks, stats.nodes, stats.tree_blocks, stats.blocks) == (2, 1, 10, 14)
    assert stats.estimated_bytes > 14 * 80
    bench.index.remove_worker("w1")
    assert bench.index.stats().blocks == 4


def test_hot_prefixes_are_those_of_most_ranks(bench: Bench) -> None:
    """For the live page: a system prompt that all have, a document that two of three have."""
    w3 = WorkerRank("w3")
    bench.apply(W1, stored(NAMES[:8]))
    bench.apply(W2, stored(NAMES[:8]), stored([50], [0] * SIZE, parent=4))
    bench.apply(w3, stored(NAMES[:4]))
    hashes = block_hashes(IDS, SIZE)
    hot = bench.index.hot_prefixes()
    assert [(set(each.ranks), each.blocks, each.last_hash) for each in hot] == [
        ({W1, W2, w3}, 4, hashes[24:32]),
        ({W1, W2}, 8, hashes[56:64]),
    ]
    assert bench.index.hot_prefixes(most=1) == hot[:1]
    bench.index.clear(W1)
    bench.index.clear(w3)
    assert bench.index.hot_prefixes() == []


def test_hot_prefixes_are_all_that_are_shared_and_go_on_with_no_equal_ranks() -> None:
    """Ranks at depths of their own, several documents behind one system prompt, evicted blocks."""
    for seed in range(100):
        rng = random.Random(seed)
        index = RadixIndex(label_blocks=rng.choice([2, 4, 128]))
        held: dict[tuple[int, ...], set[WorkerRank]] = {}
        for rank in [WorkerRank(f"w{at}") for at in range(rng.randint(2, 5))]:
            trunks = [[1] * 12, [1] * 5 + [2] * 7, [2] * 12]
            prompts = [rng.choice(trunks)[: rng.randint(1, 12)] for _ in range(rng.randint(1, 4))]
            paths = sorted({tuple(ids[:end]) for ids in prompts for end in range(1, len(ids) + 1)})
            for name, (*above, token) in enumerate(paths):
                parent = paths.index(tuple(above)) if above else None
                event = stored([name], [token], parent=parent, block_size=1, token_ids=[token])
                index.apply(rank, EventBatch(0.0, [event]))
            if rng.random() < 0.5:
                gone = rng.randrange(len(paths))
                index.apply(rank, EventBatch(0.0, [removed(gone)]))
                lost = paths[gone]
                paths = [path for path in paths if path[: len(lost)] != lost]
            for path in paths:
                held.setdefault(path, set()).add(rank)
        expected = {
            (block_hashes(list(path), 1)[-8:], len(path), frozenset(ranks))
            for path, ranks in held.items()
            if len(ranks) > 1 and all(held.get((*path, token)) != ranks for token in (1, 2))
        }
        hot = index.hot_prefixes(most=1000)
        found = [(each.last_hash, each.blocks, frozenset(each.ranks)) for each in hot]
        assert set(found) == expected
        assert len(found) == len(expected)
        sizes = [len(each.ranks) for each in hot]
        assert sizes == sorted(sizes, reverse=True)


def test_churn_of_unique_prompts_keeps_the_index_as_small_as_the_cache() -> None:
    """I8: ten times the capacity of unique prompts behind a live shared head."""
    index = RadixIndex()
    index.apply(W1, EventBatch(ts_s=0.0, events=[stored(NAMES[:5])]))
    waiting: list[list[EngineHash]] = []
    sizes = []
    for number in range(400):
        names: list[EngineHash] = [1000 + number * 10 + at for at in range(10)]
        ids = [number] * (10 * SIZE)
        events: list[Event] = [stored(names, ids, parent=5)]
        waiting.append(names)
        if len(waiting) > 40:
            events[:0] = [removed(name) for name in reversed(waiting.pop(0))]
        index.apply(W1, EventBatch(ts_s=0.0, events=events))
        sizes.append(index.stats())
        if number % 50 == 0:
            index.check()
    assert max(size.tree_blocks for size in sizes[40:]) == 40 * 10 + 5
    assert max(size.nodes for size in sizes[40:]) == 41
    for names in waiting:
        index.apply(W1, EventBatch(ts_s=0.0, events=[removed(*names)]))
    index.check()
    assert (index.stats().nodes, index.stats().tree_blocks) == (1, 5)
    assert index.match(block_hashes(IDS, SIZE)) == {W1: Overlap(5)}


def test_branches_at_random_points_leave_nothing_behind_a_clear(bench: Bench) -> None:
    """I9: branches at random interior points, then clear."""
    rng = random.Random(3)
    ids = list(range(400))
    for rank in (W1, W2):
        bench.apply(rank, stored(list(range(1, 101)), ids))
        for number in range(60):
            at = rng.randrange(1, 100)
            names: list[EngineHash] = [5000 + number * 2, 5001 + number * 2]
            bench.apply(rank, stored(names, [number] * (2 * SIZE), parent=at))
    bench.index.clear(W1)
    bench.index.check()
    assert bench.gpu(W2, ids) == 100
    bench.apply(W2, BlocksCleared())
    stats = bench.index.stats()
    assert (stats.nodes, stats.tree_blocks, stats.blocks, stats.ranks) == (0, 0, 0, 2)


def test_a_branch_that_is_gone_leaves_its_trunk_in_one_piece(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES), stored([50], [0] * SIZE, parent=4))
    bench.apply(W2, stored(NAMES))
    assert bench.index.stats().nodes == 3
    bench.apply(W1, removed(50))
    assert bench.index.stats().nodes == 1
    assert bench.index.match(block_hashes(IDS, SIZE)) == {W1: Overlap(10), W2: Overlap(10)}


def test_a_cut_beside_a_hole_keeps_every_holder_right(bench: Bench) -> None:
    """Another rank branches off right behind a block that this one has lost."""
    bench.apply(W1, stored(NAMES[:6]), removed(3))
    bench.apply(W2, stored([1, 2, 3, 4], [*IDS[:12], 0, 0, 0, 0]))
    assert bench.index.match(block_hashes(IDS, SIZE)) == {W1: Overlap(2), W2: Overlap(3)}
    bench.apply(W1, stored([3], IDS[8:12], parent=2))
    assert bench.gpu(W1) == 6


def test_an_evicted_tail_is_trimmed(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES))
    bench.apply(W2, stored(NAMES))
    bench.apply(W1, *(removed(name) for name in reversed(NAMES[3:])))
    assert bench.index.stats().tree_blocks == 10
    bench.apply(W2, *(removed(name) for name in reversed(NAMES[5:])))
    assert bench.index.stats().tree_blocks == 5


def test_long_prompts_span_nodes(bench: Bench) -> None:
    ids = list(range(1000 * SIZE))
    bench.apply(W1, stored(list(range(1, 1001)), ids))
    bench.apply(W2, stored(list(range(1, 501)), ids))
    assert bench.index.match(block_hashes(ids, SIZE)) == {W1: Overlap(1000), W2: Overlap(500)}
    bench.apply(W1, removed(300))
    assert bench.gpu(W1, ids) == 299


def test_nothing_is_left_to_the_garbage_collector() -> None:
    """A collection of millions of objects would stop the event loop for tens of milliseconds."""
    index = RadixIndex()
    gc.collect()
    gc.disable()
    try:
        for round_ in range(20):
            for rank in (W1, W2):
                events: list[Event] = [stored(NAMES), stored([round_ + 50], [0] * SIZE, parent=4)]
                index.apply(rank, EventBatch(ts_s=0.0, events=events))
            index.apply(W1, EventBatch(ts_s=0.0, events=[removed(round_ + 50, *NAMES)]))
            index.clear(W2)
        index.remove_worker("w1")
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_a_contradiction_is_told_with_its_place(bench: Bench) -> None:
    bench.apply(W1, stored(NAMES[:3]))
    (node,) = bench.index._tree.root.children.values()
    node.full = 0
    with pytest.raises(InvariantError, match="nobody knows the end of <Node 3 blocks"):
        bench.index.check()


def test_blocks_that_a_relay_has_hashed_are_the_same_blocks() -> None:
    """Over NATS come hashes, not tokens; the engine's names stay."""
    tokens = list(range(12))
    hashes = block_hashes(tokens, 4)
    plain, relayed = RadixIndex(), RadixIndex()
    rank = WorkerRank("w")
    first = BlocksStored(block_hashes=[1, 2], token_ids=tokens[:8], block_size=4)
    then = BlocksStored(block_hashes=[3], parent=2, token_ids=tokens[8:], block_size=4)
    plain.apply(rank, EventBatch(0.0, [first, then]))
    first = BlocksStored(block_hashes=[1, 2], hashes=hashes[:16], block_size=4)
    then = BlocksStored(block_hashes=[3], parent=2, hashes=hashes[16:], block_size=4)
    applied = relayed.apply(rank, EventBatch(0.0, [first, then]))
    assert applied.stored == hashes
    assert relayed.match(hashes) == plain.match(hashes)
    relayed.apply(rank, EventBatch(0.0, [BlocksRemoved(block_hashes=[2])]))
    assert relayed.match(hashes) == {rank: Overlap(1)}


def test_hashes_that_do_not_pair_up_with_names_are_not_used() -> None:
    index, rank = RadixIndex(), WorkerRank("w")
    event = BlocksStored(block_hashes=[1, 2], hashes=bytes(8), block_size=4)
    applied = index.apply(rank, EventBatch(0.0, [event]))
    assert applied.ignored == {IgnoreCause.UNPAIRED: 2}
