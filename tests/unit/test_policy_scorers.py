"""What candidates cost under each scorer."""

import math

import pytest
from support.candidates import Row, candidate, survey

from kvrouter.policy.scorers import (
    ActiveRequests,
    ActiveTokens,
    BlockCost,
    Indifferent,
    LastTurn,
    Scorer,
    TokenCost,
    row_of,
)


def rate(scorer: Scorer, *candidates: Row) -> list[tuple[float, ...]]:
    """The terms of each candidate."""
    terms = scorer.rate(survey(*candidates))
    return [tuple(row_of(terms, position)) for position in range(len(candidates))]


def test_the_plain_cost_is_w_times_prefill_blocks_plus_decode_blocks() -> None:
    one = candidate("a", uncached_tokens=48, new_tokens=80, prefill_tokens=32, decode_tokens=320)
    assert rate(BlockCost(2.0, 2.0), one) == [(2.0 * 3, 2.0 * 2, 20 + 5)]


def test_a_miss_and_a_queue_can_weigh_differently() -> None:
    one = candidate("a", uncached_tokens=16, new_tokens=0, prefill_tokens=16)
    assert rate(BlockCost(48.0, 8.0), one) == [(48.0, 8.0, 0.0)]


def test_a_prompt_shorter_than_a_block_costs_its_share() -> None:
    """C2: a cost of whole blocks would be 0 for all short prompts."""
    one = candidate("a", uncached_tokens=4, new_tokens=16)
    assert rate(BlockCost(1.0, 1.0), one) == [(0.25, 0.0, 1.0)]


@pytest.mark.parametrize("scorer", [BlockCost(1.0, 1.0), TokenCost(6.0, 500.0, 0.9, 5000.0)])
def test_what_the_oldest_prefill_has_likely_done_is_not_waited_for(scorer: Scorer) -> None:
    """A long prompt that was sent a second ago is half through."""

    def waiting(rate: float, since: float) -> Row:
        return candidate(
            "a", prefill_tokens=1600, oldest_tokens=1000, prefill_rate=rate, working_since=since
        )

    begun, unknown, overdue = waiting(80.0, -10.0), waiting(0.0, -10.0), waiting(80.0, -1000.0)
    position = [name.startswith(("wait", "queued")) for name in scorer.term_names].index(True)
    waits = [terms[position] for terms in rate(scorer, begun, unknown, overdue)]
    unit = 16 if "blocks" in scorer.term_names[position] else 1
    assert waits == [(1600 - 800) / unit, 1600 / unit, 600 / unit]


def test_workers_of_different_block_sizes_are_compared_in_the_smaller_one() -> None:
    """E16: one pool has a hybrid model's engine with large blocks."""
    small = candidate("small", uncached_tokens=64, new_tokens=64, block_size=16)
    large = candidate("large", uncached_tokens=64, new_tokens=64, block_size=64)
    assert rate(BlockCost(1.0, 1.0), small, large) == [(4.0, 0.0, 4.0)] * 2
    assert (
        rate(TokenCost(6.0, 0.0, 0.9, 5000.0), small, large)
        == [(0.0, 64.0, 0.0, 0.0, 0.0, 0.0)] * 2
    )


COPIES = TokenCost(copy_weight=6.0, request_tokens=0.0, fill_limit=0.9, slow_tokens=0.0)


def copies(*candidates: Row) -> list[float]:
    """The copy term of each candidate, in tokens, without its weight."""
    return [terms[2] / 6 for terms in rate(COPIES, *candidates)]


def test_a_second_copy_costs_more_than_its_prefill_and_a_first_one_does_not() -> None:
    """What nobody holds has to be computed somewhere."""
    holder = candidate("holder", uncached_tokens=16)
    other = candidate("other", uncached_tokens=160)
    assert rate(COPIES, holder, other) == [(0, 16, 0, 0, 0, 0), (0, 160, 6 * 144, 0, 0, 0)]
    assert rate(COPIES, other) == [(0, 160, 0, 0, 0, 0)]


def test_a_copy_is_wasted_as_far_as_it_evicts() -> None:
    """A worker has just joined, or its cache is larger than all that is asked for."""
    holder = candidate("holder", uncached_tokens=16)
    rooms = (0.0, 40.0, 160.0, 1e9)
    others = [candidate(f"{room}", uncached_tokens=160, room_tokens=room) for room in rooms]
    assert copies(holder, *others) == [0.0, 144.0, 108.0, 0.0, 0.0]


def test_what_is_being_computed_elsewhere_is_not_computed_again_even_where_there_is_room() -> None:
    """C6: a burst of equal prompts; the first one is under way and nobody has the blocks yet."""
    busy = candidate("busy", uncached_tokens=16, predicted_blocks=9)
    other = candidate("other", uncached_tokens=160, room_tokens=1e9)
    assert copies(busy, other) == [0.0, 144.0]


def test_what_another_has_in_its_cache_may_be_copied_while_others_compute_it_too() -> None:
    """C5: a prefix that all want spreads; one copy more is under way already."""
    holder = candidate("holder", uncached_tokens=16)
    joining = candidate("joining", uncached_tokens=16, predicted_blocks=9)
    other = candidate("other", uncached_tokens=160, room_tokens=1e9)
    assert copies(holder, joining, other) == [0.0, 0.0, 0.0]


def test_of_a_longer_prompt_only_the_part_in_the_making_counts_so() -> None:
    """The next turn of a chat is under way at the worker that has the turn before."""
    busy = candidate("busy", uncached_tokens=16, predicted_blocks=4)
    other = candidate("other", uncached_tokens=160, room_tokens=1e9)
    full = candidate("full", uncached_tokens=160)
    assert copies(busy, other, full) == [0.0, 64.0, 144.0]


def test_active_requests_cost_their_tokens_each() -> None:
    busy = candidate("busy", uncached_tokens=16, active_requests=3)
    assert rate(TokenCost(6.0, 500.0, 0.9, 5000.0), busy) == [(0, 16, 0, 3 * 500, 0, 0)]


def test_what_would_overfill_a_cache_costs_as_much_as_it_is() -> None:
    """Soon requests would be preempted there, and computed again."""
    found = [
        candidate("a", decode_tokens=900, new_tokens=160, capacity_tokens=capacity)
        for capacity in (1000, 2000, math.inf)
    ]
    assert [each[4] for each in rate(COPIES, *found)] == [160, 0, 0]


def slowness(*found: Row) -> list[float]:
    """The last term, with 5,000 tokens for an output."""
    return [each[-1] for each in rate(TokenCost(6.0, 500.0, 0.9, 5000.0), *found)]


def test_on_a_slow_worker_work_and_the_own_output_cost_as_much_more_as_it_is_slower() -> None:
    work = {"uncached_tokens": 160, "active_requests": 2, "prefill_tokens": 40}
    slow, fast = candidate("slow", slowness=3.0, **work), candidate("fast", **work)
    assert slowness(slow, fast) == [2 * (160 + 2 * 500 + 40 + 5000), 0.0]


def test_a_slow_worker_is_spared_less_the_fuller_the_fleet_is() -> None:
    """When the others have no memory left, its memory is worth more than its speed."""

    def cost(active_tokens: int) -> float:
        rest = {"uncached_tokens": 0, "capacity_tokens": 1000, "decode_tokens": active_tokens}
        slow, fast = candidate("slow", slowness=2.0, **rest), candidate("fast", **rest)
        return slowness(slow, fast)[0]

    assert [cost(0), cost(450), cost(900), cost(1000)] == [5000, 2500, 0, 0]


def test_load_scorers_read_the_load() -> None:
    one = candidate("a", active_requests=3, prefill_tokens=5, decode_tokens=7, last_turn=9)
    assert rate(ActiveRequests(), one) == [(3.0,)]
    assert rate(ActiveTokens(), one) == [(5.0, 7.0)]
    assert rate(LastTurn(), one) == [(9.0,)]
    assert rate(Indifferent(), one) == [()]


@pytest.mark.parametrize(
    "scorer",
    [
        BlockCost(1.0, 1.0),
        TokenCost(6.0, 500.0, 0.9, 5000.0),
        ActiveRequests(),
        ActiveTokens(),
        LastTurn(),
        Indifferent(),
    ],
)
def test_every_term_has_a_name_and_is_finite(scorer: Scorer) -> None:
    terms = scorer.rate(survey(candidate("a"), candidate("b")))
    assert len(terms) == len(scorer.term_names)
    assert all(len(column) in (0, 2) and all(map(math.isfinite, column)) for column in terms)
