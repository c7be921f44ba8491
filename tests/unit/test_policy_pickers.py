"""How one of the rated candidates is chosen."""

import math
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from support.candidates import Row, candidate, survey

from kvrouter.policy import Reason
from kvrouter.policy.pickers import Cheapest, Picker, Softmax, Uniform


def shares(picker: Picker, costs: Sequence[float], draws: int = 20_000) -> list[float]:
    """How often each candidate is picked."""
    rng = Random(7)
    candidates = survey(*(candidate(str(number)) for number in range(len(costs))))
    counts = Counter(
        picker.pick(candidates, costs, range(len(costs)), rng)[0] for _ in range(draws)
    )
    return [counts[number] / draws for number in range(len(costs))]


def pick(candidates: Sequence[Row], costs: Sequence[float]) -> tuple[str, Reason]:
    position, reason = Cheapest().pick(survey(*candidates), costs, range(len(costs)), Random(1))
    return candidates[position].candidate.rank.worker, reason


def test_the_least_cost_wins() -> None:
    assert pick([candidate("a"), candidate("b")], [2.0, 1.0]) == ("b", Reason.LEAST_COST)


def test_a_single_candidate_is_taken() -> None:
    assert pick([candidate("a")], [2.0]) == ("a", Reason.ONLY_CANDIDATE)


def test_equal_costs_go_to_the_fewest_active_requests() -> None:
    busy = candidate("busy", active_requests=2)
    free = candidate("free", active_requests=1, recent_tokens=9)
    assert pick([busy, free], [1.0, 1.0]) == ("free", Reason.FEWEST_ACTIVE)


def test_then_to_the_least_recent_tokens() -> None:
    """C1: between sequential requests nothing is in flight anywhere."""
    lately = candidate("lately", recent_tokens=9)
    rested = candidate("rested", recent_tokens=8)
    assert pick([lately, rested], [1.0, 1.0]) == ("rested", Reason.LEAST_RECENT)


def test_then_to_chance() -> None:
    assert pick([candidate("a"), candidate("b")], [1.0, 1.0])[1] is Reason.RANDOM
    assert shares(Cheapest(), [1.0, 1.0, 2.0]) == pytest.approx([0.5, 0.5, 0.0], abs=0.02)


def test_a_dearer_candidate_never_wins_a_tie() -> None:
    busy = candidate("busy", active_requests=5)
    dearer = candidate("dearer")
    assert pick([busy, dearer], [1.0, 1.001])[0] == "busy"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e9])
def test_rounding_does_not_hide_a_tie(scale: float) -> None:
    """0.1 + 0.2 and 0.3 are the same number of blocks."""
    busy = candidate("busy", active_requests=1)
    assert pick([busy, candidate("free")], [0.3 * scale, (0.1 + 0.2) * scale])[0] == "free"


def test_a_temperature_spreads_by_the_size_of_the_gap() -> None:
    """Near costs share the traffic, a far one gets none, whatever its rank."""
    near, far = shares(Softmax(4.0), [100.0, 101.0]), shares(Softmax(4.0), [100.0, 160.0])
    share = 1 / (1 + math.exp(-1 / 4))
    assert near == pytest.approx([share, 1 - share], abs=0.02)
    assert far == [1.0, 0.0]


def test_a_temperature_is_in_blocks_whatever_the_others_cost() -> None:
    """One bad outlier must not make the others look equal."""
    two = shares(Softmax(4.0), [10.0, 14.0])
    three = shares(Softmax(4.0), [10.0, 14.0, 10_000.0])
    assert three[0] / three[1] == pytest.approx(math.e, rel=0.06)
    assert three[:2] == pytest.approx(two, abs=0.02)
    assert three[2] == 0.0


def test_more_temperature_spreads_more() -> None:
    costs = [10.0, 14.0, 30.0]
    best = [shares(Softmax(temperature), costs)[0] for temperature in (0.5, 4.0, 40.0)]
    assert best == sorted(best, reverse=True)
    assert best[0] > 0.99
    assert best[2] < 0.5


@pytest.mark.parametrize("temperature", [5e-324, 1e-9, 1e300])
def test_extreme_temperatures_are_survived(temperature: float) -> None:
    assert sum(shares(Softmax(temperature), [1.0, 1e12], draws=10)) == 1.0


def test_uniform_ignores_cost() -> None:
    assert shares(Uniform(), [1.0, 1000.0]) == pytest.approx([0.5, 0.5], abs=0.02)


@pytest.mark.parametrize("picker", [Cheapest(), Softmax(1.0), Uniform()])
def test_only_what_the_filters_kept_is_picked(picker: Picker) -> None:
    three = survey(candidate("a"), candidate("b"), candidate("c"))
    picks = [picker.pick(three, [0.0, 1.0, 1.0], [1, 2], Random(seed)) for seed in range(50)]
    assert {position for position, _ in picks} == {1, 2}
    assert picker.pick(three, [0.0, 1.0, 1.0], [2], Random(1))[0] == 2
