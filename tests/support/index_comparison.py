"""The index beside plain dicts: the same events into both, the same questions to both."""

from collections import Counter
from random import Random

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from support.naive_index import NaiveIndex, prompt_path
from support.odd_engines import TRUNKS, Engine, draw_traits

from events import Event, EventBatch, WorkerRank
from indexer import Applied, RadixIndex, block_hashes, namespace

RANKS = [WorkerRank("w1", 0), WorkerRank("w1", 1), WorkerRank("w2", 0)]
SEEDS = st.integers(0, 2**32)
SPACES: list[tuple[str | None, str | None]] = [(None, None), ("a", None), (None, "s"), ("a", "s")]


class Comparison(RuleBasedStateMachine):
    """Apply the same batches to both, and ask both the same.

    Hypothesis chooses (and shrinks) the steps; what is in a step comes from a seed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.naive = NaiveIndex()
        self.index = RadixIndex(label_blocks=4)

    @initialize(seed=SEEDS)
    def start_engines(self, seed: int) -> None:
        rng = Random(seed)
        self.engines = {rank: Engine(draw_traits(rng)) for rank in RANKS}

    @rule(rank=st.sampled_from(RANKS), seed=SEEDS, batches=st.integers(1, 15))
    def publish(self, rank: WorkerRank, seed: int, batches: int) -> None:
        rng = Random(seed)
        for _ in range(batches):
            self._publish_batch(rank, rng)
            self.index.check()
            self._ask(rng)

    def _publish_batch(self, rank: WorkerRank, rng: Random) -> None:
        """Some events, of which the later ones know what the earlier ones did."""
        events: list[Event] = []
        expected: Counter[str] = Counter()
        for _ in range(rng.randint(1, 4)):
            event = self.engines[rank].next_event(self.naive.rank(rank), rng)
            expected += self.naive.apply(rank, event)
            events.append(event)
        applied = self.index.apply(rank, EventBatch(ts_s=0.0, events=events))
        assert counts(applied) == expected

    def _ask(self, rng: Random) -> None:
        """For a prompt that is often stored somewhere, but not always to its end."""
        tokens = rng.choice(TRUNKS)[: rng.randint(0, 24)]
        tokens += [rng.randint(1, 2) for _ in range(rng.randint(0, 3))]
        lora, salt = rng.choice([*SPACES, *SPACES[:1] * 6])
        block_size = rng.choice([2, 2, 2, 1])
        hashes = block_hashes(tokens, block_size, namespace(lora=lora, salt=salt))
        expected = self.naive.match(prompt_path(tokens, block_size, lora=lora, salt=salt))
        assert self.index.match(hashes) == expected

    @rule(rank=st.sampled_from(RANKS))
    def resync(self, rank: WorkerRank) -> None:
        self.naive.rank(rank).clear()
        self.index.clear(rank)

    @rule(worker=st.sampled_from(["w1", "w2"]), seed=SEEDS)
    def replace_worker(self, worker: str, seed: int) -> None:
        """It goes, and another kind of engine comes back under its name."""
        for rank in RANKS:
            if rank.worker == worker:
                self.naive.ranks.pop(rank, None)
                self.engines[rank] = Engine(draw_traits(Random(seed)))
        self.index.remove_worker(worker)

    @invariant()
    def agree(self) -> None:
        self.index.check()
        for rank, state in self.naive.ranks.items():
            assert self.index.blocks(rank) == len(state.known())
            assert self.index.block_size(rank) == state.block_size

    def teardown(self) -> None:
        for rank in list(self.naive.ranks):
            self.index.clear(rank)
        self.index.check()
        stats = self.index.stats()
        assert (stats.nodes, stats.tree_blocks, stats.blocks) == (0, 0, 0)


def counts(applied: Applied) -> Counter[str]:
    """The same words that the oracle uses; fates that nothing met are left out."""
    return +Counter(
        stored=applied.stored_blocks,
        removed=applied.removed_blocks,
        unknown=applied.unknown_removed,
        orphans=applied.orphans,
        ignored=sum(applied.ignored.values()),
    )


def compare(examples: int, steps: int) -> None:
    """Failures are not shrunk: a seed does not get simpler."""
    phases = [Phase.reuse, Phase.generate]
    chosen = settings(
        max_examples=examples, stateful_step_count=steps, phases=phases, deadline=None
    )
    run_state_machine_as_test(Comparison, settings=chosen)
