"""One decision, explained: what each candidate holds and has to do, which is chosen, the booking.

The index and the load are the sources of truth; what is seen of them here may be behind the
engines by an event or two. That can make a choice worse, never lose a booking.
"""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, Protocol

from events import WorkerRank
from indexer import Overlap, RadixIndex
from kvrouter.load import Lease, LoadView
from kvrouter.policy import Candidate, Decision, NoCandidate, Policy, Survey, TierCredit
from kvrouter.prompt import HASH_BYTES, Prompt

DEFAULT_BLOCK_SIZE = 16
PREDICTION_TTL_S = 10.0
FULL_SHARE = 0.95
NO_OVERLAP = Overlap(0, 0, 0)


class Placement(NamedTuple):
    """A decision that was carried out: the request is booked, and the lease must be settled."""

    decision: Decision
    lease: Lease


class Predictions(Protocol):
    """What a decision needs of the blocks that are expected because requests were routed."""

    def leading_each(
        self, ranks: Sequence[WorkerRank], hashes: bytes, starts: Sequence[int], now: float
    ) -> list[int]:
        """How many blocks are expected on each rank, from its own start on."""

    def expect(self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float) -> None:
        """Expect these blocks."""

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""


class Scheduler:
    """Places the requests of one model. Nothing here waits: choosing and booking are one step.

    `said_block_size` tells a rank's block size, in tokens, until its events do.
    """

    def __init__(
        self,
        index: RadixIndex,
        predicted: Predictions,
        load: LoadView,
        policy: Policy,
        rng: Random,
        *,
        said_block_size: Callable[[WorkerRank], int] = lambda _: DEFAULT_BLOCK_SIZE,
        credit: TierCredit | None = None,
        prediction_ttl_s: Callable[[WorkerRank], float] = lambda _: PREDICTION_TTL_S,
    ) -> None:
        self._index = index
        self._predicted = predicted
        self._load = load
        self._policy = policy
        self._rng = rng
        self._said_block_size = said_block_size
        self._credit = credit or TierCredit()
        self._prediction_ttl_s = prediction_ttl_s

    def decide(self, prompt: Prompt, candidates: Sequence[WorkerRank], now: float) -> Decision:
        """What `place` would decide now. Changes nothing, not even the order of chance.

        Raises NoCandidate when there are none.
        """
        rng = Random()
        rng.setstate(self._rng.getstate())
        return self._decide(prompt, candidates, now, rng)

    def place(self, prompt: Prompt, candidates: Sequence[WorkerRank], now: float) -> Placement:
        """Decide, expect the prompt's blocks on the winner, and book. The caller must settle.

        Raises NoCandidate when there are none.
        """
        decision = self._decide(prompt, candidates, now, self._rng)
        chosen = decision.chosen
        self._expect(prompt, chosen, now)
        lease = self._load.book(
            chosen.rank,
            prompt,
            overlap_blocks=chosen.saved_blocks,
            block_size=chosen.block_size,
            now=now,
        )
        return Placement(decision, lease)

    def _decide(
        self, prompt: Prompt, ranks: Sequence[WorkerRank], now: float, rng: Random
    ) -> Decision:
        if not ranks:
            raise NoCandidate("no worker can take the request")
        survey = self._survey(prompt, ranks, now)
        return Decision(prompt, self._policy, survey, self._policy.choose(survey, rng))

    def _survey(self, prompt: Prompt, ranks: Sequence[WorkerRank], now: float) -> Survey:
        """The facts of all candidates, those of equal block size next to each other."""
        by_size: dict[int, list[WorkerRank]] = {}
        sizes = self._block_sizes(ranks)
        if len(set(sizes)) == 1:
            return self._survey_size(prompt, ranks, sizes[0], now)
        for rank, size in zip(ranks, sizes, strict=True):
            by_size.setdefault(size, []).append(rank)
        first, *others = (
            self._survey_size(prompt, members, size, now) for size, members in by_size.items()
        )
        for other in others:
            first.extend(other)
        return first

    def _block_sizes(self, ranks: Sequence[WorkerRank]) -> list[int]:
        told = self._index.block_sizes(ranks)
        if None not in told:
            return told  # type: ignore[return-value]  # mypy does not see that None is not in it
        said = self._said_block_size
        return [size or said(rank) for size, rank in zip(told, ranks, strict=True)]

    def _survey_size(
        self, prompt: Prompt, ranks: Sequence[WorkerRank], size: int, now: float
    ) -> Survey:
        """The facts of candidates of one block size.

        In columns, each made by one expression: there may be hundreds of ranks.
        """
        hashes = prompt.reusable_hashes(size)
        overlaps = self._overlaps(hashes, ranks)
        starts = [gpu + cpu + disk for gpu, cpu, disk in overlaps]
        predicted = self._predicted.leading_each(ranks, hashes, starts, now)
        cpu_credit, disk_credit = self._credit.cpu, self._credit.disk
        saved = [
            gpu + more + cpu_credit * cpu + disk_credit * disk
            for (gpu, cpu, disk), more in zip(overlaps, predicted, strict=True)
        ]
        tokens = prompt.prompt_tokens
        all_tokens = -(-max(tokens, len(prompt.token_ids)) // size) * size
        active = self._load.active_blocks(prompt, size)
        capacities = self._index.capacities(ranks)
        return Survey(
            now,
            ranks,
            [size] * len(ranks),
            overlaps,
            predicted,
            saved,
            [left if (left := tokens - blocks * size) > 1.0 else 1.0 for blocks in saved],
            [all_tokens - active.get(rank, 0) * size for rank in ranks]
            if active
            else [all_tokens] * len(ranks),
            [math.inf if blocks is None else blocks * size for blocks in capacities],
            self._rooms(ranks, capacities, size),
            self._load.of_each(ranks),
        )

    def _overlaps(self, hashes: bytes, ranks: Sequence[WorkerRank]) -> list[Overlap]:
        found = self._index.match(hashes) if hashes else {}
        if not found:
            return [NO_OVERLAP] * len(ranks)
        return [found.get(rank, NO_OVERLAP) for rank in ranks]

    def _rooms(
        self, ranks: Sequence[WorkerRank], capacities: list[int | None], size: int
    ) -> list[float]:
        """What each cache can store before it evicts, in tokens.

        Blocks that are in use and not full have no name yet, so a cache is full before its named
        blocks reach its capacity.
        """
        if all(blocks is None for blocks in capacities):
            return [0.0] * len(ranks)
        return [
            room * size if blocks and (room := FULL_SHARE * blocks - stored) > 0.0 else 0.0
            for blocks, stored in zip(capacities, self._index.gpu_blocks(ranks), strict=True)
        ]

    def _expect(self, prompt: Prompt, chosen: Candidate, now: float) -> None:
        """Predict the blocks that the engine will report when it has computed them."""
        self._predicted.expire(now)
        hashes = prompt.hashes(chosen.block_size)[chosen.overlap.gpu * HASH_BYTES :]
        if hashes:
            ttl_s = self._prediction_ttl_s(chosen.rank)
            self._predicted.expect(chosen.rank, hashes, now=now, ttl_s=ttl_s)
