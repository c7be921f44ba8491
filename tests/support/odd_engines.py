"""Engines that publish anything an index may ever be told, in proportions that make things meet.

What an engine does next depends on what it holds, which the oracle's `NaiveRank` knows.
"""

from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Any

from support.naive_index import NaiveRank, Path, event_path

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    GroupKind,
    Tier,
)

WILD_NAMES: list[EngineHash] = [0, 1, 2, 3, 2**63, 2**64 - 1, b"\x00" * 32, b"\xff" * 32]
TRUNKS = [[1] * 24, [1] * 10 + [2] * 14, [1] * 5 + [2] * 19, [2] * 24]
LORAS = [None, None, None, None, "a"]
FIRST_KEYS: list[list[Any] | None] = [None] * 8 + [["s"], [["image", 0]]]
LATER_KEYS: list[list[Any] | None] = [None] * 20 + [[["image", 0]]]
IMAGE = [["image", 0]]


class Naming(Enum):
    """How an engine names blocks.

    BY_CONTENT: as real engines do. SEVERAL: it knows something of them that we don't, so that one
    place has several names. WILD: from a small pool, so that one name comes to mean several places.
    """

    BY_CONTENT = "by content"
    SEVERAL = "several"
    WILD = "wild"


@dataclass(frozen=True)
class GroupShape:
    """A cache group as an engine has it; `weight` is its share of the events."""

    kind: GroupKind
    window: int | None = None
    weight: int = 1


PLAIN = {0: GroupShape(GroupKind.FULL)}
HYBRID = {
    0: GroupShape(GroupKind.SLIDING, 4, weight=3),
    1: GroupShape(GroupKind.FULL, weight=6),
    3: GroupShape(GroupKind.OPAQUE),
    4: GroupShape(GroupKind.SLIDING, 1),
}
TWO_FULL = {0: GroupShape(GroupKind.FULL), 1: GroupShape(GroupKind.FULL)}


@dataclass(frozen=True)
class Traits:
    """What kind of engine it is."""

    naming: Naming
    groups: dict[int, GroupShape]
    tiers: tuple[Tier, ...]
    block_sizes: tuple[int, ...]


def draw_traits(rng: Random) -> Traits:
    """An engine of any kind."""
    return Traits(
        naming=rng.choice(list(Naming)),
        groups=rng.choice([PLAIN, PLAIN, HYBRID, TWO_FULL]),
        tiers=rng.choice([(Tier.GPU,), (Tier.GPU, Tier.GPU, Tier.CPU, Tier.DISK)]),
        block_sizes=rng.choice([(2,), (2,), (2,) * 12 + (1,)]),
    )


class Engine:
    """Publishes events about the blocks of one rank, whose state it sees in the oracle."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits
        self._names: dict[tuple[Path, int], int] = {}

    def next_event(self, state: NaiveRank, rng: Random) -> Event:
        """Something that this engine may say next."""
        kinds = {"store": 10, "evict": 6, "remove": 4, "again": 2, "bare": 1, "clear": 0.3}
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        if kind == "clear":
            return BlocksCleared()
        if kind == "store" or not state.known():
            return self._stored(state, rng)
        tier = rng.choice(self.traits.tiers)
        if kind == "evict":
            tail = self._tail(state, rng)
            return BlocksRemoved(block_hashes=tail, tier=tier, group=self._group(rng)[0])
        names = self._known_names(state, rng)
        if kind == "again":
            return self._stored_again(state, rng, tier)
        if kind == "bare":
            return BlocksStored(block_hashes=names, tier=tier, group=self._group(rng)[0])
        return BlocksRemoved(block_hashes=names, tier=tier, group=self._group(rng)[0])

    def _group(self, rng: Random) -> tuple[int, GroupShape]:
        groups = list(self.traits.groups.items())
        return rng.choices(groups, [shape.weight for _, shape in groups])[0]

    def _known_names(self, state: NaiveRank, rng: Random) -> list[EngineHash]:
        """Some of the names that the rank has, and sometimes one that it has not."""
        known = state.known()
        names = rng.sample(known, min(len(known), rng.randint(1, 3)))
        if rng.random() < 0.2:
            names.insert(rng.randrange(len(names) + 1), rng.choice(WILD_NAMES))
        return names

    def _tail(self, state: NaiveRank, rng: Random) -> list[EngineHash]:
        """The last blocks of some prompt, the last one first, as engines evict."""
        name_of = {state.meaning[name]: name for name in state.known()}
        above = {path[:-1] for path in name_of}
        path = rng.choice([path for path in name_of if path not in above])
        names: list[EngineHash] = []
        while path in name_of and (not names or rng.random() < 0.7):
            names.append(name_of[path])
            path = path[:-1]
        return names

    def _stored_again(self, state: NaiveRank, rng: Random, tier: Tier) -> BlocksStored:
        """One more copy of a block, told with its tokens."""
        name = rng.choice(state.known())
        *behind, (block, extra) = state.meaning[name]
        parents = [other for other in state.known() if state.meaning[other] == tuple(behind)]
        group, shape = self._group(rng)
        event = BlocksStored(
            block_hashes=[name],
            parent=rng.choice(parents) if parents else None,
            token_ids=list(block),
            block_size=len(block),
            tier=tier,
            extra_keys=[IMAGE] if extra else None,
            group=group,
            group_kind=shape.kind,
            sliding_window=shape.window,
        )
        return self._named(state, rng, event)

    def _stored(self, state: NaiveRank, rng: Random) -> BlocksStored:
        parent = self._parent(state, rng)
        size, blocks = rng.choice(self.traits.block_sizes), rng.randint(0, 7)
        trunk = rng.choice(TRUNKS)[: blocks * size]
        tokens = trunk if rng.random() < 0.8 else [rng.randint(1, 2) for _ in trunk]
        group, shape = self._group(rng)
        first = rng.choice(FIRST_KEYS if parent is None else LATER_KEYS)
        event = BlocksStored(
            block_hashes=list(range(blocks)),
            parent=parent,
            token_ids=tokens if rng.random() < 0.98 else tokens[1:],
            block_size=size,
            tier=rng.choice(self.traits.tiers),
            lora_name=rng.choice(LORAS) if parent is None else None,
            extra_keys=[first, *(rng.choice(LATER_KEYS) for _ in range(1, blocks))][:blocks],
            group=group,
            group_kind=shape.kind,
            sliding_window=shape.window,
        )
        return self._named(state, rng, event)

    def _parent(self, state: NaiveRank, rng: Random) -> EngineHash | None:
        known = state.known()
        if rng.random() < 0.02:
            return rng.choice(WILD_NAMES)
        return rng.choice(known) if known and rng.random() < 0.4 else None

    def _named(self, state: NaiveRank, rng: Random, event: BlocksStored) -> BlocksStored:
        """The event with the names that this engine gives to its blocks."""
        blocks = len(event.block_hashes)
        parent = state.meaning.get(event.parent) if event.parent is not None else None
        unknown = event.parent is not None and parent is None
        if self.traits.naming is Naming.WILD or unknown or not blocks:
            return _renamed(event, [rng.choice(WILD_NAMES) for _ in range(blocks)])
        variant = rng.randrange(3) if self.traits.naming is Naming.SEVERAL else 0
        path = event_path(event, parent)
        ends = range(len(path) - blocks + 1, len(path) + 1)
        return _renamed(event, [self._name_of(path[:end], variant) for end in ends])

    def _name_of(self, path: Path, variant: int) -> int:
        return self._names.setdefault((path, variant), 1000 + len(self._names))


def _renamed(event: BlocksStored, names: list[EngineHash]) -> BlocksStored:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return BlocksStored(**fields | {"block_hashes": names})
