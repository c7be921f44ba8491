"""Candidates for tests of policies."""

import math
from dataclasses import dataclass
from typing import Any

import msgspec
from support.prompts import prompt_of

from events import WorkerRank
from indexer import Overlap
from kvrouter.config import PolicyConfig
from kvrouter.policy import Candidate, Policy, Survey, build_policy
from kvrouter.rank_load import RECENT_HALF_LIFE_S, Loads, RankLoad, recency


@dataclass(frozen=True)
class Row:
    """A candidate, and what the survey knows of it besides."""

    candidate: Candidate
    new_tokens: int
    capacity_tokens: float
    room_tokens: float
    slowness: float


@dataclass(frozen=True)
class RowDetails:
    """The details of a survey of these rows."""

    rows: tuple[Row, ...]

    def new_tokens(self, survey: Survey) -> list[int]:  # noqa: ARG002 - it is of these rows
        return [row.new_tokens for row in self.rows]

    def capacities(self, survey: Survey) -> list[float]:  # noqa: ARG002 - likewise
        return [row.capacity_tokens for row in self.rows]

    def rooms(self, survey: Survey) -> list[float]:  # noqa: ARG002 - likewise
        return [row.room_tokens for row in self.rows]


def candidate(
    name: str,
    *,
    uncached_tokens: float = 160,
    new_tokens: int = 160,
    active_requests: int = 0,
    prefill_tokens: int = 0,
    decode_tokens: int = 0,
    recent_tokens: float = 0.0,
    last_turn: int = 0,
    block_size: int = 16,
    capacity_tokens: float = math.inf,
    room_tokens: float = 0.0,
    predicted_blocks: int = 0,
    prefill_rate: float = 0.0,
    oldest_tokens: int = 0,
    working_since: float = math.inf,
    slowness: float = 1.0,
) -> Row:
    """A candidate that is idle and holds nothing, but for what is said."""
    load = RankLoad(
        active_requests=active_requests,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        dispatched_tokens=recent_tokens,
        recency=recency(recent_tokens, 0.0, RECENT_HALF_LIFE_S),
        last_turn=last_turn,
        block_size=block_size,
        prefill_rate=prefill_rate,
        oldest_tokens=oldest_tokens,
        working_since=working_since,
    )
    overlap = Overlap(0, 0, 0)
    row = Candidate(
        WorkerRank(name),
        block_size,
        overlap,
        predicted_blocks,
        0.0,
        uncached_tokens,
        load,
        predicted_blocks,
    )
    return Row(row, new_tokens, capacity_tokens, room_tokens, slowness)


def survey(*rows: Row) -> Survey:
    """What a policy sees of these candidates at time 0."""
    candidates = [row.candidate for row in rows]
    return Survey(
        0.0,
        prompt_of([]),
        [each.rank for each in candidates],
        [each.block_size for each in candidates],
        [each.overlap for each in candidates],
        [each.predicted_blocks for each in candidates],
        [each.saved_blocks for each in candidates],
        [each.uncached_tokens for each in candidates],
        Loads.of([each.load for each in candidates]),
        [row.slowness for row in rows] if any(row.slowness > 1 for row in rows) else [],
        max(row.new_tokens for row in rows),
        min(row.capacity_tokens for row in rows),
        RowDetails(rows),
    )


def policy(name: str = "kv", **fields: Any) -> Policy:
    """The policy of a configuration with these fields."""
    return build_policy(msgspec.convert({"name": name, **fields}, PolicyConfig))
