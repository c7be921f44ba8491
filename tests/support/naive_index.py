"""What an index has to say, in the plainest words: dicts, counters and whole paths, no hashes.

A path is a tuple: the namespace, then one entry per block with its tokens and what else went into
it. Everything that the real index derives from hashes and masks follows here from comparing paths.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from events import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineHash,
    Event,
    GroupKind,
    Tier,
    WorkerRank,
)
from indexer import Overlap

Path: TypeAlias = tuple[Any, ...]
Places: TypeAlias = tuple[Tier, ...]

LEVELS: tuple[Places, ...] = (
    (Tier.GPU,),
    (Tier.GPU, Tier.CPU),
    (Tier.GPU, Tier.CPU, Tier.DISK),
)
MAIN = -1


def prompt_path(
    token_ids: list[int], block_size: int, *, lora: str | None = None, salt: str | None = None
) -> Path:
    """The path of a prompt's full blocks."""
    return (("namespace", lora, salt), *((block, ()) for block in chunks(token_ids, block_size)))


def chunks(token_ids: Sequence[int], block_size: int) -> list[tuple[int, ...]]:
    """The full blocks."""
    usable = len(token_ids) - len(token_ids) % block_size
    return [tuple(token_ids[at : at + block_size]) for at in range(0, usable, block_size)]


def event_path(event: BlocksStored, parent: Path | None) -> Path:
    """The path up to the last block of an event."""
    entries = [list(entry or ()) for entry in event.extra_keys or []]
    entries += [[]] * (len(event.block_hashes) - len(entries))
    entries = [[key for key in entry if key != event.lora_name] for entry in entries]
    if parent is None:
        texts = [key for key in entries[0] if isinstance(key, str)]
        salt = texts[-1] if texts else None
        entries = [[key for key in entry if key != salt] for entry in entries]
        parent = (("namespace", event.lora_name, salt),)
    blocks = chunks(event.token_ids, event.block_size)
    return parent + tuple(
        (block, repr(entry) if entry else ()) for block, entry in zip(blocks, entries, strict=False)
    )


@dataclass
class Group:
    """A cache group besides the main one."""

    window: int | None
    block_size: int


@dataclass
class NaiveRank:
    """One rank: copies of each name per tier and group, and the path that a name means."""

    block_size: int | None = None
    main_group: int | None = None
    groups: dict[int, Group] = field(default_factory=dict)
    opaque: set[int] = field(default_factory=set)
    copies: Counter[tuple[Tier, int, EngineHash]] = field(default_factory=Counter)
    meaning: dict[EngineHash, Path] = field(default_factory=dict)

    def knows(self, name: EngineHash) -> bool:
        return any(self.copies[tier, MAIN, name] for tier in Tier)

    def known(self) -> list[EngineHash]:
        return [name for name in self.meaning if self.knows(name)]

    def gpu_total(self) -> int:
        return sum(count for (tier, _, _), count in self.copies.items() if tier is Tier.GPU)

    def clear(self) -> None:
        self.main_group = None
        self.groups, self.opaque, self.meaning = {}, set(), {}
        self.copies.clear()

    # Events

    def store(self, event: BlocksStored) -> Counter[str]:
        if not event.block_hashes:
            return Counter()
        if self._is_beside_main(event):
            return self._store_beside_main(event)
        if event.tier is not Tier.GPU and (
            not event.token_ids or all(self.knows(name) for name in event.block_hashes)
        ):
            return self._store_known(event)
        if not event.block_size or len(event.token_ids) != event.block_size * len(
            event.block_hashes
        ):
            return Counter(ignored=len(event.block_hashes))
        if event.tier is not Tier.GPU and event.block_size != self.block_size:
            return Counter(ignored=len(event.block_hashes))
        return self._store_main(event)

    def _is_beside_main(self, event: BlocksStored) -> bool:
        if event.group == self.main_group:
            return False
        if event.group in self.groups or event.group in self.opaque:
            return True
        if event.group_kind is not GroupKind.FULL:
            return True
        return self.main_group is not None and event.tier is Tier.GPU

    def _store_beside_main(self, event: BlocksStored) -> Counter[str]:
        if event.group not in self.groups:
            sliding = event.group_kind is GroupKind.SLIDING
            usable = (sliding and event.sliding_window) or event.group_kind is GroupKind.FULL
            if event.group in self.opaque or not usable or not event.block_size:
                self.opaque.add(event.group)
                return Counter(ignored=len(event.block_hashes))
            window = event.sliding_window if sliding else None
            self.groups[event.group] = Group(window, event.block_size)
        for name in event.block_hashes:
            self.copies[event.tier, event.group, name] += 1
        return Counter(stored=len(event.block_hashes))

    def _store_known(self, event: BlocksStored) -> Counter[str]:
        found: Counter[str] = Counter()
        for name in event.block_hashes:
            known = self.knows(name)
            self.copies[event.tier, MAIN, name] += known
            found["stored" if known else "ignored"] += 1
        return found

    def _store_main(self, event: BlocksStored) -> Counter[str]:
        if event.block_size != self.block_size:
            self._adopt(event.block_size)
        if event.tier is Tier.GPU:
            self.main_group = event.group
        parent = None
        if event.parent is not None:
            if not self.knows(event.parent):
                return Counter(orphans=len(event.block_hashes))
            parent = self.meaning[event.parent]
        path = event_path(event, parent)
        start = len(path) - len(event.block_hashes) + 1
        for length, name in enumerate(event.block_hashes, start):
            self.meaning[name] = path[:length]
            self.copies[event.tier, MAIN, name] += 1
        return Counter(stored=len(event.block_hashes))

    def _adopt(self, block_size: int) -> None:
        if self.block_size is not None:
            main, groups = self.main_group, self.groups
            copies = self.copies.copy()
            self.clear()
            self.groups = {at: g for at, g in groups.items() if g.block_size == block_size}
            for (tier, group, name), count in copies.items():
                if group in self.groups and group != main:
                    self.copies[tier, group, name] = count
        self.block_size = block_size

    def remove(self, event: BlocksRemoved) -> Counter[str]:
        if event.group in self.opaque:
            return Counter(ignored=len(event.block_hashes))
        group = event.group if event.group in self.groups else MAIN
        if group == MAIN and event.tier is Tier.GPU and event.group != self.main_group:
            return Counter(unknown=len(event.block_hashes))
        found: Counter[str] = Counter()
        for name in event.block_hashes:
            had = self.copies[event.tier, group, name] > 0
            self.copies[event.tier, group, name] -= had
            found["removed" if had else "unknown"] += 1
        return found

    # Questions

    def overlap(self, prompt: Path) -> Overlap:
        gpu, cpu, disk = (self._usable(prompt, tiers) for tiers in LEVELS)
        return Overlap(gpu, cpu - gpu, disk - cpu)

    def _usable(self, prompt: Path, tiers: Places) -> int:
        leading = 0
        while leading + 1 < len(prompt) and self._holds(prompt, leading, MAIN, tiers):
            leading += 1
        return max(
            length
            for length in range(leading + 1)
            if all(self._has_window(prompt, length, group, tiers) for group in self.groups)
        )

    def _has_window(self, prompt: Path, length: int, group: int, tiers: Places) -> bool:
        kind = self.groups[group]
        if kind.block_size != self.block_size:
            return True
        blocks = length
        if kind.window is not None:
            blocks = -(-(kind.window - 1) // kind.block_size)
        first = max(0, length - blocks)
        return all(self._holds(prompt, at, group, tiers) for at in range(first, length))

    def _holds(self, prompt: Path, position: int, group: int, tiers: Places) -> bool:
        path = prompt[: position + 2]
        names = [name for name, meant in self.meaning.items() if meant == path and self.knows(name)]
        return any(self.copies[tier, group, name] for tier in tiers for name in names)


class NaiveIndex:
    """All ranks."""

    def __init__(self) -> None:
        self.ranks: dict[WorkerRank, NaiveRank] = {}

    def rank(self, rank: WorkerRank) -> NaiveRank:
        return self.ranks.setdefault(rank, NaiveRank())

    def apply(self, rank: WorkerRank, event: Event) -> Counter[str]:
        """Apply one event; says how many blocks met which fate."""
        if isinstance(event, BlocksCleared):
            self.rank(rank).clear()
            return Counter()
        if isinstance(event, BlocksRemoved):
            return self.rank(rank).remove(event)
        return self.rank(rank).store(event)

    def match(self, prompt: Path) -> dict[WorkerRank, Overlap]:
        found = {rank: state.overlap(prompt) for rank, state in self.ranks.items()}
        return {rank: overlap for rank, overlap in found.items() if overlap.total}
