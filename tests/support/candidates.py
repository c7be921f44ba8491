"""Candidates for tests of policies."""

import math
from typing import Any

import msgspec

from events import WorkerRank
from indexer import Overlap
from kvrouter.config import PolicyConfig
from kvrouter.load import RankLoad
from kvrouter.policy import Candidate, Policy, Survey, build_policy


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
) -> Candidate:
    """A candidate that is idle and holds nothing, but for what is said."""
    return Candidate(
        rank=WorkerRank(name),
        block_size=block_size,
        overlap=Overlap(0, 0, 0),
        predicted_blocks=predicted_blocks,
        saved_blocks=0.0,
        uncached_tokens=uncached_tokens,
        new_tokens=new_tokens,
        capacity_tokens=capacity_tokens,
        room_tokens=room_tokens,
        load=RankLoad(
            active_requests=active_requests,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            dispatched_tokens=recent_tokens,
            last_turn=last_turn,
            block_size=block_size,
            prefill_rate=prefill_rate,
            oldest_tokens=oldest_tokens,
            working_since=working_since,
        ),
    )


def survey(*candidates: Candidate) -> Survey:
    """What a policy sees of them."""
    return Survey.of(candidates)


def policy(name: str = "kv", **fields: Any) -> Policy:
    """The policy of a configuration with these fields."""
    return build_policy(msgspec.convert({"name": name, **fields}, PolicyConfig))
