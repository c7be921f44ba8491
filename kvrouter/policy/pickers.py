"""Pickers choose among rated candidates."""

import math
from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from kvrouter.policy.candidate import Candidate

EQUAL_COST = 1e-9
"""Costs that differ by less, relative to their size, differ by rounding only."""


class Reason(StrEnum):
    """What decided: a closed set, used as a metric label."""

    ONLY_CANDIDATE = "only_candidate"
    LEAST_COST = "least_cost"
    FEWEST_ACTIVE = "fewest_active"
    """Equal cost; fewest active requests."""
    LEAST_RECENT = "least_recent"
    """Equal in that too; fewest tokens dispatched lately."""
    RANDOM = "random"
    """Equal in everything, or the policy asks for chance."""
    SAMPLED = "sampled"
    """Drawn with a temperature."""


class Pick(NamedTuple):
    """The position of the chosen candidate, and what decided."""

    position: int
    reason: Reason


class Picker(Protocol):
    """Chooses one of at least one candidates; takes chance from `rng` only."""

    def pick(self, candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> Pick:
        """Choose."""


class Cheapest(msgspec.Struct, frozen=True):
    """Least cost; ties: fewest active requests, then least recent tokens, then chance."""

    def pick(self, candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> Pick:
        """Choose."""
        if len(costs) == 1:
            return Pick(0, Reason.ONLY_CANDIDATE)
        least = min(costs)
        bound = least + EQUAL_COST * max(1.0, abs(least))
        tied = [index for index, cost in enumerate(costs) if cost <= bound]
        if len(tied) == 1:
            return Pick(tied[0], Reason.LEAST_COST)
        return _break_tie(candidates, tied, rng)


class Softmax(msgspec.Struct, frozen=True):
    """Draws with the probability `exp(-(cost - least cost) / temperature)`, normalized.

    The temperature has the unit of the cost, blocks: a candidate that costs `temperature` blocks
    more than another is e times less likely, however many there are and whatever their rank. Near
    costs share the traffic, and a far one gets none.
    """

    temperature: float

    def pick(self, candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> Pick:
        """Choose."""
        least = min(costs)
        weights = [math.exp((least - cost) / self.temperature) for cost in costs]
        return Pick(rng.choices(range(len(candidates)), weights)[0], Reason.SAMPLED)


class Uniform(msgspec.Struct, frozen=True):
    """Each with the same probability."""

    def pick(self, candidates: Sequence[Candidate], costs: Sequence[float], rng: Random) -> Pick:  # noqa: ARG002 - chance does not look at costs
        """Choose."""
        return Pick(rng.randrange(len(candidates)), Reason.RANDOM)


def _break_tie(candidates: Sequence[Candidate], tied: list[int], rng: Random) -> Pick:
    loads = {index: candidates[index].load for index in tied}
    fewest = min(load.active_requests for load in loads.values())
    tied = [index for index in tied if loads[index].active_requests == fewest]
    if len(tied) == 1:
        return Pick(tied[0], Reason.FEWEST_ACTIVE)
    least = min(loads[index].recent_tokens for index in tied)
    tied = [index for index in tied if loads[index].recent_tokens <= least]
    if len(tied) == 1:
        return Pick(tied[0], Reason.LEAST_RECENT)
    return Pick(rng.choice(tied), Reason.RANDOM)
