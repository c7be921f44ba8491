"""Pickers choose among rated candidates."""

import math
from collections.abc import Sequence
from enum import StrEnum
from random import Random
from typing import Protocol, TypeAlias

import msgspec

from kvrouter.policy.candidate import Survey

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


ONLY_CANDIDATE, LEAST_COST, FEWEST_ACTIVE, LEAST_RECENT, RANDOM, SAMPLED = Reason
"""By names of their own: looking one up in its class costs as much as a call."""

Pick: TypeAlias = tuple[int, Reason]
"""The position of the chosen candidate, and what decided."""


class Picker(Protocol):
    """Chooses one of the positions `kept`, of which there is one at least.

    `costs` has one entry per candidate of the survey. Chance comes from `rng` only.
    """

    def pick(
        self, survey: Survey, costs: Sequence[float], kept: Sequence[int], rng: Random
    ) -> Pick:
        """Choose."""


class Cheapest(msgspec.Struct, frozen=True):
    """Least cost; ties: fewest active requests, then least recent tokens, then chance."""

    def pick(
        self, survey: Survey, costs: Sequence[float], kept: Sequence[int], rng: Random
    ) -> Pick:
        """Choose."""
        if len(kept) == 1:
            return kept[0], ONLY_CANDIDATE
        least = min(costs if len(kept) == len(costs) else [costs[each] for each in kept])
        most = least + EQUAL_COST * max(1.0, abs(least))
        active, recency = survey.loads.active_requests, survey.loads.recency
        tied = [(active[each], recency[each], each) for each in kept if costs[each] <= most]
        first = min(tied)
        if len(tied) == 1:
            return first[2], LEAST_COST
        tied.remove(first)
        second = min(tied)
        if first[0] < second[0]:
            return first[2], FEWEST_ACTIVE
        if first[1] < second[1]:
            return first[2], LEAST_RECENT
        equal = [position for fewest, least, position in tied if (fewest, least) == first[:2]]
        return rng.choice([first[2], *equal]), RANDOM


class Softmax(msgspec.Struct, frozen=True):
    """Draws with the probability `exp(-(cost - least cost) / temperature)`, normalized.

    The temperature has the unit of the cost: a candidate that costs `temperature` more than another
    is e times less likely, however many there are and whatever their rank. Near
    costs share the traffic, and a far one gets none.
    """

    temperature: float

    def pick(
        self,
        survey: Survey,  # noqa: ARG002 - costs are all that counts here
        costs: Sequence[float],
        kept: Sequence[int],
        rng: Random,
    ) -> Pick:
        """Choose."""
        least = min([costs[position] for position in kept])
        weights = [math.exp((least - costs[each]) / self.temperature) for each in kept]
        return rng.choices(kept, weights)[0], SAMPLED


class Uniform(msgspec.Struct, frozen=True):
    """Each with the same probability."""

    def pick(
        self,
        survey: Survey,  # noqa: ARG002 - chance looks at nothing
        costs: Sequence[float],  # noqa: ARG002 - likewise
        kept: Sequence[int],
        rng: Random,
    ) -> Pick:
        """Choose."""
        return rng.choice(kept), RANDOM
