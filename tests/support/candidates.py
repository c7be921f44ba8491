"""Candidates for tests of policies."""

from events import WorkerRank
from indexer import Overlap
from kvrouter.load import RankLoad
from kvrouter.policy import Candidate


def candidate(
    name: str,
    *,
    uncached_tokens: float = 160,
    new_tokens: int = 160,
    awaited_tokens: int = 0,
    active_requests: int = 0,
    prefill_tokens: int = 0,
    decode_tokens: int = 0,
    recent_tokens: float = 0.0,
    last_turn: int = 0,
    block_size: int = 16,
) -> Candidate:
    """A candidate that is idle and holds nothing, but for what is said."""
    return Candidate(
        rank=WorkerRank(name),
        block_size=block_size,
        overlap=Overlap(0, 0, 0),
        predicted_blocks=0,
        saved_blocks=0.0,
        uncached_tokens=uncached_tokens,
        new_tokens=new_tokens,
        awaited_tokens=awaited_tokens,
        load=RankLoad(
            active_requests=active_requests,
            prefill_tokens=prefill_tokens,
            decode_tokens=decode_tokens,
            recent_tokens=recent_tokens,
            last_turn=last_turn,
            block_size=block_size,
        ),
    )
