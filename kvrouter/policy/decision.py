"""A decision and why it fell: what `/explain`, logs and metrics show."""

from typing import Any

import msgspec

from events import WorkerRank
from indexer import Overlap
from kvrouter.policy.candidate import Candidate, Survey
from kvrouter.policy.compose import Choice, Policy
from kvrouter.policy.pickers import Reason
from kvrouter.policy.scorers import row_of
from kvrouter.prompt import Prompt


class NoCandidate(Exception):  # noqa: N818 - a fact about the fleet, not a fault in the program
    """There is no worker rank that the request could go to."""


class Rated(msgspec.Struct, frozen=True):
    """One candidate, rated. The terms add up to the cost; both lower is better."""

    rank: WorkerRank
    overlap: Overlap
    predicted_blocks: int
    block_size: int
    terms: dict[str, float]
    cost: float
    active_requests: int
    uncached_tokens: float
    prefill_tokens: int
    queued_tokens: float
    prefill_rate: float
    decode_blocks: float
    recent_tokens: float
    oldest_prefill_age_s: float


class Decision(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The explained result of one choice. Immutable: later load does not change what it says."""

    candidates: Survey
    """All of them, also those that a filter removed."""
    chosen: Candidate
    """The facts of the winner."""
    winner: WorkerRank
    """Where the request goes."""
    _policy: Policy
    _choice: Choice

    @property
    def prompt(self) -> Prompt:
        """What is known of the request's prompt."""
        return self.candidates.prompt

    @property
    def cost(self) -> float:
        """The winner's cost."""
        return self._choice.costs[self._choice.position]

    @property
    def policy(self) -> str:
        """The policy's name."""
        return self._policy.name

    @property
    def reason(self) -> Reason:
        """What decided."""
        return self._choice.reason

    @property
    def rated(self) -> list[Rated]:
        """The candidates that could be picked, in the order given; made when asked for."""
        return [self._rated(each) for each in self._choice.kept]

    @property
    def filtered(self) -> list[Rated]:
        """The candidates that a filter removed, whatever they would have cost."""
        kept = set(self._choice.kept)
        return [self._rated(each) for each in range(len(self.candidates.ranks)) if each not in kept]

    def _rated(self, position: int) -> Rated:
        values = row_of(self._choice.terms, position)
        terms = dict(zip(self._policy.scorer.term_names, values, strict=True))
        cost = self._choice.costs[position]
        return _rated(self.candidates[position], terms, cost, self.candidates.now)

    def as_dict(self) -> dict[str, Any]:
        """The whole decision for JSON, cheapest candidate first."""
        return {
            "policy": self.policy,
            "reason": self.reason.value,
            "winner": _name(self.winner),
            "prompt": {
                "tokens": self.prompt.prompt_tokens,
                "fidelity": self.prompt.fidelity.value,
                "reason": self.prompt.reason,
            },
            "candidates": _entries(self.rated),
            "filtered": _entries(self.filtered),
        }


def _rated(candidate: Candidate, terms: dict[str, float], cost: float, now: float) -> Rated:
    load = candidate.load
    return Rated(
        rank=candidate.rank,
        overlap=candidate.overlap,
        predicted_blocks=candidate.predicted_blocks,
        block_size=candidate.block_size,
        terms=terms,
        cost=cost,
        active_requests=load.active_requests,
        uncached_tokens=candidate.uncached_tokens,
        prefill_tokens=load.prefill_tokens,
        queued_tokens=load.queued_tokens(now),
        prefill_rate=load.prefill_rate,
        decode_blocks=load.decode_tokens / candidate.block_size,
        recent_tokens=load.recent_tokens(now),
        oldest_prefill_age_s=load.oldest_prefill_age_s(now),
    )


def _name(rank: WorkerRank) -> dict[str, str | int]:
    return {"worker": rank.worker, "dp_rank": rank.dp_rank}


def _entries(rated: list[Rated]) -> list[dict[str, Any]]:
    return [_entry(each) for each in sorted(rated, key=lambda one: one.cost)]


def _entry(rated: Rated) -> dict[str, Any]:
    facts = msgspec.structs.asdict(rated)
    del facts["rank"], facts["overlap"]
    gpu, cpu, disk = rated.overlap
    return _name(rated.rank) | {"overlap_blocks": {"gpu": gpu, "cpu": cpu, "disk": disk}} | facts
