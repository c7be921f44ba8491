"""What candidates cost under each scorer."""

import pytest
from support.candidates import candidate

from kvrouter.policy.scorers import (
    ActiveRequests,
    ActiveTokens,
    Indifferent,
    KvCost,
    LastTurn,
    Scorer,
)


def test_the_plain_cost_is_w_times_prefill_blocks_plus_decode_blocks() -> None:
    rated = KvCost(2.0, 2.0).rate(
        [candidate("a", uncached_tokens=48, new_tokens=80, prefill_tokens=32, decode_tokens=320)]
    )
    assert rated == [(2.0 * 3, 2.0 * 2, 20 + 5)]


def test_a_miss_and_a_queue_can_weigh_differently() -> None:
    rated = KvCost(48.0, 8.0).rate(
        [candidate("a", uncached_tokens=16, new_tokens=0, prefill_tokens=16)]
    )
    assert rated == [(48.0, 8.0, 0.0)]


def test_a_prompt_shorter_than_a_block_costs_its_share() -> None:
    """C2: a cost of whole blocks would be 0 for all short prompts."""
    rated = KvCost(1.0, 1.0).rate([candidate("a", uncached_tokens=4, new_tokens=16)])
    assert rated == [(0.25, 0.0, 1.0)]


def test_queued_prefill_of_the_same_prompt_is_no_reason_to_go_elsewhere() -> None:
    """C6: what is under way there would have to be done again on any other rank."""
    rated = KvCost(1.0, 1.0).rate([candidate("a", prefill_tokens=160, awaited_tokens=128)])
    assert rated[0][1] == 2.0


def test_workers_of_different_block_sizes_are_compared_in_the_smaller_one() -> None:
    """E16: one pool has a hybrid model's engine with large blocks."""
    small = candidate("small", uncached_tokens=64, new_tokens=64, block_size=16)
    large = candidate("large", uncached_tokens=64, new_tokens=64, block_size=64)
    assert KvCost(1.0, 1.0).rate([small, large]) == [(4.0, 0.0, 4.0)] * 2


def test_load_scorers_read_the_load() -> None:
    one = candidate("a", active_requests=3, prefill_tokens=5, decode_tokens=7, last_turn=9)
    assert ActiveRequests().rate([one]) == [(3.0,)]
    assert ActiveTokens().rate([one]) == [(5.0, 7.0)]
    assert LastTurn().rate([one]) == [(9.0,)]
    assert Indifferent().rate([one, one]) == [(), ()]


@pytest.mark.parametrize(
    "scorer", [KvCost(1.0, 1.0), ActiveRequests(), ActiveTokens(), LastTurn(), Indifferent()]
)
def test_every_term_has_a_name(scorer: Scorer) -> None:
    assert [len(terms) for terms in scorer.rate([candidate("a")])] == [len(scorer.term_names)]
