"""Policies by name: which filters, scorer and picker make each of them."""

from collections.abc import Iterable, Sequence
from operator import add
from random import Random

import msgspec

from kvrouter.config import PolicyConfig
from kvrouter.policy.candidate import Survey
from kvrouter.policy.filters import Filter, LoadGuard
from kvrouter.policy.pickers import Cheapest, Picker, Reason, Softmax, Uniform
from kvrouter.policy.scorers import (
    ActiveRequests,
    ActiveTokens,
    BlockCost,
    Indifferent,
    LastTurn,
    Scorer,
    Terms,
    TokenCost,
)


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What a policy made of the candidates. `kept` and `position` are positions in the survey.

    `costs` has an entry for each candidate, also for those that were filtered.
    """

    kept: Sequence[int]
    terms: Terms
    costs: list[float]
    position: int
    reason: Reason


class Policy(msgspec.Struct, frozen=True):
    """Filter, rate, pick. Without state: all that it goes by is in the survey."""

    name: str
    scorer: Scorer
    picker: Picker
    filters: tuple[Filter, ...] = ()

    def choose(self, survey: Survey, rng: Random) -> Choice:
        """The choice among at least one candidates."""
        candidates = len(survey.ranks)
        kept: Sequence[int] = range(candidates)
        for each in self.filters:
            kept = each.keep(survey, kept) or kept
        terms = self.scorer.rate(survey)
        costs = _sums(terms, candidates)
        position, reason = self.picker.pick(survey, costs, kept, rng)
        return Choice(kept, terms, costs, position, reason)


def _sums(terms: Terms, candidates: int) -> list[float]:
    """The sum of each row."""
    columns = list(filter(None, terms))
    if not columns:
        return [0.0] * candidates
    costs: Iterable[float] = columns[0]
    for column in columns[1:]:
        costs = map(add, costs, column)
    return list(costs)


def build_policy(config: PolicyConfig) -> Policy:
    """The policy that the configuration asks for."""
    picker = Softmax(config.temperature) if config.temperature > 0 else Cheapest()
    guard = (LoadGuard(config.guard_ratio, config.guard_slack),)
    if config.name == "kv" and config.w is not None:
        return Policy("kv", BlockCost(config.w, config.w), picker)
    if config.name == "kv":
        cost = TokenCost(
            config.copy_weight, config.request_tokens, config.fill_limit, config.slow_tokens
        )
        return Policy("kv", cost, picker, guard)
    if config.name == "kv_blocks":
        weights = BlockCost(config.miss_weight, config.queue_weight)
        return Policy("kv_blocks", weights, picker, guard)
    return _WITHOUT_PARAMETERS[config.name]


def parameters_of(config: PolicyConfig) -> frozenset[str]:
    """The fields of the configuration that its policy goes by, apart from `name`."""
    if config.name == "kv":
        return _PLAIN if config.w is not None else _TOKEN_COST
    return _BLOCK_COST if config.name == "kv_blocks" else frozenset()


_GUARDED = frozenset({"guard_ratio", "guard_slack", "temperature"})
_PLAIN = frozenset({"w", "temperature"})
_TOKEN_COST = _GUARDED | {"w", "copy_weight", "request_tokens", "fill_limit", "slow_tokens"}
_BLOCK_COST = _GUARDED | {"miss_weight", "queue_weight"}
_WITHOUT_PARAMETERS = {
    policy.name: policy
    for policy in (
        Policy("round_robin", LastTurn(), Cheapest()),
        Policy("random", Indifferent(), Uniform()),
        Policy("least_requests", ActiveRequests(), Cheapest()),
        Policy("least_tokens", ActiveTokens(), Cheapest()),
    )
}
