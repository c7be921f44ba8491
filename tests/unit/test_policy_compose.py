"""The policies by name."""

from random import Random

import pytest
from support.candidates import candidate

from kvrouter.config import PolicyConfig
from kvrouter.policy import Candidate, Policy, Reason, build_policy
from kvrouter.policy.pickers import Cheapest, Softmax
from kvrouter.policy.scorers import ActiveRequests

NAMES = ("kv", "round_robin", "random", "least_requests", "least_tokens")


def winner(policy: Policy, *candidates: Candidate) -> str:
    choice = policy.choose(candidates, Random(1))
    return choice.kept[choice.position].rank.worker


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_explains_itself_in_the_same_way(name: str) -> None:
    policy = build_policy(name)
    choice = policy.choose([candidate("a"), candidate("b", decode_tokens=32)], Random(1))
    assert policy.name == name
    assert len(choice.kept) == len(choice.terms) == len(choice.costs) == 2
    assert choice.costs == [sum(terms) for terms in choice.terms]
    assert {len(terms) for terms in choice.terms} == {len(policy.scorer.term_names)}


def test_the_default_of_the_configuration_is_the_plain_kv_policy() -> None:
    config = PolicyConfig()
    policy = build_policy(config.name, w=config.w, temperature=config.temperature)
    assert policy == build_policy("kv", w=1.0, temperature=0.0)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'best'.*kv, round_robin, random"):
        build_policy("best")


def test_kv_goes_to_the_holder_until_its_load_outweighs_the_prefix() -> None:
    policy = build_policy("kv")
    holder = candidate("holder", uncached_tokens=16, decode_tokens=128)
    loaded = candidate("holder", uncached_tokens=16, decode_tokens=160)
    other = candidate("other", uncached_tokens=160)
    assert winner(policy, holder, other) == "holder"
    assert winner(policy, loaded, other) == "other"
    assert winner(build_policy("kv", w=2.0), loaded, other) == "holder"


def test_a_temperature_samples_the_kv_policy() -> None:
    assert build_policy("kv", temperature=4.0).picker == Softmax(4.0)
    choice = build_policy("kv", temperature=4.0).choose([candidate("a")], Random(1))
    assert choice.reason is Reason.SAMPLED


def test_round_robin_takes_whose_turn_is_longest_ago() -> None:
    policy = build_policy("round_robin")
    first, second = candidate("a", last_turn=7), candidate("b", last_turn=5, active_requests=9)
    assert winner(policy, first, second) == "b"
    assert winner(policy, first, second, candidate("new")) == "new"


def test_least_requests_counts_requests_and_least_tokens_tokens() -> None:
    few = candidate("few", active_requests=1, prefill_tokens=4000, decode_tokens=4000)
    many = candidate("many", active_requests=5, decode_tokens=500)
    assert winner(build_policy("least_requests"), few, many) == "few"
    assert winner(build_policy("least_tokens"), few, many) == "many"


def test_a_filter_removes_candidates_before_they_are_rated() -> None:
    policy = Policy("guarded", ActiveRequests(), Cheapest(), (lambda found: found[1:],))
    assert winner(policy, candidate("a"), candidate("b", active_requests=5)) == "b"


def test_a_filter_that_would_remove_all_is_passed_over() -> None:
    policy = Policy("guarded", ActiveRequests(), Cheapest(), (lambda _: (),))
    assert winner(policy, candidate("a", active_requests=5), candidate("b")) == "b"
