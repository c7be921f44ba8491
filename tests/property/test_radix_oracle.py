"""The index against plain dicts: any order of any events, well-behaved or not.

Three kinds of engines run side by side. "w1" names blocks by what is in them, as real engines do.
"w2" does too, but knows something of them that we don't, so that one place has several names.
"wild" takes names from a small pool, so that one name comes to mean several places, and parents
are often unknown.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)
from support.naive_index import NaiveIndex, NaiveRank, event_path, prompt_path

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    EventBatch,
    GroupKind,
    Tier,
    WorkerRank,
)
from indexer import Applied, RadixIndex, block_hashes, namespace

RANKS = [WorkerRank("w1", 0), WorkerRank("w1", 1), WorkerRank("w2", 0), WorkerRank("wild", 0)]
WILD_NAMES: list[EngineHash] = [0, 1, 2, 3, 2**63, 2**64 - 1, b"\x00" * 32, b"\xff" * 32]
GPU_ONLY = [Tier.GPU]
ALL_TIERS = [Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK]
TOKENS = st.integers(1, 2)
TRUNKS = [[1] * 24, [1] * 10 + [2] * 14, [1] * 5 + [2] * 19, [2] * 24]
LORAS = st.sampled_from([None, None, None, "a"])
FIRST_KEYS = st.sampled_from([None, None, None, ["s"], [["image", 0]]])
IMAGE_KEYS = st.sampled_from([None] * 8 + [[["image", 0]]])


@dataclass(frozen=True)
class GroupShape:
    """A cache group as an engine has it."""

    kind: GroupKind
    window: int | None = None


PLAIN = {0: GroupShape(GroupKind.FULL)}
HYBRID = {
    0: GroupShape(GroupKind.SLIDING, 4),
    1: GroupShape(GroupKind.FULL),
    2: GroupShape(GroupKind.FULL),
    3: GroupShape(GroupKind.OPAQUE),
    4: GroupShape(GroupKind.SLIDING, 1),
}


class Comparison(RuleBasedStateMachine):
    """Apply the same batches to both, and ask both the same."""

    def __init__(self) -> None:
        super().__init__()
        self.naive = NaiveIndex()
        self.index = RadixIndex(label_blocks=4)
        self.names: dict[Any, int] = {}

    @initialize(
        shapes=st.fixed_dictionaries(
            {rank: st.sampled_from([PLAIN, PLAIN, HYBRID]) for rank in RANKS}
        ),
        tiers=st.fixed_dictionaries(
            {rank: st.sampled_from([GPU_ONLY, ALL_TIERS]) for rank in RANKS}
        ),
    )
    def models(
        self,
        shapes: dict[WorkerRank, dict[int, GroupShape]],
        tiers: dict[WorkerRank, list[Tier]],
    ) -> None:
        self.shapes = shapes
        self.tiers = tiers

    # What engines do

    @rule(data=st.data(), rank=st.sampled_from(RANKS), length=st.integers(1, 4))
    def publish(self, data: st.DataObject, rank: WorkerRank, length: int) -> None:
        """A batch of events; the later ones know what the earlier ones did."""
        events: list[Event] = []
        expected: Counter[str] = Counter()
        for _ in range(length):
            event = self._draw_event(data, rank)
            expected += self.naive.apply(rank, event)
            events.append(event)
        applied = self.index.apply(rank, EventBatch(ts_s=0.0, events=events))
        assert counts(applied) == expected

    @rule(rank=st.sampled_from(RANKS))
    def resync(self, rank: WorkerRank) -> None:
        self.naive.rank(rank).clear()
        self.index.clear(rank)

    @rule(worker=st.sampled_from(["w1", "w2", "wild"]))
    def lose_worker(self, worker: str) -> None:
        for rank in RANKS:
            if rank.worker == worker:
                self.naive.ranks.pop(rank, None)
        self.index.remove_worker(worker)

    def _draw_event(self, data: st.DataObject, rank: WorkerRank) -> Event:
        kind = data.draw(st.sampled_from(["store"] * 6 + ["remove"] * 5 + ["placeholder", "clear"]))
        if kind == "store":
            return self._draw_stored(data, rank)
        if kind == "clear":
            return BlocksCleared()
        names = self._draw_names(data, rank)
        group = data.draw(st.sampled_from(list(self.shapes[rank])))
        if kind == "remove":
            tier = data.draw(st.sampled_from(self.tiers[rank]))
            return BlocksRemoved(block_hashes=names, tier=tier, group=group)
        tier = data.draw(st.sampled_from([Tier.CPU, Tier.DISK]))
        return BlocksStored(block_hashes=names, tier=tier, group=group)

    def _draw_names(self, data: st.DataObject, rank: WorkerRank) -> list[EngineHash]:
        known = self.naive.rank(rank).known()
        some = st.sampled_from(known) if known else st.nothing()
        return data.draw(st.lists(some | st.sampled_from(WILD_NAMES), min_size=1, max_size=4))

    def _draw_stored(self, data: st.DataObject, rank: WorkerRank) -> BlocksStored:
        state = self.naive.rank(rank)
        parent = self._draw_parent(data, rank, state)
        blocks = data.draw(st.integers(0, 7))
        block_size = data.draw(st.sampled_from([2] * 30 + [1]))
        tokens = data.draw(tokens_of(blocks * block_size))
        group, shape = data.draw(st.sampled_from(list(self.shapes[rank].items())))
        first = data.draw(FIRST_KEYS if parent is None else IMAGE_KEYS)
        event = BlocksStored(
            block_hashes=list(range(blocks)),
            parent=parent,
            token_ids=tokens,
            block_size=block_size,
            tier=data.draw(st.sampled_from(self.tiers[rank])),
            lora_name=data.draw(LORAS) if parent is None else None,
            extra_keys=[first, *(data.draw(IMAGE_KEYS) for _ in range(1, blocks))]
            if blocks
            else None,
            group=group,
            group_kind=shape.kind,
            sliding_window=shape.window,
        )
        return self._named(data, rank, state, event)

    def _draw_parent(
        self, data: st.DataObject, rank: WorkerRank, state: NaiveRank
    ) -> EngineHash | None:
        known = state.known()
        options: list[EngineHash | None] = [None, None, *known[-4:]]
        if rank.worker == "wild":
            options += WILD_NAMES
        return data.draw(st.sampled_from(options))

    def _named(
        self, data: st.DataObject, rank: WorkerRank, state: NaiveRank, event: BlocksStored
    ) -> BlocksStored:
        """The event with the names that this engine gives to its blocks."""
        blocks = len(event.block_hashes)
        names: list[EngineHash]
        if rank.worker == "wild":
            pool = st.sampled_from(WILD_NAMES)
            names = data.draw(st.lists(pool, min_size=blocks, max_size=blocks))
        else:
            parent = state.meaning[event.parent] if event.parent is not None else None
            path = event_path(event, parent) if blocks else ()
            ends = range(len(path) - blocks + 1, len(path) + 1)
            variant = data.draw(st.integers(0, 2)) if rank.worker == "w2" else 0
            names = [self._name_of(rank, path[:end], variant) for end in ends]
        return replaced(event, names)

    def _name_of(self, rank: WorkerRank, path: Any, variant: int) -> int:
        return self.names.setdefault((rank, path, variant), 1000 + len(self.names))

    # What is asked

    @rule(
        tokens=st.lists(TOKENS, max_size=24),
        lora=LORAS,
        salt=st.sampled_from([None, None, "s"]),
        block_size=st.sampled_from([2, 2, 2, 1]),
    )
    def ask(self, tokens: list[int], lora: str | None, salt: str | None, block_size: int) -> None:
        self._compare(tokens, lora, salt, block_size)

    @rule(
        data=st.data(),
        rank=st.sampled_from(RANKS),
        less=st.integers(0, 4),
        more=st.lists(TOKENS, max_size=4),
    )
    def ask_for_what_was_stored(
        self, data: st.DataObject, rank: WorkerRank, less: int, more: list[int]
    ) -> None:
        state = self.naive.rank(rank)
        paths = sorted(state.meaning.values(), key=repr)
        if not paths or state.block_size is None:
            return
        (_, lora, salt), *blocks = data.draw(st.sampled_from(paths))
        tokens = [token for block, _ in blocks[: max(0, len(blocks) - less)] for token in block]
        self._compare(tokens + more, lora, salt, state.block_size)

    def _compare(
        self, tokens: list[int], lora: str | None, salt: str | None, block_size: int
    ) -> None:
        hashes = block_hashes(tokens, block_size, namespace(lora=lora, salt=salt))
        expected = self.naive.match(prompt_path(tokens, block_size, lora=lora, salt=salt))
        assert self.index.match(hashes) == expected

    # What always holds

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


def tokens_of(length: int) -> st.SearchStrategy[list[int]]:
    """Mostly the beginning of one of a few prompts, so that what is stored meets."""
    trunks = st.sampled_from(TRUNKS).map(lambda trunk: trunk[:length])
    return trunks | trunks | st.lists(TOKENS, min_size=length, max_size=length)


def counts(applied: Applied) -> Counter[str]:
    """The same words that the oracle uses; fates that nothing met are left out."""
    return +Counter(
        stored=applied.stored_blocks,
        removed=applied.removed_blocks,
        unknown=applied.unknown_removed,
        orphans=applied.orphans,
        ignored=sum(applied.ignored.values()),
    )


def replaced(event: BlocksStored, names: list[EngineHash]) -> BlocksStored:
    """The event with other names."""
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return BlocksStored(**fields | {"block_hashes": names})


Comparison.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestIndexAgreesWithTheOracle = Comparison.TestCase
