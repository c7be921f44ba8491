"""One decision, explained: what each candidate holds and has to do, which is chosen, the booking.

The index and the load are the sources of truth; what is seen of them here may be behind the
engines by an event or two. That can make a choice worse, never lose a booking.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, Protocol

from events import WorkerRank
from indexer import Overlap, RadixIndex
from kvrouter.load import Lease, LoadView
from kvrouter.policy import Candidate, Decision, NoCandidate, Policy, TierCredit
from kvrouter.prompt import HASH_BYTES, Prompt

DEFAULT_BLOCK_SIZE = 16
PREDICTION_TTL_S = 10.0
NO_OVERLAP = Overlap(0, 0, 0)


class Placement(NamedTuple):
    """A decision that was carried out: the request is booked, and the lease must be settled."""

    decision: Decision
    lease: Lease


class Predictions(Protocol):
    """What a decision needs of the blocks that are expected because requests were routed."""

    def leading(self, rank: WorkerRank, hashes: bytes, start: int, now: float) -> int:
        """How many blocks from position `start` on are expected."""

    def expect(self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float) -> None:
        """Expect these blocks."""

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""


class _View(NamedTuple):
    """The candidates of one block size, and what is known of the prompt's blocks there."""

    block_size: int
    ranks: list[WorkerRank]
    overlaps: dict[WorkerRank, Overlap]


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
        views = self._views(prompt, ranks)
        candidates = [each for view in views for each in self._survey(prompt, view, views, now)]
        return Decision(prompt, self._policy, candidates, self._policy.choose(candidates, rng))

    def _views(self, prompt: Prompt, ranks: Sequence[WorkerRank]) -> list[_View]:
        by_size: dict[int, list[WorkerRank]] = {}
        block_size = self._index.block_size
        for rank in ranks:
            by_size.setdefault(block_size(rank) or self._said_block_size(rank), []).append(rank)
        return [
            _View(size, members, self._match(prompt, size)) for size, members in by_size.items()
        ]

    def _match(self, prompt: Prompt, block_size: int) -> dict[WorkerRank, Overlap]:
        hashes = prompt.reusable_hashes(block_size)
        return self._index.match(hashes) if hashes else {}

    def _survey(
        self, prompt: Prompt, view: _View, views: list[_View], now: float
    ) -> list[Candidate]:
        """The facts of each candidate of one block size."""
        size = view.block_size
        hashes = prompt.reusable_hashes(size)
        prompt_tokens = prompt.prompt_tokens
        all_tokens = -(-max(prompt_tokens, len(prompt.token_ids)) // size) * size
        active = self._load.active_blocks(prompt, size)
        awaited = self._awaited_blocks(prompt, view, views)
        leading = self._predicted.leading
        cpu_credit, disk_credit = self._credit.cpu, self._credit.disk
        found: list[Candidate] = []
        for rank, load in zip(view.ranks, self._load.of_each(view.ranks, now), strict=True):
            overlap = view.overlaps.get(rank, NO_OVERLAP)
            gpu, cpu, disk = overlap
            predicted = leading(rank, hashes, gpu + cpu + disk, now)
            saved = gpu + predicted + cpu_credit * cpu + disk_credit * disk
            found.append(
                Candidate(
                    rank,
                    size,
                    overlap,
                    predicted,
                    saved,
                    max(1.0, prompt_tokens - saved * size),
                    all_tokens - active.get(rank, 0) * size,
                    min(awaited[rank] * size, load.prefill_tokens) if rank in awaited else 0,
                    load,
                )
            )
        return found

    def _awaited_blocks(
        self, prompt: Prompt, view: _View, views: list[_View]
    ) -> dict[WorkerRank, int]:
        """The prompt's blocks that requests in flight compute and that no candidate holds yet."""
        if not self._load.prefilling_blocks(prompt, view.block_size, 0):
            return {}
        held_tokens = max(_held_tokens(each) for each in views)
        return self._load.prefilling_blocks(prompt, view.block_size, held_tokens // view.block_size)

    def _expect(self, prompt: Prompt, chosen: Candidate, now: float) -> None:
        """Predict the blocks that the engine will report when it has computed them."""
        self._predicted.expire(now)
        hashes = prompt.hashes(chosen.block_size)[chosen.overlap.gpu * HASH_BYTES :]
        if hashes:
            ttl_s = self._prediction_ttl_s(chosen.rank)
            self._predicted.expect(chosen.rank, hashes, now=now, ttl_s=ttl_s)


def _held_tokens(view: _View) -> int:
    """The longest part of the prompt that a candidate of this view holds."""
    overlaps = view.overlaps
    held = [overlaps[rank].total for rank in view.ranks if rank in overlaps]
    return max(held, default=0) * view.block_size
