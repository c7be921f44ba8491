"""The policies by name."""

from collections.abc import Sequence
from random import Random
from typing import get_args

import msgspec
import pytest
from support.candidates import Row, candidate, policy, survey

from kvrouter.config import ConfigError, PolicyConfig, PolicyName, parse_config
from kvrouter.policy import Policy, Reason, Survey, build_policy, parameters_of
from kvrouter.policy.filters import LoadGuard
from kvrouter.policy.pickers import Cheapest, Softmax
from kvrouter.policy.scorers import ActiveRequests, BlockCost, TokenCost, row_of


class LastOf(msgspec.Struct, frozen=True):
    """A filter that keeps so many, by their place."""

    most: int

    def keep(self, survey: Survey, kept: Sequence[int]) -> Sequence[int]:
        return kept[len(survey) - self.most :]


def winner(chosen_by: Policy, *candidates: Row) -> str:
    found = survey(*candidates)
    return found.ranks[chosen_by.choose(found, Random(1)).position].worker


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_every_policy_explains_itself_in_the_same_way(name: str) -> None:
    named = policy(name)
    found = survey(candidate("a"), candidate("b", decode_tokens=32))
    choice = named.choose(found, Random(1))
    assert named.name == name
    assert len(choice.kept) == len(choice.costs) == 2
    assert choice.costs == [sum(row_of(choice.terms, each)) for each in (0, 1)]
    assert len(choice.terms) == len(named.scorer.term_names)


def test_the_default_prices_copies_and_guards_the_load() -> None:
    default = build_policy(PolicyConfig())
    assert default.scorer == TokenCost(6.0, 250.0, 0.9, 5000.0)
    assert default.filters == (LoadGuard(1.25, 16.0),)


def test_w_alone_is_the_plain_formula_and_nothing_else() -> None:
    plain = policy("kv", w=2.0)
    assert (plain.scorer, plain.filters) == (BlockCost(2.0, 2.0), ())


def test_w_beside_what_it_replaces_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"policy: w .* copy_weight"):
        parse_config({"policy": {"w": 1.0, "copy_weight": 3.0}})


def test_w_is_no_parameter_of_the_other_form() -> None:
    """Its two weights, set equal, are what somebody means who gives it one."""
    with pytest.raises(ConfigError, match=r"policy.w: .* miss_weight and queue_weight"):
        parse_config({"policy": {"name": "kv_blocks", "w": 1.0}})


@pytest.mark.parametrize("name", get_args(PolicyName))
def test_a_policy_goes_by_its_parameters_and_no_others(name: PolicyName) -> None:
    config = PolicyConfig(name=name)
    named = build_policy(config)
    for field in set(PolicyConfig.__struct_fields__) - {"name"}:
        changed = msgspec.structs.replace(config, **{field: 0.5})
        assert (build_policy(changed) != named) == (field in parameters_of(config)), field


def test_the_other_form_weighs_blocks() -> None:
    other = policy("kv_blocks", miss_weight=3.0)
    assert other.scorer == BlockCost(3.0, 8.0)
    assert other.filters == (LoadGuard(1.25, 16.0),)


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"policy.name: must be one of kv, .*round_robin"):
        parse_config({"policy": {"name": "best"}})


def test_plain_kv_goes_to_the_holder_until_its_load_outweighs_the_prefix() -> None:
    plain = policy("kv", w=1.0)
    holder = candidate("holder", uncached_tokens=16, decode_tokens=128)
    loaded = candidate("holder", uncached_tokens=16, decode_tokens=160)
    other = candidate("other", uncached_tokens=160)
    assert winner(plain, holder, other) == "holder"
    assert winner(plain, loaded, other) == "other"
    assert winner(policy("kv", w=2.0), loaded, other) == "holder"


@pytest.mark.parametrize("name", ["kv", "kv_blocks"])
def test_an_overloaded_holder_is_left_out_whatever_its_prefix_is_worth(name: str) -> None:
    """One system prompt that all requests share would lead all of them to one worker."""
    others = [candidate(str(number), uncached_tokens=100_000) for number in range(7)]
    guarded = policy(name, guard_slack=4.0)
    within = candidate("holder", uncached_tokens=16, active_requests=4)
    above = candidate("holder", uncached_tokens=16, active_requests=5)
    assert winner(guarded, within, *others) == "holder"
    assert winner(guarded, above, *others) != "holder"


def test_a_temperature_samples_the_kv_policy() -> None:
    sampled = policy("kv", temperature=4.0)
    assert sampled.picker == Softmax(4.0)
    assert sampled.choose(survey(candidate("a")), Random(1)).reason is Reason.SAMPLED


def test_round_robin_takes_whose_turn_is_longest_ago() -> None:
    turns = policy("round_robin")
    first, second = candidate("a", last_turn=7), candidate("b", last_turn=5, active_requests=9)
    assert winner(turns, first, second) == "b"
    assert winner(turns, first, second, candidate("new")) == "new"


def test_least_requests_counts_requests_and_least_tokens_tokens() -> None:
    few = candidate("few", active_requests=1, prefill_tokens=4000, decode_tokens=4000)
    many = candidate("many", active_requests=5, decode_tokens=500)
    assert winner(policy("least_requests"), few, many) == "few"
    assert winner(policy("least_tokens"), few, many) == "many"


def test_a_filter_removes_candidates_before_one_is_picked() -> None:
    guarded = Policy("guarded", ActiveRequests(), Cheapest(), (LastOf(1),))
    assert winner(guarded, candidate("a"), candidate("b", active_requests=5)) == "b"


def test_a_filter_that_would_remove_all_is_passed_over() -> None:
    guarded = Policy("guarded", ActiveRequests(), Cheapest(), (LastOf(0),))
    assert winner(guarded, candidate("a", active_requests=5), candidate("b")) == "b"


def test_every_field_of_the_configuration_changes_a_policy() -> None:
    """A weight that nothing reads would mislead whoever tunes it."""
    plain = {name: policy(name) for name in get_args(PolicyName)}
    for field in msgspec.structs.fields(PolicyConfig):
        if field.name not in ("name", "cpu_credit", "disk_credit"):
            changed = {field.name: 1.0 if field.default != 1.0 else 0.5}
            assert any(policy(name, **changed) != plain[name] for name in plain), field.name
