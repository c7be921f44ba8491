"""B1, B3: load against a naive recount, under any order of calls."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from support.prompts import prompt_of

from events import WorkerRank
from kvrouter.load import Lease, Load, Outcome
from kvrouter.prompt import HASH_BYTES, Prompt
from kvrouter.rank_load import Loads

RANKS = [WorkerRank("a"), WorkerRank("a", 1), WorkerRank("b")]
ASKED = tuple(RANKS)
BLOCK_SIZES = [2, 4]
TOKENS = st.lists(st.integers(1, 2), max_size=24)


@dataclass(eq=False)
class Booked:
    """What the oracle knows of a lease."""

    lease: Lease
    rank: WorkerRank
    prompt: Prompt
    block_size: int
    overlap: int
    output: int = 0
    waiting: bool = True
    counted: bool = True
    outcomes: list[bool] = field(default_factory=list)

    def hashes(self) -> list[bytes]:
        joined = self.prompt.hashes(self.block_size)
        return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]

    def own_tokens(self) -> int:
        tokens = self.prompt.prompt_tokens + self.output
        blocks = (tokens + self.block_size - 1) // self.block_size
        return (blocks - len(self.hashes())) * self.block_size

    def uncached(self) -> int:
        return max(1, self.prompt.prompt_tokens - self.overlap * self.block_size)


class LoadMachine(RuleBasedStateMachine):
    leases: Bundle[Booked] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.load = Load()
        self.booked: list[Booked] = []
        self.now = 0.0

    @rule(
        target=leases,
        rank=st.sampled_from(RANKS),
        tokens=TOKENS,
        unknown=st.integers(0, 9),
        block_size=st.sampled_from(BLOCK_SIZES),
        overlap=st.integers(0, 8),
    )
    def book(
        self, rank: WorkerRank, tokens: list[int], unknown: int, block_size: int, overlap: int
    ) -> Booked:
        prompt = prompt_of(tokens)
        prompt.prompt_tokens += unknown
        self.now += 1
        lease = self.load.book(
            rank, prompt, overlap_blocks=overlap, block_size=block_size, now=self.now
        )
        booked = Booked(lease, rank, prompt, block_size, overlap)
        self.booked.append(booked)
        return booked

    @rule(booked=leases)
    def prefill_done(self, booked: Booked) -> None:
        booked.lease.prefill_done(self.now)
        booked.waiting = False

    @rule(booked=leases, n=st.integers(0, 9))
    def output(self, booked: Booked, n: int) -> None:
        booked.lease.add_output_tokens(n, self.now)
        booked.output += n
        booked.waiting = booked.waiting and n == 0

    @rule(booked=leases, outcome=st.sampled_from(Outcome))
    def settle(self, booked: Booked, outcome: Outcome) -> None:
        booked.outcomes.append(booked.lease.settle(outcome, self.now))
        booked.counted = False

    @rule(rank=st.sampled_from(RANKS))
    def remove(self, rank: WorkerRank) -> None:
        self.load.remove(rank)
        for booked in self.booked:
            booked.counted = booked.counted and booked.rank != rank

    @invariant()
    def counts_equal_a_recount(self) -> None:
        self.load.check()
        for rank in RANKS:
            mine = [each for each in self.booked if each.counted and each.rank == rank]
            shared = {(each.block_size, one) for each in mine for one in each.hashes()}
            now = self.load.of(rank)
            assert now.active_requests == len(mine)
            assert now.prefill_tokens == sum(each.uncached() for each in mine if each.waiting)
            assert now.decode_tokens == sum(size for size, _ in shared) + sum(
                each.own_tokens() for each in mine
            )

    @invariant()
    def who_asks_again_is_told_what_a_look_at_each_rank_gives(self) -> None:
        assert self.load.of_each(ASKED) == Loads.of([self.load.of(rank) for rank in RANKS])

    @invariant()
    def who_has_a_prompt_active_equals_a_recount(self) -> None:
        for looked in self.booked[-1:]:
            size = looked.block_size
            leading = dict.fromkeys(RANKS, 0)
            for one in looked.hashes():
                for rank in RANKS:
                    leading[rank] += any(one in each.hashes() for each in self._counted(rank, size))
            active = self.load.active_blocks(looked.prompt, size)
            assert active == {rank: n for rank, n in leading.items() if n}

    def _counted(self, rank: WorkerRank, size: int) -> list[Booked]:
        return [
            each
            for each in self.booked
            if each.counted and each.rank == rank and each.block_size == size
        ]

    def teardown(self) -> None:
        for booked in self.booked:
            booked.outcomes.append(booked.lease.settle(Outcome.OK, self.now))
            assert booked.outcomes.count(True) == 1
            assert booked.outcomes[0]
        self.load.check()
        totals = self.load.totals
        assert (totals.active_requests, totals.prefill_tokens, totals.decode_tokens) == (0, 0, 0)
        assert sum(totals.settled.values()) == len(self.booked)
        assert all(not tree.recount() for tree in self.load._trees.values())


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
