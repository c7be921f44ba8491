"""Policies by name: which filters, scorer and picker make each of them."""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import msgspec

from kvrouter.policy.candidate import Candidate
from kvrouter.policy.filters import Filter
from kvrouter.policy.pickers import Cheapest, Picker, Reason, Softmax, Uniform
from kvrouter.policy.scorers import (
    ActiveRequests,
    ActiveTokens,
    Indifferent,
    KvCost,
    LastTurn,
    Scorer,
    Terms,
)


class Choice(NamedTuple):
    """What a policy made of the candidates. `terms` and `costs` are in the order of `kept`."""

    kept: Sequence[Candidate]
    terms: Sequence[Terms]
    costs: Sequence[float]
    position: int
    reason: Reason


class Policy(msgspec.Struct, frozen=True):
    """Filter, rate, pick. Without state: all that it goes by is in the candidates."""

    name: str
    scorer: Scorer
    picker: Picker
    filters: tuple[Filter, ...] = ()

    def choose(self, candidates: Sequence[Candidate], rng: Random) -> Choice:
        """The choice among at least one candidates."""
        kept = candidates
        for keep in self.filters:
            kept = keep(kept) or kept
        terms = self.scorer.rate(kept)
        costs = [sum(each) for each in terms]
        position, reason = self.picker.pick(kept, costs, rng)
        return Choice(kept, terms, costs, position, reason)


def build_policy(name: str, *, w: float = 1.0, temperature: float = 0.0) -> Policy:
    """The policy of this name; `w` and `temperature` (in blocks) shape `kv` only.

    Raises ValueError for a name that there is not.
    """
    picker = Softmax(temperature) if temperature > 0 else Cheapest()
    policies = {
        "kv": Policy("kv", KvCost(miss_weight=w, queue_weight=w), picker),
        "round_robin": Policy("round_robin", LastTurn(), Cheapest()),
        "random": Policy("random", Indifferent(), Uniform()),
        "least_requests": Policy("least_requests", ActiveRequests(), Cheapest()),
        "least_tokens": Policy("least_tokens", ActiveTokens(), Cheapest()),
    }
    if name not in policies:
        raise ValueError(f"no policy is called {name!r}; there are {', '.join(policies)}")
    return policies[name]
