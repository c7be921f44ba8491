"""What a relay knows of one rank: enough to hash what comes, and to say it all again. Pure.

Two things need it. A stored block is published with our hash in place of its tokens (a fifth of the
bytes, and the routers need not hash), and that takes the hash of the block before it. And a router
that starts is told the whole state: events that make an empty index equal to one that has heard
everything since the engine's start.

The rules are those of the index (`indexer.holdings`): names have counts per tier and group; the
first full-attention group on the GPU makes prefixes; a name means the place where it was stored
last; a removed block whose successors are still there is a hole, so its hash is kept as long as
there are any.
"""

from collections.abc import Iterator

import msgspec

from events import BlocksCleared, BlocksRemoved, BlocksStored, Event, EventBatch, GroupKind, Tier
from indexer.hashing import HASH_BYTES, chain
from indexer.holdings import pairs_up, to_name, to_names
from indexer.origin import extras, origin

STATE_EVENT_BLOCKS = 256
_GHOST_TIER = Tier.DISK
_UNKNOWN = bytes(HASH_BYTES)
_UNPAIRED = b"?"
"""In place of hashes where names and tokens don't pair up."""


class _Place:
    """A block by its hash: what comes before it, how many places come behind it, its names."""

    __slots__ = ("before", "behind", "names")

    def __init__(self, before: bytes) -> None:
        self.before = before
        self.behind = 0
        self.names: list[int] = []


class _Beside:
    """A group besides the main one: its first event's description, and counts."""

    __slots__ = ("counts", "first")

    def __init__(self, first: BlocksStored) -> None:
        self.first = first
        self.counts: dict[Tier, dict[int, int]] = {}


class RankCopy:
    """One rank's blocks."""

    def __init__(self) -> None:
        self.block_size: int | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self.main_group: int | None = None
        self._places: dict[bytes, _Place] = {}
        self._where: dict[int, bytes] = {}
        self._gpu: dict[int, int] = {}
        """Copies on the GPU where that is not one."""
        self._lower: dict[Tier, dict[int, int]] = {}
        self._beside: dict[int, _Beside] = {}
        self._unpaired = False

    def __len__(self) -> int:
        """Names of main-group blocks."""
        return len(self._where)

    def clear(self) -> None:
        """Forget all blocks."""
        self._forget_all()

    # Following

    def apply(self, batch: EventBatch) -> list[Event]:
        """Take a batch in; what is to be published for it."""
        published: list[Event] = []
        for event in batch.events:
            if isinstance(event, BlocksStored):
                if event.block_hashes:
                    published.append(self._store(event))
            elif isinstance(event, BlocksRemoved):
                published.append(self._remove(event))
            else:
                self.clear()
                published.append(event)
        return published

    def _store(self, event: BlocksStored) -> BlocksStored:
        names = to_names(event.block_hashes)
        if self._is_beside(event):
            self._store_beside(event, names)
            return _described(event, names)
        is_lower = event.tier is not Tier.GPU
        if is_lower and (not event.token_ids or all(name in self._where for name in names)):
            for name in names:
                if name in self._where:
                    self._add_copy(name, event.tier)
            return _described(event, names)
        if not pairs_up(event):
            self._unpaired = True
            return _described(event, names, _UNPAIRED)
        if is_lower and event.block_size != self.block_size:
            return _described(event, names, _UNKNOWN * len(names))
        return _described(event, names, self._store_main(event, names))

    def _is_beside(self, event: BlocksStored) -> bool:
        if event.group == self.main_group:
            return False
        if event.group in self._beside or event.group_kind is not GroupKind.FULL:
            return True
        return self.main_group is not None and event.tier is Tier.GPU

    def _store_beside(self, event: BlocksStored, names: list[int]) -> None:
        beside = self._beside.get(event.group)
        if beside is None:
            beside = self._beside[event.group] = _Beside(_described(event, names[:1]))
        if not _is_opaque(beside.first):
            counts = beside.counts.setdefault(event.tier, {})
            for name in names:
                counts[name] = counts.get(name, 0) + 1

    def _store_main(self, event: BlocksStored, names: list[int]) -> bytes:
        """Place the blocks; their hashes. Zeros where nobody knows what they follow."""
        if event.block_size != self.block_size:
            self._adopt(event.block_size)
        if event.tier is Tier.GPU:
            self.main_group = event.group
        before = origin(event)
        parent = b""
        if event.parent is not None:
            known = self._where.get(to_name(event.parent))
            if known is None:
                return _UNKNOWN * len(names)
            before = parent = known
        hashes = chain(before, event.token_ids, event.block_size, extras(event))
        for at, name in enumerate(names):
            place = hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]
            self._put(name, place, parent)
            self._add_copy(name, event.tier)
            parent = place
        return hashes

    def _adopt(self, block_size: int) -> None:
        beside = {
            group: each
            for group, each in self._beside.items()
            if each.first.block_size == block_size and not _is_opaque(each.first)
        }
        if self.block_size is not None:
            self._forget_all()
            self._beside = beside
        self.block_size = block_size

    def _put(self, name: int, place: bytes, before: bytes) -> None:
        """Make `name` mean this place; a new name has no copies yet."""
        known = self._where.get(name)
        if known == place:
            return
        if known is None:
            self._gpu[name] = 0
        there = self._places.get(place)
        if there is None:
            there = self._places[place] = _Place(before)
            if before:
                self._places[before].behind += 1
        there.names.append(name)
        self._where[name] = place
        if known is not None:
            self._leave(name, known)

    def _leave(self, name: int, place: bytes) -> None:
        """A place has lost a name; places that lead nowhere go."""
        there = self._places[place]
        there.names.remove(name)
        while not there.names and not there.behind:
            del self._places[place]
            place = there.before
            if not place:
                return
            there = self._places[place]
            there.behind -= 1

    def _add_copy(self, name: int, tier: Tier) -> None:
        if tier is Tier.GPU:
            self._set_gpu(name, self._gpu.get(name, 1) + 1)
        else:
            counts = self._lower.setdefault(tier, {})
            counts[name] = counts.get(name, 0) + 1

    def _set_gpu(self, name: int, count: int) -> None:
        if count == 1:
            self._gpu.pop(name, None)
        else:
            self._gpu[name] = count

    def _remove(self, event: BlocksRemoved) -> BlocksRemoved:
        names = to_names(event.block_hashes)
        beside = self._beside.get(event.group)
        for name in names:
            if beside is not None:
                _count_down(beside.counts.get(event.tier, {}), name)
            elif event.tier is not Tier.GPU:
                if _count_down(self._lower.get(event.tier, {}), name):
                    self._forget_if_gone(name)
            elif event.group == self.main_group:
                count = self._gpu.get(name, 1)
                if name in self._where and count:
                    self._set_gpu(name, count - 1)
                    self._forget_if_gone(name)
        return BlocksRemoved(block_hashes=[*names], tier=event.tier, group=event.group)

    def _forget_if_gone(self, name: int) -> None:
        if self._gpu.get(name, 1) or any(name in counts for counts in self._lower.values()):
            return
        self._gpu.pop(name, None)
        self._leave(name, self._where.pop(name))

    # Saying it all again

    def state(self) -> list[Event]:
        """Events that make an empty index know what one that heard everything knows."""
        events: list[Event] = [BlocksCleared()]
        if self.block_size is not None:
            events += self._opening(self.block_size)
        for beside in self._beside.values():
            events += _state_beside(beside)
        ghosts: list[int] = []
        events += self._state_places(ghosts)
        events += self._state_copies(ghosts)
        events += [
            BlocksRemoved(block_hashes=[*part], tier=_GHOST_TIER, group=self._group)
            for part in _portions(ghosts)
        ]
        if self._unpaired:
            events.append(BlocksStored(block_hashes=[0], hashes=_UNPAIRED, group=self._group))
        return events

    @property
    def _group(self) -> int:
        """The main group's number; as long as there is none, one that no other group has."""
        return max(self._beside, default=-1) + 1 if self.main_group is None else self.main_group

    def _opening(self, block_size: int) -> list[Event]:
        """One block that comes and goes: it sets the block size and the main group."""
        store = BlocksStored(
            block_hashes=[0], hashes=_UNKNOWN, block_size=block_size, group=self._group
        )
        if self.main_group is None:
            return [store, BlocksCleared()]
        return [store, BlocksRemoved(block_hashes=[0], group=self._group)]

    def _state_places(self, ghosts: list[int]) -> Iterator[Event]:
        """Each place once, those behind it after it.

        A place whose first name is not on the GPU (a hole, or a block on a lower tier) is stored
        with a copy that goes again at the end: its name is added to `ghosts`.
        """
        behind: dict[bytes, list[bytes]] = {}
        for hash_, place in self._places.items():
            behind.setdefault(place.before, []).append(hash_)
        pending = [(b"", first) for first in behind.get(b"", [])]
        while pending:
            before, hash_ = pending.pop()
            run = [hash_]
            on_gpu = self._is_on_gpu(hash_)
            while len(run) < STATE_EVENT_BLOCKS:
                after = behind.get(run[-1], [])
                if len(after) != 1 or self._is_on_gpu(after[0]) != on_gpu:
                    break
                run.append(after[0])
            pending += [(run[-1], each) for each in behind.get(run[-1], [])]
            names = [self._first_name(each) for each in run]
            yield self._stored(before, names, b"".join(run), on_gpu=on_gpu)
            if not on_gpu:
                ghosts += names

    def _stored(
        self, before: bytes, names: list[int], hashes: bytes, *, on_gpu: bool
    ) -> BlocksStored:
        return BlocksStored(
            block_hashes=[*names],
            parent=self._first_name(before) if before else None,
            hashes=hashes,
            block_size=self.block_size or 0,
            tier=Tier.GPU if on_gpu else _GHOST_TIER,
            group=self._group,
        )

    def _first_name(self, place: bytes) -> int:
        """A name of this place; its own hash where it is a hole."""
        names = self._places[place].names
        return names[0] if names else int.from_bytes(place, "big")

    def _is_on_gpu(self, place: bytes) -> bool:
        names = self._places[place].names
        return bool(names) and bool(self._gpu.get(names[0], 1))

    def _state_copies(self, ghosts: list[int]) -> Iterator[Event]:
        """Further names of places, further copies, and those on lower tiers."""
        for name, place in self._where.items():
            there = self._places[place]
            is_first = there.names[0] == name
            copies = self._gpu.get(name, 1)
            if not is_first and not copies:
                yield self._stored(there.before, [name], place, on_gpu=False)
                ghosts.append(name)
            for _ in range(copies - is_first):
                yield self._stored(there.before, [name], place, on_gpu=True)
        for tier, counts in self._lower.items():
            for names in _by_level(counts):
                yield BlocksStored(block_hashes=[*names], tier=tier, group=self._group)


def _is_opaque(first: BlocksStored) -> bool:
    """Whether nothing follows from a group's blocks."""
    sliding = first.group_kind is GroupKind.SLIDING and first.sliding_window
    return not first.block_size or not (sliding or first.group_kind is GroupKind.FULL)


def _state_beside(beside: _Beside) -> Iterator[Event]:
    if _is_opaque(beside.first):
        yield beside.first
    for tier, counts in beside.counts.items():
        for names in _by_level(counts):
            yield msgspec.structs.replace(
                beside.first, block_hashes=[*names], parent=None, tier=tier
            )


def _by_level(counts: dict[int, int]) -> Iterator[list[int]]:
    """The names with at least one copy, then those with at least two, ... in portions."""
    level = 1
    while names := [name for name, count in counts.items() if count >= level]:
        yield from _portions(names)
        level += 1


def _portions(names: list[int]) -> list[list[int]]:
    return [names[at : at + STATE_EVENT_BLOCKS] for at in range(0, len(names), STATE_EVENT_BLOCKS)]


def _described(event: BlocksStored, names: list[int], hashes: bytes = b"") -> BlocksStored:
    """The event without tokens."""
    return BlocksStored(
        block_hashes=[*names],
        parent=None if event.parent is None else to_name(event.parent),
        block_size=event.block_size,
        tier=event.tier,
        group=event.group,
        group_kind=event.group_kind,
        sliding_window=event.sliding_window,
        hashes=hashes,
    )


def _count_down(counts: dict[int, int], name: int) -> bool:
    """One less; False if there was none."""
    count = counts.get(name, 0)
    if count > 1:
        counts[name] = count - 1
    elif count:
        del counts[name]
    return count > 0
