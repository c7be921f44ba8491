"""One decision, explained: what each candidate holds and has to do, which is chosen, the booking.

The index and the load are the sources of truth; what is seen of them here may be behind the
engines by an event or two. That can make a choice worse, never lose a booking.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import repeat
from operator import add, itemgetter
from random import Random
from typing import NamedTuple, Protocol

import msgspec

from events import WorkerRank
from indexer import Overlap, RadixIndex
from kvrouter.load import Lease, LoadView
from kvrouter.policy import Candidate, Decision, NoCandidate, Policy, Survey, TierCredit
from kvrouter.prompt import Prompt

DEFAULT_BLOCK_SIZE = 16
PREDICTION_TTL_S = 10.0
FULL_SHARE = 0.95
NO_VERSION = -1
NO_OVERLAP = Overlap(0, 0, 0)


class Placement(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A decision that was carried out: the request is booked, and the lease must be settled."""

    decision: Decision
    lease: Lease


class Predictions(Protocol):
    """What a decision needs of the blocks that are expected because requests were routed."""

    def leading_each(
        self, ranks: Sequence[WorkerRank], hashes: bytes, starts: Sequence[int], now: float
    ) -> list[int]:
        """How many blocks are expected on each rank, from its own start on."""

    def expect(
        self, rank: WorkerRank, hashes: bytes, *, now: float, ttl_s: float, start: int = 0
    ) -> None:
        """Expect a prompt's blocks from `start` on."""

    def withdraw(self, rank: WorkerRank, hashes: bytes, *, start: int = 0) -> None:
        """Take back one such expectation."""

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""


_Held = tuple[list[Overlap], list[int], Sequence[float]]
"""Each rank's overlap, the blocks expected behind it, and what both save."""


class _Group(NamedTuple):
    """Ranks of one block size, and what their columns have in common."""

    ranks: tuple[WorkerRank, ...]
    block_size: int
    least_capacity: float
    """Of any of them, in tokens."""
    block_sizes: list[int]
    nothing_held: _Held
    """Of a prompt without a block that could be found again."""


class _Layout(NamedTuple):
    """What of the candidates stays the same for as long as the index has this version."""

    version: int
    ranks: list[WorkerRank]
    groups: list[_Group]


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
        self._layout = _Layout(NO_VERSION, [], [])
        self._details = _Details(index, load)

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
        if prompt.token_ids:
            self._expect(prompt, chosen, now)
        lease = self._load.book(
            chosen.rank,
            prompt,
            overlap_blocks=chosen.saved_blocks,
            block_size=chosen.block_size,
            now=now,
        )
        return Placement(decision, lease)

    def withdraw(self, prompt: Prompt, placement: Placement) -> None:
        """The engine did not compute the prompt: its blocks are not expected there any more."""
        chosen = placement.decision.chosen
        hashes = prompt.hashes(chosen.block_size)
        self._predicted.withdraw(chosen.rank, hashes, start=chosen.overlap.gpu)

    def look_anew(self) -> None:
        """What ranks said of their block sizes may have changed."""
        self._layout = _Layout(NO_VERSION, [], [])

    def _decide(
        self, prompt: Prompt, ranks: Sequence[WorkerRank], now: float, rng: Random
    ) -> Decision:
        if not ranks:
            raise NoCandidate("no worker can take the request")
        survey = self._survey(prompt, ranks, now)
        choice = self._policy.choose(survey, rng)
        chosen = survey.candidate(choice.position)
        return Decision(survey, chosen, chosen.rank, self._policy, choice)

    def _survey(self, prompt: Prompt, ranks: Sequence[WorkerRank], now: float) -> Survey:
        """The facts of all candidates, those of equal block size next to each other."""
        layout = self._layout
        if layout.version != self._index.layout or layout.ranks != ranks:
            layout = self._layout = self._look(ranks)
        if len(layout.groups) == 1:
            return self._survey_group(prompt, layout.groups[0], now)
        surveys = [self._survey_group(prompt, group, now) for group in layout.groups]
        return reduce(Survey.joined, surveys)

    def _look(self, ranks: Sequence[WorkerRank]) -> _Layout:
        by_size: dict[int, list[WorkerRank]] = {}
        told = self._index.block_sizes(ranks)
        for rank, size in zip(ranks, told, strict=True):
            by_size.setdefault(size or self._said_block_size(rank), []).append(rank)
        return _Layout(
            self._index.layout,
            list(ranks),
            [
                _Group(
                    tuple(members),
                    size,
                    min(_capacities(self._index, members, size)),
                    [size] * len(members),
                    ([NO_OVERLAP] * len(members), [0] * len(members), [0.0] * len(members)),
                )
                for size, members in by_size.items()
            ],
        )

    def _survey_group(self, prompt: Prompt, group: _Group, now: float) -> Survey:
        """The facts of candidates of one block size.

        In columns, each made by one expression: there may be hundreds of ranks.
        """
        ranks, size, least_capacity, block_sizes, held = group
        tokens = prompt.prompt_tokens or 1
        all_tokens = tokens
        if prompt.token_ids:
            all_tokens = max(tokens, len(prompt.token_ids))
            hashes = prompt.reusable_hashes(size)
            if hashes:
                held = self._held(hashes, ranks, now)
        overlaps, predicted, saved = held
        all_tokens = -(-all_tokens // size) * size
        return Survey(
            now,
            prompt,
            ranks,
            block_sizes,
            overlaps,
            predicted,
            saved,
            [tokens - blocks * size for blocks in saved],
            self._load.of_each(ranks),
            self._load.slowness(ranks),
            all_tokens,
            least_capacity,
            self._details,
        )

    def _held(self, hashes: bytes, ranks: Sequence[WorkerRank], now: float) -> _Held:
        found = self._index.match(hashes)
        if found:
            overlaps = list(map(found.get, ranks, repeat(NO_OVERLAP)))
        else:
            overlaps = [NO_OVERLAP] * len(ranks)
        if not self._index.is_gpu_only():
            starts = list(map(sum, overlaps))
            predicted = self._predicted.leading_each(ranks, hashes, starts, now)
            return overlaps, predicted, self._saved(overlaps, predicted)
        starts = list(map(itemgetter(0), overlaps))
        predicted = self._predicted.leading_each(ranks, hashes, starts, now)
        return overlaps, predicted, list(map(add, starts, predicted)) if any(predicted) else starts

    def _saved(self, overlaps: list[Overlap], predicted: list[int]) -> Sequence[float]:
        """The blocks that need no prefill, those of lower tiers by their credit."""
        cpu_credit, disk_credit = self._credit.cpu, self._credit.disk
        return [
            gpu + more + cpu_credit * cpu + disk_credit * disk
            for (gpu, cpu, disk), more in zip(overlaps, predicted, strict=True)
        ]

    def _expect(self, prompt: Prompt, chosen: Candidate, now: float) -> None:
        """Predict the blocks that the engine will report when it has computed them."""
        self._predicted.expire(now)
        self._predicted.expect(
            chosen.rank,
            prompt.hashes(chosen.block_size),
            now=now,
            ttl_s=self._prediction_ttl_s(chosen.rank),
            start=chosen.overlap.gpu,
        )


class _Details(msgspec.Struct, frozen=True, eq=False):
    """What few decisions need, of candidates of one block size."""

    index: RadixIndex
    load: LoadView

    def new_tokens(self, survey: Survey) -> list[int]:
        size = survey.block_sizes[0]
        active = self.load.active_blocks(survey.prompt, size)
        return [survey.most_new_tokens - active.get(rank, 0) * size for rank in survey.ranks]

    def capacities(self, survey: Survey) -> list[float]:
        return _capacities(self.index, survey.ranks, survey.block_sizes[0])

    def rooms(self, survey: Survey) -> list[float]:
        """What each cache can store before it evicts, in tokens.

        Blocks that are in use and not full have no name yet, so a cache is full before its named
        blocks reach its capacity.
        """
        size, ranks = survey.block_sizes[0], survey.ranks
        return [
            room * size if blocks and (room := FULL_SHARE * blocks - stored) > 0.0 else 0.0
            for blocks, stored in zip(
                self.index.capacities(ranks), self.index.gpu_blocks(ranks), strict=True
            )
        ]


def _capacities(index: RadixIndex, ranks: Sequence[WorkerRank], size: int) -> list[float]:
    told = index.capacities(ranks)
    return [math.inf if blocks is None else blocks * size for blocks in told]
